"""How much a batch reads, what an idle query asks for, and paused partitions."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pxrs.errors import (
    PartitionsPaused,
)
from pxrs.group.records import Keys, Paused
from pxrs.hub import Hub
from pxrs.log.directory.log import DirectoryLog
from pxrs.publishing.planning import Spans
from pxrs.publishing.selection import Topics
from pxrs.registry.contract import Commit
from pxrs.registry.memory import MemoryStore
from pxrs.spark.following import join_query
from pxrs.spark.options import ReadFrom
from pxrs.testing.hooked import HookedRegistry
from pxrs.testing.waiting import eventually
from tests.integration.spark_query.queries import OPTIONS, SHARED, checkpoints, publish, run_batch, send


def test_rows_that_are_fewer_than_the_partitions_go_round(hub: Hub) -> None:
    with hub.producer("orders") as out:
        out.send_batch(pa.table({"value": [b"v"] * 1000, "partition": [3] * 1000}))
    with join_query(hub, OPTIONS) as query:
        start: Spans = {}
        seen = []
        for _ in range(4):
            start, spans = run_batch(query, start, 2)
            seen.append(sorted(spans))
        assert seen == [[0, 1], [2, 3]] * 2


class Calls:
    """Counts calls of one thread: into the file system, and to the registry."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, registry: HookedRegistry) -> None:
        self.counts: Counter[str] = Counter()
        self._thread = threading.get_ident()
        for name in ("open", "stat", "fstat", "pread", "read", "listdir", "scandir"):
            monkeypatch.setattr(os, name, partial(self._call, name, getattr(os, name)))
        registry.reach = lambda: self._count("registry")

    def _call(self, name: str, inner: Callable[..., Any], *given: Any, **named: Any) -> Any:
        self._count(name)
        return inner(*given, **named)

    def _count(self, name: str) -> None:
        if threading.get_ident() == self._thread:
            self.counts[name] += 1


@pytest.mark.parametrize("partitions", [4, 200])
def test_an_idle_query_asks_neither_the_log_nor_the_registry_for_each_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    registry = HookedRegistry(MemoryStore())
    hub = Hub(DirectoryLog(tmp_path), registry)
    with hub:
        hub.create_topic("orders", partitions=partitions)
        send(hub, 40)
        with join_query(hub, OPTIONS) as query:
            start, _ = run_batch(query, {})
            assert query.latest(start, None, None) == start
            calls = Calls(monkeypatch, registry)
            for _ in range(5):
                assert query.latest(start, 10, None) == start
                assert query.source.ends()
            # For each look: whether the topic is there, and what inotify has told, however many partitions there are.
            assert calls.counts == {"stat": 10, "read": 10}
            monkeypatch.undo()
            send(hub, 4)
            calls = Calls(monkeypatch, registry)
            end = query.latest(start, None, None)
            new = {number: (span.start, span.end) for number, span in end.items() if span != start[number]}
            assert new == dict.fromkeys(range(4), (10, 11))
            assert sum(calls.counts.values()) < 50, calls.counts
            monkeypatch.undo()


def test_what_the_sink_has_committed_with_a_batch_is_not_written_again(tmp_path: Path) -> None:
    """With a topic of the same hub as sink, a batch costs the registry what the sink writes, and nothing more."""
    commits: list[Commit] = []
    registry = HookedRegistry(MemoryStore())
    with Hub(DirectoryLog(tmp_path), registry) as hub:
        hub.create_topic("orders", partitions=4)
        send(hub, 400)
        with join_query(hub, OPTIONS) as query:
            end, spans = run_batch(query, {}, 100)
            publish(hub, tmp_path, query, spans, has_state=False)
            registry.after = commits.append
            after, _ = run_batch(query, end, 100)
            query.finish(end)
            query.finish(end)
            written = [key for commit in commits for key in (*commit.put, *commit.ephemeral) if "/checkpoints/" in key]
            assert written == []
            assert checkpoints(hub) == [25, 25, 25, 25]
            query.finish(run_batch(query, after)[0])
            assert checkpoints(hub) == [100, 100, 100, 100], "another sink leaves it to the query"


