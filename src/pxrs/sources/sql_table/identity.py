"""Which table a source is: its id, however the address and the table's name are spelled; and which parts of an address
may be stored or shown.

Checkpoints are kept under the id, so an id that changed with the spelling would restart a group from the beginning. The
id is a hash of the address and the table in one canonical spelling:
- `localhost`, `127.0.0.1` and `::1` become `localhost`; other hosts stay as they are written, in lower case;
- on PostgreSQL the schema is left out if the search path finds the same table by the bare name.

Version 0.1 hashed the address as it was written. `former_ids` are the ids that it gave to the spellings of the same
table, except the id itself. A group that has checkpoints under one of them, and none under the id, is refused instead
of restarted (`IdentityChanged`), also if the user gave the id. The `fingerprint` names the table as the database itself
does, so that two host names of one server are recognised as the same. Neither the `fingerprint` nor the `mark` depends
on the columns and partitions, so that a group which has read the table with other ones is recognised (`SourceChanged`).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from pxrs.errors import InvalidTopic
from pxrs.registry.address import ALIASES

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

_NAMESPACE: Final = uuid.UUID("6f0b2a55-0a3c-5d0e-9c53-3f6f1d2f7c21")
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_PORTS: Final = {"postgresql": 5432}
OPTIONS_WITHOUT_SECRETS: Final = frozenset(
    [
        *("host", "port", "service", "service_name", "options", "application_name", "connect_timeout", "timeout"),
        *("sslmode", "sslrootcert", "sslcrl", "sslnegotiation", "channel_binding", "gssencmode"),
        *("target_session_attrs", "load_balance_hosts", "tcp_user_timeout", "mode", "cache", "uri"),
        *("keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count"),
    ]
)
"""The options of an address ('?...') that may be stored and shown. Any other option may hold a secret."""
_ID_CHARACTERS_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class Identity:
    """The ids of a table: the one it is read under, and those that version 0.1 may have used."""

    id: str
    """The id under which checkpoints are kept."""
    former_ids: tuple[str, ...]
    """The ids that version 0.1 gave to the same table, one for each spelling of its address."""
    fingerprint: str | None
    """Identifies the table by what the database reports; None if the database reports nothing."""
    mark: str
    """Identifies the table in the record that a group keeps of it: the fingerprint; if there is none, the `identity`
    that was given, or else the address and the name of the table."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """The settings that decide which row has which offset and partition. With other settings, old checkpoints are
    meaningless."""

    id_column: str
    key_column: str | None
    partitions: int
    partitioner: str

    def __str__(self) -> str:
        key = f"the key column {self.key_column}" if self.key_column is not None else "no key column"
        return f"{self.partitions} partitions by {self.partitioner}, {key} and the id column {self.id_column}"


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the database reports about the name of a table."""

    fingerprint: str | None
    names: tuple[str, ...]
    """All names by which the same table is found, such as `events` and `public.events`; the canonical one first."""


def identify(url: URL, resolved: Resolved, meaning: Meaning, identity: str | None, id: str | None) -> Identity:
    """The ids of a table.

    identity: replaces the address and the table in the id, if given.
    id:       is the id, if given."""
    fingerprint = None if resolved.fingerprint is None else _hash([resolved.fingerprint])
    dialect, host, port, database = place_of(url)
    spelled = [url.host] if url.host != host else []
    is_local = dialect != "sqlite" and (host in (None, "localhost") or str(host).startswith("/"))
    hosts = [host, *spelled, *((*_LOOPBACK, None) if is_local else ())]
    # Version 0.1 ignored a port that was given as an option.
    ports = dict.fromkeys([port, url.port or _PORTS.get(dialect)])
    ids = [
        _hash([dialect, each, number, database, name], meaning)
        for number in ports
        for each in hosts
        for name in resolved.names
    ]
    if identity is not None:
        ids.insert(0, _hash(["identity", identity], meaning))
    if id is not None:
        ids.insert(0, checked_id(id))
    first, *others = dict.fromkeys(ids)
    where = [dialect, host, port, database, resolved.names[0]] if identity is None else ["identity", identity]
    return Identity(first, tuple(others), fingerprint, fingerprint or _hash(where))


