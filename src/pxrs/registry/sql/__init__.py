"""The registry on a SQL database: SQLite, PostgreSQL, Oracle.

Keys and leases are rows of two tables. A commit locks the rows of all keys that it names, in key order, before it
compares their versions, so that commits neither deadlock nor pass together when they exclude each other (R7). Time is
the database's: a lease is over when the database's clock says so, and ends by a write of whoever notices.

Where to start reading: `registry.py` (the class `SqlRegistry`), `commit.py` (a commit as statements, without I/O),
`lease.py`, `statements.py` (every statement), `schema.py` (the tables). `database.py` says what a database driver must
offer; `sqlite.py`, `postgresql.py` with `wire.py`, and `oracle.py` offer it. Watches poll (`watching.py`) or listen
(`listening.py`). `borrowed.py` runs statements on a connection of the user's own.
"""

from __future__ import annotations

import importlib

from pxrs.clock import SYSTEM
from pxrs.errors import MissingDependency
from pxrs.registry.address import Address
from pxrs.registry.contract import Registry
from pxrs.registry.sql.script import ddl

__all__ = ["ddl", "open"]


def open(address: Address) -> Registry:
    """Open the registry at a `sqlite:`, `postgresql:` or `oracle:` address. What all three take, besides a namespace:

    create=false  do not create the tables; SchemaMissing if they are not there
    timeout=10    seconds that an operation may take
    poll=1        seconds between two looks where the database does not tell of changes (SQLite: 0.05)
    """
    try:
        module = importlib.import_module(f"pxrs.registry.sql.{address.scheme}")
    except ImportError as error:
        if (error.name or "").startswith("pxrs"):
            raise
        extra = "oracle" if address.scheme == "oracle" else "sql"
        raise MissingDependency.of_extra(f"{address.scheme}:", error.name, extra) from error
    registry: Registry = module.open(address, SYSTEM)
    return registry
