"""NATS JetStream through nats-py: a subject for each key, published without waiting for each answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import nats
from nats.js.api import StorageType

import pxrs
from benchmarks.log.servers import NatsServer
from benchmarks.log.workload import PARTITIONS, Row, pairs
from benchmarks.measure import compare

MESSAGES = 15_000
FETCH = 1_000


def measure(folder: Path) -> Iterator[Row]:
    messages = pairs(MESSAGES)
    subjects = [("bench." + key.decode(), value) for key, value in messages]
    with pxrs.open(folder / "data") as hub, NatsServer() as server, asyncio.Runner() as runner:
        hub.create_topic("nats", PARTITIONS)
        connection = runner.run(nats.connect(server.url))
        stream = connection.jetstream()
        runner.run(stream.add_stream(name="bench", subjects=["bench.>"], storage=StorageType.FILE))

        async def publish() -> None:
            for subject, value in subjects:
                await stream.publish_async(subject, value)  # waits while 4,000 are not answered yet
            await stream.publish_async_completed()

        with hub.producer("nats") as producer:

            def send() -> None:
                for key, value in messages:
                    producer.send(value, key)
                producer.flush()

            figure = compare(send, lambda: runner.run(publish()), times=1, rounds=3)
        yield Row(
            "send() + flush, synced", "NATS JetStream, async publish; a server, not synced", figure.times(MESSAGES)
        )
        topic = hub.topic("nats")
        names = itertools.count()

        async def fetch() -> None:
            subscription = await stream.pull_subscribe("bench.>", durable=f"reader-{next(names)}", stream="bench")
            left = MESSAGES
            while left:
                for message in await subscription.fetch(min(FETCH, left)):
                    await message.ack()
                    left -= 1
            await connection.flush()
            await subscription.unsubscribe()

        def iterate() -> None:
            every = (message for partition in range(PARTITIONS) for message in topic.messages(partition))
            assert sum(1 for _ in itertools.islice(every, MESSAGES)) == MESSAGES

        figure = compare(iterate, lambda: runner.run(fetch()), times=1, rounds=3)
        yield Row("iterate messages (no checkpoint)", "NATS JetStream, fetch + ack; a server", figure.times(MESSAGES))
        runner.run(connection.close())
