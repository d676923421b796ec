"""Each rule of the groups' protocol, left out on purpose: the simulator must notice, and the sound code must pass.

A defect is an operation changed on its way, or a subclass with the mistake in it. None of them is a switch in the
product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pxrs.group import reconcile
from pxrs.group.protocol import MemberProtocol
from pxrs.group.reconcile import Claim, Me
from pxrs.group.records import Checkpoint, Leader, Owner, ReadTopic
from pxrs.group.snapshot import GroupState
from pxrs.registry.contract import ABSENT, Entry
from pxrs.registry.steps import Operation, Steps, Write
from pxrs.testing.simulator import SOUND, Defects, Environment, SimulatedMember, SimulatedStore, Violation, simulate
from pxrs.testing.simulator.ghost import ADMIN, RETENTION
from pxrs.testing.simulator.store import Request
from tests.simulation import topic_mutations as topics


def _is_checkpoint_of_an_owner(operation: Operation) -> bool:
    """A pin is leased, a commit of an owner is not: the fence is enough."""
    return (
        isinstance(operation, Write)
        and not operation.is_leased
        and any("/checkpoints/" in key for key in operation.put)
    )


def _without(expect: dict[str, int], part: str) -> dict[str, int]:
    return {key: version for key, version in expect.items() if part not in key}


def no_fence(operation: Operation, member: SimulatedMember, store: SimulatedStore) -> Operation:
    """The owner's version is not expected."""
    if isinstance(operation, Write) and _is_checkpoint_of_an_owner(operation):
        return operation._replace(expect=_without(dict(operation.expect), "/owners/"))
    return operation


def epoch_read_again(operation: Operation, member: SimulatedMember, store: SimulatedStore) -> Operation:
    """The commit expects whatever versions are there, as the public PXRS does."""
    if isinstance(operation, Write) and _is_checkpoint_of_an_owner(operation):
        found = {key: store.state.get(key) for key in operation.expect}
        return operation._replace(expect={key: entry.version if entry else ABSENT for key, entry in found.items()})
    return operation


def claim_from_the_living(operation: Operation, member: SimulatedMember, store: SimulatedStore) -> Operation:
    """Together with `everything_is_free`: the absence of the last owner is not expected."""
    if isinstance(operation, Write) and operation.put and all("/owners/" in key for key in operation.put):
        return operation._replace(expect=_without(dict(operation.expect), "/members/"))
    return operation


def release_keeps_epoch(operation: Operation, member: SimulatedMember, store: SimulatedStore) -> Operation:
    if isinstance(operation, Write) and _is_checkpoint_of_an_owner(operation):
        put = dict(operation.put)
        for key, value in put.items():
            if "/owners/" in key:
                put[key] = Owner(None, Owner.load(key, value).epoch - 1).dump()
        return operation._replace(put=put)
    return operation


def release_leaves_owner(operation: Operation, member: SimulatedMember, store: SimulatedStore) -> Operation:
    """The last checkpoint is written, and the owner key is left as it is."""
    if isinstance(operation, Write) and _is_checkpoint_of_an_owner(operation):
        return operation._replace(put={key: value for key, value in operation.put.items() if "/owners/" not in key})
    return operation


def no_version_of_its_own(operation: Operation, member: SimulatedMember, store: SimulatedStore) -> Operation:
    """The checkpoint's own version is not expected (G4)."""
    if isinstance(operation, Write) and _is_checkpoint_of_an_owner(operation):
        return operation._replace(expect=_without(dict(operation.expect), "/checkpoints/"))
    return operation


def ephemeral_leader(operation: Operation, member: SimulatedMember, store: SimulatedStore) -> Operation:
    """The leader key dies with its lease (G2), and only its version guards the assignment, which names no lease.

    The terms are kept rising, so that nothing but the dead leader's late write can give it away."""
    if isinstance(operation, Write):
        key = member.environment.keys.leader
        if key in operation.put:
            leader = replace(Leader.load(key, operation.put[key]), term=store.version + 1)
            return operation._replace(put={}, ephemeral={key: leader.dump()})
        if key in operation.expect:
            return operation._replace(is_leased=False)
    return operation


def no_leader_expected(operation: Operation, member: SimulatedMember, store: SimulatedStore) -> Operation:
    if isinstance(operation, Write) and operation.put:
        keys = member.environment.keys
        if keys.leader not in operation.put and keys.leader in operation.expect:
            return operation._replace(expect=_without(dict(operation.expect), "/leader"), is_leased=False)
    return operation


def claim_without_target(operation: Operation, member: SimulatedMember, store: SimulatedStore) -> Operation:
    """A claim lands although the leader has given the partition to another member since the target was read."""
    if isinstance(operation, Write) and operation.put and all("/owners/" in key for key in operation.put):
        return operation._replace(expect=_without(dict(operation.expect), "/targets/"))
    return operation


