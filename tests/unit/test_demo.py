"""What `pxrs demo` reckons: its orders, its account, which must not let a lie pass, and the lines of its chart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from pxrs.cli.demo import orders
from pxrs.cli.demo.account import Account, Line, Made, account, are_right, spark_lines
from pxrs.cli.demo.chart import draw
from pxrs.cli.demo.child import cpu_s, end
from pxrs.cli.demo.crew import Worker
from pxrs.cli.demo.samples import Mark, Sample, Tenure, rate, tenures
from pxrs.cli.demo.spark import committed_files
from pxrs.cli.demo.story import MORE, SLOW_MAX
from pxrs.testing.waiting import eventually

SENT = [(0, offset) for offset in range(4)]
ANNA = ["began 0 1 0", "handled 0 1 0", "committed 0 1 1", "began 0 1 1", "handled 0 1 1"]
"""She is killed before the second message is written down."""


@pytest.mark.parametrize(
    ("ben", "expected"),
    [
        (["handled 0 2 1", "committed 0 2 2", "handled 0 2 2", "handled 0 2 3"], Account(4, 0, 0, 0, 1)),
        (["handled 0 2 2", "handled 0 2 3"], Account(4, 0, 0, 0, 0)),
        (["handled 0 2 1", "handled 0 2 2", "refused it is gone"], Account(4, 1, 0, 0, 1)),
        (["handled 0 2 3"], Account(4, 1, 1, 0, 0)),
        (["handled 0 2 1", "handled 0 2 3", "handled 0 2 2"], Account(4, 0, 2, 0, 1)),
        (["handled 0 2 0", "handled 0 2 1", "handled 0 2 2", "handled 0 2 3"], Account(4, 0, 0, 1, 1)),
        (["handled 0 2 2", "handled 0 2 3", "handled 0 2 4"], Account(4, 0, 1, 0, 0)),
    ],
    ids=[
        "redone what was in hand",
        "nothing redone",
        "one lost at the end",
        "one passed over",
        "two turned round",
        "one redone from before the checkpoint",
        "one that nobody has sent",
    ],
)
def test_x19_the_account_catches_a_lie(ben: list[str], expected: Account) -> None:
    for told in ([*ANNA, *ben], [*ben, *ANNA]):  # the epochs say who came first, not the order of the reports
        found = account(SENT, told)
        assert found == expected
        is_exact = expected.lost == expected.order_violations == expected.duplicates == 0
        assert are_right(found.lines(4)) == is_exact


def test_x19_a_worker_that_was_never_heard_of_is_all_lost() -> None:
    found = account(SENT, [])
    assert found.lost == 4
    assert found.lines(4)[:2] == [Line("messages handled", "4", "0"), Line("lost", "0", "4")]


def test_x19_messages_that_were_never_acknowledged_are_missed() -> None:
    assert not are_right(account(SENT[:2], ANNA).lines(4))


DAY = [*islice(orders.day(), 149), orders.last_order()]
PLACES = [((number % 8, number // 8), order) for number, order in enumerate(DAY)]


def made() -> Made:
    """As it must be."""
    totals = orders.totals(DAY)
    archived = [(place, total) for place, total in totals.items() if place[1] < orders.LAST]
    bad = [(f"orders/{place[0]} offset {place[1]}", order.flaw) for place, order in PLACES if order.flaw is not None]
    return Made(totals, archived, bad, 0)


def lines(found: Made) -> dict[str, tuple[str, str]]:
    """Those that are wrong: expected, found."""
    all_lines = spark_lines(PLACES, "orders", orders.LAST, found)
    return {line.what: (line.expected, line.found) for line in all_lines if not line.is_right}


def test_the_account_of_spark_is_exact_if_all_is_there_once() -> None:
    assert lines(made()) == {}


def test_the_account_of_spark_catches_a_cent() -> None:
    right = made()
    place, total = next(iter(right.totals.items()))
    wrong = lines(replace(right, totals={**right.totals, place: total + Decimal("0.01")}))
    count = len(right.totals)
    assert wrong["Spark: correct totals in the topic"] == (f"{count}", f"{count - 1}, and 1 wrong")
    assert len(wrong) == 2, "and their sum"


def test_the_account_of_spark_catches_what_is_archived_twice_or_never() -> None:
    right = made()
    count, what = len(right.archived), "Spark: correct totals in Parquet"
    assert lines(replace(right, archived=[*right.archived, right.archived[0]]))[what][1] == f"{count}, and 1 wrong"
    assert lines(replace(right, archived=right.archived[1:]))[what] == (f"{count}", f"{count - 1}")


def test_the_account_of_spark_catches_a_wrong_reason_and_a_lag() -> None:
    right = made()
    (origin, _), *others = right.dead_letters
    count = len(right.dead_letters)
    wrong = lines(replace(right, dead_letters=[(origin, "no reason"), *others], lag=1))
    assert wrong == {
        "Spark: dead letters, with place and reason": (f"{count}", f"{count - 1}, and 1 wrong"),
        "Spark: lag, read outside Spark": ("0", "1"),
    }


def test_orders_are_the_same_for_a_seed_and_some_are_bad_in_each_way() -> None:
    assert [*islice(orders.day(), 149)] == DAY[:-1]
    assert {order.flaw for order in DAY} == {
        None,
        "amount is not of type decimal(12,2)",
        "account is missing",
        "it is not one JSON document",
        "it is not UTF-8",
    }
    for order in DAY:
        if order.flaw is None:
            found = json.loads(order.value, parse_float=Decimal)
            assert (found["account"], found["amount"], found["at"]) == (
                order.account,
                order.amount,
                order.at.isoformat(),
            )


def test_no_order_of_the_day_can_be_too_late_and_the_last_one_ends_all_its_windows() -> None:
    late_after = timedelta(days=1)  # the watermark of the pipelines
    times = [order.at for order in orders.day()]
    assert min(times) >= orders.OPENING
    assert max(times) - min(times) < late_after
    assert orders.window_of(max(times)) + orders.WINDOW <= orders.last_order().at - late_after
    assert orders.last_order().flaw is None


def test_totals_leave_bad_orders_out() -> None:
    good = replace(DAY[0], flaw=None)
    later = replace(good, at=good.at + orders.WINDOW)
    begin = orders.window_of(good.at)
    assert begin <= good.at < begin + orders.WINDOW
    assert orders.totals([good, good, later, replace(good, flaw="it is bad")]) == {
        (good.account, begin): 2 * good.amount,
        (good.account, begin + orders.WINDOW): good.amount,
    }


def test_only_files_that_a_batch_has_committed_count(tmp_path: Path) -> None:
    log = tmp_path / "_spark_metadata"
    log.mkdir()
    first, second = ({"path": f"file://{tmp_path}/part%20{n}.parquet", "action": "add"} for n in (1, 2))
    (log / "0").write_text("v1\n" + json.dumps(first))
    (log / "1").write_text("v1")
    (log / "2.compact").write_text("v1\n" + json.dumps(first) + "\n" + json.dumps(second))
    (log / ".3.crc").write_text("no")
    assert committed_files(tmp_path) == [tmp_path / "part 1.parquet", tmp_path / "part 2.parquet"]
    assert committed_files(tmp_path / "nothing") == []


def test_a_rate_is_the_rise_of_a_count_around_each_moment() -> None:
    times = [0.0, 1.0, 2.0, 3.0, 4.0]
    at, values = rate(times, [0, 10, 20, 20, 20], width_s=1.0, step_s=1.0)
    assert at == times
    assert values == [5.0, 10.0, 5.0, 0.0, 0.0]
    assert rate([1.0], [5], width_s=1.0) == ([], [])


def test_a_rate_spreads_a_jump_over_its_width_and_loses_nothing() -> None:
    times = [number / 10 for number in range(101)]
    counts = [0 if at < 5 else 60 for at in times]
    _, values = rate(times, counts, width_s=2.0, step_s=0.1)
    assert max(values) == pytest.approx(30)
    assert sum(values) * 0.1 == pytest.approx(60)


def sample(at_s: float, *owners: str | None) -> Sample:
    return Sample(at_s, 0, 0, None, owners)


def test_tenures_end_where_the_next_owner_was_seen_first() -> None:
    samples = [
        sample(0, None, "ben"),
        sample(1, "anna", "ben"),
        sample(2, "anna", "ben"),
        sample(3, None, "ben"),
        sample(4, "ben", "cleo"),
        sample(5, "ben", "cleo"),
    ]
    assert tenures(samples) == [
        Tenure(0, "anna", 1, 3),
        Tenure(0, "ben", 4, 5),
        Tenure(1, "ben", 0, 4),
        Tenure(1, "cleo", 4, 5),
    ]
    assert tenures([]) == []


@pytest.mark.parametrize("read", [None, 3], ids=["without Spark", "with Spark"])
def test_the_chart_is_a_png(tmp_path: Path, read: int | None) -> None:
    pytest.importorskip("matplotlib")
    samples = [Sample(n / 10, n, n // 2, read, ("anna", None if n < 5 else "ben")) for n in range(20)]
    draw(tmp_path / "chart.png", "title", "subtitle", samples, [Mark(0.5, "anna: kill -9"), Mark(1.0, "ben: stopped")])
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_there_are_orders_for_every_step_however_slowly_spark_starts() -> None:
    messages_max = 2000  # of the option --messages
    assert messages_max + SLOW_MAX + 20 * MORE <= orders.COUNT_MAX


WORKER = """
import os
os.write(1, b"began 0 1 7\\nhandled 0 1 7\\nbegan 0 1 8\\nhan")
input()
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """A worker that prints what `WORKER` does, and ends with its standard input."""

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return process([sys.executable, "-S", "-c", WORKER, *command[3:]], **options)

    process = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    found = Worker("url", "", "group", "anna", tmp_path)
    yield found
    found.process.kill()
    found.process.wait(10)


