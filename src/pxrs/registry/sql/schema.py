"""The tables, for each database, and the text that a DBA runs when programs may not create them.

Keys must sort by byte, whatever language the database speaks, because a prefix is read as a range of keys: so their
collation is said outright on PostgreSQL, is the default on SQLite, and on Oracle is set for each session. Versions
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

APPLICATION_ROLE: Final = "pxrs_app"
"""Stands in the DDL for the user that programs connect as."""


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
        """The statements that make the tables, in order. Oracle knows no IF NOT EXISTS: there the caller forgives."""
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


def ddl(dialect: str) -> str:
    """The DDL for a DBA, with the least privileges that programs need; `?create=false` then finds everything there."""
    if dialect not in DIALECTS:
        raise ValueError(f"unknown dialect {dialect!r}; choose from {', '.join(DIALECTS)}")
    schema = Schema(dialect)
    rows = [f"INSERT INTO pxrs_meta (name, value) VALUES ('{n}', '{v}')" for n, v in schema.first_rows().items()]
    lines = [f"-- The tables of a pxrs registry, layout {LAYOUT}, for {dialect}."]
    lines += [f"{statement};" for statement in [*schema.create(if_not_exists=False), *rows]]
    from pxrs.registry.sql.views import view_statements  # it needs the tables of this module

    lines += ["", "-- Groups as plain columns, for people; nothing in pxrs needs these views."]
    lines += [f"{statement};" for statement in view_statements(dialect, replace=False)]
    if dialect == "sqlite":
        lines += ["", "-- SQLite has no users: who may read and write the file, and its folder, may use the registry."]
        return "\n".join(lines) + "\n"
    lines += ["", *_grants(dialect)]
    if dialect == "oracle":
        lines += ["", *_ORACLE_NOTES, "COMMIT;"]
    return "\n".join(lines) + "\n"


def _grants(dialect: str) -> list[str]:
    sequence_right = "SELECT" if dialect == "oracle" else "USAGE"
    on_sequence = "pxrs_version" if dialect == "oracle" else "SEQUENCE pxrs_version"
    return [
        f"-- Replace {APPLICATION_ROLE} by the user that programs connect as.",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON pxrs_entry TO {APPLICATION_ROLE};",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON pxrs_lease TO {APPLICATION_ROLE};",
        f"GRANT SELECT ON pxrs_meta TO {APPLICATION_ROLE};",
        f"GRANT {sequence_right} ON {on_sequence} TO {APPLICATION_ROLE};",
    ]


_ORACLE_NOTES: Final = (
    "-- If the programs' user does not own the tables, it also needs, as itself:",
    "--   CREATE SYNONYM pxrs_entry FOR <owner>.pxrs_entry;  and the same for pxrs_lease, pxrs_meta, pxrs_version.",
    "-- A stopped program must not hold a row for ever. Where the release has it, let the database end such sessions:",
    "--   ALTER SYSTEM SET MAX_IDLE_BLOCKER_TIME = 1;",
)


def _tidy(statement: str) -> str:
    lines = (line.rstrip() for line in statement.replace("\t", "  ").splitlines())
    return "\n".join(line for line in lines if line)
