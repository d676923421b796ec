"""V2: `pxrs metrics` shows what the hub holds, without any member, at a bounded cost."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import pxrs
from pxrs.cli.hub_reading import FAILED_S, PAUSE_FACTOR, HubReading, KeptReading
from pxrs.cli.looking import Looker
from pxrs.errors import RegistryUnavailable
from pxrs.group.records import Keys
from pxrs.hub import Hub
from pxrs.log.directory.published import NAME as PUBLISHED
from pxrs.metrics.health import SILENT_S
from pxrs.metrics.instruments import METRICS_ERRORS, Snapshot, Value
from pxrs.testing.many_groups import fill
from pxrs.testing.waiting import eventually


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
        readings.error, readings.took_s = RegistryUnavailable("no answer"), 10.0
        assert (value(kept, "pxrs.hub.up"), value(kept, "pxrs.topic.messages")) == (0, 1)
        assert (kept.ready().is_ok, kept.ready().reason) == (False, "no answer")
        clock.now += FAILED_S
        readings.error = None
        assert kept.ready().is_ok, "a reading that failed is made again soon, however long it took"


def test_v4_a_hub_that_does_not_answer_at_all_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    readings = Readings(clock)
    for wait in ("WAIT_S", "READY_WAIT_S"):
        monkeypatch.setattr(f"pxrs.cli.hub_reading.{wait}", 0.05)
    with closing(KeptReading(readings, 5.0, clock)) as kept:
        eventually(lambda: kept.ready().is_ok)
        readings.go.clear()
        clock.now += 6
        assert kept.ready().is_ok, "the last reading succeeded, and the next one is not late yet"
        eventually(lambda: kept._began_at is not None)
        clock.now += SILENT_S
        assert kept.ready().reason == f"reading the hub has taken {SILENT_S:.0f} s so far, without an answer"
        assert value(kept, "pxrs.hub.up") == 0
        readings.go.set()
        eventually(lambda: kept.ready().is_ok)


def test_v2_a_topic_that_was_made_again_has_one_series_in_a_group(hub: Hub) -> None:
    for count in (3, 5):
        hub.create_topic("orders", partitions=1)
        with hub.producer("orders") as out:
            for _ in range(count):
                out.send(b"x")
        hub.group("billing").import_checkpoint(1, "orders")
        if count == 3:
            hub.delete_topic("orders")
    found = HubReading(hub).read()
    assert found["pxrs.group.lag"] == [(("billing", "orders"), 4)]
    assert found["pxrs.group.lag_max"] == [(("billing", "orders"), 4)]
    assert len(found["pxrs.group.checkpoint.age"]) == 1


def test_v2_a_hub_has_a_bounded_number_of_series(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pxrs.cli.hub_reading.SERIES_MAX", 2)
    for number in range(3):
        hub.create_topic(f"t{number}", partitions=1)
    before = METRICS_ERRORS.of("pxrs.topic.messages").value
    assert [labels for labels, _ in HubReading(hub).read()["pxrs.topic.messages"]] == [("t0",), ("t1",)]
    assert METRICS_ERRORS.of("pxrs.topic.messages").value == before + 1


def test_v2_a_damaged_group_is_left_out_and_the_others_are_read(hub: Hub) -> None:
    hub.create_topic("orders", partitions=1)
    for group in ("good", "bad"):
        hub.group(group).import_checkpoint(0, "orders")
    hub.registry.commit(put={Keys("bad").checkpoint(hub.topic("orders").id, 0): b"nonsense"})
    assert HubReading(hub).read()["pxrs.group.lag"] == [(("good", "orders"), 0)]
    damaged, good = Looker(hub, has_log=True).look().groups
    assert (damaged.group, damaged.lag, good.problem, good.lag) == ("bad", None, None, 0)
    assert damaged.problem is not None


# What it costs.


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_v2_looking_at_all_partitions_keeps_none_of_them_open(tmp_path: Path) -> None:
    with pxrs.open(tmp_path / "data", upkeep=False) as hub:
        topics = fill(hub, groups=5, topics=10, partitions=100)
        with hub.producer(topics[0].name) as out:
            out.send(b"x", partition=3)
    with pxrs.open(tmp_path / "data", upkeep=False) as hub:
        assert hub.groups()  # opens the registry
        before = open_files()
        looker = Looker(hub, has_log=True)
        for _ in range(2):
            found = dict(HubReading(hub).read()["pxrs.group.lag"])
            assert (len(found), sum(map(float, found.values()))) == (10, 1)  # type: ignore[arg-type]
            assert sum(each.lag or 0 for each in looker.look().groups) == 1
        assert open_files() <= before + 2


def test_an_end_that_is_behind_a_checkpoint_is_found_again(tmp_path: Path) -> None:
    """After a loss of power the file with the published end may be older than the messages and the checkpoints."""
    with pxrs.open(tmp_path / "data", upkeep=False) as hub:
        hub.create_topic("orders", partitions=2)
        with hub.producer("orders") as out:
            for _ in range(10):
                out.send(b"x", partition=1)
        hub.group("billing").import_checkpoint({0: 0, 1: 7}, "orders")
        folder = Path(hub.topic("orders").log.partition_folder(1))  # type: ignore[attr-defined]
    (folder / PUBLISHED).unlink()
    with pxrs.open(tmp_path / "data", upkeep=False) as hub:
        assert hub.groups()
        before = open_files()
        (found,) = Looker(hub, has_log=True).look().groups
        assert (found.lag, found.problem) == (3, None)
        assert HubReading(hub).read()["pxrs.group.lag"] == [(("billing", "orders"), 3)]
        assert open_files() <= before + 2
