"""Registry addresses: `scheme://user:password@host:port,host:port/path?option=value`.

A bad address is an error at once that names what is wrong and the choices, never a silent default: something that
looks like a host is not taken for a directory, and an option that no one knows is refused. A password can stay out
of the address: `?password_file=PATH`, or the environment variable PXRS_REGISTRY_PASSWORD.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from pxrs import disk
from pxrs.arguments import shown
from pxrs.errors import InvalidUrl

DEFAULT_NAMESPACE = "pxrs"
PASSWORD_VARIABLE = "PXRS_REGISTRY_PASSWORD"
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_HOST_NAME = re.compile(
    r"localhost|\d+(\.\d+){3}|[\w-]+(\.[\w-]+)*\.(cloud|com|dev|internal|io|lan|local|net|org)", re.IGNORECASE
)
"""Without a port the text may also be a directory: it is one if that directory exists."""
_HOST_PORT = re.compile(r"[A-Za-z0-9_.-]+:\d+(,.*)?(/.*)?")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+_-]*):(.*)", re.DOTALL)
DRIVERS = {"postgresql": "psycopg", "oracle": "oracledb", "sqlite": "pysqlite"}
"""Scheme of a SQL database -> the driver that pxrs uses. An address may name it as SQLAlchemy does: the scheme
postgresql+psycopg is the same as postgresql."""
_SERVERS = ("postgresql", "oracle", "etcd", "zookeeper", "pxrs")
"""Schemes whose addresses name hosts."""
REFUSED_S = 2.0
"""How long a client tries its first connection while every server of the address refuses it, because none listens."""
REFUSALS_MIN = 3
"""How many attempts must at least be refused before a client gives up: a server that is restarting refuses connections
for a moment."""
ALIASES = {"postgres": "postgresql"}
"""Other spellings of schemes: libpq accepts both of these, and many services print the first."""
_TRUE, _FALSE = {"true", "yes", "1", "on"}, {"false", "no", "0", "off"}


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of a registry address. `text` has no password in it."""

    scheme: str
    rest: str = field(repr=False)
    """What follows the scheme, as given, without the query."""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def namespace(self) -> str:
        return self.options.get("namespace", DEFAULT_NAMESPACE)

    @property
    def text(self) -> str:
        """For messages and logs: the password, if any, is hidden."""
        login, at, place = self.rest.rpartition("@")
        user, colon, _ = login.removeprefix("//").partition(":")
        return f"{self.scheme}://{user}:***@{place}" if at and colon else f"{self.scheme}:{self.rest}"

    @property
    def shown(self) -> str:
        """`text` with the namespace, if the address has one: identifies the registry in messages."""
        namespace = self.options.get("namespace")
        return self.text if namespace is None else f"{self.text}?namespace={namespace}"

    def hosts(self, default_port: int) -> list[tuple[str, int]]:
        if "@" in self.rest and "@" not in self._netloc:
            raise InvalidUrl(f"{self.text}: write '/' in a user name or password as %2F")
        hosts = []
        for part in self._netloc.rpartition("@")[2].split(","):
            split = urlsplit(f"//{part}")
            try:
                port = split.port
            except ValueError:
                raise InvalidUrl(f"{self.text}: the port must be a number from 1 to 65535") from None
            if not split.hostname:
                raise InvalidUrl(f"{self.text}: the host is empty; write {self.scheme}://HOST:{default_port}")
            hosts.append((split.hostname, port or default_port))
        return hosts

    @property
    def refused_s(self) -> float:
        """How long the first connection is tried while every server refuses it. An address with a `timeout` is tried
        for that time instead: its program may start before its server."""
        return math.inf if "timeout" in self.options else REFUSED_S

    @property
    def path(self) -> str:
        """What follows the hosts."""
        return self.rest[2:].partition("/")[2].strip("/") if self.rest.startswith("//") else self.rest

    def directory(self) -> Path:
        """The directory that a `file:` address or a plain path names. It need not exist, and must not be a file."""
        host, path = "", self.rest
        if path.startswith("//"):
            host, slash, rest = path[2:].partition("/")
            path = slash + rest
        if host not in ("", "localhost"):
            raise InvalidUrl(
                f"{self.text}: file: takes no host, but got {host!r}; write file:DIR or file:///absolute/dir"
            )
        if not path:
            raise InvalidUrl(f"{self.text}: the directory is missing; write file:DIR")
        if path == "~" or path.startswith("~/"):
            raise InvalidUrl(f"{path}: only a shell expands '~': write os.path.expanduser({path!r}), or ./{path}")
        directory = Path(path).absolute()
        try:
            there = next(each for each in (directory, *directory.parents) if each.exists())
            is_file = not there.is_dir()
        except PermissionError as error:
            raise InvalidUrl(f"the url {shown(path)} cannot be used: {disk.explain(error, directory)}") from error
        except OSError as error:
            raise InvalidUrl(f"the url {shown(path)} is not a valid path: {error.strerror}") from error
        if is_file:
            raise InvalidUrl(f"{there} is a file; give a directory")
        return directory

    def credentials(self) -> tuple[str | None, str | None]:
        """User and password: from the address, else `password_file`, else the environment."""
        user, _, password = self._netloc.rpartition("@")[0].partition(":")
        name = unquote(user) or None
        if password:
            return name, unquote(password)
        if "password_file" in self.options:
            path = Path(self.options["password_file"])
            try:
                return name, path.read_text().rstrip("\n")
            except OSError as error:
                raise InvalidUrl(f"{self.text}: password_file={path}: {disk.explain(error, path)}") from error
        return name, os.environ.get(PASSWORD_VARIABLE) if name else None

    def seconds(self, option: str, default: float) -> float:
        text = self.options.get(option)
        try:
            value = default if text is None else float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= 86_400:
            raise InvalidUrl(f"{self.text}: {option}={text}: give seconds, such as {option}={default:g}")
        return value

    def flag(self, option: str, default: bool) -> bool:
        text = self.options.get(option, str(default)).lower()
        if text not in _TRUE | _FALSE:
            raise InvalidUrl(f"{self.text}: {option}={text}: give true or false")
        return text in _TRUE

    def choice(self, option: str, default: str, choices: Collection[str]) -> str:
        text = self.options.get(option, default)
        if text not in choices:
            raise InvalidUrl(f"{self.text}: {option}={text}: choose from {', '.join(sorted(choices))}")
        return text

    def file(self, option: str) -> Path | None:
        """The path of a file that must exist, such as a certificate."""
        if option not in self.options:
            return None
        path = Path(self.options[option])
        if not path.is_file():
            raise InvalidUrl(f"{self.text}: {option}={path}: no such file")
        return path

    def refuse_unknown_options(self, known: Collection[str]) -> None:
        choices = {"namespace", *known}
        for option in self.options:
            if option not in choices:
                raise InvalidUrl(f"{self.text}: unknown option {option!r}; choose from {', '.join(sorted(choices))}")

    @property
    def _netloc(self) -> str:
        return self.rest[2:].partition("/")[0] if self.rest.startswith("//") else ""


