"""Every public call that may wait for another process, made while that process does not answer.

`TABLE` has an entry for each public method and property of the classes in `WAITING`:
`tests/unit/test_documented_waits.py` compares the entries with the classes and with the table in docs/waiting.md. An
entry prepares its call while everything works, and returns a function, which is called once nothing answers any more.
`check_calls` makes all of them at once, each on a thread of its own, and reports those that have neither returned nor
raised within their limits, with their stacks.
"""

from __future__ import annotations

import functools
import sqlite3
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

import pxrs
from pxrs.errors import PxrsError
from pxrs.hub import Hub
from pxrs.sources.sql_table import SqlTable, sql_table
from pxrs.testing.waiting import eventually

WAITING: Final[tuple[type, ...]] = (
    pxrs.Hub,
    pxrs.Producer,
    pxrs.Receipt,
    pxrs.TableReceipt,
    pxrs.Consumer,
    pxrs.TopicsConsumer,
    pxrs.GroupHandle,
    pxrs.TopicHandle,
    pxrs.QueueHandle,
    pxrs.DeadLetters,
    pxrs.QueueListener,
    pxrs.Transaction,
    pxrs.Registry,
    pxrs.Lease,
    pxrs.Watch,
    SqlTable,
)
"""The public classes whose methods may wait."""
TIMEOUT_S: Final = 3.0
PATIENCE_S: Final = 4.0
"""The `timeout` and `patience` of the addresses: while calls are prepared, a busy machine must be able to answer within
them."""
SLACK_S: Final = 8.0
"""What a call may take beyond its limit: threads of a busy machine."""
STOP_S: Final = 0.5
"""After how long a wait without an end is ended."""
CONNECT_S: Final = 2.0
"""The `connect_timeout` of the table's database; libpq takes no shorter one."""
DELIVERY_S: Final = 1.0
"""The `delivery_timeout` and the `buffer_timeout` of producers."""
COPY_S: Final = 1.0
"""For how long a copy sends a piece again that cannot be stored."""


@dataclass
class World:
    """A hub that works, until its test stops what answers."""

    url: str | None
    registry: str | None
    """Of `pxrs.open`."""
    timeout_s: float
    """Of a call of the registry."""
    patience_s: float
    """Of a call of the log; 0 for a log in files."""
    source_url: str | None = None
    """Of a database with the table `orders`, which does not answer either; None: there is none."""
    read_s: float = 0.0
    """How long one read of that table may take."""
    stack: ExitStack = field(default_factory=ExitStack)
    shared: dict[type, Any] = field(default_factory=dict)
    """By class, a consumer for all calls that leave it as it is."""
    kept: list[object] = field(default_factory=list)
    """Consumers that a hub closes: one that nobody refers to leaves its group by itself."""

    def open(self) -> Hub:
        hub = pxrs.open(self.url, registry=self.registry)
        self.stack.callback(_closed_quietly, hub)
        return hub

    @functools.cached_property
    def hub(self) -> Hub:
        """The hub of all calls that leave it open."""
        hub = self.open()
        there = {topic.name for topic in hub.topics()}, {queue.name for queue in hub.queues()}
        for name in there[0] & {"t", "u", "deleted", "empty"}:  # of a test before this one
            hub.delete_topic(name)
        for name in there[1] & {"q", "deleted", "empty"}:
            hub.delete_queue(name)
        for name in ("t", "u", "deleted", "empty"):
            hub.create_topic(name, partitions=2)
        for name in ("t", "u"):
            with hub.producer(name) as out:
                for number in range(10):
                    out.send(b"%d" % number, key=b"%d" % number)
        for name in ("q", "deleted", "empty"):
            hub.create_queue(name)
        for number in range(50):
            hub.queue("q").put(b"%d" % number)
        return hub

    def new_name(self) -> str:
        return f"n{uuid.uuid4().hex[:8]}"

    def consumer(self, topic: str = "t", **options: Any) -> pxrs.Consumer:
        inbox = self.hub.consumer(topic, self.new_name(), **options)
        eventually(lambda: len(inbox.assignment) == 2)
        return inbox

    def topics_consumer(self, **options: Any) -> pxrs.TopicsConsumer:
        inbox = self.hub.consumer(["t", "u"], self.new_name(), **options)
        eventually(lambda: len(inbox.assignment) == 4)
        return inbox

    def group(self) -> pxrs.GroupHandle:
        """A group with checkpoints and without members."""
        with self.hub.consumer("t", self.new_name(), until="end") as inbox:
            list(inbox)
        return self.hub.group(inbox.group)

    def paused_group(self) -> pxrs.GroupHandle:
        """A group whose partitions are paused at their first messages."""

        def fail(message: pxrs.Message) -> None:
            raise ValueError("on purpose")

        with self.hub.consumer("t", self.new_name(), until="end", on_error="pause") as inbox:
            try:
                inbox.run(fail)
            except pxrs.errors.PartitionsPaused:
                return self.hub.group(inbox.group)
        raise AssertionError("not paused")

    def transaction(self, takes: int = 1) -> pxrs.Transaction:
        tx = self.hub.transaction()
        if takes:
            assert tx.take_many("q", takes, timeout=10)
        return tx

    def listener(self, queue: str = "empty") -> pxrs.QueueListener:
        return pxrs.QueueListener(self.hub.queue(queue), lambda tx, item: None)

    def table(self) -> SqlTable:
        url = self.source_url
        if url is None:
            file = Path(self.stack.enter_context(tempfile.TemporaryDirectory()), "orders.db")
            with closing(sqlite3.connect(file)) as connection:
                connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY AUTOINCREMENT, body TEXT)")
            url = f"sqlite:///{file}"
        table = sql_table(url, "orders", value_column="body", read_timeout=self.read_s or None)
        self.stack.callback(table.close)
        return table

    @property
    def opened(self) -> pxrs.Registry:
        return self.hub.registry


