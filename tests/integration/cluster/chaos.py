"""A cluster of real processes under load, faults in it, and the judgement of everything that its clients have seen.

Producers, the members of a group and readers run in processes of their own and write journals. Each fault is begun,
the clients go on in spite of it, and it is ended. At the end every message is accounted for.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pxrs
from pxrs.cluster import records
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.cluster.links import LinkSettings, NodeLink
from pxrs.cluster.records import NodeRecord
from pxrs.hashing import hash_named
from pxrs.registry.contract import Registry
from pxrs.testing.accounting import Account, Worker, account, checkpoints, members, read_journals, redone_without_loss
from pxrs.testing.cluster_processes import ClusterProcesses
from pxrs.testing.servers import EtcdCluster, ServerFailed
from tests.acceptance.noted_producer import Acknowledged, NotedProducer
from tests.integration.cluster.watching_reader import Watched, WatchingReader, watched

IS_SOAK = bool(os.environ.get("PXRS_SOAK"))
PARTITIONS = 8 if IS_SOAK else 4
PRODUCERS = 2 if IS_SOAK else 1
"""Each is a process that sends on two threads."""
PAUSE_S = 0.05 if IS_SOAK else 0.2
"""Of a producer between two appends: so that the group keeps up."""
AWAY_S_MAX = 3.0 if IS_SOAK else 1.0
"""Maximum time for which a broker is cut off from its clients, or silent."""
MEMBER_TTL_S = 10.0
PATIENCE_S = 60.0
WRITTEN_BYTES = 400 if IS_SOAK else 200
"""How much each client writes into its journal between two events."""
SEGMENT_BYTES = 1 << 16 if IS_SOAK else 1 << 14
"""A ledger of this size is followed by the next one: several times in a run."""

Heal = Callable[[], object]


class ClusterChaos(ExitStack):
    """The clients and the faults. What was started is ended with it."""

    def __init__(
        self, folder: Path, cluster: ClusterProcesses, registry: Registry, etcd: EtcdCluster | None, lease_s: float
    ) -> None:
        """registry: a handle of its own, which no fault touches. lease_s: of the brokers."""
        super().__init__()
        self.folder, self.cluster, self.registry, self.etcd, self.lease_s = folder, cluster, registry, etcd, lease_s
        self.seed = int(os.environ.get("SEED", time.time_ns() % 1_000_000))
        self.random = random.Random(self.seed)
        self.hub = self.enter_context(pxrs.open(cluster.url))
        self.topic = self.hub.create_topic("t", partitions=PARTITIONS, segment_bytes=SEGMENT_BYTES)
        self.faults: Counter[str] = Counter()
        self.gaps: list[tuple[float, str]] = []

    def start_clients(self) -> None:
        url = self.cluster.url
        self.producers = [
            self.enter_context(NotedProducer(url, "t", f"producer{number}", self.folder, PAUSE_S))
            for number in range(PRODUCERS)
        ]
        self.workers = [
            self.enter_context(Worker(url, "-", "t", "g", f"member{number}", self.folder, MEMBER_TTL_S))
            for number in range(2)
        ]
        self.readers = [
            self.enter_context(WatchingReader(url, "t", f"reader{number}", self.folder, self.seed))
            for number in range(1)
        ]
        names = {worker.name for worker in self.workers}
        self.eventually(lambda: names <= members(self.registry, "g"), "the members do not join")

    @property
    def _clients(self) -> Sequence[NotedProducer | Worker | WatchingReader]:
        return [*self.producers, *self.workers, *self.readers]

    # Events.

    def go_on(self, why: str) -> None:
        """Until every client has done more."""
        began, before = time.monotonic(), self._written()

        def has_gone_on() -> bool:
            self.check_running()
            return all(now > then + WRITTEN_BYTES for now, then in zip(self._written(), before, strict=True))

        self.eventually(has_gone_on, lambda: f"{why}: somebody does nothing: {before}, now {self._written()}")
        self.gaps.append((round(time.monotonic() - began, 2), why))

    def _written(self) -> list[int]:
        handled = sum(_size(worker.journal) for worker in self.workers)  # one may have all partitions
        return [*(producer.written for producer in self.producers), handled, *(_size(r.journal) for r in self.readers)]

    def disturb(self, kinds: Sequence[str]) -> None:
        """Begin these faults, let the clients go on, and end them."""
        self.faults.update(kinds)
        heals = [getattr(self, f"_{kind}")() for kind in kinds]
        self.go_on(" and ".join(kinds))
        for heal in heals:
            heal()
        self.check_processes()

    def check_processes(self) -> None:
        """Every process serves and is registered, also those that a fault has started without waiting for them."""
        try:
            self.cluster.wait_until_whole(self.registry, PATIENCE_S)
        except ServerFailed as error:
            raise AssertionError(self.tell(str(error))) from error

    def _broker_restarted(self) -> Heal:
        broker = self.random.choice(self.cluster.brokers).process
        broker.kill()
        broker.start(wait=False)  # `check_processes` waits
        return _nothing

    def _broker_killed(self) -> Heal:
        broker = self.random.choice(self.cluster.brokers).process
        broker.kill()
        return lambda: broker.start()

    def _broker_paused(self) -> Heal:
        """For longer than its lease: when it goes on, it still believes to own its partitions."""
        broker = self.random.choice(self.cluster.brokers).process
        broker.pause()
        return broker.resume

    def _broker_cut(self) -> Heal:
        """Clients and other brokers do not reach it; it keeps its lease, and its partitions."""
        proxy = self.random.choice(self.cluster.brokers).proxy
        self.random.choice([proxy.cut, proxy.reset_connections, lambda: proxy.drop_replies(0.0)])()
        time.sleep(self.random.uniform(0.1, AWAY_S_MAX))  # how long it is away
        proxy.restore()
        return _nothing

    def _broker_silent(self) -> Heal:
        proxy = self.random.choice(self.cluster.brokers).proxy
        proxy.stall()
        time.sleep(self.random.uniform(0.1, AWAY_S_MAX))
        if self.random.random() < 0.5:
            proxy.cut()  # what was held back is lost
        proxy.restore()
        return _nothing

    def _broker_without_registry(self) -> Heal:
        """It loses its lease, and clients still reach it."""
        proxies = self.random.choice(self.cluster.brokers).registry
        is_cut = self.random.random() < 0.5
        for proxy in proxies:
            proxy.cut() if is_cut else proxy.stall()

        def heal() -> None:
            for proxy in proxies:
                proxy.restore()

        time.sleep(self.lease_s if proxies else 0.0)
        return heal

    def _node_restarted(self) -> Heal:
        node = self.random.choice(self.cluster.nodes).process
        node.kill()
        node.start(wait=False)  # `check_processes` waits
        return _nothing

    def _node_killed(self) -> Heal:
        node = self.random.choice(self.cluster.nodes).process
        node.kill()
        return lambda: node.start()

    def _node_paused(self) -> Heal:
        node = self.random.choice(self.cluster.nodes).process
        node.pause()
        return node.resume

    def _node_silent(self) -> Heal:
        proxy = self.random.choice(self.cluster.nodes).proxy
        self.random.choice([proxy.stall, proxy.drop_replies, proxy.hold_requests, proxy.cut])()
        if self.random.random() < 0.5:
            return proxy.restore

        def heal() -> None:
            proxy.cut()
            proxy.restore()

        return heal

    def _quorum_lost(self) -> Heal:
        """Two nodes hang for less than their timeout, so that a third one alone has the newest entries of some ledgers.
        Then that one and a broker are killed, and the two go on: nothing of that may have been acknowledged."""
        first, second, third = (node.process for node in self.random.sample(self.cluster.nodes, 3))
        broker = self.random.choice(self.cluster.brokers).process
        first.pause()
        second.pause()
        time.sleep(0.3)  # producers send meanwhile
        broker.kill()
        third.kill()
        first.resume()
        second.resume()

        def heal() -> None:
            third.start()
            broker.start()

        return heal

    def _registry_paused(self) -> Heal:
        """The leader of etcd's members. In this version of etcd a member that is killed under load and started again
        may come to differ from the others (`EtcdServer`), so it is stopped and resumed instead."""
        if self.etcd is None:
            return _nothing
        member = self.etcd.nodes[self.etcd.leader()]
        member.pause()
        return member.resume

    def _registry_killed(self) -> Heal:
        """One member, for good: see `_registry_paused`."""
        if self.etcd is None:
            return _nothing
        self.etcd.nodes[self.etcd.leader()].kill()
        return _nothing

    # The end.

    def finish(self) -> None:
        """Let every client finish what there is, and end them all."""
        for producer in self.producers:
            producer.process.send_signal(signal.SIGTERM)
        codes = [producer.process.wait(PATIENCE_S) for producer in self.producers]
        assert codes == [0] * len(codes), self.tell(f"producers ended with {codes}")
        ends = [self.topic.end(partition) for partition in range(PARTITIONS)]

        def reached() -> list[int]:
            self.check_running(self.workers)
            return checkpoints(self.registry, "g", self.topic.id)

        self.eventually(lambda: reached() == ends, lambda: f"{reached()} of {ends}")
        codes = [worker.end(PATIENCE_S) for worker in self.workers]
        assert codes == [0] * len(codes), self.tell(f"members ended with {codes}")
        for reader in self.readers:
            reader.process.send_signal(signal.SIGTERM)
        codes = [reader.process.wait(PATIENCE_S) for reader in self.readers]
        assert codes == [0] * len(codes), self.tell(f"readers ended with {codes}")

    def check_topic(self) -> int:
        """Every acknowledged message is where its receipt said, and nothing else is there; those of each key are in the
        order in which they were sent. How many there are."""
        told = [each for producer in self.producers for each in producer.read()]
        self._stored = {
            Acknowledged(each.key or b"", each.value or b"", partition, each.offset)
            for partition in range(PARTITIONS)
            for each in self.topic.messages(partition)
        }
        missing, more = set(told) - self._stored, self._stored - set(told)
        assert not missing, self.tell(f"{len(missing)} acknowledged messages are not there: {sorted(missing)[:5]}")
        assert not more, self.tell(f"{len(more)} messages are there that were not sent or twice: {sorted(more)[:5]}")
        assert len(told) == len({each.value for each in told}), self.tell("messages were acknowledged twice")
        hash_of, last = hash_named(self.topic.topic.partitioner), Counter[bytes]()
        for each in told:
            assert each.partition == hash_of(each.key) % PARTITIONS, self.tell(f"in another partition: {each}")
            assert each.offset >= last[each.key], self.tell(f"out of order: {each}")
            last[each.key] = each.offset + 1
        return len(told)

    def check_group(self, count: int) -> Account:
        """Nothing lost or out of order; a message was handled twice only if its first owner has lost its lease."""
        ends = {partition: self.topic.end(partition) for partition in range(PARTITIONS)}
        ownerships = read_journals(worker.journal for worker in self.workers)
        found = account(ownerships, ends)
        # `late`: a handler that runs at the end of the lease goes on (G8). One for each loss.
        assert found == Account(count, 0, 0, found.redone, 0, found.late, found.ownerships), self.tell(f"{found}")
        assert found.late <= sum(each.is_lost for each in ownerships), self.tell(f"{found}")
        unjust = redone_without_loss(ownerships)
        assert unjust == 0, self.tell(f"{unjust} messages were handled again though nobody had lost them: {found}")
        return found

    def check_reads(self) -> Watched:
        """No end went back, and what was read once is what is stored."""
        found = watched(reader.journal for reader in self.readers)
        assert not found.wrong, self.tell(f"{len(found.wrong)} reads are wrong: {found.wrong[:5]}")
        stored = {(each.partition, each.offset): (each.key, each.value) for each in self._stored}
        vanished = {place: message for place, message in found.messages.items() if stored.get(place) != message}
        assert not vanished, self.tell(f"{len(vanished)} messages were read and are not stored: {list(vanished)[:5]}")
        return found

    def check_running(self, clients: Sequence[NotedProducer | Worker | WatchingReader] | None = None) -> None:
        ended = {each.name: each.process.poll() for each in clients or self._clients if each.process.poll() is not None}
        assert not ended, self.tell(f"ended: {ended}")

    def eventually(self, check: Callable[[], bool], tell: str | Callable[[], str]) -> None:
        began = time.monotonic()
        while not check():
            waited_s = time.monotonic() - began
            assert waited_s < PATIENCE_S, self.tell(tell if isinstance(tell, str) else tell())
            time.sleep(min(0.02 + waited_s / 10, 0.2))  # some checks read all of the registry

    def tell(self, what: str) -> str:
        files = [each.errors for each in self._clients]
        errors = "".join(f"{file.stem}: {text[-3000:]}\n" for file in files if (text := file.read_text()))
        return f"SEED={self.seed}: {what}\n{dict(self.faults)}\n{errors}\n{self.cluster.logs()}"


def missing_copies(registry: Registry) -> list[str]:
    """The entries of which the nodes that the records name have fewer than `write_quorum` copies, by the nodes' own
    indexes. Every node must be running: one that does not answer within `PATIENCE_S` raises NodeUnreachable."""
    addresses = {
        entry.key.removeprefix(records.NODES): NodeRecord.parse(entry.key, entry.value).address
        for entry in registry.scan(records.NODES)
    }
    missing = []
    with ExitStack() as stack:
        links = {}
        for node, address in addresses.items():
            # A node that was just resumed, on a busy machine, may take as long as anything else here.
            links[node] = NodeLink(node, address, LinkSettings(timeout_s=PATIENCE_S))
            stack.callback(links[node].close)
        for entry in registry.scan(records.LEDGERS):
            record = LedgerRecord.parse(entry.key, entry.value)
            held: dict[str, set[int]] = {}
            for node in record.named:
                held[node] = {number for number, _ in links[node].index(record.id).entries}
            last = record.last if record.last is not None else max(max(each, default=-1) for each in held.values())
            for number in range(last + 1):
                nodes = [node for _, node in record.nodes_of(number)]
                count = sum(node is not None and number in held[node] for node in nodes)
                if count < record.quorum.write_quorum:
                    missing.append(f"{record.id} entry {number}: {count} copies, {nodes}")
    return missing


def _size(journal: Path) -> int:
    return journal.stat().st_size if journal.exists() else 0


def _nothing() -> None:
    pass
