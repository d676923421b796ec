"""C7, C8: what a broker does about storage nodes that have restarted in doubt, or have found damage."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("grpc")

from pxrs.cluster import records as keys
from pxrs.cluster.answers import EntryRead
from pxrs.cluster.broker import doubts, repairs, staged_copies, tries
from pxrs.cluster.broker.context import BrokerSettings
from pxrs.cluster.broker.doubts import NodeDoubts
from pxrs.cluster.broker.partition import OwnedPartition
from pxrs.cluster.broker.repairing import Repairer
from pxrs.cluster.broker.staged_copies import StagedLedgers
from pxrs.cluster.ledgers import LedgerName, LedgerRecord
from pxrs.cluster.links import NodeLink
from pxrs.cluster.records import AliveNode
from pxrs.cluster.staged import StagedName
from pxrs.cluster.storage import collecting
from pxrs.cluster.storage.format import header_bytes
from pxrs.cluster.storage.registration import Registration
from pxrs.cluster.storage.running import StorageServer, StorageSettings
from pxrs.cluster.storage.settings import StorageLimits
from pxrs.errors import NodeUnreachable
from pxrs.log.contract import Append
from pxrs.log.outcomes import StoredAt
from pxrs.registry.contract import Registry
from pxrs.registry.memory import MemoryRegistry, MemoryStore
from pxrs.testing import clusters
from pxrs.testing.clusters import SmallCluster, small_cluster
from pxrs.testing.log_fixtures import new_topic, records, values_from
from pxrs.testing.staging_contract import rows
from pxrs.testing.waiting import eventually
from tests.unit.cluster.stored import fast_folder

_numbers = itertools.count()
LIMITS = StorageLimits(alive_s=0.02, free_bytes_min=1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SmallCluster]:
    """One broker, and three storage nodes that tell soon what they know. No copies are made again because a node is
    away."""
    store, settings = MemoryStore(), BrokerSettings(copies_grace_s=600.0, recent_bytes=0)
    with pytest.MonkeyPatch.context() as patch, fast_folder() as folder:
        patch.setattr(clusters, "StorageSettings", lambda each: StorageSettings(each, limits=LIMITS))
        patch.setattr(collecting, "LOOK_S", 0.02)
        patch.setattr(repairs, "LOOK_S", 0.02)
        patch.setattr(staged_copies, "LOOK_S", 0.02)
        with small_cluster(folder, lambda: MemoryRegistry(store), brokers=1, settings=settings) as found:
            yield found


class Found:
    """A new topic of one partition, whose first message is stored on all three nodes."""

    def __init__(self, cluster: SmallCluster) -> None:
        self.cluster = cluster
        (self.broker,) = cluster.brokers
        self.name = f"orders-{next(_numbers)}"
        self.log = self.broker.hub.log.create_topic(new_topic(self.name, 1))
        self.partition = eventually(self._serving)
        self.send(b"a")
        first = self.ledgers()[0].id
        eventually(lambda: all(len(each.node.page(first, -1, 9).places) == 2 for each in cluster.nodes))

    def _serving(self) -> OwnedPartition | None:
        found = self.broker.ownership.owned(self.log.id, 0)
        return found if found is not None and found.why_not is None else None

    @property
    def registry(self) -> Registry:
        return self.broker.broker.registry

    def send(self, value: bytes) -> None:
        (outcome,) = self.log.append([Append.encoded(0, records([value]))])
        assert isinstance(outcome, StoredAt)

    def ledgers(self) -> list[LedgerRecord]:
        """As the registry has them."""
        found = self.registry.scan(keys.ledgers_prefix(self.log.id, 0))
        return [LedgerRecord.parse(entry.key, entry.value) for entry in found]

    def values(self) -> list[bytes | None]:
        return values_from(self.log, 0)

    def with_a_closed_ledger(self) -> LedgerRecord:
        """Begin the next ledger. Returns the first one, once the owner knows that every node has all its entries."""
        self.partition.get_stuck("a test")

        def closed() -> LedgerRecord | None:
            chain = self.partition.chain
            return chain[0] if chain and chain[0].is_complete and self.partition.why_not is None else None

        return eventually(closed, what=lambda: self.partition.chain)


@pytest.fixture
def found(cluster: SmallCluster) -> Iterator[Found]:
    found = Found(cluster)
    yield found
    found.broker.hub.log.delete_topic(found.name)


def restart_in_doubt(cluster: SmallCluster, number: int) -> StorageServer:
    """As after a power loss: nothing says up to where the journal was synced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Registration, "record_stop", lambda each: None)
        cluster.stop_node(number)
    server = cluster.start_node(number)
    assert not server.node.is_proven
    return server