def _closed_quietly(hub: Hub) -> None:
    with suppress(PxrsError):  # of what could not be written meanwhile
        hub.close()


Thunk = Callable[[], object]


class Call(NamedTuple):
    """An entry of `TABLE`."""

    limit: str
    """What bounds it: a key of `LIMITS`."""
    prepare: Callable[[World], Thunk]


LIMITS: Final[dict[str, Callable[[World], float]]] = {
    "at once": lambda world: 0.0,
    "timeout": lambda world: world.timeout_s,
    "twice timeout": lambda world: 2 * world.timeout_s,
    "patience": lambda world: world.patience_s,
    "timeout + patience": lambda world: world.timeout_s + world.patience_s,
    "its own": lambda world: STOP_S + world.timeout_s + world.patience_s,
    "read_timeout": lambda world: world.read_s + CONNECT_S,
    "copy": lambda world: COPY_S + 2 * world.timeout_s + 2 * world.patience_s,
    "buffer_timeout": lambda world: DELIVERY_S,
    "delivery_timeout": lambda world: DELIVERY_S + 2.0,
    "close": lambda world: 4 * world.timeout_s + world.patience_s,
}
"""The limits of docs/waiting.md, in seconds."""


def _stopping(inbox: Any, read: Callable[[Any], object]) -> Thunk:
    """Read until `stop`, which another thread calls."""

    def call() -> object:
        threading.Timer(STOP_S, inbox.stop).start()
        return read(inbox)

    return call


