"""Every public call while no broker, or no storage node, answers ends within its limit."""

from __future__ import annotations

import pytest

from pxrs.copying import copier
from pxrs.errors import ReadFailed
from pxrs.testing.cluster_processes import ClusterProcesses
from tests.integration.waits import COPY_S, PATIENCE_S, TABLE, TIMEOUT_S, World, check_calls

OF_MESSAGES = [
    *("Hub.create_topic", "Hub.copy_topic", "Hub.delete_topic", "Hub.events", "Hub.close"),
    *(name for name in TABLE if name.startswith(("TopicHandle.", "Producer.", "Receipt.", "TableReceipt."))),
    *(f"Consumer.{name}" for name in ("__iter__", "batches", "poll", "run", "seek", "lag", "close")),
]
"""Calls that brokers pass on to storage nodes, or may. All others end at the brokers and at etcd."""


@pytest.mark.sampled(8, of="waits")
@pytest.mark.parametrize("silent", ["brokers", "nodes"])
def test_every_public_call_ends_within_its_limit_while_a_part_of_the_cluster_does_not_answer(
    cluster: ClusterProcesses, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "RETRY_S_MAX", COPY_S)
    proxies = [each.proxy for each in (cluster.brokers if silent == "brokers" else cluster.nodes)]

    def stall() -> None:
        for proxy in proxies:
            proxy.stall()

    def restore() -> None:
        for proxy in proxies:
            proxy.restore()

    world = World(f"{cluster.url}?timeout={TIMEOUT_S:g}&patience={PATIENCE_S:g}", None, TIMEOUT_S, PATIENCE_S)
    ended = check_calls(world, stall, restore, TABLE if silent == "brokers" else OF_MESSAGES)
    if silent == "brokers":
        assert isinstance(ended["TopicHandle.read"], ReadFailed)
