"""The options of `format("pxrs")`: texts become values, or InvalidOption with the name of the option.

Spark passes every option as text, with its name in lower case. An unknown option is an error; those that Spark itself
adds are in `_SPARKS_OWN`. An option that Spark's Kafka source has too means the same here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from pxrs.errors import InvalidGroup, InvalidOption, InvalidUrl
from pxrs.group.assign import assignor_named
from pxrs.model import microseconds_of
from pxrs.publishing.planning import EARLIEST, Offsets
from pxrs.registry.address import Address, parse

COLUMNS: Final = ("key", "value", "partition", "offset", "timestamp")
HEADERS: Final = "headers"
"""The columns of a topic's rows; headers only with includeHeaders."""

_SPARKS_OWN: Final = ("checkpointlocation", "queryname")
_PLACE: Final = ("url", "registry", "topic")
_READ: Final = (*_PLACE, "subscribe", "group", "startingOffsets", "startingTimestamp", "minPartitions")
_READ_MORE: Final = ("failOnDataLoss", "includeHeaders", "columns")
_BATCH: Final = (*_READ, "endingOffsets", "endingTimestamp", *_READ_MORE, "sourceUrl")
_STREAM: Final = (
    *_READ,
    *("maxOffsetsPerTrigger", "maxRowsPerTrigger", "maxBytesPerTrigger"),
    *_READ_MORE,
    *("shareGroup", "assignor", "leaseTtl", "handoverTimeout"),
)
_TRANSACTION: Final = ("txnAppId", "txnVersion")
_WRITE: Final = (*_PLACE, *_TRANSACTION)
_APP: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class Where:
    """A topic of a hub. Paths in the addresses are absolute: executors have another working directory."""

    url: str
    registry: str | None = field(repr=False)
    topic: str


@dataclass(frozen=True, slots=True)
class ReadOptions:
    where: Where
    group: str | None = None
    starting: Offsets | None = None
    starting_us: int | None = None
    ending: Offsets = "latest"
    ending_us: int | None = None
    partitions_min: int | None = None
    rows_max: int | None = None
    bytes_max: int | None = None
    fails_on_loss: bool = True
    columns: tuple[str, ...] = COLUMNS
    is_shared: bool = False
    assignor: str = "sticky"
    lease_ttl: float | None = None
    handover_timeout: float | None = None
    source_url: str | None = field(default=None, repr=False)
    """The address of a registered source's database, which may hold a password. A path in it is absolute."""


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """The options of `spark.read`. Raises InvalidOption."""
    given = _Given(options, _BATCH, "spark.read", _STREAM)
    starting = given.offsets("startingOffsets", ("earliest", "latest", "committed"))
    if starting == "latest":
        raise InvalidOption("startingOffsets", "a batch that starts at the latest offset reads nothing")
    group = given.text("group")
    if starting == "committed" and group is None:
        raise InvalidOption("group", "startingOffsets=committed needs the group whose checkpoints are meant")
    if group is not None and starting != "committed":
        raise InvalidOption("group", "a batch reads no group's checkpoints unless startingOffsets is committed")
    return ReadOptions(
        given.where(),
        group,
        starting,
        given.time("startingTimestamp", "startingOffsets"),
        given.offsets("endingOffsets", ("latest",)) or "latest",
        given.time("endingTimestamp", "endingOffsets"),
        given.count("minPartitions"),
        fails_on_loss=given.flag("failOnDataLoss", True),
        columns=given.columns(),
        source_url=_resolved_table(given.text("sourceUrl")),
    )


def stream_options(options: Mapping[str, str]) -> ReadOptions:
    """The options of `spark.readStream`. Raises InvalidOption."""
    given = _Given(options, _STREAM, "spark.readStream", _BATCH)
    group = given.text("group")
    if group is None:
        raise InvalidOption("group", "a streaming query is a member of a consumer group: name the group")
    rows = given.count("maxRowsPerTrigger"), given.count("maxOffsetsPerTrigger")
    if None not in rows:
        raise InvalidOption("maxRowsPerTrigger", "it is another name of maxOffsetsPerTrigger: give one of them")
    return ReadOptions(
        given.where(),
        group,
        given.offsets("startingOffsets", ("earliest", "latest", "committed")),
        given.time("startingTimestamp", "startingOffsets"),
        partitions_min=given.count("minPartitions"),
        rows_max=rows[0] or rows[1],
        bytes_max=given.count("maxBytesPerTrigger"),
        fails_on_loss=given.flag("failOnDataLoss", True),
        columns=given.columns(),
        is_shared=given.flag("shareGroup", False),
        assignor=given.assignor(),
        lease_ttl=given.seconds("leaseTtl"),
        handover_timeout=given.seconds("handoverTimeout"),
    )


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Where a write goes. Paths in the addresses are absolute: executors have another working directory."""

    url: str
    registry: str | None = field(repr=False)
    topic: str | None = None
    """None: each row's column `topic` names its topic."""
    app: str | None = None
    """Who makes this write, for a write that is done once for each `version`. None in a streaming query's own writes
    (`writeStream`, `stream_updates`): the query's id is then known to its tasks."""
    version: int | None = None
    """The number of a write that may be repeated. None: the write is never repeated, or Spark numbers it."""


