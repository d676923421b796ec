"""S2, K3, K4, S6: a streaming query as a member of its group, driven as Spark drives it, without Spark."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import pxrs
from pxrs import clock
from pxrs.errors import (
    CheckpointOutOfRange,
    CheckpointsDiffer,
    CommitUnknown,
    DataLost,
    GroupActive,
    GroupUnavailable,
    OutcomeUnknown,
    PartitionLost,
    PartitionsPaused,
    RegistryError,
    RegistryUnavailable,
)
from pxrs.group.member import GroupMember
from pxrs.group.records import Checkpoint, Keys, Paused
from pxrs.hub import Hub
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.memory import MemoryLog
from pxrs.publishing.feed import Feed
from pxrs.publishing.manifest import Publisher, fingerprint
from pxrs.publishing.membership import Membership
from pxrs.publishing.planning import Span, Spans
from pxrs.publishing.query import Query
from pxrs.publishing.staging.directory import DirectoryStaging
from pxrs.registry.contract import Commit
from pxrs.registry.memory import MemoryStore
from pxrs.spark import reader
from pxrs.spark.options import ReadOptions, Where
from pxrs.spark.reader import StreamReader, join_query
from pxrs.testing.hooked import HookedRegistry

OPTIONS = ReadOptions(Where("memory:", None, "orders"), "g", lease_ttl=1.0, handover_timeout=20.0)
SHARED = replace(OPTIONS, is_shared=True)
DEADLINE_S = 20.0


@pytest.fixture
def hub() -> Iterator[Hub]:
    with pxrs.open("memory:") as hub:
        hub.create_topic("orders", partitions=4)
        send(hub, 400)
        yield hub


@pytest.fixture
def single() -> Iterator[Hub]:
    """One partition with a hundred messages."""
    with pxrs.open("memory:") as hub:
        hub.create_topic("orders", partitions=1)
        with hub.producer("orders") as out:
            out.send_batch(pa.table({"value": [b"v"] * 100}))
        yield hub


def send(hub: Hub, count: int) -> None:
    with hub.producer("orders") as out:
        out.send_batch(pa.table({"value": [b"v"] * count, "partition": [i % 4 for i in range(count)]}))


def checkpoints(hub: Hub) -> list[int]:
    return [each.checkpoint for each in hub.group("g").describe().partitions if each.checkpoint is not None]


def run_batch(query: Query, start: Spans, rows_max: int | None = None) -> tuple[Spans, Spans]:
    """A batch up to where its tasks have run; how far Spark is then, and what was read."""
    end = query.latest(start, rows_max, None)
    spans, fences = query.ranges(start, end)
    assert spans.keys() == fences.keys()
    return end, spans


def read(query: Query, start: Spans, end: Spans) -> list[tuple[int, int]]:
    return [(span.start, span.end) for span in query.ranges(start, end)[0].values()]


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_query_keeps_its_hub_though_no_other_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_stop_on_sigterm", lambda: None)  # of a process of the query's own
    with pxrs.open(tmp_path / "data", upkeep=False) as hub:
        hub.create_topic("orders", partitions=1, retention=3600)
        stream = StreamReader(replace(OPTIONS, where=Where(hub.url, None, "orders")))
        stream.latestOffset(stream.initialOffset(), stream.getDefaultReadLimit())
        until(lambda: hub.upkeep().janitor.endswith(f":{os.getpid()}"))
        stream.stop()
        assert hub.upkeep().janitor == ""


def test_lanes_are_not_read_before_they_are_placed(hub: Hub) -> None:
    """A lease was lost and the partitions claimed again: the new lanes are at the group's checkpoints, which may lie
    before what Spark has finished."""
    with join_query(hub, OPTIONS) as query:
        membership = query.membership
        end, _ = run_batch(query, {})
        query.finish(end)
        assert membership.placed_lanes() is not None
        membership.lanes_assigned(list(membership.lanes.values()))
        assert membership.placed_lanes() is None
        assert len(membership.take_unplaced()) == 4
        assert membership.placed_lanes() is not None


@pytest.mark.parametrize("is_leased", [True, False])
def test_checkpoints_that_cannot_be_written_end_a_query_only_while_its_lease_lives(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, is_leased: bool
) -> None:
    """Without a lease, the lanes are over anyway: the next ones are placed by what Spark has finished."""

    def away() -> None:
        raise RegistryUnavailable("away")

    with join_query(hub, OPTIONS) as query, monkeypatch.context() as patch:
        patch.setattr(Membership, "is_leased", property(lambda _: is_leased))
        patch.setattr(query.membership, "lease_s", 0.0)
        patch.setattr(query.membership.member, "commit", away)
        if is_leased:
            with pytest.raises(RegistryUnavailable, match="Start the query again"):
                query.membership.commit()
        else:
            query.membership.commit()


def test_s2_what_spark_has_finished_is_the_groups_checkpoint(hub: Hub) -> None:
    with join_query(hub, OPTIONS) as query:
        end, spans = run_batch(query, {}, 100)
        assert sum(span.end - span.start for span in spans.values()) == 100
        assert checkpoints(hub) == [0, 0, 0, 0]
        after, _ = run_batch(query, end)
        assert checkpoints(hub) == [span.end for _, span in sorted(spans.items())]
        assert query.latest(after, None, None) == after
        assert hub.group("g").describe().lag == 0


def test_what_is_planned_twice_is_not_passed_over(hub: Hub) -> None:
    with join_query(hub, OPTIONS) as query:
        first = query.latest({}, 100, None)
        assert query.latest({}, 100, None) == first


def test_a_batch_of_before_a_restart_is_read_again_as_it_was(hub: Hub) -> None:
    with join_query(hub, OPTIONS) as query:
        start, _ = run_batch(query, {}, 40)
        end, spans = run_batch(query, start, 100)
    with join_query(hub, OPTIONS) as query:
        again, _ = query.ranges(start, end)
        assert again == spans
        assert checkpoints(hub) == [10, 10, 10, 10], "the sink expects it where the batch begins"
        after, rest = run_batch(query, end)
        assert all(rest[number].start == spans[number].end for number in rest)
        query.finish(after)
        assert hub.group("g").describe().lag == 0


def test_spark_was_ahead_of_the_group_when_the_driver_died(hub: Hub) -> None:
    with join_query(hub, OPTIONS) as query:
        finished, spans = run_batch(query, {}, 100)
    assert checkpoints(hub) == [0, 0, 0, 0]
    with join_query(hub, OPTIONS) as query:
        _, rest = run_batch(query, finished)
        assert {number: span.start for number, span in rest.items()} == {n: s.end for n, s in spans.items()}


def test_a_lost_checkpoint_location_goes_on_where_the_group_is(hub: Hub) -> None:
    with join_query(hub, OPTIONS) as query:
        end, _ = run_batch(query, {}, 100)
        query.finish(end)
    with join_query(hub, OPTIONS) as query:
        _, spans = run_batch(query, {})
        assert sum(span.end - span.start for span in spans.values()) == 300


def test_an_old_checkpoint_location_is_refused(hub: Hub) -> None:
    with join_query(hub, OPTIONS) as query:
        old, _ = run_batch(query, {}, 100)
        new, _ = run_batch(query, old, 100)
        query.finish(new)
    with join_query(hub, OPTIONS) as query, pytest.raises(CheckpointsDiffer, match="reset the group to offset 25"):
        query.latest(old, None, None)


def test_a_group_that_was_reset_counts_more_than_what_spark_remembers(hub: Hub) -> None:
    with join_query(hub, OPTIONS) as query:
        end, _ = run_batch(query, {})
        query.finish(end)
    hub.group("g").reset(5)
    with join_query(hub, OPTIONS):
        pass  # it came and went without a batch: the reset is not forgotten
    with join_query(hub, OPTIONS) as query:
        after, spans = run_batch(query, end)
        assert {span.start for span in spans.values()} == {5}
        query.finish(after)
    with join_query(hub, OPTIONS) as query:
        assert query.latest(after, None, None) == after


def test_k4_a_second_query_and_a_consumer_are_kept_out(hub: Hub) -> None:
    second = replace(OPTIONS, lease_ttl=0.3)  # it waits for two of them
    with join_query(hub, OPTIONS):
        with pytest.raises(GroupActive, match="alone"):
            join_query(hub, second)
        with pytest.raises(GroupActive, match="alone"):
            hub.consumer("orders", "g")
    with hub.consumer("orders", "g", name="worker-7"), pytest.raises(GroupActive, match="worker-7"):
        join_query(hub, second)


def test_a_query_waits_for_one_that_is_leaving(hub: Hub) -> None:
    first = join_query(hub, OPTIONS)
    threading.Timer(0.2, first.close).start()
    with join_query(hub, OPTIONS) as query:
        assert run_batch(query, {})[1]


def test_a_shared_group_hands_over_both_ways_and_a_batch_in_hand_is_finished_first(hub: Hub) -> None:
    with join_query(hub, SHARED) as query:
        end, spans = run_batch(query, {}, 100)
        assert len(spans) == 4
        with hub.consumer("orders", "g", commit_interval=0.05) as inbox:
            until(lambda: len(hub.group("g").describe().members) == 2)
            assert inbox.poll(1, 0.3) == []  # nothing is released before Spark has finished the batch
            query.finish(end)
            until(lambda: len(inbox.assignment) == 2)
            theirs = set(inbox.assignment)
            offsets = dict.fromkeys(theirs, 25)
            while any(offsets[p] < 100 for p in theirs):
                for message in inbox.poll(500, 5):
                    assert message.offset == offsets[message.partition]
                    offsets[message.partition] += 1
            after, mine = run_batch(query, end)
            assert set(mine) == {0, 1, 2, 3} - theirs
            inbox.commit()
        until(lambda: len(query.membership.lanes) == 4)
        send(hub, 40)
        last, spans = run_batch(query, after)
        assert {number: span.start for number, span in spans.items()} == dict.fromkeys(range(4), 100)
        query.finish(last)
        assert hub.group("g").describe().lag == 0


def test_k3_a_repeated_batch_reads_nothing_that_others_have_done(hub: Hub) -> None:
    with join_query(hub, SHARED) as query:
        end, spans = run_batch(query, {}, 100)
    with hub.consumer("orders", "g", until="end") as inbox:
        assert sum(1 for _ in inbox) == 400
    with join_query(hub, SHARED) as query:
        assert query.ranges({}, end) == ({}, {})
        assert query.latest(end, None, None) == end
    assert spans


@pytest.fixture
def aging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A thousand messages stored half a day ago and ten now, in a topic that keeps a day."""
    with pxrs.open("memory:") as hub:
        hub.create_topic("orders", partitions=1, retention=timedelta(days=1))
        with hub.producer("orders") as out:
            for count, age_s in ((1000, 43_200), (10, 0)):
                stored = int((time.time() - age_s) * 1e6)
                monkeypatch.setattr(clock, "wall_time_us", lambda stored=stored: stored)
                times = pa.array([stored] * count, pa.timestamp("us", tz="UTC"))
                out.send_batch(pa.table({"value": [b"v"] * count, "timestamp": times})).result()
        yield hub


