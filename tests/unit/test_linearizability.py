"""The checker must accept every history of a correct store, and no other.

Correct histories come from a simulated store under random interleavings, by seed. Wrong ones are written by hand,
one per anomaly, or made by corrupting one result of a correct history so that it cannot be true any more. On small
histories the verdict is compared with an exhaustive search written straight from the model.
"""

import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from pxrs.testing.linearizability import ABSENT, Commit, Get, Operation, Undecided, check, dump, load

# --- histories by hand: times are small integers, `t=(call, ret)` ---


def get(t: tuple[float, float | None], key: str, value: bytes | None, version: int, client: int = 0) -> Get:
    return Get(client=client, call=t[0], ret=t[1], key=key, value=value, version=version)


def commit(t: tuple[float, float | None], outcome: str = "ok", client: int = 0, **fields: Any) -> Commit:
    return Commit(client=client, call=t[0], ret=t[1], outcome=outcome, **fields)  # type: ignore[arg-type]


def put(t: tuple[float, float | None], key: str, value: bytes, version: int, **fields: Any) -> Commit:
    return commit(t, put={key: value}, versions={key: version}, **fields)


def lost(call: float, **fields: Any) -> Commit:
    return commit((call, None), "unknown", **fields)


def assert_accepts(*history: Operation) -> None:
    verdict = check(history)
    assert verdict.ok, verdict.explanation
    assert exhaustive(history)


def assert_rejects(*history: Operation) -> str:
    verdict = check(history)
    assert not verdict.ok
    assert verdict.stuck
    assert not exhaustive(history)
    return verdict.explanation


# --- the model, tried in every order: slow, and simple enough to be believed ---


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


# --- histories by simulation ---


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


# --- what a correct store may do ---


def test_r1_nothing_is_linearizable() -> None:
    assert_accepts()


def test_r1_calls_one_after_the_other_see_each_other() -> None:
    assert_accepts(
        get((0, 1), "a", None, 0),
        put((2, 3), "a", b"1", 7, expect={"a": ABSENT}),
        get((4, 5), "a", b"1", 7),
        commit((6, 7), expect={"a": 7}, delete=("a",)),
        get((8, 9), "a", None, 0),
        commit((10, 11), delete=("a",)),
        put((12, 13), "a", b"2", 3, expect={"a": ABSENT}),  # versions need not grow
        commit((14, 15), "conflict", expect={"a": 7}),
        commit((16, 17), expect={"a": 3}),
    )


def test_r1_overlapping_calls_may_go_in_either_order() -> None:
    write = put((0, 10), "a", b"1", 1)
    assert_accepts(write, get((1, 2), "a", None, 0), get((3, 4), "a", b"1", 1), get((5, 6), "a", b"1", 1))
    assert_accepts(write, get((1, 2), "a", b"1", 1))
    assert_accepts(write, get((1, 2), "a", None, 0))


def test_r1_a_tie_on_the_clock_is_an_overlap() -> None:
    assert_accepts(put((0, 5), "a", b"1", 1), get((5, 6), "a", None, 0))


def test_r1_a_get_that_never_returned_says_nothing() -> None:
    assert check([get((0, None), "a", b"never written", 9)]).ok


def test_r1_keys_that_no_commit_connects_are_judged_apart() -> None:
    verdict = check([put((0, 1), "a", b"1", 1), put((0, 1), "b", b"1", 1), get((2, 3), "b", None, 0)])
    assert not verdict.ok
    assert "keys b;" in verdict.explanation


@pytest.mark.parametrize("seed", range(40))
def test_r1_histories_of_a_correct_store_are_accepted(seed: int) -> None:
    history = simulate(seed, clients=2 + seed % 5, operations=150)
    verdict = check(history, max_steps=5_000)
    assert verdict.ok, verdict.explanation


@pytest.mark.parametrize("seed", range(40))
def test_r5_histories_of_a_correct_store_with_lost_replies_are_accepted(seed: int) -> None:
    share = (0.02, 0.1, 0.3)[seed % 3]
    values = (0, 0, 4)[seed % 3]
    history = simulate(seed, clients=2 + seed % 5, operations=120, lost_share=share, values=values)
    verdict = check(history, max_steps=100_000)
    assert verdict.ok, verdict.explanation


