"""The log's contract as tests: one suite for every log, ours and yours.

    class TestMine(LogContract):
        @pytest.fixture
        def log(self):
            log = MyLog()
            yield log
            log.close()

Nothing here is optional. Times are arguments, threads wait on signals.
The appending half of the suite is in `log_appends.py`, what tests are given in `log_fixtures.py`.
"""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from pxrs import clock
from pxrs.errors import (
    Closed,
    InvalidTopic,
    OffsetOutOfRange,
    OffsetTrimmed,
    TopicDeleted,
    TopicExists,
    UnknownTopic,
)
from pxrs.log.arrivals import wait_for_messages
from pxrs.log.contract import Append, Log, TopicLog
from pxrs.log.outcomes import offsets_of
from pxrs.model import Topic, is_internal
from pxrs.testing.log_appends import Appends, Origins
from pxrs.testing.log_fixtures import LogFixtures, new_topic, origin, records, values_from

BAD_NAMES = (
    "",
    ".",
    "..",
    "../up",
    "a/b",
    "/root",
    "-dash",
    ".hidden",
    "a b",
    "a\n",
    "a\0",
    "ä",
    "a" * 201,
    "a\\b",
    "~",
)


def topics_of(log: Log) -> list[Topic]:
    """The topics of users. A server records in internal topics what its clients do."""
    return [topic for topic in log.topics() if not is_internal(topic.name)]


class _Topics(LogFixtures):
    def test_a_created_topic_is_as_it_was_asked_for(self, log: Log) -> None:
        wanted = new_topic("a.b-c_1", 3, partitioner="murmur2", codec="lz4", retention_s=60.0, retention_bytes=1 << 20)
        made = log.create_topic(wanted)
        assert (made.topic, made.name, made.id, made.partitions) == (wanted, "a.b-c_1", wanted.id, 3)
        assert log.topic("a.b-c_1").topic == wanted
        assert [(made.start(p), made.end(p), made.read(p, 0)) for p in range(3)] == [(0, 0, [])] * 3

    def test_topics_are_listed_by_name(self, log: Log) -> None:
        assert topics_of(log) == []
        made = [log.create_topic(new_topic(name)).topic for name in ("b", "a", "C", "a.b")]
        assert topics_of(log) == sorted(made, key=lambda topic: topic.name)

    def test_a_name_is_taken_once(self, log: Log, topic: TopicLog) -> None:
        offsets_of(topic.append([Append.encoded(0, records([b"kept"]))]))
        with pytest.raises(TopicExists):
            log.create_topic(new_topic())
        assert values_from(log.topic("orders"), 0) == [b"kept"]

    def test_an_unknown_topic_is_an_error_that_names_the_others(self, log: Log, topic: TopicLog) -> None:
        with pytest.raises(UnknownTopic) as unknown:
            log.topic("other")
        assert (unknown.value.topic, unknown.value.choices) == ("other", ("orders",))
        with pytest.raises(UnknownTopic):
            log.delete_topic("other")

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_a_name_that_is_no_plain_name_reaches_nothing(self, log: Log, topic: TopicLog, name: str) -> None:
        with pytest.raises(InvalidTopic):
            new_topic(name)
        with pytest.raises((UnknownTopic, InvalidTopic)):
            log.topic(name)
        with pytest.raises((UnknownTopic, InvalidTopic)):
            log.delete_topic(name)
        assert [each.name for each in topics_of(log)] == ["orders"]

    def test_the_longest_name_is_good(self, log: Log) -> None:
        offsets_of(log.create_topic(new_topic("n" * 200)).append([Append.encoded(0, records([b"1"]))]))
        assert values_from(log.topic("n" * 200), 0) == [b"1"]

    def test_g7_a_topic_made_again_is_another_one(self, log: Log, topic: TopicLog) -> None:
        offsets_of(topic.append([Append.encoded(0, records([b"old"]))]))
        assert log.delete_topic("orders") == topic.id
        assert (topics_of(log), log.damaged_topics()) == ([], [])
        with pytest.raises(UnknownTopic):
            log.topic("orders")
        again = log.create_topic(new_topic())
        assert again.id != topic.id
        assert again.end(0) == 0
        offsets_of(again.append([Append.encoded(0, records([b"new"]))]))
        assert values_from(again, 0) == [b"new"]

    def test_a_deleted_topic_takes_no_more_appends(self, log: Log, topic: TopicLog) -> None:
        log.delete_topic("orders")
        log.create_topic(new_topic())
        with pytest.raises(TopicDeleted) as deleted:
            offsets_of(topic.append([Append.encoded(0, records([b"stray"]))]))
        assert (deleted.value.id, deleted.value.is_made_again) == (topic.id, True)
        assert values_from(log.topic("orders"), 0) == []

    def test_settings_are_changed_for_every_handle(self, log: Log, topic: TopicLog) -> None:
        offsets_of(topic.append([Append.encoded(0, records([b"before"]))]))
        changed = log.alter_topic("orders", {"retention_s": 60.0, "codec": "lz4", "keep_unread": True}).topic
        assert (changed.id, changed.partitions, changed.revision) == (topic.id, 2, 1)
        assert log.alter_topic("orders", {"codec": "lz4"}).topic == changed, "there is nothing to change"
        assert [each for each in topics_of(log) if each.name == "orders"] == [changed]
        assert log.topic("orders").topic == changed
        assert log.topic("orders").keeps_unread
        offsets_of(topic.append([Append.encoded(0, records([b"after"]))]))
        assert values_from(topic, 0) == [b"before", b"after"]
        assert log.alter_topic("orders", {"retention_s": None}).topic.retention_s is None
        assert not log.topic("orders").keeps_unread, "without a retention nothing is ever removed"
        for wrong in (
            {"partitions": 4},
            {"partitioner": "murmur2"},
            {"id": "x"},
            {"codec": "zip"},
            {"segment_bytes": 1},
        ):
            with pytest.raises(InvalidTopic):
                log.alter_topic("orders", wrong)
        with pytest.raises(UnknownTopic):
            log.alter_topic("missing", {"codec": "lz4"})
        assert log.topic("orders").topic.revision == 2

    def test_a_closed_log_refuses(self, log: Log, topic: TopicLog) -> None:
        log.close()
        log.close()
        with pytest.raises(Closed):
            topics_of(log)
        with pytest.raises(Closed):
            log.create_topic(new_topic("late"))
        with pytest.raises(Closed):
            offsets_of(topic.append([Append.encoded(0, records([b"late"]))]))


