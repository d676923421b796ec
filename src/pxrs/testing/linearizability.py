"""Is a recorded history of a versioned key-value store linearizable?

The problem: several clients called `get` and `commit` at the same time, and each call took from `call` to
`ret`. The store is linearizable (R1) when every call can be given one instant inside its interval such that
the calls, performed one after the other at those instants, give the results that were recorded. Trying all
orders is exponential; this is the search of Wing and Gong as improved by Lowe: walk over the returns in order
of time, place operations only when a return forces it, and remember the (placed operations, state) pairs that
led nowhere.

The model is a mapping from key to (value, version):

- a `Get` reports exactly the state at its instant (version 0: absent);
- an `ok` commit found every expectation true, and gave each key it put a version which that key never had;
- a `conflict` found at least one expectation false, and changed nothing;
- an `unknown` commit (R5) happened at any instant after its call, even long after, or never. Its versions were
  not told; the first one observed becomes its own.

Four facts keep the search small, and none of them loses a linearization:

- A version of a key belongs to one commit. So the state is versions alone (the values are compared once, before
  the search), and a version still to be observed by somebody must not be overwritten: it never comes back.
- What changes nothing (a get, a conflict, a commit that only expects) is placed at the first instant it fits.
- An unknown commit is tried once per version it may have got: those observed with its value, or one that nobody
  ever saw. Of two ways to the same state, the one that used fewer unknown commits is at least as good.
- Groups of keys that no commit connects are independent objects, and are checked one by one.

Nothing here does I/O or reads a clock.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from pxrs.errors import PxrsError

ABSENT = 0
"""The version of a key that does not exist."""

# The version of an unknown commit that nobody ever observed. It equals no version in the history.
_UNSEEN = -1

Outcome = Literal["ok", "conflict", "unknown"]


class Undecided(PxrsError):
    """The search was stopped at `max_steps` without an answer. Raise the bound, or record a shorter history."""

    def __init__(self, max_steps: int) -> None:
        super().__init__(f"no answer within max_steps={max_steps}; raise it, or check a shorter history")
        self.max_steps = max_steps

    def __reduce__(self) -> tuple[type["Undecided"], tuple[int]]:
        return type(self), (self.max_steps,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Get:
    """A read of one key. `ret=None`: it never returned, and says nothing."""

    client: int
    call: float
    ret: float | None
    key: str
    value: bytes | None = None
    version: int = ABSENT

    def __post_init__(self) -> None:
        _require_order(self.call, self.ret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A compare-and-commit. `versions` are those returned, for the keys in `put`, when the outcome is ok."""

    client: int
    call: float
    ret: float | None
    expect: Mapping[str, int] = field(default_factory=dict)
    put: Mapping[str, bytes] = field(default_factory=dict)
    delete: tuple[str, ...] = ()
    outcome: Outcome = "ok"
    versions: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_order(self.call, self.ret)
        if self.outcome not in ("ok", "conflict", "unknown"):
            raise ValueError(f"outcome {self.outcome!r} is none of ok, conflict, unknown")
        if self.ret is None and self.outcome != "unknown":
            raise ValueError(f"a commit that never returned has outcome unknown, not {self.outcome}")
        if both := set(self.put) & set(self.delete):
            raise ValueError(f"keys both put and deleted in one commit: {sorted(both)}")

    @property
    def keys(self) -> set[str]:
        return {*self.expect, *self.put, *self.delete}