def _consumer_calls(kind: type, make: Callable[..., Any], first: Any) -> dict[str, Call]:
    """make: makes a consumer of the class. first: the name of one of its partitions."""

    def of(limit: str, call: Callable[[Any], object], **options: Any) -> Call:
        return Call(limit, lambda world: functools.partial(call, make(world, **options)))

    def shared(call: Callable[[Any], object]) -> Call:
        """A call that waits for nothing and leaves the consumer as it is."""

        def prepare(world: World) -> Thunk:
            inbox = world.shared.get(kind)
            if inbox is None:
                inbox = world.shared[kind] = make(world)
            return functools.partial(call, inbox)

        return Call("at once", prepare)

    def reads(read: Callable[[Any], object]) -> Call:
        return Call("its own", lambda world: _stopping(make(world), read))

    def polled(world: World) -> Any:
        inbox = make(world, ack="manual")
        return inbox, eventually(lambda: inbox.poll(1, timeout=1))[0]

    def ack(world: World) -> Thunk:
        inbox, message = polled(world)
        return lambda: inbox.ack(message)

    def enlist(world: World) -> Thunk:
        inbox = make(world)
        eventually(lambda: inbox.poll(1, timeout=1))
        return lambda: inbox.enlist_in(world.transaction(0))

    def commit_with(world: World) -> Thunk:
        inbox, tx = make(world), world.transaction(0)
        eventually(lambda: inbox.poll(1, timeout=1))
        tx.put("q", b"x")
        tx.checkpoint(inbox)
        return tx.commit

    def poll(world: World) -> Thunk:
        inbox = make(world)
        inbox.pause()
        return lambda: inbox.poll(timeout=STOP_S)

    def commit(world: World) -> Thunk:
        inbox = make(world)
        eventually(lambda: inbox.poll(1, timeout=1))
        return inbox.commit

    calls = {
        "__iter__": reads(list),
        "batches": reads(lambda inbox: list(inbox.batches())),
        "run": reads(lambda inbox: inbox.run(lambda message: None)),
        "transactions": shared(lambda inbox: _refused(inbox.transactions, _NO_ENGINE)),
        "poll": Call("its own", poll),
        "stop": of("at once", lambda inbox: inbox.stop()),
        "ack": Call("at once", ack),
        "commit": Call("timeout", commit),
        "enlist_in": Call("at once", enlist),
        "commit_with": Call("twice timeout", commit_with),
        "seek": of("patience", lambda inbox: inbox.seek(first, 0)),
        "lag": of("patience", lambda inbox: inbox.lag),
        "pause": shared(lambda inbox: inbox.pause()),
        "resume": shared(lambda inbox: inbox.resume()),
        "partitions_in_hand": shared(lambda inbox: inbox.partitions_in_hand()),
        "close": of("timeout", lambda inbox: inbox.close()),
    }
    for name in (
        "assignment",
        "position",
        "committed",
        "skipped",
        "is_away",
        "is_stopped",
        "is_in_callback",
        "problem",
    ):
        calls[name] = shared(lambda inbox, name=name: getattr(inbox, name))
    return {f"{kind.__name__}.{name}": call for name, call in calls.items()}


class _NoEngine:
    """What is no engine of SQLAlchemy: a loop over `transactions` waits as its engine does, and as `batches`."""


_NO_ENGINE: Final[Any] = _NoEngine()


def _refused(call: Callable[..., object], *given: object) -> None:
    try:
        call(*given)
    except (PxrsError, AttributeError):
        return


def _of_hub(limit: str, call: Callable[[Hub], object]) -> Call:
    return Call(limit, lambda world: functools.partial(call, world.hub))


def _of_topic(limit: str, call: Callable[[pxrs.TopicHandle], object]) -> Call:
    return Call(limit, lambda world: functools.partial(call, world.hub.topic("t")))


def _of_group(limit: str, call: Callable[[pxrs.GroupHandle], object]) -> Call:
    return Call(limit, lambda world: functools.partial(call, world.group()))


def _of_paused(limit: str, call: Callable[[pxrs.GroupHandle], object]) -> Call:
    return Call(limit, lambda world: functools.partial(call, world.paused_group()))


def _of_producer(limit: str, call: Callable[[pxrs.Producer], object]) -> Call:
    """A call of a producer that has stored a message, and whose buffer is small."""

    def prepare(world: World) -> Thunk:
        options = pxrs.ProducerOptions(delivery_timeout=DELIVERY_S, buffer_timeout=DELIVERY_S, buffer_bytes=1 << 20)
        out = world.hub.producer("t", **options)
        world.kept.append(out)
        out.send(b"x", partition=0).result(10)
        return functools.partial(call, out)

    return Call(limit, prepare)


def _fill(send: Callable[[], object]) -> None:
    """Send what does not fit into the buffer of 1 MB, 100 kB each time: the last call waits for room, unless the log
    stores what is sent."""
    for _ in range(11):
        send()