class _Reads(LogFixtures):
    @pytest.fixture
    def filled(self, topic: TopicLog) -> TopicLog:
        """Ten batches of ten messages of about 1 kB in partition 0, of the times 0, 10, 20..."""
        for i in range(10):
            values = [b"%03d" % (i * 10 + j) + b"." * 1000 for j in range(10)]
            offsets_of(topic.append([Append.encoded(0, records(values, [(i * 10 + j) * 10 for j in range(10)]))]))
        return topic

    @pytest.mark.parametrize("offset", [0, 1, 9, 10, 55, 99])
    def test_a_read_begins_at_exactly_the_offset(self, filled: TopicLog, offset: int) -> None:
        batches = filled.read(0, offset)
        assert batches[0].base_offset == offset
        assert batches[0].records.column("value")[0].as_py()[:3] == b"%03d" % offset
        assert len(values_from(filled, 0, offset)) == 100 - offset

    def test_max_bytes_bounds_a_read_but_it_always_moves_on(self, filled: TopicLog) -> None:
        everything = sum(batch.records.num_rows for batch in filled.read(0, 0, 1 << 30))
        some = sum(batch.records.num_rows for batch in filled.read(0, 0, 30_000))
        assert everything == 100
        assert 10 <= some <= 50
        for least in (0, 1):
            assert [batch.base_offset for batch in filled.read(0, 5, least)] == [5]
        assert len(values_from(filled, 0, 0, max_bytes=1)) == 100

    def test_at_the_end_there_is_nothing(self, filled: TopicLog) -> None:
        assert filled.read(0, 100) == []
        assert filled.read(1, 0) == []

    def test_beyond_the_end_is_an_error(self, filled: TopicLog) -> None:
        with pytest.raises(OffsetOutOfRange) as out:
            filled.read(0, 101)
        assert (out.value.offset, out.value.end) == (101, 100)

    def test_before_the_start_is_an_error(self, filled: TopicLog) -> None:
        with pytest.raises(OffsetTrimmed):
            filled.read(0, -1)

    @pytest.mark.parametrize(
        ("timestamp", "offset"), [(-5, 0), (0, 0), (1, 1), (90, 9), (95, 10), (555, 56), (990, 99), (991, 100)]
    )
    def test_offset_at_finds_the_first_of_that_time_or_later(
        self, filled: TopicLog, timestamp: int, offset: int
    ) -> None:
        assert filled.offset_at(0, timestamp) == offset
        assert filled.offset_at(1, timestamp) == 0

    def test_offset_at_with_times_out_of_order(self, topic: TopicLog) -> None:
        offsets_of(
            topic.append(
                [Append.encoded(0, records([b"a", b"b"], [50, 10])), Append.encoded(0, records([b"c", b"d"], [20, 60]))]
            )
        )
        assert [topic.offset_at(0, time) for time in (5, 15, 50, 51, 60, 61)] == [0, 0, 0, 3, 3, 4]

    def test_what_was_read_stays_as_it_was(self, filled: TopicLog) -> None:
        (first, *_) = filled.read(0, 0)
        before = first.records.to_pylist()
        for _ in range(5):
            offsets_of(filled.append([Append.encoded(0, records([b"more" * 300] * 20))]))
        assert first.records.to_pylist() == before


