"""What a simulated member does with messages: it hands them out, finishes them, and fails on some.

The protocol calls the hooks (`assigned`, `revoked`, ...) as it does those of a real consumer. Nothing is read: a
message is an offset, and `Ghost.end` says up to which offset each partition has messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pxrs.group.checkpoints import Holding
from pxrs.group.lane import Lane
from pxrs.group.records import Paused, ReadTopic
from pxrs.log.numbering import Numbering, TopicPartition
from pxrs.testing.simulator.environment import Environment


class SimulatedConsumer:
    """The hooks of `MemberProtocol`, and the messages that a handler has in hand."""

    def __init__(self, environment: Environment, member: object, *, acks_in_any_order: bool) -> None:
        """member: whose messages these are, as events show it."""
        self._environment, self._member, self._acks_in_any_order = environment, member, acks_in_any_order
        self.topics: tuple[ReadTopic, ...] = ()
        """The topics that the member has joined with."""
        self._numbering = Numbering(())
        self.in_hand: list[tuple[TopicPartition, Lane, int]] = []
        """Partition, lane and offset of each message that the handler has and has not finished."""
        self.hangs_until = 0.0
        """The handler finishes nothing before this time."""
        self.revoked_places: list[TopicPartition] = []
        """Partitions that were revoked or lost."""
        self.failures: dict[int, tuple[Lane, Paused]] = {}
        """By partition: a pause that the member has to write, and does not know to be written."""

    def join(self, topics: Sequence[ReadTopic]) -> None:
        """The member joins, and reads these topics."""
        self.topics = tuple(topics)
        self._numbering = Numbering((topic.id, topic.partitions) for topic in topics)

    # Hooks of the protocol.

    def assigned(self, partition: int, epoch: int, offset: int) -> Lane:
        place = self._numbering.place(partition)
        self._environment.note(self._member, "assigned", place, epoch, offset)
        self._environment.ghost.assigned(place, epoch, offset)
        return Lane(partition, epoch, offset)

    def resumed(self, lane: Lane) -> None: ...

    def revoked(self, lane: Lane) -> None:
        self._environment.note(self._member, "revoked", lane)
        self.revoked_places.append(self._numbering.place(lane.partition))

    def released(self, lane: Lane) -> None:
        self._environment.note(self._member, "released", lane)

    def lost(self, lane: Lane) -> None:
        self._environment.note(self._member, "lost", lane)
        self.revoked_places.append(self._numbering.place(lane.partition))

    # Messages. `held` is what the member believes to own now: see `SimulatedMember.held`.

    def acting(self, held: Mapping[int, Holding]) -> Iterator[tuple[TopicPartition, Lane]]:
        """The lanes of which messages are handed out, or are in hand, as of an owner."""
        for partition, holding in held.items():
            lane = holding.lane
            if not lane.is_lost and not (lane.is_stopping and lane.is_drained):
                yield self._numbering.place(partition), lane

    def readable(self, held: Mapping[int, Holding]) -> list[Lane]:
        """The lanes of which a message can be handed out now."""
        end, in_hand_max = self._environment.ghost.end, self._environment.settings.in_hand_max
        return [
            holding.lane
            for partition, holding in held.items()
            if not holding.lane.is_stopping
            and not holding.lane.is_lost
            and holding.lane.position < end[self._numbering.place(partition)]
            and holding.lane.position - holding.lane.done < in_hand_max
        ]

    def hand_out(self, lanes: Sequence[Lane]) -> bool:
        """Hand out the next message of one of these lanes; False if there are none."""
        if not lanes:
            return False
        lane = self._environment.rng.choice(lanes)
        place = self._numbering.place(lane.partition)
        self._environment.note(self._member, "hands out", place, lane.position)
        self._environment.ghost.hand_out(place, lane)
        self.in_hand.append((place, lane, lane.position))
        lane.expect((lane.position,))
        lane.position += 1
        return True

    def finish(self) -> bool:
        """Finish a message in hand, also one of a lane that was lost: nothing can stop a handler. False if the handler
        has none, or hangs."""
        if not self.in_hand or self._environment.now < self.hangs_until:
            return False
        at = self._environment.rng.randrange(len(self.in_hand)) if self._acks_in_any_order else 0
        place, lane, offset = self.in_hand.pop(at)
        self._environment.ghost.finish(place, offset)
        lane.ack(offset)
        return True

    def fail(self, held: Mapping[int, Holding]) -> None:
        """The handler fails on a message, so that the member has to write a pause of the partition. More messages may
        be handed out nevertheless: that makes no difference to the protocol."""
        for partition, holding in held.items():
            if partition not in self.failures and not holding.lane.is_lost:
                failure = f"failure-{self._environment.next_serial()}"
                self.failures[partition] = holding.lane, Paused(holding.lane.done, "ZeroDivisionError", failure=failure)
                self._environment.note(self._member, failure, "of", partition)
                return