def age(hub: Hub) -> None:
    """Retention, as it will be in eighteen hours."""
    assert hub.topic("orders").log.retain(int((time.time() + 64_800) * 1e6)) == {0: 1000}


def test_s6_what_retention_took_is_an_error_with_its_offsets_or_is_skipped(aging: Hub) -> None:
    with join_query(aging, OPTIONS) as query:
        age(aging)
        with pytest.raises(DataLost) as caught:
            query.latest({}, None, None)
        assert (caught.value.place, caught.value.start, caught.value.end) == ("orders/0", 0, 1000)
    with join_query(aging, replace(OPTIONS, fails_on_loss=False)) as query:
        assert read(query, {}, query.latest({}, None, None)) == [(1000, 1010)]
        assert checkpoints(aging) == [1000], "the sink expects it where the batch begins"


def publish(hub: Hub, folder: Path, query: Query, spans: Spans, has_state: bool | None) -> None:
    """As the sink does it for batch 0, in one commit with the group's checkpoints. Then the driver dies."""
    if "out" not in [topic.name for topic in hub.topics()]:
        hub.create_topic("out", partitions=1)
    fences = query._answer[3] if query._answer is not None else {}
    feed = Feed(
        "g", query.source.id, query.membership.incarnation or "", fingerprint(hub.registry), spans, fences, False
    )
    publisher = Publisher(hub.registry, hub.topic("out").log, DirectoryStaging(str(folder)))
    publisher.publish("query", 0, [], [feed], has_state=has_state)