def fence_without_telling(operation: Operation, member: SimulatedMember, store: SimulatedStore) -> Operation:
    """A fence leaves the owner's target as it is: an owner that has not looked meanwhile goes on as if it owned it."""
    if isinstance(operation, Write) and any("/owners/" in key for key in operation.put):
        return operation._replace(put={key: value for key, value in operation.put.items() if "/targets/" not in key})
    return operation


def join_over_another(operation: Operation, member: SimulatedMember, store: SimulatedStore) -> Operation:
    """Together with names for incarnations: whoever comes back takes its own place again."""
    if isinstance(operation, Write) and operation.ephemeral:
        return operation._replace(expect={})
    return operation


def pin_without_start(operation: Operation, member: SimulatedMember, store: SimulatedStore) -> Operation:
    """A start is written down although retention has moved `topics/<id>/start` since it was read (O10)."""
    if isinstance(operation, Write):
        return operation._replace(expect=_without(dict(operation.expect), "topics/"))
    return operation


def pin_without_gate(operation: Operation, member: SimulatedMember, store: SimulatedStore) -> Operation:
    """A start is written down, and the gate that retention expects is left as it is (O10)."""
    if isinstance(operation, Write):
        return operation._replace(put={key: value for key, value in operation.put.items() if "topics/" not in key})
    return operation


class ReadsBeforeClaim(MemberProtocol):
    """The checkpoint is read, then the partition is claimed (G3)."""

    def _claim(self, claims: Sequence[Claim]) -> Steps[None]:
        self.early = yield from super()._read_checkpoints(claims)
        yield from super()._claim(claims)

    def _read_checkpoints(self, claims: Sequence[Claim]) -> Steps[list[tuple[Claim, Entry]]]:
        yield from ()
        return [(claim, entry) for claim, entry in self.early if claim in claims]


class StartsUnpinned(MemberProtocol):
    """Where a partition begins is decided by whoever claims it (G6)."""

    def _pin(self, topic: ReadTopic) -> Steps[None]:
        yield from ()

    def _read_checkpoints(self, claims: Sequence[Claim]) -> Steps[list[tuple[Claim, Entry]]]:
        found = yield from super()._read_checkpoints(claims)
        there = {claim for claim, _ in found}
        for claim in claims:
            if claim not in there:
                key = self.keys.checkpoint(*self.place(claim.partition))
                found.append((claim, Entry(key, Checkpoint(self.start_of(claim.partition, 0)).dump(), ABSENT)))
        return found


def pause_without_checkpoint(operation: Operation, member: SimulatedMember, store: SimulatedStore) -> Operation:
    """A pause does not expect the checkpoint's version: one that was given up may land after the next one."""
    if isinstance(operation, Write) and any("/paused/" in key for key in operation.put):
        return operation._replace(expect=_without(dict(operation.expect), "/checkpoints/"))
    return operation


class PausesAgain(MemberProtocol):
    """After a lost reply the pause is written again, whether it had landed or not."""

    def read_again(self, partition: int) -> Steps[bool]:
        is_owned = yield from super().read_again(partition)
        if is_owned:
            self.held[partition].checkpoint = replace(self.held[partition].checkpoint, failure="")
        return is_owned


class WatchesNoOwners(MemberProtocol):
    """A member that waits for a partition is not woken when the partition is freed."""

    def watched_keys(self) -> frozenset[str]:
        return frozenset(key for key in super().watched_keys() if "/owners/" not in key)


class WatchesNoOtherMembers(MemberProtocol):
    """A member that waits for a partition, or follows a leader, is not woken when that one dies."""

    def watched_keys(self) -> frozenset[str]:
        others = frozenset(key for key in super().watched_keys() if "/members/" in key and key != self.keys.members)
        return super().watched_keys() - others


class WatchesNoTarget(MemberProtocol):
    """A member is not woken when it is given another target, or when an administrator takes a partition from it."""

    def watched_keys(self) -> frozenset[str]:
        return super().watched_keys() - {self.keys.target(self.incarnation)}


class KeepsItsTerm(MemberProtocol):
    """The leader writes other targets although some that it has sent without an answer may still arrive (R5)."""

    def _me(self) -> Me:
        return replace(super()._me(), has_late_targets=False)


class IgnoresWhatIsTaken(MemberProtocol):
    """A member reads the owner keys of what it gains and loses, also when `taken` has risen."""

    def _read_owners(self, state: GroupState) -> Steps[None]:
        self.taken = state.target(self.incarnation)[0].taken
        yield from super()._read_owners(state)


