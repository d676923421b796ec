"""The second part of a schedule: the faults end, and the group must come to rest.

At rest every partition is owned by one member, the shares are fair, and all messages are read. Nothing more is written
then (X5), however much time passes. When one member comes or goes, the fewest possible partitions move, and the others
are not disturbed (X4, X7).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pxrs.group.records import NOBODY, ReadTopic
from pxrs.log.numbering import TopicPartition
from pxrs.testing.simulator.admin import reset_checkpoint
from pxrs.testing.simulator.environment import Environment
from pxrs.testing.simulator.ghost import Violation
from pxrs.testing.simulator.group import SimulatedGroup
from pxrs.testing.simulator.member import SimulatedMember
from pxrs.testing.simulator.settings import TTL_S, Rates

CALM_STEPS_MAX: Final = 20_000
"""More than any group of this size needs to come to rest."""
Owners = dict[TopicPartition, tuple[str | None, int]]
"""The incarnation that owns each partition, and its epoch."""


class Calm:
    """Lets the group come to rest, and checks that it stays there."""

    def __init__(self, environment: Environment, group: SimulatedGroup) -> None:
        self._environment, self._group = environment, group

    def run(self) -> None:
        """Raises Violation."""
        rng = self._environment.rng
        self._come_to_rest()
        self._stay_at_rest()
        if rng.random() < 0.3:
            self._reset_at_rest()
        for _ in range(rng.randint(0, 2)):
            self._change_one()

    def _come_to_rest(self) -> None:
        """The faults end; late writes are applied now or never; everybody continues until nothing is left to do."""
        environment, group = self._environment, self._group
        environment.note("calm")
        environment.rates = Rates(slow=environment.rng.choice((0.0, environment.settings.storm.slow)))
        for member in group.members:
            member.stopped_until = member.stops_at_write_s = member.renewals_fail_until = 0.0
            member.consumer.hangs_until = 0.0
        if not any(not member.is_leaving for member in group.members):
            group.start_member()
        self._continue_until_rest()
        while environment.late:
            environment.apply_late()
            self._continue_until_rest()
        self._check_rest()

    def _continue_until_rest(self) -> None:
        environment, group = self._environment, self._group
        for _ in range(CALM_STEPS_MAX):
            environment.steps += 1
            busy = [member for member in group.members if group.is_busy(member)]
            if busy:
                self._burst_of(environment.rng.choice(busy))
            elif not self._pass_to_next_event():
                return
            group.check_owners()
        raise Violation("X5 comes to rest", f"not within {CALM_STEPS_MAX} steps")

    def _burst_of(self, member: SimulatedMember) -> None:
        rng, consumer = self._environment.rng, member.consumer
        for _ in range(rng.randint(1, 4)):
            has_handled = rng.random() < 0.3 and (consumer.hand_out(member.readable()) or consumer.finish())
            if not has_handled and member.has_task:
                member.step()
        self._group.remove_those_out()

    def _pass_to_next_event(self) -> bool:
        """Let time pass, with all leases renewed, up to the next expiry of a lease that nobody renews or the next
        hand-over deadline; False if there is none."""
        environment, members = self._environment, self._group.members
        held = {member.lease for member in members if member.is_alive}
        events = [expiry for lease, expiry in environment.store.expiry.items() if lease not in held]
        events += [member.fence_at - member.clock_ahead for member in members]
        at = min(events, default=float("inf"))
        if at == float("inf"):
            return False
        self._pass_renewing(max(at - environment.now, 0.001))
        return True

    def _pass_renewing(self, seconds: float) -> None:
        environment, members = self._environment, self._group.members
        until = environment.now + seconds
        while environment.now < until:
            for member in members:
                member.renew(anew=True)
            environment.now = min(until, environment.now + TTL_S / 4)
        held = {member.lease for member in members if member.is_alive}
        for lease in environment.store.expired(environment.now):
            if lease not in held:
                environment.store.end_lease(lease)

    def _check_rest(self) -> None:
        ghost, members = self._environment.ghost, self._group.members
        acting = {place: member for member in members for place, _ in member.consumer.acting(member.held)}
        for readers, topics in self._read_together():
            sizes = {topic.id: dict.fromkeys((member.incarnation for member in readers), 0) for topic in topics}
            for place in _places(topics):
                owner = ghost.owners.get(place)
                if owner is None or owner.incarnation not in sizes[place[0]]:
                    raise Violation("X4 every partition owned", f"{place} has {owner}, and {readers} are there")
                if acting.get(place) is None or acting[place].incarnation != owner.incarnation:
                    raise Violation("X4 every partition owned", f"{place} has {owner}, who does not act as its owner")
                sizes[place[0]][owner.incarnation] += 1
                checkpoint, end = ghost.checkpoints.get(place), ghost.end[place]
                if checkpoint is not None and checkpoint != end:
                    raise Violation("X11 nothing lost", f"{place} rests at {checkpoint} of {end}")
            if readers[0].assignor == "range":  # by itself in each topic
                shares = [list(each.values()) for each in sizes.values()]
            else:
                shares = [[sum(each[member.incarnation] for each in sizes.values()) for member in readers]]
            if any(max(each) - min(each) > 1 for each in shares):
                raise Violation("X4 fair share", f"{sizes}")

    def _read_together(self) -> list[tuple[list[SimulatedMember], list[ReadTopic]]]:
        """The topics that somebody reads, those with the same readers together."""
        together: dict[tuple[str, ...], tuple[list[SimulatedMember], list[ReadTopic]]] = {}
        for topic in self._environment.topics:
            readers = [member for member in self._group.members if topic in member.topics]
            if readers:
                names = tuple(member.incarnation for member in readers)
                together.setdefault(names, (readers, []))[1].append(topic)
        return list(together.values())

    def _stay_at_rest(self) -> None:
        """However much time passes and however often anybody looks, nothing is written (X5)."""
        writes = self._environment.store.writes
        self._pass_renewing(5 * TTL_S)
        for member in self._group.members:
            member.is_woken = True
        self._continue_until_rest()
        if self._environment.store.writes != writes:
            raise Violation("X5 never periodic", f"{self._environment.store.writes - writes} writes at rest")

    def _reset_at_rest(self) -> None:
        """Members that wait for nothing must notice that an administrator has taken a partition from them."""
        reset_checkpoint(self._environment, self._environment.any_place())
        self._continue_until_rest()
        self._check_rest()

    def _change_one(self) -> None:
        """One member comes or goes, and nothing fails."""
        environment, group, rng = self._environment, self._group, self._environment.rng
        before = self._owners()
        environment.ghost.is_calm = True
        for member in group.members:
            member.consumer.revoked_places.clear()
        members = list(group.members)
        change = rng.choice(("join", "leave", "crash"))
        environment.note("one change:", change)
        if change == "join" or len(members) == 1:
            group.start_member()
        elif change == "leave":
            rng.choice(members).is_leaving = True
        else:
            group.crash(rng.choice(members))
        for _ in range(3):
            environment.append()
        self._continue_until_rest()
        self._check_rest()
        self._check_moves(before, self._owners())

    def _owners(self) -> Owners:
        owners = self._environment.ghost.owners
        found = {place: owners.get(place, NOBODY) for place in self._environment.places()}
        return {place: (owner.incarnation, owner.epoch) for place, owner in found.items()}

    def _check_moves(self, before: Owners, after: Owners) -> None:
        moved = {place for place in before if before[place][0] != after[place][0]}
        for readers, topics in self._read_together():
            places = _places(topics)
            has = [sum(before[place][0] == member.incarnation for place in places) for member in readers]
            fewest, count = fewest_moves(has, len(places)), len(moved.intersection(places))
            if count != fewest and all(member.assignor == "sticky" for member in readers):
                raise Violation("X4 fewest moves", f"{count} partitions moved and {fewest} had to: {before} {after}")
            for place in places:
                if place not in moved and before[place] != after[place]:
                    raise Violation("X7 not disturbed", f"{place} stays and got another epoch: {before[place]}")
        for member in self._group.members:
            for place in member.consumer.revoked_places:
                if place not in moved:
                    raise Violation("X7 not disturbed", f"{place} stays with {member}, and was revoked")


def _places(topics: Iterable[ReadTopic]) -> list[TopicPartition]:
    return [(topic.id, number) for topic in topics for number in range(topic.partitions)]


def fewest_moves(has: list[int], partitions: int) -> int:
    """How many partitions must move so that the members' shares differ by at most one; `has`: their shares now."""
    base, more = divmod(partitions, len(has))
    kept = sum(min(size, base) for size in has) + min(more, sum(size > base for size in has))
    return partitions - kept
