"""Schedules of a broker's threads that lost, doubled or misreported something, or stopped it (C1, C3, C4, W1)."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

from pxrs.cluster import records as keys
from pxrs.cluster.broker.beginning import Claim
from pxrs.cluster.broker.context import Broker
from pxrs.cluster.broker.log import ClusterTopic
from pxrs.cluster.broker.nodes import NodeLinks
from pxrs.cluster.broker.opened import Opened
from pxrs.cluster.broker.partition import OwnedPartition
from pxrs.cluster.broker.running import CREW_MAX, RunningBroker
from pxrs.cluster.broker.writing import LedgerShell
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.cluster.links import NodeLink
from pxrs.cluster.records import OwnerRecord, ledgers_prefix
from pxrs.errors import (
    AppendFailed,
    InvalidPlacement,
    NodeUnreachable,
    NotPermitted,
    PartitionMoved,
    ReadFailed,
)
from pxrs.log.contract import Append, TopicLog
from pxrs.log.outcomes import MaybeStored, NotStored, StoredAt, offsets_of
from pxrs.log.producers import Producers
from pxrs.registry.memory import MemoryRegistry, MemoryStore
from pxrs.testing.clusters import SmallCluster, small_cluster
from pxrs.testing.log_fixtures import new_topic, origin, records, values_from
from pxrs.testing.waiting import aside, eventually

_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    store = MemoryStore()
    folder = Path(tmp_path_factory.mktemp("cluster"))
    with small_cluster(folder, lambda: MemoryRegistry(store)) as cluster:
        yield cluster


class Found:
    """A new topic, and the broker that owns its first partition."""

    def __init__(self, cluster: SmallCluster, partitions: int = 1) -> None:
        self.name = f"topic-{next(_numbers)}"
        self.handle = cluster.brokers[0].hub.log.create_topic(new_topic(self.name, partitions))
        self.owner, self.partition = eventually(lambda: self._owner(cluster), what="no broker serves the topic")
        self.other = next(each for each in cluster.brokers if each is not self.owner)

    def _owner(self, cluster: SmallCluster) -> tuple[RunningBroker, OwnedPartition] | None:
        for broker in cluster.brokers:
            found = broker.ownership.owned(self.handle.id, 0)
            if found is not None and found.why_not is None:
                return broker, found
        return None

    @property
    def broker(self) -> Broker:
        return self.owner.broker

    @property
    def topic(self) -> ClusterTopic:
        found = self.owner.hub.log.topic(self.name)
        assert isinstance(found, ClusterTopic)
        return found

    @property
    def local(self) -> TopicLog:
        """What the owner serves by itself."""
        return self.topic.local


@pytest.fixture
def found(cluster: SmallCluster) -> Found:
    return Found(cluster)


def test_c4_a_partition_is_not_claimed_from_a_broker_that_lives(found: Found) -> None:
    """The scan of the brokers was made before the owner's key was there: the owner still answers reads by its lease."""
    other = found.other
    seen = other.broker.view.refresh()
    me = found.broker.membership.incarnation
    without = replace(seen, brokers={name: each for name, each in seen.brokers.items() if name != me})
    place = found.handle.id, 0
    owner, version = seen.owners[place]
    other.ownership._claim(place, *without.topics[found.name], owner, version)
    entry = found.broker.registry.get(keys.owner_key(*place))
    assert entry is not None
    assert OwnerRecord.parse(entry.key, entry.value).broker == me
    assert offsets_of(found.local.append([Append.encoded(0, records([b"a"]))])) == [0]


