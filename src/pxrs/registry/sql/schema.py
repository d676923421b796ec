"""The tables, for each database.

Keys must sort by byte, whatever the language of the database, because a prefix is read as a range of keys. So their
collation is explicit on PostgreSQL, the default on SQLite, and set for each session on Oracle. Versions
come from one sequence that never repeats; SQLite has no sequences, and one writer at a time, so a row counts there.

    pxrs_entry   one row a key. A row with version 0 is a placeholder inside a transaction and never outlives it.
    pxrs_lease   one row a living lease; `expires_ms` is on the database's clock. A lease ends when its row is deleted.
    pxrs_meta    the layout's number, and on SQLite the version counter and the boot that `expires_ms` belongs to.

Oracle stores an empty value as NULL, so `value` may be NULL everywhere, and that is an empty value.
"""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

from sqlalchemy import BigInteger, Column, Index, LargeBinary, MetaData, Sequence, String, Table
from sqlalchemy.dialects.oracle.oracledb import OracleDialect_oracledb
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.schema import CreateIndex, CreateSequence, CreateTable
from sqlalchemy.types import UserDefinedType

DialectName = Literal["oracle", "postgresql", "sqlite"]
DIALECTS: Final[tuple[DialectName, ...]] = get_args(DialectName)

LAYOUT: Final = 1
"""The number of this arrangement of tables. Another one in the database is refused, never guessed at."""


def dialect_of(name: DialectName) -> Dialect:
    """SQLAlchemy's dialect; parameters by number for libpq, which knows no names, and by name for the others."""
    if name == "postgresql":
        return PGDialect_psycopg(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]
    if name == "oracle":
        return OracleDialect_oracledb()  # type: ignore[no-untyped-call]
    return SQLiteDialect_pysqlite(paramstyle="named")


class _ByteString(UserDefinedType[str]):
    """Oracle's VARCHAR2 counted in bytes: what we store is ASCII, and an index entry must stay small."""

    cache_ok = True

    def __init__(self, length: int) -> None:
        self.length = length

    def get_col_spec(self, **_: Any) -> str:
        return f"VARCHAR2({self.length} BYTE)"


class Schema:
    """The tables as one dialect needs them."""

    def __init__(self, dialect: DialectName) -> None:
        self.dialect = dialect
        metadata = MetaData()

        def text(length: int) -> Any:
            if dialect == "oracle":
                return _ByteString(length)
            return String(length, collation="C") if dialect == "postgresql" else String(length)

        # Room on each page lets PostgreSQL change a row where it lies, without touching the indexes.
        self.entry = Table(
            "pxrs_entry",
            metadata,
            Column("namespace", text(64), primary_key=True),
            Column("key", text(512), primary_key=True),
            Column("value", LargeBinary),
            Column("version", BigInteger, nullable=False),
            Column("lease", text(32)),
            postgresql_with={"fillfactor": 70},
        )
        self.lease = Table(
            "pxrs_lease",
            metadata,
            Column("namespace", text(64), primary_key=True),
            Column("id", text(32), primary_key=True),
            Column("ttl_ms", BigInteger, nullable=False),
            Column("expires_ms", BigInteger, nullable=False),
            postgresql_with={"fillfactor": 50},
        )
        self.meta = Table(
            "pxrs_meta",
            metadata,
            Column("name", text(32), primary_key=True),
            Column("value", text(64), nullable=False),
        )
        bound = self.entry.c.lease.is_not(None)
        self.entry_lease = Index(
            "pxrs_entry_lease",
            self.entry.c.namespace,
            self.entry.c.lease,
            postgresql_where=bound,
            sqlite_where=bound,
        )
        self.version = None if dialect == "sqlite" else Sequence("pxrs_version", metadata=metadata)

    def create(self, *, if_not_exists: bool) -> list[str]:
        """The statements that create the tables, in order. Oracle has no IF NOT EXISTS: there the caller ignores the
        error of a table that exists."""
        optional = if_not_exists and self.dialect != "oracle"
        statements: list[Any] = [
            *(CreateTable(table, if_not_exists=optional) for table in (self.entry, self.lease, self.meta)),
            CreateIndex(self.entry_lease, if_not_exists=optional),
        ]
        if self.version is not None:
            statements.append(CreateSequence(self.version, if_not_exists=optional))
        dialect = dialect_of(self.dialect)
        return [_tidy(str(statement.compile(dialect=dialect))) for statement in statements]

    def first_rows(self) -> dict[str, str]:
        """What `pxrs_meta` holds from the start."""
        rows = {"layout": str(LAYOUT)}
        return {**rows, "version": "0"} if self.version is None else rows


def _tidy(statement: str) -> str:
    lines = (line.rstrip() for line in statement.replace("\t", "  ").splitlines())
    return "\n".join(line for line in lines if line)
