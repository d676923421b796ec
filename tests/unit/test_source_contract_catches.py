"""The contract suite of sources has teeth: a source with one rule broken does not pass it."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from pxrs.errors import Closed, LogError, OffsetOutOfRange, OffsetTrimmed
from pxrs.log.batch import Batch
from pxrs.log.contract import READ_BYTES_DEFAULT, Append, Bounds, Fetched
from pxrs.log.memory import MemoryLog, MemoryTopic
from pxrs.log.outcomes import offsets_of
from pxrs.testing import source_contract
from pxrs.testing.log_contract import new_topic, records
from pxrs.testing.source_contract import Feed, SourceContract
from pxrs.waiting import Callback, Cancel, Subscription

PARTITIONS = 3


class Deaf(MemoryTopic):
    """Nobody is told of changes."""

    def subscribe(self, partitions: Iterable[int], callback: Callback) -> Subscription:
        super().bounds(partitions)  # it checks its arguments
        return Subscription(lambda: None)


class KeepsCalling(MemoryTopic):
    """A subscription does not end."""

    def subscribe(self, partitions: Iterable[int], callback: Callback) -> Subscription:
        super().subscribe(partitions, callback)
        return Subscription(lambda: None)


class ThreadEach(MemoryTopic):
    """Every subscription has a thread."""

    def subscribe(self, partitions: Iterable[int], callback: Callback) -> Subscription:
        ended = threading.Event()
        threading.Thread(target=ended.wait, args=(30,), daemon=True).start()
        inner = super().subscribe(partitions, callback)

        def end() -> None:
            inner.close()
            ended.set()

        return Subscription(end)


class NeverCancelled(MemoryTopic):
    def fetch(
        self,
        positions: Mapping[int, int],
        max_bytes: int = READ_BYTES_DEFAULT,
        timeout: float | None = 0.0,
        cancel: Cancel | None = None,
    ) -> dict[int, Fetched]:
        return super().fetch(positions, max_bytes, timeout)


class OneErrorForAll(MemoryTopic):
    """A partition that cannot be read keeps the others from being read."""

    def fetch(
        self,
        positions: Mapping[int, int],
        max_bytes: int = READ_BYTES_DEFAULT,
        timeout: float | None = 0.0,
        cancel: Cancel | None = None,
    ) -> dict[int, Fetched]:
        found = super().fetch(positions, max_bytes, timeout, cancel)
        for fetched in found.values():
            if fetched.error is not None:
                raise fetched.error
        return found


class HidesTrimmed(MemoryTopic):
    """What was removed is passed over in silence."""

    def read(self, partition: int, offset: int, max_bytes: int = READ_BYTES_DEFAULT) -> list[Batch]:
        try:
            return super().read(partition, offset, max_bytes)
        except OffsetTrimmed as error:
            return super().read(partition, error.first_offset, max_bytes)


class WaitsBeyondTheEnd(MemoryTopic):
    def read(self, partition: int, offset: int, max_bytes: int = READ_BYTES_DEFAULT) -> list[Batch]:
        try:
            return super().read(partition, offset, max_bytes)
        except OffsetOutOfRange:
            return []


class WholeBatches(MemoryTopic):
    """Batches begin before the position that was asked for."""

    def read(self, partition: int, offset: int, max_bytes: int = READ_BYTES_DEFAULT) -> list[Batch]:
        return super().read(partition, max(self.start(partition), offset - 1), max_bytes)


class Greedy(MemoryTopic):
    """A limit of bytes is not kept."""

    def fetch(
        self,
        positions: Mapping[int, int],
        max_bytes: int = READ_BYTES_DEFAULT,
        timeout: float | None = 0.0,
        cancel: Cancel | None = None,
    ) -> dict[int, Fetched]:
        return super().fetch(positions, READ_BYTES_DEFAULT, timeout, cancel)


class OpenForEver(MemoryTopic):
    """Closing wakes nobody."""

    def subscribe(self, partitions: Iterable[int], callback: Callback) -> Subscription:
        def call() -> None:
            try:
                self.bounds(())
            except Closed:
                return
            callback()

        return super().subscribe(partitions, call)


class AllBounds(MemoryTopic):
    """Bounds of partitions that were not asked for."""

    def bounds(self, partitions: Iterable[int]) -> dict[int, Bounds]:
        super().bounds(partitions)
        return super().bounds(range(self.partitions))


class EndsAreLate(MemoryTopic):
    def bounds(self, partitions: Iterable[int]) -> dict[int, Bounds]:
        found = super().bounds(partitions)
        return {each: Bounds(start, max(start, end - 1)) for each, (start, end) in found.items()}


class MemoryFeed(Feed):
    def __init__(self, kind: type[MemoryTopic]) -> None:
        self._log = MemoryLog()
        self._topic = kind(new_topic("orders", PARTITIONS), self._log)
        self._log._topics["orders"] = self._topic
        self.source = self._topic
        self._count = 0

    def put(self, values: Sequence[bytes]) -> list[tuple[int, int]]:
        stored = []
        for value in values:
            partition = self._count % PARTITIONS
            self._count += 1
            stored.append((partition, offsets_of(self._topic.append([Append.encoded(partition, records([value]))]))[0]))
        return stored

    def trim(self, partition: int, offset: int) -> None:
        assert self._topic.trim({partition: offset}) == {partition: offset}

    def close(self) -> None:
        self._log.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a broken source waits for does not come."""
    monkeypatch.setattr(source_contract, "PATIENCE_S", 0.5)
    monkeypatch.setattr(source_contract, "WAITERS", 80)  # more than SPARE