def place_of(url: URL) -> tuple[str, str | None, int | None, str | None]:
    """Dialect, host, port and database of an address, in the canonical spelling. The host may be the folder of a Unix
    socket, or name a service of libpq. Version 0.1 ignored both, and options for host and port: see `identify`."""
    dialect, database = ALIASES.get(url.get_backend_name(), url.get_backend_name()), url.database
    if dialect == "sqlite" and database not in (None, "", ":memory:"):
        database = str(Path(str(database)).resolve())
    host, port = url.host or _option(url, "host"), url.port or _option(url, "port")
    if host is not None:
        # An absolute path is the folder of a Unix socket on this machine.
        host = host if host.startswith("/") else host.strip("[]").lower()
        host = "localhost" if host in _LOOPBACK else host
    if (service := _option(url, "service")) is not None:  # libpq takes missing parts of the address from that service
        host = f"service={service} {host or ''}".rstrip()
    return dialect, host, int(port) if port and str(port).isdecimal() else _PORTS.get(dialect), database


def has_misplaced_secret(url: URL) -> bool:
    """Whether a part of the password was probably parsed as the host or the database, because the password contains a
    '@' or is preceded by a superfluous slash. Then neither may be shown."""
    is_in_database = url.get_backend_name() != "sqlite" and any(each in (url.database or "") for each in "@:")
    return "@" in (url.host or "") or is_in_database


def checked_table(table: str) -> str:
    """Check the name of a table that a user gives. An address in its place is not shown: it may contain a password."""
    if "://" in table:
        raise InvalidTopic(
            "the table is given as an address: give the name of the table, NAME or SCHEMA.NAME, and the address of its "
            "database as the url (--sql-table URL)"
        )
    return table


def checked_id(id: str) -> str:
    """Check an id that a user gives. It becomes a part of registry keys."""
    is_plain = isinstance(id, str) and id.isascii() and id.isalnum() and len(id) <= _ID_CHARACTERS_MAX
    if not is_plain:
        raise InvalidTopic(f"id {id!r}: give the id of a source, letters and digits, as `pxrs group describe` shows it")
    return id


def public_url(url: URL) -> URL:
    """The address as it is stored: without user, password, and options that may hold a secret."""
    known = {name: value for name, value in url.query.items() if name in OPTIONS_WITHOUT_SECRETS}
    if url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:"):
        url = url.set(database=str(Path(str(url.database)).resolve()))
    return url._replace(username=None, password=None).set(query=known)


def shown_url(url: URL) -> str:
    """The address as messages show it: with the user, without the password and options that may hold a secret."""
    return str(public_url(url)._replace(username=url.username).render_as_string(hide_password=True))


def hidden_options(url: URL) -> list[str]:
    """The names of the options of an address that are not stored."""
    return sorted(name for name in url.query if name not in OPTIONS_WITHOUT_SECRETS)


def without_secrets(text: str, url: URL) -> str:
    """The text of a driver's error, with the secrets of the address removed."""
    secrets = [str(url.password)] if url.password else []
    for name in hidden_options(url):
        value = url.query[name]
        secrets += [value] if isinstance(value, str) else list(value)
    spellings = {each for secret in secrets if secret for each in (secret, quote(secret, safe=""))}
    for each in sorted(spellings, key=len, reverse=True):
        text = text.replace(each, "***")
    return text


def _option(url: URL, name: str) -> str | None:
    value = url.query.get(name)
    return value if value is None or isinstance(value, str) else value[0]


def _hash(where: Sequence[str | int | None], meaning: Meaning | None = None) -> str:
    """The hash of these parts. With a meaning, it is computed as in version 0.1, because existing ids must stay."""
    means: list[str | int | None] = []
    if meaning is not None:
        means = [meaning.id_column, meaning.key_column, meaning.partitions, meaning.partitioner]
    return uuid.uuid5(_NAMESPACE, json.dumps([*where, *means])).hex