@pytest.mark.parametrize("lost_share", [0.0, 0.02])
def test_r1_a_thousand_contended_operations_are_decided_in_few_steps(lost_share: float) -> None:
    history = simulate(1, clients=5, operations=1000, lost_share=lost_share)
    verdict = check(history, max_steps=20_000)
    assert verdict.ok, verdict.explanation


# --- what it may not ---


def test_r1_a_stale_read_is_rejected() -> None:
    text = assert_rejects(
        put((0, 1), "a", b"1", 1), put((2, 3), "a", b"2", 2, client=1), get((4, 5), "a", b"1", 1, client=2)
    )
    assert "still to be observed by: client 2 [4.000000, 5.000000] get a -> b'1' @1" in text


def test_r1_a_read_that_goes_back_is_rejected() -> None:
    assert_rejects(
        put((0, 10), "a", b"1", 1),
        get((1, 2), "a", b"1", 1, client=1),
        get((3, 4), "a", None, 0, client=2),
    )


def test_r1_a_read_from_the_future_is_rejected() -> None:
    assert_rejects(get((0, 1), "a", b"1", 1), put((2, 3), "a", b"1", 1))


def test_r1_a_lost_update_is_rejected() -> None:
    first = put((0, 1), "a", b"0", 1)
    assert_rejects(
        first,
        put((2, 9), "a", b"1", 2, expect={"a": 1}, client=1),
        put((2, 9), "a", b"2", 3, expect={"a": 1}, client=2),
    )


def test_r7_write_skew_on_absent_keys_is_rejected() -> None:
    expect = {"a": ABSENT, "b": ABSENT}
    assert_rejects(
        put((0, 9), "a", b"1", 1, expect=expect, client=1), put((0, 9), "b", b"2", 2, expect=expect, client=2)
    )


def test_r1_a_torn_commit_is_rejected() -> None:
    both = commit((0, 9), put={"a": b"1", "b": b"1"}, versions={"a": 1, "b": 1})
    seen = get((1, 2), "a", b"1", 1, client=1)
    assert_accepts(both, seen, get((3, 4), "b", b"1", 1, client=1))
    assert_rejects(both, seen, get((3, 4), "b", None, 0, client=1))


def test_r1_a_conflict_that_no_state_justifies_is_rejected() -> None:
    first = put((0, 1), "a", b"1", 1)
    conflict = commit((2, 5), "conflict", expect={"a": 1}, client=1)
    text = assert_rejects(first, conflict)
    assert "every expectation holds" in text
    assert_rejects(first, commit((2, 5), "conflict", put={"a": b"2"}, client=1))
    assert_rejects(first, conflict, put((6, 7), "a", b"2", 2))
    assert_accepts(first, conflict, put((4, 7), "a", b"2", 2))


def test_r1_a_commit_of_nothing_cannot_conflict() -> None:
    assert_rejects(commit((0, 1), "conflict"))


def test_r1_an_acknowledged_commit_that_vanished_is_rejected() -> None:
    text = assert_rejects(put((0, 1), "a", b"1", 1), get((2, 3), "a", None, 0, client=1))
    assert "a is @1, not absent" in text
    assert_rejects(
        put((0, 1), "a", b"1", 1),
        commit((2, 3), expect={"a": 1}, delete=("a",)),
        get((4, 5), "a", b"1", 1, client=1),
    )


def test_r1_a_reused_version_is_rejected() -> None:
    text = assert_rejects(
        put((0, 1), "a", b"1", 7),
        commit((2, 3), delete=("a",)),
        put((4, 5), "a", b"2", 7, client=3),
    )
    assert "a@7 is also the version of: client 0" in text
    assert_rejects(put((0, 1), "a", b"1", 7), lost(2, put={"a": b"2"}), get((4, 5), "a", b"2", 7))


def test_r1_an_ok_commit_whose_expectation_never_held_is_rejected() -> None:
    assert_rejects(put((0, 1), "a", b"1", 1), put((2, 3), "a", b"2", 2, expect={"a": 5}))
    assert_rejects(put((0, 1), "a", b"1", 1), commit((2, 3), expect={"a": ABSENT}))