def test_an_idle_query_notices_what_its_group_does(hub: Hub) -> None:
    with join_query(hub, SHARED) as query:
        start, _ = run_batch(query, {})
        assert query.latest(start, None, None) == start
        assert query._idle is not None
        with hub.consumer("orders", "g", commit_interval=0.05) as inbox:
            eventually(lambda: (query.latest(start, None, None), len(inbox.assignment) == 2)[1])
        eventually(lambda: (query.latest(start, None, None), len(query.membership.lanes) == 4)[1])
        send(hub, 4)
        _, spans = run_batch(query, start)
        assert {(span.start, span.end) for span in spans.values()} == {(100, 101)}


def pause(hub: Hub, number: int) -> None:
    """As a worker leaves a message that it could not handle, at the offset 3."""
    hub.registry.commit(put={Keys("g").pause(hub.topic("orders").id, number): Paused(3, "boom").dump()})


def test_x14_a_query_alone_does_not_leave_a_paused_partition_out(hub: Hub) -> None:
    with join_query(hub, OPTIONS) as query:
        end, spans = run_batch(query, {}, 100)
    pause(hub, 1)
    for ask in (lambda query: query.latest({}, None, None), lambda query: query.ranges({}, end)):
        with (
            join_query(hub, OPTIONS) as query,
            pytest.raises(PartitionsPaused, match=r"partition 1 is paused .*pxrs group retry"),
        ):
            ask(query)
    hub.group("g").retry("orders", 1)
    with join_query(hub, OPTIONS) as query:
        assert query.ranges({}, end)[0] == spans


def test_x14_a_shared_query_reads_the_others_first_and_then_tells_of_a_paused_partition(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    with join_query(hub, SHARED) as query:
        planned, _ = run_batch(query, {}, 100)
    pause(hub, 1)
    with join_query(hub, SHARED) as query:
        query.target_now()
        assert set(query.ranges({}, planned)[0]) == {0, 2, 3}
        end, spans = run_batch(query, planned)
        assert set(spans) == {0, 2, 3}
        assert [record.getMessage() for record in caplog.records if "partition 1 is paused" in record.getMessage()]
        with pytest.raises(PartitionsPaused, match="partition 1 is paused"):
            query.latest(end, None, None)
    with join_query(hub, SHARED) as query:  # without an end it stays, for somebody may decide meanwhile
        assert query.latest(end, None, None) == end
        caplog.clear()
        assert query.latest(end, None, None) == end
        assert not caplog.records, "said once"
        hub.group("g").skip("orders", 1)
        eventually(lambda: not any(lane.is_paused for lane in query.membership.lanes.values()))
        assert [(span.start, span.end) for span in run_batch(query, end)[1].values()] == [(4, 100)]


def test_a_batch_names_no_more_partitions_than_one_commit_can_hold(hub: Hub) -> None:
    hub.registry.limits = replace(hub.registry.limits, commit_keys_max=7)
    with join_query(hub, OPTIONS) as query:
        seen: set[int] = set()
        start: Spans = {}
        for _ in range(2):
            start, spans = run_batch(query, start, 30)
            assert len(spans) <= 3
            seen |= set(spans)
        assert seen == {0, 1, 2, 3}


def test_available_now_ends_where_the_log_ended(hub: Hub) -> None:
    with join_query(hub, OPTIONS) as query:
        query.target_now()
        send(hub, 40)
        end, _ = run_batch(query, {})
        assert {span.end for span in end.values()} == {100}
        assert query.latest(end, None, None) == end


def test_bytes_bound_a_batch(hub: Hub) -> None:
    hub.create_topic("large", partitions=1)
    with hub.producer("large", batch_rows=10) as out:
        out.send_batch(pa.table({"value": [bytes(1000)] * 400}))
    with join_query(hub, replace(OPTIONS, where=ReadFrom("memory:", None, Topics(("large",))))) as query:
        end = query.latest({}, None, 50_000)
        assert 10 <= end[0].end <= 70
        assert query.latest(end, None, 1)[0].end == end[0].end + 10, "at least one stored batch"
