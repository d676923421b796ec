"""A member of a simulated group: what a real member's thread does (`pxrs.group.member`), one step at a time.

The member performs one procedure of `MemberProtocol` at a time. `step` continues the procedure that is under way, or
begins the next one:

    what is the case                                         `step` does
    the lease's deadline has passed                          `lose`: give up everything
    an operation or a request is under way                   `Connection.step`
    no protocol, and it is leaving                           `is_out`: the member is removed from the group
    no protocol                                              join, as a new incarnation
    the topic was created anew                               `lose`
    it is leaving, and nothing is in hand                    leave: the last commit, which releases everything
    the starts of some partitions are not written yet        pin
    a watched key has changed, or a deadline was reached     look
    something is done that no checkpoint covers              commit
    the handler has failed on a message                      pause

Between any two steps the member can be stopped, for a while or for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pxrs.errors import AssignorMismatch, Conflict, LeaseExpired, OutcomeUnknown, RegistryError, RegistryUnavailable
from pxrs.group.checkpoints import Holding
from pxrs.group.lane import Lane
from pxrs.group.protocol import MemberProtocol, rearmed
from pxrs.group.records import Home, Member, ReadTopic
from pxrs.registry.steps import Steps, Write
from pxrs.testing.simulator.admin import retry_paused
from pxrs.testing.simulator.connection import Connection
from pxrs.testing.simulator.consumer import SimulatedConsumer
from pxrs.testing.simulator.environment import Environment
from pxrs.testing.simulator.settings import TTL_S


class SimulatedMember:
    """One member, through all its incarnations."""

    def __init__(self, environment: Environment, name: str, *, acks_in_any_order: bool) -> None:
        self.environment, self.name = environment, name
        self.assignor = environment.assignor_of()
        self._reads = environment.topics_of_new_member()
        """The topics that it reads: their places in `Environment.topics`."""
        self.consumer = SimulatedConsumer(environment, self, acks_in_any_order=acks_in_any_order)
        self.connection = Connection(environment, self)
        self.protocol: MemberProtocol | None = None
        """Of the present incarnation; None before it joins and after it has lost everything."""
        self.incarnation = ""
        self.lease = ""
        self.deadline = 0.0
        """The lease's deadline, on the member's own clock."""
        self.clock_ahead = 0.0
        """How far the member's clock is ahead of the store's."""
        self.stopped_until = 0.0
        """The member takes no step before this time of the store."""
        self.stops_at_write_s = 0.0
        """If not 0, the member is stopped for so many seconds when it has decided on its next write."""
        self.renewals_fail_until = 0.0
        """Renewals of the lease fail before this time of the store."""
        self._renewal_sent: float | None = None
        """When the renewal was sent that is under way."""
        self._renewed_at = 0.0
        self.is_leaving = False
        self.is_out = False
        """The member has left for good."""
        self.is_woken = False
        """A watched key has changed since the last look began, or the member has to look for another reason."""
        self.watching: frozenset[str] = frozenset()
        """The keys and folders that the member's watch covers."""
        self._is_joined = False
        """The start of every partition is written."""
        self._is_woken_to_pin = False
        self.task = ""
        """The name of the procedure that is under way, or was last."""
        self.procedure: Steps[Any] | None = None

    def __repr__(self) -> str:
        return self.incarnation or self.name

    # Time and lease.

    @property
    def now(self) -> float:
        """The time on the member's own clock."""
        return self.environment.now + self.clock_ahead

    @property
    def is_alive(self) -> bool:
        """Whether the member may act as an owner: the deadline of its lease is ahead (G8)."""
        return self.now < self.deadline

    @property
    def is_stopped(self) -> bool:
        return self.environment.now < self.stopped_until

    @property
    def held(self) -> Mapping[int, Holding]:
        """What the member believes to own, by partition; nothing past the lease's deadline."""
        return {} if self.protocol is None or not self.is_alive else self.protocol.held

    def renew(self, *, anew: bool = False) -> None:
        """Send a renewal of the lease, or take the reply to the one that was sent. The new deadline counts from the
        sending.

        anew: forget a renewal that is under way; send one, and take its reply."""
        if self.protocol is None:
            return
        sent = self.now if anew else self._renewal_sent
        self._renewal_sent = None
        if sent is None:
            self._renewal_sent = self.now
            return
        environment = self.environment
        are_failing = environment.now < self.renewals_fail_until
        if are_failing and environment.rng.random() < 0.5:
            return
        if not environment.store.renew_lease(self.lease, environment.now + TTL_S):
            return
        if self.is_alive and not are_failing:
            self.deadline = max(self.deadline, sent + TTL_S)
            self._renewed_at = self.now

    @property
    def is_renewal_due(self) -> bool:
        if self.protocol is None or not self.is_alive:
            return False
        return self._renewal_sent is not None or self.now >= self._renewed_at + TTL_S / 4

    # What is to be done.

    def woken(self, keys: list[str]) -> None:
        """These keys have changed. Only a key that the member watches wakes it."""
        if any(key in self.watching or f"{key.rpartition('/')[0]}/" in self.watching for key in keys):
            self.is_woken = True
        if self.protocol is not None and any(key in self.protocol.pin_keys for key in keys):
            self._is_woken_to_pin = True

    @property
    def must_look(self) -> bool:
        protocol = self.protocol
        if protocol is None or not self._is_joined:
            return False
        if self.is_woken:
            return True
        if any(holding.is_revoking and holding.lane.is_drained for holding in protocol.held.values()):
            return True
        return self.now >= self.fence_at

    @property
    def fence_at(self) -> float:
        """When the member, as the leader, has to see whether a partition was handed over in time."""
        return float("inf") if self.protocol is None else self.protocol.fence_at

    def readable(self) -> list[Lane]:
        """The lanes of which a message can be handed out now."""
        return [] if self.is_leaving else self.consumer.readable(self.held)

    @property
    def has_task(self) -> bool:
        """Whether `step` has something to do now. Messages are not counted."""
        if self.is_out:
            return False
        if self.procedure is not None or self.protocol is None or not self.is_alive:
            return True
        if self.is_leaving:
            return not self.consumer.in_hand
        if not self._is_joined:
            return self._is_woken_to_pin
        is_of_another_topic = self.consumer.topics != self.topics
        return is_of_another_topic or self.must_look or bool(self.protocol.due() or self.consumer.failures)

    @property
    def topics(self) -> tuple[ReadTopic, ...]:
        """The topics that it reads, as they are now."""
        return tuple(self.environment.topics[at] for at in self._reads)

    # Its procedures.

    def step(self) -> None:
        """Take the next step, see the table in the module's docstring."""
        connection, rng = self.connection, self.environment.rng
        if self.protocol is not None and not self.is_alive and not (connection.is_busy and rng.random() < 0.8):
            self.lose("its lease's deadline has passed")
        elif connection.is_busy:
            connection.step()
        else:
            self._begin()

    def _begin(self) -> None:
        protocol, consumer = self.protocol, self.consumer
        if protocol is None:
            if self.is_leaving:
                self.is_out = True
            else:
                self._join()
        elif consumer.topics != self.topics:
            self.lose("its topic was created anew")
        elif self.is_leaving:
            for holding in protocol.held.values():
                holding.lane.is_stopping = True
            if not consumer.in_hand:
                self._perform("leave", protocol.commit(list(protocol.held), is_last=True))
        elif not self._is_joined:
            self._is_woken_to_pin = False
            self._perform("pin", protocol.pin())
        elif self.must_look:
            self.is_woken = False
            self.watching = rearmed(self.watching, protocol.watched_keys()) or self.watching
            self._perform("look", protocol.look(self.now))
        elif protocol.due() and not (consumer.failures and self.environment.rng.random() < 0.5):
            self._perform("commit", protocol.commit(protocol.due()))
        elif consumer.failures:
            self._pause(protocol)

    def _pause(self, protocol: MemberProtocol) -> None:
        partition, (lane, paused) = next(iter(self.consumer.failures.items()))
        holding = protocol.held.get(partition)
        if holding is None or holding.lane is not lane:
            del self.consumer.failures[partition]  # another owner has the partition, and will fail by itself
        else:
            # Here, because the reply to an earlier try may have been lost.
            retry_paused(self.environment)
            self._perform("pause", protocol.pause(partition, paused))

    def _join(self) -> None:
        environment = self.environment
        settings, topics = environment.settings, self.topics
        self.consumer.join(topics)
        serial = environment.next_serial()
        self.incarnation = environment.incarnation_of(self.name, serial)
        self.lease = f"lease-{serial}"
        self.deadline = self.now + TTL_S
        self._renewed_at, self._renewal_sent = self.now, None
        environment.store.begin_lease(self.lease, environment.now + TTL_S)
        handover_s = environment.rng.choice((None, settings.handover_s, settings.handover_s, 1.0, 30.0))
        record = Member.reading(
            self.name,
            topics,
            since=environment.now,
            assignor=self.assignor,
            handover_s=handover_s,
        )
        numbering = record.numbering
        self.protocol = environment.protocol(
            environment.keys,
            self.incarnation,
            record,
            self.consumer,
            lambda number, first: environment.ghost.end[numbering.place(number)] if settings.starts_latest else first,
            wall=lambda: environment.now,
            keys_max=settings.keys_max,
            handover_s=settings.handover_s,
            home=Home("hub", "the only one"),
            keeps_unread=record.topics,
        )
        self.is_woken = True
        self._is_joined, self._is_woken_to_pin, self.watching = False, False, frozenset()
        self._perform("join", self.protocol.join())

    def _perform(self, task: str, procedure: Steps[Any]) -> None:
        self.task, self.procedure = task, procedure
        self.environment.note(self, task)
        self.advance(None, None)

    def advance(self, result: Any, error: RegistryError | None) -> None:
        """Continue the procedure with the result of its last operation, or with an error."""
        assert self.procedure is not None
        connection = self.connection
        try:
            connection.operation = self.procedure.send(result) if error is None else self.procedure.throw(error)
        except StopIteration as end:
            self.procedure = None
            self._ended(end.value)
        except LeaseExpired:
            self.procedure = None
            self.lose("its lease has ended")
        except AssignorMismatch as refusal:
            self.procedure = None
            self.lose(str(refusal))
            self.assignor = next(iter(refusal.others.values()))  # somebody corrects the setting and starts it again
        except (OutcomeUnknown, RegistryUnavailable, Conflict) as failure:
            self.procedure = None
            self._failed(failure)
        if self.stops_at_write_s and isinstance(connection.operation, Write):
            self.stopped_until = self.environment.now + self.stops_at_write_s
            self.stops_at_write_s = 0.0
            self.environment.note(self, "is stopped before it writes")

    def _ended(self, value: Any) -> None:
        """The procedure has returned this value."""
        assert self.protocol is not None
        match self.task:
            case "join" | "pin":
                self._is_joined = bool(value)
                if self._is_joined:
                    self.environment.ghost.joined(self.consumer.topics)
            case "look":
                is_armed = rearmed(self.watching, self.protocol.watched_keys()) is None
                self.is_woken = self.is_woken or bool(value) or not is_armed
                if self.protocol.is_gone:
                    self.lose("the registry does not know it any more")
            case "commit":
                self.is_woken = self.is_woken or bool(value)
            case "pause":
                del self.consumer.failures[next(iter(self.consumer.failures))]
                retry_paused(self.environment)
            case "leave":
                self._leave()

    def _failed(self, failure: RegistryError) -> None:
        """The procedure has raised this error."""
        self.environment.note(self, f"{self.task} failed", type(failure).__name__)
        match self.task:
            case "join" | "pin":
                self.lose("it could not join")
            case "leave":
                if self.environment.rng.random() < 0.5:
                    self._leave()
            case _:
                self.is_woken = True

    def _leave(self) -> None:
        self.environment.note(self, "has left")
        self.environment.store.end_lease(self.lease)
        self.drop()
        self.is_out = True

    def lose(self, reason: str) -> None:
        """Give up everything; the next step joins as another incarnation. The lease may or may not be ended at once."""
        self.environment.note(self, "loses all:", reason)
        if self.protocol is not None:
            self.protocol.lose_all(reason)
        if self.environment.rng.random() < 0.5:
            self.environment.store.end_lease(self.lease)
        self.drop()

    def drop(self) -> None:
        """Forget the incarnation and its procedure, as a crash does. A write that was sent may still be applied."""
        if self.procedure is not None:
            self.procedure.close()
        self.connection.abandon()
        self.procedure = self.protocol = None
        self.consumer.failures.clear()