def test_what_a_stopped_worker_has_printed_is_known_before_it_goes_on(worker: Worker) -> None:
    """The demo must not take a message for one in hand that was handled before the worker stopped."""
    eventually(lambda: worker.handled == 1)
    worker.signal(signal.SIGSTOP, "stopped")
    eventually(worker.is_stopped)
    worker.catch_up()
    assert worker.in_hand == "0 1 8", "a line of which only the begin is there does not count"
    assert worker.told == ["began 0 1 7", "handled 0 1 7", "began 0 1 8"]


def test_a_worker_that_somebody_else_has_killed_is_a_failure(worker: Worker) -> None:
    os.kill(worker.process.pid, signal.SIGKILL)
    assert eventually(worker.failure) == "anna was killed by signal 9: it printed nothing"


def test_a_process_is_killed_when_its_time_to_end_is_over_and_its_cpu_time_is_known_before() -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1)\n"
    code += "while True: pass"
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    reader = threading.Thread(target=lambda: None)
    reader.start()
    told = []
    try:
        if Path("/proc/self/stat").exists():
            eventually(lambda: cpu_s([process.pid])[process.pid] > 0.05)
        assert not end(process, reader, time.monotonic() + 0.05, lambda: told.append(1))
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()  # type: ignore[union-attr]
    assert told
    assert process.returncode == -signal.SIGKILL
    assert cpu_s([process.pid]) == {}
