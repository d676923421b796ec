"""What may happen between two openings of a partition by the same broker (C1, C4, C6)."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

from pxrs.cluster import deciding
from pxrs.cluster import records as keys
from pxrs.cluster.broker import opening, ownership
from pxrs.cluster.broker import partition as partitions
from pxrs.cluster.broker.context import BrokerSettings
from pxrs.cluster.broker.nodes import NodeLinks
from pxrs.cluster.broker.partition import OwnedPartition
from pxrs.cluster.broker.running import RunningBroker
from pxrs.cluster.links import NodeLink
from pxrs.errors import NodeUnreachable, PartitionMoved, PxrsError
from pxrs.log.contract import Append, Bounds
from pxrs.log.outcomes import StoredAt
from pxrs.registry.memory import MemoryRegistry, MemoryStore
from pxrs.testing.clusters import SmallCluster, small_cluster
from pxrs.testing.log_fixtures import new_topic, records, values_from
from pxrs.testing.waiting import aside, eventually

_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    store = MemoryStore()
    folder = Path(tmp_path_factory.mktemp("cluster"))
    settings = BrokerSettings(append_s=5.0)
    with small_cluster(folder, lambda: MemoryRegistry(store), brokers=1, settings=settings) as cluster:
        yield cluster


class Found:
    """A new topic of one partition at the only broker."""

    def __init__(self, cluster: SmallCluster) -> None:
        (self.broker,) = cluster.brokers
        self.name = f"orders-{next(_numbers)}"
        self.topic = self.broker.hub.log.create_topic(new_topic(self.name, 1))
        self.place = self.topic.id, 0
        self.partition = eventually(self.serving)

    def serving(self) -> OwnedPartition | None:
        found = self.broker.ownership.owned(*self.place)
        return found if found is not None and found.why_not is None and not found._pending else None

    def send(self, *values: bytes) -> None:
        for value in values:
            (outcome,) = self.topic.append([Append.encoded(0, records([value]))])
            assert isinstance(outcome, StoredAt)

    def ledgers(self) -> int:
        return len(list(self.broker.broker.registry.scan(keys.ledgers_prefix(*self.place))))


@pytest.fixture
def found(cluster: SmallCluster) -> Iterator[Found]:
    found = Found(cluster)
    yield found
    found.broker.hub.log.delete_topic(found.name)


class Gate:
    """Stops the first call of a function before it begins, until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        call, count = getattr(module, name), iter([True])

        def gated(*arguments: Any, **named: Any) -> Any:
            if next(count, False):
                self.reached.set()
                assert self.go.wait(30)
            return call(*arguments, **named)

        monkeypatch.setattr(module, name, gated)


def _errors(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR and text in each.getMessage()]


def _tries(found: Found) -> int:
    tries = found.broker.ownership._opening.get(found.partition)
    return 0 if tries is None else tries.count


def test_c4_a_recovery_that_ends_before_what_was_confirmed_is_refused(
    found: Found, caplog: pytest.LogCaptureFixture
) -> None:
    """No operator has decided that: it is a defect, and nothing is served until it is understood."""
    found.send(b"a")
    partition = found.partition
    with partition.lock:
        partition._end += 1  # as if more had been confirmed
    partition.get_stuck("a test")
    eventually(lambda: _tries(found) > 1)
    (told,) = _errors(caplog, f"{found.name}/0")
    assert "recovered up to offset 1, but offsets up to 2 had been confirmed" in told
    assert partition.is_stuck
    assert found.ledgers() == 1, "each try begins a ledger"