@pytest.mark.parametrize("versions", [{}, {"a": 0}, {"a": -3}, {"a": 1, "b": 2}])
def test_r1_an_ok_commit_must_return_the_versions_of_what_it_put(versions: dict[str, int]) -> None:
    assert_rejects(commit((0, 1), put={"a": b"1"}, versions=versions))


@pytest.mark.parametrize(("value", "version"), [(None, 1), (b"1", 0), (b"other", 1), (b"1", 2)])
def test_r1_a_get_must_report_value_and_version_as_written(value: bytes | None, version: int) -> None:
    assert_rejects(put((0, 1), "a", b"1", 1), get((2, 3), "a", value, version))


# --- unknown outcomes ---


def test_r5_an_unknown_commit_may_never_happen() -> None:
    assert_accepts(lost(0, put={"a": b"1"}), get((1, 2), "a", None, 0), get((3, 4), "a", None, 0))


def test_r5_an_unknown_commit_may_land_late() -> None:
    late = lost(0, put={"a": b"1"})
    assert_accepts(late, get((1, 2), "a", None, 0), get((3, 4), "a", b"1", 5), get((5, 6), "a", b"1", 5))
    # An unknown outcome that was told at some time does not end the commit then.
    assert_accepts(replace(late, ret=0.5), get((1, 2), "a", None, 0), get((3, 4), "a", b"1", 5))


def test_r5_an_unknown_commit_does_not_happen_before_its_call() -> None:
    assert_rejects(get((0, 1), "a", b"1", 5), lost(2, put={"a": b"1"}))


def test_r5_an_unknown_commit_that_was_seen_and_vanished_is_rejected() -> None:
    late = lost(0, put={"a": b"1"})
    assert_rejects(late, get((1, 2), "a", b"1", 5), get((3, 4), "a", None, 0))


def test_r5_an_unknown_commit_happens_once() -> None:
    late = lost(0, put={"a": b"1"})
    gone = commit((3, 4), delete=("a",))
    assert_rejects(late, get((1, 2), "a", b"1", 5), gone, get((5, 6), "a", b"1", 6))
    assert_rejects(late, get((1, 2), "a", b"1", 5), gone, get((5, 6), "a", b"1", 5))


def test_r5_an_unknown_commit_has_one_version() -> None:
    assert_rejects(lost(0, put={"a": b"1"}), get((1, 2), "a", b"1", 5), get((3, 4), "a", b"1", 6))


def test_r5_an_unknown_commit_is_not_torn() -> None:
    late = lost(0, put={"a": b"1", "b": b"1"})
    assert_accepts(late, get((1, 2), "a", b"1", 5), get((3, 4), "b", b"1", 6))
    assert_rejects(late, get((1, 2), "a", b"1", 5), get((3, 4), "b", None, 0))


def test_r5_an_unknown_commit_needs_its_expectations() -> None:
    first = put((0, 1), "a", b"0", 1)
    assert_accepts(first, lost(2, expect={"a": 1}, put={"a": b"1"}), get((3, 4), "a", b"1", 5))
    assert_rejects(first, lost(2, expect={"a": ABSENT}, put={"a": b"1"}), get((3, 4), "a", b"1", 5))


def test_r5_an_expectation_can_be_the_first_to_tell_an_unknown_version() -> None:
    late = lost(0, put={"a": b"1"})
    follow = put((1, 2), "a", b"2", 9, expect={"a": 5})
    assert_accepts(late, follow)
    assert_accepts(late, follow, get((3, 4), "a", b"2", 9))
    assert_rejects(late, follow, put((3, 4), "a", b"3", 10, expect={"a": 6}))
    assert_rejects(late, follow, get((3, 4), "a", b"1", 5))
    assert_rejects(late, commit((1, 2), expect={"a": 5}), commit((3, 4), expect={"a": 6}))


