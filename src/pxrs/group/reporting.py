"""Records what happens to one member of a group, and what the member does to others, as events (`pxrs.events`).

The protocol tells a `Reporter` what the registry has confirmed (`Reports`); the parts of a member (`session.py`,
`rounds.py`, `pauses.py`, `leaving.py`) and the consumer tell it the rest. It records each as one event, and returns at
once: nothing here waits for a store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pxrs.events.model import Json
from pxrs.events.recording import LOGGED_ONLY, Recorder
from pxrs.failures import Failure
from pxrs.group.incarnation import Reports
from pxrs.group.lane import Lane
from pxrs.group.protocol import MemberProtocol
from pxrs.group.records import Earlier, Owner, Target
from pxrs.log.contract import Source
from pxrs.log.numbering import TopicPartition
from pxrs.model import is_internal

TARGETS_MAX: Final = 100
"""For how many members an event of an assignment says how many partitions each was given."""


class Reporter(Reports):
    """The events of one member, through all its incarnations. Any thread may call it."""

    def __init__(self, group: str, member: str, source: Source, recorder: Recorder = LOGGED_ONLY) -> None:
        self._group, self._member, self._recorder = group, member, recorder
        self._names = {part.id: part.name for part in source.parts}
        self._protocol: MemberProtocol | None = None
        """The last incarnation that began, also if it has ended since."""
        self._stored: dict[TopicPartition, int] = {}
        """By partition: the epoch of the last claim whose event is stored."""

    def begin(self, protocol: MemberProtocol) -> None:
        """This incarnation is about to join."""
        self._protocol = protocol

    # The protocol.

    def owner_changed(self, change: str, place: TopicPartition, before: Owner, after: Owner) -> None:
        fields = {**self.place(place), "epoch": after.epoch, "past": [list(each) for each in after.past]}
        from_ = _from(after.past)
        former = {"from_member": from_.name, "from_incarnation": from_.incarnation} if from_ is not None else {}
        nobody = {"member": "", "incarnation": None}
        if change == "released":
            self._recorder.record("partition.released", **fields, **nobody, **former)
        elif change == "fenced":
            self._recorder.record("partition.fenced", by=self._member, **fields, **nobody, **former)
        else:
            is_first = from_ is None or from_.incarnation == after.incarnation
            is_taken = before.incarnation is not None and not is_first
            name = "claimed" if is_first else "taken_over" if is_taken else "handed_over"
            self._recorder.record(
                f"partition.{name}",
                lambda: self._note_stored(place, after.epoch),
                **fields,
                member=after.name,
                incarnation=after.incarnation,
                **({} if is_first else former),
            )

    def _note_stored(self, place: TopicPartition, epoch: int) -> None:
        self._stored[place] = epoch

    def is_stored(self, place: TopicPartition, epoch: int) -> bool:
        return self._stored.get(place) == epoch

    def targets_written(self, targets: Mapping[str, Target]) -> None:
        counts = {name: sum(map(len, each.partitions.values())) for name, each in sorted(targets.items())}
        self._recorder.record(
            "group.assigned",
            **self._who(),
            generation=max(each.generation for each in targets.values()),
            targets=dict(list(counts.items())[:TARGETS_MAX]),
        )

    def checkpoint_refused(self, lane: Lane) -> None:
        self._recorder.record("partition.refused", **self.lane(lane), offset=lane.done)

    # The member.

    def joined(self, protocol: MemberProtocol) -> None:
        record = protocol.member
        topics = [each.name for each in record.reads]
        self._recorder.record("member.joined", **self._who(), host=record.host, pid=record.pid, topics=topics)

    def left(self) -> None:
        self._recorder.record("member.left", **self._who())

    def lost_lease(self, partitions: int) -> None:
        self._recorder.record("member.lost_lease", **self._who(), partitions=partitions)

    def stuck(self, seconds: float | None) -> None:
        self._recorder.record("member.stuck", **self._who(), seconds=seconds)

    def failed(self, error: BaseException) -> None:
        self._recorder.record("member.failed", **self._who(), error=str(error), error_type=type(error).__name__)

    def lost(self, lane: Lane) -> None:
        reason, has_undone = lane.lost_reason, lane.has_undone
        self._recorder.record("partition.lost", **self.lane(lane), reason=reason, has_undone=has_undone)

    # Failed messages.

    def failure(self, name: str, lane: Lane, offset: int, failure: Failure, **more: Json) -> None:
        """Record that a message failed. name: that of the event. `message.*` of an internal topic is only logged: an
        event for each failed event would keep a consumer of `_events` whose handler always fails from ever reaching
        the end."""
        told = {**self.lane(lane), "offset": offset, "error": failure.text, "error_type": failure.type}
        is_kept = not name.startswith("message.") or not is_internal(str(told.get("topic", "")))
        (self._recorder if is_kept else LOGGED_ONLY).record(name, **told, **more)

    def decided(self, name: str, lane: Lane, offset: int) -> None:
        """Record that an administrator has decided about a failed message. name: that of the event."""
        self._recorder.record(name, **self.lane(lane), offset=offset)

    # Fields.

    def _who(self) -> dict[str, Json]:
        return {"group": self._group, "member": self._member, "incarnation": self.incarnation}

    @property
    def incarnation(self) -> str | None:
        """Of the member, since it last joined, or is about to; None before that."""
        return None if self._protocol is None else self._protocol.incarnation

    def place(self, place: TopicPartition) -> dict[str, Json]:
        """The fields that name a partition."""
        id, partition = place
        return {"group": self._group, "topic": self._names.get(id, id), "topic_id": id, "partition": partition}

    def lane(self, lane: Lane) -> dict[str, Json]:
        """The fields that name a partition, and this member as its owner, in the incarnation that claimed it: the
        member may have joined anew since."""
        protocol = self._protocol
        place = {"group": self._group, "partition": lane.partition}
        if protocol is not None:
            place = self.place(protocol.place(lane.partition))
        return {**place, "epoch": lane.epoch, "member": self._member, "incarnation": lane.incarnation}


def _from(past: tuple[Earlier, ...]) -> Earlier | None:
    """The last member that owned the partition; None if none is known."""
    return next((each for each in reversed(past) if each.incarnation is not None), None)
