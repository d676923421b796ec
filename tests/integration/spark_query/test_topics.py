"""Streams over several topics: one member of the group, offsets by topic, topics that come and go.

Every message has a place: topic, partition, offset. A test is exact: the places that tasks have read are those of all
messages, each once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

import pxrs
from pxrs.errors import CheckpointsDiffer, InvalidOption, TopicDeleted
from pxrs.group.records import Checkpoint, Keys
from pxrs.hub import Hub
from pxrs.publishing.planning import Delay
from pxrs.publishing.selection import Topics
from pxrs.spark import following, reader, tasks
from pxrs.spark.following import join_query
from pxrs.spark.options import ReadFrom, stream_options
from pxrs.spark.reader import StreamReader
from pxrs.spark.tasks import TaskReader
from pxrs.testing.waiting import eventually
from tests.integration.spark_query.queries import OPTIONS, Engine, Location, publish, read, run_batch

BOTH = "orders,returns"


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub in a directory with two topics, and streams that look for new topics all the time."""
    monkeypatch.setattr(reader, "_stop_on_sigterm", lambda: None)  # of a process of the query's own
    monkeypatch.setattr(following, "LOOK_S", 0.0)
    with pxrs.open(tmp_path / "hub", upkeep=False) as hub:
        hub.create_topic("orders", partitions=2)
        hub.create_topic("returns", partitions=1)
        fill(hub, "orders", 40)
        fill(hub, "returns", 10)
        yield hub


def fill(hub: Hub, topic: str, count: int) -> None:
    partitions = hub.topic(topic).partitions
    with hub.producer(topic) as out:
        out.send_batch(pa.table({"value": [b"v"] * count, "partition": [i % partitions for i in range(count)]}))


def places(hub: Hub, *topics: str) -> list[tuple[str, int, int]]:
    """The places of all messages of these topics."""
    return [
        (name, number, offset)
        for name in topics
        for number in range(hub.topic(name).partitions)
        for offset in range(hub.topic(name).end(number))
    ]


def lags(hub: Hub) -> dict[tuple[str, int], int | None]:
    return {(each.topic, each.partition): each.lag for each in hub.group("g").describe().partitions}


def incarnations(hub: Hub) -> list[str]:
    return [each.incarnation for each in hub.group("g").describe().members]


def test_two_topics_are_read_by_one_member_and_each_message_once(shop: Hub) -> None:
    location = Location()
    with Engine(shop, location, subscribe=BOTH, maxRowsPerTrigger="7") as engine:
        rows = engine.read_all()
        assert len(shop.group("g").describe().members) == 1
        assert sorted(rows) == places(shop, "orders", "returns")
        assert set(lags(shop).values()) == {0}
    offset = json.loads(location.texts[-1])["topics"]
    assert {found["name"]: list(found["partitions"]) for found in offset.values()} == {
        "orders": ["0", "1"],
        "returns": ["0"],
    }
    fill(shop, "returns", 3)
    with Engine(shop, location, subscribe=BOTH) as engine:  # the same location: only what came since
        assert engine.read_all() == [("returns", 0, 10), ("returns", 0, 11), ("returns", 0, 12)]


def test_a_batch_of_two_topics_is_read_again_as_it_was_after_a_restart(shop: Hub) -> None:
    location = Location()
    with Engine(shop, location, subscribe=BOTH, maxRowsPerTrigger="8") as engine:
        assert engine.plan()
        first = engine.run()
        assert {topic for topic, _, _ in first} == {"orders", "returns"}
    with Engine(shop, location, subscribe="returns,orders") as engine:  # named in another order
        assert sorted(engine.run()) == sorted(first)
        assert sorted(first + engine.read_all()) == places(shop, "orders", "returns")


def test_few_rows_of_several_topics_share_a_task(shop: Hub) -> None:
    with Engine(shop, Location(), subscribe=BOTH) as engine:
        assert engine.plan()
        start, end = map(json.loads, engine.location.texts)
        assert len(engine.stream.partitions(start, end)) == 1


def test_a_location_of_the_version_before_goes_on(shop: Hub) -> None:
    location = Location()
    with Engine(shop, location, topic="orders", includeTopic="true", maxRowsPerTrigger="10") as engine:
        assert engine.plan()
        first = engine.run()
    old = [
        {"topic": id, "partitions": found["partitions"]}
        for text in location.texts
        for id, found in json.loads(text)["topics"].items()
    ]
    location.texts = [json.dumps(each) for each in old]
    with Engine(shop, location, topic="orders", includeTopic="true") as engine:
        assert sorted(engine.run()) == sorted(first), "the batch in flight is repeated"
        rest = engine.read_all()
    assert sorted(first + rest) == places(shop, "orders")


