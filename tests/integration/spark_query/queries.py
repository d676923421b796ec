"""A streaming query as a member of its group, driven as Spark drives it, without Spark."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import pyarrow as pa

from pxrs.hub import Hub
from pxrs.publishing.manifest import Publisher
from pxrs.publishing.planning import Spans
from pxrs.publishing.query import Query
from pxrs.publishing.selection import Topics
from pxrs.publishing.staging.directory import DirectoryStaging
from pxrs.spark.options import ReadFrom, ReadOptions, stream_options
from pxrs.spark.reader import StreamReader
from pxrs.spark.tasks import TaskReader

OPTIONS = ReadOptions(ReadFrom("memory:", None, Topics(("orders",))), "g", lease_ttl=20.0, handover_timeout=20.0)
SHARED = replace(OPTIONS, is_shared=True)
HASTY = replace(OPTIONS, lease_ttl=1.0)
"""With a lease that ends soon, for tests that wait for its end."""


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
    publisher = Publisher(hub.registry, hub.topic("out").log, DirectoryStaging(str(folder)))
    publisher.publish("query", 0, [], query.feeds(spans, fences), has_state=has_state)


class Engine:
    """Drives a stream of a hub in a directory as Spark does: offsets are texts, tasks get pickled inputs."""

    def __init__(self, hub: Hub, location: Location, **options: str) -> None:
        self.location = location
        self._stream = StreamReader(stream_options({"url": hub.url, "group": "g", "leaseTtl": "5", **options}))
        self._limit = self._stream.getDefaultReadLimit()
        if not location.texts:
            location.texts = [json.dumps(self._stream.initialOffset())]

    def plan(self) -> bool:
        """Plan the next batch, and write its end into the checkpoint location. False if there is nothing to read."""
        start = self.location.texts[-1]
        end = json.dumps(self._stream.latestOffset(json.loads(start), self._limit))
        if end == start:
            return False
        if len(self.location.texts) > 1:
            self._stream.commit(json.loads(start))
        self.location.texts.append(end)
        return True

    def run(self) -> list[tuple[str, int, int]]:
        """Run the tasks of the planned batch: the topic, partition and offset of each row."""
        start, end = map(json.loads, self.location.texts[-2:])
        tasks = pickle.loads(pickle.dumps(self._stream.partitions(start, end)))
        rows = []
        for task in tasks:
            for batch in TaskReader().read(task):
                rows += zip(*(batch.column(name).to_pylist() for name in ("topic", "partition", "offset")), strict=True)
        return rows

    def read_all(self) -> list[tuple[str, int, int]]:
        """Plan and run batches until there is nothing to read."""
        rows = []
        while self.plan():
            rows += self.run()
        return rows

    @property
    def stream(self) -> StreamReader:
        return self._stream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stream.stop()


@dataclass
class Location:
    """What Spark keeps in a checkpoint location: the end of each planned batch, after the initial offset."""

    texts: list[str] = field(default_factory=list)