def _send_and(call: Callable[[pxrs.Producer], object]) -> Callable[[pxrs.Producer], object]:
    def after_sending(out: pxrs.Producer) -> object:
        out.send(b"y", partition=0)
        return call(out)

    return after_sending


_BLOCK: Final = pa.table({"value": [bytes(100_000)]})


def _of_queue(limit: str, call: Callable[[pxrs.QueueHandle], object]) -> Call:
    return Call(limit, lambda world: functools.partial(call, world.hub.queue("q")))


def _of_dead(limit: str, call: Callable[[pxrs.DeadLetters], object]) -> Call:
    return Call(limit, lambda world: functools.partial(call, world.hub.queue("q").dead_letters()))


def _of_registry(limit: str, call: Callable[[pxrs.Registry], object]) -> Call:
    return Call(limit, lambda world: functools.partial(call, world.opened))


def _of_lease(limit: str, call: Callable[[pxrs.Lease], object]) -> Call:
    return Call(limit, lambda world: functools.partial(call, world.opened.lease(10)))


def _of_watch(limit: str, call: Callable[[pxrs.Watch], object]) -> Call:
    return Call(limit, lambda world: functools.partial(call, world.opened.watch(f"{world.new_name()}/")))


def _of_transaction(limit: str, call: Callable[[pxrs.Transaction], object], takes: int = 1) -> Call:
    return Call(limit, lambda world: functools.partial(call, world.transaction(takes)))


def _of_listener(limit: str, call: Callable[[pxrs.QueueListener], object], queue: str = "empty") -> Call:
    return Call(limit, lambda world: functools.partial(call, world.listener(queue)))


def _with_hub(limit: str, call: Callable[[World, Hub], object]) -> Call:
    """A call of a hub of its own, which has been used."""

    def prepare(world: World) -> Thunk:
        assert world.hub
        hub = world.open()
        hub.topics()
        assert hub.transaction().take("q", timeout=10)
        for _ in range(3):
            inbox = hub.consumer("t", world.new_name(), commit_interval=3600)
            assert inbox.poll(1, timeout=10)
            assert inbox.poll(1, timeout=10)
            world.kept.append(inbox)
        return lambda: call(world, hub)

    return Call(limit, prepare)


def _open(world: World) -> Thunk:
    def call() -> object:
        with pxrs.open(world.url, registry=world.registry) as hub:
            return hub.queues()

    return call


def _follow(read: Callable[[Hub], Iterator[object]]) -> Callable[[World, Hub], object]:
    """Follow until the hub is closed."""

    def call(world: World, hub: Hub) -> object:
        threading.Timer(STOP_S, _closed_quietly, [hub]).start()
        return list(read(hub))

    return call


def _source(call: Callable[[World, Hub], object]) -> Call:
    """A call about a registered source; where no database is, one about a name that is not registered."""

    def prepare(world: World) -> Thunk:
        hub = world.hub
        if world.source_url is not None:
            hub.add_source("orders", world.source_url, table="orders", value_column="body", exist_ok=True)
            hub.source("orders", world.source_url)
        return lambda: call(world, hub)

    return Call("read_timeout", prepare)


def _add_source(world: World, hub: Hub) -> object:
    url = world.source_url or "postgresql://nobody@127.0.0.1:1/none"
    return hub.add_source(world.new_name(), url, table="orders", value_column="body")


def _of_table(limit: str, call: Callable[[SqlTable], object]) -> Call:
    """Where no database is, a table in SQLite, which answers."""

    def prepare(world: World) -> Thunk:
        table = world.table()
        table.bounds([0])
        return functools.partial(call, table)

    return Call(limit, prepare)


def _run_listener(listener: pxrs.QueueListener) -> None:
    threading.Timer(STOP_S, listener.stop).start()
    listener.run()


def _close_listener(world: World) -> Thunk:
    return world.listener().start().close


def _outcome(tx: pxrs.Transaction) -> object:
    with suppress(PxrsError):
        tx.commit()
    return tx.outcome()


def _checkpoint(world: World) -> Thunk:
    inbox, tx = world.consumer(), world.transaction(0)
    eventually(lambda: inbox.poll(1, timeout=1))
    return lambda: tx.checkpoint(inbox)


