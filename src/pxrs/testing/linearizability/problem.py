"""From operations to a search problem: what must be placed in an order, and what each operation needs and changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from pxrs.errors import PxrsError
from pxrs.testing.linearizability.operations import (
    ABSENT,
    UNSEEN,
    Commit,
    Get,
    Operation,
    describe,
    returned,
)


class Undecided(PxrsError):
    """The search was stopped at `max_steps` without an answer. Raise the bound, or record a shorter history."""

    def __init__(self, max_steps: int) -> None:
        super().__init__(f"no answer within max_steps={max_steps}; raise it, or check a shorter history")
        self.max_steps = max_steps

    def __reduce__(self) -> tuple[type[Undecided], tuple[int]]:
        return type(self), (self.max_steps,)


_Pairs = tuple[tuple[int, int], ...]  # (key number, version)


@dataclass(frozen=True, slots=True)
class Step:
    """One operation over key numbers. `needs` must all hold, for a conflict must not all hold."""

    operation: Operation
    needs: _Pairs
    effect: _Pairs = ()
    is_conflict: bool = False
    flaw: str = ""  # why it fits in no order at all

    def holds(self, state: tuple[int, ...]) -> bool:
        if self.flaw:
            return False
        for key, version in self.needs:
            if state[key] != version:
                return self.is_conflict
        return not self.is_conflict

    def apply(self, state: tuple[int, ...]) -> tuple[int, ...]:
        after = list(state)
        for key, version in self.effect:
            after[key] = version
        return tuple(after)


@dataclass(frozen=True, slots=True)
class Option:
    """An unknown commit with one choice of versions. `excludes` are the options that this one rules out, itself
    among them: a commit happens once, a version belongs to one commit."""

    step: Step
    bit: int
    excludes: int


@dataclass(frozen=True, slots=True)
class Problem:
    keys: list[str]
    steps: list[Step]  # what must be placed, in the order of return; the index is the bit
    reads: list[list[int]]  # per return: steps in flight that change nothing
    writes: list[list[int]]  # per return: the other steps in flight
    observers: dict[tuple[int, int], int]  # (key, version) -> bits of the steps that need it
    options: list[list[Option]]  # interchangeable ones together, in the order of call

    @property
    def has_flaw(self) -> bool:
        return any(step.flaw for step in self.steps)


class Budget:
    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._left = max_steps

    def spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Undecided(self._max_steps)


def partition(history: Iterable[Operation]) -> list[list[Operation]]:
    """The operations by connected keys, without those that say nothing."""
    parent: dict[str, str] = {}

    def root(key: str) -> str:
        parent.setdefault(key, key)
        while parent[key] != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    telling: list[tuple[str, Operation]] = []
    for operation in history:
        if isinstance(operation, Get):
            if operation.ret is not None:
                telling.append((operation.key, operation))
            continue
        keys = sorted(operation.keys)
        for key in keys[1:]:
            parent[root(key)] = root(keys[0])
        # A commit of nothing that conflicted is kept under a key of no one: there is a flaw to report.
        if keys or operation.outcome == "conflict":
            telling.append((keys[0] if keys else "", operation))
    groups: dict[str, list[Operation]] = defaultdict(list)
    for key, operation in telling:
        groups[root(key)].append(operation)
    return list(groups.values())


def compile_problem(operations: list[Operation], budget: Budget) -> Problem:
    required = [op for op in operations if isinstance(op, Get) or op.outcome != "unknown"]
    # What returns at the same time may go in any order: a tie is a matter of the clock's resolution.
    required.sort(key=returned)
    unknown = [op for op in operations if isinstance(op, Commit) and op.outcome == "unknown"]
    unknown = sorted((op for op in unknown if op.put or op.delete), key=lambda op: op.call)
    keys = sorted({key for op in operations for key in ([op.key] if isinstance(op, Get) else op.keys)})
    number = {key: i for i, key in enumerate(keys)}

    ledger = _Ledger(required, unknown)
    steps = [_step(op, number, ledger.flaw(op)) for op in required]
    observers: dict[tuple[int, int], int] = defaultdict(int)
    for i, step in enumerate(steps):
        if not step.flaw and not step.is_conflict:
            for key, version in step.needs:
                if version != ABSENT:
                    observers[key, version] |= 1 << i

    reads: list[list[int]] = []
    writes: list[list[int]] = []
    by_call = sorted(range(len(steps)), key=lambda i: steps[i].operation.call)
    called = 0
    in_flight: list[int] = []
    for i, op in enumerate(required):
        while called < len(by_call) and steps[by_call[called]].operation.call <= returned(op):
            in_flight.append(by_call[called])
            called += 1
        in_flight.sort()
        reads.append([j for j in in_flight if not steps[j].effect])
        writes.append([j for j in in_flight if steps[j].effect])
        in_flight.remove(i)
    return Problem(keys, steps, reads, writes, observers, _options(unknown, number, ledger, budget))


def _step(op: Operation, number: Mapping[str, int], flaw: str) -> Step:
    if isinstance(op, Get):
        return Step(op, ((number[op.key], op.version),), flaw=flaw)
    needs = tuple((number[key], version) for key, version in op.expect.items())
    if op.outcome == "conflict":
        return Step(op, needs, is_conflict=True, flaw=flaw)
    return Step(op, needs, _effect(op, op.versions, number), flaw=flaw)


def _effect(op: Commit, versions: Mapping[str, int], number: Mapping[str, int]) -> _Pairs:
    puts = [(number[key], versions.get(key, UNSEEN)) for key in op.put]
    return tuple(puts + [(number[key], ABSENT) for key in op.delete])


class _Ledger:
    """Who wrote which version of which key, as far as the results alone tell."""

    def __init__(self, required: list[Operation], unknown: list[Commit]) -> None:
        self._owner: dict[tuple[str, int], Commit] = {}
        # Versions that no acknowledged commit returned, so that only an unknown one can have written them;
        # with the value a get saw there, or None when they were only expected.
        self._orphans: dict[str, dict[int, bytes | None]] = defaultdict(dict)
        self._writers: dict[str, list[bytes]] = defaultdict(list)  # values that unknown commits put
        commits = [op for op in required if isinstance(op, Commit)]
        for op in commits:
            for key, version in op.versions.items():
                self._owner.setdefault((key, version), op)
        for op in unknown:
            for key, value in op.put.items():
                self._writers[key].append(value)
        for get in required:
            if isinstance(get, Get) and get.version != ABSENT and (get.key, get.version) not in self._owner:
                self._orphans[get.key].setdefault(get.version, get.value)
        for op in commits + unknown:
            if op.outcome != "conflict":
                for key, version in op.expect.items():
                    if version != ABSENT and (key, version) not in self._owner:
                        self._orphans[key].setdefault(version, None)

    def candidates(self, op: Commit, key: str) -> list[int]:
        """The versions that this unknown commit may have given to the key."""
        value = op.put[key]
        seen = [version for version, what in self._orphans[key].items() if what == value]
        if seen and self._writers[key].count(value) == 1:
            return seen  # nobody else can have written what was read
        return [*seen, *(version for version, what in self._orphans[key].items() if what is None), UNSEEN]

    def flaw(self, op: Operation) -> str:
        """Why the operation fits in no order at all, or an empty text."""
        if isinstance(op, Get):
            return self._flaw_of_get(op)
        if op.outcome == "conflict":
            return "" if op.expect else "it has no expectations, so there is nothing to conflict with"
        if set(op.versions) != set(op.put):
            return f"it put {sorted(op.put)} but returned versions of {sorted(op.versions)}"
        for key, version in op.versions.items():
            if version <= ABSENT:
                return f"{key}@{version} is not a version of something that exists"
            if self._owner[key, version] is not op:
                return f"{key}@{version} is also the version of: {describe(self._owner[key, version])}"
        for key, version in op.expect.items():
            if self._is_unwritten(key, version, None):
                return f"{key}@{version} was written by no commit"
        return ""

    def _flaw_of_get(self, op: Get) -> str:
        if (op.version == ABSENT) != (op.value is None):
            return "it returned a value of an absent key, or no value of an existing one"
        if op.version == ABSENT:
            return ""
        if owner := self._owner.get((op.key, op.version)):
            written = owner.put.get(op.key)
            return "" if written == op.value else f"{op.key}@{op.version} was written as {written!r}"
        if (other := self._orphans[op.key][op.version]) != op.value:
            return f"another get saw {op.key}@{op.version} as {other!r}"
        if self._is_unwritten(op.key, op.version, op.value):
            return f"no commit can have written {op.value!r} as {op.key}@{op.version}"
        return ""

    def _is_unwritten(self, key: str, version: int, value: bytes | None) -> bool:
        if version == ABSENT or (key, version) in self._owner:
            return False
        writers = self._writers[key]
        return not writers if value is None else value not in writers


def _options(
    unknown: list[Commit],
    number: Mapping[str, int],
    ledger: _Ledger,
    budget: Budget,
) -> list[list[Option]]:
    steps: list[Step] = []
    exclude_by_claim: dict[tuple[object, ...], int] = defaultdict(int)
    claims_of: list[list[tuple[object, ...]]] = []
    is_sole: list[bool] = []
    for i, op in enumerate(unknown):
        choices = list(product(*(ledger.candidates(op, key) for key in op.put)))
        for versions in choices:
            budget.spend()
            effect = _effect(op, dict(zip(op.put, versions, strict=True)), number)
            claims: list[tuple[object, ...]] = [
                ("commit", i),
                *(("version", *pair) for pair in effect if pair[1] > ABSENT),
            ]
            for claim in claims:
                exclude_by_claim[claim] |= 1 << len(steps)
            claims_of.append(claims)
            is_sole.append(len(choices) == 1)
            steps.append(Step(op, tuple((number[key], v) for key, v in op.expect.items()), effect))

    # Commits with the same expectations and the same effect are interchangeable, and the one called first is
    # the one to use first; unless using it gives up another choice of versions, or claims one.
    groups: dict[object, list[Option]] = defaultdict(list)
    for i, step in enumerate(steps):
        excludes = 0
        for claim in claims_of[i]:
            excludes |= exclude_by_claim[claim]
        is_plain = is_sole[i] and len(claims_of[i]) == 1
        same: object = (frozenset(step.needs), frozenset(step.effect)) if is_plain else i
        groups[same].append(Option(step, 1 << i, excludes))
    return list(groups.values())
