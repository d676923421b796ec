"""Every statement that the registry runs, built once with SQLAlchemy Core and compiled once for each dialect.

PostgreSQL, Oracle and SQLite run the same statements, except for how the time is read, how a row is locked, how a row
is inserted unless it exists, and where versions come from. The statements are compiled to text once, so that commits do
not pay for SQLAlchemy.

Invariants:
- Each statement reads the time from the database's clock (on PostgreSQL `clock_timestamp()`, because `now()` is the
  start of the transaction). On SQLite, whose processes share one machine, the client binds its time as `now_ms`.
- A lock is taken on one row by its primary key, so that the order of locks is the order of statements.
- No statement that locks a row of an entry reads the state of the lease by a join: if the row changed during the wait
  for its lock, the join would have the lease as it was before the wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Executable,
    Insert,
    Integer,
    LargeBinary,
    Table,
    bindparam,
    case,
    cast,
    delete,
    extract,
    func,
    insert,
    literal_column,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.types import TypeEngine

from pxrs.registry.sql.schema import DialectName, Schema, dialect_of

FIRST: Final = " "
"""Sorts before every key: keys have no space and nothing below it. Not empty, which Oracle takes for NULL."""
LAST: Final = "\x7f"
"""Sorts after every key."""

# The state of a lease in a result. A process that finds one that is not ALIVE ends or corrects it in a transaction.
ALIVE: Final = 0
OVER: Final = 1
"""The lease has expired, or its row is gone."""
AHEAD: Final = 2
"""The lease expires later than now + ttl: the database's clock was set back after the last renewal. It would outlive a
dead holder by as much as the clock was set back, so its expiry is set to now + ttl."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of one dialect."""

    name: str
    text: str
    parameters: tuple[str, ...]
    """The names of the values in the order of the numbered parameters; empty if the text has named parameters."""
    returns_rows: bool
    is_timed: bool
    """Whether it has a parameter `now_ms`."""
    forgives_duplicates: bool
    """Whether a duplicate-key error counts as success."""


class Call(NamedTuple):
    """A statement and the values for it."""

    statement: Statement
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DirectStatements:
    """For a commit that expects a version of every key it names: one of these statements for each key, and `lease` for
    the lease that the commit names. A statement fails, and with it the transaction, if the key has another version or
    is bound to a lease, or if the named lease is not alive."""

    lease: Statement
    check: Statement
    insert: Statement
    update: Statement
    delete: Statement


@dataclass(frozen=True, slots=True)
class Statements:
    """All statements, for one dialect."""

    dialect: DialectName
    get: Statement
    scan: Statement
    scan_some: Statement
    versions: Statement
    """The keys of a range and their versions, for watchers."""
    version_of: Statement
    """The same for a single key."""
    insert_placeholder: Statement
    lock_entry: Statement
    write_entry: Statement
    delete_entry: Statement
    direct: DirectStatements | None
    """Only on PostgreSQL, where one statement can lock, compare, write and return the version."""
    next_version: Statement
    store_version: Statement | None
    """Only on databases without a sequence: stores the version that `next_version` returned as the last one."""
    begin_lease: Statement
    renew_lease: Statement
    lock_lease: Statement
    """For a commit that names the lease: renewals do not wait for this lock, the end of the lease does."""
    lock_lease_to_end: Statement
    lease_state: Statement
    ttl_of_lease: Statement
    delete_lease: Statement
    keys_of_lease: Statement
    delete_key_of_lease: Statement
    limit_lease: Statement
    """Sets the expiry of a lease that is AHEAD to now + ttl."""
    due_leases: Statement
    """The leases that are OVER or AHEAD."""
    nearest_expiry: Statement
    read_meta: Statement
    insert_meta: Statement
    write_meta: Statement
    drop_bound_entries: Statement
    drop_leases: Statement
    notify: Statement | None


@cache
def statements_for(dialect: DialectName) -> Statements:
    return _Builder(dialect).build()


def key_range(prefix: str, after: str | None = None) -> dict[str, str]:
    """The open range of keys that begin with `prefix` and come after `after`, as `lower` and `upper`.

    The prefix itself ends in a slash and is no key; the byte after a slash is '0'. An `after` is cut at a NUL, which
    PostgreSQL does not take: no key lies between the two."""
    lower = max(FIRST, prefix, (after or "").partition("\0")[0])
    return {"lower": lower, "upper": f"{prefix[:-1]}0" if prefix else LAST}


def _named(name: str, type_: TypeEngine[Any] | None = None) -> Any:
    # The prefix is needed because SQLAlchemy reserves the names of a table's columns for its own parameters.
    return bindparam(f"the_{name}", type_=type_)