def test_a_stream_of_one_topic_is_widened_and_the_added_topic_begins_at_its_first_message(shop: Hub) -> None:
    location = Location()
    with Engine(shop, location, topic="orders", includeTopic="true", startingOffsets="latest") as engine:
        assert not engine.plan()
        fill(shop, "orders", 2)
        assert engine.read_all() == [("orders", 0, 20), ("orders", 1, 20)]
    with Engine(shop, location, subscribe=BOTH, startingOffsets="latest") as engine:
        assert engine.read_all() == places(shop, "returns")


def test_g6_an_added_topic_begins_at_its_first_message_also_if_its_first_checkpoints_were_cut_short(shop: Hub) -> None:
    location = Location()
    with Engine(shop, location, topic="orders", includeTopic="true", startingOffsets="latest") as engine:
        assert not engine.plan()
    added = shop.create_topic("refunds", partitions=3)
    fill(shop, "refunds", 9)
    # A query that has added the topic has died between two commits of first checkpoints.
    keys = Keys("g")
    shop.registry.commit(put={keys.checkpoint(added.id, 0): Checkpoint(0, by="start").dump()})
    with Engine(shop, location, subscribe="orders,refunds", startingOffsets="latest") as engine:
        assert sorted(engine.read_all()) == places(shop, "refunds")


def test_starting_offsets_count_for_all_topics_if_the_first_checkpoints_of_a_group_were_cut_short(shop: Hub) -> None:
    first = shop.topic("orders")
    shop.registry.commit(put={Keys("g").checkpoint(first.id, 0): Checkpoint(20, by="start").dump()})
    with Engine(shop, Location(), subscribe=BOTH, startingOffsets="latest") as engine:
        assert not engine.plan()


def test_g6_a_new_topic_that_matches_joins_a_running_query_and_is_read_from_its_first_message(shop: Hub) -> None:
    with Engine(shop, Location(), subscribePattern="(a-)?(orders|returns)", startingOffsets="latest") as engine:
        assert not engine.plan()
        fill(shop, "orders", 4)
        rows = engine.read_all()
        shop.create_topic("other", partitions=1)
        member = incarnations(shop)
        assert not engine.plan()
        assert incarnations(shop) == member, "a topic that does not match changes nothing"
        shop.create_topic("a-orders", partitions=3)  # its partitions are numbered first from now on
        fill(shop, "a-orders", 6)
        fill(shop, "returns", 1)
        rows += engine.read_all()
        assert [each.topics for each in shop.group("g").describe().members] == [("a-orders", "orders", "returns")]
        assert set(lags(shop).values()) == {0}
    later = [("orders", number, offset) for number in (0, 1) for offset in (20, 21)]
    assert sorted(rows) == sorted([*places(shop, "a-orders"), *later, ("returns", 0, 10)])


def test_a_batch_in_flight_is_finished_with_the_topics_it_was_planned_with(shop: Hub) -> None:
    """Spark calls `latestOffset` only after it has finished a batch. Until then the query keeps its topics."""
    with Engine(shop, Location(), subscribePattern=".*") as engine:
        assert engine.plan()
        shop.create_topic("a-orders", partitions=1)
        fill(shop, "a-orders", 5)
        first = engine.run()
        assert sorted(first) == places(shop, "orders", "returns")
        assert sorted(engine.read_all()) == places(shop, "a-orders")


def test_a_topic_that_came_while_the_query_was_down_is_read_from_its_first_message(shop: Hub) -> None:
    location = Location()
    with Engine(shop, location, subscribePattern=".*", startingOffsets="latest") as engine:
        assert not engine.plan()
    shop.create_topic("a-orders", partitions=1)
    fill(shop, "a-orders", 5)
    with Engine(shop, location, subscribePattern=".*", startingOffsets="latest") as engine:
        assert engine.read_all() == places(shop, "a-orders")


