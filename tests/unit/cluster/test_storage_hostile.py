"""A storage node among wrong messages, failing calls of the operating system, and a registry that has gone back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pxrs import disk
from pxrs import registry as registries
from pxrs.cluster import messages
from pxrs.cluster.ledgers import Fragment, LedgerName, LedgerRecord, Quorum
from pxrs.cluster.messages import Add
from pxrs.cluster.naming import cluster_id
from pxrs.cluster.records import AliveNode, NodeRecord, alive_key, node_key
from pxrs.cluster.storage import adds as add_streams
from pxrs.cluster.storage.adds import AddStream
from pxrs.cluster.storage.collecting import Collector
from pxrs.cluster.storage.identity import LOCK, Started, start
from pxrs.cluster.storage.index import Entries
from pxrs.cluster.storage.journal import Journal, Write
from pxrs.cluster.storage.node import NodeSettings, StorageNode, check_add, is_ledger
from pxrs.cluster.storage.registration import Registration
from pxrs.cluster.storage.service import _recovery
from pxrs.cluster.storage.settings import StorageLimits
from pxrs.errors import ClusterError, Conflict, InvalidArgument, NodeFull, PxrsError
from pxrs.registry.contract import Registry
from pxrs.server.budget import Budget
from pxrs.server.given import Given
from pxrs.testing import power
from pxrs.testing.servers.process import wait_until
from tests.unit.cluster.stored import (
    ANSWER_S_MAX,
    LEDGER,
    NODE,
    TOPIC,
    add,
    entry,
    head_of,
    opened,
    stored,
)

OTHER = f"{TOPIC}/1/0"


@pytest.fixture
def registry() -> Iterator[Registry]:
    with registries.open("memory:") as found:
        cluster_id(found)
        yield found


# Messages.

CHANGES: dict[str, Callable[[Add], Add]] = {
    "entry": lambda add: add._replace(entry=1 << 63),
    "lac": lambda add: add._replace(lac=1 << 63),
    "low lac": lambda add: add._replace(lac=-2),
    "recovery": lambda add: add._replace(recovery=1 << 63),
    "negative recovery": lambda add: add._replace(recovery=-1),
    "offset": lambda add: add._replace(head=add.head._replace(offset=1 << 63)),
    "rows": lambda add: add._replace(head=add.head._replace(rows=-1)),
    "timestamp": lambda add: add._replace(head=add.head._replace(last_timestamp=-(1 << 64))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_numbers_that_the_journal_cannot_hold_are_refused(name: str) -> None:
    check_add(entry(2))
    with pytest.raises(InvalidArgument):
        check_add(CHANGES[name](entry(2)))


def test_a_number_that_does_not_fit_leaves_the_index_as_it_was() -> None:
    entries = Entries()
    entries.add(1, head_of(1, b""))
    for number in (0, 2):
        with pytest.raises(OverflowError):
            entries.add(number, head_of(number, b"")._replace(offset=1 << 63))
        assert number not in entries
    entries.add(2, head_of(2, b""))
    assert [place.head for place in entries.places()] == [head_of(1, b""), head_of(2, b"")]


@pytest.mark.parametrize("recovery", [0, -1, 1 << 63])
def test_numbers_of_recoveries_have_bounds(recovery: int) -> None:
    with pytest.raises(InvalidArgument):
        _recovery(Given("storage.fence", {"recovery": recovery}))


@pytest.mark.parametrize(
    "text", ["../../x/0/0", "..//0/0", "./0/0", "a b/0/0", "a/b/0/0", "a/-1/0", "a/0/-1", "a/0/01", "a;b/0/0", "/0/0"]
)
def test_an_id_that_the_registry_could_have_no_record_of_is_no_ledger(text: str) -> None:
    """Such a ledger could not be asked for, and would stop the collection of all others."""
    assert is_ledger(LEDGER)
    assert is_ledger(f"staged-{TOPIC}-part_0.7/0/0")
    assert not is_ledger(text)


def test_w5_the_json_of_a_message_of_adds_is_bounded() -> None:
    row = [LEDGER, 0, -1, None, *head_of(0, b"")]
    count = messages.ABOUT_BYTES_MAX // len(json.dumps(row))
    messages.read_adds(messages.data({"adds": [row] * (count // 2)}))
    with pytest.raises(InvalidArgument, match="several messages"):
        messages.read_adds(messages.data({"adds": [row] * (count * 2)}))


def test_w5_a_broker_that_takes_no_refusals_is_not_heard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(add_streams, "REFUSED_MAX", 5)
    heard = 0

    async def received(is_full: asyncio.Event) -> AsyncIterator[bytes]:
        nonlocal heard
        for number in range(50):
            heard += 1
            yield messages.adds([entry(number)])
            await asyncio.to_thread(node.settle)  # the refusal is noted
        is_full.set()

    async def run() -> None:
        may_send, is_full = asyncio.Event(), asyncio.Event()
        sending: list[bytes] = []

        async def send(message: bytes) -> None:
            sending.append(message)
            await may_send.wait()

        stream = AddStream(node, Budget(1 << 20, "adds"))
        serving = asyncio.ensure_future(stream.serve(received(is_full), send))
        while heard < 7 or not sending:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.to_thread(node.settle)
        assert heard < 20
        may_send.set()
        await asyncio.wait_for(serving, ANSWER_S_MAX)
        refused = [number for message in sending for number, _ in messages.read_answer(message)[1]]
        assert refused == list(range(50))

    with opened(folder) as node:
        node.fence(LEDGER, 1)
        asyncio.run(run())


# The operating system.


def test_a_node_goes_on_although_it_could_not_make_a_new_segment_for_a_while(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write to a segment fails, and then the file that should take its place cannot be made."""
    make, sync, failing = os.open, os.fdatasync, set[str]()

    def open_(path: Any, *arguments: Any, **named: Any) -> int:
        if "open" in failing and str(path).endswith(".log"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return make(path, *arguments, **named)

    def fdatasync(descriptor: int) -> None:
        if "sync" in failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with opened(folder) as node:
        failing.add("sync")
        assert isinstance(add(node, entry(0))[0], NodeFull)
        failing.add("open")
        for _ in range(2):
            with pytest.raises(NodeFull):
                node.settle()
        failing.clear()
        node.look_at_room()
        node.settle()
        assert node.refuses is None
        assert add(node, entry(0)) == [None]
    with opened(folder) as node:
        assert stored(node) == [0]


def test_nothing_is_acknowledged_that_was_written_to_a_removed_file(folder: Path) -> None:
    with opened(folder) as node:
        assert add(node, entry(0)) == [None]
        (segment,) = folder.glob("*.log")
        segment.unlink()
        assert isinstance(add(node, entry(1))[0], NodeFull)
        node.settle()
    with opened(folder) as node:
        assert not node.is_proven


def test_a_disk_that_does_not_tell_its_room_ends_no_thread(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    statvfs, is_failing, calls = os.statvfs, threading.Event(), threading.Semaphore(0)

    def failing(path: Any) -> Any:
        if is_failing.is_set():
            calls.release()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return statvfs(path)

    monkeypatch.setattr(os, "statvfs", failing)
    begun = start(folder / "node", registry, "127.0.0.1:1", NodeSettings(free_bytes_min=1))
    registration = Registration(registry, begun.node, 1, "127.0.0.1:1", StorageLimits(alive_s=0.01), print)
    registration.start()
    try:
        is_failing.set()
        for _ in range(10):  # each round asks for the room twice
            assert calls.acquire(timeout=ANSWER_S_MAX)
        assert "cannot be used" in str(begun.node.refuses)
        assert begun.node.load.free_bytes == 0
    finally:
        registration.close()
        close(begun)


def test_entries_do_not_take_the_reserve_between_two_looks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the reserve, no removal could be recorded on a disk that is full of garbage."""
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize

    class Found:
        f_bavail, f_frsize = free, 1

    monkeypatch.setattr(os, "statvfs", lambda path: Found)
    with opened(folder, free_bytes_min=free - 10_000) as node:
        answers = [add(node, entry(number, size=1_000))[0] for number in range(20)]
        taken = answers.index(next(answer for answer in answers if answer is not None))
        assert 8 <= taken <= 10
        assert all(isinstance(answer, NodeFull) for answer in answers[taken:])
        assert node.fence(OTHER, 1)
        Found.f_bavail = free - 5_000  # the entries took less than was thought
        node.look_at_room()
        node.settle()
        assert add(node, entry(30)) == [None]


# Removal.


def test_what_is_synced_while_a_removal_waits_is_not_lost_if_the_removal_fails(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry is in a batch that is being synced when its ledger turns out to be garbage."""
    write, is_writing, may_write = Journal._write, threading.Event(), threading.Event()

    def slow(journal: Journal, batch: Sequence[Write]) -> int:
        is_writing.set()
        assert may_write.wait(ANSWER_S_MAX)
        if any(each.removes is not None for each in batch):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(journal, batch)

    registry.commit(put={node_key(NODE): NodeRecord("127.0.0.1:1", 1).dump()})
    with opened(folder) as node, ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(Journal, "_write", slow)
        adding = pool.submit(add, node, entry(0))
        assert is_writing.wait(ANSWER_S_MAX)
        collecting = pool.submit(Collector(registry, node, cluster_id(registry), 1, StorageLimits()).collect)
        assert wait_until(lambda: bool(node.journal._waiting), ANSWER_S_MAX)
        may_write.set()
        assert adding.result(ANSWER_S_MAX) == [None]
        assert isinstance(collecting.exception(ANSWER_S_MAX), NodeFull)
        assert stored(node) == [0]
        assert not node.index.dead  # so the segment of the entry is not removed


def test_a_full_disk_keeps_no_segment_in_which_nothing_counts(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal cannot be recorded, and the room that it needs is in segments that can be unlinked."""
    registry.commit(put={node_key(NODE): NodeRecord("127.0.0.1:1", 1).dump()})
    with opened(folder, segment_bytes=1) as node:
        collector = Collector(registry, node, cluster_id(registry), 1, StorageLimits())
        assert add(node, entry(0)) == [None]
        assert [node.remove(*each, has_partition=False) for each in node.ledgers()] == [True]
        assert add(node, entry(0, OTHER)) == [None]
        assert len(list(folder.glob("*.log"))) == 3
        monkeypatch.setattr(StorageNode, "settle", raising(NodeFull(NODE, "the disk is full")))
        with pytest.raises(NodeFull):
            collector.collect()
        assert len(list(folder.glob("*.log"))) == 2


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: object, **named: object) -> None:
        raise error

    return fail


def test_a_record_that_cannot_be_read_keeps_the_ledgers_of_its_partition_alone(
    folder: Path, registry: Registry
) -> None:
    registry.commit(put={node_key(NODE): NodeRecord("127.0.0.1:1", 1).dump(), LedgerName(TOPIC, 0, 0).key: b"?"})
    with opened(folder) as node:
        assert add(node, entry(0), entry(0, OTHER)) == [None, None]
        assert Collector(registry, node, cluster_id(registry), 1, StorageLimits()).collect().ledgers == 1
        assert [ledger for ledger, _ in node.ledgers()] == [LEDGER]


def test_a_segment_that_the_disk_cannot_read_does_not_hold_up_the_others(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.commit(put={node_key(NODE): NodeRecord("127.0.0.1:1", 1).dump()})
    kept = LedgerRecord(TOPIC, 0, 0, 1, Quorum(1, 1, 1), 0, (Fragment(0, (NODE,)),))
    registry.commit(put={kept.key: kept.dump()})
    with opened(folder, segment_bytes=1) as node:
        for number in range(3):
            assert add(node, entry(number)) == [None]
        copy = Collector._copy

        def failing(collector: Collector, base: int) -> int:
            if base == node.journal.bases[0]:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return copy(collector, base)

        monkeypatch.setattr(Collector, "_copy", failing)
        limits = StorageLimits(compact_below=2.0)
        assert Collector(registry, node, cluster_id(registry), 1, limits).collect().segments == 1
        assert stored(node) == [0, 1, 2]


def test_segments_are_unlinked_at_a_start_only_when_the_list_of_them_is_durable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sync of the folder fails after the list was replaced, the node is started again, and the power is lost."""
    run = folder / "run"
    run.mkdir()
    with power.recorded(run) as tape:
        with opened(run, segment_bytes=1) as node:
            assert add(node, entry(0)) == [None]
            assert [node.remove(*each, has_partition=False) for each in node.ledgers()] == [True]
            with monkeypatch.context() as patch:
                patch.setattr(disk, "sync_folder", raising(OSError(errno.EIO, os.strerror(errno.EIO))))
                with pytest.raises(OSError, match="Input/output"):
                    node.journal.unlink(0)
        first_run = len(tape.events)
        with opened(run):
            assert not (run / f"{0:020}.log").exists()
    dice = random.Random(1)
    for number, at in enumerate(range(first_run, len(tape.events))):
        for choose in (lambda count: 0, lambda count: count - 1, dice.randrange):
            after = folder / f"after-{number}"
            tape.restore(at, choose, after)
            with opened(after) as node:
                assert not node.journal.lost
            shutil.rmtree(after)


@pytest.mark.parametrize("backup", ["before the node", "before its start", "before its journal's end"])
def test_c5_nothing_is_removed_by_a_registry_that_has_gone_back(folder: Path, registry: Registry, backup: str) -> None:
    """Records of ledgers that were made after the backup are not there, and their entries must stay."""
    key, told = node_key(NODE), list[PxrsError]()
    with opened(folder) as node:
        assert add(node, entry(0)) == [None]
        record = NodeRecord("127.0.0.1:1", 3)
        registry.commit(put={key: record.dump()})
        registration = Registration(registry, node, 3, "127.0.0.1:1", StorageLimits(), told.append)
        registration.start()
        registration.close()
        registration.record_stop()
        if backup == "before the node":
            registry.commit(delete={key})
        else:
            changes = {"journal_end": 1} if "end" in backup else {"starts": 2, "journal_end": 1 << 40}
            registry.commit(put={key: replace(record, **changes).dump()})
        collector = Collector(registry, node, cluster_id(registry), 3, StorageLimits())
        assert collector.collect().skipped is not None
        # Nor is the older record taken for a new beginning.
        assert add(node, entry(1)) == [None]
        again = Registration(registry, node, 3, "127.0.0.1:1", StorageLimits(), told.append)
        with contextlib.suppress(ClusterError):  # a node without a record stops
            again.start()
        again.close()
        assert collector.collect().skipped is not None
        assert stored(node) == [0, 1]


# Two processes with one identity.


def started(folder: Path, registry: Registry, address: str = "127.0.0.1:1", alive_s_max: float = 30.0) -> Started:
    return start(folder, registry, address, NodeSettings(free_bytes_min=1), alive_s_max)


def close(begun: Started) -> None:
    begun.node.close()
    begun.directory.close()


def test_c5_a_copy_of_the_directory_of_a_node_that_runs_is_refused(folder: Path, registry: Registry) -> None:
    """The copy lacks what the node acknowledges from then on, and has the right counter."""
    first = started(folder / "node", registry)
    key = alive_key(first.node.id)
    shutil.copytree(folder / "node", folder / "copy")
    lease = registry.lease(30.0)
    registry.commit(ephemeral={key: AliveNode("127.0.0.1:1", 1).dump()}, lease=lease)
    assert add(first.node, entry(0)) == [None]
    before = (folder / "copy" / "node.json").read_bytes()
    with pytest.raises(ClusterError, match=r"already runs at 127\.0\.0\.1:1"):
        started(folder / "copy", registry, "127.0.0.1:2", alive_s_max=0.05)
    assert (folder / "copy" / "node.json").read_bytes() == before
    close(first)
    # The node itself is started again at its address at once, although the lease of its last process goes on.
    close(started(folder / "node", registry))
    # At another address it waits for the end of that lease.
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(started, folder / "node", registry, "127.0.0.1:3")
        lease.close()
        close(waiting.result(ANSWER_S_MAX))


def test_c5_of_two_copies_that_start_at_the_same_moment_one_is_refused(
    folder: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both want to write the same record: same address, same counter, same end of the journal."""
    close(started(folder / "node", registry))
    shutil.copytree(folder / "node", folder / "copy")
    commit, others = registry.commit, [folder / "copy"]
    begun: list[Started] = []

    def racing(*arguments: Any, **named: Any) -> Any:
        if others:
            begun.append(started(others.pop(), registry))
        return commit(*arguments, **named)

    monkeypatch.setattr(registry, "commit", racing)
    with pytest.raises(Conflict):
        started(folder / "node", registry)
    assert add(begun[0].node, entry(0)) == [None]
    close(begun[0])
    # The one that was refused is an older copy from now on.
    again = started(folder / "node", registry)
    assert again.node.id != begun[0].node.id
    close(again)


def test_a_directory_has_one_process_also_if_the_lock_file_was_deleted(folder: Path, registry: Registry) -> None:
    first = started(folder / "node", registry)
    (folder / "node" / LOCK).unlink()
    with pytest.raises(InvalidArgument, match="in use by another storage node"):
        started(folder / "node", registry)
    close(first)
    close(started(folder / "node", registry))


def test_a_lost_end_of_the_journal_is_noticed_after_a_start(folder: Path, registry: Registry) -> None:
    """The last start was killed before it could record the end of the journal, but it had found what it lost later."""
    first = started(folder / "node", registry)
    assert add(first.node, entry(0)) == [None]
    assert add(first.node, entry(1)) == [None]
    close(first)
    close(started(folder / "node", registry))
    max((folder / "node" / "journal").glob("*.log")).unlink()
    again = started(folder / "node", registry)
    assert again.node.id != first.node.id
    close(again)


def test_c5_a_directory_without_its_journal_is_a_new_node(folder: Path, registry: Registry) -> None:
    first = started(folder / "node", registry)
    assert add(first.node, entry(0)) == [None]  # the registry knows the journal's end of the start
    close(first)
    shutil.rmtree(folder / "node" / "journal")
    again = started(folder / "node", registry)
    assert again.node.id != first.node.id
    close(again)


def test_an_identity_that_cannot_be_one_is_moved_aside(folder: Path, registry: Registry) -> None:
    (folder / "node").mkdir()
    cookie = {"node": "../x", "cluster": cluster_id(registry), "starts": 1, "format": 1}
    (folder / "node" / "node.json").write_text(json.dumps(cookie))
    close(started(folder / "node", registry))
    assert len(list((folder / "node").glob("aside-*/node.json"))) == 1
