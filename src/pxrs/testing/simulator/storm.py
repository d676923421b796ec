"""The first part of a schedule: who takes the next step, what fails, when time passes.

Members join, leave, crash, are stopped past their lease and continue where they were; replies are lost, writes are
applied late, leaders die while partitions move. After each step the rules of the ghost must hold.
"""

from __future__ import annotations

from pxrs.registry.steps import Operation, Write
from pxrs.testing.simulator.admin import reset_checkpoint
from pxrs.testing.simulator.environment import Environment
from pxrs.testing.simulator.group import SimulatedGroup
from pxrs.testing.simulator.member import SimulatedMember
from pxrs.testing.simulator.retention import SimulatedRetention
from pxrs.testing.simulator.settings import TTL_S
from pxrs.testing.simulator.store import Request


class Storm:
    """Draws and performs one step after the other."""

    def __init__(self, environment: Environment, group: SimulatedGroup) -> None:
        self._environment, self._group = environment, group
        self._retention = SimulatedRetention(environment)
        self._topics = 0
        environment.before_write = self._overtake

    def begin(self) -> None:
        """Create the topics and start the first members."""
        for at in range(len(self._environment.topics)):
            self._create_topic(at)
        for _ in range(self._environment.rng.randint(1, self._environment.settings.members_max - 1)):
            self._group.start_member()

    def step(self) -> None:
        environment, rng = self._environment, self._environment.rng
        environment.steps += 1
        roll = rng.random()
        if roll < environment.rates.event:
            self._happen()
        elif roll < 0.12:
            self._pass(rng.expovariate(1 / environment.settings.pace_s))
        elif roll < 0.15:
            environment.append()
        elif roll < 0.153:
            environment.apply_late()
        elif self._retention.is_under_way and roll < 0.22:
            self._retention.step()
        elif len(self._group.members) < 2 and roll < 0.26:
            self._group.start_member()
        else:
            self._let_somebody_act()
        self._group.check_owners()

    def _let_somebody_act(self) -> None:
        rng, group = self._environment.rng, self._group
        running = [member for member in group.members if not member.is_stopped]
        if not running:
            self._pass(rng.uniform(0, TTL_S / 4))
            return
        member = rng.choice(running)
        if not group.is_busy(member):
            running = [member for member in running if group.is_busy(member)]
            if not running:
                if rng.random() < 0.2:
                    self._happen()
                else:
                    self._pass(rng.expovariate(1 / self._environment.settings.pace_s))
                return
            member = rng.choice(running)
        for _ in range(rng.randint(1, self._environment.settings.burst_max)):
            self._step_of(member)
            group.check_owners()
            if member.is_stopped:
                break

    def _step_of(self, member: SimulatedMember) -> None:
        roll = self._environment.rng.random()
        if roll < 0.08:
            member.consumer.hand_out(member.readable())
        elif roll < 0.15:
            member.consumer.finish()
        elif member.is_renewal_due and roll < 0.5:
            member.renew()
        elif member.has_task:
            member.step()
            self._group.remove_those_out()
        elif roll < 0.6:
            member.consumer.hand_out(member.readable())
        else:
            member.consumer.finish()

    def _pass(self, seconds: float) -> None:
        """Let time pass. The store ends an expired lease within one ttl, and perhaps at once."""
        environment, store = self._environment, self._environment.store
        environment.now += seconds
        for lease in store.expired(environment.now):
            if environment.rng.random() < 0.5 or store.expiry[lease] + TTL_S < environment.now:
                environment.note(lease, "expires")
                store.end_lease(lease)

    def _overtake(self, request: Request, write: Write) -> None:
        """Right before a write, where it does most harm, an older write of the same keys is applied: one whose sender
        has stopped waiting, that of retention, or that of a stopped member, which continues."""
        environment = self._environment
        late = [each for each in environment.late if _overlap(each.operation, write)]
        if late:
            older = environment.rng.choice(late)
            environment.late.remove(older)
            environment.note("late, before another:")
            environment.store.apply(older)
        if _overlap(self._retention.operation, write):
            self._retention.step()
        for member in self._group.members:
            connection = member.connection
            is_another = connection.request is not request and _overlap(connection.next_operation, write)
            if member.is_stopped and is_another:
                member.stopped_until = 0.0
                environment.note(member, "goes on")
                member.step()
                return

    def _happen(self) -> None:
        """One of the schedule's kinds of events happens to some member, or to the topic."""
        environment, group, rng = self._environment, self._group, self._environment.rng
        writing = [member for member in group.members if member.connection.is_writing]
        # An event that happens to a member which is about to write matters most.
        some = writing if writing and rng.random() < 0.5 else group.members
        member = rng.choice(some) if some else group.start_member()
        kind = rng.choice(environment.settings.kinds) if rng.random() > 0.02 else "topic"
        environment.note(member, kind)
        has_room = len(group.members) < environment.settings.members_max
        match kind:
            case "join":
                if has_room:
                    group.start_member()
            case "leave":
                if len(group.members) > 1:
                    member.is_leaving = True
            case "crash":
                self._crash(member)
            case "crash the leader":
                for each in list(group.members):
                    if (
                        environment.ghost.leader is not None
                        and each.incarnation == environment.ghost.leader.incarnation
                    ):
                        self._crash(each)
            case "stop":
                group.stop(member)
            case "replace":
                # Somebody takes the member for dead, and starts another one with the same name.
                group.stop(member)
                if has_room:
                    group.start_member(member.name)
            case "jump":
                member.clock_ahead += rng.uniform(0, 2 * TTL_S)
            case "renewals fail":
                member.renewals_fail_until = environment.now + rng.uniform(0, 2 * TTL_S)
            case "hang":
                member.consumer.hangs_until = environment.now + rng.uniform(0, 3 * TTL_S)
            case "reset":
                reset_checkpoint(environment, environment.any_place())
            case "fail":
                member.consumer.fail(member.held)
            case "retain":
                self._retention.begin(environment.topics[self._any_topic()])
            case "topic":
                self._create_topic(self._any_topic())

    def _any_topic(self) -> int:
        """The place of one of the topics. Nothing is drawn if there is only one."""
        count = len(self._environment.topics)
        return 0 if count == 1 else self._environment.rng.randrange(count)

    def _crash(self, member: SimulatedMember) -> None:
        """A member crashes; mostly another one with its name is started."""
        self._group.crash(member)
        if self._environment.rng.random() < 0.7:
            self._group.start_member(member.name)

    def _create_topic(self, at: int) -> None:
        """Delete the topic in this place and create one with the same name, which has another id."""
        environment, rng = self._environment, self._environment.rng
        self._topics += 1
        topic = environment.topics[at] = environment.topics[at]._replace(id=f"t{self._topics}")
        environment.note("topic", topic)
        for number in range(topic.partitions):
            environment.ghost.end[topic.id, number] = rng.choice((0, 0, 5))
        if rng.random() < 0.5:
            # Retention is about to move the start when members write where the group begins.
            self._retention.run_up_to_its_write(topic)


def _overlap(operation: Operation | None, write: Write) -> bool:
    """Whether the operation is a write that expects a key which the other write names."""
    if not isinstance(operation, Write):
        return False
    return not operation.expect.keys().isdisjoint({*write.expect, *write.put})