def test_available_now_reads_no_topic_that_came_later(shop: Hub) -> None:
    location = Location()
    with Engine(shop, location, subscribePattern=".*") as engine:
        engine.stream.prepareForTriggerAvailableNow()
        member = incarnations(shop)
        shop.create_topic("a-orders", partitions=1)
        fill(shop, "a-orders", 5)
        fill(shop, "orders", 2)
        assert len(engine.read_all()) == 50
        assert incarnations(shop) == member, "nor does it join for it"
    with Engine(shop, location, subscribePattern=".*") as engine:
        engine.stream.prepareForTriggerAvailableNow()
        assert len(engine.read_all()) == 7


@pytest.mark.parametrize("which", [{"subscribe": BOTH}, {"subscribePattern": ".*"}])
def test_a_deleted_topic_ends_the_query_unless_data_may_be_lost(
    shop: Hub, caplog: pytest.LogCaptureFixture, which: dict[str, str]
) -> None:
    strict, lenient = Location(), Location()
    with (
        Engine(shop, strict, **which) as engine,
        Engine(shop, lenient, **which, group="l", failOnDataLoss="false") as other,
    ):
        rows = [engine.read_all(), other.read_all()]
        assert sorted(rows[0]) == sorted(rows[1]) == places(shop, "orders", "returns")
        shop.delete_topic("returns")
        fill(shop, "orders", 2)
        with pytest.raises(TopicDeleted, match=r"'returns' was deleted\. .*failOnDataLoss=false"):
            engine.plan()
        with caplog.at_level(logging.WARNING, "pxrs"):
            assert other.read_all() == [("orders", 0, 20), ("orders", 1, 20)]
        assert "continues without topics that were deleted: returns" in caplog.text
        assert other.stream.reportLatestOffset() == {
            "topics": {shop.topic("orders").id: {"name": "orders", "partitions": {"0": 21, "1": 21}}}
        }
    left = {"subscribe": "orders", "includeTopic": "true"} if "subscribe" in which else which
    with (
        Engine(shop, strict, **left) as engine,
        pytest.raises(CheckpointsDiffer, match="names the topic returns, which"),
    ):
        engine.plan()
    with Engine(shop, lenient, **left, group="l", failOnDataLoss="false") as other:
        assert not other.plan()
        fill(shop, "orders", 1)
        assert other.read_all() == [("orders", 0, 21)]
        shop.delete_topic("orders")
        with pytest.raises(TopicDeleted):  # nothing is left to read
            other.plan()


def test_assign_reads_the_named_partitions_alone_and_shows_the_others_as_unread(shop: Hub) -> None:
    location = Location()
    assign = json.dumps({"orders": [1], "returns": [0]})
    with Engine(shop, location, assign=assign) as engine:
        rows = engine.read_all()
        assert sorted(rows) == [place for place in places(shop, "orders", "returns") if place[:2] != ("orders", 0)]
        assert lags(shop) == {("orders", 0): 20, ("orders", 1): 0, ("returns", 0): 0}
        fill(shop, "orders", 1)  # into the partition that is not read
        assert not engine.plan()
    with Engine(shop, location, subscribe=BOTH) as engine:  # nothing of it was passed over
        assert engine.read_all() == [("orders", 0, offset) for offset in range(21)]
    shared = {"url": shop.url, "group": "g", "assign": assign, "shareGroup": "true"}
    with pytest.raises(InvalidOption, match="remove shareGroup"):
        StreamReader(stream_options(shared))


def test_offsets_are_given_by_topic_and_count_only_at_the_first_start(shop: Hub) -> None:
    starts = {"orders": {"0": 18, "1": -1}, "returns": {"0": -2}}
    location = Location()
    with Engine(shop, location, subscribe=BOTH, startingOffsets=json.dumps(starts)) as engine:
        assert sorted(engine.read_all()) == [("orders", 0, 18), ("orders", 0, 19), *places(shop, "returns")]
        shop.delete_topic("returns")
        fill(shop, "orders", 1)
        with pytest.raises(TopicDeleted):
            engine.plan()
    may_lose = {"startingOffsets": json.dumps(starts), "failOnDataLoss": "false", "includeTopic": "true"}
    with Engine(shop, location, subscribe="orders", **may_lose) as engine:  # the options stay as they were
        assert engine.read_all() == [("orders", 0, 20)]


