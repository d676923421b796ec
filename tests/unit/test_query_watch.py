"""What Spark reports of streaming queries, as values; and the watch that keeps them, without Spark."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pxrs
from pxrs.spark import HubAddress, QueryReport, QueryWatch
from pxrs.spark.progress import BatchReport, TopicProgress, batch_of
from pxrs.spark.run import QueryRun, Run
from pxrs.spark.sinks import Sink
from pxrs.spark.watch import BATCHES_MAX


def one(partitions: dict[str, Any]) -> dict[str, Any]:
    """An offset of version 0.1, which has one topic."""
    return {"topic": "id-1", "partitions": partitions}


def several(**topics: dict[str, Any]) -> dict[str, Any]:
    found = {f"id-{name}": {"name": name, "partitions": partitions} for name, partitions in topics.items()}
    return {"topics": found}


def report(start: Any, end: Any, latest: Any, **more: Any) -> dict[str, Any]:
    source = {"numInputRows": 9, "startOffset": start, "endOffset": end, "latestOffset": latest}
    done = {"batchId": 4, "numInputRows": 9, "durationMs": {"addBatch": 7, "triggerExecution": 10}}
    return {"runId": "run", "name": None, **done, "sources": [source], **more}


def topics(*offsets: Any) -> Any:
    found = batch_of(report(*offsets))
    assert found is not None
    return found.topics


def test_only_a_trigger_that_did_something_is_a_batch() -> None:
    idle = {"batchId": 4, "numInputRows": 0, "durationMs": {"latestOffset": 2, "triggerExecution": 3}}
    done = {"batchId": 4, "numInputRows": 9, "durationMs": {"addBatch": 7, "triggerExecution": 10}}
    phases = done["durationMs"]
    assert batch_of(idle) is None
    speed = {**done, "processedRowsPerSecond": 900.0}
    assert batch_of(speed) == BatchReport(4, 9, None, 10, 900.0, 0, {}, phases)  # type: ignore[arg-type]
    state = {**done, "stateOperators": [{"numRowsTotal": 3}, {"numRowsTotal": 4}]}
    assert batch_of(state) == BatchReport(4, 9, None, 10, 0.0, 7, {}, phases)  # type: ignore[arg-type]
    sized = {**done, "sources": [{"metrics": {"bytes": "700"}}, {"metrics": None}, {"metrics": {"bytes": "7"}}]}
    found = batch_of(sized)
    assert found is not None
    assert found.bytes == 707
    assert found.lag is None, "no topic is read"


def test_rows_and_lag_of_one_topic_in_the_form_of_version_0_1() -> None:
    start = one({"0": [1, 0, 5], "1": [1, 0, 2]})
    end = one({"0": [1, 5, 9], "1": [1, 0, 2]})
    assert topics(start, end, one({"0": 10, "1": 2, "2": 0})) == {"id-1": TopicProgress(rows=4, lag=1)}
    assert topics(json.dumps(start), json.dumps(end), json.dumps(one({"0": 9, "1": 2}))) == {
        "id-1": TopicProgress(rows=4, lag=0)
    }, "as text too"
    assert topics(None, end, one({"0": 9, "1": 2})) == {"id-1": TopicProgress(rows=6, lag=0)}, "the first batch"
    assert topics("null", end, "null") == {"id-1": TopicProgress(rows=6, lag=None)}


def test_rows_and_lag_by_topic() -> None:
    start = several(orders={"0": [1, 0, 5]}, returns={})
    end = several(orders={"0": [2, 7, 9]}, returns={"3": [1, 0, 1]}, quiet={})
    latest = several(orders={"0": 12}, returns={"0": 0, "3": 1}, quiet={"0": 0})
    assert topics(start, end, latest) == {
        "orders": TopicProgress(rows=2, lag=3),
        "returns": TopicProgress(rows=1, lag=0),
        "quiet": TopicProgress(rows=0, lag=0),
    }
    found = batch_of(report(start, end, latest))
    assert found is not None
    assert (found.lag, found.rows) == (3, 3), "Spark counts 9: the query reads each message three times"


def test_the_lag_is_unknown_where_the_report_does_not_say_how_far_the_query_is() -> None:
    """It has read nothing of partition 1, which has messages that may be before its start."""
    found = batch_of(report(None, one({"0": [1, 5, 9]}), one({"0": 9, "1": 700})))
    assert found is not None
    assert (found.topics["id-1"].lag, found.lag) == (None, None)


FOREIGN = [
    *["7", 7, None, "not json", "[1]", {"logOffset": 3}, {"topics": [1]}, {"topic": 1}],
    *[one({"0": 5}), one({"0": None}), one({"0": ["a", "b"]}), several(orders={"0": {"offset": 5}})],
]


@pytest.mark.parametrize("offset", FOREIGN)
def test_the_offsets_of_other_sources_are_left_out(offset: Any) -> None:
    assert topics(offset, offset, offset) == {}


def test_the_latest_offset_need_not_be_numbers() -> None:
    assert topics(None, one({"0": [1, 5, 9]}), one({"0": None})) == {"id-1": TopicProgress(rows=4, lag=None)}


def test_topics_with_the_same_name_in_two_sources_are_added_up() -> None:
    """A join of two hubs, or of a topic with itself in two groups."""
    sources = [
        {"numInputRows": rows, "endOffset": several(orders={"0": [1, 0, rows]}), "latestOffset": latest}
        for rows, latest in ((2, several(orders={"0": 7})), (3, several(orders={"0": 4})))
    ]
    found = batch_of(report(None, None, None, sources=sources))
    assert found is not None
    assert (found.rows, found.topics, found.lag) == (5, {"orders": TopicProgress(rows=5, lag=6)}, 6)
    sources[0]["latestOffset"] = None
    found = batch_of(report(None, None, None, sources=sources))
    assert found is not None
    assert found.topics == {"orders": TopicProgress(rows=5, lag=None)}


def progress(number: int, **more: Any) -> str:
    end = one({"0": [1, 0, number + 1]})
    return json.dumps({**report(None, end, one({"0": number + 3})), "batchId": number, **more})


def test_a_watch_keeps_the_last_batches_the_sum_of_rows_and_the_error(caplog: pytest.LogCaptureFixture) -> None:
    told: list[QueryReport] = []
    watch = QueryWatch(None, told.append, batches_max=2)  # type: ignore[arg-type]
    assert watch.report("run") is None
    watch.on_started("run", "copies")
    with caplog.at_level(logging.INFO, logger="pxrs.spark"):
        for number in range(3):
            watch.on_progress(progress(number, name="copies"))
        watch.on_progress(json.dumps({**json.loads(progress(3)), "durationMs": {"latestOffset": 1}}))
        with pytest.raises(TimeoutError, match="not reported the end of the run run within 0 s"):
            watch.ended("run", timeout_s=0)
        waiter = threading.Timer(0, watch.on_terminated, ("run", "ValueError: oops"))
        waiter.start()
        found = watch.ended("run")
        waiter.join()
    assert [batch.number for batch in found.batches] == [1, 2]
    assert (found.name, found.rows, found.is_ended, found.error) == ("copies", 1 + 2 + 3, True, "ValueError: oops")
    assert found.last is not None
    assert found.last.lag == 2
    assert [len(report.batches) for report in told] == [1, 2, 2, 2], "a copy each"
    batch, *_, failed = caplog.records
    assert (batch.levelname, batch.query, batch.batch, batch.rows, batch.lag) == ("INFO", "copies", 0, 1, 2)  # type: ignore[attr-defined]
    assert (failed.levelname, failed.query, failed.error) == ("ERROR", "copies", "ValueError: oops")  # type: ignore[attr-defined]


def test_what_a_callback_raises_is_logged_and_the_report_kept(caplog: pytest.LogCaptureFixture) -> None:
    def fail(report: QueryReport) -> None:
        raise ValueError("mine")

    watch = QueryWatch(None, fail)  # type: ignore[arg-type]
    watch.on_progress(progress(0))
    assert "on_report failed for the query run" in caplog.text
    assert "ValueError: mine" in caplog.text
    found = watch.report("run")
    assert found is not None
    assert found.rows == 1, "also of a query that was started before the watch"


def test_a_run_counts_the_rows_of_more_batches_than_a_watch_keeps() -> None:
    """`look` may come late, because it waits for a registry."""
    each = QueryRun("copies", "g", "in", Sink("pxrs", topic="out"), None, "append", None, Path("c"))  # type: ignore[arg-type]
    each.query = SimpleNamespace(runId="run", isActive=True, recentProgress=[])
    with pxrs.open("memory:") as hub:
        run = Run(None, hub, [], HubAddress("memory:"), Path("c"))  # type: ignore[arg-type]
        run.queries = [each]
        for number in range(BATCHES_MAX + 50):
            run._watch.on_progress(progress(number))
        run.look()
    assert each.rows_done == sum(min(9, rows) for rows in range(1, BATCHES_MAX + 51)), "Spark counts 9 at most here"
    assert [batch.number for batch in each.batches] == list(range(50, BATCHES_MAX + 50))


def test_ended_returns_when_the_callback_was_told_of_the_end() -> None:
    told: list[QueryReport] = []
    is_told, may_go = threading.Event(), threading.Event()

    def slow(report: QueryReport) -> None:
        is_told.set()
        may_go.wait(30)
        told.append(report)

    watch = QueryWatch(None, slow)  # type: ignore[arg-type]
    spark = threading.Thread(target=watch.on_terminated, args=("run", None))
    spark.start()
    assert is_told.wait(30)
    with pytest.raises(TimeoutError):
        watch.ended("run", timeout_s=0)
    may_go.set()
    assert watch.ended("run").is_ended
    assert [report.is_ended for report in told] == [True]
    spark.join()


def test_a_watch_forgets_the_oldest_queries_and_refuses_to_keep_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pxrs.spark.watch.QUERIES_MAX", 2)
    watch = QueryWatch(None)  # type: ignore[arg-type]
    for run in "abc":
        watch.on_started(run, None)
    assert [watch.report(run) is None for run in "abc"] == [True, False, False]
    watch.on_terminated("c", None)
    watch.on_started("d", None)
    assert [watch.report(run) is None for run in "bcd"] == [False, True, False], "one that runs is kept"
    with pytest.raises(ValueError, match="batches_max is 0"):
        QueryWatch(None, batches_max=0)  # type: ignore[arg-type]
