"""A topic of two brokers whose log is closed by another thread while the brokers are asked."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, cast

import pytest

from pxrs.errors import Closed
from pxrs.log.batch import encode
from pxrs.log.contract import Append, Bounds, TopicLog
from pxrs.log.outcomes import MaybeStored, Outcome, StoredAt
from pxrs.model import Topic
from pxrs.remote.client.routed import RoutedTopic
from pxrs.remote.client.routes import ANSWER_S, Peers
from pxrs.remote.client.settings import Settings
from pxrs.testing.log_contract import records
from pxrs.testing.waiting import aside


class Closing:
    """Two brokers, of which the first closes the log when it is asked. The second is not asked before the first has
    answered: the crew is busy with something else."""

    def __init__(self, crew: ThreadPoolExecutor) -> None:
        self._crew = crew
        self._is_closed = threading.Event()

    def check(self) -> None:
        if self._is_closed.is_set():
            raise Closed("the log was closed")

    def handle(self, partition: int) -> TopicLog:
        return cast(TopicLog, (self if partition == 0 else Other()))

    def forget(self, partition: int, handle: TopicLog) -> None:
        pass

    def owners(self) -> Mapping[int, str]:
        return {}

    def _close(self) -> None:
        self._is_closed.set()
        self._crew.shutdown(wait=False, cancel_futures=True)

    def bounds(self, partitions: Iterable[int]) -> dict[int, Bounds]:
        self._close()
        return dict.fromkeys(partitions, Bounds(0, 0))

    def append(self, appends: Sequence[Append]) -> list[Outcome]:
        self._close()
        return [StoredAt(0, False) for _ in appends]


class Other:
    """Is never asked."""


@pytest.fixture
def busy() -> Iterator[ThreadPoolExecutor]:
    """A crew of one thread, which is busy until the test has ended."""
    has_ended = threading.Event()
    with ThreadPoolExecutor(1) as crew:
        crew.submit(has_ended.wait)
        yield crew
        has_ended.set()


@pytest.fixture
def topic(busy: ThreadPoolExecutor) -> RoutedTopic:
    return RoutedTopic(Topic("t", "id", 2), cast(Any, Closing(busy)), busy, 10.0)


class Answering(Closing):
    """Two brokers that answer."""

    def handle(self, partition: int) -> TopicLog:
        return cast(TopicLog, Answering(self._crew))

    def _close(self) -> None:
        pass


def test_calls_that_occupy_the_whole_crew_hold_up_no_other_call(busy: ThreadPoolExecutor) -> None:
    """Such calls wait for brokers that do not answer, for as long as the patience."""
    topic = RoutedTopic(Topic("t", "id", 2), cast(Any, Answering(busy)), busy, 10.0)
    assert aside(lambda: topic.bounds([0, 1])).result() == {0: Bounds(0, 0), 1: Bounds(0, 0)}


def test_a_read_that_the_crew_has_not_begun_raises_closed(topic: RoutedTopic) -> None:
    with pytest.raises(Closed):
        topic.bounds([0, 1])


def test_w1_it_is_not_known_whether_an_append_is_stored_that_the_crew_has_not_answered(topic: RoutedTopic) -> None:
    payload = encode(records([b"a"]))
    first, second = topic.append([Append(0, payload), Append(1, payload)])
    assert isinstance(first, StoredAt)
    assert isinstance(second, MaybeStored)


@pytest.mark.parametrize(("patience_s", "expected_s"), [(2.0, 2.0), (60.0, ANSWER_S)])
def test_a_broker_that_hangs_is_given_up_within_the_patience_of_the_address(
    patience_s: float, expected_s: float
) -> None:
    """gRPC's pings would notice it after 15 s."""
    with closing(Peers(Settings("pxrs://", (), 10.0, patience_s))) as peers:
        topic = peers.topic("127.0.0.1:1", Topic("t", "0" * 32, 1))
        settings = topic._session.connection().settings
        assert settings.is_direct
        assert settings.patience_s == settings.timeout_s == expected_s
