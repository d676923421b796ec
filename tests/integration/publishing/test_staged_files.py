"""Staged files: which are swept, and tasks that stage while others publish, sweep or delete."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pxrs import disk
from pxrs.errors import (
    BatchRefused,
)
from pxrs.publishing.feed import Feed
from pxrs.publishing.forgetting import forget_deleted_topics, forget_topic
from pxrs.publishing.manifest import Publisher
from pxrs.publishing.planning import Span
from pxrs.publishing.records import Manifest
from pxrs.publishing.staging.directory import DirectoryStaging
from tests.integration.publishing.driver import (
    BATCH_ROWS,
    QUERY,
    Crash,
    Driver,
    Place,
    Steps,
    Unheard,
    batch_of,
    crash,
    fed_batch,
    make_old,
    table_of,
    unwilling,
)


def test_k1_a_manifest_names_nothing_that_is_gone(place: Place) -> None:
    """Nobody could ever finish it, and every writer to the topic tries to."""
    driver = Driver(place)
    driver.claim()
    name = driver.staging.stage(driver.topic, QUERY, 0, 0, [table_of([(b"k", b"v")])]).name
    driver.staging.clear(driver.topic.id, QUERY, 0)
    with pytest.raises(BatchRefused, match="gone"):
        driver.publisher.publish(QUERY, 0, [name])
    assert place.manifest() is None
    driver.publisher.finish_others()


def test_k1_a_manifest_names_nothing_whose_folders_are_not_synced(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a task has made which died before it could sync them; others find them there."""
    folder = Path(place.url, "staging", place.target.id, QUERY, "0")
    folder.mkdir(parents=True)
    synced: list[str] = []
    monkeypatch.setattr(disk, "sync_folder", lambda path: synced.append(str(path)))
    above = {str(each) for each in (folder, *folder.parents[:4])}
    seen: list[bool] = []
    driver = Driver(place, lambda name: seen.append(above <= set(synced)) if name == "registry.commit" else None)
    driver.claim()
    batch_of(driver, 0, (0, 5))
    assert seen[0]


def test_s3_what_is_staged_for_nothing_is_swept_when_nobody_adds_to_it_for_a_day(place: Place) -> None:
    staging = DirectoryStaging(place.url)
    for query in ("old", "at work", "writing", "needed"):
        for batch in (0, 1):
            staging.stage(place.target.topic, query, batch, 0, [table_of([(b"k", b"v")])])
        folder = Path(place.url, "staging", place.target.id, query)
        make_old(folder)
        if query == "at work":
            staging.stage(place.target.topic, query, 1, 1, [table_of([(b"k", b"v")])])
        if query == "writing":
            (file,) = (folder / "1").iterdir()
            os.utime(file)
    staging.sweep(place.target.id, {"needed": 1})
    left = {(path.parent.parent.name, path.parent.name) for path in place.staged()}
    assert left == {("at work", "1"), ("writing", "1"), ("needed", "1")}
    assert not Path(place.url, "staging", place.target.id, "old").exists()


def test_s3_what_a_query_with_a_manifest_leaves_is_swept_too(place: Place) -> None:
    driver = Driver(place)
    driver.claim()
    batch_of(driver, 0, (0, 5))
    driver.staging.stage(driver.topic, QUERY, 0, 0, [table_of([(b"k", b"late")])])
    driver.stage(1, driver.plan({}))  # it dies here, and its checkpoint location is lost
    crashed = Driver(place, Steps(1, crash, "commit"))
    crashed.claim()
    with pytest.raises(Crash):
        fed_batch(crashed, "crashed", 0, (5, 8))
    feeds = Path(place.url, "staging", "feeds")
    make_old(Path(place.url, "staging", place.target.id))
    make_old(feeds / QUERY, age_s=31 * 86_400.0)
    unwilling(place, "crashed").clean_up()
    assert {path.relative_to(Path(place.url, "staging")).parts[1] for path in place.staged()} == {"crashed"}
    assert [path.name for path in feeds.iterdir()] == ["crashed"]


def test_s3_the_manifest_of_a_dead_job_is_forgotten_when_its_commit_can_come_no_more(place: Place) -> None:
    driver = Driver(place, Steps(1, crash, "commit"))
    name = driver.staging.stage(driver.topic, "job-1", 0, 0, [table_of([(b"k", b"v")])]).name
    with pytest.raises(Crash):
        driver.publisher.publish("job-1", 0, [name])
    publisher = Driver(place).publisher
    key = f"spark/{place.target.id}/job-1"
    for age_s, is_there in [(0, True), (3600, True), (2 * 86_400, False)]:
        if age_s:
            entry = place.hub.registry.get(key)
            assert entry is not None
            done = Manifest.load(entry)
            assert done.is_published
            place.hub.registry.commit({key: entry.version}, {key: replace(done, at=time.time() - age_s).dump()})
        publisher.finish_others()
        assert (place.hub.registry.get(key) is not None) == is_there
    assert place.arrived() == 1


def test_s3_of_a_deleted_topic_nothing_is_left(place: Place) -> None:
    driver = Driver(place)
    driver.claim()
    batch_of(driver, 0, (0, 5))
    for topic in (place.target.topic, place.source.topic):
        driver.staging.stage(topic, "another", 0, 0, [table_of([(b"k", b"v")])])
    forget_topic(place.hub.registry, DirectoryStaging(place.url), place.target.id)
    assert place.manifest() is None
    assert {path.parents[2].name for path in place.staged()} == {place.source.id}


