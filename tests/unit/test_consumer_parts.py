"""The parts of a consumer, each without the others: settling by its table, changes, lanes, read-ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import pxrs
from pxrs.consumer import states
from pxrs.consumer.changes import Changes
from pxrs.consumer.lanes import Lanes
from pxrs.consumer.read_ahead import ReadAhead
from pxrs.consumer.readers import Reading
from pxrs.consumer.settling import Settling
from pxrs.consumer.states import TRANSITIONS, Event, InHand, Mode
from pxrs.errors import InvalidGroup, OutcomeLost, PartitionNotAssigned
from pxrs.group.lane import Lane
from pxrs.hub import Hub
from pxrs.log.batch import Batch
from pxrs.log.contract import Append, Fetched
from pxrs.log.memory import MemoryLog
from pxrs.testing.log_contract import new_topic, records
from pxrs.testing.waiting import aside, eventually
from pxrs.waiting import Cancel

BOUND_S = 30.0


# The table.


def test_the_table_in_the_docstring_is_the_table_that_is_applied() -> None:
    assert states.__doc__ is not None
    lines = [line.split() for line in states.__doc__.splitlines() if line.startswith("    ")]
    header = next(words for words in lines if words[0] == "mode")
    events = [Event(name) for name in " ".join(header[1:]).replace("rolled back", "rolled_back").split()[:-1]]
    events.append(Event.ROLLED_BACK)
    shown = {words[0]: words[1:] for words in lines if words[0] in Mode.__members__}
    assert shown.keys() == Mode.__members__.keys()
    for name, cells in shown.items():
        mode = Mode[name]
        for event, cell in zip(events, cells, strict=False):
            found = TRANSITIONS[mode].get(event)
            if cell in ("refused", "busy"):
                assert found is None, (mode, event)
            else:
                becomes, _, after = cell.partition(":")
                assert found == (InHand(becomes), Mode[after] if after else mode), (mode, event)


# Scenarios: who does what, line by line, and what is then true.


class Member:
    """What `Settling` needs of a member."""

    def __init__(self) -> None:
        self.wakes = 0

    def wake(self) -> None:
        self.wakes += 1


class Transaction:
    was_doubted = False

    def __init__(self, name: str) -> None:
        self.id, self.became = name, "open"

    def outcome(self) -> str:
        if self.became == "lost":
            raise OutcomeLost(self.id)
        return self.became


class Scene:
    """One lane from offset 0, and the commands of a script."""

    def __init__(self, *, is_manual: bool = False) -> None:
        self.lanes, member = Lanes("g"), Member()
        source: Any = None
        ahead = ReadAhead(
            source,
            "g",
            self.lanes,
            Changes(),
            bytes_max=1,
            skips_trimmed=False,
            ends=None,  # type: ignore[arg-type]
        )
        self.settling = Settling("g", self.lanes, ahead, member, is_manual=is_manual)  # type: ignore[arg-type]
        self.member, self.lane = member, Lane(0, 1, 0)
        self.lanes.add([self.lane])
        self.transactions: dict[str, Transaction] = {}
        self.reading: Reading | None = None

    def play(self, script: str) -> None:
        for line in filter(None, map(str.strip, script.splitlines())):
            words, _, refusal = line.partition(" refused")
            command, *given = words.split()
            if refusal or line.endswith("refused"):
                with pytest.raises(InvalidGroup):
                    getattr(self, command)(*given)
            else:
                getattr(self, command)(*given)

    def loop(self) -> None:
        self.reading = Reading("a loop", is_loop=True)
        self.settling.enter(self.reading)
        self.settling.begin(Event.LOOP)

    def leave(self) -> None:
        assert self.reading is not None
        self.reading.is_over = True

    def hand(self, end: str) -> None:
        self.settling.begin_hand_out()
        self.lane.position = self.lane.handed = int(end)

    def poll(self, end: str) -> None:
        reading = Reading("`poll`")
        self.settling.enter(reading)
        self.settling.begin_poll()
        self.hand(end)
        self.settling.note_polled(self.lane, threading.current_thread())
        reading.is_over = True

    def more(self) -> None:
        self.settling.finish(self.lane)

    def checkpoint(self, name: str) -> None:
        self.settling.hold(self.transactions.setdefault(name, Transaction(name)))

    def ends(self, name: str, *became: str) -> None:
        self.transactions[name].became = " ".join(became)

    def seek(self, offset: str) -> None:
        with self.lanes.lock:
            self.lane.seek(int(offset))

    def run(self) -> None:
        self.settling.begin(Event.RUN)

    def stop(self) -> None:
        self.lane.is_stopping = True

    def then(self, *facts: str) -> None:
        for fact in facts:
            name, _, value = fact.partition("=")
            found = {
                "done": self.lane.done,
                "position": self.lane.position,
                "held": str(self.settling.is_held()).lower(),
                "mode": self.settling.mode.value,
                "wakes": self.member.wakes,
            }[name]
            assert str(found) == value, fact


SCENARIOS = {
    "a message is done when the next one is asked for": """
        loop
        hand 1
        then done=0 position=1
        more
        then done=1""",
    "what a loop was left with is handed out again": """
        loop
        hand 1
        leave
        loop
        then done=0 position=0""",
    "what poll returned is done by the next poll": """
        poll 3
        then done=0
        poll 5
        then done=3 position=5""",
    "a transaction that is committed has done what it covers, and no more": """
        poll 3
        checkpoint t
        poll 5
        then done=0 held=true mode=held
        ends t committed
        then held=false done=3 position=5 mode=auto""",
    "a transaction that is rolled back has everything handed out again": """
        poll 3
        checkpoint t
        ends t rolled back
        then held=false done=0 position=0 mode=auto""",
    "a transaction whose outcome nobody knows any more counts as rolled back": """
        poll 3
        checkpoint t
        ends t lost
        then held=false done=0 position=0""",
    "after a seek a transaction covers nothing of the partition": """
        poll 3
        checkpoint t
        seek 1
        ends t committed
        then held=false done=1 position=1""",
    "while a transaction is open, run and another transaction are refused": """
        poll 3
        checkpoint t
        run refused
        checkpoint u refused
        then held=true done=0
        ends t committed
        run
        then mode=run done=3""",
    "the member is woken when a partition that it releases is drained": """
        loop
        hand 1
        stop
        leave
        then wakes=0
        poll 1
        then wakes=1""",
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_settling(name: str) -> None:
    Scene().play(SCENARIOS[name])


def test_ack_manual_keeps_in_hand_what_is_not_acknowledged() -> None:
    Scene(is_manual=True).play(
        """
        poll 3
        poll 5
        then done=0 position=5
        checkpoint t refused
        run refused
        then done=0 mode=manual"""
    )


def test_the_outcome_of_a_transaction_is_applied_once() -> None:
    """Two threads ask at the same time; between the two, more is handed out, which the transaction does not cover."""
    scene = Scene()
    scene.play("poll 3\ncheckpoint t")
    transaction = scene.transactions["t"]

    def outcome() -> str:
        transaction.outcome = lambda: "committed"  # type: ignore[method-assign]
        scene.settling.is_held()  # another thread was faster
        scene.lane.seek(0)
        return "committed"

    transaction.outcome = outcome  # type: ignore[method-assign]
    assert not scene.settling.is_held()
    assert scene.lane.done == 0


# Changes and lanes.


def test_every_announcement_reaches_who_took_the_change_before() -> None:
    changes = Changes()
    for _ in range(200):
        change, ready = changes.next_change, threading.Barrier(3)

        def announce(ready: threading.Barrier = ready) -> None:
            ready.wait(BOUND_S)
            changes.announce()

        threads = [threading.Thread(target=announce) for _ in range(2)]
        for thread in threads:
            thread.start()
        ready.wait(BOUND_S)
        seen = changes.next_change  # may be one that lives only between the two announcements
        for thread in threads:
            thread.join(BOUND_S)
        assert change.is_set
        assert seen.is_set or seen is changes.next_change


def test_two_announcements_at_once_exchange_different_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = Changes()
    second: list[Future[None]] = []
    seen: list[Cancel] = []

    class Slow(Cancel):
        """Made by the first announcement, which a second one tries to overtake."""

        def __init__(self) -> None:
            super().__init__()
            if not second:
                second.append(aside(changes.announce))
                wait(second, timeout=0.2)  # unless the lock keeps the second one waiting
                seen.append(changes.next_change)

    monkeypatch.setattr("pxrs.consumer.changes.Cancel", Slow)
    changes.announce()
    second[0].result(BOUND_S)
    assert seen[0].is_set, "whoever has taken it would wait for ever"


def test_readable_begins_behind_the_lane_served_last_and_leaves_out_what_has_not_arrived() -> None:
    lanes = Lanes("g")
    three = [Lane(number, 1, 0) for number in range(3)]
    lanes.add(three[2:])
    lanes.add(three[:2])
    assert lanes.readable() == []
    lanes.arrived(three)
    assert lanes.readable() == lanes.readable() == three
    for last in (1, 2, 0):
        lanes.served(three[last])
        assert lanes.readable() == three[last + 1 :] + three[: last + 1]
    lanes.remove(three[0])
    assert lanes.readable() == three[1:], "also if the lane that was served last is gone"
    lanes.add(three[:1])
    lanes.arrived(three[:1])
    three[1].is_paused = True
    assert {lane.partition for lane in lanes.readable({0: 0, 2: 5})} == {2}
    with pytest.raises(PartitionNotAssigned):
        lanes.set_paused([0, 7], True)
    assert not three[0].is_paused


def test_x16_idle_lanes_are_looked_at_only_as_long_as_more_may_be_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pxrs.consumer.read_ahead.LOOK_S", 0.0)
    log = MemoryLog()
    topic = log.create_topic(new_topic("t", 20))
    topic.append([Append.encoded(0, records([b"x" * 1_000])) for _ in range(10)])
    lanes = Lanes("g")
    owned = [Lane(number, 1, 0) for number in range(20)]
    lanes.add(owned)
    lanes.arrived(owned)
    ahead = ReadAhead(topic, "g", lanes, Changes(), bytes_max=5_000, skips_trimmed=False, ends=None)
    ahead.fetch(owned, 0.0)
    topic.append([Append.encoded(number, records([b"x" * 1_000])) for number in range(1, 20)])
    for _ in range(2):
        for _ in range(20):
            ahead.look(lanes.readable())
        assert 5_000 <= ahead.bytes_ahead() < 5_000 + 1_100, "what may be read ahead, and the rest of a batch"
        taken = ahead.take(owned[0])
        assert taken is not None
        owned[0].position = taken.next_offset
    log.close()


def test_what_was_read_before_a_seek_is_not_handed_out() -> None:
    lanes, lane = Lanes("g"), Lane(0, 1, 0)
    lanes.add([lane])
    source: Any = None
    ahead = ReadAhead(source, "g", lanes, Changes(), bytes_max=1, skips_trimmed=False, ends=None)
    batch = Batch(0, pa.RecordBatch.from_pydict({"value": [b"a", b"b"]}))
    lane.seek(7)  # between the hand-out of a part of the batch and `put_back` of the rest
    ahead.put_back(lane, batch)
    assert ahead.take(lane) is None
    assert ahead.bytes_ahead() == 0


def test_what_is_left_of_a_batch_counts_for_its_share_of_the_bytes() -> None:
    lanes, lane = Lanes("g"), Lane(0, 1, 0)
    lanes.add([lane])
    lanes.arrived([lane])
    batch = Batch(0, pa.RecordBatch.from_pydict({"value": [b"x" * 100] * 10}))
    source: Any = SimpleNamespace(
        fetch=lambda *given: {0: Fetched((batch,))}, has_latency=False, partitions=1, name="t"
    )
    ahead = ReadAhead(source, "g", lanes, Changes(), bytes_max=10_000, skips_trimmed=False, ends=None)
    ahead.fetch([lane], 0.0, Cancel())
    whole = ahead.bytes_ahead()
    for position in (0, 6):  # what `poll` does, with some of the batch handed out before the second time
        lane.position = position
        found = ahead.take(lane)
        assert found is not None
        assert found.base_offset == position
        assert ahead.bytes_ahead() == 0
        ahead.put_back(lane, found)
        assert ahead.bytes_ahead() == whole * (10 - position) // 10


class Told:
    """A source whose `fetch` does what a test wants."""

    name, has_latency = "t", True

    def __init__(self, fetch: Callable[..., Mapping[int, Fetched]]) -> None:
        self.fetch = fetch


def two_rows(base: int = 0, size: int = 1) -> Batch:
    return Batch(base, pa.RecordBatch.from_pydict({"value": [b"a" * size, b"b" * size]}))


@pytest.mark.parametrize("way", ["lost", "sought"])
def test_what_was_read_of_a_lane_that_was_lost_or_sought_meanwhile_is_not_kept(way: str) -> None:
    """It would count against what may be read ahead of the others, for ever."""
    lanes, lane = Lanes("g"), Lane(0, 1, 0)
    lanes.add([lane])

    def fetch(*given: Any) -> dict[int, Fetched]:
        with lanes.lock:
            ahead.discard(lane)
            lanes.remove(lane) if way == "lost" else lane.seek(1)
        return {0: Fetched((two_rows(),))}

    source: Any = Told(fetch)
    ahead = ReadAhead(source, "g", lanes, Changes(), bytes_max=1 << 20, skips_trimmed=False, ends=None)
    ahead.fetch([lane], 0.0, Cancel())
    assert ahead.bytes_ahead() == 0


def test_x16_no_more_is_asked_for_than_may_be_read_ahead_of_all_partitions_together() -> None:
    lanes, full, empty = Lanes("g"), Lane(0, 1, 0), Lane(1, 1, 0)
    lanes.add([full, empty])
    asked: list[int] = []

    def fetch(positions: Mapping[int, int], max_bytes: int, *given: Any) -> dict[int, Fetched]:
        asked.append(max_bytes)
        return {}

    source: Any = Told(fetch)
    ahead = ReadAhead(source, "g", lanes, Changes(), bytes_max=10_000, skips_trimmed=False, ends=None)
    ahead.put_back(full, two_rows(size=4_000))
    ahead.fetch([empty], 0.0, Cancel())
    assert asked == [10_000 - ahead.bytes_ahead()]
    assert asked[0] < 5_000, "which is the share of a partition"


# Reading ahead in the background.

BATCH_BYTES, BATCHES, PREFETCH = 100_000, 30, 1 << 20


@pytest.fixture
def hub() -> Iterator[Hub]:
    with pxrs.open("memory:") as hub:
        hub.create_topic("t", partitions=1)
        for _ in range(BATCHES):
            with hub.producer("t") as out:
                out.send_batch(pa.table({"value": [b"x" * BATCH_BYTES]}))
        yield hub


def note_reads(inbox: pxrs.Consumer, monkeypatch: pytest.MonkeyPatch, has_latency: bool = True) -> list[str]:
    """The names of the threads that read."""
    source, names = inbox._source, []
    read = source.read

    def noting(*given: Any) -> Any:
        names.append(threading.current_thread().name)
        return read(*given)

    monkeypatch.setattr(source, "read", noting)
    monkeypatch.setattr(source, "has_latency", has_latency)
    return names


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("pxrs-read-ahead")]


def test_w6_a_source_with_latency_is_read_ahead_by_a_thread_that_ends(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub.consumer("t", "g", prefetch_bytes=PREFETCH) as inbox:
        names = note_reads(inbox, monkeypatch)
        offsets = []
        for message in inbox:
            offsets.append(message.offset)
            eventually(lambda: not threads(), BOUND_S)  # what the thread reads is there before the next message
            assert inbox._read_ahead.bytes_ahead() <= PREFETCH + BATCH_BYTES
            if len(offsets) == BATCHES:
                break
        assert offsets == list(range(BATCHES))
        assert any(name.startswith("pxrs-read-ahead") for name in names)
        assert inbox.poll(timeout=0) != []  # the one that was left
        assert inbox.poll(timeout=0) == []
        assert threads() == []


def test_a_local_log_is_read_by_the_thread_that_asks(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub.consumer("t", "g", prefetch_bytes=PREFETCH, until="end") as inbox:
        names = note_reads(inbox, monkeypatch, has_latency=False)
        assert [message.offset for message in inbox] == list(range(BATCHES))
        assert set(names) == {threading.current_thread().name}


def test_a_seek_while_the_thread_reads_is_not_forgotten(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub.consumer("t", "g", prefetch_bytes=PREFETCH, until="end") as inbox:
        note_reads(inbox, monkeypatch)
        reading, go = threading.Event(), threading.Event()
        noted = inbox._source.read

        def held(*given: Any) -> Any:
            found = noted(*given)
            if threading.current_thread().name.startswith("pxrs-read-ahead") and not reading.is_set():
                reading.set()
                assert go.wait(BOUND_S)
            return found

        monkeypatch.setattr(inbox._source, "read", held)
        offsets: list[int] = []
        for message in inbox:
            offsets.append(message.offset)
            if len(offsets) == 8:  # less than half of the share is left since the sixth
                assert reading.wait(BOUND_S), "the thread has read nothing"
            if reading.is_set() and not go.is_set():
                inbox.seek(0, 1)
                go.set()
        again = offsets.index(1, 2) if 1 in offsets[2:] else None
        assert again is not None
        assert offsets[:again] == list(range(again))
        assert offsets[again:] == list(range(1, BATCHES))


def test_an_error_of_the_whole_source_in_the_thread_stops_nobody(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads would get it from its own call, if it were still there."""
    with hub.consumer("t", "g", prefetch_bytes=PREFETCH) as inbox:
        note_reads(inbox, monkeypatch)
        fetch, failures = inbox._source.fetch, []

        def failing(*given: Any) -> Any:
            if threading.current_thread().name.startswith("pxrs-read-ahead"):
                failures.append(1)
                raise ConnectionError("for a moment")
            return fetch(*given)

        monkeypatch.setattr(inbox._source, "fetch", failing)
        offsets: list[int] = []
        while len(offsets) < BATCHES:
            found = inbox.poll(1, timeout=BOUND_S)
            assert found, "nobody is reading any more"
            offsets += [message.offset for message in found]
            if len(offsets) == 8:  # less than half of the share is left since the sixth
                eventually(lambda: failures)
        assert offsets == list(range(BATCHES))


def test_an_error_of_the_thread_is_raised_where_the_user_reads(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub.consumer("t", "g", prefetch_bytes=PREFETCH, until="end") as inbox:
        note_reads(inbox, monkeypatch)
        noted = inbox._source.read

        def failing(partition: int, offset: int, max_bytes: int) -> Any:
            if offset > 0:
                raise pxrs.errors.DamagedFrame("t/0", offset, "on purpose")
            return noted(partition, offset, max_bytes)

        monkeypatch.setattr(inbox._source, "read", failing)
        seen: list[int] = []
        with pytest.raises(pxrs.errors.DamagedFrame, match="on purpose"):
            seen.extend(message.offset for message in inbox)
        assert inbox.position[0] > 0
