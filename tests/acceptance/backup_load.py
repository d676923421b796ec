"""A hub under full load, with an account of what must be in every backup of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pxrs
from pxrs import Hub
from pxrs.queue.records import Record
from pxrs.testing.waiting import eventually

PARTITIONS = 3
OUTSTANDING_MAX = 20
"""How many jobs may be under way: a queue that grows without bound makes every round longer."""
SEGMENT_BYTES = 20_000
QUEUES = ("new", "middle", "done")


class Load:
    """Threads that use a hub in every way, until `stop`.

    orders   a topic that keeps everything; `acknowledged` has what its producers were told is stored
    trail    a topic with retention and `keep_unread`, which the group `followers` reads, and upkeep that removes
    copies   a queue into which the group `copiers` puts each message of `orders`, with its checkpoint in one commit
    new, middle, done    queues through which jobs move, each by one commit
    """

    def __init__(self, path: Path, registry: str | None) -> None:
        self.path, self.registry = path, registry
        self.acknowledged: list[bytes] = []
        self.jobs: list[bytes] = []
        """The jobs that were put, and acknowledged."""
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        with self.open() as hub:
            hub.create_topic("orders", partitions=PARTITIONS, segment_bytes=SEGMENT_BYTES)
            hub.create_topic(
                "trail", partitions=2, segment_bytes=SEGMENT_BYTES, retention_bytes=2 * SEGMENT_BYTES, keep_unread=True
            )
            for queue in ("copies", *QUEUES):
                hub.create_queue(queue)

    def open(self) -> Hub:
        return pxrs.open(self.path, self.registry)

    def start(self) -> None:
        works: list[Callable[[Hub], None]] = [
            *(lambda hub, n=n: self._produce(hub, n) for n in range(2)),  # type: ignore[misc]
            *(lambda hub: self._follow(hub) for _ in range(2)),
            self._trail,
            self._copy,
            self._put,
            lambda hub: self._move(hub, "new", "middle"),
            lambda hub: self._move(hub, "middle", "done"),
            self._clean,
        ]
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in works]
        for thread in self._threads:
            thread.start()

    def await_work(self) -> None:
        """Return when every thread has done something: groups have checkpoints, jobs are done, retention removes."""
        with self.open() as hub:
            eventually(lambda: self.errors or {"copiers", "followers"} <= set(hub.groups()))
            eventually(lambda: self.errors or (hub.queue("copies").depth().ready and hub.queue("done").depth().ready))
            eventually(lambda: self.errors or hub.topic("trail").bounds([0])[0].start)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        if self.errors:
            raise self.errors[0]

    def _run(self, work: Callable[[Hub], None]) -> None:
        try:
            with self.open() as hub:
                work(hub)
        except BaseException as error:  # noqa: BLE001 - raised by `stop`
            self.errors.append(error)

    def _until_stopped(self) -> Any:
        return iter(lambda: self._stop.is_set(), True)

    def _produce(self, hub: Hub, number: int) -> None:
        with hub.producer("orders") as producer:
            for count, _ in enumerate(self._until_stopped()):
                values = [b"%d-%d-%d" % (number, count, n) for n in range(20)]
                for value in values:
                    producer.send(value, key=value)
                producer.flush()
                self.acknowledged += values  # one statement: a reader of the list sees none or all
                self._stop.wait(0.02)

    def _trail(self, hub: Hub) -> None:
        with hub.producer("trail") as producer:
            for _ in self._until_stopped():
                for _ in range(20):
                    producer.send(b"x" * 100)
                producer.flush()
                self._stop.wait(0.02)

    def _follow(self, hub: Hub) -> None:
        with hub.consumer("trail", group="followers", start="earliest", commit_interval=0.05) as consumer:
            for _ in self._until_stopped():
                consumer.poll(timeout=0.1)

    def _copy(self, hub: Hub) -> None:
        with hub.consumer("orders", group="copiers", start="earliest") as consumer:
            for _ in self._until_stopped():
                messages = consumer.poll(timeout=0.1, max_messages=10)
                if messages:
                    with hub.transaction() as tx:
                        for message in messages:
                            tx.put("copies", b"%d/%d" % (message.partition, message.offset))
                        tx.checkpoint(consumer)
                self._stop.wait(0.03)

    def _put(self, hub: Hub) -> None:
        queue, done = hub.queue("new"), hub.queue("done")
        for count, _ in enumerate(self._until_stopped()):
            value = b"job-%d" % count
            queue.put(value)
            self.jobs.append(value)
            while count % 10 == 0 and count - done.depth().ready > OUTSTANDING_MAX and not self._stop.wait(0.01):
                continue

    def _move(self, hub: Hub, source: str, target: str) -> None:
        for _ in self._until_stopped():
            with hub.transaction() as tx:
                items = tx.take_many(source, 4, timeout=0.1)
                for item in items:
                    tx.put(target, item.value)

    def _clean(self, hub: Hub) -> None:
        while not self._stop.wait(0.05):
            hub.run_upkeep()


class Restored:
    """What is true of a hub that was restored from a backup of such a load."""

    def __init__(self, path: Path, registry: str | None) -> None:
        self.path, self.registry = path, registry

    def verify(self, acknowledged: list[bytes], jobs: list[bytes]) -> None:
        """acknowledged, jobs: those of the load when the backup began."""
        with pxrs.open(self.path, self.registry) as hub:
            self._verify_log(hub, acknowledged)
            self._verify_copies(hub)
            self._verify_jobs(hub, jobs)
            self._verify_followers(hub)

    def _verify_log(self, hub: Hub, acknowledged: list[bytes]) -> None:
        topic = hub.topic("orders")
        found = Counter(message.value for number in range(PARTITIONS) for message in topic.messages(number))
        assert not set(acknowledged) - found.keys(), "messages that were acknowledged before the backup began are gone"
        assert max(found.values(), default=1) == 1, "messages are there twice"
        with hub.producer("orders") as producer:
            producer.send(b"after the restoration", key=b"k")

    def _verify_copies(self, hub: Hub) -> None:
        """The group and the queue are of one moment: each message before a checkpoint is an item, and no other one."""
        ends = {each.partition: each.checkpoint or 0 for each in hub.group("copiers").describe().partitions}
        for number, end in ends.items():
            assert end <= hub.topic("orders").end(number), "a checkpoint is beyond the end of the log"
        expected = Counter(b"%d/%d" % (number, offset) for number, end in ends.items() for offset in range(end))
        assert Counter(values_of(hub, "copies")) == expected

    def _verify_jobs(self, hub: Hub, jobs: list[bytes]) -> None:
        """The queues go on: items in flight come back, and each job is done once."""
        for source, target in (("new", "middle"), ("middle", "done")):
            while total(hub, source):
                with hub.transaction() as tx:
                    for item in tx.take_many(source, 50, timeout=5):
                        tx.put(target, item.value)
        done = Counter(values_of(hub, "done"))
        assert not set(jobs) - done.keys(), "jobs are lost"
        assert max(done.values(), default=1) == 1, "jobs are there twice"

    def _verify_followers(self, hub: Hub) -> None:
        """The group goes on at its checkpoints, and retention has removed nothing that it has not read."""
        described = {each.partition: each for each in hub.group("followers").describe().partitions}
        topic = hub.topic("trail")
        expected = set()
        for number, each in described.items():
            bounds = topic.bounds([number])[number]
            assert each.checkpoint is not None
            assert bounds.start <= each.checkpoint <= bounds.end, f"{number}: {each.checkpoint} in {bounds}"
            expected |= {(number, offset) for offset in range(each.checkpoint, bounds.end)}
        read = []
        with hub.consumer("trail", group="followers") as consumer:
            while len(read) < len(expected):
                messages = consumer.poll(timeout=20)
                assert messages, f"{len(read)} of {len(expected)} messages came"
                read += [(message.partition, message.offset) for message in messages]
                assert all(message.epoch > 1_000_000 for message in messages)
        assert Counter(read) == Counter(expected)


def values_of(hub: Hub, queue: str) -> list[bytes]:
    """The values of all items of a queue that are ready."""
    ready = hub.queue(queue).depth().ready
    assert ready == total(hub, queue)
    folder = hub.queue(queue).settings.ready
    return [Record.load(entry.key, entry.value).value for entry in hub.registry.scan(folder)]  # `peek` has a limit


def total(hub: Hub, queue: str) -> int:
    """How many items a queue has in any state."""
    found = hub.queue(queue).depth()
    return found.ready + found.delayed + found.in_flight + found.dead