def test_s3_what_comes_after_a_topic_was_deleted_goes_a_day_later(place: Place) -> None:
    """Late tasks have staged for it, or a late driver has written its manifest."""
    registry, staging = place.hub.registry, DirectoryStaging(place.url)

    def late(age_s: float) -> str:
        """The id of a topic that was deleted while a batch was on its way that has read, and made nothing."""
        topic = place.hub.create_topic("deleted", partitions=1)
        publisher = Publisher(registry, topic.log, staging)

        def write(*arguments: Any) -> int | None:
            place.hub.delete_topic("deleted")
            return written(*arguments)

        written, publisher._write = publisher._write, write  # type: ignore[method-assign]
        feed = Feed("g", place.source.id, "member", "another", {0: Span(1, 0, 5)}, {0: 1}, False)
        publisher.publish(QUERY, 0, [], [feed])
        staging.stage(topic.topic, "task", 0, 0, [table_of([(b"k", b"v")])])
        make_old(Path(place.url, "staging", topic.id), age_s=age_s)
        (entry,) = registry.scan(f"spark/{topic.id}/")
        registry.commit(put={entry.key: replace(Manifest.load(entry), at=time.time() - age_s).dump()})
        return topic.id

    driver = Driver(place)
    driver.claim()
    batch_of(driver, 0, (0, 5))
    driver.stage(1, driver.plan({}))
    hour, day = 3600.0, 86_400.0
    young, newly_written, newly_staged, old, damaged = (late(age_s) for age_s in (hour, *[2 * day] * 4))
    key = f"spark/{newly_written}/{QUERY}"
    registry.commit(put={key: Manifest(0, [], at=time.time()).dump(), f"spark/{damaged}/{QUERY}": b"damaged"})
    os.utime(Path(place.url, "staging", newly_staged, "task", "0"))
    registry.commit(put={"spark/of-another-log/query": Manifest(0, []).dump()})
    before = set(place.staged())
    Path(place.url, "staging", "of somebody else; who knows").mkdir()
    for folder in ("feeds", "of somebody else; who knows", place.target.id):
        make_old(Path(place.url, "staging", folder), age_s=40 * day)
    forget_deleted_topics(registry, staging, [topic.id for topic in place.hub.topics()])
    gone = {path.relative_to(Path(place.url, "staging")).parts[0] for path in before - set(place.staged())}
    assert gone == {old, damaged}
    left = {entry.key.split("/")[1] for entry in registry.scan("spark/")}
    assert left == {"registry", "of-another-log", place.target.id, young, newly_written, newly_staged}
    assert not Path(place.url, "staging", old).exists()
    forget_deleted_topics(registry, DirectoryStaging(place.url + "/nowhere"), [])


def test_k1_a_task_may_stage_while_another_writer_finishes_its_batch(place: Place) -> None:
    """A driver died behind its manifest. Its replay is at work when somebody else starts to write to the topic."""
    with pytest.raises(Crash):
        Driver(place, Steps(1, crash, "commit")).run()
    replay, other = Driver(place), Driver(place)
    replay.claim()
    batch, spans, _ = place.logs.last()

    def rows() -> Iterator[pa.RecordBatch]:
        yield table_of(place.sent[:5])
        other.clean_up()
        yield table_of(place.sent[5:10])

    name = replay.staging.stage(replay.topic, QUERY, batch, 0, rows()).name
    assert name is not None, "else nobody would miss it"
    assert place.arrived() == 2 * BATCH_ROWS
    replay.publisher.publish(QUERY, batch, [name])
    assert place.arrived() == 2 * BATCH_ROWS
    with pytest.raises(BatchRefused, match="are gone"):  # nobody has published this one
        replay.publisher.publish(QUERY, batch + 1, [name])
    replay.work(batch, spans)
    replay.run()
    place.check()


def test_k1_a_folder_that_is_removed_before_a_task_writes_into_it_is_made_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(place)
    opened = pa.OSFile
    chances = itertools.count()

    def open_late(path: str, mode: str) -> Any:
        if next(chances) < 2:
            shutil.rmtree(Path(path).parent)
        return opened(path, mode)

    monkeypatch.setattr(pa, "OSFile", open_late)
    name = driver.staging.stage(driver.topic, QUERY, 0, 0, [table_of([(b"k", b"v")])]).name
    driver.publisher.publish(QUERY, 0, [name])
    assert place.arrived() == 1
    chances = itertools.count()
    driver.claim()
    driver.stage(1, driver.plan({}))
    assert len(driver.staging.feeds(QUERY, 1, driver.incarnation)) == 1


def test_s3_a_job_that_is_published_does_not_fail_because_its_manifest_stays(place: Place) -> None:
    driver = Driver(place)
    name = driver.staging.stage(driver.topic, "job", 0, 0, [table_of([(b"k", b"v")])]).name
    log = place.hub.topic("out").log
    publisher = Publisher(Unheard(place.hub.registry, [3], None), log, driver.staging)
    publisher.publish("job", 0, [name])
    publisher.forget("job")
    assert place.arrived() == 1
    publisher.finish_others()
    publisher.forget("job")
    assert place.hub.registry.scan(f"spark/{place.target.id}/") == []
    assert place.arrived() == 1