def run(kind: type[MemoryTopic], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one test of the suite, with the arguments that pytest would give it."""
    feed = MemoryFeed(kind)
    values = [b"value-%d" % i for i in range(16)]
    given: dict[str, Any] = {"feed": feed, "source": feed.source, "values": values, "max_bytes": READ_BYTES_DEFAULT}
    given["monkeypatch"] = monkeypatch
    try:
        test = getattr(SourceContract(), name)
        test(**{argument: given[argument] for argument in inspect.signature(test).parameters})
    finally:
        feed.close()


MUTATIONS: list[tuple[type[MemoryTopic], str]] = [
    (Deaf, "test_a_message_ends_a_wait"),
    (Deaf, "test_a_subscriber_is_called_until_it_ends_its_subscription"),
    (KeepsCalling, "test_a_subscriber_is_called_until_it_ends_its_subscription"),
    (ThreadEach, "test_w6_waiting_costs_no_thread_and_no_descriptor_for_each_waiter"),
    (NeverCancelled, "test_cancel_ends_a_wait"),
    (OneErrorForAll, "test_beyond_the_end_of_one_partition_others_can_be_read"),
    (OneErrorForAll, "test_what_was_trimmed_is_told_and_others_can_be_read"),
    (HidesTrimmed, "test_what_was_trimmed_is_told_and_others_can_be_read"),
    (WaitsBeyondTheEnd, "test_beyond_the_end_of_one_partition_others_can_be_read"),
    (WholeBatches, "test_a_position_in_the_middle_is_exact"),
    (Greedy, "test_bytes_are_limited_and_one_batch_comes_in_any_case"),
    (OpenForEver, "test_closing_ends_a_wait_and_every_later_call"),
    (AllBounds, "test_bounds_are_told_of_the_partitions_that_were_asked_for"),
    (EndsAreLate, "test_bounds_are_told_of_the_partitions_that_were_asked_for"),
    (EndsAreLate, "test_nothing_comes_at_the_end"),
]


@pytest.mark.parametrize(("broken", "name"), MUTATIONS)
def test_a_broken_source_is_caught(broken: type[MemoryTopic], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, KeyError, LogError, pytest.fail.Exception)):
        run(broken, name, monkeypatch)


@pytest.mark.parametrize("name", sorted({name for _, name in MUTATIONS}))
def test_the_same_test_passes_on_the_sound_source(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_contract, "PATIENCE_S", 30.0)
    run(MemoryTopic, name, monkeypatch)
