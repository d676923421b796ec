"""Redis Streams through redis-py with hiredis: a stream for each partition, XADD in pipelines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis
import xxhash

import pxrs
from benchmarks.log.servers import RedisServer
from benchmarks.log.workload import PARTITIONS, Row, pairs
from benchmarks.measure import compare

MESSAGES = 40_000
PIPELINE = 1_000
COUNT = 10_000


def measure(folder: Path) -> Iterator[Row]:
    messages = pairs(MESSAGES)
    with pxrs.open(folder / "data") as hub, RedisServer() as server:
        hub.create_topic("redis", PARTITIONS)
        # The client hands out answers of no one type; what is used of them is checked by the counts.
        client: Any = redis.Redis(server.host, server.port)
        streams = [f"bench-{number}" for number in range(PARTITIONS)]

        def publish() -> None:
            for start in range(0, MESSAGES, PIPELINE):
                pipeline = client.pipeline(transaction=False)
                for key, value in messages[start : start + PIPELINE]:
                    pipeline.xadd(streams[xxhash.xxh64_intdigest(key) % PARTITIONS], {b"k": key, b"v": value})
                pipeline.execute()

        with hub.producer("redis") as producer:

            def send() -> None:
                for key, value in messages:
                    producer.send(value, key)
                producer.flush()

            figure = compare(send, publish, times=1, rounds=3)
        yield Row(
            "send() + flush, synced", "Redis Streams, XADD pipelined; a server, not synced", figure.times(MESSAGES)
        )
        topic = hub.topic("redis")
        stored = sum(topic.end(partition) for partition in range(PARTITIONS))

        def iterate() -> None:
            assert sum(1 for partition in range(PARTITIONS) for _ in topic.messages(partition)) == stored

        def read() -> None:
            total = 0
            for stream in streams:
                last = b"0"
                while found := client.xread({stream: last}, count=COUNT):
                    entries = _entries(found)
                    last = entries[-1][0]
                    total += len(entries)
            assert total == stored

        groups = itertools.count()

        def read_and_acknowledge() -> None:
            total, group = 0, f"group-{next(groups)}"
            for stream in streams:
                client.xgroup_create(stream, group, id="0")
                while found := client.xreadgroup(group, "reader", {stream: ">"}, count=COUNT):
                    entries = _entries(found)
                    client.xack(stream, group, *(entry[0] for entry in entries))
                    total += len(entries)
            assert total == stored

        figure = compare(iterate, read, times=1, rounds=3)
        yield Row("iterate messages", f"Redis Streams, XREAD COUNT {COUNT}; a server", figure.times(stored))
        figure = compare(iterate, read_and_acknowledge, times=1, rounds=3)
        yield Row(
            "iterate messages (no checkpoint)", "Redis Streams, XREADGROUP + XACK; a server", figure.times(stored)
        )
        client.close()


def _entries(found: Any) -> Any:
    """Those of the one stream asked for: version 3 of the protocol answers with a dict, version 2 with a list."""
    if isinstance(found, dict):
        (entries,) = found.values()
        return entries[0] if entries and isinstance(entries[0], list) else entries
    return found[0][1]
