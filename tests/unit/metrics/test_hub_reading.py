"""V2: `pxrs metrics` shows what the hub holds, without any member, at a bounded cost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import pxrs
from pxrs.cli.hub_reading import PAUSE_FACTOR, HubReading, KeptReading
from pxrs.errors import RegistryUnavailable
from pxrs.hub import Hub
from pxrs.metrics.instruments import Snapshot, Value


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with pxrs.open(tmp_path / "data", upkeep=False) as hub:
        yield hub


def test_v2_the_lag_of_groups_and_the_sizes_of_topics_and_queues_are_those_of_describe(hub: Hub) -> None:
    hub.create_topic("orders", partitions=2)
    with hub.producer("orders") as out:
        for number in range(10):
            out.send(b"x" * 1000, partition=number % 2)

    def handle(message: pxrs.Message) -> None:
        if message.partition == 0 and message.offset == 3:
            raise ValueError("no")

    with hub.consumer("orders", "billing", until="end") as inbox, pytest.raises(pxrs.errors.PartitionsPaused):
        inbox.run(handle)
    queue = hub.create_queue("jobs", pxrs.ConsumeOnce())
    queue.put_many(["a", "b", "c"])
    queue.put("later", delay=3600)
    tx = hub.transaction()
    tx.take("jobs")
    tx.rollback()
    tx = hub.transaction()
    tx.take("jobs")
    found = {name: dict(series) for name, series in HubReading(hub).read().items()}
    tx.rollback()
    described = hub.group("billing").describe()
    assert described.lag == 2
    assert found.pop("pxrs.group.checkpoint.age").keys() == {("billing", "orders")}
    size = found.pop("pxrs.topic.size")["orders",]
    assert isinstance(size, int)
    assert size > 10_000
    wanted: dict[str, dict[tuple[str, ...], Value]] = {
        "pxrs.topic.partitions": {("orders",): 2},
        "pxrs.topic.messages": {("orders",): 10},
        "pxrs.topic.offsets": {("orders",): 10},
        "pxrs.group.members": {("billing",): 0},
        "pxrs.group.partitions.unowned": {("billing",): 2},
        "pxrs.group.partitions.paused": {("billing",): 1},
        "pxrs.group.lag": {("billing", "orders"): 2},
        "pxrs.group.lag_max": {("billing", "orders"): 2},
        "pxrs.queue.items": {
            ("jobs", "ready"): 1,
            ("jobs", "delayed"): 1,
            ("jobs", "in_flight"): 1,
            ("jobs", "dead"): 1,
        },
    }
    assert found == wanted


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Readings:
    """Reads at once, or waits for `go`; a reading takes `took_s` on the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.count, self.took_s = clock, 0, 0.0
        self.go = threading.Event()
        self.go.set()
        self.error: Exception | None = None

    def __call__(self) -> Snapshot:
        self.go.wait(20)
        self.count += 1
        self.clock.now += self.took_s
        if self.error is not None:
            raise self.error
        return {"pxrs.topic.messages": [(("t",), self.count)]}


def value(kept: KeptReading, name: str) -> Value | None:
    (part,) = kept.parts()
    series = part.counts.get(name)
    return None if series is None else series[0][1]


def test_what_was_read_is_given_again_for_a_while_and_longer_if_reading_is_slow() -> None:
    clock = Clock()
    readings = Readings(clock)
    with closing(KeptReading(readings, 5.0, clock)) as kept:
        assert readings.count == 0, "nothing is read while nobody asks"
        assert [value(kept, "pxrs.topic.messages") for _ in range(3)] == [1, 1, 1]
        clock.now += 4.9
        assert value(kept, "pxrs.topic.messages") == 1
        clock.now += 0.2
        readings.took_s = 60.0
        assert value(kept, "pxrs.topic.messages") == 2
        assert value(kept, "pxrs.hub.read") == pytest.approx(60.0)
        clock.now += PAUSE_FACTOR * 60.0 - 1
        assert value(kept, "pxrs.topic.messages") == 2
        assert value(kept, "pxrs.hub.age") == pytest.approx(PAUSE_FACTOR * 60.0 - 1)
        clock.now += 2
        assert value(kept, "pxrs.topic.messages") == 3


def test_a_request_does_not_wait_for_a_slow_reading_and_gets_the_last_values(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    readings = Readings(clock)
    with closing(KeptReading(readings, 5.0, clock)) as kept:
        assert kept.ready().is_ok, "readiness makes a reading if there is none"
        clock.now += 100
        readings.go.clear()
        monkeypatch.setattr("pxrs.cli.hub_reading.WAIT_S", 0.01)
        assert (value(kept, "pxrs.topic.messages"), value(kept, "pxrs.hub.age")) == (1, 100.0)
        readings.go.set()


def test_a_hub_that_cannot_be_read_is_down_and_the_last_values_stay() -> None:
    clock = Clock()
    readings = Readings(clock)
    with closing(KeptReading(readings, 5.0, clock)) as kept:
        assert value(kept, "pxrs.hub.up") == 1
        clock.now += 6
        readings.error = RegistryUnavailable("no answer")
        assert (value(kept, "pxrs.hub.up"), value(kept, "pxrs.topic.messages")) == (0, 1)
        assert (kept.ready().is_ok, kept.ready().reason) == (False, "no answer")
        clock.now += 6
        readings.error = None
        assert kept.ready().is_ok