class _Builder:
    def __init__(self, dialect: DialectName) -> None:
        self.dialect = dialect
        self.schema = Schema(dialect)
        self.engine_dialect = dialect_of(dialect)

    def build(self) -> Statements:
        """All statements."""
        # Over the limit: this is one list of statements, and each of them is read by itself.
        schema, entry, lease, meta = self.schema, self.schema.entry, self.schema.lease, self.schema.meta
        number = BigInteger()
        this_entry = (entry.c.namespace == _named("namespace"), entry.c.key == _named("key"))
        this_lease = (lease.c.namespace == _named("namespace"), lease.c.id == _named("lease"))
        in_range = (
            entry.c.namespace == _named("namespace"),
            entry.c.key > _named("lower"),
            entry.c.key < _named("upper"),
        )
        of_lease = (entry.c.namespace == _named("namespace"), entry.c.lease == _named("lease"))
        bound = (*this_entry, entry.c.lease == _named("lease"))
        now = self._now_ms()
        is_ahead = lease.c.expires_ms > now + lease.c.ttl_ms
        lease_state = self._lease_state()
        scan = (
            select(entry.c.key, entry.c.value, entry.c.version, entry.c.lease, self._state_of_entry())
            .where(*in_range)
            .order_by(entry.c.key)
        )
        return Statements(
            dialect=self.dialect,
            get=self._compile(
                "get", select(entry.c.value, entry.c.version, entry.c.lease, self._state_of_entry()).where(*this_entry)
            ),
            scan=self._compile("scan", scan),
            # Without an explicit offset, SQLAlchemy's compiler for SQLite would add a parameter for it.
            scan_some=self._compile("scan_some", scan.limit(_named("limit", Integer())).offset(_ZERO)),
            versions=self._compile(
                "versions", select(entry.c.key, entry.c.version).where(*in_range).order_by(entry.c.key)
            ),
            version_of=self._compile("version_of", select(entry.c.key, entry.c.version).where(*this_entry)),
            insert_placeholder=self._compile(
                "insert_placeholder",
                self._insert_unless_there(entry, namespace=_named("namespace"), key=_named("key"), version=_ZERO),
                forgives_duplicates=True,
            ),
            lock_entry=self._compile(
                "lock_entry", select(entry.c.version, entry.c.lease).where(*this_entry).with_for_update()
            ),
            write_entry=self._compile(
                "write_entry",
                update(entry)
                .where(*this_entry)
                .values(value=_named("value", LargeBinary()), version=_named("version", number), lease=_named("lease")),
            ),
            delete_entry=self._compile("delete_entry", delete(entry).where(*this_entry)),
            direct=self._direct() if self.dialect == "postgresql" else None,
            next_version=self._compile("next_version", self._next_version()),
            store_version=(
                None
                if schema.version is not None
                else self._compile(
                    "store_version", update(meta).where(meta.c.name == _VERSION).values(value=_named("version"))
                )
            ),
            begin_lease=self._compile(
                "begin_lease",
                insert(lease).values(
                    namespace=_named("namespace"),
                    id=_named("lease"),
                    ttl_ms=_named("ttl_ms", number),
                    expires_ms=now + _named("ttl_ms", number),
                ),
            ),
            renew_lease=self._compile(
                "renew_lease",
                update(lease).where(*this_lease, lease.c.expires_ms > now).values(expires_ms=now + lease.c.ttl_ms),
            ),
            lock_lease=self._compile(
                "lock_lease", select(lease_state).where(*this_lease).with_for_update(read=True, key_share=True)
            ),
            lock_lease_to_end=self._compile(
                "lock_lease_to_end", select(lease_state).where(*this_lease).with_for_update()
            ),
            lease_state=self._compile("lease_state", select(lease_state).where(*this_lease)),
            ttl_of_lease=self._compile("ttl_of_lease", select(lease.c.ttl_ms).where(*this_lease)),
            delete_lease=self._compile("delete_lease", delete(lease).where(*this_lease)),
            keys_of_lease=self._compile("keys_of_lease", select(entry.c.key).where(*of_lease).order_by(entry.c.key)),
            delete_key_of_lease=self._compile("delete_key_of_lease", delete(entry).where(*bound)),
            limit_lease=self._compile(
                "limit_lease", update(lease).where(*this_lease, is_ahead).values(expires_ms=now + lease.c.ttl_ms)
            ),
            due_leases=self._compile(
                "due_leases",
                select(lease.c.id)
                .where(lease.c.namespace == _named("namespace"), or_(lease.c.expires_ms <= now, is_ahead))
                .order_by(lease.c.expires_ms)
                .limit(_named("limit", Integer()))
                .offset(_ZERO),
            ),
            nearest_expiry=self._compile(
                "nearest_expiry",
                select(func.min(lease.c.expires_ms) - now).where(lease.c.namespace == _named("namespace")),
            ),
            read_meta=self._compile("read_meta", select(meta.c.value).where(meta.c.name == _named("name"))),
            insert_meta=self._compile(
                "insert_meta",
                self._insert_unless_there(meta, name=_named("name"), value=_named("value")),
                forgives_duplicates=True,
            ),
            write_meta=self._compile(
                "write_meta", update(meta).where(meta.c.name == _named("name")).values(value=_named("value"))
            ),
            drop_bound_entries=self._compile("drop_bound_entries", delete(entry).where(entry.c.lease.is_not(None))),
            drop_leases=self._compile("drop_leases", delete(lease)),
            notify=(
                self._compile("notify", select(func.pg_notify(_named("channel"), _named("payload"))))
                if self.dialect == "postgresql"
                else None
            ),
        )

    def _direct(self) -> DirectStatements:
        entry, lease, sequence = self.schema.entry, self.schema.lease, self.schema.version
        assert sequence is not None
        as_expected = (
            entry.c.namespace == _named("namespace"),
            entry.c.key == _named("key"),
            entry.c.version == _named("expected", BigInteger()),
            entry.c.lease.is_(None),
        )
        alive = (
            lease.c.namespace == _named("namespace"),
            lease.c.id == _named("lease"),
            lease.c.expires_ms > self._now_ms(),
        )
        written = {
            "value": _named("value", LargeBinary()),
            "version": sequence.next_value(),
            "lease": _named("lease"),
        }
        version = entry.c.version
        held = select(lease.c.ttl_ms).where(*alive).with_for_update(read=True, key_share=True)
        insert_new = postgresql.insert(entry).values(namespace=_named("namespace"), key=_named("key"), **written)
        return DirectStatements(
            lease=self._compile("direct_lease", _unless_none(held.cte("found"))),
            check=self._compile(
                "direct_check",
                _unless_none(select(version).where(*as_expected).with_for_update(read=True).cte("found")),
            ),
            insert=self._compile("direct_insert", insert_new.returning(version)),
            update=self._compile(
                "direct_update",
                _unless_none(update(entry).where(*as_expected).values(**written).returning(version).cte("found")),
            ),
            delete=self._compile(
                "direct_delete", _unless_none(delete(entry).where(*as_expected).returning(version).cte("found"))
            ),
        )

    def _compile(self, name: str, clause: Executable, *, forgives_duplicates: bool = False) -> Statement:
        compiled = clause.compile(dialect=self.engine_dialect)  # type: ignore[attr-defined]
        strangers = [name for name in compiled.params if name != "now_ms" and not name.startswith("the_")]
        assert not strangers, f"{name}: SQLAlchemy made the parameters {strangers}"
        text = " ".join(str(compiled).split())
        return Statement(
            name=name,
            text=text,
            parameters=tuple(compiled.positiontup or ()),
            returns_rows=text.startswith("SELECT"),
            is_timed="now_ms" in compiled.params,
            forgives_duplicates=forgives_duplicates,
        )

    def _now_ms(self) -> ColumnElement[int]:
        if self.dialect == "sqlite":
            return bindparam("now_ms", type_=BigInteger())
        if self.dialect == "postgresql":
            # Without a schema: tests replace it by a function of this name that is earlier in the search path.
            return cast(extract("epoch", func.clock_timestamp()) * _THOUSAND, BigInteger())
        since: ColumnElement[Any] = literal_column("(SYS_EXTRACT_UTC(SYSTIMESTAMP) - TIMESTAMP '1970-01-01 00:00:00')")
        return cast(
            extract("day", since) * literal_column("86400000")
            + extract("hour", since) * literal_column("3600000")
            + extract("minute", since) * literal_column("60000")
            + extract("second", since) * _THOUSAND,
            BigInteger(),
        )

    def _lease_state(self) -> ColumnElement[int]:
        lease, now = self.schema.lease, self._now_ms()
        return case(
            (lease.c.expires_ms <= now, literal_column(str(OVER), Integer())),
            (lease.c.expires_ms > now + lease.c.ttl_ms, literal_column(str(AHEAD), Integer())),
            else_=literal_column(str(ALIVE), Integer()),
        )

    def _state_of_entry(self) -> ColumnElement[int]:
        """The state of the lease that the entry is bound to, or ALIVE without one, read in the statement's snapshot."""
        entry, lease = self.schema.entry, self.schema.lease
        state = (
            select(self._lease_state())
            .where(lease.c.namespace == entry.c.namespace, lease.c.id == entry.c.lease)
            .scalar_subquery()
        )
        alive, over = literal_column(str(ALIVE), Integer()), literal_column(str(OVER), Integer())
        return case((entry.c.lease.is_(None), alive), else_=func.coalesce(state, over))

    def _insert_unless_there(self, table: Table, **values: Any) -> Insert:
        if self.dialect == "postgresql":
            return postgresql.insert(table).values(**values).on_conflict_do_nothing()
        if self.dialect == "sqlite":
            return sqlite.insert(table).values(**values).on_conflict_do_nothing()
        return insert(table).values(**values)

    def _next_version(self) -> Executable:
        if self.schema.version is not None:
            return select(self.schema.version.next_value())
        meta = self.schema.meta
        return select(cast(meta.c.value, BigInteger()) + _ONE).where(meta.c.name == _VERSION)


def _unless_none(found: Any) -> Executable:
    """The first column of the row that was found. If there is none, divides by zero, which fails the transaction."""
    count = select(func.count()).select_from(found).scalar_subquery()
    return select(select(found.c[0]).scalar_subquery(), _ONE.op("/")(count))


_ZERO: Any = literal_column("0", Integer())
_ONE: Any = literal_column("1", Integer())
_THOUSAND: Any = literal_column("1000", Integer())
_VERSION: Any = literal_column("'version'")