def test_k3_a_published_batch_is_not_read_again_so_retention_may_have_taken_it(aging: Hub, tmp_path: Path) -> None:
    with join_query(aging, OPTIONS) as query:
        end, spans = run_batch(query, {}, 1000)
        publish(aging, tmp_path, query, spans, has_state=False)
    assert checkpoints(aging) == [1000]
    age(aging)
    for _ in range(2):  # it came and went without a batch: the group's checkpoint then names the member as its writer
        with join_query(aging, OPTIONS) as query:
            assert query.ranges({}, end) == ({}, {})
    with join_query(aging, OPTIONS) as query:
        assert query.ranges({}, end) == ({}, {})
        after, rest = run_batch(query, end)
        assert {number: (span.start, span.end) for number, span in rest.items()} == {0: (1000, 1010)}
        query.finish(after)
        assert aging.group("g").describe().lag == 0


@pytest.mark.parametrize(
    ("has_state", "says"),
    [(True, "to rebuild the query's state"), (None, "whether the query keeps state is not known")],
)
def test_s6_a_published_batch_that_state_needs_is_lost_and_the_error_says_why(
    aging: Hub, tmp_path: Path, has_state: bool | None, says: str
) -> None:
    with join_query(aging, OPTIONS) as query:
        end, spans = run_batch(query, {}, 1000)
        publish(aging, tmp_path, query, spans, has_state)
    with join_query(aging, OPTIONS) as query:
        assert query.ranges({}, end)[0] == spans, "the rows are there"
    age(aging)
    with join_query(aging, OPTIONS) as query, pytest.raises(DataLost, match=says) as caught:
        query.ranges({}, end)
    assert (caught.value.place, caught.value.start, caught.value.end) == ("orders/0", 0, 1000)
    assert says in str(pickle.loads(pickle.dumps(caught.value)))
    with join_query(aging, replace(OPTIONS, fails_on_loss=False)) as query:
        assert query.ranges({}, end)[0] == spans, "its tasks go on behind what is lost, and say so"


