"""The options of `format("pxrs")`: texts become values, or InvalidOption with the name of the option.

An unknown option is an error. An option that Spark's Kafka source has too means the same here. The texts are read in
`given.py`, the names are in `option_names.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pxrs.errors import InvalidOption, InvalidUrl
from pxrs.publishing.selection import FROM_START, TO_END, Boundary, Topics
from pxrs.registry.address import Address, parse
from pxrs.spark.given import COLUMNS, Given
from pxrs.spark.option_names import BATCH, STREAM, WRITE, WRITE_STREAM
from pxrs.spark.place import SERVER, absolute

TRIGGER_DELAY_S: Final = 15 * 60.0
"""How long a stream waits at most for `minOffsetsPerTrigger` rows, unless maxTriggerDelay is given."""


@dataclass(frozen=True, slots=True)
class ReadFrom:
    """The topics of a hub that are read. Paths in the addresses are absolute."""

    url: str
    """The hub's directory, or the address of its server."""
    registry: str | None = field(repr=False)
    topics: Topics


@dataclass(frozen=True, slots=True)
class ReadOptions:
    where: ReadFrom
    group: str | None = None
    starting: Boundary = FROM_START
    ending: Boundary = TO_END
    partitions_min: int | None = None
    rows_max: int | None = None
    bytes_max: int | None = None
    rows_min: int | None = None
    trigger_delay_s: float = TRIGGER_DELAY_S
    """How long a stream waits at most until there are `rows_min` rows."""
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
    given = Given(options, BATCH, "spark.read", STREAM)
    where = _read_from(given)
    starting = given.starting(where.topics, ("earliest", "latest", "committed"))
    if starting.word == "latest":
        raise InvalidOption(
            "startingOffsets",
            "a batch read that starts at the latest offset reads nothing: give earliest, offsets or startingTimestamp",
        )
    group = given.text("group")
    if starting.word == "committed" and group is None:
        raise InvalidOption("group", "startingOffsets=committed reads from the checkpoints of a group: set group")
    if group is not None and starting.word != "committed":
        raise InvalidOption(
            "group",
            "a batch read uses a group's checkpoints only with startingOffsets=committed: set that, or remove group",
        )
    return ReadOptions(
        where,
        group,
        starting,
        given.ending(where.topics),
        given.count("minPartitions"),
        fails_on_loss=given.flag("failOnDataLoss", True),
        columns=given.columns(),
        source_url=_resolved_table(given.text("sourceUrl")),
    )


def stream_options(options: Mapping[str, str]) -> ReadOptions:
    """The options of `spark.readStream`. Raises InvalidOption."""
    given = Given(options, STREAM, "spark.readStream", BATCH)
    group = given.text("group")
    if group is None:
        raise InvalidOption("group", "a streaming query is a member of a consumer group: name the group")
    rows = given.count("maxRowsPerTrigger"), given.count("maxOffsetsPerTrigger")
    if None not in rows:
        raise InvalidOption("maxRowsPerTrigger", "it is an alias of maxOffsetsPerTrigger: give only one of them")
    rows_max, rows_min = rows[0] or rows[1], given.count("minOffsetsPerTrigger")
    if rows_min is not None and rows_max is not None and rows_min > rows_max:
        raise InvalidOption("minOffsetsPerTrigger", f"{rows_min} is more than maxOffsetsPerTrigger, {rows_max}")
    delay_s = given.duration_s("maxTriggerDelay")
    if delay_s is not None and rows_min is None:
        raise InvalidOption("maxTriggerDelay", "it takes effect only with minOffsetsPerTrigger: remove it, or add that")
    where = _read_from(given)
    return ReadOptions(
        where,
        group,
        given.starting(where.topics, ("earliest", "latest", "committed")),
        partitions_min=given.count("minPartitions"),
        rows_max=rows_max,
        bytes_max=given.count("maxBytesPerTrigger"),
        rows_min=rows_min,
        trigger_delay_s=TRIGGER_DELAY_S if delay_s is None else delay_s,
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
    """The option txnAppId: the writer of a write that is done once for each `version`. None in a streaming query's own
    writes (`writeStream`, `stream_updates`), whose tasks read the query's id from Spark."""
    version: int | None = None
    """The number of a write that may be repeated. None: the write is never repeated, or Spark numbers it."""


def write_options(options: Mapping[str, str], *, is_stream: bool = False) -> WriteOptions:
    """The options of `df.write`, or of `df.writeStream`. Raises InvalidOption."""
    known, of = (WRITE_STREAM, "writeStream") if is_stream else (WRITE, "a write")
    given = Given(options, known, of, WRITE)
    topic = given.text("topic")
    app, version = (None, None) if is_stream else given.transaction()
    return WriteOptions(*_hub(given), None if topic is None else topic.strip(), app, version)


def columns_of(options: Mapping[str, str]) -> tuple[str, ...]:
    """The columns that the options name. Spark asks for them before it says whether it reads a batch or a stream.
    Raises InvalidOption."""
    return Given(options, (*BATCH, *STREAM), "pxrs").columns()


def _read_from(given: Given) -> ReadFrom:
    return ReadFrom(*_hub(given), given.topics())


def _hub(given: Given) -> tuple[str, str | None]:
    """The addresses of the hub and of its registry."""
    address = _parsed("url", given.required("url", "give the hub's directory, or pxrs://HOST:PORT"))
    registry = given.text("registry")
    if address.scheme == SERVER:
        if registry is not None:
            raise InvalidOption("registry", f"{address.text} is a server with its own registry: remove this option")
        return absolute(address), None
    if address.scheme != "file":
        raise InvalidOption(
            "url",
            f"{address.text}: Spark's processes can only share a hub in a directory or behind a server, "
            f"pxrs://HOST:PORT; {address.scheme}: is neither",
        )
    return _directory("url", address), None if registry is None else _resolved(registry)


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
