"""The sink's commits in the driver's process, without a session: what it finds out about a query, and what it keeps."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow as pa
import pytest

import pxrs
from pxrs.errors import (
    BatchRefused,
    DamagedFrame,
    InvalidOption,
    OutcomeUnknown,
    RegistryReplaced,
    RegistryUnavailable,
    SharedState,
    WrongRegistry,
)
from pxrs.hub import Hub
from pxrs.model import Topic

pytest.importorskip("pyspark")

from pyspark.sql.types import BinaryType, StructType

from pxrs.publishing.feed import Feed
from pxrs.publishing.manifest import Publisher
from pxrs.publishing.planning import Span
from pxrs.publishing.records import Manifest, Part
from pxrs.publishing.staging.directory import DirectoryStaging
from pxrs.publishing.staging.files import Staged
from pxrs.spark import writer
from pxrs.spark.options import WriteOptions
from pxrs.spark.publishers import Publishers
from pxrs.spark.state import refuse_shared_state, stateful_operators
from pxrs.spark.writer import StagedFile, StagedMessage, StreamWriter, find_location

QUERY = "5a3c1f9e-0000-0000-0000-000000000000"
RUN = "run"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    publishers = Publishers()
    monkeypatch.setattr(writer, "_publishers", publishers)
    with pxrs.open(tmp_path / "hub") as hub:
        hub.create_topic("out", partitions=1)
        yield hub
    publishers.close()


class Location:
    """What Spark keeps in a checkpoint location."""

    def __init__(self, folder: Path, query: str = QUERY) -> None:
        self.folder = folder
        (folder / "offsets").mkdir(parents=True)
        (folder / "metadata").write_text(json.dumps({"id": query}))

    def plan(self, batch: int, text: str) -> None:
        (self.folder / "offsets" / str(batch)).write_text(f"v1\n{text}")


def commit(
    hub: Hub, batch: int, given: str | None = None, locations: str | None = None, registry: str | None = None
) -> None:
    """Stage one row, and do what Spark does in the driver's process."""
    rows = pa.record_batch({"value": pa.array([b"v"])})
    staged = DirectoryStaging(hub.url).stage(hub.topic("out").topic, QUERY, batch, 0, [rows])
    sink = StreamWriter(WriteOptions(hub.url, registry, "out"), StructType().add("value", BinaryType()), given)
    sink.commit([message_of(hub.topic("out").topic, staged, locations)], batch)


def message_of(topic: Topic, staged: Staged, locations: str | None = None) -> StagedMessage:
    """What a task reports that has staged rows for one topic."""
    files = () if staged.name is None else (StagedFile(topic.name, topic.id, staged.name),)
    return StagedMessage(QUERY, files, RUN, locations)


def announce_shared(hub: Hub, batch: int) -> None:
    """As a source does that reads under a shared group, of another registry."""
    feed = Feed("g", "topic", "member", "another", {0: Span(1, 0, 1)}, {0: 1}, True)
    DirectoryStaging(hub.url).announce(QUERY, batch, RUN, feed)


@pytest.mark.parametrize("prefix", ["", "file:", "file://"])
def test_k2_a_location_that_was_restored_one_batch_back_is_refused(hub: Hub, tmp_path: Path, prefix: str) -> None:
    location = Location(tmp_path / "checkpoint")
    given = prefix + str(location.folder)
    location.plan(0, "one")
    commit(hub, 0, given)
    copy = shutil.copytree(location.folder, tmp_path / "copy")
    location.plan(1, "two")
    commit(hub, 1, given)
    commit(hub, 1, given)  # Spark repeats it: its plan is there
    assert hub.topic("out").end(0) == 2
    shutil.rmtree(location.folder)
    copy.rename(location.folder)
    location.plan(1, "two and three")
    with pytest.raises(BatchRefused, match="Spark has planned it again"):
        commit(hub, 1, given)
    assert hub.topic("out").end(0) == 2


@pytest.mark.parametrize("given", [None, "hdfs://host/checkpoint", "/nowhere"])
def test_k2_where_the_location_cannot_be_read_a_batch_counts_by_its_number(hub: Hub, given: str | None) -> None:
    for batch in (0, 1, 1):
        commit(hub, batch, given)
    assert hub.topic("out").end(0) == 2


def test_k3_the_manifest_says_whether_the_query_keeps_state(hub: Hub, tmp_path: Path) -> None:
    location = Location(tmp_path / "checkpoint")
    found = []
    for batch, given in enumerate([None, "hdfs://host/checkpoint", str(location.folder), str(location.folder)]):
        if batch == 3:
            (location.folder / "state").mkdir()
        commit(hub, batch, given)
        (entry,) = hub.registry.scan(f"spark/{hub.topic('out').id}/")
        found.append(Manifest.load(entry).has_state)
    assert found == [None, None, False, True]