def test_k3_only_a_manifest_of_the_very_range_and_epoch_says_that_a_batch_is_published(
    aging: Hub, tmp_path: Path
) -> None:
    """With a sink that is no topic of this hub there is no manifest; one of an earlier epoch is of another batch."""
    with join_query(aging, OPTIONS) as query:
        end, spans = run_batch(query, {}, 1000)
        query.finish(end)
    with join_query(aging, OPTIONS) as query:
        assert query.ranges({}, end)[0] == spans, "Spark has forgotten that it finished the batch"
    aging.group("g").reset(0)
    with join_query(aging, OPTIONS) as query:
        later, again = run_batch(query, {}, 1000)
        publish(aging, tmp_path, query, again, has_state=False)
    with join_query(aging, OPTIONS) as query:
        assert query.ranges({}, end)[0] == spans
    with join_query(aging, OPTIONS) as query:
        shorter = {0: Span(later[0].epoch, 500, 1000)}
        assert query.ranges({}, shorter)[0] == shorter
    with join_query(aging, OPTIONS) as query:
        assert query.ranges({}, later) == ({}, {})


@pytest.mark.parametrize("fails_on_loss", [True, False])
def test_s6_retention_comes_between_two_looks_of_a_batch_that_bytes_bound(
    aging: Hub, monkeypatch: pytest.MonkeyPatch, fails_on_loss: bool
) -> None:
    with join_query(aging, replace(OPTIONS, fails_on_loss=fails_on_loss)) as query:
        within = query._within_bytes
        monkeypatch.setattr(query, "_within_bytes", lambda *given: (age(aging), within(*given))[1])
        if fails_on_loss:
            with pytest.raises(DataLost):
                query.latest({}, None, 10_000)
            return
        assert read(query, {}, query.latest({}, None, 10_000)) == [(1000, 1010)]
        assert checkpoints(aging) == [1000], "the sink expects it where the batch begins"


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
        with join_query(hub, PATIENT) as query:
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


