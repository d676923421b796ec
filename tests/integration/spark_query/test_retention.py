"""K3, S6: batches that retention took, and published ones that are not read again."""

from __future__ import annotations

import os
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
from pxrs.errors import DataLost
from pxrs.hub import Hub
from pxrs.publishing.planning import Span
from pxrs.publishing.selection import Topics
from pxrs.spark import reader
from pxrs.spark.following import join_query
from pxrs.spark.options import ReadFrom
from pxrs.spark.reader import StreamReader
from pxrs.testing.waiting import eventually
from tests.integration.spark_query.queries import OPTIONS, checkpoints, publish, read, run_batch


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


def test_a_query_keeps_its_hub_though_no_other_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_stop_on_sigterm", lambda: None)  # of a process of the query's own
    with pxrs.open(tmp_path / "data", upkeep=False) as hub:
        hub.create_topic("orders", partitions=1, retention=3600)
        stream = StreamReader(replace(OPTIONS, where=ReadFrom(hub.url, None, Topics(("orders",)))))
        stream.latestOffset(stream.initialOffset(), stream.getDefaultReadLimit())
        eventually(lambda: hub.upkeep().janitor.endswith(f":{os.getpid()}"))
        stream.stop()
        assert hub.upkeep().janitor == ""
