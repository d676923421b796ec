"""One damaged disk among three loses nothing, and the partition is served again (C7, C8, C9). With real processes.

The schedule: the last message is acknowledged by two nodes, and the third one never gets it. The broker and one of the
two are killed, the disk of that one is damaged, and everything is started again. The other one is alive all the time,
or hangs for a while and answers late.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs import registry as registries
from pxrs.cluster import records
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.cluster.links import NodeLink
from pxrs.cluster.status import read_status
from pxrs.cluster.storage.format import Record, seed_of
from pxrs.cluster.storage.opening import parts
from pxrs.log.directory.segments.files import segment_bases, segment_path
from pxrs.testing.cluster_processes import ClusterProcesses
from pxrs.testing.forked import run_text
from pxrs.testing.servers import StorageServer
from pxrs.testing.waiting import eventually
from tests.integration.cluster.test_nodes import all_nodes_have, is_served, last_ledger, send, stored

IS_SOAK = bool(os.environ.get("PXRS_SOAK"))
SEED = int(os.environ["SEED"])
ROUNDS = 52 if IS_SOAK else 2
LEASE_S = 2.0
NODE_TIMEOUT_S = 15.0
"""Longer than what a test does while a node hangs: it is not replaced meanwhile."""
LATE_S = 1.5
SERVED_S = 2.0 if IS_SOAK else 30.0
"""How long after the end of the dead broker's lease, and after the late node answers, the partition may take to be
served. `make test` has room for a busy machine."""
DAMAGES = ("header", "body", "cut", "copy")
PATIENCE_S = 90.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterProcesses]:
    """One broker and three nodes: every entry is sent to all of them, and two must acknowledge it."""
    with ClusterProcesses(
        f"file:{tmp_path / 'registry'}",
        brokers=1,
        nodes=3,
        lease_s=LEASE_S,
        node_timeout_s=NODE_TIMEOUT_S,
        node_flags=["--limit", "alive_s=0.2", "--limit", "lease_s=2", "--mark-dir", str(tmp_path)],
    ) as running:
        yield running


def last_record(node: StorageServer) -> tuple[Path, Record, int]:
    """The last record of the node's journal, its segment's file and the position of that."""
    journal = str(node.data / "journal")
    base = [each for each in segment_bases(journal) if os.stat(segment_path(journal, each)).st_size][-1]
    path = Path(segment_path(journal, base))
    with path.open("rb") as file:
        found = parts(file.fileno(), str(path), base, base, base + path.stat().st_size, seed_of(node.node), [])
        *_, last = (each for each in found if isinstance(each, Record))
    return path, last, base


def damage(node: StorageServer, kind: str, copy: Path) -> None:
    """The node is not running. copy: of its directory, from before the last message."""
    if kind == "copy":
        shutil.rmtree(node.data)
        shutil.copytree(copy, node.data)
        return
    path, record, base = last_record(node)
    at = record.position - base
    if kind == "cut":
        os.truncate(path, at)
        return
    flip(path, at + (40 if kind == "header" else record.header_bytes + record.body_bytes // 2))


def is_whole(cluster: ClusterProcesses) -> bool:
    with registries.open(cluster.registry) as registry:
        status = read_status(registry)
        return status.is_whole and all(node.refuses is None for node in status.nodes)


def is_ready(cluster: ClusterProcesses) -> bool:
    """Whether the next message goes to all nodes."""
    if not is_whole(cluster):
        return False
    ledger: LedgerRecord = last_ledger(cluster)
    return all_nodes_have(ledger) and not ledger.is_closed


@pytest.mark.limit(900 if IS_SOAK else 300)
def test_c7_one_damaged_disk_loses_no_acknowledged_message_and_the_partition_is_served(
    cluster: ClusterProcesses, tmp_path: Path
) -> None:
    dice = random.Random(SEED)
    values = [b"%d" % number for number in range(20)]
    with pxrs.open(cluster.url) as hub:
        hub.create_topic("t", partitions=1)
        send(hub, values)
    schedule = [(kind, is_late) for kind in DAMAGES for is_late in (False, True)] * (ROUNDS // 8 + 1)
    dice.shuffle(schedule)
    nodes = [node.process for node in cluster.nodes]
    for number, (kind, is_late) in enumerate(schedule[:ROUNDS]):
        told = f"round {number}: {kind}{', late' if is_late else ''}"
        eventually(lambda: is_ready(cluster), PATIENCE_S, what=lambda: f"{told}\n{cluster.logs()}")  # noqa: B023
        dice.shuffle(nodes)
        first, second, third = nodes
        with pxrs.open(cluster.url) as hub:
            values += [b"%d before" % number]
            send(hub, values[-1:])  # opens the connections
            eventually(lambda: has_last(first, cluster), PATIENCE_S)  # noqa: B023
            copy = tmp_path / f"copy-{number}"
            first.pause()
            shutil.copytree(first.data, copy)
            first.resume()
            third.pause()
            values += [b"%d last" % number]
            send(hub, values[-1:])
            cluster.brokers[0].process.kill()
        first.kill()
        third.kill()
        damage(first, kind, copy)
        shutil.rmtree(copy)
        if is_late:
            second.pause()
        killed_at = time.monotonic()
        for process in (first, third):
            process.start(wait=False)
        cluster.brokers[0].process.start(wait=False)
        if is_late:
            time.sleep(LATE_S)  # the schedule itself: the node answers so late
            second.resume()
        for process in (first, third, cluster.brokers[0].process):
            process.wait_until_ready()
        answers_at = max(time.monotonic(), killed_at + LEASE_S)
        eventually(lambda: is_served(cluster), PATIENCE_S, what=lambda: f"{told}\n{cluster.logs()}")  # noqa: B023
        took_s = time.monotonic() - answers_at
        with pxrs.open(cluster.url) as hub:
            assert stored(hub) == values, told
        assert took_s < LEASE_S + SERVED_S, f"{told}: {took_s:.1f} s\n{cluster.logs()}"
        values += [b"%d after" % number]
        with pxrs.open(cluster.url) as hub:
            send(hub, values[-1:])


def has_last(node: StorageServer, cluster: ClusterProcesses) -> bool:
    """Whether the node's journal has the entries of the last ledger that were sent to it."""
    return last_record(node)[1].ledger == last_ledger(cluster).id


