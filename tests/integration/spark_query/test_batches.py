"""S2, K3, K4: what the batches of a query read, restarts, and groups that are shared with others."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from pxrs.errors import (
    CheckpointsDiffer,
    GroupActive,
)
from pxrs.hub import Hub
from pxrs.spark.following import join_query
from pxrs.testing.waiting import eventually
from tests.integration.spark_query.queries import OPTIONS, SHARED, checkpoints, run_batch, send


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
        with pytest.raises(GroupActive, match="is used exclusively by"):
            join_query(hub, second)
        with pytest.raises(GroupActive, match="is used exclusively by"):
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
            eventually(lambda: len(hub.group("g").describe().members) == 2)
            assert inbox.poll(1, 0.3) == []  # nothing is released before Spark has finished the batch
            query.finish(end)
            eventually(lambda: len(inbox.assignment) == 2)
            theirs = set(inbox.assignment)
            offsets = dict.fromkeys(theirs, 25)
            while any(offsets[p] < 100 for p in theirs):
                for message in inbox.poll(500, 5):
                    assert message.offset == offsets[message.partition]
                    offsets[message.partition] += 1
            after, mine = run_batch(query, end)
            assert set(mine) == {0, 1, 2, 3} - theirs
            inbox.commit()
        eventually(lambda: len(query.membership.lanes) == 4)
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
