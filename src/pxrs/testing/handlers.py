"""For tests of your own handlers: a hub in memory on a clock that only the test moves, messages and items made by hand,
and functions that run a handler over a topic or a queue. Needs neither pytest nor a server.

    clock = ManualClock()
    with memory_hub(clock) as hub:
        hub.create_queue("mail", backoff=FixedBackoff(3600)).put("hello")
        drain_queue(hub, "mail", send_mail)      # fails: the item waits for an hour
        clock.advance(3600)
        drain_queue(hub, "mail", send_mail)      # is delivered again
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Unpack

from pxrs import arguments
from pxrs.clock import Clock, ManualClock, wall_time_us
from pxrs.consumer.runner import Handler
from pxrs.errors import DrainLimitReached, InvalidArgument, InvalidGroup
from pxrs.handler import OF_A_MESSAGE, check_result, fault_of
from pxrs.hub import Hub
from pxrs.log.memory import MemoryLog
from pxrs.model import Message, microseconds_of
from pxrs.options import ConsumerOptions
from pxrs.queue.handle import QueueHandle
from pxrs.queue.items import Item
from pxrs.queue.listener import Handled, QueueListener
from pxrs.queue.listener import Handler as QueueHandler
from pxrs.registry.memory import MemoryRegistry, MemoryStore

DELIVERIES_MAX: Final = 1_000
"""How many deliveries `drain_queue` makes by default before it gives up."""


@contextmanager
def memory_hub(clock: Clock) -> Iterator[Hub]:
    """A hub in memory, closed at the end of the `with` block, on which time passes when `clock` is advanced.

    This clock decides about leases, hand-over and progress deadlines, `commit_interval` and `retry_pause` of consumers;
    delays and backoffs of queues, and the times of their items; and the age that retention counts. Timeouts of calls,
    such as `poll(timeout=...)` and `take(timeout=...)`, and the times of messages stay on the machine's clock.

    Retention is applied when the test calls `hub.topic(name).retain()` or `hub.run_upkeep()`, not by a thread."""
    with Hub(MemoryLog(clock), MemoryRegistry(MemoryStore(clock)), upkeep=False) as hub:
        yield hub


def message(
    value: bytes | str | None = b"",
    key: bytes | str | None = None,
    *,
    topic: str = "test",
    partition: int = 0,
    offset: int = 0,
    timestamp: int | datetime | None = None,
    headers: Mapping[str, bytes] | Iterable[tuple[str, bytes]] | None = None,
    epoch: int = 1,
) -> Message:
    """A message as a handler gets it, made by hand. str is taken as UTF-8, as `Producer.send` does.

    timestamp: microseconds since 1970, or a datetime with a time zone; the machine's present time if none is given."""
    if isinstance(timestamp, datetime):
        if timestamp.tzinfo is None:
            raise InvalidArgument(f"timestamp: the time {timestamp} has no time zone; give one, such as UTC")
        timestamp = microseconds_of(timestamp)
    elif timestamp is None:
        timestamp = wall_time_us()
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return Message(
        topic,
        partition,
        offset,
        None if key is None else _bytes_of("key", key),
        None if value is None else _bytes_of("value", value),
        timestamp,
        None if pairs is None else [(name, _bytes_of(f"header {name}", content)) for name, content in pairs],
        epoch,
    )


def item(
    value: bytes | str = b"",
    key: bytes | str | None = None,
    *,
    queue: str = "test",
    id: str | None = None,
    priority: int = 0,
    deliveries: int = 1,
    put_at: float | datetime | None = None,
    error: str = "",
) -> Item:
    """An item as a handler gets it from a queue, made by hand. str is taken as UTF-8, as `put` does.

    id:         a new one if none is given.
    deliveries: how often it was delivered, this time included.
    put_at:     seconds since 1970, or a datetime with a time zone; the machine's present time if none is given.
    error:      what the delivery before this one failed with."""
    if isinstance(put_at, datetime):
        if put_at.tzinfo is None:
            raise InvalidArgument(f"put_at: the time {put_at} has no time zone; give one, such as UTC")
        put_at = put_at.timestamp()
    elif put_at is None:
        put_at = wall_time_us() / 1e6
    return Item(
        queue,
        secrets.token_hex(12) if id is None else id,
        _bytes_of("value", value),
        None if key is None else _bytes_of("key", key),
        priority,
        deliveries,
        put_at,
        error,
    )


