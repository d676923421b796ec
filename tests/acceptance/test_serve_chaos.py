"""`pxrs serve` killed under load, and a network that cuts, delays and loses what its clients send: the accounts of
producers, of a consumer group and of work queues stay exact."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs.hashing import hash_named
from pxrs.testing.accounting import (
    Account,
    Worker,
    account,
    checkpoints,
    members,
    read_journals,
    redone_without_loss,
)
from pxrs.testing.proxy import Proxy
from pxrs.testing.queue_worker import DONE, LOG
from pxrs.testing.servers import EtcdServer, HubServer, PostgresServer, ZooKeeperServer
from pxrs.testing.waiting import aside
from tests.acceptance.noted_producer import Acknowledged, NotedProducer
from tests.acceptance.queue_chaos import Load, QueueChaos, check_jobs, check_log, create_queues, given_up, values

pytestmark = pytest.mark.sampled(2, of="module")

IS_SOAK = bool(os.environ.get("PXRS_SOAK"))
KILLS = 20 if IS_SOAK else 5
DRAINS = 6 if IS_SOAK else 2
PARTITIONS = 8
PAUSE_S = 0.05
"""Of a producer between two appends: so that the group keeps up."""
TTL_S = 2.0
"""A lease that is lost when the network is away for a while."""
LONG_TTL_S = 60.0
"""A lease that no restart of the server outlasts."""
PATIENCE_S = 30.0
KILLS_A_LOSS = 5
"""One of so many kills comes while the network is away for longer than TTL_S."""
WRITTEN_BYTES = 400
"""How much each kind of client writes into its journals between two events."""
REGISTRIES = ("file", "postgresql", "etcd", "zookeeper") if IS_SOAK else ("file",)


@pytest.fixture(params=REGISTRIES)
def registry(request: pytest.FixtureRequest) -> Iterator[str]:
    with ExitStack() as stack:
        match request.param:
            case "postgresql":
                yield stack.enter_context(PostgresServer()).url
            case "etcd":
                yield stack.enter_context(EtcdServer()).url
            case "zookeeper":
                yield stack.enter_context(ZooKeeperServer()).url
            case _:
                yield "-"


class ServedChaos(ExitStack):
    """A server, a proxy in front of it, and clients: of each kind, the even ones are connected to the server, and the
    odd ones to the proxy. What was started is ended with it."""

    def __init__(self, folder: Path, registry: str, ttl: float) -> None:
        """ttl: the lease of the members behind the proxy."""
        super().__init__()
        self.ttl = ttl
        self.seed = int(os.environ.get("SEED", time.time_ns() % 1_000_000))
        self.random = random.Random(self.seed)
        given = None if registry == "-" else registry
        self.server = self.enter_context(HubServer(folder / "data", given, forked=True))
        self.proxy = self.enter_context(Proxy(self.server.host, self.server.port))
        self.folder = folder
        self.urls = [self.server.url, f"pxrs://{self.proxy.host}:{self.proxy.port}"]
        self.queues = self.enter_context(
            QueueChaos(folder, registry, ["coins", "jobs", "numbers"], TTL_S, urls=self.urls)
        )
        self.queues.seed, self.queues.random = self.seed, self.random
        self.hub = self.queues.hub
        """Opened without the server: its calls are no part of what is tried."""
        self.topic = self.hub.create_topic("t", partitions=PARTITIONS)
        create_queues(self.hub)
        self.load = Load(self.queues)
        self.faults: Counter[str] = Counter()

    def start_clients(self) -> None:
        self.producers = [
            self.enter_context(NotedProducer(url, "t", f"producer{number}", self.folder, PAUSE_S))
            for number, url in enumerate(self.urls)
        ]
        self.workers = [self._worker(number) for number in range(4)]
        self.queues.fill_up()
        names = {worker.name for worker in self.workers}
        self.eventually(lambda: names <= self._members(), "the members do not join")

    def _worker(self, number: int) -> Worker:
        is_direct = number % 2 == 0
        url, ttl = self.urls[number % 2], LONG_TTL_S if is_direct else self.ttl
        return self.enter_context(Worker(url, "-", "t", "g", f"member{number}", self.folder, ttl))

    def _members(self) -> set[str]:
        return members(self.hub.registry, "g")

    # Events.

    def go_on(self) -> None:
        """Until producers, members and queue workers have done more. Those that are connected directly can at any time
        at which the server is there."""
        self.load()
        before = self._written()

        def has_gone_on() -> bool:
            self.check_running([*self.producers, *self.workers])
            self.queues.fill_up()
            return all(now > then + WRITTEN_BYTES for now, then in zip(self._written(), before, strict=True))

        self.eventually(has_gone_on, lambda: f"somebody does nothing: {before}, now {self._written()}")

    def _written(self) -> tuple[int, int, int]:
        journals = [worker.journal for worker in self.workers[::2]]
        handled = sum(journal.stat().st_size for journal in journals if journal.exists())
        return self.producers[0].written, handled, self.queues.written()

    def disturb(self, *, is_long: bool) -> None:
        """Kill the server and start it again, and have a fault of the network before, during or after that.

        is_long: the network is away until the members behind the proxy have lost their leases."""
        fault = "black hole" if is_long else self.random.choice(["cut", "delay", "black hole", "lost replies"])
        self.faults[fault] += 1
        kill_at = self.random.choice(["before", "during", "after"])
        if kill_at == "before":
            self._kill()
        match fault:
            case "cut":
                self.proxy.cut()
            case "lost replies":
                self.proxy.drop_replies(close_after=self.random.choice([0.0, 0.2]))
            case _:
                self.proxy.stall()
        if kill_at == "during":
            self._kill()
        self.go_on()
        if is_long:
            behind = {worker.name for worker in self.workers[1::2]}
            self.eventually(lambda: not behind & self._members(), "members that nobody hears of keep their leases")
        if fault == "black hole":
            self.proxy.cut()  # what was held back is lost
        self.proxy.restore()
        if kill_at == "after":
            self.go_on()
            self._kill()

    def _kill(self) -> None:
        self.server.kill()
        if self.random.random() < 0.3:
            time.sleep(self.random.uniform(0.0, 0.5))  # how long it is away
        self.server.start(wait=False)

    def drain(self) -> None:
        """Stop the server in its orderly way, and start it again."""
        process = self.server._running()
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE_S)
        assert code == 0, self.tell(f"the server ended with {code}")
        self.server.start(wait=False)

    # The end.

    def finish(self) -> None:
        """Let everybody finish what there is, and end them all."""
        self.server.wait_until_ready()
        for producer in self.producers:
            producer.process.send_signal(signal.SIGTERM)
        codes = [producer.process.wait(PATIENCE_S) for producer in self.producers]
        assert codes == [0] * len(codes), self.tell(f"producers ended with {codes}")
        ends = [self.topic.end(partition) for partition in range(PARTITIONS)]

        def reached() -> list[int]:
            self.check_running(self.workers)
            return checkpoints(self.hub.registry, "g", self.topic.id)

        self.eventually(lambda: reached() == ends, lambda: f"{reached()} of {ends}")
        codes = [worker.end() for worker in self.workers]
        assert codes == [0] * len(codes), self.tell(f"members ended with {codes}")
        self.queues.calm_down(
            lambda: (
                len(values(self.hub, DONE)) + len(given_up(self.hub)) >= len(self.load.jobs)
                and len(values(self.hub, LOG)) >= self.load.numbers
            ),
            lambda: f"not worked off: {[(queue.name, queue.depth()) for queue in self.hub.queues()]}",
        )
        self.queues.end()

    def check_topic(self) -> int:
        """Every acknowledged message is where its receipt said, and nothing else is there; those of each key are in the
        order in which they were sent. How many there are."""
        told = [each for producer in self.producers for each in producer.read()]
        found = {
            Acknowledged(each.key or b"", each.value or b"", partition, each.offset)
            for partition in range(PARTITIONS)
            for each in self.topic.messages(partition)
        }
        missing, more = set(told) - found, found - set(told)
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

    def check_queues(self) -> int:
        """Each item was committed once, or is dead; how many were delivered."""
        self.queues.check_nothing_is_held()
        self.queues.check_coins()
        self.queues.check_losses()
        deliveries = self.queues.check_deliveries()
        check_jobs(self.queues, self.load.jobs, deliveries)
        check_log(self.queues, self.load.numbers)
        return len(deliveries)

    def check_running(self, clients: Sequence[NotedProducer | Worker]) -> None:
        ended = {each.name: each.process.poll() for each in clients if each.process.poll() is not None}
        assert not ended, self.tell(f"ended: {ended}")

    def eventually(self, check: Callable[[], bool], tell: str | Callable[[], str]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not check():
            assert time.monotonic() < until, self.tell(tell if isinstance(tell, str) else tell())
            time.sleep(0.02)

    def tell(self, what: str) -> str:
        files = [each.errors for each in (*self.producers, *self.workers)]
        errors = "".join(f"{file.stem}: {text[-3000:]}\n" for file in files if (text := file.read_text()))
        return f"{self.queues.tell(what)}\n{errors}\nserver: {self.server.log_tail()}"


def test_w1_w2_kills_of_the_server_and_faults_of_the_network_leave_exact_accounts(
    registry: str, tmp_path: Path
) -> None:
    with ServedChaos(tmp_path, registry, TTL_S) as chaos:
        began = time.monotonic()
        chaos.start_clients()
        started = time.monotonic()
        for number in range(KILLS):
            chaos.go_on()
            chaos.disturb(is_long=number % KILLS_A_LOSS == 2)
        went_on = time.monotonic()
        chaos.finish()
        finished = time.monotonic()
        count = chaos.check_topic()
        found = chaos.check_group(count)
        deliveries = chaos.check_queues()
        assert "Traceback" not in (chaos.server.directory / "log").read_text(), chaos.tell("the server has failed")
        print(  # noqa: T201
            f"serve SEED={chaos.seed}: {KILLS} kills, {dict(chaos.faults)}; {found}; {deliveries} deliveries; "
            f"{started - began:.1f} s, {went_on - started:.1f} s, {finished - went_on:.1f} s, "
            f"{time.monotonic() - finished:.1f} s"
        )


def move_items(url: str, stop: threading.Event) -> int:
    """Move an item between two queues, again and again, with no handling of errors; how often."""
    count = 0
    with pxrs.open(url, lease_ttl=LONG_TTL_S) as hub:
        while not stop.is_set():
            for source, target in (("here", "there"), ("there", "here")):
                with hub.transaction() as transaction:
                    item = transaction.take(source, timeout=1.0)
                    if item is not None:
                        transaction.put(target, item.value)
                        count += 1
    return count


def test_w1_a_drained_server_answers_what_is_under_way_and_its_clients_come_back_by_themselves(tmp_path: Path) -> None:
    """Producers, members and a program that moves items handle no error; any error ends them."""
    with ServedChaos(tmp_path, "-", LONG_TTL_S) as chaos:
        for name in ("here", "there"):
            chaos.hub.create_queue(name)
        chaos.hub.queue("here").put("item")
        chaos.start_clients()
        stop = threading.Event()
        chaos.callback(stop.set)  # before the server ends, should the test fail
        moving = aside(lambda: move_items(chaos.server.url, stop))
        for _ in range(DRAINS):
            chaos.go_on()
            assert not moving.done(), moving.result()
            chaos.drain()
        chaos.go_on()
        stop.set()
        moved = moving.result(PATIENCE_S)
        depths = [chaos.hub.queue(name).depth().ready for name in ("here", "there")]
        assert sum(depths) == 1, chaos.tell(f"the item is there {depths} times")
        chaos.finish()
        found = chaos.check_group(chaos.check_topic())
        lost = [each for each in read_journals(worker.journal for worker in chaos.workers) if each.is_lost]
        assert not lost, chaos.tell(f"partitions were lost: {lost}")
        assert found.redone == 0, chaos.tell(f"{found}")
        chaos.check_queues()
        assert "Traceback" not in (chaos.server.directory / "log").read_text(), chaos.tell("the server has failed")
        print(f"drain SEED={chaos.seed}: {DRAINS} restarts, {found}, {moved} items moved")  # noqa: T201
