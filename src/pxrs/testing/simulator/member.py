"""A member of a simulated group: the shell around `MemberProtocol`, one step at a time.

It does what a real member's threads do: join, look when something has woken it, commit now and then, renew its lease,
hand out messages while it may, write down a message that its handler could not handle. Between any two of these steps
it can be stopped, for ever or for a while.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pxrs.errors import AssignorMismatch, Conflict, LeaseExpired, OutcomeUnknown, RegistryError, RegistryUnavailable
from pxrs.group.lane import Lane
from pxrs.group.protocol import MemberProtocol, rearmed
from pxrs.group.records import Member, Paused, TopicPartition
from pxrs.registry.steps import Operation, Steps, Write
from pxrs.testing.simulator.store import Request

if TYPE_CHECKING:
    from pxrs.testing.simulator.simulation import Simulation


class SimulatedMember:
    def __init__(self, simulation: Simulation, name: str, *, acks_in_any_order: bool) -> None:
        self.simulation, self.name = simulation, name
        self.acks_in_any_order = acks_in_any_order
        self.assignor = simulation.assignor_of()
        self.topic = simulation.topic
        self.protocol: MemberProtocol | None = None
        self.incarnation = ""
        self.lease = ""
        self.deadline = 0.0
        self.clock_ahead = 0.0
        """How many seconds its own clock is ahead of the store's."""
        self.stopped_until = 0.0
        self.stops_at_write_s = 0.0
        """If not 0, the member is stopped for this long after it has decided on its next write."""
        self.renewals_fail_until = 0.0
        self.hangs_until = 0.0
        """The time before which its handler finishes nothing."""
        self.renewal_sent: float | None = None
        self.renewed_at = 0.0
        self.is_leaving = False
        self.is_out = False
        self.is_woken = False
        """A key that it watches has changed since its last look, or it has to look for another reason."""
        self.watching: frozenset[str] = frozenset()
        """The keys and folders that it watches, as a real member would."""
        self.is_joined = False
        """Whether the start of every partition is written."""
        self.is_woken_to_pin = False
        self.task = ""
        self.steps: Steps[Any] | None = None
        self.operation: Operation | None = None
        """The operation that it has decided on and not sent yet."""
        self.request: Request | None = None
        self.in_hand: list[tuple[str, Lane, int]] = []
        """The topic, lane and offset of each message that its handler works on."""
        self.revoked_places: list[TopicPartition] = []
        self.failures: dict[int, tuple[Lane, Paused]] = {}
        """Pauses that the member does not know to be written, by partition."""

    def __repr__(self) -> str:
        return self.incarnation or self.name

    # Hooks of the protocol.

    def assigned(self, partition: int, epoch: int, offset: int) -> Lane:
        self.simulation.note(self, "assigned", partition, epoch, offset)
        self.simulation.ghost.assigned((self.topic, partition), epoch, offset)
        return Lane(partition, epoch, offset)

    def resumed(self, lane: Lane) -> None:
        pass

    def revoked(self, lane: Lane) -> None:
        self.simulation.note(self, "revoked", lane)
        self.revoked_places.append((self.topic, lane.partition))

    def released(self, lane: Lane) -> None:
        self.simulation.note(self, "released", lane)

    def lost(self, lane: Lane) -> None:
        self.simulation.note(self, "lost", lane)
        self.revoked_places.append((self.topic, lane.partition))

    # Time and lease.

    @property
    def now(self) -> float:
        return self.simulation.now + self.clock_ahead

    @property
    def is_alive(self) -> bool:
        """Whether it may act as an owner: its lease's deadline is ahead (G8)."""
        return self.now < self.deadline

    @property
    def is_stopped(self) -> bool:
        return self.simulation.now < self.stopped_until

    def acting(self) -> Iterator[tuple[TopicPartition, Lane]]:
        """The lanes of which it hands out messages, or has some in hand, believing that they are its own."""
        if self.protocol is None or not self.is_alive:
            return
        for partition, holding in self.protocol.held.items():
            lane = holding.lane
            if not lane.is_lost and not (lane.is_stopping and lane.is_drained):
                yield (self.topic, partition), lane

    def renew(self) -> None:
        """Send a renewal, or take the reply to one: the deadline counts from the sending."""
        if self.protocol is None:
            return
        sent, self.renewal_sent = self.renewal_sent, None
        if sent is None:
            self.renewal_sent = self.now
            return
        are_failing = self.simulation.now < self.renewals_fail_until
        if are_failing and self.simulation.rng.random() < 0.5:
            return
        if not self.simulation.store.renew_lease(self.lease, self.simulation.now + self.simulation.ttl):
            return
        if self.is_alive and not are_failing:
            self.deadline = max(self.deadline, sent + self.simulation.ttl)
            self.renewed_at = self.now

    @property
    def is_renewal_due(self) -> bool:
        if self.protocol is None or not self.is_alive:
            return False
        return self.renewal_sent is not None or self.now >= self.renewed_at + self.simulation.ttl / 4

    # Its procedures.

    def woken(self, keys: list[str]) -> None:
        """Wake the member if it watches one of these keys, which have changed."""
        if any(key in self.watching or f"{key.rpartition('/')[0]}/" in self.watching for key in keys):
            self.is_woken = True
        if self.protocol is not None and any(key in self.protocol.pin_keys for key in keys):
            self.is_woken_to_pin = True

    @property
    def must_look(self) -> bool:
        protocol = self.protocol
        if protocol is None or not self.is_joined:
            return False
        if self.is_woken:
            return True
        if any(holding.is_revoking and holding.lane.is_drained for holding in protocol.held.values()):
            return True
        return self.now >= self.fence_at

    @property
    def fence_at(self) -> float:
        """When, as the leader, it has to look whether a partition was handed over in time."""
        return float("inf") if self.protocol is None else self.protocol.fence_at

    @property
    def next_operation(self) -> Operation | None:
        """The operation that it is about to send, or has sent."""
        return self.operation if self.request is None else self.request.operation

    @property
    def is_writing(self) -> bool:
        return isinstance(self.next_operation, Write)

    @property
    def has_task(self) -> bool:
        """Whether there is something to do at once, messages aside."""
        if self.is_out:
            return False
        if self.steps is not None or self.protocol is None or not self.is_alive:
            return True
        if self.is_leaving:
            return not self.in_hand
        if not self.is_joined:
            return self.is_woken_to_pin
        return self.topic != self.simulation.topic or self.must_look or bool(self.protocol.due() or self.failures)

    def step(self) -> None:
        """Take the next step of the procedure that is under way, or the first step of the next one."""
        is_at_it = self.operation is not None or self.request is not None
        if self.protocol is not None and not self.is_alive and not (is_at_it and self.simulation.rng.random() < 0.8):
            self.lose("its lease's deadline has passed")
        elif self.request is not None:
            self._go_on(self.request)
        elif self.operation is not None:
            self._send(self.operation)
        else:
            self._begin()

    def _begin(self) -> None:
        protocol = self.protocol
        if protocol is None:
            if self.is_leaving:
                self.is_out = True
            else:
                self._join()
        elif self.topic != self.simulation.topic:
            self.lose("its topic was created anew")
        elif self.is_leaving:
            for holding in protocol.held.values():
                holding.lane.is_stopping = True
            if not self.in_hand:
                self._perform("leave", protocol.commit(list(protocol.held), is_last=True))
        elif not self.is_joined:
            self.is_woken_to_pin = False
            self._perform("pin", protocol.pin())
        elif self.must_look:
            self.is_woken = False
            self.watching = rearmed(self.watching, protocol.watched_keys()) or self.watching
            self._perform("look", protocol.look(self.now))
        elif protocol.due() and not (self.failures and self.simulation.rng.random() < 0.5):
            self._perform("commit", protocol.commit(protocol.due()))
        elif self.failures:
            self._pause(protocol)

    def fail(self) -> None:
        """A handler could not handle a message. Whether more is handed out does not matter to the protocol."""
        if self.protocol is None or not self.is_alive:
            return
        for partition, holding in self.protocol.held.items():
            if partition not in self.failures and not holding.lane.is_lost:
                failure = f"failure-{self.simulation.next_serial()}"
                self.failures[partition] = holding.lane, Paused(holding.lane.done, "ZeroDivisionError", failure=failure)
                self.simulation.note(self, failure, "of", partition)
                return

    def _pause(self, protocol: MemberProtocol) -> None:
        partition, (lane, paused) = next(iter(self.failures.items()))
        holding = protocol.held.get(partition)
        if holding is None or holding.lane is not lane:
            del self.failures[partition]  # the next owner decides about it
        else:
            self.simulation.decide()  # at the worst moment: the reply to an earlier try may be lost
            self._perform("pause", protocol.pause(partition, paused))

    def _join(self) -> None:
        simulation = self.simulation
        self.topic = simulation.topic
        serial = simulation.next_serial()
        self.incarnation = simulation.incarnation_of(self.name, serial)
        self.lease = f"lease-{serial}"
        self.deadline = self.now + simulation.ttl
        self.renewed_at, self.renewal_sent = self.now, None
        simulation.store.begin_lease(self.lease, simulation.now + simulation.ttl)
        handover_s = simulation.rng.choice((None, simulation.handover_s, simulation.handover_s, 1.0, 30.0))
        record = Member(
            self.name,
            self.topic,
            "orders",
            simulation.partitions,
            since=simulation.now,
            assignor=self.assignor,
            handover_s=handover_s,
        )
        self.protocol = simulation.protocol_of(self, record)
        self.is_woken = True
        self.is_joined, self.is_woken_to_pin, self.watching = False, False, frozenset()
        self._perform("join", self.protocol.join())

    def _perform(self, task: str, steps: Steps[Any]) -> None:
        self.task, self.steps = task, steps
        self.simulation.note(self, task)
        self._advance(None, None)

    def _send(self, operation: Operation) -> None:
        simulation = self.simulation
        operation = simulation.altered(operation, self)
        request = Request(operation, self.incarnation, self.lease)
        needs_lease = isinstance(operation, Write) and (operation.is_leased or operation.ephemeral)
        self.operation = None
        if needs_lease and not self.is_alive:
            self._advance(None, LeaseExpired("the deadline has passed"))
        elif simulation.strikes(self._rate(operation, simulation.rates.unavailable)):
            self._advance(None, RegistryUnavailable("no answer"))
        else:
            self.request = request
            if not simulation.strikes(simulation.rates.slow):
                self._go_on(request)

    def _rate(self, operation: Operation, rate: float) -> float:
        return rate if isinstance(operation, Write) else self.simulation.rates.unanswered_read

    def _go_on(self, request: Request) -> None:
        simulation = self.simulation
        if simulation.strikes(self._rate(request.operation, simulation.rates.timeout)):
            self._give_up(request)
        elif not request.is_applied:
            simulation.apply(request)
            if request.is_applied and not simulation.strikes(simulation.rates.slow):
                self._take_reply(request)
        else:
            self._take_reply(request)

    def _take_reply(self, request: Request) -> None:
        if self.simulation.strikes(self._rate(request.operation, self.simulation.rates.lost_reply)):
            self._give_up(request)
        else:
            self.request = None
            self._advance(request.result, request.error)

    def _give_up(self, request: Request) -> None:
        self.simulation.note(self, "gives up waiting", request.operation)
        self._abandon_request()
        if isinstance(request.operation, Write):
            self._advance(None, OutcomeUnknown("no answer"))
        else:
            self._advance(None, RegistryUnavailable("no answer"))

    def _abandon_request(self) -> None:
        """Stop waiting for the request. A write that was sent may still be applied."""
        request, self.request = self.request, None
        if request is not None and not request.is_applied and isinstance(request.operation, Write):
            self.simulation.late.append(request)

    def _advance(self, result: Any, error: RegistryError | None) -> None:
        assert self.steps is not None
        try:
            self.operation = self.steps.send(result) if error is None else self.steps.throw(error)
        except StopIteration as end:
            self.steps = None
            self._ended(end.value)
        except LeaseExpired:
            self.steps = None
            self.lose("its lease has ended")
        except AssignorMismatch as refusal:
            self.steps = None
            self.lose(str(refusal))
            # An operator corrects the assignor, and starts the member again.
            self.assignor = next(iter(refusal.others.values()))
        except (OutcomeUnknown, RegistryUnavailable, Conflict) as failure:
            self.steps = None
            self._failed(failure)
        if self.stops_at_write_s and isinstance(self.operation, Write):
            self.stopped_until = self.simulation.now + self.stops_at_write_s
            self.stops_at_write_s = 0.0
            self.simulation.note(self, "is stopped before it writes")

    def _ended(self, value: Any) -> None:
        assert self.protocol is not None
        match self.task:
            case "join" | "pin":
                self.is_joined = bool(value)
                if self.is_joined:
                    self.simulation.ghost.joined(self.topic, self.simulation.partitions)
            case "look":
                is_armed = rearmed(self.watching, self.protocol.watched_keys()) is None
                self.is_woken = self.is_woken or bool(value) or not is_armed
                if self.protocol.is_gone:
                    self.lose("the registry does not know it any more")
            case "commit":
                self.is_woken = self.is_woken or bool(value)
            case "pause":
                del self.failures[next(iter(self.failures))]
                self.simulation.decide()
            case "leave":
                self._leave()

    def _failed(self, failure: RegistryError) -> None:
        self.simulation.note(self, f"{self.task} failed", type(failure).__name__)
        match self.task:
            case "join" | "pin":
                self.lose("it could not join")
            case "leave":
                if self.simulation.rng.random() < 0.5:
                    self._leave()
            case _:
                self.is_woken = True

    def _leave(self) -> None:
        self.simulation.note(self, "has left")
        self.simulation.store.end_lease(self.lease)
        self.drop()
        self.is_out = True

    def lose(self, reason: str) -> None:
        """The member loses everything and comes back as another incarnation. The lease may or may not be ended at
        once."""
        self.simulation.note(self, "loses all:", reason)
        if self.protocol is not None:
            self.protocol.lose_all(reason)
        if self.simulation.rng.random() < 0.5:
            self.simulation.store.end_lease(self.lease)
        self.drop()

    def drop(self) -> None:
        """Forget the procedure and the operation that are under way. A write that was sent may still be applied."""
        if self.steps is not None:
            self.steps.close()
        if self.operation is not None and self.simulation.rng.random() < 0.5:
            self.request = Request(self.simulation.altered(self.operation, self), self.incarnation, self.lease)
        self._abandon_request()
        self.steps = self.operation = self.protocol = None
        self.failures.clear()

    # Messages.

    def lanes_to_hand_out(self) -> list[Lane]:
        if self.protocol is None or self.is_leaving or not self.is_alive:
            return []
        end = self.simulation.ghost.end
        return [
            holding.lane
            for partition, holding in self.protocol.held.items()
            if not holding.lane.is_stopping
            and not holding.lane.is_lost
            and holding.lane.position < end[self.topic, partition]
            and holding.lane.position - holding.lane.done < self.simulation.in_hand_max
        ]

    def hand_out(self) -> bool:
        lanes = self.lanes_to_hand_out()
        if not lanes:
            return False
        lane = self.simulation.rng.choice(lanes)
        self.simulation.note(self, "hands out", lane.partition, lane.position)
        self.simulation.ghost.hand_out((self.topic, lane.partition), lane)
        self.in_hand.append((self.topic, lane, lane.position))
        lane.expect((lane.position,))
        lane.position += 1
        return True

    def finish(self) -> bool:
        """Finish a message in hand, whether the lane is lost or not: a handler cannot be stopped."""
        if not self.in_hand or self.simulation.now < self.hangs_until:
            return False
        at = self.simulation.rng.randrange(len(self.in_hand)) if self.acks_in_any_order else 0
        topic, lane, offset = self.in_hand.pop(at)
        self.simulation.ghost.finish((topic, lane.partition), offset)
        lane.ack(offset)
        return True
