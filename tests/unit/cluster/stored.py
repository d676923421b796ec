"""Entries for tests of storage nodes, and a node in a folder of its own."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from pxrs.cluster.ledgers import EntryHead
from pxrs.cluster.messages import Add
from pxrs.cluster.storage.node import NodeSettings, StorageNode
from pxrs.errors import PxrsError

TOPIC = "5" * 32
LEDGER = f"{TOPIC}/0/0"
NODE = "node-1"
ANSWER_S_MAX = 30.0


def body_of(entry: int, size: int = 20) -> bytes:
    return (b"%06d-" % entry * (size // 7 + 1))[:size]


def head_of(entry: int, body: bytes) -> EntryHead:
    return EntryHead(10 * entry, 10, len(body), 1_000 + entry, 2_000 + entry, xxhash.xxh3_64_intdigest(body))


def entry(number: int, ledger: str = LEDGER, *, size: int = 20, recovery: int | None = None) -> Add:
    body = body_of(number, size)
    return Add(ledger, number, number - 1, recovery, head_of(number, body), (body,))


def add(node: StorageNode, *adds: Add) -> list[PxrsError | None]:
    """Add entries in one message; what the node answers to each."""
    answers: dict[int, PxrsError | None] = {}
    is_done = threading.Event()

    def done(number: int, error: PxrsError | None) -> None:
        answers[number] = error
        if len(answers) == len(adds):
            is_done.set()

    node.add(adds, 0, done)
    assert is_done.wait(ANSWER_S_MAX)
    return [answers[number] for number in range(len(adds))]


def stored(node: StorageNode, ledger: str = LEDGER, last: int = 50) -> list[int]:
    """The entries that the node has, each read and compared."""
    found = []
    for each in node.read(ledger, 0, last, 1 << 30, None, heads=False):
        if each.head is not None:
            assert bytes(each.body) == body_of(each.entry, each.head.size)
            assert each.head == head_of(each.entry, bytes(each.body))
            found.append(each.entry)
        else:
            assert each.error is None, each.error
    return found


@contextmanager
def opened(folder: Path, *, proof: int | None = None, **settings: int) -> Iterator[StorageNode]:
    """proof: up to which position the journal is known to be synced."""
    folder.mkdir(exist_ok=True)
    node = StorageNode(NODE, str(folder), NodeSettings(**{"free_bytes_min": 1, **settings}), proof=proof)
    try:
        yield node
    finally:
        node.close()


@contextmanager
def fast_folder() -> Iterator[Path]:
    """A folder in memory, where syncs cost nothing."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="pxrs-storage-", dir=place) as folder:
        yield Path(folder)