def record_at(registry: Registry, ledger: str) -> tuple[LedgerRecord, int]:
    found = registry.get(LedgerName.of_id(ledger).key)
    assert found is not None
    return LedgerRecord.parse(found.key, found.value), found.version


class Doubts:
    """What a broker knows of one storage node. The node answers with pages of one ledger each."""

    def __init__(self) -> None:
        self.ledgers = ["t/0/1", "t/0/2"]
        self.error: NodeUnreachable | None = None
        self.calls = self.answers = 0
        broker: Any = SimpleNamespace(crew=SimpleNamespace(submit=lambda act, *given: act(*given)), links=self._link)
        self._doubts = NodeDoubts(broker, self._count)

    def _count(self) -> None:
        self.answers += 1

    def _link(self, node: str) -> Any:
        assert node == "n"
        self.calls += 1
        if self.error is not None:
            raise self.error
        return SimpleNamespace(lacking=self._lacking)

    def _lacking(self, after: str = "", timeout_s: float | None = None) -> tuple[list[str], bool]:
        left = [each for each in self.ledgers if each > after]
        return left[:1], len(left) > 1

    def look(self, **shown: int) -> frozenset[str] | None:
        """What is known of the node, which shows this in the registry."""
        return self._doubts.look({"n": AliveNode("h:1", **{"starts": 1, **shown}), "m": AliveNode("h:2", 1)}).get("n")


def test_c7_a_node_is_asked_what_it_may_have_lost_after_each_change_of_what_it_shows() -> None:
    found = Doubts()
    assert found.look() is None
    assert found.calls == 0
    for count, shown in enumerate(({"doubts": 2}, {"doubts": 1}, {"damaged": 1}, {"damaged": 1, "starts": 2}), 1):
        found.ledgers = ["t/0/1", f"t/0/{1 + count}"]
        for _ in range(3):
            found.look(**shown)
        assert found.look(**shown) == {*found.ledgers}
        assert (found.calls, found.answers) == (count, count), "once"
    assert found.look(starts=2) is None
    found.ledgers = ["t/0/3"]
    assert found.look(damaged=1, starts=2) == {"t/0/3"}, "what was known before is forgotten"


def test_c7_a_node_that_does_not_answer_is_left_alone_for_a_while_and_its_last_answer_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Doubts()
    assert found.look(doubts=1) == {"t/0/1", "t/0/2"}
    monkeypatch.setattr(doubts, "PAUSE_S", 600.0)
    found.error = NodeUnreachable("n", "a test")
    for _ in range(3):
        assert found.look(doubts=2) == {"t/0/1", "t/0/2"}
    assert found.calls == 2
    monkeypatch.setattr(doubts, "PAUSE_S", 0.0)
    again = Doubts()
    again.error = NodeUnreachable("n", "a test")
    assert again.look(doubts=2) is None
    again.error = None
    assert again.look(doubts=2) == {"t/0/1", "t/0/2"}


