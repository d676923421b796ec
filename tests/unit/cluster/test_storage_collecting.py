"""C5: which ledgers a storage node removes, and that compaction loses nothing that counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pxrs import registry as registries
from pxrs.cluster.ledgers import Fragment, Joining, LedgerName, LedgerRecord, Quorum
from pxrs.cluster.naming import cluster_id
from pxrs.cluster.records import CLUSTER_ID, NodeRecord, OwnerRecord, node_key, owner_key
from pxrs.cluster.storage.collecting import Collector
from pxrs.cluster.storage.format import record_bytes
from pxrs.cluster.storage.node import StorageNode
from pxrs.cluster.storage.room import Room
from pxrs.cluster.storage.settings import StorageLimits
from pxrs.errors import LedgerFenced, LedgerRemoved
from pxrs.registry.contract import Registry
from tests.unit.cluster.stored import NODE, TOPIC, add, entry, opened, stored

LIMITS = StorageLimits(compact_below=0.6)


@pytest.fixture
def registry() -> Iterator[Registry]:
    with registries.open("memory:") as found:
        cluster_id(found)
        found.commit(put={node_key(NODE): NodeRecord("127.0.0.1:1", 1).dump()})
        yield found


def ledger(number: int, partition: int = 0) -> str:
    return f"{TOPIC}/{partition}/{number}"


def put_record(registry: Registry, id: str, *nodes: str, joining: tuple[Joining, ...] = ()) -> None:
    name = LedgerName.of_id(id)
    record = LedgerRecord(
        *name,
        epoch=1,
        quorum=Quorum(len(nodes), len(nodes), max(1, len(nodes) - 1)),
        base=0,
        fragments=(Fragment(0, nodes),),
        joining=joining,
    )
    registry.commit(put={record.key: record.dump(), owner_key(name.topic_id, name.partition): OwnerRecord().dump()})


def collector(registry: Registry, node: StorageNode) -> Collector:
    return Collector(registry, node, cluster_id(registry), 1, LIMITS)


def ids(node: StorageNode) -> list[str]:
    return [id for id, _ in node.ledgers()]


def test_a_ledger_is_removed_if_its_record_is_gone_or_does_not_name_the_node(registry: Registry, folder: Path) -> None:
    with opened(folder) as node:
        for number in range(4):
            assert add(node, entry(0, ledger(number))) == [None]
        put_record(registry, ledger(0), NODE, "b", "c")
        put_record(registry, ledger(1), "a", "b", "c")
        put_record(registry, ledger(2), "a", "b", "c", joining=(Joining(NODE, 0, 1),))
        assert collector(registry, node).collect().ledgers == 2
        assert ids(node) == [ledger(0), ledger(2)]
    with opened(folder) as node:
        assert ids(node) == [ledger(0), ledger(2)]
        # A writer that was stopped for long cannot add to what was removed. A copy of a closed ledger is welcome.
        assert isinstance(add(node, entry(1, ledger(1)))[0], LedgerRemoved)
        assert add(node, entry(0, ledger(1), recovery=1)) == [None]


def test_c5_a_ledger_that_comes_while_the_records_are_read_is_kept(
    registry: Registry, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the records were read first, ledger 1 would be found here afterwards, and have no record in what was read."""
    with opened(folder) as node:
        assert add(node, entry(0, ledger(0))) == [None]
        put_record(registry, ledger(0), NODE, "b", "c")
        scan = registry.scan

        def meanwhile(*arguments: Any, **named: Any) -> Any:
            found = scan(*arguments, **named)
            put_record(registry, ledger(1), NODE, "b", "c")
            add(node, entry(0, ledger(1)))
            return found

        monkeypatch.setattr(registry, "scan", meanwhile)
        assert collector(registry, node).collect().ledgers == 0
        assert ids(node) == [ledger(0), ledger(1)]


