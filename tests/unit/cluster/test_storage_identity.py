"""C5: a disk that is blank, older, of another cluster or another format is not taken for the node that it names."""

from __future__ import annotations

import errno
import json
import os
import queue
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pxrs import disk
from pxrs.cluster.naming import cluster_id
from pxrs.cluster.records import CLUSTER_ID, RETIRED, NodeRecord, alive_key, node_key
from pxrs.cluster.storage import opening
from pxrs.cluster.storage.core import TRIES_KEPT
from pxrs.cluster.storage.identity import Started, start
from pxrs.cluster.storage.node import NodeSettings
from pxrs.cluster.storage.registration import Registration
from pxrs.cluster.storage.settings import StorageLimits
from pxrs.errors import (
    ClusterError,
    Conflict,
    InvalidArgument,
    NodeFormatUnsupported,
    NodeFull,
    OutcomeUnknown,
    PxrsError,
    RegistryUnavailable,
)
from pxrs.registry.contract import Registry
from pxrs.registry.lease import Lease
from pxrs.registry.outage import StartWait
from tests.unit.cluster.stored import add, entry, fast_folder, stored


@pytest.fixture
def folder() -> Iterator[Path]:
    with fast_folder() as found:
        yield found / "node"


@contextmanager
def started(folder: Path, registry: Registry, wait: StartWait | None = None) -> Iterator[Started]:
    found = start(folder, registry, "127.0.0.1:1", NodeSettings(free_bytes_min=1), wait=wait)
    try:
        yield found
    finally:
        found.node.close()
        found.directory.close()


def record_of(registry: Registry, node: str) -> NodeRecord:
    entry = registry.get(node_key(node))
    assert entry is not None
    return NodeRecord.parse(entry.key, entry.value)


def first_start(folder: Path, registry: Registry) -> str:
    with started(folder, registry) as found:
        assert add(found.node, entry(0)) == [None]
        return found.node.id


def test_each_start_raises_the_counter_on_disk_and_in_the_registry(folder: Path, registry: Registry) -> None:
    node = first_start(folder, registry)
    for starts in (2, 3):
        with started(folder, registry) as found:
            assert (found.node.id, found.starts) == (node, starts)
            assert stored(found.node) == [0]
        assert record_of(registry, node).starts == starts
        assert json.loads((folder / "node.json").read_text())["starts"] == starts


def test_a_blank_directory_is_a_new_node(folder: Path, registry: Registry) -> None:
    node = first_start(folder, registry)
    shutil.rmtree(folder)
    with started(folder, registry) as found:
        assert found.node.id != node
        assert stored(found.node) == []


def test_an_older_copy_is_a_new_node_and_is_moved_aside(folder: Path, registry: Registry) -> None:
    node = first_start(folder, registry)
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    with started(folder, registry) as found:
        assert add(found.node, entry(1)) == [None]
    with started(folder, registry):
        pass
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    with started(folder, registry) as found:
        assert found.node.id != node
        assert stored(found.node) == []
    (aside,) = folder.glob("aside-*")
    assert json.loads((aside / "node.json").read_text())["node"] == node
    assert list((aside / "journal").glob("*.log"))


def test_a_copy_with_a_shorter_journal_than_was_recorded_is_a_new_node(folder: Path, registry: Registry) -> None:
    node = first_start(folder, registry)
    copy = folder.with_name("copy")
    with started(folder, registry) as found:
        shutil.copytree(folder, copy)
        assert add(found.node, entry(1)) == [None]
        registration = Registration(registry, found.node, found.starts, "127.0.0.1:1", StorageLimits(), print)
        registration.start()
        registration.close()
        registration.record_stop()
        assert record_of(registry, node).journal_end == found.node.journal.end
    with started(copy, registry) as found:
        assert found.node.id != node


