"""The keys of the registry in a backup: which moment they are of, how they are stored, and what Spark has staged.

The file has a line of JSON for each key: `{"key": ..., "value": base64}`. Versions are not stored: they are the store's
own, and no stored value refers to one.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Final

from pxrs.copying.records import CopyRecord, is_copy_key
from pxrs.errors import BackupDamaged, RegistryCorrupt, RegistryUnavailable
from pxrs.group.records import Checkpoint, partition_of
from pxrs.log.numbering import TopicPartition
from pxrs.publishing.records import MANIFESTS, ROUTED, Manifest, parts_of, writer_of
from pxrs.publishing.staging.appends import producer_of
from pxrs.queue.records import name_in
from pxrs.registry.contract import Entry, Registry
from pxrs.registry.identity import REGISTRY_ID
from pxrs.registry.values import Snapshot

SNAPSHOTS_MAX: Final = 5
"""How many snapshots are taken until each item of the queues has a value."""
_ITEM_STATES: Final = ("ready", "inflight", "delayed", "dead")

Keys = dict[str, bytes]


def is_item(key: str) -> bool:
    """Whether the key is that of an item of a queue. Each move of an item gives it a key that never was before, so such
    a key is written once."""
    parts = key.split("/")
    return len(parts) == 4 and parts[0] == "items" and parts[2] in _ITEM_STATES


def keys_at_one_moment(registry: Registry) -> tuple[Keys, str]:
    """All persistent keys of the registry, and which moment they are of."""
    for _ in range(SNAPSHOTS_MAX):
        snapshot = registry.snapshot(is_item)
        keys = {entry.key: entry.value for entry in snapshot.entries}
        if _look_up_moved(snapshot, registry, keys):
            return dict(sorted(keys.items())), snapshot.moment
    raise RegistryUnavailable(
        f"{registry.url}: items of queues change faster than they can be read; run the backup under less load"
    )


def _look_up_moved(snapshot: Snapshot, registry: Registry, keys: Keys) -> bool:
    """Find the items that were there at the moment of the snapshot and had moved before their values were read, by
    their ids: a move keeps the id and the bytes that were put. Adds them to `keys` under the keys that they had.
    Returns False if one of them is gone from its queue, so that another moment has to be chosen."""
    if not snapshot.unread:
        return True
    seen = {_item_of(key): value for key, value in snapshot.seen.items() if is_item(key)}
    for key in snapshot.unread:
        item = _item_of(key)
        if item not in seen:
            queue = key.split("/", 2)[1]
            seen |= {_item_of(each.key): each.value for each in registry.scan(f"items/{queue}/") if is_item(each.key)}
        if item not in seen:
            return False
        keys[key] = seen[item]
    return True


def _item_of(key: str) -> tuple[str, str]:
    """The queue's id and the item's id."""
    return key.split("/", 2)[1], name_in(key).split(".")[1]


def dump_keys(keys: Mapping[str, bytes]) -> bytes:
    lines = (json.dumps({"key": key, "value": base64.b64encode(value).decode()}) for key, value in keys.items())
    return "".join(f"{line}\n" for line in lines).encode()


def load_keys(file: str, data: bytes) -> Keys:
    """Raises BackupDamaged."""
    try:
        found = (json.loads(line) for line in data.splitlines())
        return {each["key"]: base64.b64decode(each["value"], validate=True) for each in found}
    except (ValueError, TypeError, KeyError) as error:
        raise BackupDamaged(file, f"it does not contain the keys of a registry: {error!r}") from error


def checkpoint_bounds(keys: Mapping[str, bytes]) -> dict[TopicPartition, tuple[int, int]]:
    """The least and the greatest checkpoint that any group has of each partition."""
    found: dict[TopicPartition, tuple[int, int]] = {}
    for key, value in keys.items():
        parts = key.split("/")
        if len(parts) != 5 or parts[0] != "groups" or parts[2] != "checkpoints":
            continue
        try:
            offset, place = Checkpoint.load(key, value).offset, partition_of(key)
        except (RegistryCorrupt, ValueError):
            continue  # the group itself reports it
        least, most = found.get(place, (offset, offset))
        found[place] = min(least, offset), max(most, offset)
    return found


def manifests_in(keys: Mapping[str, bytes]) -> dict[str, Manifest]:
    """The manifests of queries, by their keys. One that cannot be read stops only its own query, so it is left out."""
    found: dict[str, Manifest] = {}
    for key, value in keys.items():
        if key.startswith(MANIFESTS) and key != REGISTRY_ID:
            try:
                found[key] = Manifest.load(Entry(key, value, 0))
            except RegistryCorrupt:
                continue
    return found


def batches_of(manifests: Mapping[str, Manifest], topics: Iterable[str]) -> dict[bytes, int]:
    """The last batch of each query that is part of the backup, by the id of the producer that appends the query's rows
    to a topic. topics: the ids of the hub's topics, to each of which a query whose rows name their topics may write."""
    every = list(topics)
    found: dict[bytes, int] = {}
    for key, manifest in manifests.items():
        written = every if key.startswith(ROUTED) else [part.topic for part in parts_of(key, manifest)]
        found |= {producer_of(writer_of(key), topic).bytes: manifest.batch for topic in written}
    return found


def pieces_of(keys: Mapping[str, bytes]) -> dict[bytes, int]:
    """The number of the last piece of each copy of a topic into a topic of this hub, by the id of its producer."""
    found: dict[bytes, int] = {}
    for key, value in keys.items():
        if is_copy_key(key):
            try:
                record = CopyRecord.load(key, value)
            except RegistryCorrupt:
                continue  # the copy itself reports it
            found[record.producer.bytes] = record.number
    return found