def test_a_ledger_that_is_used_between_the_look_and_the_removal_is_kept(
    registry: Registry, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record named the node only after it was read, and the copy that the node had is counted from now on."""
    with opened(folder) as node:
        assert add(node, entry(0, ledger(0))) == [None]
        get = registry.get

        def meanwhile(key: str) -> Any:
            found = get(key)
            if key.startswith("cluster/owners/"):
                assert add(node, entry(0, ledger(0), recovery=1)) == [None]
            return found

        monkeypatch.setattr(registry, "get", meanwhile)
        assert collector(registry, node).collect().ledgers == 0
        assert stored(node, ledger(0)) == [0]


@pytest.mark.parametrize("value", [None, b'{"id": "another"}'], ids=["emptied", "another cluster"])
def test_nothing_is_removed_with_the_registry_of_another_cluster(
    registry: Registry, folder: Path, value: bytes | None
) -> None:
    with opened(folder) as node:
        assert add(node, entry(0, ledger(0))) == [None]
        collects = collector(registry, node)
        if value is None:
            registry.commit(delete=[CLUSTER_ID])
        else:
            registry.commit(put={CLUSTER_ID: value})
        assert collects.collect().skipped
        assert ids(node) == [ledger(0)]


def fill(registry: Registry, node: StorageNode) -> None:
    """Ledgers 0 and 1 side by side in many segments; of ledger 1 nothing is to be kept."""
    put_record(registry, ledger(0), NODE, "b", "c")
    node.fence(ledger(0), 4)
    node.fence(ledger(0, 1), 7)
    put_record(registry, ledger(0, 1), NODE, "b", "c")
    for number in range(12):
        assert add(node, entry(number, ledger(0), recovery=4)) == [None]
        assert add(node, entry(number, ledger(1), size=60)) == [None]


def test_compaction_keeps_fences_and_entries_that_count(registry: Registry, folder: Path) -> None:
    with opened(folder, segment_bytes=600) as node:
        fill(registry, node)
        before = len(list(folder.glob("*.log")))
        done = collector(registry, node).collect()
        assert done.ledgers == 1
        assert done.segments > 1
        assert done.copied_bytes > 0
        assert len(list(folder.glob("*.log"))) < before
        assert stored(node, ledger(0)) == [*range(12)]
        again = collector(registry, node).collect()
        assert again.ledgers == 0
    for _ in range(2):
        with opened(folder, segment_bytes=600) as node:
            assert node.refuses is None
            assert stored(node, ledger(0)) == [*range(12)]
            assert ids(node) == [ledger(0), ledger(0, 1)]
            assert node.page(ledger(0), -1, 1).fence == 4
            assert isinstance(add(node, entry(30, ledger(0), recovery=3))[0], LedgerFenced)
            assert isinstance(add(node, entry(0, ledger(0, 1), recovery=6))[0], LedgerFenced)
            assert isinstance(add(node, entry(30, ledger(1)))[0], LedgerRemoved)
            collector(registry, node).collect()


def test_a_removal_that_was_moved_does_not_void_what_came_after_it(registry: Registry, folder: Path) -> None:
    with opened(folder, segment_bytes=600) as node:
        fill(registry, node)
        collects = collector(registry, node)
        collects.collect()
        # The node gets copies of the ledger again, and then the removal is moved behind them.
        put_record(registry, ledger(1), NODE, "b", "c")
        for number in range(4):
            assert add(node, entry(number, ledger(1), recovery=2)) == [None]
        before = node.index.removals[ledger(1)].position
        Collector(registry, node, cluster_id(registry), 1, StorageLimits(compact_below=2.0)).collect()
        assert node.index.removals[ledger(1)].position > before
    with opened(folder, segment_bytes=600) as node:
        assert stored(node, ledger(1)) == [0, 1, 2, 3]
        assert stored(node, ledger(0)) == [*range(12)]


def test_a_removal_that_was_moved_leaves_a_lower_fence_that_came_after_it(registry: Registry, folder: Path) -> None:
    with opened(folder, segment_bytes=1) as node:
        node.fence(ledger(0), 3)
        assert [node.remove(*each, has_partition=True) for each in node.ledgers()] == [True]
        node.fence(ledger(0), 1)
        put_record(registry, ledger(0), NODE)
        everything = Collector(registry, node, cluster_id(registry), 1, StorageLimits(compact_below=2.0))
        with node.lock:
            removal = node.index.removals[ledger(0)].position
        base = node.index.segment_of(removal)
        everything._copy(base)
        assert everything._unlink(base)
    with opened(folder) as node:
        assert node.page(ledger(0), -1, 1).fence == 1
        assert isinstance(add(node, entry(0, ledger(0)))[0], LedgerFenced)
        dead = sum(node.index.dead.values())
        assert dead == record_bytes(ledger(0), 0)  # the first fence alone


def test_compaction_needs_room_and_removal_does_not(
    registry: Registry, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder, segment_bytes=600) as node:
        for number in range(6):
            assert add(node, entry(number, ledger(3), size=300)) == [None]
        fill(registry, node)
        monkeypatch.setattr(Room, "free_bytes", 100)
        done = collector(registry, node).collect()
        assert done.copied_bytes == 0
        assert done.segments > 1
        monkeypatch.undo()
        assert collector(registry, node).collect().copied_bytes > 0


def test_every_segment_goes_when_nothing_is_left(registry: Registry, folder: Path) -> None:
    with opened(folder, segment_bytes=300) as node:
        for number in range(10):
            assert add(node, entry(number, ledger(0))) == [None]
        end = node.journal.end
        collector(registry, node).collect()
        assert len(list(folder.glob("*.log"))) == 1
        assert node.load.bytes == 0
    with opened(folder, segment_bytes=300) as node:
        assert node.refuses is None
        assert node.journal.end >= end
        assert ids(node) == []
        assert add(node, entry(0, ledger(5))) == [None]


def test_a_damaged_record_keeps_its_segment(registry: Registry, folder: Path) -> None:
    with opened(folder, segment_bytes=600) as node:
        fill(registry, node)
    damaged = sorted(folder.glob("*.log"))[1]
    data = bytearray(damaged.read_bytes())
    at = data.index(b"000001-")  # the body of an entry
    data[at] ^= 1
    damaged.write_bytes(data)
    with opened(folder, segment_bytes=600) as node:
        collector(registry, node).collect()
        assert damaged.exists()
        found = list(node.read(ledger(0), 0, 11, 1 << 20, None, heads=False))
        assert [each.entry for each in found if each.error is not None] == [1]