def test_a_start_that_died_between_disk_and_registry_is_the_same_node(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = first_start(folder, registry)
    with monkeypatch.context() as patch:

        def fail(*arguments: object, **named: object) -> None:
            raise RegistryUnavailable("died")

        patch.setattr(registry, "commit", fail)
        with pytest.raises(RegistryUnavailable), started(folder, registry, StartWait(0)):
            pass
    assert json.loads((folder / "node.json").read_text())["starts"] == 2
    assert record_of(registry, node).starts == 1
    with started(folder, registry) as found:
        assert (found.node.id, found.starts) == (node, 2)
        assert stored(found.node) == [0]


def test_a_lost_reply_to_the_registration_is_resolved(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = first_start(folder, registry)
    commit, replies = registry.commit, ["lost"]

    def lossy(*arguments: object, **named: object) -> object:
        done = commit(*arguments, **named)  # type: ignore[arg-type]
        if replies:
            raise OutcomeUnknown(replies.pop())
        return done

    monkeypatch.setattr(registry, "commit", lossy)
    with started(folder, registry) as found:
        assert (found.node.id, found.starts) == (node, 2)


class Held:
    """Keeps back the next commit of a registry, whose sender is told that the outcome is unknown."""

    def __init__(self, registry: Registry, patch: pytest.MonkeyPatch) -> None:
        self._commit = registry.commit
        self._held: tuple[Any, Any] | None = None
        self.before: Callable[[], None] = lambda: None
        """Called before each further commit."""
        patch.setattr(registry, "commit", self._take)

    def _take(self, *arguments: Any, **named: Any) -> dict[str, int]:
        if self._held is None:
            self._held = arguments, named
            raise OutcomeUnknown("no reply")
        self.before()
        return self._commit(*arguments, **named)

    def land(self) -> None:
        """The commit reaches the registry after all."""
        assert self._held is not None
        self.before = lambda: None
        self._commit(*self._held[0], **self._held[1])


def give_up(folder: Path, registry: Registry) -> None:
    """A start that ends because its wait for the registry is over."""
    with pytest.raises((OutcomeUnknown, RegistryUnavailable)), started(folder, registry, StartWait(0)):
        pass


def test_c5_a_start_that_lands_after_its_process_gave_up_leaves_the_same_node(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = first_start(folder, registry)
    held = Held(registry, monkeypatch)
    give_up(folder, registry)
    held.land()
    with started(folder, registry) as found:
        assert (found.node.id, found.starts, stored(found.node)) == (node, 3, [0])


def test_c5_a_start_that_lands_while_the_next_one_is_made_leaves_the_same_node(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = first_start(folder, registry)
    held = Held(registry, monkeypatch)
    give_up(folder, registry)
    held.before = held.land
    with started(folder, registry) as found:
        assert (found.node.id, found.starts, stored(found.node)) == (node, 3, [0])
    assert not list(folder.glob("aside-*"))


def no_reply() -> None:
    raise OutcomeUnknown("no reply")


def test_c5_a_start_that_lands_after_many_others_have_given_up_leaves_the_same_node(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = first_start(folder, registry)
    held = Held(registry, monkeypatch)
    held.before = no_reply
    for _ in range(TRIES_KEPT + 3):
        give_up(folder, registry)
    assert len(json.loads((folder / "node.json").read_text())["tries"]) == TRIES_KEPT
    held.land()
    with started(folder, registry) as found:
        assert (found.node.id, found.starts, stored(found.node)) == (node, 3, [0])


def test_c5_a_start_after_many_that_were_not_recorded_makes_sure_that_none_of_them_lands_later(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = first_start(folder, registry)
    held = Held(registry, monkeypatch)
    held.before = no_reply
    for _ in range(TRIES_KEPT):
        give_up(folder, registry)
    calls: list[object] = []

    def die_after_the_first() -> None:
        calls.append(None)
        if len(calls) > 1:
            raise RegistryUnavailable("died")

    held.before = die_after_the_first
    give_up(folder, registry)
    assert len(json.loads((folder / "node.json").read_text())["tries"]) == 1
    with pytest.raises(Conflict):
        held.land()
    with started(folder, registry) as found:
        assert (found.node.id, found.starts, stored(found.node)) == (node, 2, [0])


def test_c5_a_copy_whose_start_was_never_recorded_does_not_pass_for_the_node_that_was_started_since(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = first_start(folder, registry)
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    with monkeypatch.context() as patch:

        def fail(*arguments: object, **named: object) -> None:
            raise RegistryUnavailable("died")

        patch.setattr(registry, "commit", fail)
        give_up(copy, registry)
    with started(folder, registry) as found:
        assert add(found.node, entry(1)) == [None]
    assert json.loads((copy / "node.json").read_text())["starts"] == record_of(registry, node).starts
    with started(copy, registry) as found:
        assert found.node.id != node
        assert stored(found.node) == []


def test_c5_a_node_that_is_retired_while_the_reply_to_its_start_is_lost_stays_itself(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = first_start(folder, registry)
    held = Held(registry, monkeypatch)

    def land_and_retire() -> None:
        held.land()
        held._commit(put={node_key(node): replace(record_of(registry, node), state=RETIRED).dump()})

    held.before = land_and_retire
    with started(folder, registry) as found:
        assert (found.node.id, found.starts, stored(found.node)) == (node, 2, [0])
    assert record_of(registry, node).state == RETIRED


def test_a_disk_that_cannot_be_written_to_starts_read_only_and_records_nothing(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = first_start(folder, registry)
    before = record_of(registry, node)
    with monkeypatch.context() as patch:

        def full(*arguments: object, **named: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(disk, "replace_file", full)
        with started(folder, registry) as found:
            assert (found.node.id, found.starts, found.is_read_only) == (node, 1, True)
            assert stored(found.node) == [0]
            assert "the disk is full" in str(found.node.refuses)
            assert [type(each) for each in add(found.node, entry(1))] == [NodeFull]
            with pytest.raises(NodeFull):
                found.node.fence(entry(0).ledger, 1)
            found.node.look_at_room()
            assert stored(found.node) == [0]
        with pytest.raises(OSError, match="No space left"), started(folder.with_name("new"), registry):
            pass  # an empty directory has nothing to serve
    assert record_of(registry, node) == before
    with started(folder, registry) as found:
        assert (found.node.id, found.starts, found.is_read_only) == (node, 2, False)
        assert add(found.node, entry(1)) == [None]


def test_c2_a_read_only_start_does_not_trust_a_fence_that_only_the_page_cache_has(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(folder, registry) as found:
        assert add(found.node, entry(0)) == [None]
        before = found.node.journal.end
        found.node.fence(entry(0).ledger, 1)  # the last batch

    def full(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def drop(descriptor: int, *arguments: int) -> None:
        """The pages of the last batch were never written: the medium has zeros there."""
        os.ftruncate(descriptor, before)
        os.ftruncate(descriptor, before + 4096)

    monkeypatch.setattr(opening, "_begin_again", full)
    monkeypatch.setattr(os, "posix_fadvise", drop)
    with pytest.raises(OSError, match="not written to the medium"), started(folder, registry):
        pass


def test_a_disk_of_another_cluster_is_a_new_node(folder: Path, registry: Registry) -> None:
    node = first_start(folder, registry)
    registry.commit(put={CLUSTER_ID: b'{"id": "another"}'})
    with started(folder, registry) as found:
        assert found.node.id != node
        assert found.cluster == cluster_id(registry) == "another"


def test_a_retired_node_is_itself_until_its_record_is_removed(folder: Path, registry: Registry) -> None:
    node = first_start(folder, registry)
    registry.commit(put={node_key(node): replace(record_of(registry, node), state=RETIRED).dump()})
    with started(folder, registry) as found:
        assert found.node.id == node
    assert record_of(registry, node).state == RETIRED
    registry.commit(delete=[node_key(node)])
    with started(folder, registry) as found:
        assert found.node.id != node


@pytest.mark.parametrize("number", [0, 2, 99])
def test_another_format_is_refused_with_what_to_do_and_nothing_is_changed(
    folder: Path, registry: Registry, number: int
) -> None:
    first_start(folder, registry)
    cookie = folder / "node.json"
    cookie.write_text(json.dumps({**json.loads(cookie.read_text()), "format": number}))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with (
        pytest.raises(NodeFormatUnsupported, match=f"has format {number} .* start the storage node with the version"),
        started(folder, registry),
    ):
        pass
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_directory_has_one_process(folder: Path, registry: Registry) -> None:
    with (
        started(folder, registry),
        pytest.raises(InvalidArgument, match="in use by another storage node"),
        started(folder, registry),
    ):
        pass


def test_a_process_whose_node_was_started_elsewhere_stops(folder: Path, registry: Registry) -> None:
    first_start(folder, registry)
    copy = folder.with_name("copy")
    told: queue.SimpleQueue[PxrsError] = queue.SimpleQueue()
    limits = StorageLimits(alive_s=0.01, lease_s=5.0)
    with started(folder, registry) as found:
        shutil.copytree(folder, copy)
        registration = Registration(registry, found.node, found.starts, "127.0.0.1:1", limits, told.put)
        registration.start()
        assert registry.get(alive_key(found.node.id)) is not None
        with started(copy, registry) as second:
            assert second.node.id == found.node.id  # cannot be told apart, so the last start wins
            error = told.get(timeout=30)
        registration.close()
    assert isinstance(error, ClusterError)
    assert "another process was started as this node" in str(error)


def test_a_lost_lease_is_taken_again_and_the_node_goes_on(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, last = registry.lease, list[Lease]()
    told: list[PxrsError] = []

    def noted(ttl: float) -> Lease:
        last.append(take(ttl))
        return last[-1]

    monkeypatch.setattr(registry, "lease", noted)
    with started(folder, registry) as found:
        limits = StorageLimits(alive_s=0.01, lease_s=5.0)
        registration = Registration(registry, found.node, found.starts, "127.0.0.1:1", limits, told.append)
        registration.start()
        key = alive_key(found.node.id)
        with registry.watch(key) as watch:
            last[0].end()
            while registry.get(key) is None or len(last) == 1:
                assert watch.wait(30.0)
        registration.close()
        assert registry.get(key) is None
    assert told == []