def test_r5_an_unseen_unknown_commit_can_justify_a_conflict() -> None:
    first = put((0, 1), "a", b"1", 1)
    conflict = commit((3, 4), "conflict", expect={"a": 1})
    assert_accepts(first, lost(2, put={"a": b"2"}), conflict)
    assert_accepts(first, lost(2, delete=("a",)), conflict)
    # Once in effect it stays so: the old version cannot come back after the conflict.
    assert_rejects(first, lost(2, put={"a": b"2"}), conflict, get((5, 6), "a", b"1", 1))
    assert_rejects(first, lost(2, put={"b": b"2"}), conflict)
    assert_rejects(first, lost(5, put={"a": b"2"}), conflict)


def test_r5_a_conflict_is_no_proof_of_the_version_it_expected() -> None:
    late = lost(0, put={"a": b"1"})
    conflict = commit((1, 2), "conflict", expect={"a": 5})
    assert_accepts(late, conflict, get((3, 4), "a", b"1", 5))  # it came after the conflict
    assert_accepts(late, get((1, 2), "a", b"1", 6), commit((3, 4), "conflict", expect={"a": 5}))
    assert_rejects(late, get((1, 2), "a", b"1", 5), commit((3, 4), "conflict", expect={"a": 5}))


def test_r5_equal_values_of_two_unknown_commits_are_told_apart_by_version() -> None:
    twins = [lost(0, put={"a": b"1"}), lost(0, put={"a": b"1"}, client=1)]
    gone = commit((3, 4), delete=("a",))
    assert_accepts(*twins, get((1, 2), "a", b"1", 5), gone, get((5, 6), "a", b"1", 6))
    assert_rejects(*twins, get((1, 2), "a", b"1", 5), gone, get((5, 6), "a", b"1", 5))
    assert_rejects(*twins, *(get((n, n + 0.5), "a", b"1", n) for n in (1, 2, 3)))


def test_r5_one_of_two_equal_unknown_commits_may_stay_unseen() -> None:
    twins = [lost(0, put={"a": b"1"}), lost(0, put={"a": b"1"}, client=1)]
    over = put((3, 4), "a", b"2", 9)
    conflict = commit((5, 6), "conflict", expect={"a": 9})
    assert_accepts(*twins, get((1, 2), "a", b"1", 5), over, conflict)
    assert_rejects(twins[0], get((1, 2), "a", b"1", 5), over, conflict)
    # The second twin cannot have the version of the first, so the delete that expects it cannot land any more.
    remove = lost(0, expect={"a": 5}, delete=("a",), client=2)
    seen: list[Operation] = [get((1, 2), "a", b"1", 5), over, get((5, 6), "a", b"2", 9)]
    assert_rejects(*twins, remove, *seen, get((7, 8), "a", None, 0))


def test_r5_the_unknown_commit_that_is_used_is_the_one_that_can_be_spared() -> None:
    first = put((1, 2), "a", b"0", 1)
    conflict = commit((3, 4), "conflict", expect={"a": 1})
    assert_accepts(
        lost(0, put={"a": b"1"}),
        lost(0.5, put={"a": b"2"}),
        lost(100, put={"a": b"1"}),
        first,
        conflict,  # due to b"2", or else b"1" could not come after b"3"
        put((4.3, 4.6), "a", b"3", 2),
        get((5, 6), "a", b"1", 5),
    )
    # Of two with the same effect, only one has expectations that hold.
    second = put((2.3, 2.6), "a", b"0", 2)
    late = commit((3, 4), "conflict", expect={"a": 2})
    assert_accepts(lost(0, expect={"a": 1}, put={"a": b"1"}), lost(0.5, put={"a": b"1"}), first, second, late)


# --- one corrupted result ---

Corruption = Callable[[random.Random, list[Operation]], tuple[Operation, Operation | None] | None]


def acknowledged(history: list[Operation]) -> list[Commit]:
    return [op for op in history if isinstance(op, Commit) and op.outcome == "ok"]


def gets(history: list[Operation]) -> list[Get]:
    return [op for op in history if isinstance(op, Get)]


def before(one: Operation, other: Operation) -> bool:
    return one.ret is not None and one.ret < other.call


def pick(rng: random.Random, found: list[tuple[Operation, Operation | None]]) -> Any:
    return rng.choice(found) if found else None


def corrupt_value(rng: random.Random, history: list[Operation]) -> Any:
    return pick(rng, [(op, replace(op, value=b"never")) for op in gets(history) if op.version])


