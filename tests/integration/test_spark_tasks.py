"""S6, K5: what a task does with what it was given, in this process instead of an executor's."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest

import pxrs
from pxrs import clock
from pxrs.errors import CheckpointOutOfRange, DataLost, OffsetOutOfRange, UnknownTopic, WrongMachine
from pxrs.group.records import Checkpoint, Keys
from pxrs.hub import Hub
from pxrs.log import published

pytest.importorskip("pyspark")

from pxrs.spark.options import read_options
from pxrs.spark.planning import Range
from pxrs.spark.reader import BATCH_ROWS, BatchReader, Slice, read_slice


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with pxrs.open(tmp_path / "hub") as hub:
        hub.create_topic("t", partitions=1, retention=timedelta(days=1), segment_bytes=1 << 16)
        yield hub


def slices(hub: Hub, **options: str) -> list[Slice]:
    return BatchReader(read_options({"url": hub.url, "topic": "t", **options})).partitions()


def offsets(parts: list[Slice]) -> list[int]:
    return [offset for part in parts for batch in read_slice(part) for offset in batch.column("offset").to_pylist()]


def send_old(hub: Hub) -> None:
    """Six thousand messages in several segments: five thousand stored half a day ago, the last now."""
    with hub.producer("t") as out, pytest.MonkeyPatch.context() as patch:
        for age_s in (*[43_200] * 5, 0):
            stored = int((time.time() - age_s) * 1e6)
            patch.setattr(clock, "wall_time_us", lambda stored=stored: stored)
            times = pa.array([stored] * 1000, pa.timestamp("us", tz="UTC"))
            out.send_batch(pa.table({"value": [b"v" * 100] * 1000, "timestamp": times})).result()


def test_s6_retention_overtakes_a_task_that_was_planned(hub: Hub) -> None:
    send_old(hub)
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


def test_g7_a_task_beyond_the_end_says_so(hub: Hub) -> None:
    """A log that was restored from an older copy, and a batch of before."""
    send_old(hub)
    (part,) = slices(hub)
    with pytest.raises(OffsetOutOfRange):
        offsets([replace(part, ranges=(Range(0, 5990, 6010),))])


def test_g7_a_batch_from_a_checkpoint_beyond_the_end_is_an_error(hub: Hub) -> None:
    send_old(hub)
    hub.registry.commit(put={Keys("g").checkpoint(hub.topic("t").id, 0): Checkpoint(6001).dump()})
    with pytest.raises(CheckpointOutOfRange, match="6001"):
        slices(hub, startingOffsets="committed", group="g")


def test_k5_a_task_on_another_machine_says_so(hub: Hub) -> None:
    send_old(hub)
    (part,) = slices(hub)
    with pytest.raises(WrongMachine, match="another machine"):
        list(read_slice(replace(part, machine="elsewhere")))


def test_g7_a_topic_that_was_made_again_is_not_read_for_the_old_one(hub: Hub) -> None:
    send_old(hub)
    parts = slices(hub)
    assert len(offsets(parts)) == 6000
    hub.delete_topic("t")
    hub.create_topic("t", partitions=1)
    with pytest.raises(UnknownTopic):
        offsets(parts)


def test_no_password_goes_to_the_tasks(hub: Hub) -> None:
    send_old(hub)
    registry = f"sqlite:///{hub.url}/r.db?password_file=secret-place"
    options = read_options({"url": hub.url, "topic": "t", "registry": registry})
    assert b"secret-place" not in pickle.dumps(BatchReader(replace(options)).partitions())