class ReadsBeforeItWatches(SimulatedMember):
    """A look that has shown more to watch is not repeated when that is watched (R2)."""

    def _ended(self, value: Any) -> None:
        before = self.is_woken
        super()._ended(value)
        if self.task == "look" and not value:
            self.is_woken = before
            if self.protocol is not None:
                self.watching = self.protocol.watched_keys()


class IgnoresDeadline(SimulatedMember):
    """It goes on until the store tells it that the lease is gone (G8)."""

    @property
    def is_alive(self) -> bool:
        return True


def _everything_is_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reconcile, "_is_free", lambda owner, snapshot, me: True)


@dataclass(frozen=True)
class Mutation:
    name: str
    defects: Defects
    rules: tuple[str, ...]
    """Those that may be the first to be broken."""
    patch: Callable[[pytest.MonkeyPatch], None] = lambda patch: None
    seeds_max: int = 400
    first_seed: int = 0
    """A seed whose schedule is known to catch the defect. If a change of the code has changed the schedules, the others
    below `seeds_max` are tried too; take the first that catches it then."""


NOT_WOKEN = ("X4 every partition owned", "X4 fair share", "X5 comes to rest", "X5 never periodic", "X11 nothing lost")
"""What comes of a member that sleeps through a change which concerns it."""

MUTATIONS = [
    Mutation("fence removed", Defects(alter=no_fence), ("X9 stale epoch",), first_seed=11),
    Mutation("epoch read again at the commit", Defects(alter=epoch_read_again), ("X9 stale epoch",), first_seed=11),
    Mutation(
        "claim before release",
        Defects(alter=claim_from_the_living),
        ("X6 release, then claim",),
        patch=_everything_is_free,
    ),
    Mutation("release keeps the epoch", Defects(alter=release_keeps_epoch), ("X9 epochs rise",)),
    Mutation(
        "release leaves the owner key",
        Defects(alter=release_leaves_owner),
        ("X7 nothing fenced", "X5 comes to rest", "X4 every partition owned"),
        first_seed=2,
    ),
    Mutation(
        "checkpoint read before the claim",
        Defects(protocol=ReadsBeforeClaim),
        ("G3 starts at the checkpoint",),
        first_seed=86,
    ),
    Mutation(
        "checkpoint without its own version",
        Defects(alter=no_version_of_its_own),
        ("X10 never back", "X14 paused once"),
    ),
    Mutation(
        "ephemeral leader key",
        Defects(alter=ephemeral_leader, counts_anew=True),
        ("G2 leader", "G2 terms rise"),
        first_seed=82,
    ),
    Mutation("leader not expected", Defects(alter=no_leader_expected), ("G2 leader",), first_seed=299),
    Mutation("claim without its target", Defects(alter=claim_without_target), ("G2 claims by its target",)),
    Mutation(
        "fence that does not tell the owner",
        Defects(alter=fence_without_telling),
        ("X8 the owner is told",),
        first_seed=11,
    ),
    Mutation("owners not watched", Defects(protocol=WatchesNoOwners), NOT_WOKEN, first_seed=2),
    Mutation("those waited for not watched", Defects(protocol=WatchesNoOtherMembers), NOT_WOKEN, first_seed=3),
    Mutation("target not watched", Defects(protocol=WatchesNoTarget), NOT_WOKEN, first_seed=2),
    Mutation("same term after lost targets", Defects(protocol=KeepsItsTerm), ("X5 never periodic",), first_seed=192),
    Mutation("owners not read though some were taken", Defects(protocol=IgnoresWhatIsTaken), NOT_WOKEN, first_seed=27),
    Mutation("read before it is watched", Defects(member=ReadsBeforeItWatches), NOT_WOKEN, first_seed=253),
    Mutation("start not pinned", Defects(protocol=StartsUnpinned), ("G6 start pinned", "X11 nothing lost")),
    Mutation("pause written again", Defects(protocol=PausesAgain), ("X14 paused once",), first_seed=107),
    Mutation(
        "pause without the checkpoint's version",
        Defects(alter=pause_without_checkpoint),
        ("X14 paused once", "X10 never back", "X11 nothing lost"),
        first_seed=39,
    ),
    Mutation(
        "start written without expecting retention's",
        Defects(alter=pin_without_start),
        ("O10 unread is kept",),
        first_seed=252,
    ),
    Mutation("start written beside the gate", Defects(alter=pin_without_gate), ("O10 unread is kept",), first_seed=192),
    Mutation("deadline ignored", Defects(member=IgnoresDeadline), ("X3 one owner", "X11 nothing again"), first_seed=1),
    Mutation(
        "names instead of incarnations",
        Defects(alter=join_over_another, incarnation_of=lambda name, serial: name),
        (
            "X3 one owner",
            "X4 only what is read",
            "X9 stale epoch",
            "X11 nothing again",
            "G2 targets of the living stay",
        ),
        first_seed=1,
    ),
    # Several topics.
    Mutation(
        "claim of another topic",
        Defects(protocol=topics.ClaimsOfTheFirstTopic),
        ("G2 claims by its target", "X3 claimed, then owned"),
        first_seed=7,
    ),
    Mutation(
        "checkpoint of another topic",
        Defects(protocol=topics.CommitsToTheFirstTopic),
        ("X5 comes to rest", "X9 stale epoch"),
        first_seed=10,
    ),
    Mutation("owners of one topic watched", Defects(protocol=topics.WatchesTheFirstTopic), NOT_WOKEN, first_seed=27),
    Mutation(
        "starts of one topic pinned", Defects(protocol=topics.PinsTheFirstTopic), ("G6 start pinned",), first_seed=10
    ),
    Mutation(
        "gate of one topic written",
        Defects(protocol=topics.GatesTheFirstTopic),
        ("O10 unread is kept",),
        seeds_max=1_200,
        first_seed=1_148,
    ),
    Mutation(
        "owners of one topic read",
        Defects(protocol=topics.ReadsOwnersOfTheFirstTopic),
        ("X5 comes to rest",),
        first_seed=11,
    ),
    Mutation(
        "a topic is not assigned", SOUND, ("X4 every partition owned",), patch=topics.forget_a_topic, first_seed=11
    ),
    Mutation(
        "a topic is assigned to who does not read it",
        SOUND,
        ("X4 only what is read",),
        patch=topics.assign_to_all,
        first_seed=2,
    ),
    Mutation(
        "each topic is assigned by itself", SOUND, ("X4 fair share",), patch=topics.assign_each_topic, first_seed=11
    ),
    Mutation(
        "what was before is forgotten", SOUND, ("X4 fewest moves",), patch=topics.forget_what_was_before, first_seed=11
    ),
]


