"""`pxrs serve` over loopback: the same work through a server and without one, and against other servers.

The server, its peers and the clients are processes of their own, all on this machine, so they share its cores.
Messages are 100 bytes. `python -m benchmarks.serve batches` runs one part.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nats
import pyarrow as pa
import pyarrow.flight as flight
import redis
from nats.js.api import StorageType
from rich.console import Console
from rich.table import Table

import pxrs
from benchmarks.flight_peer import peer
from benchmarks.log.servers import NatsServer, RedisServer
from benchmarks.log.workload import PARTITIONS, ROWS, Row, pairs, records, send_all
from benchmarks.measure import compare
from benchmarks.tables import Part, print_rows
from pxrs.log.batch import SCHEMA
from pxrs.testing.servers import HubServer

BATCHES = 100
MESSAGES = 200_000
PEER_MESSAGES = 200_000
ROUND_TRIPS = 300
SPARK_ROWS = 4_000_000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__)
    parts: dict[str, Part] = {"batches": batches, "messages": messages, "peers": peers}
    parts["spark"] = spark
    parser.add_argument("parts", nargs="*", choices=[*parts, "trips", []], help="which to run; all if none is named")
    chosen = parser.parse_args().parts or [*parts, "trips"]
    console = Console()
    print_rows(console, "through a server on loopback, messages a second", parts, chosen)
    if "trips" in chosen:
        with console.status("measuring round trips"):
            console.print(trips())


def batches(folder: Path) -> Iterator[Row]:
    """Arrow batches, in and out."""
    one = records()
    table = pa.Table.from_batches([one.drop_columns(["timestamp", "headers"])] * 10)
    with ExitStack() as stack:
        server = stack.enter_context(HubServer())
        remote = stack.enter_context(pxrs.open(server.url))
        local = stack.enter_context(pxrs.open(folder / "data"))
        plain = stack.enter_context(peer())
        for hub in (remote, local):
            hub.create_topic("durable", PARTITIONS)
            hub.create_topic("cached", PARTITIONS, durability="os")

        def send(hub: pxrs.Hub, topic: str) -> Callable[[], None]:
            producer = stack.enter_context(hub.producer(topic))

            def work() -> None:
                for _ in range(BATCHES // 10):
                    producer.send_batch(table)
                producer.flush()

            return work

        def put() -> None:
            writer, reader = plain.do_put(flight.FlightDescriptor.for_command(b"x"), SCHEMA)
            for _ in range(BATCHES):
                writer.write_batch(one)
            writer.done_writing()
            while reader.read() is not None:
                pass
            writer.close()

        for topic, wanted in (("durable", ""), ("cached", "0.5x")):
            figure = compare(send(remote, topic), put, times=1, rounds=5).times(BATCHES * ROWS)
            yield Row(f"send_batch + flush, {topic}", "plain Flight stream, kept nowhere", figure, wanted)
        figure = compare(send(remote, "durable"), send(local, "durable"), times=1, rounds=5).times(BATCHES * ROWS)
        yield Row("send_batch + flush, durable", "the same without a server", figure, "0.7x")

        stored = 0
        with remote.producer("durable") as out:
            while stored < BATCHES * ROWS:
                out.send_batch(table)
                stored += len(table)
        source = remote.topic("durable")
        total = sum(source.log.ends())

        def read() -> None:
            assert sum(batch.records.num_rows for batch in _batches(source)) == total

        def get() -> None:
            assert sum(chunk.data.num_rows for chunk in plain.do_get(flight.Ticket(b"%d" % (total // ROWS)))) > 0

        figure = compare(read, get, times=1, rounds=5).times(total)
        yield Row("read Arrow batches", "plain Flight stream, from memory", figure, "0.5x")


def _batches(topic: pxrs.TopicHandle) -> Iterator[Any]:
    for partition in range(topic.partitions):
        yield from topic.batches(partition, topic.start(partition))


def messages(folder: Path) -> Iterator[Row]:
    """Messages one by one, in and out."""
    given = pairs(MESSAGES)
    with ExitStack() as stack:
        server = stack.enter_context(HubServer())
        hubs = stack.enter_context(pxrs.open(server.url)), stack.enter_context(pxrs.open(folder / "data"))
        sends, iterations = [], []
        for hub in hubs:
            hub.create_topic("t", PARTITIONS)
            sends.append(send_all(stack.enter_context(hub.producer("t")), given))
        figure = compare(*sends, times=1, rounds=7).times(MESSAGES)
        yield Row("send() + flush", "the same without a server", figure, "0.8x")
        for hub in hubs:
            iterations.append(_iterate(hub.topic("t")))
        figure = compare(*iterations, times=1, rounds=3).times(sum(hubs[0].topic("t").log.ends()))
        yield Row("iterate messages", "the same without a server", figure, "0.7x")


def _iterate(topic: pxrs.TopicHandle) -> Callable[[], None]:
    stored = sum(topic.log.ends())

    def work() -> None:
        assert sum(1 for partition in range(PARTITIONS) for _ in topic.messages(partition)) == stored

    return work


def peers(folder: Path) -> Iterator[Row]:
    """Redis Streams and NATS JetStream through their Python clients: servers too, which do not sync."""
    given = pairs(PEER_MESSAGES)
    with ExitStack() as stack:
        hub = stack.enter_context(pxrs.open(stack.enter_context(HubServer()).url))
        hub.create_topic("t", PARTITIONS)
        send = send_all(stack.enter_context(hub.producer("t")), given)
        client: Any = redis.Redis(*_place(stack.enter_context(RedisServer())))

        def add() -> None:
            for start in range(0, PEER_MESSAGES, 1_000):
                pipeline = client.pipeline(transaction=False)
                for key, value in given[start : start + 1_000]:
                    pipeline.xadd("s", {b"k": key, b"v": value})
                pipeline.execute()

        out = stack.enter_context(hub.producer("t"))
        keys, values = zip(*given, strict=True)
        table = pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})

        def send_batch() -> None:
            out.send_batch(table)
            out.flush()

        for what, ours in (("send() + flush, synced", send), ("send_batch() + flush, synced", send_batch)):
            figure = compare(ours, add, times=1, rounds=3).times(PEER_MESSAGES)
            yield Row(what, "Redis Streams, XADD pipelined", figure, "10x")
        runner = stack.enter_context(asyncio.Runner())
        connection = runner.run(nats.connect(stack.enter_context(NatsServer()).url))
        stream = connection.jetstream()
        runner.run(stream.add_stream(name="bench", subjects=["bench.>"], storage=StorageType.FILE))

        async def publish() -> None:
            for key, value in given:
                await stream.publish_async(f"bench.{key.decode()}", value)
            await stream.publish_async_completed()

        figure = compare(send, lambda: runner.run(publish()), times=1, rounds=3).times(PEER_MESSAGES)
        yield Row("send() + flush, synced", "NATS JetStream, async publish", figure, "10x")
        yield from _reading_peers(hub, client, runner, stream, connection)
        client.close()
        runner.run(connection.close())


def _reading_peers(hub: pxrs.Hub, client: Any, runner: Any, stream: Any, connection: Any) -> Iterator[Row]:
    groups = iter(range(1_000))

    def consume() -> None:
        """In a group, up to the end, with checkpoints."""
        count = 0
        with hub.consumer("t", group=f"g{next(groups)}", until="end") as inbox:
            for _ in inbox:
                count += 1
                if count == PEER_MESSAGES:
                    break
        assert count == PEER_MESSAGES

    def read() -> None:
        group, left = f"g{next(groups)}", PEER_MESSAGES
        client.xgroup_create("s", group, id="0")
        while left > 0:
            (entries,) = [each[1] for each in client.xreadgroup(group, "reader", {"s": ">"}, count=10_000)]
            client.xack("s", group, *(entry[0] for entry in entries))
            left -= len(entries)

    async def fetch() -> None:
        subscription = await stream.pull_subscribe("bench.>", durable=f"reader-{next(groups)}", stream="bench")
        left = PEER_MESSAGES
        while left > 0:
            for message in await subscription.fetch(min(1_000, left)):
                await message.ack()
                left -= 1
        await connection.flush()
        await subscription.unsubscribe()

    def consume_batches() -> None:
        """The same, as Arrow batches."""
        count = 0
        with hub.consumer("t", group=f"g{next(groups)}", until="end") as inbox:
            for batch in inbox.batches():
                count += batch.records.num_rows
                if count >= PEER_MESSAGES:
                    break
        assert count >= PEER_MESSAGES

    for what, ours in (("a group reads and commits", consume), ("a group reads batches and commits", consume_batches)):
        figure = compare(ours, read, times=1, rounds=3).times(PEER_MESSAGES)
        yield Row(what, "Redis Streams, XREADGROUP + XACK", figure, "10x")
    figure = compare(consume, lambda: runner.run(fetch()), times=1, rounds=3).times(PEER_MESSAGES)
    yield Row("a group reads and commits", "NATS JetStream, fetch + ack", figure, "10x")


def trips() -> Table:
    """One message at a time: from the call that sends it to its arrival at a reader that waits."""
    table = Table("one message, sent and received", title="round trips in milliseconds", header_style="bold")
    for column in ("p50", "p99"):
        table.add_column(column, justify="right")
    with ExitStack() as stack:
        hub = stack.enter_context(pxrs.open(stack.enter_context(HubServer()).url))
        client: Any = redis.Redis(*_place(stack.enter_context(RedisServer())))
        runner = stack.enter_context(asyncio.Runner())
        connection = runner.run(nats.connect(stack.enter_context(NatsServer()).url))
        ways = {
            "pxrs serve, synced to disk": _pxrs_trip(hub, stack, "disk"),
            'pxrs serve, durability="os"': _pxrs_trip(hub, stack, "os"),
            "Redis Streams, XADD and XREAD": _redis_trip(client),
            "NATS JetStream, publish and fetch": _nats_trip(runner, connection),
        }
        for name, way in ways.items():
            times = []
            for number in range(ROUND_TRIPS):
                began = time.perf_counter()
                way(number)
                times.append(1000 * (time.perf_counter() - began))
            times = sorted(times[20:])
            table.add_row(name, f"{statistics.median(times):.2f}", f"{times[int(0.99 * len(times))]:.2f}")
        runner.run(connection.close())
    return table


def _pxrs_trip(hub: pxrs.Hub, stack: ExitStack, durability: str) -> Callable[[int], None]:
    hub.create_topic(durability, partitions=1, durability=durability)
    inbox = stack.enter_context(hub.consumer(durability, group=durability))
    out = stack.enter_context(hub.producer(durability, linger_s=0))

    def trip(number: int) -> None:
        out.send(b"%d" % number).result()
        (message,) = inbox.poll(1, timeout=30)
        assert message.value == b"%d" % number

    return trip


def _redis_trip(client: Any) -> Callable[[int], None]:
    last = [b"0"]

    def trip(number: int) -> None:
        client.xadd("trip", {b"v": b"%d" % number})
        last[0] = client.xread({"trip": last[0]}, count=1, block=30_000)[0][1][0][0]

    return trip


def _nats_trip(runner: Any, connection: Any) -> Callable[[int], None]:
    stream = connection.jetstream()
    runner.run(stream.add_stream(name="trip", subjects=["trip"], storage=StorageType.FILE))
    subscription = runner.run(stream.pull_subscribe("trip", durable="trip", stream="trip"))

    async def trip(number: int) -> None:
        await stream.publish("trip", b"%d" % number)
        (message,) = await subscription.fetch(1, timeout=30)
        await message.ack()

    return lambda number: runner.run(trip(number))


def spark(folder: Path) -> Iterator[Row]:
    """A batch read of Spark to nowhere, from a directory and from the server in front of it."""
    from pxrs.spark import session

    data = folder / "data"
    with pxrs.open(data) as hub:
        hub.create_topic("t", PARTITIONS)
        with hub.producer("t", batch_bytes=2 << 20) as out:
            table = pa.Table.from_batches([records().drop_columns(["timestamp", "headers"])] * 10)
            for _ in range(SPARK_ROWS // len(table)):
                out.send_batch(table)
    with HubServer(data) as server:
        running = session("bench", "local[2]")
        running.sparkContext.setLogLevel("ERROR")
        try:

            def read(url: str) -> Callable[[], None]:
                frame = running.read.format("pxrs").options(url=url, topic="t").load()
                return lambda: frame.write.format("noop").mode("overwrite").save()

            ours, theirs = read(server.url), read(str(data))
            for _ in range(4):  # the JVM compiles what it has seen often
                ours()
                theirs()
            figure = compare(ours, theirs, times=1, rounds=7).times(SPARK_ROWS)
            yield Row("Spark's batch read", "the same without a server", figure, "0.7x")
        finally:
            running.stop()


def _place(server: Any) -> tuple[str, int]:
    return server.host, server.port


if __name__ == "__main__":
    main()
