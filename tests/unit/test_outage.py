"""What fails again and again is logged when it begins, once a minute while it lasts, and when it is over."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import pxrs
from pxrs.errors import LeaseExpired, RegistryUnavailable, StorageFull
from pxrs.group import rounds
from pxrs.limited_log import Outage
from pxrs.queue import keeper as keeper_module

BOUND_S = 30.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.is_over = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        if "works again" in record.getMessage():
            self.is_over.set()

    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def kept() -> Iterator[Kept]:
    """What pxrs logs."""
    kept, logger = Kept(), logging.getLogger("pxrs")
    level = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    yield kept
    logger.removeHandler(kept)
    logger.setLevel(level)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def outage(clock: Clock) -> Outage:
    return Outage(logging.getLogger("pxrs.test"), "disk", extra={"topic": "t"}, clock=clock)


def test_an_outage_is_logged_at_its_beginning_once_a_minute_and_at_its_end(
    outage: Outage, clock: Clock, kept: Kept
) -> None:
    for _ in range(150):  # one failure a second
        outage.failed(StorageFull("full"))
        clock.now += 1
    assert kept.texts() == [
        "disk: full; will try again",
        "disk: full; will try again (59 earlier failures were not logged)",
        "disk: full; will try again (59 earlier failures were not logged)",
    ]
    outage.worked()
    assert len(kept.records) == 3, "it may be that only a part works"
    clock.now += 10
    outage.worked()
    outage.worked()
    assert kept.texts()[3:] == ["disk: works again; it failed 150 times in 149.0 s"]
    first, last = kept.records[0], kept.records[-1]
    assert (first.topic, first.error_type) == ("t", "StorageFull")  # type: ignore[attr-defined]
    assert (last.failures, last.levelno) == (150, logging.WARNING)  # type: ignore[attr-defined]


def test_another_class_of_error_is_logged_at_once(outage: Outage, kept: Kept) -> None:
    for error in (StorageFull("full"), LeaseExpired("gone"), StorageFull("full"), LeaseExpired("gone")):
        outage.failed(error)
    assert kept.texts() == ["disk: full; will try again", "disk: gone; will try again"]


def test_what_fails_and_works_in_turn_fills_no_log(outage: Outage, clock: Clock, kept: Kept) -> None:
    for _ in range(600):
        outage.failed(StorageFull("full"))
        outage.worked()
        clock.now += 0.1
        outage.worked()
    assert len(kept.records) == 1
    for _ in range(20):  # it is over, and begins again, within a minute
        clock.now += 11
        outage.worked()
        outage.failed(StorageFull("full"))
    assert len(kept.records) <= 1 + 2 * 5
    clock.now += 60
    outage.failed(StorageFull("full"))
    assert "not logged" in kept.texts()[-1], "none is lost without being counted"


def full(*arguments: object, **named: object) -> Any:
    raise StorageFull("No space left on device")


def test_a_member_that_cannot_reach_its_registry_does_not_log_every_try(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "RETRY_S", (0.001, 0.001))
    tries = threading.Semaphore(0)
    with pxrs.open("memory:") as hub:
        hub.create_topic("t", partitions=1)
        with hub.consumer("t", "g") as inbox:
            inbox._member._rounds.outage._quiet_s = 0.0

            def fail(*arguments: object, **named: object) -> Any:
                tries.release()
                return full()

            with monkeypatch.context() as patch:
                patch.setattr(type(hub.registry), "_scan", fail)
                for _ in range(100):
                    inbox._member.wake()
                    assert tries.acquire(timeout=BOUND_S)
            inbox._member.wake()
            assert kept.is_over.wait(BOUND_S)
    full_records = [record for record in kept.records if "No space left" in record.getMessage()]
    assert len(full_records) == 1
    assert full_records[0].group == "g"  # type: ignore[attr-defined]


def test_a_queue_whose_registry_is_full_does_not_log_every_try(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "RETRY_S", 0.001)
    tries = threading.Semaphore(0)
    with pxrs.open("memory:") as hub:
        hub.create_queue("q")
        keeper = hub.parts.queue_store().keeper
        is_full = True

        def job() -> None:
            tries.release()
            if is_full:
                raise RegistryUnavailable("No space left on device")

        keeper._jobs_outage._quiet_s = 0.0
        keeper.finish(job)
        for _ in range(100):
            keeper.wake()
            assert tries.acquire(timeout=BOUND_S)
        is_full = False
        assert kept.is_over.wait(BOUND_S)
    assert len([record for record in kept.records if "No space left" in record.getMessage()]) == 1
