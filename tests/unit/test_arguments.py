"""Every argument of the public API is checked where it is given, and refused by name.

A table of calls: for each argument, values that are not allowed. The call must raise an error of ours that names the
argument, shows what was given, and had no effect; never an error of Python's from somewhere inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pytest

import pxrs
import pxrs.registry
from pxrs.consumer.consumer import Consumer
from pxrs.errors import InvalidArgument, InvalidGroup, OffsetOutOfRange, PartitionNotAssigned, PxrsError
from pxrs.group.admin import GroupHandle
from pxrs.hub import Hub
from pxrs.model import Message
from pxrs.producer.producer import Producer
from pxrs.queue.handle import QueueHandle
from pxrs.queue.listener import QueueListener
from pxrs.queue.policy import ConsumeTimes, ExponentialBackoff, FixedBackoff
from pxrs.registry import Registry
from pxrs.testing.waiting import eventually
from pxrs.topics import TopicHandle

BOUND_S = 30.0
PARTITIONS = 3
NO_NUMBER: list[Any] = ["x", b"1", [], {}, math.nan, True, object()]
NO_SECONDS: list[Any] = [*NO_NUMBER, -1, math.inf, -math.inf, 10**400, timedelta(days=-1), timedelta.max]
NO_COUNT: list[Any] = [*NO_NUMBER, None, 0, -1, 1.5, math.inf]
NO_PARTITION: list[Any] = [*NO_NUMBER, -1, 1.5, math.inf, PARTITIONS, 10**30]
NO_OFFSET: list[Any] = [*NO_NUMBER, None, -1, 1.5, math.inf]
NO_TEXT: list[Any] = [5, 1.5, b"t", [], {}, True, object()]
NO_FLAG: list[Any] = ["x", "false", 0, 1, None, [], math.nan]
NO_CALL: list[Any] = ["x", 5, [], True]


@dataclass
class Places:
    hub: Hub
    topic: TopicHandle
    inbox: Consumer
    out: Producer
    group: GroupHandle
    queue: QueueHandle
    registry: Registry


@pytest.fixture(scope="module")
def places() -> Iterator[Places]:
    with pxrs.open("memory:") as hub:
        topic = hub.create_topic("t", partitions=PARTITIONS)
        queue = hub.create_queue("q")
        with hub.producer("t", linger_s=0) as out, hub.consumer("t", "g") as inbox:
            for partition in range(PARTITIONS):
                out.send(b"x", partition=partition).result(BOUND_S)
            eventually(lambda: len(inbox.assignment) == PARTITIONS, BOUND_S)
            yield Places(hub, topic, inbox, out, hub.group("g"), queue, hub.registry)


Call = Callable[[Places, Any], object]
CONSUMER: dict[str, list[Any]] = {
    "name": NO_TEXT,
    "ack": ["x", None, 5, [], math.nan],
    "start": ["x", None, 5, [], math.nan, datetime(2026, 1, 1)],
    "until": ["x", 5, [], math.nan],
    "assignor": ["x", None, 5, [], math.nan],
    "lease_ttl": [*NO_SECONDS, 0, 0.01, 90_000],
    "handover_timeout": [*NO_SECONDS, 0, 90_000],
    "progress_timeout": [*NO_SECONDS, 0, 90_000],
    "commit_interval": [*NO_SECONDS, 0, 90_000],
    "prefetch_bytes": [*NO_COUNT, 10**30],
    "on_trimmed": ["x", None, 5, []],
    "on_error": ["x", None, 5, []],
    "retries_max": [*NO_COUNT, 10**30],
    "retry_pause": [*NO_SECONDS, None],
    "dead_letters": [5, [], True],
    "on_assigned": NO_CALL,
    "on_revoked": NO_CALL,
    "on_lost": NO_CALL,
    "topic_names": NO_CALL,
}
PRODUCER: dict[str, list[Any]] = {
    "linger_s": [*NO_SECONDS, None, 61],
    "batch_rows": [*NO_COUNT, 10**30],
    "batch_bytes": [*NO_COUNT, 10**30],
    "buffer_bytes": [*NO_COUNT, 10**30],
    "buffer_timeout": [*NO_SECONDS, None],
    "tries_max": [*NO_COUNT, 10**30],
}
TOPIC: dict[str, list[Any]] = {
    "name": [*NO_TEXT, None, "", "a/b", "x" * 300],
    "partitions": [*NO_COUNT, 10**30],
    "partitioner": [*NO_TEXT, None, "x"],
    "codec": [*NO_TEXT, None, "x"],
    "retention": [*NO_SECONDS, 0],
    "retention_bytes": [*NO_NUMBER, 0, -1, 1.5, math.inf],
    "segment_bytes": [*NO_COUNT, 10**30],
    "durability": [*NO_TEXT, None, "x"],
    "keep_unread": NO_FLAG,
}


def _options() -> Iterator[tuple[str, str, list[Any], Call]]:
    for name, values in CONSUMER.items():
        consume = lambda at, given, name=name: (  # noqa: E731
            Consumer(at.topic.log, at.registry, "new", topic_names=given)
            if name == "topic_names"  # a hub gives its own
            else at.hub.consumer("t", "new", **{name: given})
        )
        yield "Hub.consumer", name, values, consume
    for name, values in PRODUCER.items():
        make = lambda at, given, name=name: at.hub.producer("t", **{name: given})  # noqa: E731
        yield "Hub.producer", name, values, make
    for name, values in TOPIC.items():
        yield (
            "Hub.create_topic",
            name,
            values,
            lambda at, given, name=name: at.hub.create_topic(**{"name": "new", name: given}),
        )


def _calls() -> Iterator[tuple[str, str, list[Any], Call]]:
    yield "pxrs.open", "url", [None, 5, b"x", [], "", "a\0b", "x" * 10_000], lambda at, given: pxrs.open(given)
    yield "pxrs.open", "registry", [5, b"x", [], "", "nope:x"], lambda at, given: pxrs.open("memory:", given)
    yield (
        "pxrs.open",
        "lease_ttl",
        [*NO_SECONDS, None, 0, 0.01, 90_000],
        lambda at, given: pxrs.open("memory:", lease_ttl=given),
    )
    yield "pxrs.open", "upkeep", NO_FLAG, lambda at, given: pxrs.open("memory:", upkeep=given)
    yield "registry.open", "url", [None, 5, b"x", [], ""], lambda at, given: pxrs.registry.open(given)

    yield "Hub.topic", "topic", [*NO_TEXT, None], lambda at, given: at.hub.topic(given)
    yield "Hub.delete_topic", "topic", [*NO_TEXT, None], lambda at, given: at.hub.delete_topic(given)
    yield "Hub.producer", "topic", [*NO_TEXT, None], lambda at, given: at.hub.producer(given)
    yield "Hub.consumer", "topic", [*NO_TEXT, None], lambda at, given: at.hub.consumer(given, "g")
    yield "Hub.consumer", "group", [*NO_TEXT, None, "", "a/b"], lambda at, given: at.hub.consumer("t", given)
    yield "Hub.group", "group", [*NO_TEXT, None, "", "a/b"], lambda at, given: at.hub.group(given)
    yield "Hub.group", "sources", [5, "t", None], lambda at, given: at.hub.group("g", given)
    yield "Hub.queue", "queue", [*NO_TEXT, None, ""], lambda at, given: at.hub.queue(given)
    yield "Hub.delete_queue", "queue", [*NO_TEXT, None, ""], lambda at, given: at.hub.delete_queue(given)
    yield "Hub.create_queue", "queue", [*NO_TEXT, None, "", "a/b"], lambda at, given: at.hub.create_queue(given)
    yield "Hub.create_queue", "policy", ["x", 5, []], lambda at, given: at.hub.create_queue("new", given)
    yield "Hub.create_queue", "fifo", NO_FLAG, lambda at, given: at.hub.create_queue("new", fifo=given)
    yield "Hub.create_queue", "backoff", ["x", 5, []], lambda at, given: at.hub.create_queue("new", backoff=given)

    # Waiting is short by what is checked, not by luck: nothing is waited for.
    yield "Consumer.poll", "max_messages", NO_COUNT, lambda at, given: at.inbox.poll(given, timeout=0)
    yield "Consumer.poll", "timeout", NO_SECONDS, lambda at, given: at.inbox.poll(1, given)
    yield "Consumer.seek", "partition", [*NO_PARTITION, None], lambda at, given: at.inbox.seek(given, 0)
    yield "Consumer.seek", "offset", NO_OFFSET, lambda at, given: at.inbox.seek(0, given)
    yield "Consumer.pause", "partition", [*NO_PARTITION, None], lambda at, given: at.inbox.pause(given)
    yield "Consumer.resume", "partition", [*NO_PARTITION, None], lambda at, given: at.inbox.resume(0, given)
    yield "Consumer.run", "handler", [*NO_CALL, None, lambda: None], lambda at, given: at.inbox.run(given)
    yield "Consumer.run", "threads", [*NO_COUNT, 10**30], lambda at, given: at.inbox.run(lambda message: None, given)
    yield "Consumer.transactions", "engine", [None, "x", 5], lambda at, given: at.inbox.transactions(given)
    yield "Consumer.transactions", "max_messages", NO_COUNT, lambda at, given: at.inbox.transactions(None, given)  # type: ignore[arg-type]

    yield (
        "GroupHandle.reset",
        "to",
        ["x", None, [], math.nan, 1.5],
        lambda at, given: at.group.reset(given, "t"),
    )
    yield (
        "GroupHandle.reset",
        "offset",
        [True, -1, {0: "x"}, {0: -1}],
        lambda at, given: at.group.reset(given, "t"),
    )
    yield "GroupHandle.reset", "partition", [{}, {"x": 0}, {99: 0}], lambda at, given: at.group.reset(given, "t")
    yield "GroupHandle.reset", "topic", NO_TEXT, lambda at, given: at.group.reset("latest", given)
    yield "GroupHandle.reset", "force", NO_FLAG, lambda at, given: at.group.reset("latest", "t", given)
    yield "GroupHandle.delete", "force", NO_FLAG, lambda at, given: at.group.delete(given)
    yield (
        "GroupHandle.import_checkpoint",
        "offset",
        NO_OFFSET,
        lambda at, given: at.hub.group("n").import_checkpoint(given, "t"),
    )
    yield (
        "GroupHandle.import_checkpoint",
        "topic",
        [*NO_TEXT, None],
        lambda at, given: at.group.import_checkpoint(0, given),
    )
    yield (
        "GroupHandle.import_checkpoint",
        "force",
        NO_FLAG,
        lambda at, given: at.hub.group("n").import_checkpoint(0, "t", given),
    )
    yield "GroupHandle.retry", "topic", [*NO_TEXT, None], lambda at, given: at.group.retry(given, 0)
    yield "GroupHandle.retry", "partition", [*NO_OFFSET], lambda at, given: at.group.retry("t", given)
    yield "GroupHandle.skip", "partition", [*NO_OFFSET], lambda at, given: at.group.skip("t", given)
    yield "GroupHandle.skip", "offset", [*NO_NUMBER, -1, 1.5], lambda at, given: at.group.skip("t", 0, given)
    yield "GroupHandle.paused", "partition", [*NO_OFFSET], lambda at, given: at.group.paused("t", given)

    yield "TopicHandle.start", "partition", [*NO_PARTITION, None], lambda at, given: at.topic.start(given)
    yield "TopicHandle.end", "partition", [*NO_PARTITION, None], lambda at, given: at.topic.end(given)
    yield "TopicHandle.offset_at", "partition", [*NO_PARTITION, None], lambda at, given: at.topic.offset_at(given, 0)
    yield (
        "TopicHandle.offset_at",
        "timestamp",
        [*NO_NUMBER, None, 1.5, 10**30],
        lambda at, given: at.topic.offset_at(0, given),
    )
    yield "TopicHandle.read", "partition", [*NO_PARTITION, None], lambda at, given: at.topic.read(given, 0)
    yield "TopicHandle.read", "offset", NO_OFFSET, lambda at, given: at.topic.read(0, given)
    yield "TopicHandle.read", "max_bytes", NO_COUNT, lambda at, given: at.topic.read(0, 0, given)
    yield "TopicHandle.wait", "positions", [5, "x", None, [1]], lambda at, given: at.topic.wait(given, 0)
    yield "TopicHandle.wait", "partition", [-1, "x", True, PARTITIONS], lambda at, given: at.topic.wait({given: 0}, 0)
    yield "TopicHandle.wait", "offset", NO_OFFSET, lambda at, given: at.topic.wait({0: given}, 0)
    yield "TopicHandle.wait", "timeout", NO_SECONDS, lambda at, given: at.topic.wait({0: 0}, given)
    yield "TopicHandle.messages", "partition", [*NO_PARTITION, None], lambda at, given: at.topic.messages(given)
    yield "TopicHandle.messages", "offset", NO_OFFSET, lambda at, given: at.topic.messages(0, given)
    yield "TopicHandle.to_arrow", "partition", NO_PARTITION, lambda at, given: at.topic.to_arrow(given)
    yield "TopicHandle.to_arrow", "start", [*NO_NUMBER, -1, 1.5], lambda at, given: at.topic.to_arrow(0, given)
    yield "TopicHandle.to_arrow", "end", [*NO_NUMBER, -1, 1.5], lambda at, given: at.topic.to_arrow(0, None, given)

    yield "Producer.send", "value", [5, 1.5, [], object(), "\ud800"], lambda at, given: at.out.send(given)
    yield "Producer.send", "key", [5, 1.5, [], object(), "\ud800"], lambda at, given: at.out.send(b"", given)
    yield (
        "Producer.send",
        "header",
        [5, ["x"], [("a",)], [(5, b"")], [("a", 5)]],
        lambda at, given: at.out.send(b"", headers=given),
    )
    yield (
        "Producer.send",
        "time",
        [*NO_NUMBER, 1.5, 10**30, datetime(2026, 1, 1)],
        lambda at, given: at.out.send(b"", timestamp=given),
    )
    yield "Producer.send", "partition", NO_PARTITION, lambda at, given: at.out.send(b"", partition=given)
    yield "Producer.send_batch", "table", [None, "x", 5, []], lambda at, given: at.out.send_batch(given)
    yield "Receipt.result", "timeout", NO_SECONDS, lambda at, given: at.out.send(b"").result(given)

    yield "QueueHandle.put", "value", [None, 5, [], "\ud800"], lambda at, given: at.queue.put(given)
    yield (
        "QueueHandle.put",
        "priority",
        [*NO_NUMBER, None, 1.5, 10**30],
        lambda at, given: at.queue.put(b"", priority=given),
    )
    yield "QueueHandle.put", "delay", NO_SECONDS, lambda at, given: at.queue.put(b"", delay=given)
    yield "QueueHandle.put", "key", [5, [], object()], lambda at, given: at.queue.put(b"", key=given)
    yield "QueueHandle.put_many", "values", [None, 5, "x", b"x"], lambda at, given: at.queue.put_many(given)
    yield "QueueHandle.peek", "max_items", [*NO_COUNT, 10**30], lambda at, given: at.queue.peek(given)
    yield (
        "DeadLetters.list",
        "max_items",
        [*NO_NUMBER, None, -1, 1.5],
        lambda at, given: at.queue.dead_letters().list(given),
    )
    yield "DeadLetters.retry", "ids", [5, [[]], [5]], lambda at, given: at.queue.dead_letters().retry(given)
    yield "DeadLetters.purge", "ids", [5, [[]], [5]], lambda at, given: at.queue.dead_letters().purge(given)
    yield "Transaction.take", "queue", [*NO_TEXT, None, ""], lambda at, given: at.hub.transaction().take(given, 0)
    yield "Transaction.take", "timeout", NO_SECONDS, lambda at, given: at.hub.transaction().take("q", given)
    yield (
        "Transaction.take_many",
        "max_items",
        NO_COUNT,
        lambda at, given: at.hub.transaction().take_many("q", given, 0),
    )
    yield "Transaction.put", "queue", [*NO_TEXT, None, ""], lambda at, given: at.hub.transaction().put(given, b"")
    yield "Transaction.put", "delay", NO_SECONDS, lambda at, given: at.hub.transaction().put("q", b"", delay=given)
    yield "Transaction.checkpoint", "inbox", [None, "x", 5], lambda at, given: at.hub.transaction().checkpoint(given)
    yield "QueueListener", "queue", [None, "q", 5], lambda at, given: QueueListener(given, lambda tx, item: None)
    yield "QueueListener", "handler", [*NO_CALL, None], lambda at, given: QueueListener(at.queue, given)
    yield (
        "QueueListener",
        "threads",
        [*NO_COUNT, 10**30],
        lambda at, given: QueueListener(at.queue, lambda tx, item: None, given),
    )
    yield "ConsumeTimes", "times", [*NO_COUNT, 10**30], lambda at, given: ConsumeTimes(given)
    yield "FixedBackoff", "pause", [*NO_SECONDS, None], lambda at, given: FixedBackoff(given)
    yield "ExponentialBackoff", "first", [*NO_SECONDS, None], lambda at, given: ExponentialBackoff(given)
    yield (
        "ExponentialBackoff",
        "factor",
        [*NO_NUMBER, None, 0, math.inf],
        lambda at, given: ExponentialBackoff(1, given),
    )

    yield "Registry.get", "key", [None, 5, b"x", [], ""], lambda at, given: at.registry.get(given)
    yield "Registry.scan", "prefix", [None, 5, b"x", "x"], lambda at, given: at.registry.scan(given)
    yield "Registry.scan", "after", [5, b"x", []], lambda at, given: at.registry.scan("", given)
    yield "Registry.scan", "limit", [*NO_NUMBER, 0, -1, 1.5], lambda at, given: at.registry.scan("", limit=given)
    yield (
        "Registry.commit",
        "expect",
        [5, {"a": "x"}, {"a": -1}, {"a": True}, {5: 0}],
        lambda at, given: at.registry.commit(given),
    )
    yield (
        "Registry.commit",
        "put",
        [5, {"a": "x"}, {"a": None}, {5: b""}],
        lambda at, given: at.registry.commit(put=given),
    )
    yield "Registry.commit", "lease", ["x", 5], lambda at, given: at.registry.commit(lease=given)
    yield "Registry.lease", "ttl", [*NO_SECONDS, None, 0, 0.01, 90_000], lambda at, given: at.registry.lease(given)
    yield "Registry.watch", "prefix", [None, 5, b"x"], lambda at, given: at.registry.watch(given)
    yield "Watch.wait", "timeout", NO_SECONDS, lambda at, given: _wait(at.registry, given)


def _wait(registry: Registry, timeout: Any) -> None:
    with registry.watch("a") as watch:
        watch.wait(timeout)


WORDS = {"sources": "source", "inbox": "consumer", "topic": "topic"}
"""Arguments whose errors call them otherwise."""
TABLE = [
    pytest.param(call, name, given, id=f"{where}-{name}-{at}")
    for where, name, values, call in [*_options(), *_calls()]
    for at, given in enumerate(values)
]


@pytest.mark.parametrize(("call", "name", "given"), TABLE)
def test_a_bad_argument_is_refused_by_name(places: Places, call: Call, name: str, given: Any) -> None:
    before = places.hub.groups(), places.hub.topics(), [queue.name for queue in places.hub.queues()]
    with pytest.raises(PxrsError) as refused:
        call(places, given)
    assert isinstance(refused.value, InvalidArgument | OffsetOutOfRange), repr(refused.value)
    text = str(refused.value)
    assert WORDS.get(name, name).removesuffix("_s") in text.lower() or "key" in text, text
    assert len(text) < 1_000, "what was given is shown, but not all of it"
    assert before == (places.hub.groups(), places.hub.topics(), [queue.name for queue in places.hub.queues()])


# Partitions.


def test_a_partition_that_the_topic_does_not_have_is_refused_as_such(places: Places) -> None:
    for call in (lambda: places.inbox.seek(99, 0), lambda: places.inbox.pause(77), lambda: places.inbox.resume(77)):
        with pytest.raises(InvalidGroup, match=r"t has no partition (99|77).*0 to 2"):
            call()


def test_a_partition_that_is_not_assigned_here_is_refused_as_such(places: Places) -> None:
    hub = places.hub
    hub.create_topic("two", partitions=2)
    with hub.consumer("two", "pair") as first, hub.consumer("two", "pair") as second:
        eventually(lambda: len(first.assignment) == len(second.assignment) == 1, BOUND_S)
        (mine,), (other,) = first.assignment, second.assignment
        for call in (lambda: first.seek(other, 0), lambda: first.pause(mine, other), lambda: first.resume(other)):
            with pytest.raises(
                PartitionNotAssigned, match=rf"partition {other} is not assigned.*assigned: {mine}"
            ) as refused:
                call()
            assert refused.value.partitions == (other,)
            assert refused.value.assigned == (mine,)
        with hub.producer("two") as out:
            out.send(b"x", partition=mine)
        assert first.poll(1, timeout=BOUND_S), "nothing was paused by the call that was refused"


def test_ack_takes_messages_only(places: Places) -> None:
    with places.hub.consumer("t", "acks", ack="manual") as inbox:
        for given in (None, 5, "x", (1, 2), object()):
            with pytest.raises(InvalidGroup, match="message"):
                inbox.ack(given)  # type: ignore[arg-type]
        (message,) = inbox.poll(1, timeout=BOUND_S)
        inbox.ack(Message(*message))


# What is allowed.


def test_durations_may_be_whole_numbers_fractions_or_timedeltas(places: Places) -> None:
    for given in (0, 0.0, timedelta(0), timedelta(milliseconds=1)):
        places.inbox.poll(1, given)
        places.topic.wait({0: 10}, given)
    with places.hub.consumer("t", "brief", lease_ttl=timedelta(seconds=1), retry_pause=0) as inbox:
        assert inbox.timings.lease_ttl == 1.0
