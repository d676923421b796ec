"""Members with different assignors that join at the same moment: in every order of their steps, one of them is refused.

All schedules of two members with up to SWITCHES_MAX switches between them are tried, and some of three. Nothing fails
here. That the rule also holds when replies are lost and writes land late is a rule of the simulator's ghost
(`F7 one assignor`), in schedules where members differ.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from pxrs.errors import AssignorMismatch, Conflict
from pxrs.group.lane import Lane
from pxrs.group.protocol import MemberProtocol
from pxrs.group.records import ChosenAssignor, Keys, Member
from pxrs.registry.contract import ABSENT, Entry
from pxrs.registry.steps import Get, Operation, Steps, Write
from pxrs.testing.simulator.store import Request, SimulatedStore

SWITCHES_MAX = 4
"""With any number of them two members could write the key in turns until both give up."""
KEYS = Keys("g")
TOPIC = "topic"


class Joiner:
    """A member that has yet to join, one operation at a time."""

    def __init__(self, store: SimulatedStore, number: int, assignor: str, kind: type[MemberProtocol]) -> None:
        self.store, self.assignor, self.lease = store, assignor, f"lease-{number}"
        self.incarnation = f"member-{number}"
        store.begin_lease(self.lease, 1e9)
        record = Member(f"w{number}", TOPIC, "orders", 1, "host", assignor=assignor)
        protocol = kind(KEYS, self.incarnation, record, self, lambda _number, _first: 0, lambda: 0.0, 64, 30.0)
        self.steps: Steps[None] = protocol.join()
        self.operation: Operation | None = next(self.steps)
        self.refusal: AssignorMismatch | None = None

    def step(self) -> None:
        assert self.operation is not None
        request = Request(self.operation, self.incarnation, self.lease)
        self.store.apply(request)
        is_joined = isinstance(self.operation, Write) and bool(self.operation.ephemeral) and request.error is None
        try:
            if request.error is not None:
                self.operation = self.steps.throw(request.error)
            else:
                self.operation = None if is_joined else self.steps.send(request.result)
        except AssignorMismatch as refusal:
            self.operation, self.refusal = None, refusal

    @property
    def is_in(self) -> bool:
        return self.store.has(KEYS.member(self.incarnation))

    def assigned(self, partition: int, epoch: int, offset: int) -> Lane:
        return Lane(partition, epoch, offset)

    def revoked(self, lane: Lane) -> None: ...

    def released(self, lane: Lane) -> None: ...

    def resumed(self, lane: Lane) -> None: ...

    def lost(self, lane: Lane) -> None: ...


Choose = Callable[[int], int]
"""Given how many others could go on, which of them does (from 1), or 0 if the same one takes the next step."""


Chosen = tuple[str, bool] | None
"""The assignor that the key names beforehand, written by members that are gone, and whether it was agreed; None if the
key is absent."""
CHOSEN: list[Chosen] = [None, *itertools.product(("sticky", "range", "round-robin"), (False, True))]


def play(
    choose: Choose, chosen: Chosen, assignors: Sequence[str], kind: type[MemberProtocol] = MemberProtocol
) -> list[Joiner]:
    store = SimulatedStore(random.Random(0), counts_anew=False, scans_in_two_moments=False)
    if chosen is not None:
        put = {KEYS.assignor: ChosenAssignor.of(chosen[0], is_agreed=chosen[1]).dump()}
        store.apply(Request(Write({}, put, is_leased=False), "gone", None))
    joiners = [Joiner(store, number, assignor, kind) for number, assignor in enumerate(assignors)]
    active = list(joiners)
    while active:
        choice = choose(len(active) - 1)
        active = active[choice:] + active[:choice]
        active[0].step()
        active = [each for each in active if each.operation is not None]
    return joiners


def schedules(run: Callable[[Choose], list[Joiner]]) -> Iterator[list[Joiner]]:
    """What comes of every order of steps: each run repeats a prefix of choices, and then switches no more."""
    prefix: list[int] = []
    while True:
        taken: list[tuple[int, int]] = []

        def choose(others: int, prefix: list[int] = prefix, taken: list[tuple[int, int]] = taken) -> int:
            choice = prefix[len(taken)] if len(taken) < len(prefix) else 0
            is_spent = sum(each > 0 for each, _ in taken) >= SWITCHES_MAX
            taken.append((choice, 0 if is_spent else others))
            return choice

        yield run(choose)
        while taken and taken[-1][0] == taken[-1][1]:
            taken.pop()
        if not taken:
            return
        prefix = [choice for choice, _ in taken[:-1]] + [taken[-1][0] + 1]


def differ(joiners: Sequence[Joiner]) -> bool:
    return len({each.assignor for each in joiners if each.is_in}) > 1


@pytest.mark.parametrize("chosen", CHOSEN)
def test_of_two_members_with_different_assignors_exactly_one_joins(chosen: Chosen) -> None:
    count = 0
    for joiners in schedules(lambda choose: play(choose, chosen, ["sticky", "range"])):
        count += 1
        (inside,) = [each for each in joiners if each.is_in]
        (refused,) = [each.refusal for each in joiners if each.refusal is not None]
        assert refused.others == {f"w{joiners.index(inside)} on host": inside.assignor}
    assert count > 10, "they did meet"


def test_members_with_the_same_assignor_never_refuse_one_another() -> None:
    for chosen in CHOSEN:
        for joiners in schedules(lambda choose, chosen=chosen: play(choose, chosen, ["sticky"] * 2)):  # type: ignore[misc]
            assert all(each.is_in for each in joiners)


def test_of_three_members_those_that_join_agree() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        chosen = chance.choice(CHOSEN)
        joiners = play(functools.partial(chance.randint, 0), chosen, ["sticky", "range", "sticky"])
        assert any(each.is_in for each in joiners)
        assert not differ(joiners), f"seed {seed}"


class JoinsUnexpecting(MemberProtocol):
    """The join does not expect the key: another member may have joined since the look."""

    def join(self) -> Steps[bool]:
        steps = super().join()
        operation: Any = next(steps)
        while True:
            if isinstance(operation, Write) and operation.ephemeral:
                expect = {key: version for key, version in operation.expect.items() if key != self.keys.assignor}
                operation = operation._replace(expect=expect)
            try:
                result = yield operation
            except Conflict as conflict:
                operation = steps.throw(conflict)
            else:
                operation = steps.send(result)


class ChoosesWithTheJoin(MemberProtocol):
    """The key is not written before the members are looked at, but with the join. A member that finds its own assignor
    agreed only expects it too."""

    def _agree(self) -> Steps[tuple[bool, int]]:
        entry: Entry | None = yield Get(self.keys.assignor)
        chosen = ChosenAssignor() if entry is None else ChosenAssignor.load(entry.key, entry.value)
        if entry is not None and chosen.names(self.member.assignor) and chosen.is_agreed:
            return True, entry.version
        yield from self._check_members()
        return False, ABSENT if entry is None else entry.version


class LooksFirst(MemberProtocol):
    """The members are looked at before the key is read."""

    def _agree(self) -> Steps[tuple[bool, int]]:
        yield from super()._check_members()
        return (yield from super()._agree())

    def _check_members(self) -> Steps[None]:
        yield from ()


class TakesAnyForAgreed(MemberProtocol):
    """A member that finds its own assignor does not look at the members, be the key agreed or not."""

    def _agree(self) -> Steps[tuple[bool, int]]:
        entry: Entry | None = yield Get(self.keys.assignor)
        if entry is not None and ChosenAssignor.load(entry.key, entry.value).names(self.member.assignor):
            return True, entry.version
        steps = super()._agree()
        operation: Any = next(steps)
        while True:
            result = yield operation
            if isinstance(operation, Write):
                return True, result[self.keys.assignor]
            operation = steps.send(result)


@pytest.mark.parametrize("kind", [JoinsUnexpecting, ChoosesWithTheJoin, LooksFirst, TakesAnyForAgreed])
def test_a_join_without_the_rule_is_caught(kind: type[MemberProtocol]) -> None:
    agreed = ("sticky", True)
    assert any(differ(joiners) for joiners in schedules(lambda choose: play(choose, agreed, ["sticky", "range"], kind)))
