"""An item put by the user's own database transaction, where the registry is in that database (Z10).

    with engine.begin() as db:
        db.execute(...)
        queue.put(b"an order", connection=db)   # put when this transaction commits

The problem: if the rows and the item are committed separately and the process dies in between, one of them is lost or
written twice. So the registry's statements for a put run on the user's connection (`pxrs.registry.sql.borrowed`), and
the database commits rows and item together. On PostgreSQL the notification, which is sent at COMMIT, wakes the takers;
on SQLite takers poll.

Invariants:
- The connection leads to the registry's tables, not to a copy of them: the server, the database and the tables are
  compared, or on SQLite the files; and the queue's own row is read there.
- That row is locked for sharing with other puts until the transaction ends: a queue is deleted before a put or after
  it, and what was put into it is deleted with it.
- The number of a queue with `fifo` is read from its row in the transaction that writes the next one, with the row
  locked until COMMIT. So numbers are in the order of the commits. The number that the store keeps in memory is not
  used.
- A put is a savepoint of its own. If the put fails, the savepoint is rolled back, with the rows that the put created in
  order to lock them and the settings that it changed. The user's transaction can continue.

On failure: InvalidItem and UnknownQueue are raised before anything is written. Errors of the driver are raised
unchanged: a serialization failure, a deadlock, or a lock timeout. The wait for a lock is bounded by the registry's
`timeout` if the user has set no bound (on SQLite by the driver's). If the reply to COMMIT is lost, its outcome is the
user's to find out.
"""

from __future__ import annotations

from typing import Final

from pxrs.errors import InvalidItem
from pxrs.queue.items import Put
from pxrs.queue.records import Queue, first_key, in_sequence, load_number
from pxrs.queue.store import QueueStore
from pxrs.registry.contract import ABSENT, Registry
from pxrs.registry.sql.borrowed import BorrowedConnection, Connection, SqlRegistry, fault_of_connection, is_borrowable

_AUTOCOMMIT: Final = "the connection is in AUTOCOMMIT mode: an item can be put only in a transaction"


def put_in(connection: Connection, store: QueueStore, put: Put) -> None:
    """Put the item when the connection's transaction commits. Raises InvalidItem, UnknownQueue, and errors of the
    driver."""
    registry = _check_kinds(connection, store.registry)
    borrowed = BorrowedConnection(connection, registry)
    _check_place(borrowed, registry)
    with borrowed.savepoint():
        _check_queue(borrowed, store, put.queue)
        _write(borrowed, registry, put)


# What is refused.


def _check_kinds(connection: Connection, registry: Registry) -> SqlRegistry:
    if not is_borrowable(registry):
        raise InvalidItem(
            f"the registry {registry.url} is not a PostgreSQL or SQLite database that this process has opened: put "
            "without connection=, or open the hub with pxrs.open(registry=...) with the address of the database"
        )
    assert isinstance(registry, SqlRegistry)
    if fault := fault_of_connection(connection, registry):
        raise InvalidItem(fault)
    return registry


def _check_place(borrowed: BorrowedConnection, registry: SqlRegistry) -> None:
    """Raise InvalidItem unless the connection is in a transaction on the registry's tables. On SQLite that transaction
    has the write lock afterwards."""
    if not borrowed.is_sqlite and borrowed.is_autocommit():
        raise InvalidItem(_AUTOCOMMIT)
    if borrowed.leads_elsewhere():
        raise InvalidItem(
            f"the connection does not access the tables of the registry {registry.url}: use the same database, schema "
            "and file"
        )
    if borrowed.is_sqlite:
        borrowed.take_write_lock()
        if borrowed.is_autocommit():
            raise InvalidItem(_AUTOCOMMIT)


def _check_queue(borrowed: BorrowedConnection, store: QueueStore, queue: Queue) -> None:
    """Raise UnknownQueue unless the queue is there, and keep it from being deleted until the transaction ends."""
    found = borrowed.get(queue.key, is_shared=True)
    if found is not None and Queue.load(queue.key, found[0]).id == queue.id:
        return
    store.check_exists(queue)
    raise InvalidItem(f"the transaction began before queue {queue.name} was created: begin a new one")


# What is written.


def _write(borrowed: BorrowedConnection, registry: SqlRegistry, put: Put) -> None:
    queue, record, delay_s = put
    expect: dict[str, int] = {}
    values: dict[str, bytes] = {}
    if queue.is_fifo:
        value, version = borrowed.lock_or_create(queue.sequence)
        number = 0 if version == ABSENT else load_number(queue.sequence, value)
        expect[queue.sequence], values[queue.sequence] = version, str(number + 1).encode()
        record = in_sequence(record, number + 1)
    key = first_key(queue, record, delay_s, registry.clock.wall_time_us() / 1e6)
    expect[key], values[key] = ABSENT, record.dump()
    borrowed.lock_commit(expect, values).write()
