"""S6, K5: what a task does with what it was given, in this process instead of an executor's."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import pxrs
from pxrs import clock
from pxrs.errors import (
    BatchRefused,
    CheckpointOutOfRange,
    CheckpointsDiffer,
    DataLost,
    OffsetOutOfRange,
    TopicDeleted,
    UnknownTopic,
    WrongMachine,
)
from pxrs.group.records import Checkpoint, Keys
from pxrs.hub import Hub
from pxrs.log.batch import Batch
from pxrs.log.directory import published
from pxrs.log.directory.topic import DirectoryTopic

pytest.importorskip("pyspark")

from pyspark.serializers import CloudPickleSerializer
from pyspark.sql.datasource import CaseInsensitiveDict, DataSourceArrowWriter, DataSourceStreamArrowWriter
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, StructType

from pxrs.publishing.planning import Range
from pxrs.server.serving import serving
from pxrs.spark import place, reader
from pxrs.spark.columns import BATCH_ROWS
from pxrs.spark.options import read_options, stream_options
from pxrs.spark.place import HubPlace
from pxrs.spark.reader import BatchReader, StreamReader
from pxrs.spark.source import PxrsSource
from pxrs.spark.tasks import Slice, read_slice
from pxrs.testing.proxy import Proxy


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with pxrs.open(tmp_path / "hub") as hub:
        hub.create_topic("t", partitions=1, retention=timedelta(days=1), segment_bytes=1 << 16)
        yield hub


def slices(hub: Hub, **options: str) -> list[Slice]:
    return BatchReader(read_options({"url": hub.url, "topic": "t", **options})).partitions()


def offsets(parts: list[Slice]) -> list[int]:
    return [offset for part in parts for batch in read_slice(part) for offset in batch.column("offset").to_pylist()]


def send_old(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six thousand messages in several segments: five thousand stored half a day ago, the last now."""
    with hub.producer("t") as out:
        for age_s in (*[43_200] * 5, 0):
            stored = int((time.time() - age_s) * 1e6)
            monkeypatch.setattr(clock, "wall_time_us", lambda stored=stored: stored)
            times = pa.array([stored] * 1000, pa.timestamp("us", tz="UTC"))
            out.send_batch(pa.table({"value": [b"v" * 100] * 1000, "timestamp": times})).result()


