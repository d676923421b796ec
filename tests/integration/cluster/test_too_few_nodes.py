"""A cluster that can store nothing says so: one storage node of three."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs.cluster import records
from pxrs.errors import AppendFailed, PxrsError
from pxrs.testing.cluster_processes import ClusterProcesses
from pxrs.testing.forked import run_text
from pxrs.testing.waiting import eventually

WHY = "1 of 2 needed storage nodes accept entries (3 in the ensemble)"


def command(cluster: ClusterProcesses, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_text("pxrs.cli", [*arguments, "--at", cluster.url])


def status(cluster: ClusterProcesses) -> tuple[int, dict[str, object]]:
    done = command(cluster, "cluster", "status", "--json")
    return done.returncode, json.loads(done.stdout)


def test_one_node_of_three_is_told_by_every_command_and_two_more_are_used_at_once(tmp_path: Path) -> None:
    with ClusterProcesses(f"file:{tmp_path / 'registry'}", brokers=1, nodes=1) as cluster:
        made = command(cluster, "topic", "create", "orders", "--partitions", "2")
        assert (made.returncode, made.stdout) == (0, "created orders with 2 partitions\n")
        assert made.stderr == (
            f"warning: topic orders was created, but nothing can be stored in it yet: {WHY}; start more storage nodes\n"
        )
        code, found = status(cluster)
        assert (code, found["has_faults"], found["is_whole"]) == (1, True, False), "at once, whatever brokers know"
        with pxrs.open(cluster.url) as hub:
            producer = hub.producer("orders", delivery_timeout=2.0)
            with pytest.raises(AppendFailed, match="1 of 2 needed storage nodes") as refused:
                producer.send(b"early").result(30.0)
            assert "see `pxrs cluster status`" in str(refused.value)
            with pytest.raises(PxrsError):
                producer.close()
        shown = eventually(
            lambda: done if "not served since" in (done := command(cluster, "cluster", "status")).stdout else None
        )
        assert shown.returncode == 1
        assert f"nothing can be stored in topics _audit, _events, orders: {WHY}" in shown.stdout
        assert "every partition has an owner" not in shown.stdout
        log = (cluster.brokers[0].process.directory / "log").read_text()
        assert log.count("orders/0 could not be opened") == 1
        for _ in range(2):
            cluster.add_node()
        for node in cluster.nodes:
            node.process.wait_until_ready()
        with pxrs.open(cluster.url) as hub, hub.producer("orders") as producer:
            producer.send(b"late").result(60.0)
        assert eventually(lambda: found if (found := status(cluster))[0] == 0 else None)[1]["unserved"] == []
        shown = command(cluster, "cluster", "status")
        assert "every partition has an owner and is served" in shown.stdout
        assert cluster.tracebacks() == []
        with pxrs.open(cluster.url) as hub:
            assert hub.registry.scan("cluster/troubles/") == []
            assert len(hub.registry.scan(records.ALIVE)) == 3
