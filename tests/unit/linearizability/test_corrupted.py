"""Histories of a simulated store with one corrupted result, and small ones against a search through all orders."""

import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pxrs.testing.linearizability import ABSENT, Commit, Get, Operation, Undecided, check, dump, load
from tests.unit.linearizability.histories import commit, exhaustive, get, put, simulate

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
    with pytest.raises(ValueError, match="not one of"):
        commit((0, 1), "maybe")
    with pytest.raises(ValueError, match="both put and deleted"):
        commit((0, 1), put={"a": b""}, delete=("a",), versions={"a": 1})