def _attach(world: World) -> Thunk:
    secret = world.opened.lease(10).secret
    return lambda: world.opened.attach(secret)


def _close_registry(world: World) -> Thunk:
    hub = world.open()
    hub.queues()
    return hub.registry.close


TABLE: Final[dict[str, Call]] = {
    "open": Call("timeout + patience", _open),
    # Topics.
    "Hub.create_topic": _of_hub("timeout + patience", lambda hub: hub.create_topic(f"n{uuid.uuid4().hex[:8]}")),
    "Hub.create_described": _of_hub("timeout + patience", lambda hub: hub.create_described(_described(hub))),
    "Hub.topics": _of_hub("patience", lambda hub: hub.topics()),
    "Hub.damaged_topics": _of_hub("patience", lambda hub: hub.damaged_topics()),
    "Hub.topic": _of_hub("patience", lambda hub: hub.topic("t")),
    "Hub.alter_topic": _of_hub("timeout + patience", lambda hub: hub.alter_topic("u", retention=3600)),
    "Hub.alter_described": _of_hub("timeout + patience", lambda hub: hub.alter_described("u", {"codec": "zstd"})),
    "Hub.copy_topic": _of_hub("copy", lambda hub: hub.copy_topic("t", f"n{uuid.uuid4().hex[:8]}")),
    "Hub.delete_topic": _of_hub("timeout + patience", lambda hub: hub.delete_topic("deleted")),
    "Hub.producer": _of_hub("patience", lambda hub: hub.producer("t")),
    # Producers.
    "Producer.send": _of_producer("buffer_timeout", lambda out: _fill(lambda: out.send(bytes(100_000)))),
    "Producer.send_batch": _of_producer("buffer_timeout", lambda out: _fill(lambda: out.send_batch(_BLOCK))),
    "Producer.flush": _of_producer("delivery_timeout", _send_and(lambda out: out.flush())),
    "Producer.close": _of_producer("delivery_timeout", _send_and(lambda out: out.close())),
    "Producer.topic_id": _of_producer("at once", lambda out: out.topic_id),
    "Receipt.result": _of_producer("delivery_timeout", lambda out: out.send(b"y", partition=0).result()),
    "Receipt.is_done": _of_producer("at once", lambda out: out.send(b"y", partition=0).is_done),
    "TableReceipt.result": _of_producer("delivery_timeout", lambda out: out.send_batch(_BLOCK).result()),
    "TableReceipt.is_done": _of_producer("at once", lambda out: out.send_batch(_BLOCK).is_done),
    # Sources.
    "Hub.add_source": _source(_add_source),
    "Hub.sources": _of_hub("timeout", lambda hub: hub.sources()),
    "Hub.source": _source(lambda world, hub: hub.source("orders", world.source_url).bounds([0])),
    "Hub.remove_source": _of_hub("timeout", lambda hub: hub.remove_source("nothing")),
    "Hub.readable": _of_hub("timeout + patience", lambda hub: hub.readable("nothing")),
    # The registry of the hub.
    "Hub.registry": _of_hub("at once", lambda hub: hub.registry),
    "Hub.check_registry": _of_hub("timeout + patience", lambda hub: hub.check_registry()),
    "Hub.join_registry": _of_hub("timeout + patience", lambda hub: hub.join_registry()),
    "Hub.adopt_registry": _of_hub("timeout + patience", lambda hub: hub.adopt_registry()),
    # Groups.
    "Hub.consumer": _of_hub("timeout + patience", lambda hub: hub.consumer("t", f"n{uuid.uuid4().hex[:8]}")),
    "Hub.group": _of_hub("at once", lambda hub: hub.group("g")),
    "Hub.groups": _of_hub("timeout", lambda hub: hub.groups()),
    # Queues.
    "Hub.create_queue": _of_hub("timeout", lambda hub: hub.create_queue(f"n{uuid.uuid4().hex[:8]}")),
    "Hub.alter_queue": _of_hub("timeout", lambda hub: hub.alter_queue("q", policy=pxrs.ConsumeTimes(3))),
    "Hub.queue": _of_hub("timeout", lambda hub: hub.queue("q")),
    "Hub.queues": _of_hub("timeout", lambda hub: hub.queues()),
    "Hub.delete_queue": _of_hub("timeout", lambda hub: hub.delete_queue("deleted")),
    "Hub.transaction": _of_hub("at once", lambda hub: hub.transaction()),
    # Events and upkeep.
    "Hub.events": _with_hub("its own", _follow(lambda hub: hub.events(follow=True))),
    "Hub.audit": _with_hub("its own", _follow(lambda hub: hub.audit(follow=True))),
    "Hub.record_audit": _of_hub("at once", lambda hub: hub.record_audit("rolled_out")),
    "Hub.upkeep": _of_hub("timeout", lambda hub: hub.upkeep()),
    "Hub.run_upkeep": _of_hub("timeout + patience", lambda hub: hub.run_upkeep()),
    "Hub.start_upkeep": _of_hub("at once", lambda hub: hub.start_upkeep()),
    "Hub.close": _with_hub("close", lambda world, hub: hub.close()),
    **_consumer_calls(pxrs.Consumer, World.consumer, 0),
    **_consumer_calls(pxrs.TopicsConsumer, World.topics_consumer, pxrs.TopicPartition("t", 0)),
    # One topic.
    "TopicHandle.topic": _of_topic("at once", lambda topic: topic.topic),
    "TopicHandle.keeps_unread": _of_topic("at once", lambda topic: topic.keeps_unread),
    "TopicHandle.start": _of_topic("patience", lambda topic: topic.start(0)),
    "TopicHandle.end": _of_topic("patience", lambda topic: topic.end(0)),
    "TopicHandle.bounds": _of_topic("patience", lambda topic: topic.bounds([0])),
    "TopicHandle.offset_at": _of_topic("patience", lambda topic: topic.offset_at(0, 0)),
    "TopicHandle.read": _of_topic("patience", lambda topic: topic.read(0, 0)),
    "TopicHandle.batches": _of_topic("patience", lambda topic: list(topic.batches(0))),
    "TopicHandle.messages": _of_topic("patience", lambda topic: list(topic.messages(0))),
    "TopicHandle.to_arrow": _of_topic("patience", lambda topic: topic.to_arrow()),
    "TopicHandle.retain": _of_topic("timeout + patience", lambda topic: topic.retain()),
    "TopicHandle.retention_problem": _of_topic("timeout + patience", lambda topic: topic.retention_problem()),
    "TopicHandle.wait": _of_topic("its own", lambda topic: topic.wait({0: 1_000_000}, timeout=STOP_S)),
    # One group.
    "GroupHandle.describe": _of_group("timeout + patience", lambda group: group.describe()),
    "GroupHandle.described": Call(
        "timeout + patience",
        lambda world: (lambda group: functools.partial(group.described, group._reader.read_there()))(world.group()),
    ),
    "GroupHandle.preview_reset": _of_group("timeout + patience", lambda group: group.preview_reset("earliest")),
    "GroupHandle.reset": _of_group("timeout + patience", lambda group: group.reset("earliest")),
    "GroupHandle.import_checkpoint": _of_group(
        "timeout + patience", lambda group: group.import_checkpoint({0: 1}, "t")
    ),
    "GroupHandle.delete": _of_group("timeout", lambda group: group.delete()),
    "GroupHandle.paused": _of_paused("timeout + patience", lambda group: group.paused("t", 0)),
    "GroupHandle.retry": _of_paused("timeout + patience", lambda group: group.retry("t", 0)),
    "GroupHandle.skip": _of_paused("timeout + patience", lambda group: group.skip("t", 0)),
    # Queues.
    "QueueHandle.name": _of_queue("at once", lambda queue: queue.name),
    "QueueHandle.policy": _of_queue("at once", lambda queue: queue.policy),
    "QueueHandle.backoff": _of_queue("at once", lambda queue: queue.backoff),
    "QueueHandle.is_fifo": _of_queue("at once", lambda queue: queue.is_fifo),
    "QueueHandle.dead_letters": _of_queue("at once", lambda queue: queue.dead_letters()),
    "QueueHandle.depth": _of_queue("timeout", lambda queue: queue.depth()),
    "QueueHandle.peek": _of_queue("timeout", lambda queue: queue.peek()),
    "QueueHandle.put": _of_queue("twice timeout", lambda queue: queue.put(b"x")),
    "QueueHandle.put_many": _of_queue("twice timeout", lambda queue: queue.put_many([b"x", b"y"])),
    "DeadLetters.list": _of_dead("timeout", lambda letters: letters.list()),
    "DeadLetters.__iter__": _of_dead("timeout", lambda letters: list(letters)),
    "DeadLetters.__len__": _of_dead("timeout", lambda letters: len(letters)),
    "DeadLetters.retry": _of_dead("timeout", lambda letters: letters.retry()),
    "DeadLetters.purge": _of_dead("timeout", lambda letters: letters.purge()),
    "QueueListener.start": _of_listener("timeout", lambda listener: listener.start()),
    "QueueListener.run": _of_listener("its own", _run_listener),
    "QueueListener.handle_next": _of_listener("timeout", lambda listener: listener.handle_next(), "q"),
    "QueueListener.stop": _of_listener("at once", lambda listener: listener.stop()),
    "QueueListener.close": Call("its own", _close_listener),
    "Transaction.take": _of_transaction("its own", lambda tx: tx.take("empty", timeout=STOP_S)),
    "Transaction.take_many": _of_transaction("its own", lambda tx: tx.take_many("empty", 2, timeout=STOP_S)),
    "Transaction.put": _of_transaction("timeout", lambda tx: tx.put("q", b"x")),
    "Transaction.checkpoint": Call("at once", _checkpoint),
    "Transaction.commit": _of_transaction("twice timeout", lambda tx: tx.commit()),
    "Transaction.rollback": _of_transaction("timeout", lambda tx: tx.rollback()),
    "Transaction.outcome": _of_transaction("twice timeout", _outcome),
    "Transaction.abandon": _of_transaction("timeout", lambda tx: tx.abandon()),
    # The registry itself.
    "Registry.get": _of_registry("timeout", lambda registry: registry.get("a/b")),
    "Registry.scan": _of_registry("timeout", lambda registry: registry.scan("a/")),
    "Registry.snapshot": _of_registry("timeout", lambda registry: list(registry.snapshot().scan(""))),
    "Registry.commit": _of_registry("timeout", lambda registry: registry.commit(put={"a/b": b""})),
    "Registry.lease": _of_registry("timeout", lambda registry: registry.lease(10)),
    "Registry.attach": Call("timeout", _attach),
    "Registry.watch": _of_registry("timeout", lambda registry: registry.watch(f"n{uuid.uuid4().hex[:8]}/")),
    "Registry.check_usable": _of_registry("at once", lambda registry: registry.check_usable()),
    "Registry.sql_place": _of_registry("timeout", lambda registry: registry.sql_place()),
    "Registry.close": Call("close", _close_registry),
    "Lease.renew": _of_lease("timeout", lambda lease: lease.renew()),
    "Lease.end": _of_lease("timeout", lambda lease: lease.end()),
    "Lease.close": _of_lease("timeout", lambda lease: lease.close()),
    "Lease.expire": _of_lease("at once", lambda lease: lease.expire()),
    "Lease.abandon": _of_lease("at once", lambda lease: lease.abandon()),
    "Lease.alive": _of_lease("at once", lambda lease: lease.alive),
    "Lease.is_renewed": _of_lease("at once", lambda lease: lease.is_renewed),
    "Lease.check": _of_lease("at once", lambda lease: lease.check()),
    "Watch.wait": _of_watch("its own", lambda watch: watch.wait(STOP_S)),
    "Watch.wait_until": Call(
        "its own",
        lambda world: (lambda watch, clock: lambda: watch.wait_until(clock.now() + STOP_S, clock))(
            world.opened.watch(f"{world.new_name()}/"), world.opened.clock
        ),
    ),
    "Watch.close": _of_watch("timeout", lambda watch: watch.close()),
    "Watch.covers": _of_watch("at once", lambda watch: watch.covers("a")),
    "Watch.is_closed": _of_watch("at once", lambda watch: watch.is_closed),
    "Watch.subscribe": _of_watch("at once", lambda watch: watch.subscribe(lambda: None)),
    "Watch.wake": _of_watch("at once", lambda watch: watch.wake()),
    # A table, opened without a hub.
    "SqlTable.bounds": _of_table("read_timeout", lambda table: table.bounds([0])),
    "SqlTable.start": _of_table("read_timeout", lambda table: table.start(0)),
    "SqlTable.end": _of_table("read_timeout", lambda table: table.end(0)),
    "SqlTable.ends": _of_table("read_timeout", lambda table: table.ends()),
    "SqlTable.extents": _of_table("read_timeout", lambda table: table.extents()),
    "SqlTable.offset_at": _of_table("read_timeout", lambda table: table.offset_at(0, 0)),
    "SqlTable.read": _of_table("read_timeout", lambda table: table.read(0, 0)),
    "SqlTable.batches": _of_table("read_timeout", lambda table: list(table.batches(0, 0))),
    "SqlTable.scan": _of_table("read_timeout", lambda table: list(table.scan(0, 10, 10))),
    "SqlTable.fetch": _of_table("read_timeout", lambda table: table.fetch({0: 10}, timeout=STOP_S)),
    "SqlTable.readable": _of_table("read_timeout", lambda table: table.readable({0: 10})),
    "SqlTable.was_given_out": _of_table("read_timeout", lambda table: table.was_given_out(0, 1)),
    "SqlTable.close": _of_table("read_timeout", lambda table: table.close()),
}
"""By name: every public call that may wait."""


