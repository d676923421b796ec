"""Histories of a store, by hand and by simulation, and a search through all orders that decides small ones.

Correct histories come from a simulated store under random interleavings, by seed. Wrong ones are written by hand, one
for each anomaly, or made by corrupting one result of a correct history so that it cannot be true any more. On small
histories the verdict is compared with an exhaustive search written straight from the model.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from pxrs.testing.linearizability import ABSENT, Commit, Get, Operation


def get(t: tuple[float, float | None], key: str, value: bytes | None, version: int, client: int = 0) -> Get:
    return Get(client=client, call=t[0], ret=t[1], key=key, value=value, version=version)


def commit(t: tuple[float, float | None], outcome: str = "ok", client: int = 0, **fields: Any) -> Commit:
    return Commit(client=client, call=t[0], ret=t[1], outcome=outcome, **fields)  # type: ignore[arg-type]


def put(t: tuple[float, float | None], key: str, value: bytes, version: int, **fields: Any) -> Commit:
    return commit(t, put={key: value}, versions={key: version}, **fields)


def lost(call: float, **fields: Any) -> Commit:
    return commit((call, None), "unknown", **fields)


def exhaustive(history: Sequence[Operation]) -> bool:
    unknown = [op for op in history if isinstance(op, Commit) and op.outcome == "unknown"]
    required = [op for op in history if op.ret is not None and op not in unknown]
    mentioned: dict[str, set[int]] = {}
    for op in history:
        pairs = [(op.key, op.version)] if isinstance(op, Get) else [*op.expect.items(), *op.versions.items()]
        for key, version in pairs:
            mentioned.setdefault(key, set()).add(version)

    def fresh(n: int, key: str) -> list[int]:
        """Versions the n-th unknown commit may get: any mentioned one, or one of its own."""
        return [*(mentioned.get(key, set()) - {ABSENT}), 1_000_000 + n]

    State = dict[str, tuple[bytes, int]]

    def current(state: State, key: str) -> int:
        return state[key][1] if key in state else ABSENT

    def apply(op: Commit, versions: dict[str, int], state: State, past: frozenset[Any]) -> Any:
        if set(versions) != set(op.put) or past & set(versions.items()):
            return None
        if any(version <= ABSENT for version in versions.values()):
            return None
        after = {key: entry for key, entry in state.items() if key not in op.delete}
        after |= {key: (value, versions[key]) for key, value in op.put.items()}
        return after, past | set(versions.items())

    def place(rest: list[Operation], spare: list[Commit], state: State, past: frozenset[Any]) -> bool:
        if not rest:
            return True
        deadline = min(op.ret for op in rest if op.ret is not None)
        for op in rest:
            if op.call > deadline:
                continue
            others = [other for other in rest if other is not op]
            after: Any = (state, past)
            if isinstance(op, Get):
                if (op.value, op.version) != state.get(op.key, (None, ABSENT)):
                    continue
            else:
                held = all(current(state, key) == version for key, version in op.expect.items())
                if held != (op.outcome == "ok"):
                    continue
                if op.outcome == "ok":
                    after = apply(op, dict(op.versions), state, past)
            if after is not None and place(others, spare, *after):
                return True
        for op in spare:
            if op.call > deadline or any(current(state, key) != v for key, v in op.expect.items()):
                continue
            others_spare = [other for other in spare if other is not op]
            for versions in product(*(fresh(unknown.index(op), key) for key in op.put)):
                after = apply(op, dict(zip(op.put, versions, strict=True)), state, past)
                if after is not None and place(rest, others_spare, *after):
                    return True
        return False

    return place(required, unknown, {}, frozenset())


class Simulation:
    """A correct store, and clients whose calls take effect at a random moment between call and return."""

    def __init__(self, seed: int, clients: int, keys: str, lost_share: float = 0.0, values: int = 0) -> None:
        self.rng = random.Random(seed)
        self.keys = list(keys)
        self.lost_share = lost_share
        self.values = values  # how many different values there are; 0: every put has its own
        self.state: dict[str, tuple[bytes, int]] = {}
        self.seen: list[dict[str, int]] = [{} for _ in range(clients)]
        self.in_flight: list[Operation | None] = [None] * clients
        self.applied: list[Operation | None] = [None] * clients
        self.late: list[Commit] = []
        self.history: list[Operation] = []
        self.versions = {key: random.Random(f"{seed}{key}").sample(range(1, 10**6), 3000) for key in keys}
        self.count = 0

    def run(self, operations: int) -> list[Operation]:
        now = 0.0
        called = 0
        while called < operations or any(self.in_flight):
            now += 1.0
            if self.late and self.rng.random() < 0.05:
                self.apply(self.late.pop(self.rng.randrange(len(self.late))))
            client = self.rng.randrange(len(self.in_flight))
            op, done = self.in_flight[client], self.applied[client]
            if op is None:
                if called < operations:
                    called += 1
                    self.call(client, now)
            elif done is None:
                self.applied[client] = self.apply(op)
            else:
                self.finish(client, replace(done, ret=now))
        return self.history

    def call(self, client: int, now: float) -> None:
        op = self.choose(client, now)
        if isinstance(op, Commit) and self.rng.random() < self.lost_share:
            self.history.append(op)
            if self.rng.random() < 0.6:
                self.late.append(op)
        else:
            self.in_flight[client] = op

    def choose(self, client: int, now: float) -> Operation:
        rng = self.rng
        keys = rng.sample(self.keys, min(len(self.keys), rng.choice((1, 1, 2))))
        if rng.random() < 0.4:
            return get((now, None), keys[0], None, 0, client)
        self.count += 1
        number = rng.randrange(self.values) if self.values else self.count
        value = f"{number}".encode()
        expect = {key: self.seen[client].get(key, ABSENT) for key in keys} if rng.random() < 0.75 else {}
        deleted = tuple(keys[:1]) if rng.random() < 0.15 else ()
        written = [key for key in keys if key not in deleted]
        if expect and rng.random() < 0.2:
            written = written[1:]
        return lost(now, expect=expect, put=dict.fromkeys(written, value), delete=deleted, client=client)

    def apply(self, op: Operation) -> Operation:
        if isinstance(op, Get):
            value, version = self.state.get(op.key, (None, ABSENT))
            return replace(op, value=value, version=version)
        now = {key: self.state[key][1] if key in self.state else ABSENT for key in op.expect}
        if now != op.expect:
            return replace(op, outcome="conflict", ret=op.call)
        versions = {key: self.versions[key].pop() for key in op.put}
        for key, value in op.put.items():
            self.state[key] = (value, versions[key])
        for key in op.delete:
            self.state.pop(key, None)
        return replace(op, outcome="ok", versions=versions, ret=op.call)

    def finish(self, client: int, op: Operation) -> None:
        self.in_flight[client] = self.applied[client] = None
        self.history.append(op)
        if isinstance(op, Get):
            self.seen[client][op.key] = op.version
        elif op.outcome == "ok":
            self.seen[client] |= dict(op.versions) | dict.fromkeys(op.delete, ABSENT)
        else:
            for key in op.expect:
                self.seen[client].pop(key, None)


def simulate(seed: int, clients: int, operations: int, keys: str = "abc", **options: Any) -> list[Operation]:
    return Simulation(seed, clients, keys, **options).run(operations)
