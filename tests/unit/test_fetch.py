"""`Source.fetch` over the least that a source must implement."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pxrs.errors import DamagedFrame, TopicDeleted
from pxrs.log.batch import Batch
from pxrs.log.contract import READ_BYTES_DEFAULT, Bounds, Fetched, Source
from pxrs.testing.log_contract import records
from pxrs.waiting import Callback, Subscribers, Subscription


class Finite(Source):
    """Three partitions of two messages each, to which nothing is ever added."""

    name, id, partitions = "finite", "finite", 3

    def __init__(self, errors: dict[int, Exception]) -> None:
        self._errors = errors
        self._subscribers = Subscribers()

    def bounds(self, partitions: Iterable[int]) -> dict[int, Bounds]:
        return dict.fromkeys(partitions, Bounds(0, 2))

    def read(self, partition: int, offset: int, max_bytes: int = READ_BYTES_DEFAULT) -> list[Batch]:
        if partition in self._errors:
            raise self._errors[partition]
        return [Batch(offset, records([b"a", b"b"]).slice(offset))] if offset < 2 else []

    def subscribe(self, partitions: Iterable[int], callback: Callback) -> Subscription:
        return self._subscribers.add(partitions, callback)

    def offset_at(self, partition: int, timestamp: int) -> int:
        return 2

    def is_ended(self, partition: int, offset: int) -> bool:
        return offset >= 2


def test_a_partition_that_gets_no_more_messages_says_so_and_holds_up_no_wait() -> None:
    found = Finite({}).fetch({0: 2, 1: 1, 2: 2}, timeout=None)
    assert found[0] == found[2] == Fetched(is_ended=True)
    assert [batch.base_offset for batch in found[1].batches] == [1]


def test_an_error_of_one_partition_is_told_beside_what_the_others_have() -> None:
    damage = DamagedFrame("a file", 0, "torn")
    found = Finite({1: damage}).fetch({0: 0, 1: 0}, timeout=None)
    assert found[1] == Fetched(error=damage)
    assert found[0].batches


def test_an_error_of_the_whole_source_is_raised() -> None:
    with pytest.raises(TopicDeleted):
        Finite({1: TopicDeleted("finite", "finite", False)}).fetch({0: 0, 1: 0}, timeout=None)
