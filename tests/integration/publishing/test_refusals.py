"""Batches that are refused, what a manifest moves with it, and how rows reach the partitions."""

from __future__ import annotations

import itertools
from collections import Counter

import pyarrow as pa
import pytest

from pxrs.errors import (
    BatchRefused,
    PartitionLost,
)
from pxrs.group.records import Checkpoint, Owner
from pxrs.log.producers import BATCHES_KEPT
from pxrs.publishing.manifest import Publisher
from pxrs.publishing.staging.directory import DirectoryStaging
from pxrs.testing.transfer import Transfer, transfer
from tests.integration.publishing.driver import (
    BATCH_ROWS,
    KEYS,
    QUERY,
    SEED,
    Crash,
    Driver,
    Place,
    Places,
    Steps,
    Superseded,
    batch_of,
    check_a_stale_owner_publishes_nothing,
    crash,
    next_driver,
    state,
    table_of,
)

pytestmark = pytest.mark.sampled(2, of="module")


def test_k2_a_smaller_batch_is_refused(place: Place) -> None:
    driver = Driver(place)
    driver.claim()
    for batch in (0, 1):
        batch_of(driver, batch, (5 * batch, 5 * batch + 5))
    before = state(place)
    with pytest.raises(BatchRefused, match="an old checkpoint location"):
        batch_of(driver, 0, (0, 5))
    assert state(place) == before


def test_k2_the_same_batch_with_other_input_is_refused(place: Place) -> None:
    driver = Driver(place)
    driver.claim()
    batch_of(driver, 0, (0, 5), (0, 5))
    before = state(place)
    for spans in [((0, 6), (0, 5)), ((0, 5), (0, 4)), ((5, 10), (5, 10))]:
        with pytest.raises(BatchRefused, match="repeats batch 0 with other input"):
            batch_of(driver, 0, *spans)
    assert state(place) == before


def test_k2_the_same_batch_of_another_plan_is_refused_where_the_input_is_not_known(place: Place) -> None:
    """Of a source that is no topic, and a checkpoint location that was restored one batch back."""
    driver = Driver(place)

    def publish(batch: int, planned: str) -> None:
        name = driver.staging.stage(driver.topic, QUERY, batch, 0, [table_of([(b"k", b"v")])]).name
        driver.publisher.publish(QUERY, batch, [name], (), planned)

    publish(0, "a")
    publish(1, "b")
    publish(1, "b")
    publish(1, "")
    before = state(place)
    assert place.arrived() == 2
    with pytest.raises(BatchRefused, match="batch 1, but Spark has planned it again: an old checkpoint location"):
        publish(1, "c")
    assert state(place) == before
    publish(2, "d")
    assert place.arrived() == 3


def test_k2_the_same_batch_with_the_same_input_is_done_once(place: Place) -> None:
    driver = Driver(place)
    driver.claim()
    batch_of(driver, 0, (0, 5), (0, 5))
    before = state(place)
    with pytest.raises(Superseded):  # by Spark's own log, which is asked after the commit
        batch_of(driver, 0, (0, 5), (0, 5))
    assert state(place) == before
    assert place.arrived() == 10
    assert not place.staged()


def test_k3_the_checkpoint_moves_exactly_with_the_manifest(place: Place) -> None:
    seen: list[tuple[bool, dict[int, int], int]] = []

    def look(name: str) -> None:
        found = place.manifest()
        seen.append((found is not None and found.batch == 1, place.checkpoints(), place.arrived()))

    driver = Driver(place, look)
    driver.claim()
    batch_of(driver, 0, (0, 5), (0, 3))
    seen.clear()
    batch_of(driver, 1, (5, 8))
    assert {is_there for is_there, _, _ in seen} == {True, False}
    for is_there, checkpoints, arrived in seen:
        assert checkpoints == ({0: 8, 1: 3} if is_there else {0: 5, 1: 3})
        assert arrived == 8 or is_there, "rows were there before the manifest"
    assert seen[-1] == (True, {0: 8, 1: 3}, 11)


def test_k3_a_stale_owner_publishes_nothing(place: Place) -> None:
    check_a_stale_owner_publishes_nothing(place)


def test_k3_one_lost_partition_of_several_refuses_the_batch(place: Place) -> None:
    driver = Driver(place)
    driver.claim()
    key = KEYS.owner(place.source.id, 1)
    entry = place.hub.registry.get(key)
    assert entry is not None
    place.hub.registry.commit({key: entry.version}, {key: Owner("another", 9).dump()})
    with pytest.raises(PartitionLost) as lost:
        batch_of(driver, 0, (0, 5), (0, 5))
    assert lost.value.partitions == (1,)
    assert state(place) == (0, {0: 0, 1: 0}, None)


