"""What a rebalance costs a large group: registry calls, keys and bytes for each member, counted on a simulated store.

Nothing fails here, and a procedure is not interrupted: the schedules of `simulation.py` are for that. Members are woken
by exactly the keys that they watch, so the counts show that a change costs nothing for members that it does not
concern.

    crowd = Crowd(1_000, 10_000)
    crowd.costs_of(crowd.join)      # by role: the leader, the joiner, those that lose a partition, all others
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pxrs.group.lane import Lane
from pxrs.group.protocol import MemberProtocol, rearmed
from pxrs.group.records import Keys, Member
from pxrs.registry.steps import Steps
from pxrs.testing.simulator.store import Cost, Request, SimulatedStore

TOPIC = "topic"
KEYS_MAX = 127
"""How many keys one commit may name on etcd, which takes the fewest."""


class CrowdMember:
    """A member without messages that does everything at once when it is woken."""

    def __init__(self, crowd: Crowd, number: int) -> None:
        self.crowd, self.incarnation = crowd, f"member-{number:06d}"
        self.watching: frozenset[str] = frozenset()
        self.gained = self.lost_count = 0
        record = Member(f"w{number}", TOPIC, "orders", crowd.partitions, "host", number, float(number), "sticky")
        self.protocol = MemberProtocol(
            crowd.keys, self.incarnation, record, self, lambda _, first: first, lambda: 0.0, KEYS_MAX, handover_s=30.0
        )

    def join(self) -> None:
        self.crowd.store.begin_lease(self.incarnation, float("inf"))
        if not self._drive(self.protocol.join()):
            raise AssertionError("nobody else writes the starts: one member joins at a time")

    def look(self) -> None:
        while True:
            self._arm()
            has_changed = self._drive(self.protocol.look(0.0))
            if not has_changed and rearmed(self.watching, self.protocol.watched_keys()) is None:
                return

    def _arm(self) -> None:
        chosen = rearmed(self.watching, self.protocol.watched_keys())
        if chosen is not None:
            self.crowd.watch(self, self.watching, chosen)
            self.watching = chosen

    def _drive(self, steps: Steps[bool]) -> bool:
        try:
            operation = next(steps)
            while True:
                request = Request(operation, self.incarnation, self.incarnation)
                self.crowd.store.apply(request)
                operation = steps.send(request.result) if request.error is None else steps.throw(request.error)
        except StopIteration as end:
            return bool(end.value)

    # Hooks of the protocol.

    def assigned(self, partition: int, epoch: int, offset: int) -> Lane:
        self.gained += 1
        return Lane(partition, epoch, offset)

    def revoked(self, lane: Lane) -> None: ...

    def resumed(self, lane: Lane) -> None: ...

    def released(self, lane: Lane) -> None:
        self.lost_count += 1

    def lost(self, lane: Lane) -> None:
        self.lost_count += 1


@dataclass(frozen=True, slots=True)
class Share:
    """What some members have done in a rebalance, and what it has cost."""

    who: str
    members: int
    moved_max: int
    """How many partitions one of them has gained or lost, at most."""
    most: Cost
    """The cost of the member with the most calls, and of the member with the most bytes, if that is another one."""


class Crowd:
    """A settled group with these numbers of members and partitions."""

    def __init__(self, members: int, partitions: int) -> None:
        self.partitions = partitions
        self.keys = Keys("g")
        self.store = SimulatedStore(random.Random(0), counts_anew=False, scans_in_two_moments=False)
        self.store.on_changed = self._changed
        self.members: list[CrowdMember] = []
        self._watchers: dict[str, set[CrowdMember]] = {}
        self._woken: deque[CrowdMember] = deque()
        self._serial = 0
        for _ in range(members):
            self._add().join()
        self._woken.extend(self.members)
        self._come_to_rest()

    def join(self) -> CrowdMember:
        """One more member joins. Returns it."""
        member = self._add()
        member.join()
        self._woken.append(member)
        self._come_to_rest()
        return member

    def die(self) -> CrowdMember:
        """A member that does not lead dies: its lease ends. Returns it."""
        return self._end(next(member for member in reversed(self.members) if not member.protocol.is_leading))

    def die_leading(self) -> CrowdMember:
        return self._end(self.leader)

    @property
    def leader(self) -> CrowdMember:
        return next(member for member in self.members if member.protocol.is_leading)

    def costs_of(self, change: Callable[[], CrowdMember]) -> list[Share]:
        """The cost of a change, by the role of the members."""
        self.store.costs.clear()
        for member in self.members:
            member.gained = member.lost_count = 0
        changed = change()
        roles: dict[str, list[CrowdMember]] = {"leader": [], "joiner": [], "gain or lose": [], "all others": []}
        for member in self.members:
            if member.protocol.is_leading:
                roles["leader"].append(member)
            elif member is changed:
                roles["joiner"].append(member)
            else:
                roles["gain or lose" if member.gained + member.lost_count else "all others"].append(member)
        return [self._share(who, some) for who, some in roles.items() if some]

    def _share(self, who: str, members: Iterable[CrowdMember]) -> Share:
        some = list(members)
        costs = [self.store.costs[member.incarnation] for member in some]
        most = Cost(
            max(cost.calls for cost in costs),
            max(cost.keys for cost in costs),
            max(cost.size for cost in costs),
            max(cost.writes for cost in costs),
        )
        return Share(who, len(some), max(member.gained + member.lost_count for member in some), most)

    def check(self) -> None:
        """Raise AssertionError unless every partition is owned by one member, and the shares are fair."""
        owned = [number for member in self.members for number in member.protocol.held]
        if sorted(owned) != list(range(self.partitions)):
            raise AssertionError(f"{len(set(owned))} of {self.partitions} partitions are owned, by {len(owned)} claims")
        sizes = [len(member.protocol.held) for member in self.members]
        if max(sizes) - min(sizes) > 1:
            raise AssertionError(f"members own from {min(sizes)} to {max(sizes)} partitions")

    def watch(self, member: CrowdMember, former: Iterable[str], chosen: Iterable[str]) -> None:
        for key in former:
            self._watchers[key].discard(member)
        for key in chosen:
            self._watchers.setdefault(key, set()).add(member)

    def _add(self) -> CrowdMember:
        self._serial += 1
        member = CrowdMember(self, self._serial)
        self.members.append(member)
        return member

    def _end(self, member: CrowdMember) -> CrowdMember:
        self.members.remove(member)
        self.watch(member, member.watching, ())
        self.store.end_lease(member.incarnation)
        self._come_to_rest()
        return member

    def _changed(self, keys: list[str], is_quiet: bool) -> None:
        if is_quiet:
            return
        for key in keys:
            for watched in (key, f"{key.rpartition('/')[0]}/"):
                for member in sorted(self._watchers.get(watched, ()), key=lambda each: each.incarnation):
                    if member not in self._woken:
                        self._woken.append(member)

    def _come_to_rest(self) -> None:
        while self._woken:
            self._woken.popleft().look()
