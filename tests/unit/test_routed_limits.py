"""A topic of several brokers, of which one hangs or a partition has no owner: the others are told, and limits hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from pxrs.errors import AppendFailed, PartitionMoved
from pxrs.log.batch import encode
from pxrs.log.contract import Append, TopicLog
from pxrs.log.memory import MemoryLog, MemoryTopic
from pxrs.log.outcomes import NotStored, Outcome, StoredAt
from pxrs.model import Topic
from pxrs.producer.producer import Producer
from pxrs.remote.client.routed import RoutedTopic
from pxrs.testing.log_contract import records
from pxrs.waiting import time_limit

SOON_S = 30.0
TOPIC = Topic("t", "id", 3)


class Hanging(MemoryTopic):
    """A broker that does not answer appends until it is told to."""

    def __init__(self) -> None:
        super().__init__(TOPIC, MemoryLog())
        self.goes_on = threading.Event()

    def append(self, appends: Sequence[Append]) -> list[Outcome]:
        assert self.goes_on.wait(SOON_S)
        return super().append(appends)


class Brokers:
    """Partition 0 has a good broker, 1 one that hangs, and 2 has none."""

    def __init__(self) -> None:
        self.good, self.hanging = MemoryTopic(TOPIC, MemoryLog()), Hanging()

    def check(self) -> None:
        pass

    def handle(self, partition: int) -> TopicLog:
        if partition == 2:
            raise PartitionMoved("t/2: no broker has claimed the partition yet")
        return self.good if partition == 0 else self.hanging

    def forget(self, partition: int, handle: TopicLog) -> None:
        pass

    def owners(self) -> Mapping[int, str]:
        return {}


@pytest.fixture
def brokers() -> Iterator[Brokers]:
    found = Brokers()
    yield found
    found.hanging.goes_on.set()


@pytest.fixture
def topic(brokers: Brokers) -> Iterator[RoutedTopic]:
    with ThreadPoolExecutor(4) as crew:
        yield RoutedTopic(TOPIC, cast(Any, brokers), crew, SOON_S)
        brokers.hanging.goes_on.set()


def test_an_append_to_several_brokers_is_stored_while_the_interpreter_ends(brokers: Brokers) -> None:
    """The pools of `concurrent.futures` take no more work by then, and a producer that was not closed appends."""
    brokers.hanging.goes_on.set()
    crew = ThreadPoolExecutor(4)
    crew.shutdown()
    topic = RoutedTopic(TOPIC, cast(Any, brokers), crew, SOON_S)
    payload = encode(records([b"a"]))
    found = topic.append([Append(0, payload), Append(1, payload)])
    assert [type(each) for each in found] == [StoredAt, StoredAt]


def test_a_time_limit_ends_the_search_for_an_owner(topic: RoutedTopic) -> None:
    began = time.monotonic()
    with time_limit(0.05):
        stored, missing = topic.append([Append(number, encode(records([b"a"]))) for number in (0, 2)])
    assert time.monotonic() - began < SOON_S / 2
    assert isinstance(stored, StoredAt)
    assert isinstance(missing, NotStored)
    assert isinstance(missing.error, AppendFailed)


def test_a_producer_stores_to_other_brokers_while_one_hangs_and_a_partition_has_no_owner(
    topic: RoutedTopic, brokers: Brokers
) -> None:
    with Producer(topic, linger_s=0, delivery_timeout=SOON_S) as out:
        stuck = [out.send(b"stuck", partition=number) for number in (1, 2)]
        for number in range(3):
            assert out.send(b"%d" % number, partition=0).result(SOON_S / 2) == (0, number)
        assert not any(each.is_done for each in stuck)
        brokers.hanging.goes_on.set()
        assert stuck[0].result(SOON_S) == (1, 0)
        with pytest.raises(TimeoutError):
            out.close(0)
        with pytest.raises(AppendFailed):
            stuck[1].result(SOON_S)