def test_a_trim_during_the_opening_is_not_undone_by_it(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledgers are read, then they are removed, then the partition is served."""
    partition = found.partition
    for number, value in enumerate((b"a", b"b", b"c")):
        found.send(value)
        with partition.lock:
            partition._roll()
        eventually(lambda: not partition._is_rolling and len(partition._index))
        assert len(partition.chain) == number + 1
    removing = Gate(monkeypatch, partitions, "remove_ledgers")
    opened = Gate(monkeypatch, opening, "_producers")
    trimmed = aside(lambda: partition.trim(2))
    assert removing.reached.wait(10)
    partition.get_stuck("a test")
    assert opened.reached.wait(10)
    removing.go.set()
    assert trimmed.result() == 2
    opened.go.set()
    eventually(lambda: partition.why_not is None)
    assert partition.bounds() == Bounds(2, 3)
    assert values_from(found.topic, 0, 2) == [b"c"]


def test_the_opening_of_an_old_incarnation_does_not_hold_up_the_next(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is lost while a partition is opened; the same broker claims it again as its next incarnation."""
    found.send(b"a")
    old = found.partition
    held = Gate(monkeypatch, ownership, "open_partition")
    old.get_stuck("a test")
    assert held.reached.wait(10)
    _lose_lease(found.broker)
    try:
        new = eventually(found.serving, 10.0, what="the old opening holds up the new one")
    finally:
        held.go.set()
    assert new is not old
    found.send(b"b")
    assert values_from(found.topic, 0) == [b"a", b"b"]
    assert found.broker.ownership._opening.keys() <= {*found.broker.ownership.partitions().values()}


def _lose_lease(broker: RunningBroker) -> None:
    lease = broker.broker.membership.lease
    assert lease is not None
    lease.close()


def test_the_recovery_of_a_partition_that_is_given_up_ends_soon(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would keep a thread of those that open partitions for `recovery_s`."""
    partition = found.partition
    has_begun, reached = threading.Event(), threading.Event()

    def away(self: NodeLinks, node: str) -> NodeLink:
        if has_begun.is_set():  # other threads of the broker use nodes, too
            reached.set()
        raise NodeUnreachable(node, "a test")

    ended: list[PxrsError] = []
    opened = ownership.open_partition

    def told(*arguments: Any) -> bool:
        has_begun.set()
        try:
            return opened(*arguments)
        except PxrsError as error:
            ended.append(error)
            raise

    monkeypatch.setattr(ownership, "open_partition", told)
    monkeypatch.setattr(NodeLinks, "__call__", away)
    partition.get_stuck("a test")
    assert reached.wait(10)
    found.broker.ownership._give_up(found.place, PartitionMoved("a test"))
    assert isinstance(eventually(lambda: ended, 10.0)[0], PartitionMoved)


@pytest.fixture
def returning(cluster: SmallCluster) -> Iterator[None]:
    """After the test its nodes 1 and 2 are started again, for the tests that follow."""
    yield
    cluster.start_node(1)
    cluster.start_node(2)


@pytest.mark.usefixtures("returning")
def test_c6_a_partition_is_served_after_its_confirmed_tail_was_abandoned(
    cluster: SmallCluster, found: Found, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of three nodes have the last two messages, and return only after the test."""
    found.send(b"a", b"b", b"c")
    partition, broker = found.partition, found.broker.broker
    left = cluster.nodes[0].node.id
    writer = partition._writer
    assert writer is not None
    eventually(lambda: writer.is_everywhere)
    add = NodeLink.add
    monkeypatch.setattr(NodeLink, "add", lambda link, *given: None if link.node == left else add(link, *given))
    found.send(b"lost", b"lost")
    monkeypatch.setattr(NodeLink, "add", add)
    lost = [cluster.nodes[1].node.id, cluster.nodes[2].node.id]
    cluster.stop_node(1)
    cluster.stop_node(2)
    cluster.start_node(3)  # it stays
    partition.get_stuck("a test")
    deciding.abandon(broker.registry, lost, who="ann")
    eventually(lambda: partition.why_not is None, what=lambda: partition.why_not)
    assert partition.bounds() == Bounds(0, 3)
    (told,) = _errors(caplog, f"{found.name}/0")
    assert "3 to 4" in told
    assert "ann" not in told
    found.send(b"d")
    assert values_from(found.topic, 0) == [b"a", b"b", b"c", b"d"]
    assert found.ledgers() == 2
    # It is told once.
    partition.get_stuck("a test")
    eventually(lambda: partition.why_not is None)
    assert len(_errors(caplog, f"{found.name}/0")) == 1