def exit_code(cluster: ClusterProcesses) -> int:
    """Of `pxrs cluster status`."""
    return run_text("pxrs.cli", ["cluster", "status", "--registry", cluster.registry]).returncode


def lacking(cluster: ClusterProcesses, node: StorageServer) -> list[tuple[str, int]]:
    """The entries of closed ledgers that the node should have and cannot return."""
    found = []
    with registries.open(cluster.registry) as registry, closing(NodeLink(node.node, node.address)) as link:
        for each in registry.scan(records.LEDGERS):
            ledger = LedgerRecord.parse(each.key, each.value)
            if ledger.is_closed and ledger.last is not None and node.node in ledger.named:
                answers = link.read(ledger.id, 0, ledger.last) if ledger.last >= 0 else []
                found += [(ledger.id, answer.entry) for answer in answers if answer.head is None]
    return found


def test_rot_in_sealed_segments_is_told_and_mended_without_an_operator(tmp_path: Path) -> None:
    with ClusterProcesses(
        f"file:{tmp_path / 'registry'}",
        brokers=1,
        nodes=3,
        lease_s=LEASE_S,
        node_timeout_s=NODE_TIMEOUT_S,
        node_flags=[
            *("--limit", "alive_s=0.1", "--limit", "segment_bytes=20000", "--limit", "scrub_round_s=0.3"),
            *("--mark-dir", str(tmp_path)),
        ],
    ) as cluster:
        with pxrs.open(cluster.url) as hub:
            hub.create_topic("t", partitions=1, segment_bytes=10_000)
            values = [b"%d" % number * 1_000 for number in range(60)]
            for value in values:
                send(hub, [value])
        node = cluster.nodes[SEED % 3].process
        eventually(lambda: is_whole(cluster) and not lacking(cluster, node), PATIENCE_S, what=cluster.logs)
        assert exit_code(cluster) == 0
        journal = str(node.data / "journal")
        sealed = segment_bases(journal)[:2]
        for base, offset in zip(sealed, (40, 160), strict=True):  # a header, and a body
            flip(Path(segment_path(journal, base)), offset)
        eventually(lambda: not is_whole(cluster), PATIENCE_S, what=cluster.logs)
        assert exit_code(cluster) == 1 or is_whole(cluster)

        def is_mended() -> bool:
            """The two damages are found one after the other, and in between the status may be good for a moment."""
            is_gone = not lacking(cluster, node) and sealed[0] not in segment_bases(journal)
            return is_gone and is_whole(cluster)

        eventually(is_mended, PATIENCE_S, what=cluster.logs)
        assert exit_code(cluster) == 0
        node.kill()
        node.start()
        assert lacking(cluster, node) == []
        with pxrs.open(cluster.url) as hub:
            assert stored(hub) == values


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))