def write_options(options: Mapping[str, str], *, is_stream: bool = False) -> WriteOptions:
    """The options of `df.write`, or of `df.writeStream`. Raises InvalidOption."""
    known, of = (_PLACE, "writeStream") if is_stream else (_WRITE, "a write")
    given = _Given(options, known, of, _TRANSACTION)
    url, registry, topic = given.text("url"), given.text("registry"), given.text("topic")
    if url is None:
        raise InvalidOption("url", "missing; give the hub's directory")
    app, version = (None, None) if is_stream else given.transaction()
    return WriteOptions(
        given._directory(url),
        None if registry is None else _resolved(registry),
        None if topic is None else topic.strip(),
        app,
        version,
    )


def columns_of(options: Mapping[str, str]) -> tuple[str, ...]:
    """The columns that the options name. Spark asks for them before it says whether it reads a batch or a stream.
    Raises InvalidOption."""
    return _Given(options, (*_BATCH, *_STREAM), "pxrs", ()).columns()


class _Given:
    def __init__(self, options: Mapping[str, str], known: tuple[str, ...], of: str, elsewhere: tuple[str, ...]) -> None:
        names = {name.lower(): name for name in known}
        others = {name.lower(): name for name in elsewhere}
        self._values: dict[str, str] = {}
        for key, value in options.items():
            if key.lower() in _SPARKS_OWN:
                continue
            if key.lower() == "path":
                raise InvalidOption("path", "a topic has none: leave it out of load, save or start; url names the hub")
            if key.lower() not in names:
                if key.lower() in others:
                    raise InvalidOption(others[key.lower()], f"not for {of}; it has {_listed(known)}")
                raise InvalidOption(key, f"unknown; {of} has {_listed(known)}")
            self._values[names[key.lower()]] = value

    def text(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is not None and not value.strip():
            raise InvalidOption(name, "it is empty")
        return value

    def where(self) -> Where:
        url, registry = self.text("url"), self.text("registry")
        topics = self.text("topic"), self.text("subscribe")
        if url is None:
            raise InvalidOption("url", "missing; give the hub's directory")
        if topics == (None, None):
            raise InvalidOption("topic", "missing; give the topic's name")
        if None not in topics:
            raise InvalidOption("subscribe", "it is another name of topic: give one of them")
        topic = (topics[0] or topics[1] or "").strip()
        if "," in topic:
            raise InvalidOption("subscribe", f"{topic!r} names several topics: read each by itself, and use union")
        return Where(self._directory(url), None if registry is None else _resolved(registry), topic)

    def _directory(self, url: str) -> str:
        address = _parsed("url", url)
        if address.scheme != "file":
            raise InvalidOption(
                "url", f"{address.text}: Spark's processes share a hub in a directory; {address.scheme}: is none"
            )
        return _directory("url", address)

    def count(self, name: str) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        if not value.strip().isdecimal() or not 0 < int(value) < 1 << 62:
            raise InvalidOption(name, f"{value!r}; give a whole number from 1 on")
        return int(value)

    def transaction(self) -> tuple[str | None, int | None]:
        """The values of txnAppId and txnVersion."""
        app, version = self.text("txnAppId"), self.text("txnVersion")
        if app is not None and version is None:
            raise InvalidOption("txnVersion", "missing; it numbers the writes of txnAppId")
        if app is not None and not _APP.fullmatch(app.strip()):
            raise InvalidOption("txnAppId", f"{app!r}; give letters, digits, dots, dashes and underscores, at most 128")
        if version is not None and (not version.strip().isdecimal() or int(version) >= 1 << 31):
            raise InvalidOption("txnVersion", f"{version!r}; give a whole number from 0 on, such as the batch's")
        return None if app is None else app.strip(), None if version is None else int(version)

    def flag(self, name: str, default: bool) -> bool:
        value = self.text(name)
        if value is None:
            return default
        if value.strip().lower() not in ("true", "false"):
            raise InvalidOption(name, f"{value!r}; give true or false")
        return value.strip().lower() == "true"

    def assignor(self) -> str:
        value = self.text("assignor")
        if value is None:
            return "sticky"
        try:
            assignor_named(value.strip())
        except InvalidGroup as error:
            raise InvalidOption("assignor", str(error)) from error
        return value.strip()

    def columns(self) -> tuple[str, ...]:
        """The columns of the rows, in the order in which the user has given them."""
        known = (*COLUMNS, HEADERS) if self.flag("includeHeaders", False) else COLUMNS
        value = self._values.get("columns")
        if value is None:
            return known
        names = tuple(name.strip() for name in value.split(","))
        choices = f"give some of {_listed(known)}, with commas between them"
        for place, name in enumerate(names):
            if name == HEADERS and name not in known:
                raise InvalidOption("columns", f"headers are only there with includeHeaders=true; else {choices}")
            if name not in known:
                raise InvalidOption("columns", f"{name!r} is none; {choices}")
            if name in names[:place]:
                raise InvalidOption("columns", f"{name!r} is there twice; {choices}")
        return names

    def seconds(self, name: str) -> float | None:
        value = self.text(name)
        if value is None:
            return None
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds <= 86_400:
            raise InvalidOption(name, f"{value!r}; give seconds, more than 0 and at most a day")
        return seconds

    def time(self, name: str, instead_of: str) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        if instead_of in self._values:
            raise InvalidOption(name, f"it takes the place of {instead_of}: give one of them")
        value = value.strip()
        if value.removeprefix("-").isdecimal():
            return int(value) * 1000
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise InvalidOption(
                name, f"{value!r}; give milliseconds since 1970, or a time such as 2026-01-31T12:00:00+00:00"
            ) from None
        if moment.tzinfo is None:
            raise InvalidOption(name, f"{value!r} has no time zone; give one, such as +00:00")
        return microseconds_of(moment)

    def offsets(self, name: str, words: tuple[str, ...]) -> Offsets | None:
        value = self.text(name)
        if value is None:
            return None
        word = value.strip()
        if word in words:
            return word
        choices = f'give {_listed(words)}, or JSON such as {{"0": 23, "1": -2}}, in which -2 is earliest and -1 latest'
        if not word.startswith("{"):
            raise InvalidOption(name, f"{value!r}; {choices}")
        try:
            found = json.loads(word)
            topic = self.text("topic") or self.text("subscribe")
            if list(found) == [topic] and isinstance(found[topic], dict):  # as Kafka's source has it
                found = found[topic]
            offsets = {int(partition): offset for partition, offset in found.items()}
        except (ValueError, AttributeError) as error:
            raise InvalidOption(name, f"{value!r}: {error}; {choices}") from None
        if not offsets or not all(type(offset) is int and offset >= EARLIEST for offset in offsets.values()):
            raise InvalidOption(name, f"{value!r}; {choices}")
        return offsets


def _resolved(registry: str) -> str:
    """The address of a registry, with an absolute path in place of a relative one."""
    address = _parsed("registry", registry)
    if address.scheme == "memory":
        raise InvalidOption("registry", "Spark's processes cannot share a registry in memory")
    _, mark, options = registry.partition("?")
    if address.scheme == "file":
        return _directory("registry", address) + mark + options
    name = address.rest.removeprefix("///")
    if address.scheme == "sqlite" and name not in (address.rest, "", ":memory:"):
        return f"sqlite:///{Path(name).absolute()}{mark}{options}"
    return registry


def _resolved_table(url: str | None) -> str | None:
    """The address of a database, with an absolute path of a SQLite file in place of a relative one. The address is not
    checked here, but when the table is opened."""
    if url is None:
        return None
    scheme, mark, rest = url.strip().partition(":///")
    path, query_mark, options = rest.partition("?")
    if scheme.partition("+")[0] != "sqlite" or not mark or path in ("", ":memory:") or path.startswith("file:"):
        return url.strip()
    return f"{scheme}:///{Path(path).absolute()}{query_mark}{options}"


def _parsed(option: str, url: str) -> Address:
    try:
        return parse(url)
    except InvalidUrl as error:
        raise InvalidOption(option, str(error)) from error


def _directory(option: str, address: Address) -> str:
    try:
        return str(address.directory())
    except InvalidUrl as error:
        raise InvalidOption(option, str(error)) from error


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)
