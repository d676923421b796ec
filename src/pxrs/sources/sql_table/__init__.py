"""A SQL table with a rising integer id, read as a topic of virtual partitions (X21).

The table is only read, never changed. The hash of a row's key decides its partition, and its id is its offset. So the
offsets of a partition have gaps: rows of other partitions, ids of rolled back transactions, deleted rows.

The problem: a transaction draws an id before it commits. Row 6 may be visible while the transaction of row 5 is still
open, and a reader that goes on at 7 would never see row 5.

Invariants:
- Nothing at or behind the *settled end* is handed out; before it no new row can appear. `SettledEnd` computes it from
  what the database tells.
- A range of ids is read once for all partitions and split by partition; these pages are kept in a cache of bounded
  size. A page has at most `page_bytes` and a few more rows.
- A batch says up to which id it was read (`next_offset`), so that a position can pass the rows of other partitions. It
  may be empty for that reason alone.
- An id that the table cannot have given out yet is an error: the table was emptied and counts from the start again.

A read that fails raises ReadFailed and changes nothing. The settled end is computed anew by each process; nothing is
stored.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from pxrs import arguments
from pxrs.errors import InvalidTopic, InvalidUrl, MissingDependency
from pxrs.model import PARTITIONS_DEFAULT, TABLE_POLL_S_DEFAULT, Topic
from pxrs.sources.sql_table.identity import Meaning, checked_id, checked_table, has_misplaced_secret
from pxrs.sources.sql_table.pages import Stretch
from pxrs.sources.sql_table.settled_end import SettledEnd
from pxrs.sources.sql_table.source import SqlTable
from pxrs.sources.sql_table.table import Columns

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

__all__ = ["SettledEnd", "SqlTable", "Stretch", "sql_table"]

PAGE_BYTES_DEFAULT: Final = 4 << 20
CACHE_BYTES_DEFAULT: Final = 32 << 20
CONNECT_S_MAX: Final = 10
"""How long a connection to PostgreSQL may take, unless the address or PGCONNECT_TIMEOUT says otherwise."""
READ_S_MAX: Final = 60.0
"""How long a query may take: the default of `read_timeout`."""
_DRIVERS: Final = {
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "oracle": "oracle+oracledb",
}


# Over the limit: two thirds are the settings of a table and what each of them means.
def sql_table(
    url_or_engine: str | Engine,
    table: str,
    *,
    id_column: str = "id",
    value_column: str | None = None,
    value_columns: Sequence[str] | None = None,
    key_column: str | None = None,
    timestamp_column: str | None = None,
    partitions: int = PARTITIONS_DEFAULT,
    partitioner: str = "xxh64",
    name: str | None = None,
    identity: str | None = None,
    id: str | None = None,
    notify_channel: str | None = None,
    poll_s: float = TABLE_POLL_S_DEFAULT,
    settle_s: float | None = None,
    page_bytes: int = PAGE_BYTES_DEFAULT,
    cache_bytes: int = CACHE_BYTES_DEFAULT,
    read_timeout: float | timedelta | None = None,
) -> SqlTable:
    """A table, `NAME` or `SCHEMA.NAME`, as a Source with this number of virtual partitions.

        value_column      its text or bytes are the message; other types are converted to JSON
        value_columns     instead: several columns, the message is a JSON object of them
        key_column        rows with equal keys stay in one partition, in order. The type is a whole number (as decimal
                          text), text, bytes or UUID. Without it, or where it is null, the id decides
        timestamp_column  the time of the message; without a time zone it is taken as UTC. Without it, the time is 1970
        identity          names the table in place of its address, so that checkpoints stay when the address changes
        id                the id under which checkpoints are kept, in place of the one that is computed from the address
        notify_channel    PostgreSQL: look when a NOTIFY comes on this channel, instead of every `poll_s` seconds
        settle_s          hold rows back for this time after they were first seen; docs/sources.md says when to use it
        page_bytes, cache_bytes  how much is read at a time, and kept for the other partitions
        read_timeout      how long PostgreSQL or Oracle may take to answer one query (60 s); then the read fails. An
                          engine of your own waits as you have set it

    Raises InvalidUrl, InvalidTopic, MissingDependency at once, and ReadFailed if the database cannot be reached.
    """
    checked_table(table)
    if (value_column is None) == (value_columns is None):
        raise InvalidTopic(f"{table}: give value_column or value_columns, one of them")
    if isinstance(value_columns, str) or value_columns == ():
        raise InvalidTopic(f"{table}: value_columns is a list of names")
    for setting, given in (("poll_s", poll_s), ("page_bytes", page_bytes), ("cache_bytes", cache_bytes)):
        if not given > 0:
            raise InvalidTopic(f"{table}: {setting} is {given}; give more than 0")
    if settle_s is not None and not settle_s >= 0:
        raise InvalidTopic(f"{table}: settle_s is {settle_s}; give seconds")
    if id is not None and identity is not None:
        raise InvalidTopic(f"{table}: give identity or id, one of them")
    given_s = READ_S_MAX if read_timeout is None else read_timeout
    read_timeout_s = arguments.seconds(InvalidTopic, "read_timeout", given_s)
    columns = Columns(id_column, key_column, value_column, tuple(value_columns or ()), timestamp_column)
    # The constructor checks name, partition count and partitioner. The id follows once the database was asked.
    topic = Topic(table if name is None else name, "" if id is None else checked_id(id), partitions, partitioner)
    engine, is_ours = _engine_of(url_or_engine)
    try:
        return SqlTable(
            engine,
            table,
            columns,
            topic=topic,
            meaning=Meaning(id_column, key_column, partitions, partitioner),
            identity=identity,
            is_ours=is_ours,
            notify_channel=notify_channel,
            poll_s=poll_s,
            settle_s=settle_s,
            page_bytes=page_bytes,
            cache_bytes=cache_bytes,
            read_timeout_s=read_timeout_s,
        )
    except BaseException:
        if is_ours:
            engine.dispose()
        raise


def _engine_of(url_or_engine: str | Engine) -> tuple[Engine, bool]:
    """The engine, and whether it was made here, so that it must be closed here."""
    try:
        import sqlalchemy
    except ImportError as error:
        raise MissingDependency("a SQL table needs sqlalchemy: pip install 'pxrs[sql]'", name="sqlalchemy") from error
    if isinstance(url_or_engine, sqlalchemy.Engine):
        return url_or_engine, False
    try:
        url = sqlalchemy.make_url(url_or_engine)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        # Neither the text nor the cause is shown: both may contain a password.
        raise InvalidUrl("the table's address cannot be read; write postgresql://USER@HOST/DATABASE") from None
    # The address is not shown: its host or database seems to contain a part of the password.
    if has_misplaced_secret(url):
        raise InvalidUrl(
            "the host or the database in the table's address has '@' or ':' in it, which is probably a part of the "
            "password: write postgresql://USER:PASSWORD@HOST/DATABASE, and '@' in a user name or password as %40"
        )
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise InvalidUrl("a table in SQLite's memory has no address; give the engine")
    url = url.set(drivername=_DRIVERS.get(url.drivername, url.drivername))
    limits: dict[str, int] = {}
    is_limited = "connect_timeout" in url.query or "PGCONNECT_TIMEOUT" in os.environ
    if url.drivername == "postgresql+psycopg" and not is_limited:
        limits["connect_timeout"] = CONNECT_S_MAX
    try:
        return sqlalchemy.create_engine(url, pool_pre_ping=True, pool_size=2, connect_args=limits), True
    except sqlalchemy.exc.NoSuchModuleError:
        raise InvalidUrl(f"{url.drivername}: SQLAlchemy knows no such database") from None
    except ImportError as error:
        extra = "oracle" if url.get_backend_name() == "oracle" else "sql"
        raise MissingDependency(
            f"{url.drivername} needs {error.name}: pip install 'pxrs[{extra}]'", name=error.name
        ) from error