def test_an_idle_query_notices_what_its_group_does(hub: Hub) -> None:
    with join_query(hub, replace(SHARED, lease_ttl=20.0)) as query:
        start, _ = run_batch(query, {})
        assert query.latest(start, None, None) == start
        assert query._idle is not None
        with hub.consumer("orders", "g", commit_interval=0.05) as inbox:
            until(lambda: (query.latest(start, None, None), len(inbox.assignment) == 2)[1])
        until(lambda: (query.latest(start, None, None), len(query.membership.lanes) == 4)[1])
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
            pytest.raises(PartitionsPaused, match=r"partition 1, .*pxrs group retry"),
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
        assert [record.getMessage() for record in caplog.records if "holds up partition 1" in record.getMessage()]
        with pytest.raises(PartitionsPaused, match="partition 1, "):
            query.latest(end, None, None)
    with join_query(hub, SHARED) as query:  # without an end it stays, for somebody may decide meanwhile
        assert query.latest(end, None, None) == end
        caplog.clear()
        assert query.latest(end, None, None) == end
        assert not caplog.records, "said once"
        hub.group("g").skip("orders", 1)
        until(lambda: not any(lane.is_paused for lane in query.membership.lanes.values()))
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
    with join_query(hub, replace(OPTIONS, where=Where("memory:", None, "large"))) as query:
        end = query.latest({}, None, 50_000)
        assert 10 <= end[0].end <= 70
        assert query.latest(end, None, 1)[0].end == end[0].end + 10, "at least one stored batch"


def test_a_lease_that_was_lost_is_taken_anew_and_nothing_is_passed_over(hub: Hub) -> None:
    with join_query(hub, OPTIONS) as query:
        start, _ = run_batch(query, {}, 100)
        lease = query.membership.member.lease
        assert lease is not None
        lease.close()
        until(lambda: query.membership.member.lease is not lease and query.membership.member.is_settled)
        end, spans = run_batch(query, start)
        assert {span.start for span in spans.values()} == {25}
        query.finish(end)
        assert hub.group("g").describe().lag == 0


def test_alone_partitions_that_are_lost_before_the_tasks_begin_are_claimed_again(hub: Hub, tmp_path: Path) -> None:
    with join_query(hub, OPTIONS) as query:
        end = query.latest({}, 100, None)
        lease = query.membership.member.lease
        assert lease is not None
        lease.close()
        until(lambda: query.membership.member.lease is not lease and query.membership.member.is_settled)
        spans, fences = query.ranges({}, end)
        assert spans == end, "as it was planned"
        assert query.ranges({}, end) == (spans, fences)
        publish(hub, tmp_path, query, spans, has_state=False)  # the fences are those of the new claims
        assert checkpoints(hub) == [25, 25, 25, 25]
        query.finish(run_batch(query, end)[0])
        assert hub.group("g").describe().lag == 0


