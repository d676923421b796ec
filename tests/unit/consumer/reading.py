"""What the tests of a consumer share: calls on one reading thread, topics, and what the registry holds of a group.

Whatever may block runs under `in_time`, so that a consumer that hangs is a failure.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa
import pytest

from pxrs.consumer.consumer import Consumer
from pxrs.group.admin import GroupHandle
from pxrs.group.records import Checkpoint, Keys, Member, Owner, Paused, Target
from pxrs.hub import Hub
from pxrs.log.batch import Batch
from pxrs.model import Message
from pxrs.testing.waiting import eventually

BOUND_S = 30.0
SOON_S = 0.02
T = TypeVar("T")


class Reader:
    """One thread for all calls of a test: a loop and what `poll` returned are for the thread that began them."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            call, future = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised in `result`
                future.set_exception(error)
            del call, future

    def begin(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def result(self, call: Callable[[], T], bound: float) -> T:
        if threading.current_thread() is self._thread:
            return call()
        future = self.begin(call)
        try:
            return future.result(bound)
        except TimeoutError:
            assert future.done(), "it has not returned in time"
            raise


_reader = Reader()


def new_reader() -> None:
    """Start the thread on which `in_time` and `begin` make their calls from now on."""
    global _reader
    _reader = Reader()


def begin(call: Callable[[], T]) -> Future[T]:
    """Make the call on the test's one reading thread, and return before it does."""
    return _reader.begin(call)


def in_time(call: Callable[[], T], bound: float = BOUND_S) -> T:
    """Make the call on the test's one reading thread, and fail if it does not return in time."""
    return _reader.result(call, bound)


def take(messages: Iterator[T], count: int) -> list[T]:
    return in_time(lambda: [next(messages) for _ in range(count)])


def send(hub: Hub, counts: dict[int, int], topic: str = "t", size: int = 0) -> None:
    """So many messages to each partition; the value of each is its offset, with zeros up to the size."""
    rows = [
        (partition, str(hub.topic(topic).end(partition) + at).zfill(size).encode())
        for partition, count in counts.items()
        for at in range(count)
    ]
    partitions, values = [row[0] for row in rows], [row[1] for row in rows]
    with hub.producer(topic) as out:
        out.send_batch(pa.table({"value": values, "partition": pa.array(partitions, pa.int32())}))


def create(hub: Hub, partitions: int = 1, count: int = 0, topic: str = "t", **options: Any) -> None:
    """A topic, with so many messages in each partition."""
    hub.create_topic(topic, partitions=partitions, **options)
    if count:
        send(hub, dict.fromkeys(range(partitions), count), topic)


def checkpoint(hub: Hub, partition: int = 0, group: str = "g", topic: str = "t") -> int | None:
    entry = hub.registry.get(Keys(group).checkpoint(hub.topic(topic).id, partition))
    return None if entry is None else Checkpoint.load(entry.key, entry.value).offset


def owner(hub: Hub, partition: int = 0, group: str = "g") -> Owner:
    entry = hub.registry.get(Keys(group).owner(hub.topic("t").id, partition))
    return Owner(None, 0) if entry is None else Owner.load(entry.key, entry.value)


def paused(hub: Hub, partition: int = 0, group: str = "g") -> Paused | None:
    entry = hub.registry.get(Keys(group).pause(hub.topic("t").id, partition))
    return None if entry is None else Paused.load(entry.key, entry.value)


def members(hub: Hub, group: str = "g") -> list[str]:
    return [Member.load(entry.key, entry.value).name for entry in hub.registry.scan(Keys(group).members)]


def steal(hub: Hub, partition: int = 0, group: str = "g") -> None:
    """Take it from its owner, as a leader does that fences a slow one."""
    key = Keys(group).owner(hub.topic("t").id, partition)
    hub.registry.commit(put={key: Owner(None, owner(hub, partition, group).epoch + 1).dump()})


def wake(hub: Hub, group: str = "g") -> None:
    """Let the members look at all their owners, as everyone does who takes something from one of them."""
    for entry in hub.registry.scan(Keys(group).targets):
        target = Target.load(entry.key, entry.value)
        hub.registry.commit(put={entry.key: replace(target, taken=target.taken + 1).dump()})


def on_commit(hub: Hub, monkeypatch: pytest.MonkeyPatch, act: Callable[[dict[str, Any], list[str]], None]) -> None:
    """Before each commit, call `act` with what it puts and what it deletes."""
    commit = hub.registry.commit

    def acting(expect: Any = (), put: Any = (), *rest: Any, delete: Any = (), **named: Any) -> dict[str, int]:
        act(dict(put), list(delete))
        return commit(dict(expect), dict(put), *rest, delete=delete, **named)

    monkeypatch.setattr(hub.registry, "commit", acting)


def offsets(messages: list[Message]) -> list[int]:
    return [message.offset for message in messages]


def settle(*consumers: Consumer, partitions: int) -> None:
    """Wait until each partition is with one of them."""
    eventually(lambda: sorted(p for each in consumers for p in each.assignment) == list(range(partitions)))


def polled(consumer: Consumer, count: int, max_messages: int = 500) -> list[Message]:
    """Poll until so many have come."""
    found: list[Message] = []
    until = time.monotonic() + BOUND_S
    while len(found) < count:
        assert time.monotonic() < until, found
        found += consumer.poll(max_messages, timeout=0.05)
    return found


def count_reads(inbox: Consumer, monkeypatch: pytest.MonkeyPatch, held: Callable[[], int] = lambda: 0) -> list[int]:
    """The bytes that each read of the source gave that was not empty, and those that were held by then."""
    reads: list[int] = []
    read = inbox._source.read

    def counted(partition: int, offset: int, max_bytes: int = 0) -> list[Batch]:
        batches = read(partition, offset, max_bytes)
        if batches:
            reads.append(held() + sum(batch.records.nbytes for batch in batches))
        return batches

    monkeypatch.setattr(inbox._source, "read", counted)
    return reads


def poison(*bad: tuple[int, int]) -> tuple[Callable[[Message], None], list[tuple[int, int]]]:
    """A handler that raises at these places, and where it has been called."""
    seen: list[tuple[int, int]] = []

    def handle(message: Message) -> None:
        seen.append((message.partition, message.offset))
        if (message.partition, message.offset) in bad:
            raise ValueError(f"poison {message.offset}")

    return handle, seen


def admin(hub: Hub) -> GroupHandle:
    return GroupHandle(hub.registry, "g", hub.log)
