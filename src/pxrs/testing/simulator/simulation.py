"""One schedule of a group, determined by a seed: which member takes the next step, what fails, when time passes.

In the first phase ("storm") members join, leave, crash, are stopped past their lease and go on where they were; replies
are lost, writes are applied late, leaders die while partitions move. After each step the rules of the `Ghost` must
hold. In the second phase ("calm") nothing fails any more: the group must come to rest with every partition owned and
all messages read, write nothing more, and move as few partitions as possible when one member joins or leaves.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pxrs.errors import RegistryError, RetentionPostponed
from pxrs.group.protocol import MemberProtocol
from pxrs.group.records import (
    Checkpoint,
    Gate,
    Home,
    Keys,
    Member,
    Owner,
    Starts,
    Target,
    TopicPartition,
    gate_key,
    start_key,
)
from pxrs.group.retention import move_start
from pxrs.registry.contract import ABSENT
from pxrs.registry.steps import Operation, Steps, Write
from pxrs.testing.simulator.ghost import ADMIN, RETENTION, Ghost, Violation
from pxrs.testing.simulator.member import SimulatedMember
from pxrs.testing.simulator.store import Request, SimulatedStore

CALM_STEPS_MAX: Final = 20_000
"""How many steps the group may take to come to rest: more than any group of this size needs."""
MEMBERS_MAX: Final = 6
EVENTS: Final = (
    *("leave", "crash", "crash", "crash the leader", "stop", "stop", "stop"),
    *("replace", "jump", "renewals fail", "hang", "reset", "retain", "fail", "fail"),
)


@dataclass(frozen=True, slots=True)
class Rates:
    """The probability of each fault, for each operation or step."""

    slow: float = 0.0
    """An operation takes several steps."""
    unanswered_read: float = 0.0
    unavailable: float = 0.0
    """Faults of writes, from here on. This one: nothing was done."""
    timeout: float = 0.0
    lost_reply: float = 0.0
    overtaken: float = 0.0
    """A write whose sender gave up, or is stopped, is applied right before another write on the same keys."""
    event: float = 0.0
    """A member joins, leaves, crashes, stops, ..."""


Alter = Callable[[Operation, SimulatedMember, SimulatedStore], Operation]


@dataclass(frozen=True, slots=True)
class Defects:
    """Faulty parts that a test uses in place of the real ones, to check that the simulator notices."""

    protocol: type[MemberProtocol] = MemberProtocol
    member: type[SimulatedMember] = SimulatedMember
    alter: Alter | None = None
    """Changes an operation when it is sent."""
    incarnation_of: Callable[[str, int], str] | None = None
    counts_anew: bool | None = None


SOUND: Final = Defects()


class Simulation:
    def __init__(self, seed: int, defects: Defects = SOUND, *, steps: int = 600, trace: int = 0) -> None:
        """`trace` is how many of the last events are kept, to be shown."""
        self.seed, self.defects, self.steps_max = seed, defects, steps
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self.partitions = rng.choice((1, 2, 3, 4, 5, 6, 8))
        self.ttl = 10.0
        self.handover_s = rng.choice((1.0, 5.0, 30.0, 10_000.0))
        self.keys_max = rng.choice((2, 3, 5, 64))
        self.in_hand_max = rng.choice((1, 3))
        self.starts_latest = rng.random() < 0.5
        self.pace_s = rng.choice((0.3, 0.6, 1.2))
        self.burst_max = rng.choice((1, 4, 12))
        self.members_max = rng.choice((3, 3, 4, MEMBERS_MAX))
        self.storm = Rates(
            slow=rng.choice((0.0, 0.1, 0.4)),
            unanswered_read=rng.choice((0.0, 0.005, 0.02)),
            unavailable=rng.choice((0.0, 0.02)),
            timeout=rng.choice((0.0, 0.05, 0.25)),
            lost_reply=rng.choice((0.0, 0.05, 0.15)),
            overtaken=rng.choice((0.0, 0.2, 0.5)),
            event=rng.choice((0.015, 0.03, 0.06)),
        )
        self.rates = self.storm
        # Not all kinds in every run: some schedules need a fault of one kind many times and none of another.
        self.kinds = ["join", "join", *rng.sample(EVENTS, rng.randint(1, len(EVENTS)))]
        counts_anew = rng.random() < 0.3
        if defects.counts_anew is not None:
            counts_anew = defects.counts_anew
        self.store = SimulatedStore(rng, counts_anew=counts_anew, scans_in_two_moments=rng.random() < 0.4)
        self.store.on_changed = self._changed
        self.keys = Keys("g")
        self.ghost = Ghost(self.keys, self.store)
        self.store.on_accepted = self.ghost.accepted
        # From a random generator of its own, so that other schedules do not change where all members have the same
        # assignor.
        self.assignor_rng = random.Random(f"{seed} assignors")
        self.assignors = self.assignor_rng.choice((("sticky",), ("sticky",), ("sticky", "range")))
        self.members: list[SimulatedMember] = []
        self.retention: tuple[Steps[Any], Operation] | None = None
        """A retention that is under way, and its next operation. Earlier ones may have been given up at any step."""
        self.late: list[Request] = []
        self.serial = self.topic_serial = self.name_serial = 0
        self.topic = ""
        self.steps = 0
        self.is_tracing = trace > 0
        self.events: deque[str] = deque(maxlen=trace or 1)
        self._create_topic()
        for _ in range(rng.randint(1, self.members_max - 1)):
            self._start_member()

    # What members use.

    def note(self, *what: object) -> None:
        if self.is_tracing:
            self.events.append(f"{self.steps:5d} {self.now:8.2f}s  {' '.join(map(str, what))}")

    def next_serial(self) -> int:
        self.serial += 1
        return self.serial

    def incarnation_of(self, name: str, serial: int) -> str:
        if self.defects.incarnation_of is not None:
            return self.defects.incarnation_of(name, serial)
        return f"{name}-{serial}"

    def assignor_of(self) -> str:
        """The assignor that a member is started with. If members have different ones, some are refused until they are
        given another one."""
        return self.assignor_rng.choice(self.assignors)

    def protocol_of(self, member: SimulatedMember, record: Member) -> MemberProtocol:
        topic = member.topic

        def start_of(partition: int, first: int) -> int:
            return self.ghost.end[topic, partition] if self.starts_latest else first

        return self.defects.protocol(
            self.keys,
            member.incarnation,
            record,
            member,
            start_of,
            wall=lambda: self.now,
            keys_max=self.keys_max,
            handover_s=self.handover_s,
            home=Home("hub", "the only one"),
            keeps_unread=True,
        )

    def altered(self, operation: Operation, member: SimulatedMember) -> Operation:
        return operation if self.defects.alter is None else self.defects.alter(operation, member, self.store)

    def strikes(self, rate: float) -> bool:
        return rate > 0.0 and self.rng.random() < rate

    def apply(self, request: Request) -> None:
        if isinstance(request.operation, Write) and self.strikes(self.rates.overtaken):
            self._overtake(request, request.operation)
        self.store.apply(request)
        self.note(
            request.incarnation, request.operation, "->", type(request.error).__name__ if request.error else "done"
        )

    def _overtake(self, request: Request, write: Write) -> None:
        """Right before a write, at the worst moment, apply an older one on the same keys: one whose sender gave up, or
        that of a stopped member, which goes on."""
        late = [each for each in self.late if _overlap(each.operation, write)]
        if late:
            older = self.rng.choice(late)
            self.late.remove(older)
            self.note("late, before another:")
            self.store.apply(older)
        if self.retention is not None and _overlap(self.retention[1], write):
            self._step_retention(*self.retention)
        for member in self.members:
            if member.is_stopped and member.request is not request and _overlap(member.next_operation, write):
                member.stopped_until = 0.0
                self.note(member, "goes on")
                member.step()
                return

    # The storm.

    def run(self) -> Simulation:
        """Run the whole schedule. Raises Violation."""
        while self.steps < self.steps_max:
            self._step()
            self.ghost.check_owners(self.members)
        self._come_to_rest()
        self._stay_at_rest()
        if self.rng.random() < 0.3:
            self._reset_at_rest()
        for _ in range(self.rng.randint(0, 2)):
            self._change_one()
        return self

    def _step(self) -> None:
        self.steps += 1
        rng = self.rng
        roll = rng.random()
        if roll < self.rates.event:
            self._happen()
        elif roll < 0.12:
            self._pass(rng.expovariate(1 / self.pace_s))
        elif roll < 0.15:
            self._append()
        elif roll < 0.153:
            self._land_late()
        elif self.retention is not None and roll < 0.22:
            self._step_retention(*self.retention)
        elif len(self.members) < 2 and roll < 0.26:
            self._start_member()
        else:
            self._let_somebody_act()

    def _let_somebody_act(self) -> None:
        rng = self.rng
        running = [member for member in self.members if not member.is_stopped]
        if not running:
            self._pass(rng.uniform(0, self.ttl / 4))
            return
        member = rng.choice(running)
        if not self._is_busy(member):
            running = [member for member in running if self._is_busy(member)]
            if not running:
                self._happen() if rng.random() < 0.2 else self._pass(rng.expovariate(1 / self.pace_s))
                return
            member = rng.choice(running)
        for _ in range(rng.randint(1, self.burst_max)):
            self._step_of(member)
            self.ghost.check_owners(self.members)
            if member.is_stopped:
                break

    def _step_of(self, member: SimulatedMember) -> None:
        roll = self.rng.random()
        if roll < 0.08:
            member.hand_out()
        elif roll < 0.15:
            member.finish()
        elif member.is_renewal_due and roll < 0.5:
            member.renew()
        elif member.has_task:
            member.step()
            self._remove_those_out()
        elif roll < 0.6:
            member.hand_out()
        else:
            member.finish()

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        for lease in self.store.expired(self.now):
            # A store may take its time to notice, but not for ever.
            if self.rng.random() < 0.5 or self.store.expiry[lease] + self.ttl < self.now:
                self.note(lease, "expires")
                self.store.end_lease(lease)

    def _append(self) -> None:
        place = (self.topic, self.rng.randrange(self.partitions))
        self.ghost.end[place] += self.rng.randint(1, 3)

    def _land_late(self) -> None:
        """Apply a request late. Mostly the youngest one, because an old one finds all its keys changed."""
        if self.late:
            request = self.late.pop(self.rng.randrange(len(self.late)) if self.rng.random() < 0.3 else -1)
            if self.rng.random() < 0.8:
                self.note("late:")
                self.apply(request)

    def _happen(self) -> None:
        rng = self.rng
        busy = [member for member in self.members if member.is_writing]
        # Faults of a member that is about to write matter most.
        some = busy if busy and rng.random() < 0.5 else self.members
        member = rng.choice(some) if some else self._start_member()
        kind = rng.choice(self.kinds) if rng.random() > 0.02 else "topic"
        self.note(member, kind)
        match kind:
            case "join":
                if len(self.members) < self.members_max:
                    self._start_member()
            case "leave":
                if len(self.members) > 1:
                    member.is_leaving = True
            case "crash":
                self._crash(member)
            case "crash the leader":
                for each in list(self.members):
                    if self.ghost.leader is not None and each.incarnation == self.ghost.leader.incarnation:
                        self._crash(each)
            case "stop":
                self._stop(member)
            case "replace":
                # An operator takes the stopped member for dead and starts another one of the same name.
                self._stop(member)
                if len(self.members) < self.members_max:
                    self._start_member(member.name)
            case "jump":
                member.clock_ahead += rng.uniform(0, 2 * self.ttl)
            case "renewals fail":
                member.renewals_fail_until = self.now + rng.uniform(0, 2 * self.ttl)
            case "hang":
                member.hangs_until = self.now + rng.uniform(0, 3 * self.ttl)
            case "reset":
                self._reset((self.topic, rng.randrange(self.partitions)))
            case "fail":
                member.fail()
            case "retain":
                self._begin_retention()
            case "topic":
                self._create_topic()

    def _begin_retention(self) -> None:
        """Begin a retention: everything but what the group has yet to read is old enough to be removed, and the seed
        decides how much of it is. A retention that is under way ends as if its process had died: what it has sent may
        be applied."""
        topic, rng = self.topic, self.rng

        def plan(unread: Mapping[int, int]) -> dict[int, int]:
            numbers = range(self.partitions)
            ends = {n: min(unread.get(n, self.ghost.end[topic, n]), self.ghost.end[topic, n]) for n in numbers}
            return {n: rng.randint(0, end) for n, end in ends.items() if rng.random() < 0.7}

        steps = move_start(topic, plan)
        self.retention = steps, next(steps)

    def _step_retention(self, steps: Steps[Any], operation: Operation) -> None:
        request, self.retention = Request(operation, RETENTION, None), None
        if isinstance(operation, Write) and self.strikes(self.rates.timeout):
            self.late.append(request)
            return
        while not request.is_applied:
            self.apply(request)
        try:
            following = steps.send(request.result) if request.error is None else steps.throw(request.error)
        except (StopIteration, RetentionPostponed, RegistryError):
            return
        self.retention = steps, following

    def decide(self) -> None:
        """An administrator removes a pause, so that the message is tried again; after that, a write of the pause that
        was given up may be applied."""
        paused = self.store.state.scan(self.keys.paused, None, None)
        if not paused or self.rng.random() < 0.5:
            return
        key = self.rng.choice(paused).key
        self.note(ADMIN, "retries", key)
        self.store.delete(key)
        late = [each for each in self.late if isinstance(each.operation, Write) and key in each.operation.put]
        if late:
            request = self.rng.choice(late)
            self.late.remove(request)
            self.apply(request)

    def _reset(self, place: TopicPartition) -> None:
        """An administrator sets a checkpoint back; the same commit frees the owner (G5), makes the members look, and
        writes the gate (O10)."""
        keys, state = self.keys, self.store.state
        owner, checkpoint = (state.get(key(*place)) for key in (keys.owner, keys.checkpoint))
        start = state.get(start_key(place[0]))
        if owner is None or checkpoint is None:
            return
        starts = Starts() if start is None else Starts.load(start.key, start.value)
        offset = self.rng.randint(starts.of(place[1]), Checkpoint.load(checkpoint.key, checkpoint.value).offset)
        before = Owner.load(owner.key, owner.value)
        epoch = before.epoch + 1
        put = {
            owner.key: Owner(None, epoch).dump(),
            checkpoint.key: Checkpoint(offset, by=ADMIN, epoch=epoch).dump(),
            gate_key(place[0]): Gate(ADMIN, self.now).dump(),
        }
        expect = {entry.key: entry.version for entry in (owner, checkpoint)}
        target = state.get(keys.target(before.incarnation or "-"))
        if target is not None:
            told = Target.load(target.key, target.value)
            expect[target.key] = target.version
            put[target.key] = replace(told, taken=told.taken + 1).dump()
        expect[start_key(place[0])] = ABSENT if start is None else start.version
        self.apply(Request(Write(expect, put, is_leased=False), ADMIN, None))

    def _start_member(self, name: str | None = None) -> SimulatedMember:
        if name is None:
            self.name_serial += 1
            name = f"w{self.name_serial}"
        member = self.defects.member(self, name, acks_in_any_order=self.rng.random() < 0.3)
        self.members.append(member)
        self.note(name, "starts")
        return member

    def _stop(self, member: SimulatedMember) -> None:
        seconds = self.rng.uniform(0.5, 4.0) * self.ttl
        if self.rng.random() < 0.3:
            member.stopped_until = self.now + seconds
        else:
            member.stops_at_write_s = seconds

    def _crash(self, member: SimulatedMember) -> None:
        member.drop()
        self.members.remove(member)
        if self.rng.random() < 0.7:
            self._start_member(member.name)

    def _create_topic(self) -> None:
        self.topic_serial += 1
        self.topic = f"t{self.topic_serial}"
        self.note("topic", self.topic)
        for number in range(self.partitions):
            self.ghost.end[self.topic, number] = self.rng.choice((0, 0, 5))
        if self.rng.random() < 0.5:
            # It is about to move the start when members write the first checkpoints.
            self._begin_retention()
            while self.retention is not None and not isinstance(self.retention[1], Write):
                self._step_retention(*self.retention)

    def _remove_those_out(self) -> None:
        if any(member.is_out for member in self.members):
            self.members = [member for member in self.members if not member.is_out]

    def _changed(self, keys: list[str], is_quiet: bool) -> None:
        if not is_quiet:
            for member in self.members:
                member.woken(keys)

    # The calm.

    def _come_to_rest(self) -> None:
        """End the faults. Requests on their way are applied or not; all members go on until nothing is left to do."""
        self.note("calm")
        slow = self.rng.choice((0.0, self.storm.slow))
        self.rates = Rates(slow=slow)
        for member in self.members:
            member.stopped_until = member.stops_at_write_s = member.renewals_fail_until = member.hangs_until = 0.0
        if not any(not member.is_leaving for member in self.members):
            self._start_member()
        self._go_on_until_rest()
        while self.late:
            self._land_late()
            self._go_on_until_rest()
        self._check_rest()

    def _go_on_until_rest(self) -> None:
        for _ in range(CALM_STEPS_MAX):
            self.steps += 1
            busy = [member for member in self.members if self._is_busy(member)]
            if busy:
                self._burst_of(self.rng.choice(busy))
            elif not self._pass_to_next_event():
                return
            self.ghost.check_owners(self.members)
        raise Violation("X5 comes to rest", f"not within {CALM_STEPS_MAX} steps")

    def _burst_of(self, member: SimulatedMember) -> None:
        for _ in range(self.rng.randint(1, 4)):
            if not (self.rng.random() < 0.3 and (member.hand_out() or member.finish())) and member.has_task:
                member.step()
        self._remove_those_out()

    def _is_busy(self, member: SimulatedMember) -> bool:
        return member.has_task or bool(member.in_hand) or bool(member.lanes_to_hand_out())

    def _pass_to_next_event(self) -> bool:
        """Let time pass, while leases are renewed, up to the next expiry or hand-over deadline, if there is one."""
        held = {member.lease for member in self.members if member.is_alive}
        events = [expiry for lease, expiry in self.store.expiry.items() if lease not in held]
        events += [member.fence_at - member.clock_ahead for member in self.members]
        at = min(events, default=float("inf"))
        if at == float("inf"):
            return False
        self._pass_renewing(max(at - self.now, 0.001))
        return True

    def _pass_renewing(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            for member in self.members:
                member.renewal_sent = None
                member.renew()
                member.renew()
            self.now = min(until, self.now + self.ttl / 4)
        held = {member.lease for member in self.members if member.is_alive}
        for lease in self.store.expired(self.now):
            if lease not in held:
                self.store.end_lease(lease)

    def _check_rest(self) -> None:
        sizes = dict.fromkeys((member.incarnation for member in self.members), 0)
        acting = {place: member for member in self.members for place, _ in member.acting()}
        for number in range(self.partitions):
            place = (self.topic, number)
            owner = self.ghost.owners.get(place)
            if owner is None or owner.incarnation not in sizes:
                raise Violation("X4 every partition owned", f"{place} has {owner}, and {self.members} are there")
            if acting.get(place) is None or acting[place].incarnation != owner.incarnation:
                raise Violation("X4 every partition owned", f"{place} has {owner}, who does not act as its owner")
            sizes[owner.incarnation] += 1
            checkpoint, end = self.ghost.checkpoints.get(place), self.ghost.end[place]
            if checkpoint is not None and checkpoint != end:
                raise Violation("X11 nothing lost", f"{place} rests at {checkpoint} of {end}")
        if max(sizes.values()) - min(sizes.values()) > 1:
            raise Violation("X4 fair share", f"{sizes}")

    def _stay_at_rest(self) -> None:
        """Check that nothing is written, however much time passes and however often members look (X5)."""
        writes = self.store.writes
        self._pass_renewing(5 * self.ttl)
        for member in self.members:
            member.is_woken = True
        self._go_on_until_rest()
        if self.store.writes != writes:
            raise Violation("X5 never periodic", f"{self.store.writes - writes} writes at rest")

    def _reset_at_rest(self) -> None:
        """Check that members notice that an administrator has taken a partition from them, although they wait for
        nothing."""
        self._reset((self.topic, self.rng.randrange(self.partitions)))
        self._go_on_until_rest()
        self._check_rest()

    def _change_one(self) -> None:
        """Let one member join or leave without a fault, and check that as few partitions as possible move, and no
        others (X4, X7)."""
        before = self._owners()
        self.ghost.is_calm = True
        for member in self.members:
            member.revoked_places.clear()
        members = list(self.members)
        change = self.rng.choice(("join", "leave", "crash"))
        self.note("one change:", change)
        if change == "join" or len(members) == 1:
            self._start_member()
        elif change == "leave":
            self.rng.choice(members).is_leaving = True
        else:
            member = self.rng.choice(members)
            member.drop()
            self.members.remove(member)
        for _ in range(3):
            self._append()
        self._go_on_until_rest()
        self._check_rest()
        after = self._owners()
        self._check_moves(before, after)

    def _owners(self) -> dict[TopicPartition, tuple[str | None, int]]:
        places = [(self.topic, number) for number in range(self.partitions)]
        return {place: (self.ghost.owners[place].incarnation, self.ghost.owners[place].epoch) for place in places}

    def _check_moves(self, before: dict[TopicPartition, Any], after: dict[TopicPartition, Any]) -> None:
        moved = [place for place in before if before[place][0] != after[place][0]]
        has = [sum(owner == member.incarnation for owner, _ in before.values()) for member in self.members]
        fewest = fewest_moves(has, self.partitions)
        if len(moved) != fewest and all(member.assignor == "sticky" for member in self.members):
            raise Violation("X4 fewest moves", f"{len(moved)} partitions moved and {fewest} had to: {before} {after}")
        for place in before:
            if place not in moved and before[place] != after[place]:
                raise Violation("X7 not disturbed", f"{place} stays and got another epoch: {before[place]}")
        for member in self.members:
            for place in member.revoked_places:
                if place not in moved:
                    raise Violation("X7 not disturbed", f"{place} stays with {member}, and was revoked")


def _overlap(operation: Operation | None, write: Write) -> bool:
    if not isinstance(operation, Write):
        return False
    return not operation.expect.keys().isdisjoint({*write.expect, *write.put})


def fewest_moves(has: list[int], partitions: int) -> int:
    """How many partitions must move so that sizes differ by at most one, given the present sizes."""
    base, more = divmod(partitions, len(has))
    kept = sum(min(size, base) for size in has) + min(more, sum(size > base for size in has))
    return partitions - kept


def simulate(seed: int, defects: Defects = SOUND, *, steps: int = 600) -> Simulation:
    """Run one schedule. A Violation says how to replay it."""
    try:
        return Simulation(seed, defects, steps=steps).run()
    except Exception as error:
        error.add_note(f"SEED={seed}  replay: make sim SEED={seed}")
        raise
