"""Storage nodes whose disks are not what they were: blank, older, full, or of another format (C5)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs import registry as registries
from pxrs.cluster import records
from pxrs.cluster.ledgers import RECOVERING, LedgerRecord
from pxrs.cluster.links import NodeLink
from pxrs.cluster.records import TopicRecord
from pxrs.errors import NodeUnreachable, PxrsError
from pxrs.testing.cluster_processes import ClusterProcesses
from pxrs.testing.forked import run_text
from pxrs.testing.servers import StorageServer
from pxrs.testing.waiting import eventually

pytestmark = pytest.mark.sampled(4, of="times and nodes of clusters")

LEASE_S = 2.0
NODE_TIMEOUT_S = 15.0
"""Longer than what a test does while a node hangs: it is not replaced meanwhile."""
VALUE = b"v" * 4000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterProcesses]:
    """One broker and three nodes: every entry is sent to all of them, and two must acknowledge it."""
    with ClusterProcesses(
        f"file:{tmp_path / 'registry'}", brokers=1, nodes=3, lease_s=LEASE_S, node_timeout_s=NODE_TIMEOUT_S
    ) as running:
        yield running


def send(hub: pxrs.Hub, values: list[bytes]) -> None:
    with hub.producer("t") as producer:
        for receipt in [producer.send(value) for value in values]:
            receipt.result(60.0)


def stored(hub: pxrs.Hub) -> list[bytes | None]:
    return [message.value for message in hub.topic("t").messages(0)]


def is_served(cluster: ClusterProcesses) -> bool:
    """Whether the partition is served, by a client that does not wait long."""
    try:
        with pxrs.open(f"{cluster.url}?timeout=1&patience=1") as hub:
            return hub.topic("t").end(0) > 0
    except PxrsError:
        return False


def last_ledger(cluster: ClusterProcesses) -> LedgerRecord:
    """Of the partition."""
    with registries.open(cluster.registry) as registry:
        entry = registry.get(records.topic_key("t"))
        assert entry is not None
        prefix = records.ledgers_prefix(TopicRecord.parse(entry.key, entry.value).topic.id, 0)
        *_, last = (LedgerRecord.parse(each.key, each.value) for each in registry.scan(prefix))
        return last


def all_nodes_have(ledger: LedgerRecord) -> bool:
    return len(ledger.fragments) == 1 and None not in ledger.fragments[0].nodes


def a_message_that_two_nodes_have(cluster: ClusterProcesses) -> list[bytes]:
    """Every node has the first messages, and only the first two nodes have the last one. The broker is killed then, and
    so are the first two nodes. What was acknowledged."""
    first, second, third = (node.process for node in cluster.nodes)
    with pxrs.open(cluster.url) as hub:
        hub.create_topic("t", partitions=1)
        values = [b"%d" % number for number in range(50)]
        send(hub, values)

        def is_whole() -> bool:
            """If the first node was just started again, the broker connects to it again after a pause of up to 1 s."""
            if all_nodes_have(last_ledger(cluster)):
                return True
            values.append(b"%d" % len(values))
            send(hub, values[-1:])
            return False

        eventually(is_whole, 60.0, what=cluster.logs)
        third.pause()
        send(hub, [b"last"])
        cluster.brokers[0].process.kill()
    first.kill()
    second.kill()
    third.resume()
    return [*values, b"last"]


def check_that_the_last_message_is_found(cluster: ClusterProcesses, values: list[bytes]) -> None:
    """The first node was started on another disk, and the second one is away. If the first one were trusted, two nodes
    would say that there is no last message, which is enough to end the ledger before it."""
    cluster.brokers[0].process.start()
    third = cluster.nodes[2].process
    with closing(NodeLink(third.node, third.address)) as link:

        def is_being_recovered() -> bool:
            ledger = last_ledger(cluster)
            try:
                return ledger.state == RECOVERING and link.index(ledger.id).fenced is not None
            except NodeUnreachable:  # it was paused until now
                return False

        eventually(is_being_recovered, 60.0, what=cluster.logs)
    assert not is_served(cluster)
    cluster.nodes[1].process.start()
    with pxrs.open(cluster.url) as hub:
        assert stored(hub) == values
        send(hub, [b"more"])
        assert stored(hub) == [*values, b"more"]


def test_c5_a_node_on_a_blank_disk_at_an_old_address_is_a_new_node(cluster: ClusterProcesses) -> None:
    values = a_message_that_two_nodes_have(cluster)
    first = cluster.nodes[0].process
    before = first.node
    shutil.rmtree(first.data)
    first.start()
    assert first.node != before
    assert "the storage node starts with a new id" in first.log_tail()
    check_that_the_last_message_is_found(cluster, values)


def test_c5_a_node_on_an_older_copy_of_its_disk_is_a_new_node_and_the_copy_is_kept(
    cluster: ClusterProcesses, tmp_path: Path
) -> None:
    first = cluster.nodes[0].process
    first.kill()
    shutil.copytree(first.data, tmp_path / "copy")
    first.start()
    values = a_message_that_two_nodes_have(cluster)
    before = first.node
    shutil.rmtree(first.data)
    shutil.copytree(tmp_path / "copy", first.data)
    first.start()
    assert first.node != before
    (aside,) = [each for each in first.data.iterdir() if (each / "node.json").exists()]
    assert json.loads((aside / "node.json").read_bytes())["node"] == before
    check_that_the_last_message_is_found(cluster, values)


def test_c5_a_directory_of_another_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    directory = tmp_path / "node"
    directory.mkdir()
    cookie = {"node": "a" * 32, "cluster": "b" * 32, "starts": 1, "format": 99}
    (directory / "node.json").write_text(json.dumps(cookie))
    where = ["--registry", f"file:{tmp_path / 'registry'}", "--dir", str(directory), "--listen", "127.0.0.1:0"]
    done = run_text("pxrs.cli", ["storage", *where])
    assert done.returncode != 0
    assert "format 99" in done.stderr
    assert "start the storage node with the version of pxrs that wrote the directory" in done.stderr
    assert json.loads((directory / "node.json").read_bytes()) == cookie


class SmallDisk(StorageServer):
    """A node whose directory is on a file system of its own, with little room."""

    def _command(self, folder: Path) -> list[str]:
        (folder / "data").mkdir(exist_ok=True)
        mount = f'mount -t tmpfs -o size=3m none "{folder / "data"}" && exec "$@"'
        return [shutil.which(_RIGHTS[0]) or "", *_RIGHTS[1:], "sh", "-c", mount, "sh", *super()._command(folder)]


_RIGHTS = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]


def test_a_full_disk_is_the_failure_of_one_node_and_loses_nothing(tmp_path: Path) -> None:
    if sys.platform != "linux" or subprocess.run([*_RIGHTS, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    registry = f"file:{tmp_path / 'registry'}"
    flags = ["--limit", "free_bytes_min=1", "--limit", "segment_bytes=1048576"]
    with ExitStack() as stack:
        full = stack.enter_context(SmallDisk(registry, flags=flags))
        cluster = stack.enter_context(ClusterProcesses(registry, brokers=1, nodes=2, lease_s=LEASE_S))
        with pxrs.open(cluster.url) as hub:
            hub.create_topic("t", partitions=1)
            values = [b"%d %s" % (number, VALUE) for number in range(1000)]
            send(hub, values)  # 4 MB: no error
            assert stored(hub) == values
        log = cluster.brokers[0].process.directory / "log"
        # The two other nodes acknowledge everything without waiting for the one whose disk is full.
        is_told = lambda: any(what in log.read_text() for what in ("no room", "No space"))  # noqa: E731
        eventually(is_told, 60.0, what=lambda: f"{cluster.logs()}\n{full.log_tail()}")
        full.kill()
        cluster.brokers[0].process.kill()
        cluster.brokers[0].process.start()
        with pxrs.open(cluster.url) as hub:
            assert stored(hub) == values