def drain(
    hub: Hub,
    topic: str,
    handler: Handler,
    group: str = "test",
    *,
    dead_letters: str | None = None,
    **options: Unpack[ConsumerOptions],
) -> int:
    """Call the handler with every message up to the topic's present end that the group has not done. Returns how many
    were handled.

    The first message that the handler fails on raises HandlerFailed, and is the first one of the next call. The other
    arguments are those of `Hub.consumer`, except `until`, which is "end" here: with `on_error="dead-letter",
    dead_letters=TOPIC` such a message goes to that topic and counts as done. With `on_error="retry"` it is tried again
    at once: nobody would advance the clock meanwhile, so `retry_pause` is 0 here."""
    if options.setdefault("until", "end") != "end":
        raise InvalidGroup(f"until is {options['until']!r}: drain always reads up to the topic's end; remove it")
    options.setdefault("on_error", "raise")
    options["retry_pause"] = 0
    count = 0

    if fault := fault_of("the handler", handler, OF_A_MESSAGE):  # `run` sees only the function below
        raise InvalidGroup(fault)

    def counted(message: Message) -> None:
        nonlocal count
        check_result(handler(message))
        count += 1

    with hub.consumer(topic, group, dead_letters=dead_letters, **options) as inbox:
        inbox.run(counted)
    return count


@dataclass(frozen=True, slots=True)
class Drained:
    """What `drain_queue` did."""

    deliveries: tuple[Handled, ...]
    """Every call of the handler, in order: the item, the outcome, and the exception if there was one."""
    advanced_s: float = 0.0
    """How many seconds the clock was advanced."""

    @property
    def done(self) -> list[Item]:
        """The items that were handled and are gone from the queue."""
        return [each.item for each in self.deliveries if each.outcome == "committed"]

    @property
    def failed(self) -> list[Item]:
        """The items that were given back, once for each time: to wait for their backoff, or as dead letters."""
        return [each.item for each in self.deliveries if each.outcome != "committed"]

    @property
    def errors(self) -> list[Exception]:
        """What the handler raised, and what kept deliveries from being committed."""
        return [each.error for each in self.deliveries if each.error is not None]


def drain_queue(
    hub: Hub, queue: str, handler: QueueHandler, *, advance: bool = False, deliveries_max: int = DELIVERIES_MAX
) -> Drained:
    """Call the handler, on this thread, with every item of the queue that can be taken now, until there is none.

    Each call has a transaction of its own, as with `QueueListener`: what the handler puts is put when it returns; if it
    raises, the queue's policy and backoff decide whether the item comes again, when, or becomes a dead letter.

    advance:        when nothing can be taken, advance the hub's ManualClock to the time at which the next item can, so
                    that delays and backoffs end, until the queue has no such item. A step that is longer than a lease
                    ends that lease: of every consumer, and of every transaction that is open.
    deliveries_max: how many calls are made at most. Raises DrainLimitReached if an item can be taken after that.
    """
    deliveries_max = arguments.whole(InvalidArgument, "deliveries_max", deliveries_max, 1)
    clock = hub.registry.clock
    if advance and not isinstance(clock, ManualClock):
        raise InvalidArgument("advance=True moves a ManualClock, but this hub has the machine's clock: use memory_hub")
    handle = hub.queue(queue)
    store = handle.store
    deliveries: list[Handled] = []
    advanced_s = 0.0
    listener = QueueListener(handle, handler)
    try:
        while True:
            if len(deliveries) >= deliveries_max and _can_be_taken(handle):
                raise _limit_reached(queue, deliveries)
            handled = listener.handle_next()
            if handled is not None:
                deliveries.append(handled)
                continue
            due_at = store.next_due_at(store.catalog.queue(queue)) if advance else None
            if due_at is None or not isinstance(clock, ManualClock):
                return Drained(tuple(deliveries), advanced_s)
            step_s = max(0.0, due_at - store.wall_time())
            clock.advance(step_s)
            advanced_s += step_s
    finally:
        listener.close()


def _can_be_taken(handle: QueueHandle) -> bool:
    """Whether an item is ready. In a strict queue it may have to wait in its place."""
    due_at = handle.store.next_due_at(handle.store.catalog.queue(handle.name))
    return bool(handle.peek()) and not (handle.is_fifo and due_at is not None)


def _limit_reached(queue: str, deliveries: list[Handled]) -> DrainLimitReached:
    errors = [each.error for each in deliveries if each.error is not None]
    limit = DrainLimitReached(queue, len(deliveries), len(errors))
    limit.__cause__ = errors[-1] if errors else None
    return limit


def _bytes_of(name: str, given: bytes | str) -> bytes:
    if isinstance(given, str):
        return given.encode()
    if not isinstance(given, bytes):
        raise InvalidArgument(f"{name} is {arguments.shown(given)}: give bytes, or str, which is encoded as UTF-8")
    return given
