"""The user's rows and the checkpoint in one database transaction, where the registry is that database (X20).

    for batch, db in inbox.transactions(engine):
        db.execute(...)     # committed together with the checkpoint when the next batch is asked for, or not at all

The problem: rows and a checkpoint that are committed apart are redone or lost when something happens in between. In
one transaction they are not, as long as a member that has lost its partition cannot commit any more. So the transaction
ends with the registry's own commit of a checkpoint, run on the user's connection: it locks the checkpoint's and the
owner's rows, compares their versions with those under which this member claimed (G4), and writes.

Invariants:
- The fence is the last thing before COMMIT, so that a claim waits for that moment and not for the user's work (G10);
  and the server ends a transaction whose client stops in between.
- No lock of the member is held while the transaction is open: the member's thread may hold its own and wait for
  SQLite's one writer, which is this transaction.
- `lane.done` moves only when COMMIT was answered, so that no ordinary commit writes this checkpoint.

On failure:
- The fence does not hold: the rows are rolled back, the partition is dropped as lost, and the loop goes on.
- The body raises, or the loop is left: the rows are rolled back, and the messages are not done.
- The reply to COMMIT is lost: the messages are held back until both rows could be locked again. Then the transaction is
  over, whatever became of it, and the checkpoint in it says whether it happened. Nothing is redone on suspicion (R5).
- The database gave the transaction up (serialization failure, deadlock) in the fence or in COMMIT: handed out again. So
  is what was in hand when the hub's own record could not be read, which tells whether this registry still counts.
- The hub was given to another registry: WrongRegistry is raised, and the rows are rolled back.
- Other errors of the engine are raised as they are, rolled back. The loop may be started again.
"""

from __future__ import annotations

import functools
import logging
import sqlite3
import time
from collections.abc import Generator
from typing import Any, Final, Self

from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import DBAPIError

from pxrs import arguments
from pxrs.consumer.consumer import Consumer
from pxrs.consumer.readers import Loop, Reading
from pxrs.errors import Conflict, InvalidGroup, OutcomeUnknown, PartitionLost, RegistryUnavailable
from pxrs.group.checkpoints import CheckpointWrite, FencedWrite, Holding
from pxrs.group.lane import Lane
from pxrs.group.protocol import MemberProtocol
from pxrs.group.records import Checkpoint
from pxrs.limited_log import Outage
from pxrs.log.batch import Batch
from pxrs.log.messages import messages_of
from pxrs.model import Message
from pxrs.registry.contract import Commit
from pxrs.registry.sql.borrowed import DATABASES, SQLITE_WRITE_LOCK, is_autocommit, is_in_transaction, run
from pxrs.registry.sql.commit import CommitPlan
from pxrs.registry.sql.registry import SqlRegistry

_logger = logging.getLogger(__name__)

MAX_MESSAGES_DEFAULT: Final = 500
_RETRY_S: Final = 0.05
_NOT_KNOWN: Final = -1
"""As an expected version: no row has it, so that the row is read."""
_ABORTED: Final = frozenset({"40001", "40P01"})
_LOST: Final = ("08", "57P", "25P03")
_NOT_THERE: Final = frozenset({"42P01", "3F000", "42501"})
# What SQLite's one write lock is left free for others between two transactions, as a part of the time that it was held:
# those who wait look again every few milliseconds, and among them are the renewals of leases.
_FREE_PART: Final = 0.25
_FREE_S_MAX: Final = 0.01


def transactions(consumer: Consumer, engine: Engine, max_messages: int = MAX_MESSAGES_DEFAULT) -> Transactions:
    """Batches of one partition each, with a connection whose transaction also writes the checkpoint.

    The engine must be of the very database that the registry is in: PostgreSQL or SQLite. Each transaction is committed
    when the next batch is asked for. To undo a batch, raise; leaving the loop by `break` undoes it too. In the body,
    commit and roll back nothing but savepoints. Raises InvalidGroup if the engine is another database's, or commits by
    itself."""
    max_messages = arguments.whole(InvalidGroup, "max_messages", max_messages, 1)
    return Transactions(_Loop(consumer, engine, max_messages))


class Transactions(Loop[tuple[list[Message], Connection]]):
    """What `transactions` returns. Iterating it anew undoes what a loop that was left still had in hand."""

    def __init__(self, loop: _Loop) -> None:
        super().__init__("a loop over transactions", functools.partial(_steps, loop), loop.consumer._check_step)

    def __iter__(self) -> Self:
        self.close()
        self._steps = None
        return self