def test_a_node_at_another_address_does_not_stop_the_partition(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link to the old address is closed by a thread that holds the partition's lock, while the link's thread waits
    for that lock to report an answer."""
    links, partition = found.broker.links, found.partition
    writer = partition._writer
    assert writer is not None
    node = next(each for each in writer.record.fragments[0].nodes if each is not None)
    link = links(node)
    eventually(lambda: not writer._entries, what="entry 0 is not acknowledged by all nodes")
    reached, answered = threading.Event(), writer._answered

    def late(*arguments: Any) -> None:
        if arguments[0] == node:
            reached.set()
        answered(*arguments)

    monkeypatch.setattr(writer, "_answered", late)

    def ask_under_the_lock() -> NodeLink:
        with partition.lock:
            partition.begin([Append.encoded(0, records([b"a"]))])
            assert reached.wait(10)
            link.address = "127.0.0.1:1"  # as if the node had been started again elsewhere
            return links(node)

    assert aside(ask_under_the_lock).result() is not link
    assert offsets_of(found.local.append([Append.encoded(0, records([b"b"]))])) == [1]


def test_a_late_roll_does_not_close_the_ledger_of_a_later_generation(found: Found) -> None:
    """A roll waits for a thread of the crew while the ledger fails and the partition is recovered."""
    partition = found.partition
    assert offsets_of(found.local.append([Append.encoded(0, records([b"a"]))])) == [0]
    generation = partition._generation
    partition.get_stuck("a test")
    eventually(lambda: partition._generation > generation and partition.why_not is None)
    partition._roll_apart(generation)
    assert offsets_of(found.local.append([Append.encoded(0, records([b"b"]))])) == [1]
    assert values_from(found.topic, 0) == [b"a", b"b"]


@pytest.mark.parametrize("late", ["close", "begin"])
def test_c1_a_roll_and_an_opening_at_the_same_time_begin_one_ledger(
    found: Found, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """The roll has closed the ledger, and begins the next one after the opening has. late: when the roll stands still
    meanwhile. With two ledgers, messages go to the one that a fail-over does not recover."""
    partition = found.partition
    assert offsets_of(found.local.append([Append.encoded(0, records([b"a"]))])) == [0]
    reached, opened = threading.Event(), threading.Event()
    close, begin = LedgerShell.close, OwnedPartition.begin_next

    def wait() -> None:
        if threading.current_thread().name == "roll":
            reached.set()
            assert opened.wait(30)

    def held_close(self: LedgerShell, until: float) -> LedgerRecord:
        closed = close(self, until)
        wait()
        return closed

    def held_begin(self: OwnedPartition, base: int, claim: Claim) -> tuple[LedgerShell, Claim]:
        wait()
        return begin(self, base, claim)

    if late == "close":
        monkeypatch.setattr(LedgerShell, "close", held_close)
    else:
        monkeypatch.setattr(OwnedPartition, "begin_next", held_begin)
    generation = partition._generation
    roll = threading.Thread(target=partition._roll_apart, args=(generation,), name="roll")
    roll.start()
    assert reached.wait(30)
    partition.get_stuck("a test")
    eventually(lambda: partition._generation > generation and partition.why_not is None)
    opened.set()
    roll.join(30)
    assert not roll.is_alive()
    assert offsets_of(found.local.append([Append.encoded(0, records([b"b"]))])) == [1]
    open_ledgers = [
        record
        for entry in found.broker.registry.scan(ledgers_prefix(found.handle.id, 0))
        if not (record := LedgerRecord.parse(entry.key, entry.value)).is_closed
    ]
    assert len(open_ledgers) == 1
    generation = partition._generation
    partition.get_stuck("a fail-over")
    eventually(lambda: partition._generation > generation and partition.why_not is None)
    assert values_from(found.topic, 0) == [b"a", b"b"]


def test_an_append_that_fails_in_one_partition_tells_the_truth_of_the_others(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second partition raises after the first one has been stored: the sender must not hear that nothing was."""
    found = Found(cluster, 12)  # so many that no broker gets all but one, however many other partitions it has
    mine = eventually(
        lambda: len(chosen := _served(found.owner, found.handle.id)) > 1 and chosen, what="no two partitions"
    )
    first, second = sorted(mine)[:2]

    def fail(*arguments: object, **named: object) -> None:
        raise ReadFailed("the headers cannot be read")

    refusing = found.owner.ownership.owned(found.handle.id, second)
    assert refusing is not None
    assert found.local.append([Append.encoded(second, records([b"a"]))]) == [StoredAt(0)]
    refusing._producers.forgotten = 1 << 40  # every new producer may have been forgotten
    monkeypatch.setattr(found.broker.reader, "read", fail)
    appends = [
        Append.encoded(number, records([b"a"]), origin(0, uuid.uuid4()))._replace(since=0) for number in (first, second)
    ]
    outcomes = found.local.append(appends)
    assert outcomes[0] == StoredAt(0)
    assert isinstance(outcomes[1], NotStored)
    assert isinstance(outcomes[1].error, AppendFailed)  # it may work later


def _served(broker: RunningBroker, topic_id: str) -> list[int]:
    owned = broker.ownership.partitions().items()
    return [place[1] for place, each in owned if place[0] == topic_id and each.why_not is None]


def test_w1_an_append_to_two_brokers_tells_the_truth_if_one_of_them_refuses(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Found(cluster, 4)
    topic = found.topic
    theirs = eventually(lambda: _served(found.other, found.handle.id), what="the other broker has no partition")
    found.broker.view.refresh()  # so that it knows the claim of the other one
    peer = topic._routes.handle(theirs[0])

    def refuse(appends: object) -> None:
        raise NotPermitted("a test")

    monkeypatch.setattr(peer, "append", refuse)
    outcomes = topic.append([Append.encoded(number, records([b"a"])) for number in (0, theirs[0])])
    assert outcomes[0] == StoredAt(0)
    assert isinstance(outcomes[1], NotStored)
    assert isinstance(outcomes[1].error, NotPermitted)


def test_a_subscription_at_a_broker_is_armed_once(found: Found) -> None:
    topic, calls = found.topic, [0]

    def count() -> None:
        calls[0] += 1

    with topic.subscribe([0], count):
        for _ in range(5):
            topic.bounds([0])
        assert calls == [0]  # nothing has happened
        assert len(found.owner.ownership.subscribers(found.handle.id)) == 1


def test_a_retry_with_more_rows_than_are_stored_does_not_stop_the_partition(found: Found) -> None:
    producer = uuid.uuid4()
    assert found.local.append([Append.encoded(0, records([b"a"]), origin(0, producer))]) == [StoredAt(0)]
    again = found.local.append([Append.encoded(0, records([b"a", b"b", b"c"]), origin(0, producer))])
    assert again == [StoredAt(0, True)]
    assert found.partition.why_not is None


@pytest.fixture
def short_append_s(found: Found) -> Iterator[float]:
    """The `append_s` of the owner: the test sets the clock forward by about that much, and no lease ends."""
    settings = found.broker.settings
    before = settings.append_s
    object.__setattr__(settings, "append_s", 2.0)
    yield 2.0
    object.__setattr__(settings, "append_s", before)


def test_an_append_that_has_waited_for_room_gets_its_whole_time(
    found: Found, short_append_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits almost `append_s` for the next ledger. Then the nodes still have `append_s` to answer."""
    partition, append_s = found.partition, short_append_s
    partition._is_rolling = True
    waits, wait = threading.Event(), partition._changed.wait
    passed_s, real = [0.0], time.monotonic

    def waiting(timeout: float | None = None) -> bool:
        waits.set()
        return wait(timeout)

    monkeypatch.setattr(partition._changed, "wait", waiting)
    monkeypatch.setattr(time, "monotonic", lambda: real() + passed_s[0])
    stored = aside(lambda: found.local.append([Append.encoded(0, records([b"a"]))]))
    assert waits.wait(10)
    slow = _Slow(monkeypatch)
    with partition.lock:
        passed_s[0] = 0.9 * append_s
        partition._is_rolling = False
        partition._changed.notify_all()
    assert slow.reached.wait(10)
    with partition.lock:
        passed_s[0] = 1.2 * append_s
        waits.clear()
        partition._changed.notify_all()
    eventually(lambda: waits.is_set() or stored.done())
    slow.go.set()
    assert stored.result() == [StoredAt(0)]
    assert partition._generation == 1


class _Slow:
    """Adds are sent once `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        add = NodeLink.add

        def later(link: NodeLink, *arguments: Any) -> None:
            self.reached.set()
            threading.Thread(target=lambda: (self.go.wait(10), add(link, *arguments)), daemon=True).start()

        monkeypatch.setattr(NodeLink, "add", later)


def test_a_placement_that_fails_does_not_stop_the_ledger(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes have the entry, the third is away, and the function that chooses another one raises."""
    away, call = _last_node(found), NodeLinks.__call__

    def known(self: NodeLinks, node: str) -> NodeLink:
        if node == away:
            raise NodeUnreachable(node, "a test")
        return call(self, node)

    def fail(*arguments: object) -> list[str]:
        raise InvalidPlacement("a test")

    monkeypatch.setattr(NodeLinks, "__call__", known)
    monkeypatch.setattr(Broker, "spares", fail)
    assert found.local.append([Append.encoded(0, records([b"a"]))]) == [StoredAt(0)]


def test_c4_an_entry_that_was_sent_to_some_nodes_keeps_its_offset(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something fails after two nodes have been sent the entry: the next entry must not get the same offset."""
    away, writer = _last_node(found), found.partition._writer
    assert writer is not None
    send = writer._send

    def fail(node: str, *arguments: Any) -> list[Any]:
        if node == away:
            raise RuntimeError("a test")
        return send(node, *arguments)

    monkeypatch.setattr(writer, "_send", fail)
    (outcome,) = found.local.append([Append.encoded(0, records([b"a"]))])
    assert isinstance(outcome, MaybeStored)
    stored = eventually(lambda: _stored(found.local, b"b"))
    assert values_from(found.topic, 0) == [b"a"] * stored.offset + [b"b"]  # recovery may keep it or not


def _last_node(found: Found) -> str | None:
    writer = found.partition._writer
    assert writer is not None
    return writer.record.fragments[0].nodes[-1]


def test_l4_nodes_answer_while_an_append_searches_for_its_producer(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer was forgotten. Its first batch is searched for on storage nodes, and other batches are stored in the
    meantime; then the retry is recognised."""
    producer, partition, reader = uuid.uuid4(), found.partition, found.broker.reader
    first = Append.encoded(0, records([b"a"]), origin(0, producer), since=0)
    assert found.local.append([first]) == [StoredAt(0)]
    assert found.local.append([Append.encoded(0, records([b"b"]))]) == [StoredAt(1)]
    partition._producers = Producers(forgotten=1)
    reading, go, read = threading.Event(), threading.Event(), reader.read

    def slowly(*arguments: Any, **named: Any) -> Any:
        reading.set()
        assert go.wait(30)
        return read(*arguments, **named)

    monkeypatch.setattr(reader, "read", slowly)
    again = aside(lambda: found.local.append([first]))
    try:
        assert reading.wait(10)
        between = aside(lambda: found.local.append([Append.encoded(0, records([b"c"]))])).result(10)
    finally:
        go.set()
    assert between == [StoredAt(2)]
    assert again.result() == [StoredAt(0, is_duplicate=True)]
    assert values_from(found.topic, 0) == [b"a", b"b", b"c"]


def _stored(topic: TopicLog, value: bytes) -> StoredAt | None:
    (outcome,) = topic.append([Append.encoded(0, records([value]))])
    return outcome if isinstance(outcome, StoredAt) else None


def test_a_partition_that_was_given_up_while_it_was_opened_serves_nothing(found: Found) -> None:
    """The lease was lost during the opening: what it has made is not written to, and the entry 0 is not sent."""
    partition = found.partition
    moved = PartitionMoved("a test")
    begun, claim = partition.begin_next(0, partition.claim)
    partition.give_up(moved)
    partition.serve(Opened([], begun, Producers(), {}, claim))
    assert partition._writer is None
    assert partition.why_not is moved


def test_appends_by_way_of_a_broker_need_no_thread_that_its_ledgers_need(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread of the crew is free: neither an append to two brokers nor the roll for which it waits may take it from
    the commit for which the roll waits. (A node dies, and 64 ledgers are rolled at once.)"""
    found = Found(cluster, 4)
    theirs = eventually(lambda: _served(found.other, found.handle.id), what="the other broker has no partition")
    topic, crew, go = found.topic, found.broker.crew, threading.Event()
    assert all(isinstance(each, StoredAt) for each in topic.append(_one_each(0, theirs[0])))
    is_full = iter([True])
    monkeypatch.setattr(found.partition, "_is_full", lambda: next(is_full, False))
    busy = [crew.submit(go.wait, 30) for _ in range(CREW_MAX - 1)]
    try:
        outcomes = aside(lambda: topic.append(_one_each(0, theirs[0]))).result()
    finally:
        go.set()
    assert all(isinstance(each, StoredAt) for each in outcomes)
    assert len(found.partition._chain) == 1
    assert found.partition._generation == 1  # it was rolled, and not recovered after it had failed
    assert all(each.result(10) for each in busy)


def _one_each(*partitions: int) -> list[Append]:
    return [Append.encoded(number, records([b"a"])) for number in partitions]


def test_an_error_that_is_raised_often_does_not_keep_what_its_callers_had(found: Found) -> None:
    partition = found.partition
    partition._gone = PartitionMoved("a test")
    for _ in range(20):
        with pytest.raises(PartitionMoved):
            partition.bounds()
    depth, trace = 0, partition._gone.__traceback__
    while trace is not None:
        depth, trace = depth + 1, trace.tb_next
    assert depth < 10


def test_a_broker_that_has_not_seen_a_topic_made_again_does_not_call_it_deleted(
    cluster: SmallCluster, found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that makes a topic again at one broker asks another one, whose view is older, for its owners."""
    other = found.other
    seen = other.broker.view.refresh()
    assert found.name in seen.topics
    monkeypatch.setattr(other.broker.view, "refresh", lambda: seen)
    found.owner.hub.log.delete_topic(found.name)
    again = found.owner.hub.log.create_topic(new_topic(found.name, 1))
    other.broker.view.seen = seen
    address = cluster.addresses[cluster.brokers.index(other)]
    assert found.owner._peers.topic(address, again.topic).owners() == {}
