"""The user's rows and the checkpoint in one database transaction, where the registry is in that database (X20).

    for batch, db in inbox.transactions(engine):
        db.execute(...)     # committed together with the checkpoint when the next batch is asked for, or not at all

The problem: if rows and checkpoint are committed apart and the process dies in between, the rows are written again or
lost. In one transaction they are not, as long as a member that has lost its partition cannot commit any more. So the
transaction ends with the registry's own commit of a checkpoint, run on the user's connection: it locks the rows of the
checkpoint and of the owner, compares their versions with those under which this member claimed (G4), and writes.

One batch of one partition, from hand-out to COMMIT:

    state      event                                            next       lane                         checkpoint
    found      the transaction has begun, hand-out confirmed    in hand    position = end
    found      SQLite is locked, or the lane must not move      (again)    put back
    in hand    the body raises, or leaves the loop              undone     seek(start)                  ROLLBACK
    in hand    the next batch is asked for, the fence holds     sent
    in hand    the fence does not hold                          lost       dropped by the member        ROLLBACK
    in hand    the database gives the transaction up            undone     seek(start)                  ROLLBACK
    sent       COMMIT is answered                               done       done = end                   written
    sent       COMMIT is refused, or given up                   undone     seek(start)                  not written
    sent       the reply to COMMIT is lost                      in doubt   seek(start), not handed out  unknown
    in doubt   both rows could be locked, checkpoint >= end     done       seek(checkpoint)             written
    in doubt   both rows could be locked, checkpoint = start    undone     handed out again             not written

Invariants:
- The fence is the last thing before COMMIT, so that a claim waits for that moment and not for the user's work (G10);
  and the server ends a transaction whose client stops in between.
- The member's mutex is not held while the transaction is open: the member's thread may hold the mutex and wait for
  SQLite's one write lock, which this transaction has.
- `Lane.done` moves only when COMMIT was answered, so that no ordinary commit writes this checkpoint.
- In doubt, the messages are handed out again only when the transaction is known to be over: the commit in `_is_decided`
  locks the same two rows. Nothing is handled again on suspicion (R5).

On failure, beyond the table:
- The hub's own record cannot be read, so that nobody can tell whether this registry still counts: rolled back, and
  tried again when it can be read. If the hub was given to another registry, WrongRegistry is raised.
- Other errors of the engine are raised as they are, rolled back. The loop may be started again.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Generator
from typing import Final, Self

from pxrs import arguments
from pxrs.consumer.hand_out import HandOut
from pxrs.consumer.readers import Loop, Reading
from pxrs.consumer.states import Event
from pxrs.errors import Conflict, InvalidGroup, OutcomeUnknown, PartitionLost, RegistryUnavailable, name_partitions
from pxrs.group.checkpoints import CheckpointWrite, FencedWrite, Holding
from pxrs.group.lane import Lane
from pxrs.group.records import Checkpoint
from pxrs.limited_log import Outage
from pxrs.log.batch import Batch
from pxrs.model import Message, TopicPartition
from pxrs.registry.sql.borrowed import (
    Borrowable,
    BorrowedConnection,
    Connection,
    DriverError,
    Engine,
    Fault,
    borrowable_of,
)

_logger = logging.getLogger(__name__)

MAX_MESSAGES_DEFAULT: Final = 500
_RETRY_S: Final = 0.05
_NOT_KNOWN: Final = -1
"""An expected version that no row has, so that `lock_commit` locks the rows and the comparison fails."""
# For how long SQLite's one write lock is left free between two transactions, as a part of the time for which it was
# held. Other connections try again every few milliseconds; renewals of leases are among them.
_FREE_PART: Final = 0.25
_FREE_S_MAX: Final = 0.01


def transactions(
    hand_out: HandOut, engine: Engine, max_messages: int = MAX_MESSAGES_DEFAULT, consumer: object = None
) -> Transactions:
    """Batches of one partition each, with a connection whose transaction also writes the checkpoint.

    The engine must be one for the database that the registry is in: PostgreSQL or SQLite. Each transaction is committed
    when the next batch is asked for. To undo a batch, raise an exception; leaving the loop by `break` undoes it too. In
    the body, commit and roll back nothing but savepoints. Raises InvalidGroup if the engine is for another database, or
    commits by itself.

    consumer: is referred to by the loop, because a consumer that nobody refers to leaves its group."""
    max_messages = arguments.whole(InvalidGroup, "max_messages", max_messages, 1)
    return Transactions(_Loop(hand_out, engine, max_messages, consumer))


class Transactions(Loop[tuple[list[Message], Connection]]):
    """What `transactions` returns. A new iteration first undoes what an earlier loop has left in hand."""

    def __init__(self, loop: _Loop) -> None:
        check_step = loop.hand_out.settling.check_step
        super().__init__("a loop over transactions", functools.partial(_steps, loop), check_step)

    def __iter__(self) -> Self:
        self.restart()
        return self


def _steps(loop: _Loop, reading: Reading) -> Generator[tuple[list[Message], Connection], None, None]:
    hand_out, settling = loop.hand_out, loop.hand_out.settling
    try:
        hand_out.lifetime.check_usable()
        settling.enter(reading)
        settling.begin(Event.SQL)
        try:
            yield from _each(loop)
        finally:
            settling.end(Event.SQL_ENDS)
    finally:
        reading.is_over = True


def _each(loop: _Loop) -> Generator[tuple[list[Message], Connection], None, None]:
    while (found := loop.hand_out.next()) is not None:
        lane, batch = found
        if not loop.is_ready(lane):
            continue
        with loop.engine.connect() as connection:
            taken = loop.take(lane, batch, connection)
            if taken is None:
                continue
            try:
                yield taken.messages, connection
                taken.finish()
            finally:
                taken.end()
        loop.leave_room(taken)


class _Loop:
    """The state of the loop that outlives one transaction."""

    def __init__(self, hand_out: HandOut, engine: Engine, max_messages: int, consumer: object) -> None:
        self.hand_out, self.engine, self.max_messages, self._consumer = hand_out, engine, max_messages, consumer
        self.member = hand_out.member
        self.keys = self.member.keys
        fields = {"group": self.keys.group, "member": self.member.name}
        self._outage = Outage(_logger, f"group {self.keys.group}: before a transaction", extra=fields)
        self.registry = self.member.session.registry
        self.borrowable = self._check_kinds(engine)
        hand_out.settling.check_possible(Event.SQL)
        self._is_checked = self._check_engine()

    # Before a transaction.

    def is_ready(self, lane: Lane) -> bool:
        """Whether a transaction may begin now. If not, this has resolved what prevents it, as far as that is possible
        now."""
        try:
            self.member.check_home()
            self._is_checked = self._is_checked or self._check_engine()
            if self._is_checked and self._is_decided(lane):
                self._outage.worked()
                return True
        except (RegistryUnavailable, OutcomeUnknown) as error:
            self._outage.failed(error)
        time.sleep(_RETRY_S)
        self.put_back(lane)
        return False

    def take(self, lane: Lane, batch: Batch, connection: Connection) -> _Taken | None:
        """Begin a transaction and take messages in hand; None if that is not possible now."""
        hand_out, borrowed = self.hand_out, BorrowedConnection(connection, self.borrowable)
        holding = self.member.session.holding(lane)
        if holding is None or not self.begin(borrowed):
            self.put_back(lane)
            return None
        messages: list[Message] = []
        for message in hand_out.messages_of(lane, batch):
            if len(messages) >= self.max_messages:
                break
            messages.append(message)
        end = batch.next_offset if len(messages) == batch.records.num_rows else messages[-1].offset + 1
        start = lane.position
        # Last: waiting for the database may have taken longer than the lease lives (G8).
        if not hand_out.take_in_hand(lane, batch.base_offset, end):
            self.put_back(lane)
            hand_out.settling.wake_if_drained((lane,))
            return None
        if end < batch.next_offset:
            hand_out.read_ahead.put_back(lane, batch)
        return _Taken(self, holding, borrowed, messages, start, end)

    def begin(self, borrowed: BorrowedConnection) -> bool:
        """Begin a transaction. False if others have kept SQLite's write lock for as long as the engine waits."""
        try:
            borrowed.begin()
        except DriverError as error:
            if borrowed.fault_of(error) is not Fault.BUSY:
                raise
            _logger.info("group %s: the database is locked by others; will try again", self.keys.group)
            return False
        return True

    def put_back(self, lane: Lane) -> None:
        """Hand out the messages of the lane again from its position."""
        with self.hand_out.lanes.lock:
            self.hand_out.read_ahead.discard(lane)
        self.hand_out.changes.announce()

    def leave_room(self, taken: _Taken) -> None:
        """On SQLite, leave the write lock free for a moment."""
        if taken.borrowed.is_sqlite:
            time.sleep(min((time.monotonic() - taken.began) * _FREE_PART, _FREE_S_MAX))

    def _is_decided(self, lane: Lane) -> bool:
        """Whether the checkpoint of the lane is known, and the lane may be handed out. After a lost reply: wait until
        the transaction in doubt is over, learn from the checkpoint what became of it, and return False once."""
        with self.member.procedure():
            holding = self.member.session.holding(lane)
            if holding is None:
                return False
            if holding.checkpoint_version is not None:
                return True
            fence = self.member.read_checkpoint_again(lane)
            if fence is None:
                return False
            version, holding.checkpoint_version = holding.checkpoint_version, None
            try:
                # This commit writes nothing. It locks both rows, which the transaction in doubt holds until it is over.
                self.registry.commit(fence.expect)
            except Conflict:
                return False  # the transaction has just committed, or the partition is lost: read again
            holding.checkpoint_version = version
            if holding.checkpoint.offset > lane.done:
                lane.seek(holding.checkpoint.offset)
        return False

    def _check_kinds(self, engine: Engine) -> Borrowable:
        found = borrowable_of(engine, self.registry)
        if isinstance(found, str):
            raise InvalidGroup(found)
        return found

    def _check_engine(self) -> bool:
        """Raise InvalidGroup unless the engine is connected to the database of the registry. False if that is not known
        now."""
        incarnation = self.member.incarnation
        if incarnation is None:
            return False
        # This member's own row: its name was never used before, so that no copy of the database has it.
        key = self.keys.member(incarnation)
        entry = self.registry.get(key)
        if entry is None:
            return False
        mismatch = f"the engine {self.engine.url!r} does not access the tables of the registry {self.registry.url}"
        with self.engine.connect() as connection:
            borrowed = BorrowedConnection(connection, self.borrowable)
            try:
                if not self.begin(borrowed):
                    return False
                if not borrowed.is_sqlite and borrowed.is_autocommit():
                    raise InvalidGroup(
                        f"the engine {self.engine.url!r} is in AUTOCOMMIT mode: use one with transactions"
                    )
                version = borrowed.lock(key)
            except DriverError as error:
                if borrowed.fault_of(error) is Fault.MISSING:
                    raise InvalidGroup(f"{mismatch}: {error.orig}") from error
                raise
            connection.rollback()
            if borrowed.is_begun_on_sqlite:
                raise InvalidGroup(f"the engine {self.engine.url!r} ignores commit and rollback")
        if version == entry.version:
            return True
        if self.registry.get(key) == entry:
            raise InvalidGroup(f"{mismatch}: use the same database, schema and file")
        return False  # the member has joined anew meanwhile