def _steps(loop: _Loop, reading: Reading) -> Generator[tuple[list[Message], Connection], None, None]:
    consumer = loop.consumer
    try:
        consumer._enter(reading)
        consumer._check_not_held()
        consumer._rewind()
        try:
            # Nothing but COMMIT says that a message is done, also not `commit`.
            consumer._is_manual = consumer._is_transactional = True
            yield from _each(loop)
        finally:
            consumer._is_manual = consumer._is_transactional = False
    finally:
        reading.is_over = True


def _each(loop: _Loop) -> Generator[tuple[list[Message], Connection], None, None]:
    while (found := loop.consumer._next()) is not None:
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
    """What lasts for longer than one transaction."""

    def __init__(self, consumer: Consumer, engine: Engine, max_messages: int) -> None:
        self.consumer, self.engine, self.max_messages = consumer, engine, max_messages
        self.member = consumer._member
        self.keys = self.member.keys
        fields = {"group": self.keys.group, "member": self.member.name}
        self._outage = Outage(_logger, f"group {self.keys.group}: before a transaction", extra=fields)
        registry = self.member._registry
        if not isinstance(engine, Engine):
            raise InvalidGroup(
                f"the engine is {arguments.shown(engine)}: give an Engine of SQLAlchemy; an AsyncEngine has one as its "
                "`sync_engine`"
            )
        if not isinstance(registry, SqlRegistry) or registry.database.dialect not in DATABASES:
            raise InvalidGroup(f"the registry {registry.url} is no PostgreSQL or SQLite database")
        if engine.dialect.name != registry.database.dialect:
            raise InvalidGroup(
                f"the engine is one of {engine.dialect.name}, and the registry is {registry.url}: a transaction cannot "
                "span the two"
            )
        if consumer._is_manual:
            raise InvalidGroup('a transaction acknowledges by its COMMIT: use ack="auto", and one loop at a time')
        self.registry = registry
        self.is_sqlite = registry.database.dialect == "sqlite"
        self._is_checked = self._check_engine()

    # Before a transaction.

    def is_ready(self, lane: Lane) -> bool:
        """Whether a transaction may begin now. If not, what stood in the way was looked after."""
        try:
            self.member._home()
            self._is_checked = self._is_checked or self._check_engine()
            if self._is_checked and self._is_settled(lane):
                self._outage.worked()
                return True
        except (RegistryUnavailable, OutcomeUnknown) as error:
            self._outage.failed(error)
        time.sleep(_RETRY_S)
        self.put_back(lane)
        return False

    def take(self, lane: Lane, batch: Batch, connection: Connection) -> _Taken | None:
        """Begin a transaction and take messages in hand; None if that cannot be now."""
        consumer, protocol = self.consumer, self.member._protocol
        holding = None if protocol is None else protocol.held.get(lane.partition)
        if protocol is None or holding is None or holding.lane is not lane or not self.begin(connection):
            self.put_back(lane)
            return None
        messages: list[Message] = []
        for message in messages_of(batch, consumer.topic, lane.partition, lane.epoch):
            if len(messages) >= self.max_messages:
                break
            messages.append(message)
        end = batch.next_offset if len(messages) == batch.records.num_rows else messages[-1].offset + 1
        start = lane.position
        # Last: waiting for the database may have taken longer than the lease lives (G8).
        if not consumer._hand_out(lane, batch.base_offset, end):
            self.put_back(lane)
            consumer._after(lane)
            return None
        if end < batch.next_offset:
            with consumer._lock:  # the rest need not be read again
                if (ready := consumer._ready.get(lane)) is not None:
                    ready.appendleft(batch)
        return _Taken(self, protocol, holding, connection, messages, start, end)

    def begin(self, connection: Connection) -> bool:
        """Begin a transaction; on SQLite with the write lock, as what was read could not be written upon otherwise.

        False if others have kept that lock for as long as the engine waits."""
        connection.begin()
        if not self.is_sqlite:
            return True
        try:
            if is_in_transaction(connection):  # begun by a listener of the user's
                connection.exec_driver_sql(SQLITE_WRITE_LOCK)
            else:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
        except DBAPIError as error:
            if not _is_busy(error):
                raise
            _logger.info("group %s: the database is locked by others; will try again", self.keys.group)
            return False
        return True

    def put_back(self, lane: Lane) -> None:
        """What was read ahead of the lane is to be read again from where it stands."""
        with self.consumer._lock:
            self.consumer._ready.pop(lane, None)
        self.consumer._change()

    def leave_room(self, taken: _Taken) -> None:
        if self.is_sqlite:
            time.sleep(min((time.monotonic() - taken.began) * _FREE_PART, _FREE_S_MAX))

    def _is_settled(self, lane: Lane) -> bool:
        """After a lost reply: wait until the transaction is over, and learn from its checkpoint what became of it."""
        with self.member.procedure():
            protocol = self.member._protocol
            holding = None if protocol is None else protocol.held.get(lane.partition)
            if protocol is None or holding is None or holding.lane is not lane:
                return False
            if holding.checkpoint_version is not None:
                return True
            if not self.member._drive(protocol.read_again(lane.partition)):
                return False
            fence = protocol.checkpoint_write([lane.partition])
            version, holding.checkpoint_version = holding.checkpoint_version, None
            try:
                # It writes nothing. It takes both rows' locks, which the transaction in doubt has until it is over.
                self.registry.commit(fence.expect)
            except Conflict:
                return False  # it has just committed, or the partition has gone: read again
            holding.checkpoint_version = version
            if holding.checkpoint.offset > lane.done:
                lane.seek(holding.checkpoint.offset)
        return False

    def _check_engine(self) -> bool:
        """Raise InvalidGroup unless the engine leads to the registry's rows. False if that cannot be told now."""
        incarnation = self.member.incarnation
        if incarnation is None:
            return False
        # This member's own row: its name was never used before, so that no copy of the database has it.
        key = self.keys.member(incarnation)
        entry = self.registry.get(key)
        if entry is None:
            return False
        statements = self.registry._statements
        lock = self.registry._call(statements.lock_entry, key=key)
        mismatch = f"the engine {self.engine.url!r} does not lead to the tables of the registry {self.registry.url}"
        with self.engine.connect() as connection:
            try:
                if not self.begin(connection):
                    return False
                if not self.is_sqlite and is_autocommit(connection):
                    raise InvalidGroup(f"the engine {self.engine.url!r} is in AUTOCOMMIT mode")
                found, _ = run(connection, [lock, self.registry._call(statements.next_version)])
            except DBAPIError as error:
                if _state(error) in _NOT_THERE or "no such table" in str(error.orig):
                    raise InvalidGroup(f"{mismatch}: {error.orig}") from error
                raise
            connection.rollback()
            if is_in_transaction(connection):
                raise InvalidGroup(f"the engine {self.engine.url!r} ignores commit and rollback")
        if found and found[0][0] == entry.version:
            return True
        if self.registry.get(key) == entry:
            raise InvalidGroup(f"{mismatch}: use the same database, schema and file")
        return False  # it has joined anew meanwhile