def test_c7_a_node_is_asked_again_after_a_while_although_it_shows_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry was repaired, and another one damaged."""
    monkeypatch.setattr(doubts, "AGAIN_S", 0.0)
    found = Doubts()
    found.look(damaged=1)
    found.ledgers = ["t/0/3"]
    assert found.look(damaged=1) == {"t/0/3"}


def test_c7_the_ledger_of_a_node_in_doubt_is_closed_and_the_next_one_begun_although_nobody_appends(
    cluster: SmallCluster, found: Found
) -> None:
    server = restart_in_doubt(cluster, 0)
    eventually(lambda: len(found.ledgers()) == 2, 10.0, what="the ledger of the node in doubt is still open")
    first, second = found.ledgers()
    assert (first.is_closed, first.doubted) == (True, ())
    assert server.node.id in second.named, "it takes part again"
    eventually(lambda: server.node.load.doubts == 0, 10.0, what="the doubt has not ended")
    found.send(b"b")
    assert found.values() == [b"a", b"b"]
    assert len(found.ledgers()) == 2, "once"


def damage(server: StorageServer, ledger: str, entry: int) -> None:
    """Flip a bit of an entry on the disk of a node, and have the node find it, as its scrubber does."""
    (place,) = [each for each in server.node.page(ledger, -1, 9).places if each.entry == entry]
    segments = [each for each in Path(server.node.journal.folder).glob("*.log") if int(each.stem) <= place.position]
    segment = max(segments, key=lambda each: int(each.stem))
    with segment.open("r+b") as file:
        file.seek(place.position - int(segment.stem) + header_bytes(ledger))
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    server.node.verify(ledger, entry)


def test_c7_the_ledger_of_which_a_node_finds_an_entry_damaged_is_closed_and_repaired_although_nobody_appends(
    cluster: SmallCluster, found: Found
) -> None:
    (record,), server = found.ledgers(), cluster.nodes[1]
    damage(server, record.id, 1)
    eventually(lambda: len(found.ledgers()) == 2, 10.0, what="the ledger that lacks a copy is still open")
    eventually(lambda: record_at(found.registry, record.id)[0].is_complete, 10.0, what="it is not repaired")
    assert server.node.load.damaged == 0
    assert found.values() == [b"a"]


def damage_and_wait_for_a_copy(found: Found, server: StorageServer, ledger: str) -> None:
    """Of entry 1."""
    version = record_at(found.registry, ledger)[1]
    damage(server, ledger, 1)
    eventually(lambda: server.node.load.damaged == 0, 10.0, what="the entry has got no other copy")
    eventually(lambda: record_at(found.registry, ledger)[0].is_complete, 10.0, what="the repair has not ended")
    assert record_at(found.registry, ledger)[1] > version, "the node has found no damage"
    assert [each.error for each in server.node.read(ledger, 0, 1, 1 << 20, None, heads=False)] == [None, None]


def test_c7_an_entry_that_a_node_finds_damaged_gets_a_copy_although_its_owner_knew_the_ledger_as_complete(
    cluster: SmallCluster, found: Found
) -> None:
    damage_and_wait_for_a_copy(found, cluster.nodes[1], found.with_a_closed_ledger().id)
    assert found.values() == [b"a"]


@pytest.fixture
def staged(found: Found, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The ledger of staged rows, which the broker knows as complete."""
    known, look = set[str](), StagedLedgers.look

    def noted(ledgers: StagedLedgers, now: float) -> Any:
        seen = look(ledgers, now)
        known.update(record.id for _, record in seen if record.is_complete)
        return seen

    monkeypatch.setattr(StagedLedgers, "look", noted)
    place, topic = found.broker.hub.log.staging, found.log.topic
    name = place.stage(topic, "q", 3, 0, [rows(b"a")]).name
    assert name is not None
    ledger = StagedName(topic.id, "q", 3, name).ledger().id
    eventually(lambda: ledger in known, 10.0)
    yield ledger
    place.clear(topic.id, "q", 3)


def test_c7_staged_rows_that_a_node_finds_damaged_get_a_copy_although_their_keeper_knew_them_as_complete(
    cluster: SmallCluster, found: Found, staged: str
) -> None:
    server = cluster.nodes[1]
    eventually(lambda: len(server.node.page(staged, -1, 9).places) == 2, 10.0)
    damage_and_wait_for_a_copy(found, server, staged)


def test_c7_records_are_read_again_after_a_start_of_a_node_which_may_have_lost_its_count(
    cluster: SmallCluster, found: Found
) -> None:
    """The process before has cleared a record, and has ended before it could tell that."""
    record = found.with_a_closed_ledger()
    found.registry.commit(put={record.key: replace(record, is_complete=False).dump()})
    cluster.stop_node(2)
    server = cluster.start_node(2)
    assert (server.node.is_proven, server.node.cleared) == (True, 0)
    eventually(lambda: record_at(found.registry, record.id)[0].is_complete, 10.0, what="it was not read again")


class Gate:
    """Stops a thread of the broker once, from when the block begins until it ends."""

    def __init__(self) -> None:
        self._reached, self._go = threading.Event(), threading.Event()

    def stop(self) -> None:
        """Called by that thread."""
        if not self._reached.is_set():
            self._reached.set()
            assert self._go.wait(30)

    def __enter__(self) -> None:
        assert self._reached.wait(10), "the thread does not come"

    def __exit__(self, *given: object) -> None:
        self._go.set()