def test_alone_what_tasks_read_when_the_lease_is_lost_is_refused_and_a_restart_reads_it(
    hub: Hub, tmp_path: Path
) -> None:
    with join_query(hub, OPTIONS) as query:
        end, spans = run_batch(query, {}, 100)
        lease = query.membership.member.lease
        assert lease is not None
        lease.close()
        until(lambda: query.membership.member.lease is not lease and query.membership.member.is_settled)
        assert query.ranges({}, end)[0] == spans, "its tasks are told the same"
        with pytest.raises(PartitionLost, match="Start the query again"):
            publish(hub, tmp_path, query, spans, has_state=False)
    with join_query(hub, OPTIONS) as query:
        assert query.ranges({}, end)[0] == spans
        publish(hub, tmp_path, query, spans, has_state=False)
    assert checkpoints(hub) == [25, 25, 25, 25]


class Outage:
    """A registry that cannot be reached while `is_on`: no request and no renewal of a lease comes through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, registry: HookedRegistry) -> None:
        self.is_on = False
        self.refused = 0
        self.refused_max: int | None = None
        """After so many refused requests it is over."""
        self.renews = False
        """Renewals come through nevertheless."""
        registry.reach = self.reach
        store = registry._store
        for name in ("renew_lease", "begin_lease"):
            monkeypatch.setattr(store, name, partial(self._renewed, getattr(store, name)))

    def begin(self, refused_max: int | None = None) -> None:
        self.refused, self.refused_max, self.is_on = 0, refused_max, True

    def reach(self) -> None:
        if self.is_on and self.refused == self.refused_max:
            self.is_on = False
        if self.is_on:
            self.refused += 1
            raise RegistryUnavailable("nobody answers")

    def _renewed(self, renew: Callable[..., Any], *given: Any) -> Any:
        if self.is_on and not self.renews:
            raise RegistryUnavailable("nobody answers")
        return renew(*given)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hub, Outage]]:
    """As `hub`, with a registry that may be away."""
    registry = HookedRegistry(MemoryStore())
    hub = Hub(MemoryLog(), registry)
    with hub:
        hub.create_topic("orders", partitions=4)
        send(hub, 400)
        outage = Outage(monkeypatch, registry)
        yield hub, outage
        outage.is_on = False


PATIENT = replace(OPTIONS, lease_ttl=20.0)
"""With a lease that lives longer than any outage of these tests."""


def test_a_registry_that_is_away_for_less_than_the_lease_ends_no_query(away: tuple[Hub, Outage]) -> None:
    hub, outage = away
    with join_query(hub, PATIENT) as query:
        start, _ = run_batch(query, {}, 100)
        lease = query.membership.member.lease
        outage.begin(refused_max=5)
        end, spans = run_batch(query, start)
        assert {span.start for span in spans.values()} == {25}
        assert outage.refused == 5
        assert checkpoints(hub) == [25, 25, 25, 25]
        outage.begin(refused_max=3)
        query.finish(end)
        assert query.membership.member.lease is lease
    assert hub.group("g").describe().lag == 0


def test_a_checkpoint_whose_reply_is_lost_ends_no_query(away: tuple[Hub, Outage]) -> None:
    hub, _ = away
    registry = hub.registry
    assert isinstance(registry, HookedRegistry)
    with join_query(hub, PATIENT) as query:
        start, _ = run_batch(query, {}, 100)
        lost: list[Commit] = []

        def lose_reply(commit: Commit) -> None:
            if len(lost) < 2 and any("/checkpoints/" in key for key in commit.put):
                lost.append(commit)
                raise OutcomeUnknown("the reply is lost")

        registry.after = lose_reply
        end, _ = run_batch(query, start)
        assert lost
        query.finish(end)
    assert hub.group("g").describe().lag == 0


@pytest.mark.parametrize("options", [OPTIONS, SHARED], ids=["alone", "shared"])
def test_a_registry_that_is_away_for_less_than_the_lease_ends_no_restart(
    away: tuple[Hub, Outage], tmp_path: Path, options: ReadOptions
) -> None:
    hub, outage = away
    options = replace(options, lease_ttl=20.0)
    with join_query(hub, options) as query:
        end, spans = run_batch(query, {}, 100)
        publish(hub, tmp_path, query, spans, has_state=False)
    with join_query(hub, options) as query:
        query.membership.settle(time.monotonic() + DEADLINE_S)
        outage.begin(refused_max=5)
        assert query.ranges({}, end) == ({}, {})
        assert query.membership.registry_id == fingerprint(hub.registry)


def test_after_an_outage_that_outlasts_the_lease_the_query_claims_again_and_passes_nothing_over(
    away: tuple[Hub, Outage],
) -> None:
    hub, outage = away
    with join_query(hub, OPTIONS) as query:
        start, first = run_batch(query, {}, 100)
        lease = query.membership.member.lease
        assert lease is not None
        outage.begin()
        threading.Thread(target=lambda: (until(lambda: not lease.alive), setattr(outage, "is_on", False))).start()
        end, spans = run_batch(query, start)
        assert outage.refused
        assert query.membership.member.lease is not lease
        assert {number: span.start for number, span in spans.items()} == {n: s.end for n, s in first.items()}
        assert all(spans[number].epoch > first[number].epoch for number in spans)
        query.finish(end)
    assert hub.group("g").describe().lag == 0


def test_an_outage_that_does_not_end_ends_the_query_with_advice(away: tuple[Hub, Outage]) -> None:
    hub, outage = away
    with join_query(hub, OPTIONS) as query:
        start, _ = run_batch(query, {}, 100)
        query.membership.settle_s = 0.2
        outage.begin()
        with pytest.raises(RegistryUnavailable, match=r"the lease has run out.* Start the query again"):
            query.latest(start, None, None)
        outage.is_on = False
        query.membership.settle_s = DEADLINE_S
        end, _ = run_batch(query, start)
        outage.renews = True
        outage.begin()
        with pytest.raises(RegistryUnavailable, match=r"could not be reached for as long as.* Start the query again"):
            query.finish(end)
        outage.is_on = False


@pytest.mark.parametrize(
    "error", [CommitUnknown("g", [0], "no reply"), GroupUnavailable("g", [0], "not written", "no reply")]
)
def test_what_a_group_says_of_an_outage_is_told_with_advice_and_stays_unknown_if_it_is(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, error: RegistryError
) -> None:
    def refuse() -> None:
        raise error

    with join_query(hub, replace(OPTIONS, lease_ttl=0.5)) as query:
        end, _ = run_batch(query, {}, 100)
        with monkeypatch.context() as patch:
            patch.setattr(query.membership.member, "commit", refuse)
            with pytest.raises(RegistryError, match=r"no reply\. Start the query again") as caught:
                query.finish(end)
        assert isinstance(caught.value, OutcomeUnknown) == isinstance(error, OutcomeUnknown)


def test_alone_a_repeated_batch_is_read_whole_or_not_at_all(hub: Hub) -> None:
    with join_query(hub, OPTIONS) as query:
        end, _ = run_batch(query, {}, 100)
    with join_query(hub, OPTIONS) as query:
        query.membership.settle(time.monotonic() + DEADLINE_S)
        lane = query.membership.lanes[2]
        lane.is_lost = True
        with pytest.raises(PartitionLost):
            query.ranges({}, end)


def lose(query: Query, number: int) -> None:
    """As the member finds out that somebody has taken a partition."""
    with query.membership.member._mutex:
        assert query.membership.member._protocol is not None
        query.membership.member._protocol.lose(number)


def put_checkpoint(hub: Hub, number: int, offset: int) -> None:
    hub.registry.commit(put={Keys("g").checkpoint(hub.topic("orders").id, number): Checkpoint(offset).dump()})


def test_k3_a_batch_is_told_the_same_however_often_spark_asks(hub: Hub) -> None:
    """A stream that stands twice in a plan is asked for twice."""
    with join_query(hub, SHARED) as query:
        end, spans = run_batch(query, {}, 100)
        lose(query, 2)
        assert query.ranges({}, end)[0] == spans
    put_checkpoint(hub, 1, 10)  # somebody else has done a part of it
    with join_query(hub, SHARED) as query:
        first = query.ranges({}, end)
        assert set(first[0]) == {0, 2, 3}
        assert query.ranges({}, end) == first
        after, rest = run_batch(query, end)
        assert {number: span.start for number, span in rest.items()} == {0: 25, 1: 10, 2: 25, 3: 25}
        query.finish(after)
        assert hub.group("g").describe().lag == 0


def test_k2_what_is_left_of_a_batch_that_was_published_in_part_is_read_in_the_next(hub: Hub) -> None:
    """One partition was lost between plan and batch, the sink published the others, and the driver died."""
    with join_query(hub, SHARED) as query:
        end = query.latest({}, 100, None)
        lose(query, 1)
        assert set(query.ranges({}, end)[0]) == {0, 2, 3}
    for number in (0, 2, 3):
        put_checkpoint(hub, number, 25)
    with join_query(hub, SHARED) as query:
        assert query.ranges({}, end) == ({}, {}), "the sink has this batch, and takes no more of it"
        _, spans = run_batch(query, end)
        assert {number: span.start for number, span in spans.items()} == {0: 25, 1: 0, 2: 25, 3: 25}


def test_g7_a_checkpoint_beyond_the_end_is_an_error(hub: Hub) -> None:
    put_checkpoint(hub, 3, 150)
    with (
        join_query(hub, OPTIONS) as query,
        pytest.raises(CheckpointOutOfRange, match=r"at offset 150 of orders/3.* at 100"),
    ):
        query.latest({}, None, None)


def test_available_now_does_not_end_because_the_lease_has(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process was stopped for longer than its lease, and its member has not yet noticed."""
    with join_query(hub, OPTIONS) as query:
        query.target_now()
        query.membership.settle(time.monotonic() + DEADLINE_S)
        deadline = GroupMember.deadline.__get__
        resumed_at = time.monotonic() + 0.5
        is_over = lambda member: float("-inf") if time.monotonic() < resumed_at else deadline(member)  # noqa: E731
        monkeypatch.setattr(GroupMember, "deadline", property(is_over))
        assert {span.end for span in query.latest({}, None, None).values()} == {100}