@pytest.mark.parametrize("is_given", [True, False], ids=["given", "of the session"])
def test_k4_a_shared_group_is_refused_to_a_query_with_state_wherever_it_keeps_it(
    hub: Hub, tmp_path: Path, is_given: bool
) -> None:
    Location(tmp_path / "locations" / "other", "another query")
    (tmp_path / "locations" / "other" / "state").mkdir()
    (tmp_path / "locations" / "empty").mkdir()
    location = Location(tmp_path / "locations" / "ours")
    where: dict[str, Any] = {"locations": str(tmp_path / "locations")}
    if is_given:
        where["given"] = str(location.folder)
    announce_shared(hub, 0)
    commit(hub, 0, **where)
    (location.folder / "state").mkdir()
    announce_shared(hub, 1)
    with pytest.raises(InvalidOption, match="shareGroup: the query keeps state") as caught:
        commit(hub, 1, **where)
    assert caught.value.option == "shareGroup"
    assert hub.topic("out").end(0) == 1


def test_k4_a_shared_group_is_refused_where_nobody_knows_whether_there_is_state(hub: Hub) -> None:
    announce_shared(hub, 0)
    for where in ({}, {"given": "s3a://bucket/checkpoint"}, {"locations": "/nowhere"}):
        with pytest.raises(InvalidOption, match="shareGroup: it is unknown whether the query keeps state"):
            commit(hub, 0, **where)
    assert hub.topic("out").end(0) == 0


class Plan:
    """As the JVM shows a plan: an operator over others."""

    def __init__(self, name: str, *children: Plan, is_streaming: bool = True) -> None:
        self._name, self._children, self._is_streaming = name, children, is_streaming

    def isStreaming(self) -> bool:
        return self._is_streaming

    def children(self) -> Plan:
        return self

    def size(self) -> int:
        return len(self._children)

    def apply(self, number: int) -> Plan:
        return self._children[number]

    def getClass(self) -> Plan:
        return self

    def getSimpleName(self) -> str:
        return self._name

    @property
    def rows(self) -> Any:
        """As a DataFrame has it."""
        execution = SimpleNamespace(analyzed=lambda: self)
        return SimpleNamespace(_jdf=SimpleNamespace(queryExecution=lambda: execution))


def test_k4_what_subtracts_or_intersects_keeps_state() -> None:
    stream, static = Plan("StreamingRelationV2"), Plan("LogicalRDD", is_streaming=False)
    assert stateful_operators(Plan("Project", Plan("Except", stream, static)).rows) == ["subtract"]
    assert stateful_operators(Plan("Intersect", stream, static).rows) == ["intersect"]
    subtracted = Plan("Except", static, static, is_streaming=False)
    assert stateful_operators(Plan("Join", stream, subtracted).rows) == []
    with pytest.raises(SharedState, match="subtract"):
        refuse_shared_state(Plan("Except", stream, static).rows)


def test_of_two_locations_of_a_query_it_is_the_one_that_spark_writes_to(tmp_path: Path) -> None:
    for number, name in enumerate(("b-copy", "a", "c-copy")):
        location = Location(tmp_path / name)
        os.utime(location.folder / "offsets", (number % 2, number % 2))
    assert find_location(QUERY, None, f"file:{tmp_path}") == tmp_path / "a"


def sink_of(hub: Hub) -> StreamWriter:
    return StreamWriter(WriteOptions(hub.url, None, "out"), StructType().add("value", BinaryType()))


@pytest.mark.parametrize("has_rows", [True, False])
@pytest.mark.parametrize("is_kept", [True, False], ids=["at work", "first batch"])
def test_k1_a_topic_that_was_made_again_under_a_stream_is_refused_by_its_name(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, is_kept: bool, has_rows: bool
) -> None:
    sink = sink_of(hub)
    commit(hub, 0)
    if not is_kept:
        writer._publishers.close()
        monkeypatch.setattr(writer, "_publishers", Publishers())
    with pxrs.open(hub.url) as other:
        other.delete_topic("out")
        other.create_topic("out", partitions=1)
    rows = pa.record_batch({"value": pa.array([b"v"] * has_rows, pa.binary())})
    assert sink.stager.topic is not None
    staged = DirectoryStaging(hub.url).stage(sink.stager.topic, QUERY, 1, 0, [rows])
    DirectoryStaging(hub.url).announce(
        QUERY, 1, RUN, Feed("g", "topic", "m", "another", {0: Span(1, 0, 1)}, {0: 1}, False)
    )
    for _ in range(2):
        with pytest.raises(
            BatchRefused, match=r"the topic out was deleted and created again while rows for it .*Start the query again"
        ):
            sink.commit([message_of(sink.stager.topic, staged)], 1)
    assert hub.topic("out").end(0) == 0
    assert hub.registry.scan(f"spark/{hub.topic('out').id}/") == []
    commit(hub, 0)  # of a query that knows the new one
    assert hub.topic("out").end(0) == 1
    writer._publishers.close()


