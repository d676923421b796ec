"""What becomes of the messages in hand: done, handed out again, or decided by a transaction.

`states` has the table of what each call does. This module applies it to the lanes.

What is in hand is recorded by the lanes (`pxrs.group.lane`): everything from `done` to `position`. "Done" means that
the next checkpoint covers it, which the member's thread writes about once a second, and `commit` at once. A checkpoint
whose reply was lost is in doubt; the member reads it again before it writes the next one
(`Holding.checkpoint_version`).

A queue transaction that has the checkpoint (`Transaction.checkpoint(consumer)`) covers what was handed out when
`checkpoint` was called. What is handed out later, until the transaction ends, is in hand as usual.

Invariants:
- A message is counted as done only by the thread that has it in hand, or by a transaction that was committed.
- While an open transaction has the checkpoint, nothing that it covers is counted as done or handed out again.
- The outcome of a transaction is applied once, in one step, to all lanes: `Lanes.lock` is held for it. It is asked for
  without the lock, because that may be a call of the registry.

Threads: `mode`, the readings and what is lost change under `Lanes.lock`. Any thread may call `commit`, `ack` and
`is_held`. The rest is for the thread that reads; `Readings` refuses a second one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final, NamedTuple, Protocol

from pxrs import arguments
from pxrs.consumer.lanes import Lanes
from pxrs.consumer.read_ahead import ReadAhead
from pxrs.consumer.readers import Reading, Readings
from pxrs.consumer.states import HELD_REFUSAL, REFUSALS, TRANSITIONS, Event, InHand, Mode
from pxrs.errors import CommitUnknown, ConsumerBusy, GroupUnavailable, InvalidGroup, OutcomeLost, PartitionLost
from pxrs.group.committing import CommitMore
from pxrs.group.lane import Lane
from pxrs.group.member import GroupMember
from pxrs.log.batch import Batch
from pxrs.model import Message, TopicPartition
from pxrs.registry.limit import time_limit

_ACK: Final = Event.ACK


class QueueTransaction(Protocol):
    """A transaction of work queues, as far as a consumer knows it."""

    id: str
    was_doubted: bool
    """Whether the reply to its commit was lost."""

    def outcome(self) -> str:
        """Return "open", "committed" or "rolled back". Raises OutcomeLost if that is not known any more."""


class Covered(NamedTuple):
    """How much of a lane the checkpoint of a queue transaction covers."""

    offset: int
    """Everything before this offset."""
    seeks: int
    """`Lane.seeks` at that moment: after a `seek`, the transaction covers nothing of the lane."""


class Settling:
    """The messages that one consumer has in hand, and what becomes of them."""

    # Over the limit: each event of the table in `states.py` has its method here, and each fact that they ask for too.

    def __init__(
        self, group: str, lanes: Lanes, read_ahead: ReadAhead, member: GroupMember, *, is_manual: bool
    ) -> None:
        """is_manual: ack="manual"."""
        self._group, self._lanes, self._read_ahead, self._member = group, lanes, read_ahead, member
        # Kept as attributes because `ack`, which is called for each message, uses them.
        self._lock, self._lane_of, self._numbers = lanes.lock, lanes.get, lanes.names.numbers
        self.mode = Mode.MANUAL if is_manual else Mode.AUTO
        self._readings = Readings(group)
        self._polled: Lane | None = None
        """The lane of the messages that the last `poll` returned, until they are done or handed out again."""
        self._polled_by: threading.Thread | None = None
        """The thread that called that `poll`."""
        self._polled_before: set[Lane] = set()
        """In the mode HELD: the lanes of earlier calls of `poll`, whose messages are in hand too."""
        self.transaction: QueueTransaction | None = None
        """In the mode HELD: the transaction that has the checkpoint. Otherwise None."""
        self._covered: dict[Lane, Covered] = {}
        """In the mode HELD: what the checkpoint of that transaction covers."""
        self.committed_by: str | None = None
        """Id of a transaction that turned out to be committed after its reply was lost; cleared at the next
        hand-out."""
        self._lost: dict[int, str] = {}
        """Partitions that were lost with something undone, and why, until `commit` has raised PartitionLost."""
        self._lost_in_hand: set[int] = set()
        """Partitions that were lost with messages in hand, until more is asked for; in the mode HELD, until the
        transaction has ended."""

    # The table.

    def check_possible(self, event: Event) -> None:
        """Raise InvalidGroup if the consumer is read in a way that always refuses the event.

        Whether a reading may begin is not decided here in two modes: in HELD the transaction may have ended by now, so
        that `begin` decides; in RUN another thread reads, so that `enter` raises ConsumerBusy."""
        if event in (Event.RUN, Event.SQL) and self.mode in (Mode.HELD, Mode.RUN):
            return
        if event not in TRANSITIONS[self.mode]:
            raise InvalidGroup(REFUSALS[event])

    def _apply(self, event: Event) -> InHand:
        """Change the mode as the table says. Returns what becomes of the messages in hand. The caller holds the lock.

        Raises InvalidGroup if the table does not have the event."""
        mode = self.mode
        found = TRANSITIONS[mode].get(event)
        if found is None:
            refusal = REFUSALS.get(event, f"{event.value} is not possible while `{mode.value}` is running")
            raise InvalidGroup(HELD_REFUSAL if mode is Mode.HELD else refusal)
        if found.mode is not mode:  # an event of another thread, which leaves the mode, must not undo what `end` writes
            self.mode = found.mode
        return found.in_hand

    @property
    def expects_acks(self) -> bool:
        """Whether messages stay in hand when more is asked for, because `ack` or a COMMIT counts them as done."""
        return self.mode is Mode.MANUAL or self.mode is Mode.SQL

    # Which thread reads: see `readers`.

    def enter(self, reading: Reading) -> None:
        """Register a call that hands out messages. Raises ConsumerBusy if another thread reads, or has messages in hand
        that its `poll` returned."""
        lock = self._lanes.lock
        with lock:
            self._readings.check_alone(reading.thread)
        if self._polled is not None and self._polled_by is not reading.thread:
            self.is_held()  # a transaction that has ended by now has decided about what was polled
        with lock:
            thread = self._polled_by
            if self._polled is not None and thread is not None and thread is not reading.thread:
                polled = self._polled_before | {self._polled}
                is_in_hand = any(lane.done < lane.handed and self._lanes.is_owned(lane) for lane in polled)
                if is_in_hand and not self.expects_acks:
                    ended = "" if thread.is_alive() else "(which has ended) "
                    raise ConsumerBusy(
                        self._group,
                        thread.name,
                        f"{ended}has messages in hand that its `poll` returned: call `commit` if they are done, or "
                        "close the consumer to have them handed out again; with ack='manual' any thread may poll",
                    )
            self._readings.add(reading)

    def check_step(self, reading: Reading, is_under_way: bool) -> None:
        """Raise ConsumerBusy unless this thread may take the next step of a loop.

        is_under_way: another thread takes a step right now."""
        me = threading.current_thread()
        if reading.thread is me and not is_under_way:
            return
        if is_under_way or self.mode is not Mode.MANUAL:
            raise ConsumerBusy(
                self._group,
                reading.thread.name,
                f"is in {reading.what}: only that thread may use its iterator; with ack='manual' threads take turns",
            )
        reading.thread = me

    # Events of the thread that reads.

    def begin(self, event: Event) -> None:
        """A loop (LOOP), `run` (RUN) or a loop over `transactions` (SQL) begins. Raises InvalidGroup if it may not."""
        self.is_held()
        with self._lanes.lock:
            moved = self._rewind() if self._apply(event) is InHand.AGAIN else []
        self.wake_if_drained(moved)

    def end(self, event: Event) -> None:
        """`run` (RUN_ENDS) or a loop over `transactions` (SQL_ENDS) has ended.

        Without the lock: the garbage collector may close a loop on any thread, also on one that holds the lock. No
        other thread changes the mode between `begin` and this."""
        self._apply(event)

    def begin_poll(self) -> None:
        """`poll` was called: what the last one returned is done. So is what a loop has in hand if it is still under
        way; what a loop was left with is handed out again."""
        self.is_held(is_through=True)
        moved: list[Lane] = []
        with self._lanes.lock:
            if self._apply(Event.MORE) is not InHand.DONE:
                if self.mode is Mode.HELD and self._polled is not None:
                    self._polled_before.add(self._polled)
            elif self._readings.has_loop:
                moved = self._finish_all()
            else:
                if self._polled is not None:
                    moved = [*self._polled_before, self._polled]
                    for lane in moved:
                        lane.finish()
                moved += self._rewind()
        self.wake_if_drained(moved)

    def note_polled(self, lane: Lane, thread: threading.Thread) -> None:
        """`poll` is about to return messages of this lane."""
        self._polled_by = thread
        self._polled = lane  # last: if an interrupt keeps the messages from the user, they are handed out again

    def begin_hand_out(self) -> None:
        """The thread that reads looks for messages to hand out."""
        self.committed_by = None
        if self.transaction is None:
            with self._lanes.lock:
                self._lost_in_hand.clear()

    def finish(self, lane: Lane) -> None:
        """The thread that has messages of the lane in hand asks for more (MORE, for one lane)."""
        self.committed_by = None
        if not self.is_held(is_through=True) and TRANSITIONS[self.mode][Event.MORE].in_hand is InHand.DONE:
            lane.finish()

    def pass_gap(self, lane: Lane, position: int, batch: Batch) -> None:
        """All messages of the batch were handed out: move the lane from `position` to the end of the batch, if the
        source has a gap there. If nothing is in hand, the gap is done; otherwise whatever counts the messages
        before the gap as done counts the gap too."""
        if batch.offsets is None or lane.position != position or lane.is_stopping or batch.next_offset <= position:
            return
        with self._lanes.lock:  # an `ack` on another thread is for a message before the gap, or for one behind it
            if lane.is_drained:
                lane.position = lane.handed = lane.done = batch.next_offset
            else:
                lane.position = lane.handed = batch.next_offset
                if self._covered.get(lane) == (position, lane.seeks):
                    self._covered[lane] = Covered(batch.next_offset, lane.seeks)

    def retract(self, lane: Lane, offset: int) -> None:
        """Undo a hand-out that began at this offset and was not confirmed."""
        lane.position = lane.handed
        with self._lanes.lock:  # other threads may acknowledge messages before it
            lane.retract(min(lane.handed, offset))

    def wake_if_drained(self, lanes: Iterable[Lane]) -> None:
        """Wake the member if one of these lanes is stopping and nothing of it is in hand any more, so that the member
        releases it now."""
        if any(lane.is_stopping and lane.is_drained for lane in lanes):
            self._member.wake()

    # Events of any thread.

    def ack(self, message: Message) -> None:
        """Count one message as done. Raises InvalidGroup without ack="manual", and PartitionLost."""
        with self._lock:
            if _ACK not in TRANSITIONS[self.mode]:  # `check_possible` in line: this is called for each message
                raise InvalidGroup(REFUSALS[_ACK])
            if not isinstance(message, Message):
                raise InvalidGroup(f"{arguments.shown(message)} is not a message that this consumer handed out")
            if self._numbers is None:
                lane = self._lane_of(message.partition)
            else:
                lane = self._lane_of(self._numbers.get(message[:2], -1))
            if lane is None or lane.epoch != message.epoch:
                raise PartitionLost(self._group, [self._name_of(message)])
            lane.ack(message.offset)
        if lane.is_stopping:
            self.wake_if_drained((lane,))

    def _name_of(self, message: Message) -> int | TopicPartition:
        return message.partition if self._numbers is None else TopicPartition(message.topic, message.partition)

    def commit(self, *, is_callback: bool) -> None:
        """Write the checkpoints now. Everything that was handed out counts as done, as the table says; but in a
        callback, or if another thread reads, what is in hand stays in hand: only the thread that has it can tell.

        Raises PartitionLost also for partitions that were lost before: the member's thread may have noticed first. Not
        in a callback, because the thread that reads is to get it."""
        if not is_callback:
            with time_limit(self._member.session.registry.timeout_s):
                self.is_held()
            with self._lanes.lock:
                moved = self._finish_all() if self._apply(Event.COMMIT) is InHand.DONE else []
            self.wake_if_drained(moved)
        lost: dict[int, str] = {}
        try:
            self._member.commit()
        except PartitionLost as error:
            lost = dict.fromkeys(map(self._lanes.names.number, error.partitions), error.reason)
        except (CommitUnknown, GroupUnavailable) as error:
            if error.partitions or not self._lost:
                raise
            # Nothing is left to be written: what was done is lost already, which is raised below.
        with self._lanes.lock:
            if not is_callback:
                lost = {**self._lost, **lost}
                self._lost.clear()
        if lost:
            named = self._lanes.names.named(sorted(lost))
            raise PartitionLost(self._group, named, "; ".join(sorted(set(lost.values()))))

    def note_lost(self, lane: Lane) -> None:
        """The partition was lost, or released, with something undone."""
        with self._lanes.lock:
            self._lost[lane.partition] = lane.lost_reason
            if lane.done < lane.handed:
                self._lost_in_hand.add(lane.partition)

    # Transactions of work queues.

    def partitions_in_hand(self) -> int:
        """How many partitions have messages in hand."""
        with self._lanes.lock:
            return sum(lane.done < lane.handed for lane in self._lanes.all())

    def hold(self, transaction: QueueTransaction) -> None:
        """Let this transaction decide what becomes of everything that is in hand now (CHECKPOINT)."""
        self.check_possible(Event.CHECKPOINT)
        if self.transaction is not transaction:
            if self.is_held():
                raise InvalidGroup("another open transaction has the checkpoint of the messages that were handed out")
            if self.committed_by is not None:
                raise InvalidGroup(
                    f"the messages that were handed out are done: transaction {self.committed_by}, whose reply was "
                    "lost, was committed; continue to read"
                )
        with self._lanes.lock:
            self._readings.check_alone(threading.current_thread())  # only the thread that reads knows what is done
            self._apply(Event.CHECKPOINT)
            self._covered = {lane: Covered(lane.handed, lane.seeks) for lane in self._lanes.all()}
            self.transaction = transaction

    def commit_with(self, write: CommitMore) -> dict[str, int]:
        """Write the checkpoint of what the transaction covers, in one commit with something else: see
        `GroupMember.commit_with`."""
        self.check_possible(Event.CHECKPOINT)
        return self._member.commit_with(self._finish_if_owned, write)

    def is_held(self, *, is_through: bool = False) -> bool:
        """Whether an open transaction decides about what is in hand. If the transaction has ended, its outcome is
        applied here first (COMMITTED or ROLLED_BACK).

        is_through: the thread that reads is through with what was handed out, and asks for more. Then, in a loop, what
                    was handed out after `checkpoint` is done too if the transaction was committed."""
        transaction = self.transaction
        if transaction is None:
            return False
        try:
            became = transaction.outcome()
        except OutcomeLost:  # if it was committed after all, the next checkpoint is refused, and the right one is read
            became = "rolled back"
        if became == "open":
            return True
        with self._lanes.lock:
            if self.transaction is not transaction:  # another thread has applied the outcome
                return False
            if self._apply(Event.COMMITTED if became == "committed" else Event.ROLLED_BACK) is InHand.DONE:
                is_loop = is_through and self._readings.has_loop
                moved = self._finish_all() if is_loop else self._finish_covered()
                self.committed_by = transaction.id if transaction.was_doubted and not is_through else None
            else:
                self._lost_in_hand.clear()
                moved = self._rewind()
            self.transaction, self._covered = None, {}
        self.wake_if_drained(moved)
        return False

    def _finish_if_owned(self) -> None:
        """Count what the transaction covers as done. Raises PartitionLost, with nothing changed, if a partition of it
        was lost: then the transaction must not write the others either."""
        with self._lanes.lock:
            lost, self._lost_in_hand = sorted(self._lost_in_hand), set()
            reasons = {self._lost.pop(number, "") for number in lost}
            if lost:
                named = self._lanes.names.named(lost)
                raise PartitionLost(self._group, named, "; ".join(sorted(filter(None, reasons))))
            moved = self._finish_covered()
        self.wake_if_drained(moved)

    # What the table says, applied to the lanes. The caller holds the lock, and calls `wake_if_drained` afterwards.

    def _finish_all(self) -> list[Lane]:
        """Everything that was handed out is done, unless another thread reads: only that thread knows what is done."""
        if self._readings.of_another(threading.current_thread()) is not None:
            return []
        lanes = self._lanes.all()
        for lane in lanes:
            lane.finish()
        return lanes

    def _finish_covered(self) -> list[Lane]:
        """What the transaction covers is done."""
        lanes = [lane for lane in self._lanes.all() if lane in self._covered]
        for lane in lanes:
            covered = self._covered[lane]
            if lane.seeks == covered.seeks:
                lane.done = max(lane.done, covered.offset)
        return lanes

    def _rewind(self) -> list[Lane]:
        """What is in hand is handed out again."""
        self._polled = self._polled_by = None
        self._polled_before.clear()
        lanes = [lane for lane in self._lanes.all() if not lane.is_drained]
        for lane in lanes:
            self._read_ahead.discard(lane)
            lane.seek(lane.done)
        return lanes