class _Waits(LogFixtures):
    def test_x15_an_append_wakes_the_waiter(self, topic: TopicLog) -> None:
        with ThreadPoolExecutor(1) as pool:
            for i in range(5):
                waiter = pool.submit(wait_for_messages, topic, {0: 0, 1: i}, 30)
                offsets_of(topic.append([Append.encoded(1, records([b"a"]))]))
                assert waiter.result(30) == {1}

    def test_x15_an_append_through_another_handle_wakes(self, log: Log, topic: TopicLog) -> None:
        waiting = threading.Event()

        def wait() -> set[int]:
            handle = log.topic("orders")
            waiting.set()
            return wait_for_messages(handle, {0: 0}, 30)

        with ThreadPoolExecutor(1) as pool:
            waiter = pool.submit(wait)
            assert waiting.wait(30)
            offsets_of(topic.append([Append.encoded(0, records([b"a"]))]))
            assert waiter.result(30) == {0}

    def test_a_waiter_learns_of_all_that_have_messages_at_once(self, topic: TopicLog) -> None:
        offsets_of(topic.append([Append.encoded(p, records([b"a"])) for p in (0, 1)]))
        assert wait_for_messages(topic, {0: 0, 1: 0}, None) == {0, 1}
        assert wait_for_messages(topic, {0: 1, 1: 0}, None) == {1}

    def test_time_runs_out(self, topic: TopicLog) -> None:
        offsets_of(topic.append([Append.encoded(0, records([b"a"]))]))
        assert wait_for_messages(topic, {0: 1, 1: 0}, 0.05) == set()
        assert wait_for_messages(topic, {0: 1}, 0) == set()

    def test_nothing_is_missed_by_a_reader_that_waits(self, topic: TopicLog) -> None:
        last = 200

        def write() -> None:
            for i in range(last):
                offsets_of(topic.append([Append.encoded(0, records([b"%d" % i]))]))

        seen: list[bytes] = []
        with ThreadPoolExecutor(1) as pool:
            writer = pool.submit(write)
            while len(seen) < last:
                assert wait_for_messages(topic, {0: len(seen)}, 30) == {0}
                for batch in topic.read(0, len(seen)):
                    seen += batch.records.column("value").to_pylist()
            writer.result(30)
        assert seen == [b"%d" % i for i in range(last)]


