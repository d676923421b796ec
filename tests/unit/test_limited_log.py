"""Records that repeat: a few of each kind, then a count, and no count is ever lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from pxrs import limited_log
from pxrs.limited_log import LimitedLog

PATIENCE_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.has_count = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        if hasattr(record, "left_out"):
            self.has_count.set()

    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def logger() -> logging.Logger:
    return logging.Logger("pxrs.test", logging.INFO)


@pytest.fixture
def kept(logger: logging.Logger) -> Iterator[Kept]:
    kept = Kept()
    logger.addHandler(kept)
    yield kept
    logger.removeHandler(kept)


def test_the_rest_of_a_kind_is_counted_and_the_count_is_logged_when_the_window_is_over(
    logger: logging.Logger, kept: Kept
) -> None:
    clock = Clock()
    log = LimitedLog(logger, records_max=2, window_s=60, clock=clock)
    done = [log.log("full", logging.WARNING, "full: %s %d%%", "t", number) for number in range(10)]
    assert done == [True, True, *[False] * 8]
    clock.now += 60
    assert log.log("other", logging.ERROR, "something else", extra={"topic": "t"})
    assert kept.texts() == [
        "full: t 0%",
        "full: t 1%",
        "full: t 9% (8 similar records were not logged; this is the last)",
        "something else",
    ]
    assert kept.records[2].left_out == 8  # type: ignore[attr-defined]
    assert kept.records[2].levelno == logging.WARNING
    assert kept.records[3].topic == "t"  # type: ignore[attr-defined]
    assert log.log("full", logging.WARNING, "again"), "a new window has begun"
    log.flush()
    assert len(kept.records) == 5, "nothing was left out since"


def test_a_count_is_logged_on_time_though_nothing_else_is(logger: logging.Logger, kept: Kept) -> None:
    log = LimitedLog(logger, records_max=1, window_s=0.05)
    while log.log("full", logging.WARNING, "full", extra={"topic": "t"}):
        pass
    assert kept.has_count.wait(PATIENCE_S)
    (counted,) = [record for record in kept.records if hasattr(record, "left_out")][:1]
    assert counted.topic == "t"  # type: ignore[attr-defined]
    assert counted.left_out == 1


def test_flush_logs_what_is_left_out_by_now_once(logger: logging.Logger, kept: Kept) -> None:
    log = LimitedLog(logger, records_max=1, window_s=3600)
    for kind in ("a", "b", "a", "a", "b"):
        log.log(kind, logging.WARNING, "%s is 100%% full" if kind == "a" else "100% full", *("a",) * (kind == "a"))
    log.flush()
    assert log._timer is None
    log.flush()
    assert [getattr(record, "left_out", 0) for record in kept.records] == [0, 0, 2, 1]
    assert kept.texts()[2:] == [
        "a is 100% full (2 similar records were not logged; this is the last)",
        "100% full (1 similar record was not logged; this is the last)",
    ]


def test_what_nobody_would_see_is_not_counted(logger: logging.Logger, kept: Kept) -> None:
    log = LimitedLog(logger, records_max=1, window_s=3600)
    assert not any(log.log("a", logging.DEBUG, "a") for _ in range(3))
    log.flush()
    assert kept.records == []


def test_kinds_without_number_share_one_limit_and_take_no_more_memory(
    logger: logging.Logger, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_log, "KINDS_MAX", 10)
    clock = Clock()
    log = LimitedLog(logger, records_max=2, window_s=60, clock=clock)
    for number in range(100):
        log.log(number, logging.WARNING, "%d", number)
    assert len(log._windows) == 11
    assert len(kept.records) == 12
    clock.now += 60
    assert log.log(5, logging.WARNING, "5")
    assert len(log._windows) == 1, "windows that are over are forgotten"
    assert [getattr(record, "left_out", 0) for record in kept.records[-2:]] == [88, 0]
    log.flush()


def test_a_handler_of_the_logging_may_log_through_it(logger: logging.Logger) -> None:
    log = LimitedLog(logger, records_max=3, window_s=3600)

    class Again(Kept):
        def emit(self, record: logging.LogRecord) -> None:
            super().emit(record)
            log.log("a", logging.WARNING, "again")

    kept = Again()
    logger.addHandler(kept)
    log.log("a", logging.WARNING, "first")
    assert kept.texts() == ["first", "again", "again"]