def test_offsets_by_topic_name_every_topic(shop: Hub) -> None:
    lacking = {"url": shop.url, "group": "h", "subscribe": BOTH, "startingOffsets": json.dumps({"orders": {"0": 1}})}
    stream = StreamReader(stream_options(lacking))
    with pytest.raises(InvalidOption, match="it lacks returns"):
        stream.latestOffset(stream.initialOffset(), stream.getDefaultReadLimit())
    stream.stop()


def test_few_rows_wait_for_more_and_not_for_ever(shop: Hub) -> None:
    options = {"subscribe": BOTH, "minOffsetsPerTrigger": "60"}
    location = Location()
    with Engine(shop, location, **options) as engine:
        assert not engine.plan()
        assert not engine.plan()
        fill(shop, "orders", 10)
        assert engine.plan()
        assert len(engine.run()) == 60
        fill(shop, "returns", 1)
        assert not engine.plan()
        engine.stream.prepareForTriggerAvailableNow()  # no more may come
        assert engine.read_all() == [("returns", 0, 10)]
    fill(shop, "returns", 1)
    with Engine(shop, location, **options, maxTriggerDelay="50ms") as engine:
        eventually(engine.plan)
        assert engine.run() == [("returns", 0, 11)]


def test_a_delayed_batch_is_not_planned_again_before_it_is_due(hub: Hub) -> None:
    with join_query(hub, OPTIONS) as query:
        delay = Delay(rows_min=1000, delay_s=3600.0)
        eventually(lambda: (query.latest({}, None, None, delay) == {}, query._is_idle({}))[1])
        delay.due = 0.0
        query._idle = None
        assert len(query.latest({}, None, None, delay)) == 4


# Tests on a hub in memory: the group's checkpoints and the sink's commit.


@pytest.fixture
def joined(hub: Hub) -> Hub:
    hub.create_topic("returns", partitions=2)
    fill(hub, "returns", 20)
    return hub


TWO = replace(OPTIONS, where=ReadFrom("memory:", None, Topics(("orders", "returns"))))


def test_k3_one_commit_moves_the_checkpoints_of_all_topics_and_a_repeat_reads_nothing(
    joined: Hub, tmp_path: Path
) -> None:
    with join_query(joined, TWO) as query:
        end, spans = run_batch(query, {}, 60)
        assert len(spans) == 6
        publish(joined, tmp_path, query, spans, has_state=False)
    done = {(each.topic, each.partition): each.checkpoint for each in joined.group("g").describe().partitions}
    assert sum(done.values()) == 60
    with join_query(joined, TWO) as query:
        assert query.ranges({}, end) == ({}, {}), "the manifest names the ranges of both topics"
        after, rest = run_batch(query, end)
        assert sum(span.end - span.start for span in rest.values()) == 360
        query.finish(after)
        assert joined.group("g").describe().lag == 0


def test_k3_of_two_topics_only_what_others_have_not_done_is_repeated(joined: Hub) -> None:
    shared = replace(TWO, is_shared=True)
    with join_query(joined, shared) as query:
        end, _ = run_batch(query, {}, 60)
    with joined.consumer("returns", "g", until="end") as inbox:
        assert sum(1 for _ in inbox) == 20
    with join_query(joined, shared) as query:
        assert query.ranges({}, end) == ({}, {}), "some of it is done: perhaps published, so nothing is repeated"
        assert sum(end - start for start, end in read(query, end, query.latest(end, None, None))) == 400


def test_the_keys_of_one_commit_count_over_all_topics(joined: Hub) -> None:
    joined.registry.limits = replace(joined.registry.limits, commit_keys_max=7)
    with join_query(joined, TWO) as query:
        seen: set[int] = set()
        start = {}
        while len(seen) < 6:
            start, spans = run_batch(query, start, 30)
            assert 0 < len(spans) <= 3
            seen |= set(spans)


def test_k3_a_task_of_several_topics_announces_all_of_them_before_its_first_row(
    shop: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan with a limit takes no more rows than it needs. Without the feed of a topic, the sink's commit would move
    the checkpoints of the others alone, and a repeated batch would be refused as another one."""
    announced: set[str] = set()
    monkeypatch.setattr(tasks, "_announce", lambda url, feed: announced.add(feed.topic))
    with Engine(shop, Location(), subscribe=BOTH) as engine:
        assert engine.plan()
        start, end = map(json.loads, engine.location.texts)
        (task,) = engine.stream.partitions(start, end)
        next(iter(TaskReader().read(task)))
    assert announced == {shop.topic(name).id for name in ("orders", "returns")}