class _Retention(LogFixtures):
    @pytest.fixture
    def wall(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The time at which messages are stored, in microseconds: what its last item says. Override it for a log whose
        time is not `pxrs.clock.wall_time_us` of this process."""
        wall = [0]
        monkeypatch.setattr(clock, "wall_time_us", lambda: wall[-1])
        return wall

    def fill(self, topic: TopicLog, wall: list[int], batches: int = 20) -> None:
        """Batches of 5 kB, so that each fills the smallest segment; batch i is stored at i seconds."""
        for i in range(batches):
            wall.append(i * 1_000_000)
            offsets_of(topic.append([Append.encoded(0, records([b"%04d" % i + b"." * 5000], [5]))]))

    def check(self, topic: TopicLog, moved: dict[int, int], end: int) -> None:
        start = topic.start(0)
        assert moved == {0: start}
        assert 0 < start <= end == topic.end(0)
        assert [value[:4] for value in values_from(topic, 0, start) if value] == [
            b"%04d" % i for i in range(start, end)
        ]
        for offset in {0, start - 1}:
            with pytest.raises(OffsetTrimmed) as trimmed:
                topic.read(0, offset)
            assert (trimmed.value.offset, trimmed.value.first_offset) == (offset, start)
        assert topic.offset_at(0, 0) == start
        assert wait_for_messages(topic, {0: 0}, 0) == {0}
        assert offsets_of(topic.append([Append.encoded(0, records([b"next"]))])) == [end]

    def test_retention_by_time_removes_only_what_is_old(self, log: Log, wall: list[int]) -> None:
        topic = log.create_topic(new_topic(retention_s=10.0, segment_bytes=4096))
        self.fill(topic, wall)
        moved = topic.retain(now=22_000_000)
        assert topic.start(0) <= 12, "a message of the last ten seconds is gone"
        assert topic.start(0) >= 8, "messages that are much too old are still there"
        self.check(topic, moved, 20)

    @pytest.mark.parametrize("time_us", [-(10**15), 0, 10**18])
    def test_retention_by_time_counts_from_when_a_message_was_stored(
        self, log: Log, wall: list[int], time_us: int
    ) -> None:
        """Copied history does not go at once, and what a sender's clock puts into the future goes in time."""
        topic = log.create_topic(new_topic(retention_s=10.0))
        wall.append(100_000_000)
        for _ in range(3):
            offsets_of(topic.append([Append.encoded(0, records([b"x"], [time_us]))]))
        assert topic.retain(now=105_000_000) == {}
        assert topic.retain(now=110_000_000) == {}
        assert topic.retain(now=110_000_001) == {0: 3}
        assert offsets_of(topic.append([Append.encoded(0, records([b"next"], [time_us]))])) == [3]

    def test_retention_by_time_also_takes_what_comes_in_a_trickle(self, log: Log, wall: list[int]) -> None:
        """A message each second: the partition never falls silent, and the newest messages are always young."""
        topic = log.create_topic(new_topic(retention_s=40.0))
        for second in range(200):
            wall.append(second * 1_000_000)
            assert offsets_of(topic.append([Append.encoded(0, records([b"%d" % second], [5]))])) == [second]
            topic.retain(wall[-1])
            kept = second - topic.start(0)
            assert min(second, 40) <= kept, "a message of the last forty seconds is gone"
            assert kept <= 40 + 10 + 1, "messages stay much longer than they should"
        assert values_from(topic, 0, topic.start(0)) == [b"%d" % second for second in range(topic.start(0), 200)]

    @pytest.mark.parametrize("ahead", [1, 3], ids=["one message", "several"])
    def test_a_clock_that_was_ahead_for_a_while_does_not_hold_up_retention(
        self, log: Log, wall: list[int], ahead: int
    ) -> None:
        """Otherwise what comes after such a message is kept for as long as the clock was ahead, a year here."""
        topic = log.create_topic(new_topic(retention_s=40.0))
        for second in range(200):
            year = 365 * 86_400 if 50 <= second < 50 + ahead else 0
            wall.append((second + year) * 1_000_000)
            offsets_of(topic.append([Append.encoded(0, records([b"%d" % second]))]))
            if not year:  # a retention that goes by such a clock takes all the others for old
                topic.retain(wall[-1])
            kept = second - topic.start(0)
            assert min(second, 40) <= kept, "a message of the last forty seconds is gone"
        assert kept <= 40 + 10 + 1, "messages stay much longer than they should"

    def test_retention_by_size_keeps_about_that_much(self, log: Log, wall: list[int]) -> None:
        topic = log.create_topic(new_topic(retention_bytes=52_000, segment_bytes=4096))
        self.fill(topic, wall)
        moved = topic.retain(now=0)
        assert 5 <= topic.start(0) <= 15
        self.check(topic, moved, 20)

    def test_retention_keeps_everything_by_default(self, log: Log, wall: list[int]) -> None:
        topic = log.create_topic(new_topic(segment_bytes=4096))
        self.fill(topic, wall)
        assert topic.retain(now=10**18) == {}
        assert topic.start(0) == 0

    def test_nothing_old_nothing_moved(self, log: Log, wall: list[int]) -> None:
        topic = log.create_topic(new_topic(retention_s=100.0, retention_bytes=10 << 20, segment_bytes=4096))
        self.fill(topic, wall)
        assert topic.retain(now=20_000_000) == {}

    def test_l4_a_retry_is_known_after_retention(self, log: Log, producer: uuid.UUID) -> None:
        topic = log.create_topic(new_topic(retention_s=1.0, segment_bytes=4096))
        for i in range(5):
            offsets_of(topic.append([Append.encoded(0, records([b"." * 5000], [i]), origin(i, producer))]))
        topic.retain(now=clock.wall_time_us() + 10**9)
        assert topic.start(0) == 5
        assert offsets_of(topic.append([Append.encoded(0, records([b"." * 5000], [4]), origin(4, producer))])) == [4]
        assert offsets_of(topic.append([Append.encoded(0, records([b"."], [5]), origin(5, producer))])) == [5]


class LogContract(_Topics, Appends, _Reads, Origins, _Waits, _Retention):
    """What every log keeps."""


__all__ = ["LogContract", "new_topic", "origin", "records", "values_from"]
