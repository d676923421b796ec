"""Where the two queries of a pipeline with dead letters begin to read, without Spark."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.group.records import Checkpoint, Keys
from pxrs.hub import Hub
from pxrs.spark import HubAddress, Pipeline, parse_json, pipeline, topics_matching
from pxrs.spark.run import pin_starts

LATEST = {"startingOffsets": "latest"}
BOTH = ("p", "p.dead-letters")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with pxrs.open(tmp_path / "hub") as hub:
        yield hub


def fill(hub: Hub, name: str, messages: int) -> None:
    hub.create_topic(name, partitions=1, exist_ok=True)
    with hub.producer(name) as out:
        for number in range(messages):
            out.send(str(number))


def made(options: dict[str, Any]) -> Pipeline:
    return pipeline(
        topics_matching("in-.*"), "out", name="p", parse=parse_json("a INT"), dead_letters="bad", options=options
    )(lambda rows: rows)


def pinned(hub: Hub, each: Pipeline, topic: str) -> list[int | None]:
    """The checkpoints of the rows and of the dead letters after the start of a pipeline."""
    pin_starts(hub, each, HubAddress(hub.url))
    return [offset_of(hub, group, topic) for group in BOTH]


def offset_of(hub: Hub, group: str, topic: str) -> int | None:
    key = Keys(group).checkpoint(hub.topic(topic).id, 0)
    found = hub.registry.get(key)
    return None if found is None else Checkpoint.load(key, found.value).offset


def put(hub: Hub, group: str, topic: str, offset: int) -> None:
    key = Keys(group).checkpoint(hub.topic(topic).id, 0)
    hub.registry.commit({}, {key: Checkpoint(offset, time.time(), "test").dump()})


def test_both_queries_begin_at_one_latest_offset(hub: Hub) -> None:
    fill(hub, "in-1", 3)
    fill(hub, "in-2", 0)
    assert pinned(hub, made(LATEST), "in-1") == [3, 3]
    fill(hub, "in-1", 2)
    fill(hub, "in-2", 2)
    assert pinned(hub, made(LATEST), "in-1") == [3, 3], "where they were"
    assert pinned(hub, made(LATEST), "in-2") == [0, 0]


@pytest.mark.parametrize("options", [LATEST, {"startingOffsets": '{"in-1": {"0": 1}}'}], ids=["latest", "offsets"])
def test_g6_a_topic_that_was_added_while_a_pipeline_was_stopped_is_read_from_its_first_message(
    hub: Hub, options: dict[str, Any]
) -> None:
    """As without dead letters: else its messages up to now would be in no sink."""
    fill(hub, "in-1", 3)
    pinned(hub, made(options), "in-1")
    fill(hub, "in-2", 4)
    assert pinned(hub, made(options), "in-2") == [0, 0]


def test_g6_dead_letters_of_an_added_topic_begin_at_its_first_message_also_if_the_rows_are_further(hub: Hub) -> None:
    """Both queries find a new topic by themselves. The query of the rows has read some of it; that of the dead letters
    was stopped before it found the topic. What the first one has left out is still to be sent."""
    fill(hub, "in-1", 3)
    pinned(hub, made(LATEST), "in-1")
    fill(hub, "in-2", 4)
    put(hub, "p", "in-2", 2)
    assert pinned(hub, made(LATEST), "in-2") == [2, 0]


@pytest.mark.parametrize(("starting", "begin"), [("latest", 2), ("earliest", 0)])
def test_dead_letters_that_are_added_to_a_pipeline_begin_no_later_than_its_rows(
    hub: Hub, starting: str, begin: int
) -> None:
    fill(hub, "in-1", 4)
    put(hub, "p", "in-1", 2)
    assert pinned(hub, made({"startingOffsets": starting}), "in-1") == [2, begin]