def test_k3_what_a_repeated_batch_leaves_out_is_not_passed_over_by_a_later_restart(single: Hub) -> None:
    with join_query(single, SHARED) as query:
        planned = query.latest({}, None, None)
        assert read(query, {}, planned) == [(0, 100)]
    with single.consumer("orders", "g", ack="manual") as inbox:  # the driver died, and a consumer does a part of it
        messages = inbox.poll(500, 10)
        while len(messages) < 50:
            messages += inbox.poll(500, 10)
        for message in messages[:50]:
            inbox.ack(message)
    with join_query(single, SHARED) as query:
        assert read(query, {}, planned) == []  # and Spark counts the batch as finished
    with join_query(single, SHARED) as query:
        assert read(query, planned, query.latest(planned, None, None)) == [(50, 100)]


def test_k3_what_was_lost_between_plan_and_batch_is_not_passed_over(single: Hub) -> None:
    with join_query(single, replace(SHARED, lease_ttl=5.0)) as query:
        planned = query.latest({}, None, None)
        lease = query.membership.member.lease
        assert lease is not None
        lease.close()
        until(lambda: query.membership.member.lease is not lease and query.membership.member.is_settled)
        assert read(query, {}, planned) == []
        assert read(query, planned, query.latest(planned, None, None)) == [(0, 100)]