def _described(hub: Hub) -> pxrs.Topic:
    return pxrs.Topic(f"n{uuid.uuid4().hex[:8]}", uuid.uuid4().hex, 1)


def check_calls(
    world: World, stop: Callable[[], None], resume: Callable[[], None], calls: Collection[str] = TABLE.keys()
) -> dict[str, object]:
    """Prepare all calls, let nothing answer any more (`stop`), and make them, each on a thread of its own. Fails with
    the name and the stack of each call that has neither returned nor raised within its limit, and with every error that
    is none of pxrs. Returns what became of each call: what it returned, or the error.

    calls: the names of those that are made."""
    try:
        thunks = {name: TABLE[name].prepare(world) for name in calls}
        stop()
        ended = _make_together(world, thunks)
    finally:
        resume()
        world.stack.close()
    foreign = {name: error for name, error in ended.items() if isinstance(error, Exception) and not _is_ours(error)}
    assert foreign == {}
    return ended


def _make_together(world: World, thunks: dict[str, Thunk]) -> dict[str, object]:
    ended: dict[str, object] = {}

    def run(name: str) -> None:
        try:
            ended[name] = thunks[name]()
        except BaseException as error:  # noqa: BLE001 - returned
            ended[name] = error

    threads = {name: threading.Thread(target=run, args=(name,), name=name, daemon=True) for name in thunks}
    began = time.monotonic()
    for thread in threads.values():
        thread.start()
    late = []
    for name, thread in sorted(threads.items(), key=lambda item: LIMITS[TABLE[item[0]].limit](world)):
        limit_s = LIMITS[TABLE[name].limit](world) + SLACK_S
        thread.join(max(0.0, began + limit_s - time.monotonic()))
        if thread.is_alive():
            frame = sys._current_frames().get(thread.ident or 0)
            where = "".join(traceback.format_stack(frame)) if frame is not None else "it has just ended"
            late.append(f"{name} has not ended within its limit, {TABLE[name].limit} ({limit_s:g} s):\n{where}")
    assert not late, "\n".join(late)
    return ended


def _is_ours(error: Exception) -> bool:
    return isinstance(error, PxrsError)


OF_THE_REGISTRY: Final = [
    name
    for name, call in TABLE.items()
    if ("timeout" in call.limit.split() and not name.startswith("TopicsConsumer."))
    or name in ("Hub.close", "Registry.close")
]
"""Calls that need the registry."""
