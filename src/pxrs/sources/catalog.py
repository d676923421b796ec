"""Registered sources: a table of another system under a name, so that it can be used wherever a topic can.

A source is one registry key, `sources/<name>`. It holds what every process needs to read the source in the same way:
the address, the table, its columns, the number of partitions, and the id under which checkpoints are kept. The id is
fixed when the source is registered, so another spelling of the address does not change it.

Credentials are never stored. A process takes the address from the first of these that is given:
1. `hub.source(name, url=...)`;
2. the environment variable `PXRS_SOURCE_<NAME>`: the name in upper case, every character that is no letter or digit as
   `_`;
3. the record, which has neither user nor password: libpq then uses PGUSER, PGPASSWORD and PGPASSFILE.

An address of another database than the registered one is refused (`WrongSource`): its ids would be taken for those of
the registered table. PostgreSQL says which server, database and table it is, so another name of the same host is
accepted, and another server at the same address is refused. If the server does not say, the addresses are compared.

Nothing is retried here: ReadFailed says that the database cannot be reached now.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Final, Self

from pxrs.errors import (
    Closed,
    Conflict,
    InvalidTopic,
    PxrsError,
    ReadFailed,
    RegistryCorrupt,
    SourceExists,
    UnknownSource,
    WrongSource,
)
from pxrs.model import PARTITIONS_DEFAULT, TABLE_POLL_S_DEFAULT, TOPIC_NAME
from pxrs.registry.contract import ABSENT, Registry

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

    from pxrs.sources.sql_table import SqlTable

_logger = logging.getLogger(__name__)

PREFIX: Final = "sources/"
KIND: Final = "sql-table"
FAILURE_KEPT_S: Final = 5.0
"""For how long `open_to_look` raises the last failure to open a source again, instead of waiting for the database once
more."""


@dataclass(frozen=True, slots=True)
class RegisteredSource:
    """A source as it is registered. The settings are those of `sql_table`."""

    name: str
    id: str
    """The id under which checkpoints are kept. It does not change when the address does."""
    address: str
    """The address without user, password and options that may hold a secret."""
    table: str
    kind: str = KIND
    id_column: str = "id"
    key_column: str | None = None
    value_column: str | None = None
    value_columns: tuple[str, ...] | None = None
    timestamp_column: str | None = None
    partitions: int = PARTITIONS_DEFAULT
    partitioner: str = "xxh64"
    notify_channel: str | None = None
    settle_s: float | None = None
    poll_s: float = TABLE_POLL_S_DEFAULT
    fingerprint: str | None = None
    """The identity of the table as the database reports it; None if it does not."""
    since: float = 0.0
    """When the source was registered, in seconds since 1970."""

    def dump(self) -> bytes:
        return json.dumps({name: value for name, value in asdict(self).items() if name != "name"}).encode()

    @classmethod
    def load(cls, key: str, value: bytes) -> Self:
        """Parse a record. Fields that this version does not know, because a later version wrote them, are ignored."""
        try:
            found = json.loads(value)
            known = {each.name: found[each.name] for each in fields(cls) if each.name in found}
            if known.get("value_columns") is not None:
                known["value_columns"] = tuple(known["value_columns"])
            return cls(name=key.removeprefix(PREFIX), **known)
        except (ValueError, TypeError, AttributeError) as error:
            raise RegistryCorrupt(key, f"not a valid source record: {error}") from error

    @property
    def variable(self) -> str:
        """The environment variable in which a process may give the address with user and password."""
        return variable_of(self.name)


_COMPARED: Final = tuple(
    each.name for each in fields(RegisteredSource) if each.name not in ("address", "table", "fingerprint", "since")
)
"""The fields that must be equal for `exist_ok`; the table is compared by `_is_same_table`."""


@dataclass(slots=True)
class _Opened:
    record: RegisteredSource
    table: SqlTable
    url: str


@dataclass(slots=True)
class Catalog:
    """The registered sources of one registry, and the tables that were opened here. Threads share it."""

    registry: Registry
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _opened: dict[str, _Opened] = field(default_factory=dict)
    """The tables that `open` has opened, by the name of the source. All callers share them."""
    _replaced: list[SqlTable] = field(default_factory=list)
    """Tables of records or addresses that are not used any more. They may still be read, and are closed with the
    catalog."""
    _failures: dict[str, tuple[float, PxrsError]] = field(default_factory=dict)
    _is_closed: bool = False

    def records(self) -> list[RegisteredSource]:
        """All registered sources, sorted by name."""
        return [RegisteredSource.load(entry.key, entry.value) for entry in self.registry.scan(PREFIX)]

    def find(self, name: str) -> RegisteredSource | None:
        if not isinstance(name, str) or not TOPIC_NAME.fullmatch(name):
            return None
        entry = self.registry.get(PREFIX + name)
        return None if entry is None else RegisteredSource.load(entry.key, entry.value)

    def get(self, name: str) -> RegisteredSource:
        """The record of a source. Raises UnknownSource."""
        found = self.find(name)
        if found is None:
            raise UnknownSource(name, [each.name for each in self.records()])
        return found

    def add(
        self, wanted: RegisteredSource, url: str, identity: str | None, *, exist_ok: bool
    ) -> tuple[RegisteredSource, bool]:
        """Open the table and check it, then register the source. Returns the record, and whether it is new.

        wanted:   its `address` and `fingerprint` are filled in here, and its `id` if that is empty.
        exist_ok: do not raise SourceExists if a source with the same name, id and settings is registered."""
        from pxrs.sources.sql_table.identity import hidden_options, public_url

        with _open(wanted, url, identity) as table:
            engine_url = table.url
            record = replace(
                wanted,
                id=table.id,
                address=_given_driver(url, public_url(engine_url).render_as_string()),
                fingerprint=table.fingerprint,
                since=time.time(),
            )
        # Commands that show a group find the name of a source by its id, so an id has one name. The check is not
        # atomic: two processes that register one table under two names at the same moment both succeed.
        if others := [each.name for each in self.records() if each.id == record.id and each.name != record.name]:
            raise SourceExists(
                f"{record.table} of {record.address} is already registered under the name {others[0]}, with the same "
                f"id {record.id}: use that name, or remove it first"
            )
        try:
            self.registry.commit({PREFIX + record.name: ABSENT}, {PREFIX + record.name: record.dump()})
        except Conflict:
            return self._agreeing(record, exist_ok), False
        if hidden := hidden_options(engine_url):
            _logger.warning(
                "source %s: these options of the address are not stored, because they may contain secrets: %s; each "
                "process must pass them in %s",
                record.name,
                ", ".join(hidden),
                record.variable,
            )
        return record, True

    def _agreeing(self, wanted: RegisteredSource, exist_ok: bool) -> RegisteredSource:
        there = self.get(wanted.name)
        differing = [name for name in _COMPARED if getattr(there, name) != getattr(wanted, name)]
        if not _is_same_table(there, wanted):
            differing += [
                name for name in ("table", "address", "fingerprint") if getattr(there, name) != getattr(wanted, name)
            ]
        if exist_ok and not differing:
            return there
        how = ", ".join(f"{name} is {getattr(there, name)!r}, not {getattr(wanted, name)!r}" for name in differing)
        raise SourceExists(f"source {wanted.name} is already registered" + (f": its {how}" if how else ""))

    def remove(self, record: RegisteredSource) -> None:
        """Remove a source. Raises Conflict if the registry has another record under its name."""
        key = PREFIX + record.name
        entry = self.registry.get(key)
        if entry is None or RegisteredSource.load(key, entry.value) != record:
            raise Conflict([key])
        self.registry.commit({key: entry.version}, delete=[key])
        with self._lock:
            opened = self._opened.pop(record.name, None)
            if opened is not None:
                self._replaced.append(opened.table)

    def open(self, name: str, url: str | None = None) -> SqlTable:
        """The table of a source, opened once for all callers. Raises UnknownSource, WrongSource, and what `sql_table`
        raises."""
        record = self.get(name)
        wanted = _address(record, url)
        with self._lock:
            opened = self._opened.get(name)
            is_usable = opened is not None and not opened.table.is_closed and opened.record == record
            if opened is not None and is_usable and (url is None or opened.url == wanted):
                return opened.table
        table = open_record(record, url)
        with self._lock:
            if not self._is_closed:
                if (former := self._opened.get(name)) is not None:
                    self._replaced.append(former.table)
                table.share()
                self._opened[name] = _Opened(record, table, wanted)
                return table
        table.close()
        raise Closed(f"the hub was closed while the source {name} was opened")

    def open_to_look(self, name: str) -> SqlTable:
        """As `open`, for a caller that only looks at a group. A failure is raised again for `FAILURE_KEPT_S` without
        asking the database."""
        with self._lock:
            when, failure = self._failures.get(name, (0.0, None))
        if failure is not None and time.monotonic() - when < FAILURE_KEPT_S:
            raise failure
        try:
            return self.open(name)
        except PxrsError as error:
            with self._lock:
                self._failures[name] = time.monotonic(), error
            raise

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            tables = [*(each.table for each in self._opened.values()), *self._replaced]
        for table in tables:
            table.close_shared()


def open_record(record: RegisteredSource, url: str | None = None, given_by: str = "the url") -> SqlTable:
    """Open a registered source by its record, for processes that have no registry. The caller closes it.

    url:      the address with user and password.
    given_by: where the address comes from, for error messages.

    Raises WrongSource, and what `sql_table` raises."""
    wanted = _address(record, url)
    given_by = record.variable if url is None else given_by
    _check_database(record, wanted, given_by)
    try:
        table = _open(record, wanted, None)
    except ReadFailed as error:
        if url or os.environ.get(record.variable):
            raise
        raise ReadFailed(
            f"{error}; the registered address has no user and password: give the whole address in "
            f"{record.variable}, or PGUSER and PGPASSWORD or PGPASSFILE"
        ) from None
    try:
        _check_place(record, table, given_by)
    except BaseException:
        table.close()
        raise
    return table


def _address(record: RegisteredSource, url: str | None) -> str:
    """The address that this process uses: see the docstring of the module."""
    return (os.environ.get(record.variable) if url is None else url) or record.address


def variable_of(name: str) -> str:
    return "PXRS_SOURCE_" + re.sub(r"[^A-Z0-9]", "_", name.upper())


def checked_name(name: str) -> str:
    """The name, checked. Sources and topics share one namespace, and the rules for names."""
    if not isinstance(name, str) or not TOPIC_NAME.fullmatch(name):
        raise InvalidTopic(
            f"source name {name!r}: use up to 200 letters, digits, '.', '_' or '-', a letter or digit first"
        )
    return name


def _open(record: RegisteredSource, url: str, identity: str | None) -> SqlTable:
    if record.kind != KIND:
        raise InvalidTopic(
            f"source {record.name} is of the kind {record.kind!r}, which this version of pxrs does not support"
        )
    from pxrs.sources.sql_table import sql_table

    return sql_table(
        url,
        record.table,
        name=record.name,
        id=record.id or None,
        identity=identity,
        id_column=record.id_column,
        key_column=record.key_column,
        value_column=record.value_column,
        value_columns=record.value_columns,
        timestamp_column=record.timestamp_column,
        partitions=record.partitions,
        partitioner=record.partitioner,
        notify_channel=record.notify_channel,
        settle_s=record.settle_s,
        poll_s=record.poll_s,
    )


def _is_same_table(one: RegisteredSource, other: RegisteredSource) -> bool:
    """Whether two records are of the same table: by the fingerprints that the databases gave, or, if one of them gave
    none, by addresses and table names."""
    from sqlalchemy import make_url

    from pxrs.sources.sql_table.identity import place_of

    if one.fingerprint is not None and other.fingerprint is not None:
        return one.fingerprint == other.fingerprint
    return one.table == other.table and place_of(make_url(one.address)) == place_of(make_url(other.address))


def _check_database(record: RegisteredSource, url: str, given_by: str) -> None:
    """Raise WrongSource, before connecting, if the address names another kind of database, or a database with another
    name. An address that cannot be parsed or that seems to show a password, and a missing driver, are left to
    `sql_table`, which refuses them."""
    try:
        from sqlalchemy import make_url
        from sqlalchemy.exc import ArgumentError
    except ImportError:
        return
    from pxrs.sources.sql_table.identity import has_misplaced_secret, place_of

    try:
        given = make_url(url)
    except (ArgumentError, ValueError):
        return
    if has_misplaced_secret(given):  # WrongSource would show it
        return
    (kind, *_, database), (known_kind, *_, known) = place_of(given), place_of(make_url(record.address))
    if (kind, database) != (known_kind, known):
        raise _wrong(record, given, given_by)


def _check_place(record: RegisteredSource, table: SqlTable, given_by: str) -> None:
    """Raise WrongSource if the open table is on another server than the registered one."""
    from pxrs.sources.sql_table.identity import public_url

    found = replace(record, fingerprint=table.fingerprint, address=public_url(table.url).render_as_string())
    if not _is_same_table(record, found):
        raise _wrong(record, table.url, given_by)


def _wrong(record: RegisteredSource, url: URL, given_by: str) -> WrongSource:
    from pxrs.sources.sql_table.identity import shown_url

    return WrongSource(
        f"source {record.name} is registered for {record.address}, but this process uses {shown_url(url)}, which is "
        f"another database: correct {given_by}; or, if the table has moved there, or the database was restored from a "
        f"dump or upgraded by pg_upgrade, run `pxrs source remove {record.name}` and `pxrs source add {record.name} "
        f"--id {record.id} ...` with its address"
    )


def _given_driver(url: str, address: str) -> str:
    """The address with the scheme that the user wrote: `postgresql:`, not `postgresql+psycopg:`."""
    return url.partition(":")[0] + ":" + address.partition(":")[2]
