"""A handler that raises leaves a trace: in the log, with the pause, with the dead letter, and in what shows them.

Memory hub, real threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import pxrs
from pxrs.consumer.consumer import Consumer
from pxrs.consumer.dead_letters import DeadLetterTopic
from pxrs.consumer.dead_letters import send as send_dead_letter
from pxrs.errors import AppendFailed, Closed, HandlerFailed, InvalidGroup, PartitionsPaused
from pxrs.failures import TRACEBACK_CHARACTERS_MAX, Failure
from pxrs.group.records import Keys, Paused
from pxrs.hub import Hub
from pxrs.log.memory import MemoryTopic
from pxrs.log.outcomes import Outcome
from pxrs.model import Message
from pxrs.producer.producer import Producer
from pxrs.producer.tables import MESSAGE_BYTES_MAX
from pxrs.testing.waiting import aside, eventually
from pxrs.wording import decisions

PATIENCE_S = 30.0
SOON_S = 0.02


@pytest.fixture
def hub() -> Iterator[Hub]:
    with pxrs.open("memory:") as hub:
        yield hub


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> Callable[[], list[logging.LogRecord]]:
    caplog.set_level(logging.INFO, "pxrs")
    return lambda: [each for each in caplog.records if each.name == "pxrs.consumer.runner"]


def create(hub: Hub, count: int = 1, partitions: int = 1) -> None:
    hub.create_topic("t", partitions=partitions)
    with hub.producer("t") as out:
        for partition in range(partitions):
            for number in range(count):
                out.send(b"%d" % number, b"k", partition=partition)


def reject(message: Message) -> None:
    raise ValueError(f"not {message.offset}")


def paused(hub: Hub, partition: int = 0) -> Paused | None:
    entry = hub.registry.get(Keys("g").pause(hub.topic("t").id, partition))
    return None if entry is None else Paused.load(entry.key, entry.value)


def member(hub: Hub, **options: Any) -> Consumer:
    """As a hub makes it; or by its constructor, which takes a function that opens the producer of dead letters."""
    if callable(options.get("dead_letters")):
        return Consumer(hub.topic("t").log, hub.registry, "g", commit_interval=SOON_S, **options)
    return hub.consumer("t", "g", commit_interval=SOON_S, **options)


def run_to_the_end(hub: Hub, handler: Callable[[Message], Any] = reject, **options: Any) -> None:
    with member(hub, until="end", **options) as inbox:
        aside(lambda: inbox.run(handler)).result(PATIENCE_S)


@contextmanager
def running(hub: Hub, handler: Callable[[Message], Any] = reject, **options: Any) -> Iterator[None]:
    with member(hub, **options) as inbox:
        run = aside(lambda: inbox.run(handler))
        yield
        inbox.stop()
        run.result(PATIENCE_S)


# The log.


def test_x14_a_pause_is_logged_with_what_was_raised_and_where(
    hub: Hub, records: Callable[[], list[logging.LogRecord]]
) -> None:
    create(hub, 3)
    with pytest.raises(PartitionsPaused) as paused:
        run_to_the_end(hub)
    (record,) = records()
    assert record.levelno == logging.ERROR
    commands = decisions("g", "t", 0, hub.parts.place)
    assert record.getMessage() == (
        f"group g, t/0 offset 0: the handler failed, pausing the partition until {commands}: ValueError: not 0"
    )
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)
    fields = ("group", "topic", "partition", "offset", "error_type")
    assert [getattr(record, name) for name in fields] == ["g", "t", 0, 0, "ValueError"]
    assert str(paused.value).endswith(f", short of the end; continue with {commands}")


def test_x14_each_try_of_a_retry_is_logged_the_first_alone_with_its_traceback(
    hub: Hub, records: Callable[[], list[logging.LogRecord]]
) -> None:
    create(hub)
    with pytest.raises(PartitionsPaused):
        run_to_the_end(hub, on_error="retry", retries_max=2, retry_pause=0.001)
    first, second, last = records()
    assert [bool(each.exc_info) for each in (first, second, last)] == [True, False, True]
    assert "try 1 of 3, trying again in 0.001 s: ValueError: not 0" in first.getMessage()
    assert "try 2 of 3, trying again in 0.002 s: ValueError: not 0" in second.getMessage()
    assert "pausing the partition" in last.getMessage()
    assert [each.levelno for each in (first, second, last)] == [logging.WARNING, logging.WARNING, logging.ERROR]


def test_x14_another_error_of_a_later_try_is_logged_with_its_own_traceback(
    hub: Hub, records: Callable[[], list[logging.LogRecord]]
) -> None:
    create(hub)
    errors: list[Exception] = [ValueError("first"), ValueError("again"), KeyError("another")]

    def handle(message: Message) -> None:
        if errors:
            raise errors.pop(0)

    run_to_the_end(hub, handle, on_error="retry", retries_max=5, retry_pause=0)
    assert [bool(each.exc_info) for each in records()] == [True, False, True]


def test_x14_a_dead_letter_is_logged(hub: Hub, records: Callable[[], list[logging.LogRecord]]) -> None:
    create(hub)
    hub.create_topic("dead", partitions=1)
    run_to_the_end(hub, on_error="dead-letter", dead_letters="dead")
    (record,) = records()
    assert (record.levelno, bool(record.exc_info)) == (logging.WARNING, True)
    assert "t/0 offset 0: the handler failed, the message goes to the dead letters: ValueError" in record.getMessage()


def test_x14_a_handler_that_fails_on_every_message_does_not_flood_the_log(
    hub: Hub, records: Callable[[], list[logging.LogRecord]]
) -> None:
    create(hub, 500)
    hub.create_topic("dead", partitions=1)
    run_to_the_end(hub, on_error="dead-letter", dead_letters="dead")
    *some, last = records()
    assert len(some) == 5
    assert last.left_out == 495  # type: ignore[attr-defined]
    assert "offset 499" in last.getMessage()
    assert hub.topic("dead").end(0) == 500


def test_x14_the_count_of_what_was_left_out_is_logged_though_run_raises(
    hub: Hub, records: Callable[[], list[logging.LogRecord]]
) -> None:
    create(hub, partitions=8)
    with pytest.raises(PartitionsPaused):
        run_to_the_end(hub)
    assert [getattr(each, "left_out", 0) for each in records()] == [0] * 5 + [3]


def test_x14_of_two_handlers_that_end_the_run_the_one_that_is_not_raised_is_logged(
    hub: Hub, records: Callable[[], list[logging.LogRecord]]
) -> None:
    create(hub, partitions=2)
    both = threading.Barrier(2)

    def handle(message: Message) -> None:
        both.wait(PATIENCE_S)
        raise ValueError(f"partition {message.partition}")

    with hub.consumer("t", "g", on_error="raise") as inbox:
        run = aside(lambda: inbox.run(handle, threads=2))
        with pytest.raises(HandlerFailed) as caught:
            run.result(PATIENCE_S)
    (record,) = [each for each in records() if "HandlerFailed" in each.getMessage()]
    told = {"partition 0", "partition 1"}
    assert {each for each in told if each in str(caught.value) + record.getMessage()} == told


# What is kept.


def test_x14_a_pause_keeps_type_message_and_a_bounded_traceback(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    # What is captured of the log goes from one process of the tests to another, which a lone surrogate cannot.
    caplog.set_level(logging.CRITICAL, "pxrs")
    create(hub, 3)

    def handle(message: Message, depth: int = 300) -> None:
        if depth:
            handle(message, depth - 1)
        raise UnicodeError(f"caf\udce9 {message.offset}" + "x" * 100_000)

    with pytest.raises(PartitionsPaused):
        run_to_the_end(hub, handle)
    (row,) = hub.group("g").describe().partitions
    assert row.paused is not None
    assert row.error_type == row.paused.error_type == "UnicodeError"
    assert row.error is not None
    assert row.error.startswith("UnicodeError: caf\\udce9 0xxx")
    assert row.traceback is not None
    assert len(row.error) <= 2_000
    assert len(row.traceback) <= TRACEBACK_CHARACTERS_MAX
    assert "in handle" in row.traceback
    (plain,) = hub.group("g").describe().to_arrow().to_pylist()
    assert (plain["error_type"], plain["traceback"]) == ("UnicodeError", row.traceback)
    hub.group("g").skip("t", 0)
    (row,) = hub.group("g").describe().partitions
    assert row.paused is not None
    assert (row.paused.skip, row.paused.error_type) == (True, "UnicodeError"), "a decision keeps what it is about"


def test_x14_a_pause_of_version_0_1_is_still_read() -> None:
    old = b'{"offset":3,"error":"ValueError: no","when":5.0,"by":"anna","skip":false}'
    assert Paused.load("k", old) == Paused(3, "ValueError: no", 5.0, "anna")


def test_x14_a_dead_letter_carries_type_and_traceback(hub: Hub) -> None:
    create(hub)
    hub.create_topic("dead", partitions=1)
    run_to_the_end(hub, on_error="dead-letter", dead_letters="dead")
    (dead,) = hub.topic("dead").messages(0)
    headers = dict(dead.headers or [])
    assert headers["pxrs-reason"] == b"ValueError: not 0"
    assert headers["pxrs-origin"] == b"t/0 offset 0"
    assert headers["pxrs-error-type"] == b"ValueError"
    assert b"in reject\n" in (headers["pxrs-traceback"] or b"")


def test_x14_a_run_that_has_ended_leaves_no_producer_of_dead_letters_behind(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(hub, 3)
    hub.create_topic("dead", partitions=1)
    made: list[Producer] = []
    clients = hub._clients
    producer = clients.producer

    def make(*given: Any, **options: Any) -> Producer:
        made.append(producer(*given, **options))
        return made[-1]

    monkeypatch.setattr(clients, "producer", make)
    with hub.consumer("t", "g", on_error="dead-letter", dead_letters="dead") as inbox:
        has_rejected = False

        def handle(message: Message) -> None:
            nonlocal has_rejected
            has_rejected = not has_rejected
            if not has_rejected:
                raise SystemExit  # which ends `run`, and leaves the consumer as it is
            reject(message)

        for count in (1, 2):  # the second run opens another one
            with pytest.raises(SystemExit):
                aside(lambda: inbox.run(handle)).result(PATIENCE_S)
            assert hub.topic("dead").end(0) == count == len(made)
            with pytest.raises(Closed):  # else its thread goes on, and it warns when it is collected
                made[-1].send(b"x")


# Dead letters that cannot be sent.


def test_x14_a_dead_letter_that_is_too_large_with_its_traceback_goes_without(hub: Hub) -> None:
    hub.create_topic("t", partitions=1)
    hub.create_topic("dead", partitions=1)
    with hub.producer("t") as out:
        out.send(b"x" * (MESSAGE_BYTES_MAX - 300))
    run_to_the_end(hub, on_error="dead-letter", dead_letters="dead")
    (dead,) = hub.topic("dead").messages(0)
    assert [name for name, _ in dead.headers or []] == ["pxrs-reason", "pxrs-origin", "pxrs-error-type"]


def test_x14_a_message_that_no_dead_letter_can_hold_pauses_its_partition_alone(
    hub: Hub, records: Callable[[], list[logging.LogRecord]]
) -> None:
    hub.create_topic("t", partitions=2)
    hub.create_topic("dead", partitions=1)
    with hub.producer("t") as out:
        out.send(b"x" * (MESSAGE_BYTES_MAX - 50), partition=0)
        out.send(b"small", partition=1)
    with running(hub, on_error="dead-letter", dead_letters="dead"):
        found = eventually(lambda: paused(hub), PATIENCE_S)
        eventually(lambda: hub.topic("dead").end(0) == 1, PATIENCE_S)
    assert found.offset == 0
    assert found.error.startswith(
        "ValueError: not 0; the dead letter could not be sent: pxrs.errors.InvalidRecord: dead: a"
    )
    assert found.error_type == "ValueError"
    assert any("t/0 offset 0: its dead letter could not be sent" in each.getMessage() for each in records())


def test_x14_a_deleted_dead_letter_topic_pauses_and_a_new_one_is_used_by_a_retry(hub: Hub) -> None:
    create(hub, 2)
    hub.create_topic("dead", partitions=1)
    first = threading.Event()

    def handle(message: Message) -> None:
        if message.offset == 1:
            assert first.wait(PATIENCE_S)
        raise ValueError("no")

    with running(hub, handle, on_error="dead-letter", dead_letters="dead"):
        eventually(lambda: hub.topic("dead").end(0) == 1, PATIENCE_S)  # a producer is open
        hub.delete_topic("dead")
        first.set()
        found = eventually(lambda: paused(hub), PATIENCE_S)
        assert (found.offset, "TopicDeleted: topic 'dead' was deleted" in found.error) == (1, True)
        hub.create_topic("dead", partitions=1)
        hub.group("g").retry("t", 0)
        eventually(lambda: hub.topic("dead").end(0) == 1, PATIENCE_S)


def test_x14_a_full_disk_below_the_dead_letters_pauses_and_a_retry_works_when_there_is_room(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(hub)
    dead = hub.create_topic("dead", partitions=1)
    append, is_full = MemoryTopic.append, threading.Event()
    is_full.set()

    def limited(self: MemoryTopic, batches: Any) -> list[Outcome]:
        if self.name == "dead" and is_full.is_set():
            raise AppendFailed("no space left on device")
        return append(self, batches)

    monkeypatch.setattr(MemoryTopic, "append", limited)
    with running(hub, on_error="dead-letter", dead_letters="dead"):
        found = eventually(lambda: paused(hub), PATIENCE_S)
        assert "AppendFailed: no space left on device" in found.error
        is_full.clear()
        hub.group("g").retry("t", 0)
        eventually(lambda: dead.end(0) == 1, PATIENCE_S)
        eventually(lambda: paused(hub) is None, PATIENCE_S)


def test_x14_a_producer_that_another_thread_has_closed_meanwhile_is_replaced(hub: Hub) -> None:
    create(hub)
    dead = hub.create_topic("dead", partitions=1)
    topic = DeadLetterTopic(lambda: hub.producer("dead"))
    opened = topic()

    def stale_at_first() -> Producer:
        """The first call returns a producer that is closed by then."""
        return opened if not opened.sending.outbox.is_closing and topic.discard(opened) is None else topic()

    (message,) = hub.topic("t").messages(0)
    send_dead_letter(stale_at_first, [hub.topic("t")], message, Failure("ValueError: no"))
    assert dead.end(0) == 1


def test_x14_a_producer_of_the_users_own_is_used_and_left_open(hub: Hub) -> None:
    create(hub)
    hub.create_topic("dead", partitions=1)
    out = hub.producer("dead")
    run_to_the_end(hub, on_error="dead-letter", dead_letters=lambda: out)
    out.send(b"still open")
    out.close()
    assert hub.topic("dead").end(0) == 2


# Dead letters that would be read again at once.


def test_x14_dead_letters_in_the_topic_itself_are_refused(hub: Hub) -> None:
    create(hub)
    with pytest.raises(InvalidGroup, match="dead_letters is the topic t itself"):
        hub.consumer("t", "g", on_error="dead-letter", dead_letters="t")
    assert hub.groups() == []


def test_x14_the_topic_itself_is_known_by_its_id(hub: Hub) -> None:
    create(hub)
    source = hub.topic("t").log
    source.name = "another-name"
    try:
        with pytest.raises(InvalidGroup, match="itself"):
            hub.consumer(source, "g", on_error="dead-letter", dead_letters="t")
    finally:
        source.name = "t"


def test_x14_a_producer_of_the_topic_itself_is_not_used_for_its_dead_letters(hub: Hub) -> None:
    create(hub)
    with hub.producer("t") as out, running(hub, on_error="dead-letter", dead_letters=lambda: out):
        found = eventually(lambda: paused(hub), PATIENCE_S)
    assert "the topic t itself" in found.error
    assert hub.topic("t").end(0) == 1