def before_the_next_ledger(found: Found, monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate, begin = Gate(), OwnedPartition.begin_next

    def slowly(partition: OwnedPartition, *given: Any) -> Any:
        if partition.topic.topic.id == found.log.id:
            gate.stop()
        return begin(partition, *given)

    monkeypatch.setattr(OwnedPartition, "begin_next", slowly)
    return gate


def clear(found: Found, ledger: str) -> None:
    """As a node does that finds that it lacks an entry. Returns when `Repairs` has seen its count."""
    node = found.cluster.nodes[1].node
    record, version = record_at(found.registry, ledger)
    assert record.is_complete
    found.registry.commit({record.key: version}, {record.key: replace(record, is_complete=False).dump()})
    node.cleared += 1
    (partition,) = [each for place, each in found.broker.ownership.partitions().items() if place[0] == found.log.id]
    eventually(lambda: (count := partition.counted.get(node.id)) and count.cleared == node.cleared, 10.0)


def wait_for_a_repair(found: Found, ledger: str) -> None:
    eventually(lambda: record_at(found.registry, ledger)[0].is_complete, 10.0, what="the record was not read again")


def test_c7_a_record_that_a_node_clears_while_its_new_owner_opens_the_partition_is_read_again(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner has read the records, and does not serve the partition yet."""
    record, lease = found.with_a_closed_ledger(), found.broker.broker.membership.lease
    gate = before_the_next_ledger(found, monkeypatch)
    assert lease is not None
    lease.close()
    with gate:
        clear(found, record.id)
    wait_for_a_repair(found, record.id)


def test_c7_a_record_that_a_node_clears_while_the_next_ledger_is_begun_is_read_again(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer has closed the ledger, and it is no part of the chain yet."""
    partition, (record,) = found.partition, found.ledgers()
    writer, gate = partition._writer, before_the_next_ledger(found, monkeypatch)
    assert writer is not None
    eventually(lambda: writer.is_everywhere, 10.0)
    with partition.lock:
        partition._roll()
    with gate:
        clear(found, record.id)
    wait_for_a_repair(found, record.id)


@pytest.fixture
def repaired(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Gate]:
    """Makes a gate behind the last commit of the repair of a ledger."""
    run, gates = Repairer.run, dict[str, Gate]()

    def slowly(repairer: Repairer) -> Any:
        ended = run(repairer)
        if repairer.record.id in gates and repairer.record.is_complete:
            gates[repairer.record.id].stop()
        return ended

    monkeypatch.setattr(Repairer, "run", slowly)
    return lambda ledger: gates.setdefault(ledger, Gate())


def test_c7_a_record_that_a_node_clears_at_the_end_of_a_repair_is_read_again(
    found: Found, repaired: Callable[[str], Gate]
) -> None:
    (record,) = found.ledgers()
    gate = repaired(record.id)
    found.partition.get_stuck("a test")  # a ledger is checked after its recovery
    with gate:
        clear(found, record.id)
    wait_for_a_repair(found, record.id)


def test_c7_a_record_of_staged_rows_that_a_node_clears_at_the_end_of_a_repair_is_read_again(
    found: Found, staged: str, repaired: Callable[[str], Gate]
) -> None:
    gate = repaired(staged)
    clear(found, staged)
    with gate:
        clear(found, staged)
    wait_for_a_repair(found, staged)


def test_c8_a_ledger_is_not_ended_below_what_this_broker_has_confirmed_itself(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes have lost the last entry, and know it. None of them has heard that it was confirmed."""
    monkeypatch.setattr(tries, "RETRY_S", 0.02)
    read, (record,) = NodeLink.read, found.ledgers()

    def forgetful(link: NodeLink, ledger: str, *given: Any, **named: Any) -> list[EntryRead]:
        answers = read(link, ledger, *given, **named)
        if ledger != record.id:
            return answers
        return [EntryRead(each.entry, None, is_unknown=True) if each.entry else each for each in answers]

    with monkeypatch.context() as patch:
        patch.setattr(NodeLink, "read", forgetful)
        found.partition.get_stuck("a test")
        eventually(
            lambda: found.ledgers()[0].is_closed or "none of its storage nodes has an" in str(found.partition.why_not),
            what=lambda: found.partition.why_not,
        )
        assert not found.ledgers()[0].is_closed, "below an entry that was acknowledged"
    eventually(lambda: found.partition.why_not is None, what=lambda: found.partition.why_not)
    assert found.values() == [b"a"]
