"""Several sources as one: their numbers, and how many calls of the parts a call makes. The rest is in the contract
suite (`tests/contract/test_sources.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import pytest

from pxrs.errors import InvalidRecord, InvalidTopic, TopicDeleted
from pxrs.log.contract import READ_BYTES_DEFAULT, Append, Bounds, Fetched
from pxrs.log.joined import PARTS_MAX, JoinedSource
from pxrs.log.memory import MemoryLog, MemoryTopic
from pxrs.log.numbering import Numbering
from pxrs.testing.log_contract import new_topic, records
from pxrs.waiting import Callback, Cancel, Subscription


class Counted(MemoryTopic):
    """Counts the calls of what a source implements."""

    calls: Counter[str]

    def bounds(self, partitions: Iterable[int]) -> dict[int, Bounds]:
        self.calls["bounds"] += 1
        return super().bounds(partitions)

    def readable(self, positions: Mapping[int, int]) -> list[int]:
        self.calls["readable"] += 1
        return super().readable(positions)

    def fetch(
        self,
        positions: Mapping[int, int],
        max_bytes: int = READ_BYTES_DEFAULT,
        timeout: float | None = 0.0,
        cancel: Cancel | None = None,
    ) -> dict[int, Fetched]:
        self.calls["fetch"] += 1
        before = self.calls["readable"]
        found = super().fetch(positions, max_bytes, timeout, cancel)
        self.calls["readable"] = before
        return found

    def subscribe(self, partitions: Iterable[int], callback: Callback) -> Subscription:
        self.calls["subscribe"] += 1
        return super().subscribe(partitions, callback)

    def ends(self) -> list[int]:
        self.calls["ends"] += 1
        before = self.calls["bounds"]
        found = super().ends()
        self.calls["bounds"] = before
        return found


@pytest.fixture
def log() -> Iterator[MemoryLog]:
    log = MemoryLog()
    yield log
    log.close()


def topic(log: MemoryLog, name: str, partitions: int) -> Counted:
    made = log.create_topic(new_topic(name, partitions))
    made.__class__ = Counted
    assert isinstance(made, Counted)
    made.calls = Counter()
    return made


def test_partitions_are_numbered_topic_after_topic() -> None:
    numbering = Numbering([("a", 2), ("b", 1), ("c", 3)])
    places = [("a", 0), ("a", 1), ("b", 0), ("c", 0), ("c", 1), ("c", 2)]
    assert [numbering.place(number) for number in range(numbering.count)] == places
    assert [numbering.number_of(*place) for place in places] == list(range(6))
    assert numbering.by_topic([5, 0, 3]) == {"c": [2, 0], "a": [0]}
    for unknown in (("a", 2), ("a", -1), ("d", 0)):
        assert numbering.number_of(*unknown) is None
    for number in (-1, 6):
        with pytest.raises(IndexError):
            numbering.place(number)
    with pytest.raises(ValueError, match="twice"):
        Numbering([("a", 2), ("a", 1)])


def test_a_number_stands_for_a_part_and_a_partition_of_it(log: MemoryLog) -> None:
    orders, returns = topic(log, "orders", 3), topic(log, "returns", 2)
    joined = JoinedSource([orders, returns])
    assert joined.parts == (orders, returns)
    assert joined.partitions == 5
    assert [joined.place(number) for number in range(5)] == [
        *((orders, n) for n in range(3)),
        (returns, 0),
        (returns, 1),
    ]
    assert joined.number_of(returns.id, 1) == 4
    with pytest.raises(InvalidRecord, match="5"):
        joined.place(5)
    with pytest.raises(InvalidRecord, match="2"):
        joined.number_of(returns.id, 2)
    assert orders.parts == (orders,)
    assert orders.place(2) == (orders, 2)
    assert JoinedSource([joined, topic(log, "refunds", 1)]).parts[:2] == (orders, returns)


def test_a_topic_that_is_given_twice_is_refused(log: MemoryLog) -> None:
    orders, other = topic(log, "orders", 1), MemoryLog()
    same_name = topic(other, "orders", 1)
    for parts in ([orders, orders], [orders, same_name]):
        with pytest.raises(InvalidTopic, match="'orders' is named twice"):
            JoinedSource(parts)
    with pytest.raises(InvalidTopic, match="0 topics"):
        JoinedSource([])
    with pytest.raises(InvalidTopic, match=f"{PARTS_MAX + 1} topics"):
        JoinedSource([orders] * (PARTS_MAX + 1))
    other.close()


def test_a_call_asks_each_part_once(log: MemoryLog) -> None:
    parts = [topic(log, name, 50) for name in ("orders", "returns")]
    joined = JoinedSource(parts)
    for part in parts:
        part.append([Append.encoded(number, records([b"x"])) for number in range(50)])
    everything = range(joined.partitions)

    def calls(of: Counted) -> dict[str, int]:
        found, of.calls = dict(of.calls), Counter()
        return {name: count for name, count in found.items() if count}

    for part in parts:
        calls(part)
    assert len(joined.bounds(everything)) == 100
    assert [calls(part) for part in parts] == [{"bounds": 1}] * 2
    assert joined.ends() == [1] * 100
    assert [calls(part) for part in parts] == [{"ends": 1}] * 2
    found = joined.fetch(dict.fromkeys(everything, 0))
    assert found.keys() == set(everything)
    assert [calls(part) for part in parts] == [{"readable": 1, "fetch": 1}] * 2
    joined.subscribe(everything, lambda: None).close()
    assert [calls(part) for part in parts] == [{"subscribe": 1}] * 2
    assert joined.bounds([51]) == {51: Bounds(0, 1)}
    assert [calls(part) for part in parts] == [{}, {"bounds": 1}]


def test_bytes_are_shared_by_the_partitions_that_have_something(log: MemoryLog) -> None:
    """A topic that is idle leaves its share to the others; a busy one does not take that of the others."""
    orders, returns = topic(log, "orders", 1), topic(log, "returns", 1)
    joined = JoinedSource([orders, returns])
    for _ in range(10):
        orders.append([Append.encoded(0, records([b"-" * 10_000]))])
    assert len(joined.fetch({0: 0, 1: 0}, 100_000)[0].batches) >= 9
    for _ in range(10):
        returns.append([Append.encoded(0, records([b"-" * 10_000]))])
    found = joined.fetch({0: 0, 1: 0}, 100_000)
    assert {number: 3 <= len(each.batches) <= 6 for number, each in found.items()} == {0: True, 1: True}


def test_a_deleted_topic_ends_a_wait_for_partitions_of_another_one(log: MemoryLog) -> None:
    orders, _ = topic(log, "orders", 1), topic(log, "returns", 1)
    joined = JoinedSource([orders, log.topic("returns")])
    woken: list[bool] = []
    with joined.subscribe([0], lambda: woken.append(True)):
        log.delete_topic("returns")
    assert woken
    with pytest.raises(TopicDeleted):
        joined.fetch({0: 0})


class Failing(MemoryTopic):
    def subscribe(self, partitions: Iterable[int], callback: Callback) -> Subscription:
        raise RuntimeError("no thread can be started")


def test_a_part_that_cannot_be_subscribed_to_leaves_no_subscription_of_the_others(log: MemoryLog) -> None:
    orders, returns = topic(log, "orders", 1), topic(log, "returns", 1)
    returns.__class__ = Failing
    woken: list[bool] = []
    with pytest.raises(RuntimeError):
        JoinedSource([orders, returns]).subscribe([0, 1], lambda: woken.append(True))
    orders.append([Append.encoded(0, records([b"x"]))])
    assert not woken


def test_readable_names_the_partitions_that_have_something(log: MemoryLog) -> None:
    orders, returns = topic(log, "orders", 2), topic(log, "returns", 2)
    joined = JoinedSource([orders, returns])
    returns.append([Append.encoded(1, records([b"x"]))])
    assert list(joined.readable(dict.fromkeys(range(4), 0))) == [3]
    assert list(joined.readable({3: 1})) == []


def test_the_order_of_the_positions_decides_what_is_left_out_also_between_parts(log: MemoryLog) -> None:
    """Otherwise two partitions of a busy topic, with batches that are large for `max_bytes`, would always come before
    those of the next topic."""
    orders, returns = topic(log, "orders", 2), topic(log, "returns", 1)
    for part in (orders, returns):
        part.append([Append.encoded(number, records([b"x" * 1_000])) for number in range(part.partitions)])
    joined = JoinedSource([orders, returns])
    for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1]):
        for max_bytes in (1, 800, 1_100, 1_600, 2_100, 2_900, READ_BYTES_DEFAULT):
            found = list(joined.fetch(dict.fromkeys(order, 0), max_bytes))
            assert found
            assert found == order[: len(found)], max_bytes
        assert found == order