def test_k3_a_group_that_was_reset_meanwhile_refuses_the_batch(place: Place) -> None:
    driver = Driver(place)
    driver.claim()
    place.hub.registry.commit(put={KEYS.checkpoint(place.source.id, 0): Checkpoint(3, by="reset").dump()})
    with pytest.raises(BatchRefused, match="the group was reset"):
        batch_of(driver, 0, (0, 5), (0, 5))
    assert state(place) == (0, {0: 3, 1: 0}, None)


def test_k3_a_checkpoint_that_moves_at_the_last_moment_refuses_the_batch(place: Place) -> None:
    key = KEYS.checkpoint(place.source.id, 0)
    meddle = Steps(3, lambda: place.hub.registry.commit(put={key: Checkpoint(4).dump()}) and None, "get")
    driver = Driver(place, meddle)
    driver.claim()
    with pytest.raises(PartitionLost):
        batch_of(driver, 0, (0, 5))
    assert state(place) == (0, {0: 4, 1: 0}, None)


def test_k1_the_next_batch_finishes_the_one_before_it(place: Place) -> None:
    """Also where nobody has cleaned up in between."""
    first = Driver(place, Steps(1, crash, "commit"))
    first.claim()
    with pytest.raises(Crash):
        batch_of(first, 0, (0, 5))
    second = Driver(place)
    second.claim()
    second._is_clean = True
    batch_of(second, 1, (5, 10))
    assert place.arrived() == 10
    assert not place.staged()


def test_k1_a_batch_of_many_pieces_may_be_cut_anywhere(places: Places) -> None:
    """Far more pieces in one partition than it remembers of a producer: what was stored is found again all the same."""
    place = places()
    driver = Driver(place, tasks=16)
    driver.claim()
    files = driver.stage(0, driver.plan({}))
    pieces = Counter(number for number, _ in driver.staging.pieces(place.target.topic, QUERY, 0, files))
    assert min(pieces.values()) > BATCHES_KEPT
    steps = Steps(only="append")
    Driver(place, steps, tasks=16).run()
    place.check()
    for at in range(1, steps.count + 1):
        place = places()
        with pytest.raises(Crash):
            Driver(place, Steps(at, crash, "append"), tasks=16).run()
        next_driver(at)(place)
        place.check(f"SEED={SEED}: died after append {at}")


def test_s3_rows_of_a_key_stay_in_order_through_staging_and_publishing(place: Place) -> None:
    rows = [(b"key-%d" % (number % 7), b"%d" % number) for number in range(300)]
    driver = Driver(place)
    tables = [table_of(rows[at : at + 40]) for at in range(0, 300, 40)]
    name = driver.staging.stage(driver.topic, QUERY, 0, 0, tables).name
    driver.publisher.publish(QUERY, 0, [name])
    assert transfer(rows, place.target) == Transfer(300)


def test_s3_rows_without_a_key_reach_all_partitions(place: Place) -> None:
    driver = Driver(place)
    table = pa.record_batch({"value": pa.array([b"%d" % number for number in range(20_000)])})
    name = driver.staging.stage(driver.topic, QUERY, 0, 0, [table]).name
    driver.publisher.publish(QUERY, 0, [name])
    counts = [place.target.end(partition) for partition in range(place.target.partitions)]
    assert sum(counts) == 20_000
    assert min(counts) > 0
    assert max(counts) <= 2 * sum(counts) / len(counts)


def test_s3_rows_that_are_too_large_together_are_published_apart(place: Place) -> None:
    """A manifest that names what the log refuses could never be finished."""
    sizes = [3 << 20, 63 << 20, 3 << 20]
    table = pa.record_batch({"value": pa.array([bytes(size) for size in sizes]), "partition": pa.array([0] * 3)})
    driver = Driver(place)
    name = driver.staging.stage(driver.topic, QUERY, 0, 0, [table]).name
    driver.publisher.publish(QUERY, 0, [name])
    found = itertools.islice(place.target.messages(0), place.target.end(0))
    assert [len(message.value or b"") for message in found] == sizes


def test_s3_what_another_attempt_has_staged_is_never_seen(place: Place) -> None:
    driver = Driver(place)
    driver.claim()
    names = [driver.staging.stage(driver.topic, QUERY, 0, 3, [table_of([(b"k", b"v")])]).name for _ in range(3)]
    assert len(set(names)) == 3
    driver.publisher.publish(QUERY, 0, [names[1]])
    assert place.arrived() == 1
    assert not place.staged()


def test_k1_a_manifest_whose_query_never_comes_back_is_finished_by_the_next_writer(place: Place) -> None:
    with pytest.raises(Crash):
        Driver(place, Steps(1, crash, "commit")).run()
    assert place.arrived() == 0
    log = place.hub.topic("out").log
    Publisher(place.hub.registry, log, DirectoryStaging(place.url)).finish_others()
    assert place.arrived() == 2 * BATCH_ROWS
    assert not place.staged()