def parse(url: str | os.PathLike[str]) -> Address:
    """Parse an address. A plain path is a `file:` registry."""
    if not isinstance(url, str | os.PathLike) or not isinstance(text := os.fspath(url), str) or "\0" in text:
        raise InvalidUrl(f"the url is {shown(url)}: give a directory, memory:, or SCHEME://HOST:PORT, as str or Path")
    if not text:
        raise InvalidUrl("the url is empty; give a directory, memory:, or SCHEME://HOST:PORT")
    if isinstance(url, os.PathLike):
        return Address("file", text)
    if _HOST_PORT.fullmatch(text) or (_HOST_NAME.fullmatch(text) and not os.path.isdir(text)):
        raise InvalidUrl(
            f"{text!r} looks like a host: write pxrs://{text} for a server of pxrs; as a registry also etcd://{text} "
            f"or zookeeper://{text}; or ./{text} for a path"
        )
    match = _SCHEME.fullmatch(text)
    if match is None:
        scheme, rest = "file", text
    else:
        scheme, rest = _without_driver(match[1].lower()), match[2]
    if scheme in _SERVERS and not rest.startswith("//"):
        raise InvalidUrl(f"{scheme}: is the address of a server: write {scheme}://HOST:PORT, with two slashes")
    rest, _, query = rest.partition("?")
    if rest.startswith("//") and "@" in query and "@" not in rest:
        raise InvalidUrl(f"{scheme}: the part before '@' has a '?': write it as %3F in a user name or password")
    address = Address(scheme, rest, dict(_options(scheme, query)))
    if not _NAMESPACE.fullmatch(address.namespace):
        raise InvalidUrl(
            f"{address.text}: namespace={address.namespace!r}: use up to 64 letters, digits, '.', '_' or '-', "
            "a letter or digit first"
        )
    return address


def _without_driver(scheme: str) -> str:
    """Only the scheme is shown in the error: the rest may contain a password."""
    database, plus, driver = scheme.partition("+")
    database = ALIASES.get(database, database)
    if not plus or database not in DRIVERS:
        return f"{database}{plus}{driver}"
    if driver != DRIVERS[database]:
        raise InvalidUrl(
            f"{scheme}: a registry in {database} is reached through {DRIVERS[database]}: write {database}:// or "
            f"{database}+{DRIVERS[database]}://"
        )
    return database


def _options(scheme: str, query: str) -> list[tuple[str, str]]:
    try:
        return parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise InvalidUrl(f"{scheme}: the options after '?' cannot be read: write ?name=value&name=value") from error