def corrupt_version(rng: random.Random, history: list[Operation]) -> Any:
    told = {(key, version) for op in acknowledged(history) for key, version in op.versions.items()}
    seen = [op for op in gets(history) if (op.key, op.version) in told]
    return pick(rng, [(op, replace(op, version=10**9)) for op in seen])


def read_what_was_overwritten(rng: random.Random, history: list[Operation]) -> Any:
    found: list[tuple[Operation, Operation | None]] = []
    for op in gets(history):
        writes = [c for c in acknowledged(history) if op.key in c.put and before(c, op)]
        for write in writes:
            if any(before(write, later) for later in writes):
                stale = replace(op, value=write.put[op.key], version=write.versions[op.key])
                found.append((op, stale))
    return pick(rng, found)


def read_what_is_to_come(rng: random.Random, history: list[Operation]) -> Any:
    found: list[tuple[Operation, Operation | None]] = []
    for op in gets(history):
        for write in acknowledged(history):
            if op.key in write.put and before(op, write):
                found.append((op, replace(op, value=write.put[op.key], version=write.versions[op.key])))
    return pick(rng, found)


def reuse_version(rng: random.Random, history: list[Operation]) -> Any:
    found: list[tuple[Operation, Operation | None]] = []
    for op in acknowledged(history):
        for other in acknowledged(history):
            for key in set(op.put) & set(other.put) if op is not other else ():
                found.append((op, replace(op, versions={**op.versions, key: other.versions[key]})))
    return pick(rng, found)


def accept_what_conflicted(rng: random.Random, history: list[Operation]) -> Any:
    """Only where an expected version was overwritten for good before the call."""
    found: list[tuple[Operation, Operation | None]] = []
    for op in history:
        if not isinstance(op, Commit) or op.outcome != "conflict":
            continue
        for key, version in op.expect.items():
            writers = [c for c in acknowledged(history) if version and c.versions.get(key) == version]
            later = [c for c in acknowledged(history) if key in c.put and before(c, op)]
            if any(before(writer, one) for writer in writers for one in later):
                versions = {key: 10**9 + n for n, key in enumerate(op.put)}
                found.append((op, replace(op, outcome="ok", versions=versions)))
                break
    return pick(rng, found)


def observed(op: Commit, history: list[Operation]) -> bool:
    """By a get: a version that was only expected might as well be that of an unknown commit."""
    return any((other.key, other.version) in op.versions.items() for other in gets(history))


def deny_what_was_observed(rng: random.Random, history: list[Operation]) -> Any:
    seen = [op for op in acknowledged(history) if observed(op, history)]
    return pick(rng, [(op, replace(op, outcome="conflict", versions={})) for op in seen])


def forget_what_was_observed(rng: random.Random, history: list[Operation]) -> Any:
    return pick(rng, [(op, None) for op in acknowledged(history) if observed(op, history)])


@pytest.mark.parametrize("lost_share", [0.0, 0.05], ids=["", "lost-replies"])
@pytest.mark.parametrize(
    "corruption",
    [
        corrupt_value,
        corrupt_version,
        read_what_was_overwritten,
        read_what_is_to_come,
        reuse_version,
        accept_what_conflicted,
        deny_what_was_observed,
        forget_what_was_observed,
    ],
)
def test_r1_one_corrupted_result_is_rejected(corruption: Corruption, lost_share: float) -> None:
    tried = 0
    for seed in range(10):
        history = simulate(seed, clients=4, operations=80, lost_share=lost_share)
        found = corruption(random.Random(seed), history)
        if found is None:
            continue
        tried += 1
        old, new = found
        wrong = [new if op is old else op for op in history]
        verdict = check([op for op in wrong if op is not None], max_steps=100_000)
        assert not verdict.ok, f"SEED={seed}: {old} became {new}"
        assert verdict.explanation.startswith("not linearizable")
    assert tried >= 5


# --- against the exhaustive search ---