class _Taken:
    """Messages in hand, and the transaction that their rows go into."""

    def __init__(
        self, loop: _Loop, holding: Holding, borrowed: BorrowedConnection, messages: list[Message], start: int, end: int
    ) -> None:
        """start, end: the lane's position before and after the hand-out."""
        self.messages, self.borrowed = messages, borrowed
        self.began = time.monotonic()
        self._loop, self._holding, self._lane = loop, holding, holding.lane
        self._connection, self._start, self._end = borrowed.connection, start, end
        self._transaction = self._connection.get_transaction()
        self._may_commit = False
        """Whether the loop itself commits: a COMMIT of the body is refused."""
        self._is_sent = self._is_done = False
        self._stop_checking = borrowed.before_commit(self._refuse_commit)

    def finish(self) -> None:
        """Commit, if the partition is still owned. Raises only if the body or the engine is to blame."""
        lane, loop = self._lane, self._loop
        self._check_body()
        if lane.is_lost:
            return
        try:
            loop.member.check_home()  # as before every checkpoint: the hub may have been given to another registry
            checkpoint, version = self._fence()
            self._may_commit = self._is_sent = True
            self._connection.commit()
        except PartitionLost as error:
            _logger.warning("%s", error)
            self._connection.rollback()  # before anything that may wait for SQLite's lock
            loop.member.lose(lane)
            loop.member.wake()
            return
        except RegistryUnavailable as error:  # it is not known now whether it may be written; `is_ready` waits for that
            self._log(f"rolled back: {error}")
            return
        except DriverError as error:
            if not self._is_worth_another_try(error):
                raise
            name = "outcome unknown" if self._is_sent else "aborted"
            self._log(f"{name}: {error.orig}")
            return
        with loop.member.procedure():
            holding = self._holding
            # None: the reply to an ordinary commit was lost, and the checkpoint is read again. Greater: it was read
            # again.
            if holding.checkpoint_version is not None and holding.checkpoint_version < version:
                holding.checkpoint, holding.checkpoint_version = checkpoint, version
            self._is_done = True
            lane.done = self._end

    def end(self) -> None:
        """Clean up after any outcome: no transaction stays open, and nothing stays in hand."""
        lane, loop = self._lane, self._loop
        self._stop_checking()
        if not self._is_done:
            if self._is_sent or self._transaction is None or not self._transaction.is_active:
                # After a COMMIT that failed or was refused, SQLAlchemy would put the connection back into its pool with
                # the transaction open.
                self._connection.invalidate()
            self._connection.close()
            with loop.member.procedure():
                if self._is_sent:
                    self._holding.checkpoint_version = None
                if lane.position == self._end and lane.done == self._start:
                    lane.seek(self._start)
            loop.put_back(lane)
        loop.hand_out.settling.wake_if_drained((lane,))

    def _log(self, what: str) -> None:
        _logger.warning("group %s, %s: %s", self._loop.keys.group, name_partitions(self._named()), what)

    def _fence(self) -> tuple[Checkpoint, int]:
        """Lock, compare and write the rows, as the registry would. Returns the checkpoint and its version. Raises
        PartitionLost."""
        loop, holding = self._loop, self._holding
        self.borrowed.limit_waits()
        part, number = loop.hand_out.source.place(self._lane.partition)
        place = part.id, number
        checkpoint = Checkpoint(self._end, time.time(), loop.member.name, holding.epoch)
        expected = _NOT_KNOWN if holding.checkpoint_version is None else holding.checkpoint_version
        while True:
            write = CheckpointWrite(loop.keys, place, holding.version, expected, checkpoint)
            commit = self.borrowed.lock_commit(write.expect, write.put, is_quiet=True)
            try:
                version = commit.write()
            except Conflict as conflict:
                key = write.checkpoint_key
                if FencedWrite([write]).lost(conflict) or key not in commit.versions:
                    raise PartitionLost(loop.keys.group, self._named()) from conflict
                # The partition is still owned, so an ordinary commit of this member was made in between: it may have
                # passed a gap. Both rows are locked now.
                if self._locked_checkpoint(key).offset > self._start:
                    raise PartitionLost(loop.keys.group, self._named()) from conflict
                expected = commit.versions[key]
                continue
            assert version is not None
            return checkpoint, version

    def _named(self) -> list[int] | list[TopicPartition]:
        return self._loop.hand_out.names.named([self._lane.partition])

    def _locked_checkpoint(self, key: str) -> Checkpoint:
        found = self.borrowed.get(key)
        assert found is not None
        return Checkpoint.load(key, found[0])

    def _check_body(self) -> None:
        """Raise InvalidGroup if the user's code has ended the transaction, or has called `ack` or `seek`."""
        if self._transaction is None or not self._transaction.is_active:
            raise InvalidGroup(
                "the loop body has committed or rolled back the transaction, which only the loop may do: remove that "
                "call, and raise an exception to undo a batch"
            )
        lane = self._lane
        if not lane.is_lost and (lane.done != self._start or lane.position != self._end):
            raise InvalidGroup(
                "`ack` or `seek` was called in the body of a transaction: remove the call. The COMMIT of the "
                "transaction acknowledges the batch"
            )

    def _refuse_commit(self) -> None:
        if not self._may_commit:
            raise InvalidGroup(
                "commit was called in the loop body: remove the call. The loop commits when it is asked for the next "
                "batch"
            )

    def _is_worth_another_try(self, error: DriverError) -> bool:
        """Whether the database aborted the transaction in favour of another one, or its outcome is not known."""
        fault = self.borrowed.fault_of(error)
        return fault is Fault.ABORTED or (self._is_sent and fault in (Fault.LOST, Fault.BUSY))