def test_s6_retention_overtakes_a_task_that_was_planned(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    send_old(hub, monkeypatch)
    strict, lenient = slices(hub), slices(hub, failOnDataLoss="false")
    first = hub.topic("t").log.retain(int((time.time() + 64_800) * 1e6))[0]  # as it will be in eighteen hours
    assert 0 < first < 6000
    with pytest.raises(DataLost) as caught:
        offsets(strict)
    assert (caught.value.place, caught.value.start, caught.value.end) == ("t/0", 0, first)
    assert offsets(lenient) == list(range(first, 6000))


def test_small_and_large_stored_batches_come_in_the_size_that_spark_likes(hub: Hub) -> None:
    with hub.producer("t", linger_s=0) as out:
        for number in range(300):
            out.send(str(number)).result()
        out.send_batch(pa.table({"value": [b"x"] * 25_000})).result()
    (part,) = slices(hub)
    sizes = [batch.num_rows for batch in read_slice(part)]
    assert sum(sizes) == 25_300
    assert max(sizes) <= BATCH_ROWS
    assert len(sizes) <= 6, "single messages were put together"
    assert offsets([part]) == list(range(25_300))
    cut = replace(part, ranges=(Range(0, 299, 302),))
    assert offsets([cut]) == [299, 300, 301]


def test_large_messages_are_put_together_up_to_a_size(hub: Hub) -> None:
    with hub.producer("t", linger_s=0) as out:
        for _ in range(12):
            out.send(bytes(1 << 20)).result()
    (part,) = slices(hub)
    sizes = [batch.nbytes for batch in read_slice(part)]
    assert len(sizes) > 1
    assert max(sizes) < 8 << 20
    assert offsets([part]) == list(range(12))


def test_only_the_columns_that_were_asked_for_are_brought(hub: Hub) -> None:
    with hub.producer("t", linger_s=0) as out:
        for number in range(50):  # each stored by itself, to be put together
            out.send(b"v%d" % number, key=b"k", headers=[("h", b"1")]).result()
    (part,) = slices(hub)
    (everything,) = read_slice(part)
    for columns in ("value", "offset", "partition,offset", "timestamp,value,key", "headers,offset"):
        (part,) = slices(hub, columns=columns, includeHeaders="true")
        (batch,) = read_slice(part)
        assert batch.schema.names == columns.split(",")
        for name in columns.replace("headers,", "").split(","):
            assert batch.column(name).equals(everything.column(name))
    assert batch.column("headers").to_pylist() == [[{"key": "h", "value": b"1"}]] * 50


def test_l1_a_gap_that_a_power_loss_left_has_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        monkeypatch.setattr(published, "boot_id", lambda number=number: f"{number:032x}")
        with pxrs.open(tmp_path / "hub") as hub:
            if not number:
                hub.create_topic("t", partitions=1, durability="os")
            with hub.producer("t") as out:
                out.send_batch(pa.table({"value": [b"x"] * 10})).result()
            parts = slices(hub, minPartitions="3")
            end = hub.topic("t").end(0)
    assert end > 1000
    assert offsets(parts) == [*range(10), *range(end - 10, end)]


def test_g7_a_task_beyond_the_end_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that was restored from an older copy, and a batch of before."""
    send_old(hub, monkeypatch)
    (part,) = slices(hub)
    with pytest.raises(OffsetOutOfRange):
        offsets([replace(part, ranges=(Range(0, 5990, 6010),))])


def test_g7_a_batch_from_a_checkpoint_beyond_the_end_is_an_error(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    send_old(hub, monkeypatch)
    hub.registry.commit(put={Keys("g").checkpoint(hub.topic("t").id, 0): Checkpoint(6001).dump()})
    with pytest.raises(CheckpointOutOfRange, match="6001"):
        slices(hub, startingOffsets="committed", group="g")


def test_k5_a_task_on_another_machine_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    send_old(hub, monkeypatch)
    (part,) = slices(hub)
    with pytest.raises(WrongMachine, match="not the driver's machine"):
        list(read_slice(replace(part, place=replace(part.place, machine="elsewhere"))))


def test_g7_a_topic_that_was_made_again_is_not_read_for_the_old_one(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    send_old(hub, monkeypatch)
    parts = slices(hub)
    assert len(offsets(parts)) == 6000
    hub.delete_topic("t")
    hub.create_topic("t", partitions=1)
    for _ in range(2):  # with the handle that the first task has left, and with another one
        with pytest.raises(TopicDeleted, match=r"'t' was deleted and created again.* Start the read again") as caught:
            offsets(parts)
    hub.delete_topic("t")
    with pytest.raises(UnknownTopic, match="no topic 't'"):
        offsets(parts)
    assert isinstance(caught.value, UnknownTopic)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_g7_a_stream_under_which_a_topic_was_made_again_says_so_and_what_to_do(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_stop_on_sigterm", lambda: None)  # this is not a process of Spark's
    send_old(hub, monkeypatch)
    options = stream_options({"url": hub.url, "topic": "t", "group": "g", "leaseTtl": "5"})

    def made(stream: StreamReader) -> dict[str, Any]:
        return stream.latestOffset(stream.initialOffset(), ReadAllAvailable())

    readers = [StreamReader(options)]
    end = made(readers[0])
    with pxrs.open(hub.url) as other:
        other.delete_topic("t")
        with pytest.raises(TopicDeleted, match="'t' was deleted; create it"):
            readers[0].latestOffset(end, ReadAllAvailable())
        other.create_topic("t", partitions=1)
    for ask in (
        lambda stream: stream.latestOffset(end, ReadAllAvailable()),
        lambda stream: stream.reportLatestOffset(),
        lambda stream: stream.prepareForTriggerAvailableNow(),
    ):
        with pytest.raises(TopicDeleted, match=r"'t' was deleted and created again.* new checkpoint location"):
            ask(readers[0])
    readers[0].stop()
    readers.append(StreamReader(options))  # the query is started again with its checkpoint location
    with pytest.raises(CheckpointsDiffer, match=r"the topic t was deleted and created again.* new checkpoint location"):
        readers[1].latestOffset(end, ReadAllAvailable())
    with pytest.raises(CheckpointsDiffer, match="the topic t was deleted and created again"):
        readers[1].partitions(readers[1].initialOffset(), end)
    readers[1].stop()
    readers.append(StreamReader(options))
    (begun,) = made(readers[2])["topics"].values()
    assert begun == {"name": "t", "partitions": {}}, "with a new location the group begins with the new topic"
    readers[2].stop()


@pytest.mark.parametrize(("first", "end", "most"), [(0, 10, 100), (150, 350, 300), (0, 6000, 6000), (5990, 6000, 100)])
def test_a_task_reads_hardly_more_of_the_log_than_its_range(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, first: int, end: int, most: int
) -> None:
    """A batch of a stream may be a few rows of a long partition. The rows after them are neither read nor checked."""
    with hub.producer("t", batch_rows=100) as out:
        out.send_batch(pa.table({"value": [bytes(1000)] * 6000}))
    (part,) = slices(hub)
    read, seen = DirectoryTopic.read, []

    def counted(topic: DirectoryTopic, *given: int) -> list[Batch]:
        found = read(topic, *given)
        seen.extend(batch.records.num_rows for batch in found)
        return found

    monkeypatch.setattr(DirectoryTopic, "read", counted)
    assert offsets([replace(part, ranges=(Range(0, first, end),))]) == list(range(first, end))
    assert sum(seen) <= most


# A hub behind a server: tasks fetch their ranges from it.


@pytest.fixture
def server(hub: Hub) -> Iterator[str]:
    with serving(hub) as url:
        yield url
    place.let_go()


def fetched(url: str, **options: str) -> list[Slice]:
    return BatchReader(read_options({"url": url, "topic": "t", **options})).partitions()


def test_k5_tasks_on_any_machine_fetch_exactly_what_local_tasks_map(
    hub: Hub, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_old(hub, monkeypatch)
    with hub.producer("t", linger_s=0) as out:
        for number in range(50):
            out.send(b"v%d" % number, key=b"k", headers=[("h", b"1")]).result()
    for options in ({}, {"minPartitions": "7"}, {"columns": "headers,offset", "includeHeaders": "true"}):
        local, remote = slices(hub, **options), fetched(server, **options)
        assert [part.ranges for part in local] == [part.ranges for part in remote]
        assert all(part.place.machine is None for part in remote)
        remote = pickle.loads(pickle.dumps(remote))
        tables = [
            pa.Table.from_batches(batch for part in parts for batch in read_slice(part)) for parts in (local, remote)
        ]
        assert tables[0].num_rows == 6050
        assert tables[1].equals(tables[0])
    cut = replace(remote[0], ranges=(Range(0, 5990, 6010), Range(0, 17, 18)))
    assert offsets([cut]) == [*range(5990, 6010), 17]


def test_s6_g7_a_range_that_a_server_does_not_have_is_an_error_and_never_other_rows(
    hub: Hub, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_old(hub, monkeypatch)
    strict, lenient = fetched(server), fetched(server, failOnDataLoss="false")
    with pytest.raises(OffsetOutOfRange):
        offsets([replace(strict[0], ranges=(Range(0, 5990, 6010),))])
    first = hub.topic("t").log.retain(int((time.time() + 64_800) * 1e6))[0]
    with pytest.raises(DataLost) as caught:
        offsets(strict)
    assert (caught.value.place, caught.value.start, caught.value.end) == ("t/0", 0, first)
    assert offsets(lenient) == list(range(first, 6000))
    hub.delete_topic("t")
    with pytest.raises(TopicDeleted, match="'t' was deleted; create it"):
        offsets(strict)
    hub.create_topic("t", partitions=1)
    with hub.producer("t") as out:
        out.send_batch(pa.table({"value": [b"other"] * 6000})).result()
    with pytest.raises(TopicDeleted, match=r"'t' was deleted and created again.* Start the read again"):
        offsets(strict)


def test_a_range_goes_on_where_it_was_after_the_connection_broke(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub.producer("t", batch_rows=100) as out:
        out.send_batch(pa.table({"value": [bytes(20_000)] * 3000})).result()  # sixty megabytes: more than is read ahead
    with serving(hub) as url, Proxy("127.0.0.1", int(url.rpartition(":")[2])) as proxy:
        (part,) = fetched(f"pxrs://{proxy.host}:{proxy.port}")
        read = read_slice(part)
        found = next(read).column("offset").to_pylist()
        proxy.reset_connections()
        found += [offset for batch in read for offset in batch.column("offset").to_pylist()]
        assert found == list(range(3000))
        place.let_go()


# What tasks are given of the options. Spark pickles it in the driver's processes.

SECRET = "a-password"
VALUE = StructType().add("value", BinaryType())


def options_with_password(hub: Hub, **more: str) -> dict[str, str]:
    return {"url": hub.url, "topic": "t", "registry": f"postgresql://user:{SECRET}@127.0.0.1:1/db", **more}


def pickled(*given: Any) -> bytes:
    """As Spark pickles a function that tasks run, with what it refers to."""
    return bytes(CloudPickleSerializer().dumps((lambda: given, VALUE)))


def test_no_password_goes_to_tasks_that_read(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    send_old(hub, monkeypatch)
    given = options_with_password(hub)
    readers = {"reader": given, "streamReader": {**given, "group": "g"}}
    for make, options in readers.items():
        source = pickle.loads(pickle.dumps(PxrsSource(CaseInsensitiveDict(options))))
        assert source.options["registry"] == given["registry"], "the driver's own processes need it"
        sent = pickled(source, getattr(source, make)(source.schema()))
        assert SECRET.encode() not in sent
        assert b"postgresql" not in sent
        function, _ = CloudPickleSerializer().loads(sent)
        source, task = function()
        assert source.name() == "pxrs"
        part = Slice(HubPlace.of(hub.url), "t", hub.topic("t").id, (Range(0, 0, 3),), ("value",), True)
        assert sum(batch.num_rows for batch in task.read(part)) == 3
    parts = BatchReader(read_options(given)).partitions()
    assert SECRET.encode() not in pickle.dumps(parts)
    assert len(offsets(parts)) == 6000


def test_no_password_goes_to_tasks_that_write_and_the_drivers_commit_has_it(hub: Hub) -> None:
    source = PxrsSource(CaseInsensitiveDict(options_with_password(hub)))
    update = PxrsSource(CaseInsensitiveDict(options_with_password(hub, txnVersion="3")))
    for writer in (source.writer(VALUE, False), update.writer(VALUE, False)):
        # PySpark's order: the function that tasks run, then the writer itself, which only the driver gets.
        sent = pickled(writer)
        assert SECRET.encode() not in sent
        ((task,),) = [CloudPickleSerializer().loads(sent)[0]()]
        assert isinstance(task, DataSourceArrowWriter)
        with pytest.raises(BatchRefused, match="a task's writer was asked to commit"):
            task.commit([])
        kept = pickle.loads(pickle.dumps(writer))
        assert type(kept) is type(writer)
        assert SECRET in kept.options.registry
    stream = source.streamWriter(VALUE, False)
    for _ in range(2):
        sent = pickled(stream)
        assert SECRET.encode() not in sent
        ((task,),) = [CloudPickleSerializer().loads(sent)[0]()]
        assert isinstance(task, DataSourceStreamArrowWriter)
