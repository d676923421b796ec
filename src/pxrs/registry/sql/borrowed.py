"""The registry's own statements on a connection that is somebody else's: one of the user's, by SQLAlchemy.

The problem: what the registry writes is to be committed together with the user's rows. So its statements, which are
compiled for its own driver, run on the user's connection, whatever driver that has, in the transaction that is open
there.

Invariants:
- Nothing here begins, commits or rolls back, except that a driver begins by itself what SQLAlchemy has begun.
- Nothing that is run here may hang on a lease: no time is told to the statements.
- A value shows in no text: not in that of an error, nor in what an engine with `echo` logs. (A driver that copies
  bytes before they are logged, like pg8000, needs the engine's `hide_parameters` for that.)

On failure: an error of the user's driver is raised as SQLAlchemy raises it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from sqlalchemy import Connection, LargeBinary, TextClause, bindparam, text

from pxrs.registry.sql.database import Row
from pxrs.registry.sql.schema import DialectName
from pxrs.registry.sql.statements import Call, Statement

DATABASES: Final[tuple[DialectName, ...]] = ("postgresql", "sqlite")
"""Those that can do it."""
SQLITE_WRITE_LOCK: Final = "UPDATE pxrs_meta SET value = value WHERE name = 'version'"
"""Changes nothing. It takes SQLite's one write lock, before anything is read that is to be written upon."""
_TRANSACTION_BEGAN: Final = text("SELECT now()")


class _Hidden(bytes):
    """A value as a driver takes it, and as nobody reads it in a log."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes>"


def run(connection: Connection, calls: Sequence[Call]) -> list[list[Row]]:
    """The statements in this order; the rows of each."""
    results = []
    for statement, values in calls:
        result = connection.execute(_clause(statement), _values(statement, values))
        results.append([tuple(row) for row in result] if result.returns_rows else [])
    return results


def is_in_transaction(connection: Connection) -> bool:
    """On SQLite: whether the driver has begun, whatever SQLAlchemy thinks."""
    return bool(getattr(connection.connection.driver_connection, "in_transaction", False))


def is_autocommit(connection: Connection) -> bool:
    """On PostgreSQL: whether each statement is a transaction of its own. The server is asked, as it alone knows."""
    moments = {connection.execute(_TRANSACTION_BEGAN).scalar_one() for _ in range(2)}
    return len(moments) > 1


def _values(statement: Statement, values: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(values)
    if statement.is_timed:
        found["now_ms"] = 0  # only for leases, and nothing here hangs on one
    if "the_value" in found:
        found["the_value"] = _Hidden(found["the_value"])
    return found


@cache
def _clause(statement: Statement) -> TextClause:
    """A compiled statement for any driver of its database: its numbers become names again."""
    # In brackets, because a cast may follow, whose colons would be taken for a part of the name.
    named = re.sub(r"\$(\d+)", lambda found: f"(:{statement.parameters[int(found[1]) - 1]})", statement.text)
    clause = text(named)
    return clause.bindparams(bindparam("the_value", type_=LargeBinary())) if ":the_value" in named else clause