@pytest.mark.parametrize("error", [RegistryUnavailable, OutcomeUnknown])
def test_k1_a_registry_that_stays_away_ends_a_batch_with_advice(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(*given: Any) -> None:
        raise error("nobody answers")

    with monkeypatch.context() as patch:
        patch.setattr(Publisher, "publish", refuse)
        with pytest.raises(error, match=r"batch 0 of query .*nobody answers\. Start the query again"):
            commit(hub, 0)
    commit(hub, 0)
    assert hub.topic("out").end(0) == 1


def test_k1_a_registry_that_was_restored_from_a_copy_is_opened_again_by_the_next_try(hub: Hub, tmp_path: Path) -> None:
    """The process that commits keeps its hubs between batches, also while an operator restores the registry."""
    place, copy = tmp_path / "registry", tmp_path / "copy"
    url = f"sqlite:///{place}"
    commit(hub, 0, registry=url)
    with contextlib.closing(sqlite3.connect(place)) as source, contextlib.closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    for path in (place, tmp_path / "registry-wal", tmp_path / "registry-shm"):
        path.unlink()
    copy.rename(place)
    with pytest.raises(RegistryReplaced):
        commit(hub, 1, registry=url)
    for batch in (1, 1, 2):
        commit(hub, batch, registry=url)
    assert hub.topic("out").end(0) == 3


def test_the_first_batch_records_the_registry_that_has_the_manifests(hub: Hub, tmp_path: Path) -> None:
    """A process with another registry finds no manifest there, and would remove the staged files of a batch."""
    assert hub.parts.belonging is not None
    assert not hub.parts.belonging.is_recorded()
    commit(hub, 0)
    assert hub.parts.belonging.is_recorded()
    with pytest.raises(WrongRegistry):
        commit(hub, 1, registry=f"sqlite:///{tmp_path / 'other.db'}")
    assert hub.topic("out").end(0) == 1


def test_s3_the_first_batch_of_a_driver_sweeps_what_is_left_of_deleted_topics(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topic = hub.create_topic("deleted", partitions=1).topic
    hub.delete_topic("deleted")
    rows = pa.record_batch({"value": pa.array([b"v"])})
    DirectoryStaging(hub.url).stage(topic, QUERY, 0, 0, [rows])
    folder = Path(hub.url, "staging", topic.id)
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (0, 0))

    def damaged(hub: Hub) -> None:
        raise DamagedFrame("meta.json", 0, "it is damaged")

    with monkeypatch.context() as patch:
        patch.setattr(Hub, "topics", damaged)
        commit(hub, 0)
    assert folder.exists()
    assert "it is damaged" in caplog.text
    writer._publishers.close()
    commit(hub, 1)
    assert not folder.exists()
    assert hub.topic("out").end(0) == 2


def test_many_topics_of_a_hub_share_it_and_what_is_put_away_is_closed(tmp_path: Path) -> None:
    def write(publishers: Publishers, hub: Hub, topic: str, batch: int) -> None:
        rows = pa.record_batch({"value": pa.array([b"v"])})
        found = hub.topic(topic)
        name = DirectoryStaging(hub.url).stage(found.topic, QUERY, batch, 0, [rows]).name
        assert name is not None
        parts = [Part(found.id, topic, [name], [])]
        publishers.publish(WriteOptions(hub.url, None, topic), found.topic, QUERY, batch, parts)

    def descriptors() -> int:
        return sum(each.path.startswith(str(tmp_path)) for each in psutil.Process().open_files())

    hubs = [pxrs.open(tmp_path / str(number)) for number in range(3)]
    for hub in hubs:
        for number in range(6):
            hub.create_topic(f"t{number}", partitions=2)
            hub.topic(f"t{number}")
    publishers = Publishers(hubs_max=2)
    counts = []
    for batch in range(4):
        for number in range(6):
            write(publishers, hubs[0], f"t{number}", batch)
        counts.append(descriptors())
    assert len(set(counts)) == 1, "nothing is opened again"
    hubs[0].delete_topic("t0")
    hubs[0].create_topic("t0", partitions=2)
    write(publishers, hubs[0], "t0", 4)
    assert hubs[0].topic("t0").end(0) + hubs[0].topic("t0").end(1) == 1
    counts = []
    for batch in range(5, 9):
        for hub in hubs:
            write(publishers, hub, "t1", batch)
        counts.append(descriptors())
    assert len(set(counts[1:])) == 1, "what is opened again was closed"
    assert len(publishers._hubs) == 2
    assert [sum(hub.topic("t1").end(number) for number in (0, 1)) for hub in hubs] == [8, 4, 4]
    publishers.close()
    for hub in hubs:
        hub.close()
    assert descriptors() == 0
