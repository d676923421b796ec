"""A streaming query as a member of its group, driven as Spark drives it, without Spark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from pxrs.hub import Hub
from pxrs.publishing.feed import Feed
from pxrs.publishing.manifest import Publisher, fingerprint
from pxrs.publishing.planning import Spans
from pxrs.publishing.query import Query
from pxrs.publishing.selection import Topics
from pxrs.publishing.staging.directory import DirectoryStaging
from pxrs.spark.options import ReadFrom, ReadOptions

OPTIONS = ReadOptions(ReadFrom("memory:", None, Topics(("orders",))), "g", lease_ttl=1.0, handover_timeout=20.0)
SHARED = replace(OPTIONS, is_shared=True)


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


PATIENT = replace(OPTIONS, lease_ttl=20.0)
"""With a lease that lives longer than any outage of these tests."""