def scramble(rng: random.Random, history: list[Operation]) -> list[Operation]:
    """Change something small, which may or may not make the history wrong."""
    history = list(history)
    for _ in range(rng.choice((0, 1, 1, 2))):
        i = rng.randrange(len(history))
        op = history[i]
        other = rng.choice(history)
        roll = rng.random()
        if roll < 0.3:
            start = max(0.0, op.call + rng.uniform(-6, 3))
            history[i] = replace(op, call=start, ret=None if op.ret is None else max(start, op.ret))
        elif isinstance(op, Get):
            source = rng.choice([o for o in history if isinstance(o, Get)])
            history[i] = replace(op, value=source.value, version=source.version)
        elif roll < 0.6 and op.ret is not None:
            history[i] = replace(op, outcome="unknown", versions={}, ret=None)
        elif roll < 0.8 and op.outcome == "ok":
            history[i] = replace(op, outcome="conflict", versions={})
        elif isinstance(other, Commit) and set(other.versions) == set(op.versions) and op.outcome == "ok":
            history[i] = replace(op, versions=other.versions)
        else:
            del history[i]
            if not history:
                return []
    return history


def test_r1_r5_small_histories_get_the_verdict_of_an_exhaustive_search() -> None:
    verdicts = {True: 0, False: 0}
    for seed in range(800):
        rng = random.Random(f"scramble {seed}")
        clean = simulate(seed, 3, 7, keys="ab", lost_share=rng.choice((0, 0.3)), values=rng.choice((0, 2)))
        history = scramble(rng, clean)
        expected = exhaustive(history)
        verdicts[expected] += 1
        assert check(history).ok == expected, f"SEED={seed}\n{dump(history)}"
    assert min(verdicts.values()) > 100, verdicts


# --- the rest of the interface ---


def test_the_verdict_holds_the_longest_prefix_and_what_cannot_be_placed() -> None:
    good: list[Operation] = [put((0, 1), "a", b"1", 1), get((2, 3), "a", b"1", 1)]
    bad = get((4, 5), "a", b"2", 2, client=8)
    verdict = check([*good, bad, get((6, 7), "a", b"1", 1)])
    assert verdict.prefix[:2] == tuple(good)
    assert verdict.stuck == (bad,)
    assert "client 8 [4.000000, 5.000000] get a -> b'2' @2" in verdict.explanation
    assert "no commit can have written b'2' as a@2" in verdict.explanation


def test_an_operation_that_fits_nowhere_does_not_hold_up_the_others() -> None:
    bad = get((4, 5), "a", b"other", 1)
    verdict = check([put((0, 1), "a", b"1", 1), put((2, 3), "a", b"2", 2), bad])
    assert len(verdict.prefix) == 2
    assert verdict.stuck == (bad,)


def test_an_endless_search_is_undecided_rather_than_wrong() -> None:
    history: list[Operation] = [put((0, 100), "a", b"%d" % n, n, client=n) for n in range(1, 13)]
    history.append(commit((101, 102), expect={"a": ABSENT}))
    with pytest.raises(Undecided, match="max_steps=500") as caught:
        check(history, max_steps=500)
    assert pickle.loads(pickle.dumps(caught.value)).max_steps == 500


def test_an_operation_that_fits_nowhere_is_an_answer_even_past_the_bound() -> None:
    history: list[Operation] = [put((0, 100), "a", b"%d" % n, n, client=n) for n in range(1, 13)]
    history.append(commit((0, 99), expect={"a": ABSENT}, put={"a": b"0"}))
    assert not check(history, max_steps=5).ok


def test_a_history_survives_json_and_pickle() -> None:
    history = simulate(3, clients=3, operations=60, lost_share=0.1)
    history.append(get((0.1, 0.30000000000000004), "k/\u00e9 \n", bytes(range(256)), 2**70))
    assert load(dump(history)) == history
    assert pickle.loads(pickle.dumps(history)) == history
    assert len(dump(history).splitlines()) == len(history)


def test_operations_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="before its call"):
        get((2, 1), "a", None, 0)
    with pytest.raises(ValueError, match="never returned"):
        commit((0, None), "ok")
    with pytest.raises(ValueError, match="none of"):
        commit((0, 1), "maybe")
    with pytest.raises(ValueError, match="both put and deleted"):
        commit((0, 1), put={"a": b""}, delete=("a",), versions={"a": 1})