def seeds_to_catch(mutation: Mutation) -> tuple[list[int], Violation] | None:
    """The seeds that were tried, of which the last one has caught the defect, and what it found."""
    tried: list[int] = []
    for seed in (*range(mutation.first_seed, mutation.seeds_max), *range(mutation.first_seed)):
        tried.append(seed)
        try:
            simulate(seed, mutation.defects)
        except Violation as violation:
            return tried, violation
    return None


@functools.cache
def is_sound(seed: int) -> bool:
    simulate(seed)
    return True


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_defect_is_caught_and_the_sound_code_passes_the_same_seeds(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        mutation.patch(patch)
        caught = seeds_to_catch(mutation)
    assert caught is not None, f"not caught within {mutation.seeds_max} seeds"
    tried, violation = caught
    assert violation.rule in mutation.rules
    assert all(is_sound(seed) for seed in tried)


class ResetsWithoutFence(Environment):
    """An admin's reset leaves the owner as it is (G5)."""

    def apply(self, request: Request) -> None:
        if request.incarnation == ADMIN and isinstance(request.operation, Write):
            put = {key: value for key, value in request.operation.put.items() if "/owners/" not in key}
            request.operation = request.operation._replace(put=put)
        super().apply(request)


class ResetsWithoutCall(Environment):
    """An admin's process dies between its commit and another one that would tell the members of it."""

    def apply(self, request: Request) -> None:
        if request.incarnation == ADMIN and isinstance(request.operation, Write):
            put = {key: value for key, value in request.operation.put.items() if "/targets/" not in key}
            request.operation = request.operation._replace(put=put)
        super().apply(request)


class RetainsWithoutGate(Environment):
    """Retention does not see whether a group was given a checkpoint since it began to look (O10)."""

    def apply(self, request: Request) -> None:
        if request.incarnation == RETENTION and isinstance(request.operation, Write):
            expect = _without(dict(request.operation.expect), "/gate")
            request.operation = request.operation._replace(expect=expect)
        super().apply(request)


@pytest.mark.parametrize(
    ("defect", "rules", "first_seed"),
    [
        (ResetsWithoutFence, {"X11 nothing lost"}, 1),
        (ResetsWithoutCall, {"X4 every partition owned"}, 3),
        (RetainsWithoutGate, {"O10 unread is kept"}, 50),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_defect_of_those_who_are_no_members_is_caught(
    defect: type[Environment], rules: set[str], first_seed: int
) -> None:
    found = None
    for seed in (*range(first_seed, 200), *range(first_seed)):
        try:
            simulate(seed, Defects(environment=defect))
        except Violation as violation:
            found = violation.rule
            break
    assert found in rules