class _Taken:
    """Messages in hand, and the transaction that their rows go into."""

    def __init__(
        self,
        loop: _Loop,
        protocol: MemberProtocol,
        holding: Holding,
        connection: Connection,
        messages: list[Message],
        start: int,
        end: int,
    ) -> None:
        self.messages = messages
        self.began = time.monotonic()
        self._loop, self._protocol, self._holding, self._lane = loop, protocol, holding, holding.lane
        self._connection, self._start, self._end = connection, start, end
        self._transaction = connection.get_transaction()
        self._may_commit = self._is_sent = self._is_done = False
        event.listen(connection, "commit", self._refuse_commit)

    def finish(self) -> None:
        """Commit, if the partition is still owned. Raises only if the body or the engine is to blame."""
        lane, loop = self._lane, self._loop
        self._check_body()
        if lane.is_lost:
            return
        try:
            loop.member._home()  # as before every checkpoint: the hub may have been given to another registry
            checkpoint, version = self._fence()
            self._may_commit = self._is_sent = True
            self._connection.commit()
        except PartitionLost as error:
            _logger.warning("%s", error)
            self._connection.rollback()  # before anything that may wait for SQLite's lock
            self._lose()
            return
        except RegistryUnavailable as error:  # whether it may be written cannot be told now; `is_ready` waits for that
            _logger.warning("group %s, partition %d: rolled back: %s", loop.keys.group, lane.partition, error)
            return
        except DBAPIError as error:
            if not self._is_worth_another_try(error):
                raise
            name = "outcome unknown" if self._is_sent else "aborted"
            _logger.warning("group %s, partition %d: %s: %s", loop.keys.group, lane.partition, name, error.orig)
            return
        with loop.member._mutex:
            holding = self._holding
            # None: an ordinary commit's reply was lost; it will be read. Greater: read since.
            if holding.checkpoint_version is not None and holding.checkpoint_version < version:
                holding.checkpoint, holding.checkpoint_version = checkpoint, version
            self._is_done = True
            lane.done = self._end

    def end(self) -> None:
        """Whatever has happened: leave no transaction, and nothing in hand."""
        lane, loop = self._lane, self._loop
        if event.contains(self._connection, "commit", self._refuse_commit):
            event.remove(self._connection, "commit", self._refuse_commit)
        if not self._is_done:
            if self._is_sent or self._transaction is None or not self._transaction.is_active:
                # After a COMMIT that failed or was refused SQLAlchemy would give it back with the transaction open.
                self._connection.invalidate()
            self._connection.close()
            with loop.member._mutex:
                if self._is_sent:
                    self._holding.checkpoint_version = None
                if lane.position == self._end and lane.done == self._start:
                    lane.seek(self._start)
            loop.put_back(lane)
        loop.consumer._after(lane)

    def _fence(self) -> tuple[Checkpoint, int]:
        """Lock, compare and write, as the registry would. Raises PartitionLost."""
        loop, connection, protocol, holding = self._loop, self._connection, self._protocol, self._holding
        if not loop.is_sqlite:
            connection.execute(_SETTINGS, _settings(loop.registry.database.timeout))
        number = self._lane.partition
        checkpoint = Checkpoint(self._end, protocol.wall(), protocol.member.name, holding.epoch)
        expected = holding.checkpoint_version
        while True:
            version = _NOT_KNOWN if expected is None else expected
            place = protocol.member.topic, number
            write = CheckpointWrite(loop.keys, place, holding.version, version, checkpoint)
            commit = Commit(write.expect, write.put, {}, frozenset(), None, quiet=True)
            plan = CommitPlan(commit, loop.registry._namespace, loop.registry._statements)
            found = plan.judge(run(connection, plan.locks))
            try:
                plan.check_versions(found)
            except Conflict as conflict:
                key = write.checkpoint_key
                if FencedWrite([write]).lost(conflict) or key not in found.versions:
                    raise PartitionLost(loop.keys.group, [number]) from conflict
                # Ours still, so an ordinary commit of ours was faster: it may have passed a gap. Both rows are locked.
                if self._locked_checkpoint(key).offset > self._start:
                    raise PartitionLost(loop.keys.group, [number]) from conflict
                expected = found.versions[key]
                continue
            run(connection, plan.writes(found))
            assert found.next_version is not None
            return checkpoint, found.next_version

    def _locked_checkpoint(self, key: str) -> Checkpoint:
        registry = self._loop.registry
        ((row,),) = run(self._connection, [registry._call(registry._statements.get, key=key)])
        return Checkpoint.load(key, bytes(row[0]))

    def _lose(self) -> None:
        self._loop.member.lose(self._protocol, self._holding)
        self._loop.member.wake()

    def _check_body(self) -> None:
        """Raise if the body has meddled with what the loop does."""
        if self._transaction is None or not self._transaction.is_active:
            raise InvalidGroup("the body has ended the transaction: leave that to the loop, and raise to undo a batch")
        lane = self._lane
        if not lane.is_lost and (lane.done != self._start or lane.position != self._end):
            raise InvalidGroup("`ack` or `seek` was called in the body of a transaction: its COMMIT acknowledges")

    def _refuse_commit(self, _: Connection) -> None:
        if not self._may_commit:
            raise InvalidGroup("commit was called in the body: the loop commits when the next batch is asked for")

    def _is_worth_another_try(self, error: DBAPIError) -> bool:
        """Whether the transaction was given up for another's sake, or nobody knows what became of it."""
        state = _state(error)
        if state in _ABORTED:
            return True
        if not self._is_sent:
            return False
        if self._loop.is_sqlite:
            return _sqlite_code(error) not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_CONSTRAINT)
        return not state or state.startswith(_LOST)


# Until the end of the transaction, which is near: locks are not waited for beyond the registry's patience; a client
# that stops now loses them before those who wait give up; an answered COMMIT is on disk, as the member builds upon it.
_SETTINGS: Final = text(
    "SELECT set_config('lock_timeout', :lock_ms, true), "
    "set_config('idle_in_transaction_session_timeout', :idle_ms, true), "
    "set_config('synchronous_commit', CASE current_setting('synchronous_commit') "
    "WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, true)"
)


def _settings(timeout: float) -> dict[str, str]:
    return {"lock_ms": str(int(750 * timeout)), "idle_ms": str(int(400 * timeout))}


def _state(error: DBAPIError) -> str:
    """The SQLSTATE, wherever the driver keeps it; empty if the server has not answered."""
    original: Any = error.orig
    state = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    if state is None and original is not None and original.args and isinstance(original.args[0], dict):
        state = original.args[0].get("C")
    return state or ""


def _sqlite_code(error: DBAPIError) -> int:
    return getattr(error.orig, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def _is_busy(error: DBAPIError) -> bool:
    return _sqlite_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
