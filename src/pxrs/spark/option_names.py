"""The names of the options of `format("pxrs")`, and the errors for unknown names.

Spark passes the names of options to a Python source in lower case. So an error can show an unknown name only in lower
case, whatever the user has written; it suggests the nearest known option in its proper spelling.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

from pxrs.errors import InvalidOption

_SPARKS_OWN: Final = ("checkpointlocation", "queryname")
"""Options that Spark adds by itself."""
_HUB: Final = ("url", "registry")
_TOPICS: Final = ("topic", "subscribe", "subscribePattern", "assign")
_STARTING: Final = (
    *("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp"),
    "startingOffsetsByTimestampStrategy",
)
_ROWS: Final = ("minPartitions", "failOnDataLoss", "includeHeaders", "includeTopic", "columns")
BATCH: Final = (
    *(*_HUB, *_TOPICS, "group", *_STARTING),
    *("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"),
    *(*_ROWS, "sourceUrl"),
)
STREAM: Final = (
    *(*_HUB, *_TOPICS, "group", *_STARTING),
    *("maxOffsetsPerTrigger", "maxRowsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"),
    *(*_ROWS, "shareGroup", "assignor", "leaseTtl", "handoverTimeout"),
)
WRITE_STREAM: Final = (*_HUB, "topic")
WRITE: Final = (*WRITE_STREAM, "txnAppId", "txnVersion")

_KAFKAS: Final = {
    "kafka.bootstrap.servers": "give the hub's directory or server as url",
    "kafka.group.id": "give the group's name as group",
    "groupidprefix": "pxrs generates no group names; give the group's name as group",
    "kafkaconsumer.polltimeoutms": "tasks read files, and do not poll; remove it",
    "fetchoffset.numretries": "offsets are read from files; remove it",
    "fetchoffset.retryintervalms": "offsets are read from files; remove it",
    "maxrecordsperpartition": "give the number of tasks as minPartitions",
}
"""What to do about an option of Spark's Kafka source that pxrs does not have."""
_NO_FILTERS: Final = (
    "not supported: Spark 4.3 would give the rows of one filter to other queries on the same DataFrame. "
    "Spark applies where to the rows that are read; to read only a part, give assign for partitions, startingOffsets "
    "and endingOffsets, or startingTimestamp and endingTimestamp"
)
"""The advice about `pushFilters`, which Spark's documentation of Python sources names (docs/decisions/0071)."""
_A_CLIENTS: Final = "it configures a Kafka client, which pxrs does not have; remove it"
NO_TABLE: Final = (
    "Spark does not pass the options of a table created with CREATE TABLE ... USING pxrs to a Python source. Drop the "
    "table, and use a temporary view, whose options it does pass: CREATE TEMPORARY VIEW orders USING pxrs OPTIONS "
    "(url '/data/hub', topic 'orders')"
)
_NEAR: Final = 0.6
"""How similar an option's name has to be to be suggested, from 0 to 1: a few letters may differ."""


def known_values(
    options: Mapping[str, str], known: tuple[str, ...], of: str, elsewhere: Iterable[str] = ()
) -> dict[str, str]:
    """The options by their proper names. Raises InvalidOption for a name that is not known.

    of:        the call that the options are given to, such as spark.read, for errors.
    elsewhere: options that exist for another call."""
    names = {name.lower(): name for name in known}
    others = {name.lower(): name for name in elsewhere}
    found: dict[str, str] = {}
    for key, value in options.items():
        name = key.lower()
        if name in names:
            found[names[name]] = value
        elif name == "path":
            raise InvalidOption("path", "a topic has no path: remove it from load, save or start; url names the hub")
        elif name in others:
            raise InvalidOption(others[name], f"not an option of {of}, which has {', '.join(known)}")
        elif name == "provider":  # CREATE TABLE: Spark passes properties of the table instead of its options
            raise InvalidOption("url", f"missing: {NO_TABLE}")
        elif name not in _SPARKS_OWN:
            raise _unknown(key, names, of)
    return found


def _unknown(key: str, names: Mapping[str, str], of: str) -> InvalidOption:
    name = key.lower()
    if name in _KAFKAS or name.startswith("kafka."):
        return InvalidOption(key, f"this is an option of Spark's Kafka source: {_KAFKAS.get(name, _A_CLIENTS)}")
    if name == "pushfilters":
        return InvalidOption("pushFilters", _NO_FILTERS)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=_NEAR)
    suggestion = f"did you mean {names[nearest[0]]}? " if nearest else ""
    return InvalidOption(key, f"unknown; {suggestion}{of} has {', '.join(names.values())}")
