"""A handler of a queue that raises leaves a trace: in the log, and with the dead letter."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import pxrs
from pxrs import AtLeastOnce, ConsumeOnce, ConsumeTimes, QueueListener
from pxrs.errors import RegistryUnavailable
from pxrs.failures import Failure
from pxrs.hub import Hub
from pxrs.queue import records as queue_records
from pxrs.queue.records import Record
from pxrs.testing.waiting import eventually

PATIENCE_S = 30.0


@pytest.fixture
def hub() -> Iterator[Hub]:
    with pxrs.open("memory:") as hub:
        yield hub


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> Callable[[], list[logging.LogRecord]]:
    caplog.set_level(logging.INFO, "pxrs")
    return lambda: [each for each in caplog.records if each.name == "pxrs.queue.listener"]


def reject(tx: Any, item: Any) -> None:
    raise ValueError(f"not {item.value.decode()}")


def take_and(hub: Hub, error: Exception, depth: int = 0) -> None:
    """Take an item of `q` in a transaction that ends with this error, raised so many calls deep."""

    def fail(left: int) -> None:
        if left:
            fail(left - 1)
        raise error

    def work() -> None:
        with hub.transaction() as tx:
            tx.take("q", timeout=5)
            fail(depth)

    with pytest.raises(type(error)):
        work()


def test_a_failed_delivery_is_logged_with_its_traceback_and_fields(
    hub: Hub, records: Callable[[], list[logging.LogRecord]]
) -> None:
    queue = hub.create_queue("q", ConsumeOnce())
    item = queue.put("x")
    with QueueListener(queue, reject):
        eventually(lambda: queue.depth().dead, PATIENCE_S)
    (record,) = records()
    assert record.getMessage() == f"queue q, item {item}, delivery 1: the handler failed: ValueError: not x"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)
    fields = ("queue", "item", "deliveries", "error_type")
    assert [getattr(record, name) for name in fields] == ["q", item, 1, "ValueError"]


def test_a_handler_that_fails_on_every_item_does_not_flood_the_log(
    hub: Hub, records: Callable[[], list[logging.LogRecord]]
) -> None:
    queue = hub.create_queue("q", ConsumeOnce())
    queue.put_many(str(number) for number in range(30))
    with QueueListener(queue, reject, threads=16):
        eventually(lambda: queue.depth().dead == 30, PATIENCE_S)
    *some, last = records()
    assert [bool(each.exc_info) for each in some] == [True] * 5
    assert last.left_out == 25  # type: ignore[attr-defined]


def test_an_outage_of_the_store_is_logged_a_few_times_and_then_counted(
    hub: Hub, records: Callable[[], list[logging.LogRecord]], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = hub.create_queue("q")
    listener = QueueListener(queue, reject, threads=8)
    calls: list[None] = []

    def fail(*_: Any) -> bool:
        calls.append(None)
        raise RegistryUnavailable("it is away")

    monkeypatch.setattr(listener, "_handle_one", fail)
    with listener:
        eventually(lambda: len(calls) >= 20, PATIENCE_S)
    *some, last = records()
    assert len(some) == 5
    assert last.left_out == len(calls) - 5  # type: ignore[attr-defined]


def test_what_ends_a_thread_is_logged_with_its_traceback(
    hub: Hub, records: Callable[[], list[logging.LogRecord]]
) -> None:
    queue = hub.create_queue("q")
    queue.put("x")

    def leave(tx: Any, item: Any) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        QueueListener(queue, leave).run()
    (record,) = records()
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], SystemExit)


def test_a_dead_letter_keeps_type_and_traceback_until_it_is_tried_again(hub: Hub) -> None:
    queue = hub.create_queue("q", ConsumeTimes(2))
    queue.put("x")
    with QueueListener(queue, reject):
        eventually(lambda: queue.depth().dead, PATIENCE_S)
    (dead,) = queue.dead_letters()
    assert (dead.error, dead.error_type) == ("ValueError: not x", "ValueError")
    assert "in reject\n" in dead.traceback
    queue.dead_letters().retry()
    (ready,) = queue.peek()
    assert (ready.error, ready.traceback) == ("ValueError: not x", "")


def test_an_item_that_comes_back_carries_no_traceback(hub: Hub) -> None:
    queue = hub.create_queue("q", AtLeastOnce())
    queue.put("x")
    take_and(hub, ValueError("no"))
    (ready,) = queue.peek()
    assert (ready.error, ready.traceback) == ("ValueError: no", "")


def test_a_dead_letter_of_the_largest_item_is_within_the_stores_limits(hub: Hub) -> None:
    queue = hub.create_queue("q", ConsumeOnce())
    most = hub.registry.limits.value_bytes_max - queue_records._ROOM_BYTES - 1_024 * 4 // 3
    queue.put(b"x" * most, key=b"k" * 1_024)

    take_and(hub, type("\U0001f600" * 50, (Exception,), {})("\U0001f600" * 1_000 + "caf\udce9"), depth=100)
    (entry,) = hub.registry.scan(queue.settings.dead)
    assert len(entry.value) <= hub.registry.limits.value_bytes_max
    (dead,) = queue.dead_letters()
    assert "\U0001f600" in dead.error
    dead.error_type.encode()
    dead.traceback.encode()


@pytest.mark.parametrize("letter", ["x", "\n", "é", "\U0001f600"])
def test_what_failed_grows_the_record_by_no_more_than_the_room_that_is_kept_for_it(letter: str) -> None:
    record = Record("5000", "a" * 24, 3, b"", 1_234_567_890.123456, 999_999, b"k" * 1_024)
    failure = Failure(letter * 2_000, letter * 200, "\n".join([letter * 100] * 20))
    grown = record.failed(failure, is_dead=True)
    assert len(grown.dump()) <= queue_records._ROOM_BYTES + 1_024 * 4 // 3
    assert grown.error == letter * 300
    assert Record.load(f"items/q/dead/0~{grown.name}", grown.dump()) == grown
    assert record.failed(Failure(""), is_dead=False).error == ""


def test_a_dead_letter_of_version_0_1_is_still_read() -> None:
    line = json.dumps({"put_at": 1.0, "deliveries": 2, "error": "ValueError: no"}).encode()
    found = Record.load("items/q/dead/0~5000.a.1", line + b"\nvalue")
    assert (found.error, found.error_type, found.traceback) == ("ValueError: no", "", "")
