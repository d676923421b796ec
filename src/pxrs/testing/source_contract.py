"""The contract of a `Source` as tests: one suite for every source, ours and yours.

    class TestMine(SourceContract):
        @pytest.fixture
        def feed(self):
            feed = MyFeed()
            yield feed
            feed.source.close()

A `Feed` is a source together with what writes to it. docs/writing-a-source.md has a whole example. Nothing here is
optional. Tests wait on signals, at most `PATIENCE_S`.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import pytest

from pxrs.errors import Closed, InvalidArgument, OffsetOutOfRange, OffsetTrimmed, PxrsError
from pxrs.log.batch import Batch
from pxrs.log.contract import READ_BYTES_DEFAULT, Fetched, Source
from pxrs.waiting import Callback, Cancel, Subscription

PATIENCE_S: Final = 30.0
WAITERS: Final = 200
"""How many threads wait on one source at once in the test of W6."""
SPARE: Final = 50
"""How many threads and descriptors may be added meanwhile for other reasons: the pools of servers and brokers that run
in the process of the test begin their threads when they are first needed. One for each waiter would be 200 more."""
LATE_US: Final = 4_000_000_000_000_000
"""A time after that of every message, in the year 2096."""
FAR: Final = 1_000_000
"""An offset that is beyond the end of every partition of these tests."""


class Feed(ABC):
    """A source with at least two partitions and no messages yet, and a writer."""

    source: Source

    @abstractmethod
    def put(self, values: Sequence[bytes]) -> list[tuple[int, int]]:
        """Store these messages, each readable when this returns. Returns the partition and offset of each. Sixteen
        messages, stored by one call or by one call each, must be spread over several partitions."""

    @abstractmethod
    def trim(self, partition: int, offset: int) -> None:
        """Remove the messages of the partition before this offset, which is that of a message."""

    @abstractmethod
    def close(self) -> None:
        """Close the source."""


def message_offsets(batch: Batch) -> list[int]:
    """The offset of each message of a batch."""
    if batch.offsets is not None:
        return [int(offset) for offset in batch.offsets.to_pylist()]
    return list(range(batch.base_offset, batch.base_offset + batch.records.num_rows))


def starts_of(source: Source) -> dict[int, int]:
    return {partition: found.start for partition, found in source.bounds(range(source.partitions)).items()}


def ends_of(source: Source) -> dict[int, int]:
    return {partition: found.end for partition, found in source.bounds(range(source.partitions)).items()}


def fetch_all(
    source: Source, positions: Mapping[int, int], count: int, max_bytes: int = READ_BYTES_DEFAULT
) -> dict[tuple[int, int], bytes]:
    """Fetch this number of messages from these positions on, by partition and offset. Checks that each comes once and
    in order."""
    places = dict(positions)
    found: dict[tuple[int, int], bytes] = {}
    until = time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < until, f"only {len(found)} of {count} messages arrived"
        for partition, fetched in source.fetch(places, max_bytes, PATIENCE_S).items():
            assert partition in places, f"partition {partition} was not requested"
            assert fetched.error is None, fetched.error
            for batch in fetched.batches:
                for offset, value in zip(
                    message_offsets(batch), batch.records.column("value").to_pylist(), strict=True
                ):
                    assert offset >= places[partition], f"offset {offset} was returned twice"
                    found[partition, offset] = value
                    places[partition] = offset + 1
                assert batch.next_offset >= places[partition], "a batch ends before its last message"
                places[partition] = batch.next_offset
    return found


class Waiting:
    """A call on a thread of its own."""

    def __init__(self, source: Source, positions: Mapping[int, int], cancel: Cancel | None = None) -> None:
        self._result: dict[int, Fetched] | None = None
        self._error: PxrsError | None = None
        self._source, self._positions, self._cancel = source, positions, cancel
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._source.fetch(self._positions, timeout=None, cancel=self._cancel)
        except PxrsError as error:
            self._error = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> dict[int, Fetched] | PxrsError:
        """What the call returned, or the error that it raised."""
        self._thread.join(PATIENCE_S)
        assert self.is_over, "the wait has not ended"
        return self._error if self._result is None and self._error is not None else self._result or {}


class _Fixtures:
    @pytest.fixture
    def feed(self) -> Iterator[Feed]:
        raise NotImplementedError("override `feed`: the source under test, and what writes to it")

    @pytest.fixture
    def source(self, feed: Feed) -> Source:
        return feed.source

    @pytest.fixture
    def values(self) -> list[bytes]:
        return [b"value-%d" % i for i in range(16)]


class _Bounds(_Fixtures):
    def test_bounds_are_told_of_the_partitions_that_were_asked_for(
        self, feed: Feed, source: Source, values: list[bytes]
    ) -> None:
        assert source.partitions >= 2
        assert source.bounds(()) == {}
        assert source.bounds((1,)).keys() == {1}
        before = source.bounds(range(source.partitions))
        assert before.keys() == set(range(source.partitions))
        assert all(found.start == found.end for found in before.values()), "there are no messages yet"
        stored = feed.put(values)
        for partition, (start, end) in source.bounds(range(source.partitions)).items():
            offsets = [offset for each, offset in stored if each == partition]
            assert start <= min(offsets, default=end)
            assert end >= max(offsets, default=end - 1) + 1
            assert (source.start(partition), source.end(partition)) == (start, end)
        assert source.ends() == [found.end for found in source.bounds(range(source.partitions)).values()]

    def test_a_checkpoint_can_be_at_the_end_and_not_beyond(
        self, feed: Feed, source: Source, values: list[bytes]
    ) -> None:
        feed.put(values)
        for partition, end in ends_of(source).items():
            assert source.was_given_out(partition, end)
            assert not source.was_given_out(partition, FAR)

    def test_a_time_after_all_messages_is_the_end(self, feed: Feed, source: Source, values: list[bytes]) -> None:
        feed.put(values)
        for partition, (start, end) in source.bounds(range(source.partitions)).items():
            assert source.offset_at(partition, LATE_US) == end
            assert source.offset_at(partition, 0) <= max(start, 1)

    def test_a_partition_that_is_not_there_is_an_error(self, source: Source) -> None:
        for partition in (-1, source.partitions):
            with pytest.raises(InvalidArgument):
                source.bounds((0, partition))
            with pytest.raises(InvalidArgument):
                source.fetch({0: 0, partition: 0})
            with pytest.raises(InvalidArgument):
                source.read(partition, 0)
            with pytest.raises(InvalidArgument):
                source.subscribe((partition,), lambda: None)


class _Fetches(_Fixtures):
    @pytest.mark.parametrize("max_bytes", [READ_BYTES_DEFAULT, 1])
    def test_every_message_comes_once_and_in_order(
        self, feed: Feed, source: Source, values: list[bytes], max_bytes: int
    ) -> None:
        positions = starts_of(source)
        stored = [place for value in values for place in feed.put([value])]
        assert len({partition for partition, _ in stored}) > 1, "the feed must use several partitions"
        found = fetch_all(source, positions, len(values), max_bytes)
        assert found == dict(zip(stored, values, strict=True))

    def test_a_position_in_the_middle_is_exact(self, feed: Feed, source: Source, values: list[bytes]) -> None:
        stored = feed.put(values)
        partition = stored[0][0]
        offsets = [offset for each, offset in stored if each == partition]
        for first, offset in enumerate(offsets):
            found = fetch_all(source, {partition: offset}, len(offsets) - first)
            assert [each for _, each in found] == offsets[first:]

    def test_nothing_comes_at_the_end(self, feed: Feed, source: Source, values: list[bytes]) -> None:
        feed.put(values)
        fetch_all(source, starts_of(source), len(values))
        ends = ends_of(source)
        assert source.fetch(ends) == {}
        assert [source.read(partition, end) for partition, end in ends.items()] == [[]] * source.partitions
        began = time.monotonic()
        assert source.fetch(ends, timeout=0.05) == {}
        assert time.monotonic() - began >= 0.05

    def test_bytes_are_limited_and_one_batch_comes_in_any_case(
        self, feed: Feed, source: Source, values: list[bytes]
    ) -> None:
        positions = starts_of(source)
        for value in values:
            feed.put([value])
        for _ in range(3):
            found = source.fetch(positions, 1)
            assert len(found) == 1
            ((partition, fetched),) = found.items()
            assert len(fetched.batches) == 1
            positions[partition] = fetched.batches[-1].next_offset

    def test_beyond_the_end_of_one_partition_others_can_be_read(
        self, feed: Feed, source: Source, values: list[bytes]
    ) -> None:
        stored = feed.put(values)
        good = stored[0][0]
        bad = next(partition for partition, _ in stored if partition != good)
        found = source.fetch({bad: FAR, good: stored[0][1]}, timeout=PATIENCE_S)
        assert isinstance(found[bad].error, OffsetOutOfRange)
        assert not found[bad].batches
        assert found[good].error is None
        assert message_offsets(found[good].batches[0])[0] == stored[0][1]
        with pytest.raises(OffsetOutOfRange):
            source.read(bad, FAR)

    def test_what_was_trimmed_is_told_and_others_can_be_read(
        self, feed: Feed, source: Source, values: list[bytes]
    ) -> None:
        stored = [place for value in values for place in feed.put([value])]
        trimmed = stored[0][0]
        offsets = [offset for partition, offset in stored if partition == trimmed]
        other, first = next(place for place in stored if place[0] != trimmed)
        feed.trim(trimmed, offsets[1])
        found = source.fetch({trimmed: offsets[0], other: first}, timeout=PATIENCE_S)
        assert message_offsets(found[other].batches[0])[0] == first
        error = found[trimmed].error
        if source.has_gaps:  # an offset before the start is no loss there
            assert error is None
        else:
            assert isinstance(error, OffsetTrimmed)
            assert error.first_offset == offsets[1] == source.start(trimmed)
        rest = fetch_all(source, {trimmed: offsets[1]}, len(offsets) - 1)
        assert [offset for _, offset in rest] == offsets[1:]


class _Ranges(_Fixtures):
    def test_batches_are_exactly_the_range(self, feed: Feed, source: Source, values: list[bytes]) -> None:
        stored: dict[int, list[int]] = {}
        for value in values:  # a batch each
            for partition, offset in feed.put([value]):
                stored.setdefault(partition, []).append(offset)
        fetch_all(source, starts_of(source), len(values))  # some sources show a message a moment after it was put
        for partition, offsets in stored.items():
            first, last = offsets[0], offsets[-1]
            assert self._offsets(source, partition, first) == offsets
            assert self._offsets(source, partition, first + 1, last) == offsets[1:-1]
            assert self._offsets(source, partition, first, first) == []
            assert self._offsets(source, partition, first, last + FAR) == offsets, "there are no other messages"
        if not source.has_gaps:
            with pytest.raises(OffsetOutOfRange):
                self._offsets(source, stored.popitem()[0], FAR)

    @staticmethod
    def _offsets(source: Source, partition: int, start: int, end: int | None = None) -> list[int]:
        return [offset for batch in source.batches(partition, start, end) for offset in message_offsets(batch)]


class _Waits(_Fixtures):
    def test_a_message_ends_a_wait(self, feed: Feed, source: Source, values: list[bytes]) -> None:
        for _ in range(3):
            positions = ends_of(source)
            waiting = Waiting(source, positions)
            stored = feed.put(values)
            result = waiting.result()
            assert isinstance(result, dict)
            assert result.keys() <= {partition for partition, _ in stored}
            assert any(fetched.batches for fetched in result.values())
            fetch_all(source, positions, len(values))

    def test_only_a_message_of_its_own_partition_ends_a_wait(
        self, feed: Feed, source: Source, values: list[bytes]
    ) -> None:
        stored = feed.put(values)
        fetch_all(source, starts_of(source), len(values))
        ends = ends_of(source)
        cancel = Cancel()
        waiting = Waiting(source, {stored[0][0]: ends[stored[0][0]]}, cancel)
        while not any(partition == stored[0][0] for partition, _ in feed.put([b"more"])):
            pass
        result = waiting.result()
        assert isinstance(result, dict)
        assert result.keys() == {stored[0][0]}

    def test_cancel_ends_a_wait(self, feed: Feed, source: Source) -> None:
        for positions in (ends_of(source), {}):
            cancel = Cancel()
            waiting = Waiting(source, positions, cancel)
            assert not waiting.is_over
            cancel.set()
            assert waiting.result() == {}
            assert source.fetch(positions, timeout=None, cancel=cancel) == {}, "it was set before the call"

    def test_closing_ends_a_wait_and_every_later_call(self, feed: Feed, source: Source) -> None:
        ends = ends_of(source)
        waiting = [Waiting(source, ends), Waiting(source, {})]
        feed.close()
        for each in waiting:
            assert isinstance(each.result(), Closed)
        with pytest.raises(Closed):
            source.fetch(ends)
        with pytest.raises(Closed):
            source.bounds(ends)
        with pytest.raises(Closed):
            source.read(0, ends[0])

    def test_w6_a_subscriber_without_partitions_costs_no_thread(self, source: Source) -> None:
        """A member of a group that owns no partition waits too. A thread that has nothing to look at would spin."""
        before = set(threading.enumerate())
        with source.subscribe((), lambda: None):
            assert set(threading.enumerate()) <= before

    def test_a_subscriber_is_called_until_it_ends_its_subscription(
        self, feed: Feed, source: Source, values: list[bytes]
    ) -> None:
        called, stays = threading.Event(), threading.Event()
        everything = range(source.partitions)
        with source.subscribe(everything, called.set), source.subscribe(everything, stays.set):
            source.fetch(ends_of(source))
            feed.put(values)
            assert called.wait(PATIENCE_S)
            assert stays.wait(PATIENCE_S)
        with source.subscribe(everything, stays.set):
            called.clear()
            source.fetch(ends_of(source))
            stays.clear()
            feed.put(values)
            assert stays.wait(PATIENCE_S)
        assert not called.is_set()

    def test_w6_waiting_costs_no_thread_and_no_descriptor_for_each_waiter(
        self, feed: Feed, source: Source, values: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ends = ends_of(source)
        threads, descriptors = threading.active_count(), _open_descriptors()
        subscribe, subscribed = source.subscribe, threading.Semaphore(0)

        def counted_subscribe(partitions: Iterable[int], callback: Callback) -> Subscription:
            found = subscribe(partitions, callback)
            subscribed.release()
            return found

        monkeypatch.setattr(source, "subscribe", counted_subscribe)
        waiting = [Waiting(source, ends) for _ in range(WAITERS)]
        with subscribe(range(source.partitions), lambda: None):
            for _ in waiting:
                assert subscribed.acquire(timeout=PATIENCE_S)
            assert not any(each.is_over for each in waiting)
            assert threading.active_count() <= threads + WAITERS + SPARE
            assert _open_descriptors() <= descriptors + SPARE
            feed.put(values)
            for each in waiting:
                result = each.result()
                assert isinstance(result, dict)
                assert any(fetched.batches for fetched in result.values())


class SourceContract(_Bounds, _Fetches, _Ranges, _Waits):
    """All tests of a source. A subclass gives the fixture `feed`."""


def _open_descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:  # pragma: no cover - not Linux: threads alone are counted
        return 0