Operation = Get | Commit
History = Sequence[Operation]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `check` found. When not ok: `prefix` is the longest order found, in which every return up to a moment
    is accounted for; `stuck` are the operations in flight then, of which none leads on, the one that had to
    return first in front; `explanation` says so in words."""

    ok: bool
    explanation: str
    prefix: tuple[Operation, ...] = ()
    stuck: tuple[Operation, ...] = ()


def check(history: Iterable[Operation], *, max_steps: int = 500_000) -> Verdict:
    """Look for a linearization. The order of `history` does not matter, its times do.

    `max_steps` bounds the pairs of (placed operations, state) visited over all key groups together; past it,
    `Undecided` is raised.
    """
    budget = _Budget(max_steps)
    groups = _partition(history)
    for operations in groups:
        search = _Search(_compile(operations, budget), budget)
        try:
            found = search.run()
        except Undecided:
            # An operation that fits in no order at all is an answer, however far the search came.
            if not search.problem.has_flaw:
                raise
            found = False
        if not found:
            return search.verdict()
    return Verdict(True, f"linearizable: {sum(map(len, groups))} operations in {len(groups)} key groups")


# --- histories as text ---


def dump(history: Iterable[Operation]) -> str:
    """One JSON object per line, in the order given. `load` reads it back to equal operations."""
    return "".join(json.dumps(_to_json(operation)) + "\n" for operation in history)


def load(text: str) -> list[Operation]:
    """Read what `dump` wrote."""
    return [_from_json(json.loads(line)) for line in text.splitlines() if line.strip()]


def _to_json(operation: Operation) -> dict[str, Any]:
    common = {"client": operation.client, "call": operation.call, "ret": operation.ret}
    if isinstance(operation, Get):
        value = None if operation.value is None else _text(operation.value)
        return {"op": "get", **common, "key": operation.key, "value": value, "version": operation.version}
    return {
        "op": "commit",
        **common,
        "expect": dict(operation.expect),
        "put": {key: _text(value) for key, value in operation.put.items()},
        "delete": list(operation.delete),
        "outcome": operation.outcome,
        "versions": dict(operation.versions),
    }


def _from_json(fields: dict[str, Any]) -> Operation:
    kind = fields.pop("op")
    if kind == "get":
        value = fields.pop("value")
        return Get(**fields, value=None if value is None else _bytes(value))
    if kind == "commit":
        put = {key: _bytes(value) for key, value in fields.pop("put").items()}
        return Commit(**fields | {"put": put, "delete": tuple(fields["delete"])})
    raise ValueError(f"unknown operation {kind!r}")


# Latin-1 maps every byte to the character of that number: exact, and short test values stay readable.
def _text(value: bytes) -> str:
    return value.decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")


# --- from operations to a search problem ---


_Pairs = tuple[tuple[int, int], ...]  # (key number, version)


@dataclass(frozen=True, slots=True)
class _Step:
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
class _Option:
    """An unknown commit with one choice of versions. `excludes` are the options that this one rules out, itself
    among them: a commit happens once, a version belongs to one commit."""

    step: _Step
    bit: int
    excludes: int


@dataclass(frozen=True, slots=True)
class _Problem:
    keys: list[str]
    steps: list[_Step]  # what must be placed, in the order of return; the index is the bit
    reads: list[list[int]]  # per return: steps in flight that change nothing
    writes: list[list[int]]  # per return: the other steps in flight
    observers: dict[tuple[int, int], int]  # (key, version) -> bits of the steps that need it
    options: list[list[_Option]]  # interchangeable ones together, in the order of call

    @property
    def has_flaw(self) -> bool:
        return any(step.flaw for step in self.steps)


class _Budget:
    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._left = max_steps

    def spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Undecided(self._max_steps)


def _partition(history: Iterable[Operation]) -> list[list[Operation]]:
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


def _compile(operations: list[Operation], budget: _Budget) -> _Problem:
    required = [op for op in operations if isinstance(op, Get) or op.outcome != "unknown"]
    # What returns at the same time may go in any order: a tie is a matter of the clock's resolution.
    required.sort(key=_returned)
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
        while called < len(by_call) and steps[by_call[called]].operation.call <= _returned(op):
            in_flight.append(by_call[called])
            called += 1
        in_flight.sort()
        reads.append([j for j in in_flight if not steps[j].effect])
        writes.append([j for j in in_flight if steps[j].effect])
        in_flight.remove(i)
    return _Problem(keys, steps, reads, writes, observers, _options(unknown, number, ledger, budget))


def _step(op: Operation, number: Mapping[str, int], flaw: str) -> _Step:
    if isinstance(op, Get):
        return _Step(op, ((number[op.key], op.version),), flaw=flaw)
    needs = tuple((number[key], version) for key, version in op.expect.items())
    if op.outcome == "conflict":
        return _Step(op, needs, is_conflict=True, flaw=flaw)
    return _Step(op, needs, _effect(op, op.versions, number), flaw=flaw)


def _effect(op: Commit, versions: Mapping[str, int], number: Mapping[str, int]) -> _Pairs:
    puts = [(number[key], versions.get(key, _UNSEEN)) for key in op.put]
    return tuple(puts + [(number[key], ABSENT) for key in op.delete])


class _Ledger:
    """Which call wrote which version of which key, as far as the results alone prove it."""

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
        return [*seen, *(version for version, what in self._orphans[key].items() if what is None), _UNSEEN]

    def flaw(self, op: Operation) -> str:
        """Why the operation fits in no order at all, or an empty text."""
        if isinstance(op, Get):
            return self._flaw_of_get(op)
        if op.outcome == "conflict":
            return "" if op.expect else "it expects nothing, so nothing can differ"
        if set(op.versions) != set(op.put):
            return f"it put {sorted(op.put)} but returned versions of {sorted(op.versions)}"
        for key, version in op.versions.items():
            if version <= ABSENT:
                return f"{key}@{version} is not a version of something that exists"
            if self._owner[key, version] is not op:
                return f"{key}@{version} is also the version of: {_line(self._owner[key, version])}"
        for key, version in op.expect.items():
            if self._is_unwritten(key, version, None):
                return f"{key}@{version} was written by no commit"
        return ""

    def _flaw_of_get(self, op: Get) -> str:
        if (op.version == ABSENT) != (op.value is None):
            return "it reports a value of what is absent, or none of what exists"
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
    budget: _Budget,
) -> list[list[_Option]]:
    steps: list[_Step] = []
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
            steps.append(_Step(op, tuple((number[key], v) for key, v in op.expect.items()), effect))

    # Commits with the same expectations and the same effect are interchangeable, and the one called first is
    # the one to use first; unless using it gives up another choice of versions, or claims one.
    groups: dict[object, list[_Option]] = defaultdict(list)
    for i, step in enumerate(steps):
        excludes = 0
        for claim in claims_of[i]:
            excludes |= exclude_by_claim[claim]
        is_plain = is_sole[i] and len(claims_of[i]) == 1
        same: object = (frozenset(step.needs), frozenset(step.effect)) if is_plain else i
        groups[same].append(_Option(step, 1 << i, excludes))
    return list(groups.values())


# --- the search ---

# The operations placed so far, the last one first.
_Path = tuple[Operation, "_Path | None"]


@dataclass(frozen=True, slots=True)
class _Node:
    """A point of the search: everything that returned before return number `due` is placed, and that one is not."""

    due: int
    done: int  # bits of the steps placed
    used: int  # bits of the options used
    state: tuple[int, ...]
    path: _Path | None


class _Search:
    def __init__(self, problem: _Problem, budget: _Budget) -> None:
        self.problem = problem
        self._budget = budget
        self._bits = [1 << i for i in range(len(problem.steps))]
        # For each visited (due, steps placed, state), the least sets of options with which it was reached.
        self._visited: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
        self._best = self._settle(0, 0, 0, (ABSENT,) * len(problem.keys), None)

    def run(self) -> bool:
        """Depth first, with an explicit stack: a history is deeper than the interpreter's."""
        if self._best.due == len(self.problem.steps):
            return True
        stack = [self._branches(self._best)]
        while stack:
            node = next(stack[-1], None)
            if node is None:
                stack.pop()
                continue
            if node.due == len(self.problem.steps):
                return True
            if self._is_dominated(node):
                continue
            self._budget.spend()
            if (node.due, node.done.bit_count()) > (self._best.due, self._best.done.bit_count()):
                self._best = node
            stack.append(self._branches(node))
        return False

    def _settle(self, due: int, done: int, used: int, state: tuple[int, ...], path: _Path | None) -> _Node:
        """Place every read that fits, and move on to the first return that is not accounted for."""
        steps, bits = self.problem.steps, self._bits
        while due < len(steps):
            for i in self.problem.reads[due]:
                if not done & bits[i] and steps[i].holds(state):
                    done |= bits[i]
                    path = (steps[i].operation, path)
            if not done & bits[due]:
                break
            due += 1
        return _Node(due, done, used, state, path)

    def _branches(self, node: _Node) -> Iterator[_Node]:
        """Every write that may come next. The order is a guess at what is most likely: what returned first."""
        due, done, used, state, path = node.due, node.done, node.used, node.state, node.path
        for i in self.problem.writes[due]:
            step, bit = self.problem.steps[i], self._bits[i]
            if not done & bit and step.holds(state) and not self._loses(step, done | bit, state):
                yield self._settle(due, done | bit, used, step.apply(state), (step.operation, path))
        deadline = _returned(self.problem.steps[due].operation)
        for group in self.problem.options:
            option = next((option for option in group if not used & option.excludes), None)
            if option is None or option.step.operation.call > deadline or not option.step.holds(state):
                continue
            after = option.step.apply(state)
            if after != state and not self._loses(option.step, done, state):
                yield self._settle(due, done, used | option.bit, after, (option.step.operation, path))

    def _loses(self, step: _Step, done: int, state: tuple[int, ...]) -> int:
        """Bits of the steps that still need a version which this one would overwrite."""
        observers = self.problem.observers
        lost = 0
        for key, _ in step.effect:
            lost |= observers.get((key, state[key]), 0)
        return lost & ~done

    def _is_dominated(self, node: _Node) -> bool:
        # Everything below `due` is placed, so the rest of the bits tells the whole set.
        known = self._visited.setdefault((node.due, node.done >> node.due, node.state), [])
        if any(used & node.used == used for used in known):
            return True
        known[:] = [used for used in known if used & node.used != node.used]
        known.append(node.used)
        return False

    # --- the explanation ---

    def verdict(self) -> Verdict:
        """Why there is no linearization, at the node that came farthest."""
        problem, node = self.problem, self._best
        prefix: list[Operation] = []
        path = node.path
        while path is not None:
            operation, path = path
            prefix.append(operation)
        prefix.reverse()
        pending = sorted(problem.reads[node.due] + problem.writes[node.due])
        stuck = [i for i in pending if not node.done & self._bits[i]]
        since = min(step.operation.call for step in problem.steps)

        lines = [
            f"not linearizable: keys {', '.join(problem.keys)}; {len(prefix)} operations placed, "
            f"{len(problem.steps) - node.done.bit_count()} left (times in seconds after {since:.6f})"
        ]
        if prefix:
            lines.append("the longest order found ends with:")
            lines += [f"  {_line(operation, since)}" for operation in prefix[-5:]]
        state = (f"{key} {_at(version)}" for key, version in zip(problem.keys, node.state, strict=True))
        lines.append(f"which leaves: {', '.join(state)}")
        lines.append("then none of these leads on, and the first must, before it returns:")
        for i in stuck[:8]:
            lines.append(f"  {_line(problem.steps[i].operation, since)}")
            lines.append(f"    {self._reason(i, node, since)}")
        flawed = [step for i, step in enumerate(problem.steps) if step.flaw and i not in stuck[:8]]
        if flawed:
            lines.append("and these fit in no order at all:")
        for step in flawed[:3]:
            lines += [f"  {_line(step.operation, since)}", f"    {step.flaw}"]
        left = tuple(problem.steps[i].operation for i in stuck)
        return Verdict(False, "\n".join(lines), tuple(prefix), left)

    def _reason(self, i: int, node: _Node, since: float) -> str:
        step = self.problem.steps[i]
        if step.flaw:
            return step.flaw
        if step.is_conflict and not step.holds(node.state):
            return "every expectation holds here, and a conflict needs one that does not"
        for key, version in step.needs:
            if not step.is_conflict and node.state[key] != version:
                return f"{self.problem.keys[key]} is {_at(node.state[key])}, not {_at(version)}"
        lost = self._loses(step, node.done | self._bits[i], node.state)
        if lost:
            observer = self.problem.steps[(lost & -lost).bit_length() - 1].operation
            return f"it would overwrite what is still to be observed by: {_line(observer, since)}"
        return "it fits here, but nothing that follows does"


# --- small words ---


def _require_order(call: float, ret: float | None) -> None:
    if ret is not None and ret < call:
        raise ValueError(f"an operation returned at {ret}, before its call at {call}")


def _returned(operation: Operation) -> float:
    assert operation.ret is not None, "only operations with a known outcome have a return"
    return operation.ret


def _at(version: int) -> str:
    return {ABSENT: "absent", _UNSEEN: "at a version never seen"}.get(version, f"@{version}")


def _line(operation: Operation, since: float = 0.0) -> str:
    until = "..." if operation.ret is None else f"{operation.ret - since:.6f}"
    head = f"client {operation.client} [{operation.call - since:.6f}, {until}]"
    if isinstance(operation, Get):
        seen = "absent" if operation.value is None else f"{operation.value!r} @{operation.version}"
        return f"{head} get {operation.key} -> {seen}"
    parts = [f"expect {key} {_at(version)}" for key, version in operation.expect.items()]
    parts += [f"put {key}={value!r}" for key, value in operation.put.items()]
    parts += [f"delete {key}" for key in operation.delete]
    versions = "".join(f" {key}@{version}" for key, version in operation.versions.items())
    return f"{head} commit {', '.join(parts)} -> {operation.outcome}{versions}"
