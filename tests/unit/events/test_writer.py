"""The writer of events: bounded, never in the way, and honest about what it could not keep."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

import pxrs
from pxrs.errors import AppendFailed, LogNotWritable, NotPermitted
from pxrs.events.buffer import REFUSALS_MAX
from pxrs.events.model import EVENT_BYTES_MAX, Event
from pxrs.events.storing import EventStore
from pxrs.events.writer import EventWriter
from pxrs.log.memory import MemoryLog
from pxrs.model import EVENTS_TOPIC
from pxrs.testing.waiting import aside, eventually

WAIT_S = 20.0


class Gated(EventStore):
    """A store whose appends wait until the test lets them go on, or fail as it says."""

    def __init__(self) -> None:
        super().__init__(MemoryLog(), lambda: None)
        self.is_free, self.entered = threading.Event(), threading.Semaphore(0)
        self.errors: list[Exception] = []
        self.stored: list[Event] = []
        self.broken, self.failed = "", threading.Semaphore(0)
        """The topic that cannot be written to; released for each failure of that."""
        self.refused: set[str] = set()
        """The members of which a server stores no event."""
        self.refusals = 0

    def store(self, name: str, events: Sequence[Event]) -> None:
        self.entered.release()
        assert self.is_free.wait(WAIT_S)
        if self.errors:
            raise self.errors.pop(0)
        if name == self.broken:
            self.failed.release()
            raise AppendFailed("no space left")
        if any(each.fields.get("member") in self.refused for each in events):
            self.refusals += 1
            raise NotPermitted("not permitted")
        super().store(name, events)
        self.stored += events


@pytest.fixture
def store() -> Gated:
    return Gated()


@pytest.fixture
def make(store: Gated) -> Iterator[Callable[..., EventWriter]]:
    made: list[EventWriter] = []

    def make(buffer_max: int = 100) -> EventWriter:
        made.append(EventWriter(store, "memory:", buffer_max=buffer_max))
        return made[-1]

    yield make
    store.is_free.set()
    for writer in made:
        writer.close()


def test_recording_does_not_wait_for_the_log_and_a_full_buffer_drops_counts_and_says_so_once(
    store: Gated, make: Callable[..., EventWriter], caplog: pytest.LogCaptureFixture
) -> None:
    writer = make(buffer_max=5)
    writer.record("member.joined", group="g", member="first")
    assert store.entered.acquire(timeout=WAIT_S)  # the thread is in the append, which does not end
    for number in range(12):
        writer.record("member.joined", group="g", member=str(number))
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert [each.getMessage() for each in warnings] == [
        "5 events of memory: are waiting to be stored: further events are dropped until there is room"
    ]
    store.is_free.set()
    assert writer.flush(WAIT_S)
    assert [each.fields.get("member") for each in store.stored][:6] == ["first", "0", "1", "2", "3", "4"]
    (dropped,) = (each for each in store.stored if each.name == "events.dropped")
    assert dropped.fields["count"] == 7
    (line,) = (each for each in caplog.records if vars(each).get("event") == "events.dropped")
    assert (line.name, line.levelname, vars(line)["count"]) == ("pxrs.events.events", "WARNING", 7)


def test_an_outage_of_the_events_neither_delays_nor_drops_nor_repeats_what_administrators_did(
    make: Callable[..., EventWriter], store: Gated
) -> None:
    """The disk has room for the audit, and `_events` cannot be written to."""
    store.is_free.set()
    store.broken = EVENTS_TOPIC
    writer = make(buffer_max=5)
    for number in range(20):
        writer.record("member.joined", group="g", member=str(number))
    assert store.failed.acquire(timeout=WAIT_S)
    writer.audit("delete_topic", topic="orders")
    for _ in range(3):  # pauses of an outage
        assert store.failed.acquire(timeout=WAIT_S)
    assert [each.name for each in store.stored] == ["audit.delete_topic"]
    store.broken = ""
    assert writer.flush(WAIT_S)
    assert [each.name for each in store.stored].count("audit.delete_topic") == 1


def test_an_event_that_the_server_refuses_is_dropped_and_the_others_of_its_batch_are_stored(
    make: Callable[..., EventWriter], store: Gated, caplog: pytest.LogCaptureFixture
) -> None:
    store.refused = {"1", "3"}
    told: list[str] = []
    writer = make()
    for name in "01234":
        writer.record("member.joined", functools.partial(told.append, name), group="g", member=name)
    store.is_free.set()
    assert writer.flush(WAIT_S)
    assert [each.fields["member"] for each in store.stored] == told == ["0", "2", "4"]
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert warnings == ["an event of memory: was refused: not permitted"] * 2


def test_a_process_that_may_record_nothing_asks_only_so_often(make: Callable[..., EventWriter], store: Gated) -> None:
    store.refused = {"m"}
    store.is_free.set()
    writer = make(buffer_max=1_000)
    for _ in range(2 * REFUSALS_MAX):
        writer.record("member.joined", group="g", member="m")
    assert writer.flush(WAIT_S)
    assert store.refusals <= REFUSALS_MAX + 1
    assert not writer.keep(Event("member.joined", 1, {"member": "n"}))


def test_a_forked_child_only_logs(make: Callable[..., EventWriter], store: Gated) -> None:
    store.is_free.set()
    writer = make()
    setattr(writer, "_pid", -1)  # noqa: B010 - as the child finds it, which has another process id
    writer.record("member.joined", group="g", member="m")
    writer.close()
    assert store.stored == []
    assert not writer.keep(Event("member.joined", 1, {}))


def test_events_that_are_withdrawn_are_not_stored(make: Callable[..., EventWriter], store: Gated) -> None:
    writer = make()
    first, second, third = (Event("member.joined", 1, {"member": "m"}) for _ in range(3))
    assert writer.keep(first)
    assert store.entered.acquire(timeout=WAIT_S)  # the first is being stored
    assert writer.keep(second)
    assert writer.keep(third)
    writer.withdraw([first, second])
    store.is_free.set()
    assert writer.flush(WAIT_S)
    assert [id(each) for each in store.stored] == [id(first), id(third)]


def test_a_failure_is_logged_as_an_outage_and_the_events_are_stored_later(
    store: Gated, make: Callable[..., EventWriter], caplog: pytest.LogCaptureFixture
) -> None:
    store.errors = [AppendFailed("no space left"), AppendFailed("no space left")]
    store.is_free.set()
    writer = make()
    writer.record("member.joined", group="g", member="m")
    assert writer.flush(WAIT_S)
    assert [each.name for each in store.stored] == ["member.joined"]
    assert [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING] == [
        "events of memory: are not stored: no space left; will try again"
    ]


def test_a_process_that_may_not_write_keeps_no_events_and_goes_on(
    store: Gated, make: Callable[..., EventWriter], caplog: pytest.LogCaptureFixture
) -> None:
    store.errors = [LogNotWritable("memory:", "read-only")]
    store.is_free.set()
    writer = make()
    with caplog.at_level(logging.INFO, "pxrs"):
        writer.record("member.joined", group="g", member="m")
        assert writer.flush(WAIT_S)
        writer.record("member.left", group="g", member="m")
        assert writer.flush(WAIT_S)
    assert store.stored == []
    assert [each.getMessage() for each in caplog.records] == [
        "group g: m joined",
        "events of memory: are logged but not stored: read-only",
        "group g: m left",
    ]


def test_close_stores_what_waits_and_the_callback_tells_that_it_is_stored(
    store: Gated, make: Callable[..., EventWriter]
) -> None:
    told: list[str] = []
    writer = make()
    writer.record("member.joined", lambda: told.append("first"), group="g", member="m")
    assert store.entered.acquire(timeout=WAIT_S)  # it is being stored
    writer.record("member.left", lambda: told.append("second"), group="g", member="m")
    assert told == []
    closing = aside(writer.close)
    eventually(lambda: not writer.keep(Event("member.joined", 1, {"member": "late"})))
    store.is_free.set()
    closing.result(WAIT_S)
    eventually(lambda: told == ["first", "second"], what=lambda: told)
    assert [each.name for each in store.stored if each.fields["member"] == "m"] == ["member.joined", "member.left"]


def test_one_event_is_one_line_of_the_log_with_its_name_and_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pxrs.events"), pxrs.open("memory:") as hub:
        hub.create_topic("orders", partitions=3)
        assert hub.parts.events.flush(WAIT_S)
    (line,) = (each for each in caplog.records if each.name.startswith("pxrs.events"))
    assert line.name == "pxrs.events.audit"
    assert line.getMessage().endswith(": topic orders was created")
    found = vars(line)
    assert (found["event"], found["topic"], found["partitions"]) == ("audit.create_topic", "orders", 3)


def test_an_event_that_is_too_large_is_shortened_and_says_so() -> None:
    text = Event("partition.paused", 1, {"offset": 7, "error": "x" * (1 << 20)}).dump()
    assert len(text) < EVENT_BYTES_MAX
    assert Event.load(text) == Event("partition.paused", 1, {"offset": 7, "error": "x" * 1000 + "..."})
    wide = Event("partition.paused", 1, {"offset": 7, "many": ["y" * 100] * 1000}).dump()
    assert Event.load(wide) == Event("partition.paused", 1, {"offset": 7, "shortened": True})


def test_an_action_on_very_many_partitions_still_says_who_did_it_to_what() -> None:
    offsets = {"orders": dict.fromkeys(range(10_000), 123_456)}
    stored = Event("audit.reset", 1, {"who": "anna@host", "group": "g", "offsets": offsets, "force": True}).dump()
    assert len(stored) <= EVENT_BYTES_MAX
    assert Event.load(stored) == Event(
        "audit.reset", 1, {"who": "anna@host", "group": "g", "force": True, "shortened": True}
    )


class Unwilling:
    def __str__(self) -> str:
        raise RuntimeError("cannot be shown")


def test_a_value_that_cannot_be_stored_keeps_no_other_event_from_being_stored() -> None:
    endless: dict[str, object] = {}
    endless["itself"] = endless
    with pxrs.open("memory:") as hub:
        hub.create_topic("orders", partitions=1)
        events = hub.parts.events
        values: list[object] = [endless, {(1, 2): 3}, "\ud800", 1 << 80]
        for value in values:
            assert events.keep(Event("audit.retain", 1, {"topic": value, "starts": 7}))
        assert events.keep(Event("audit.retain", 1, {"topic": Unwilling(), "starts": 7}))
        hub.create_topic("more", partitions=1)
        *odd, first, last = hub.audit()  # in the order of their times
    assert (first.fields["topic"], last.fields["topic"]) == ("orders", "more")
    assert [each.fields for each in odd] == [
        *({"topic": "<dict>", "starts": 7}, {"topic": "<dict>", "starts": 7}, {"topic": "\ud800", "starts": 7}),
        *({"topic": 1 << 80, "starts": 7}, {"topic": "<Unwilling>", "starts": 7}),
    ]


@pytest.mark.parametrize(
    "value",
    [
        *(None, b"", b"{}", b"[]", b'{"name": 1, "at": 2, "fields": {}}', b"\xff", b"[" * 10**5),
        b'{"name": "a.b", "at": -1, "fields": {}}',
        b'{"name": "a.b", "at": 9223372036854775808, "fields": {}}',
    ],
)
def test_what_is_no_event_is_not_taken_for_one(value: bytes | None) -> None:
    assert Event.load(value) is None
