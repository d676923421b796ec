"""Batches whose rows name their topics: one commit over all topics, and each row is published once (decision 0038).

Each driver sends the rows to other topics than the one before, as a query with a non-deterministic UDF does when Spark
repeats a batch."""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pxrs.errors import BatchRefused, DamagedFrame, UnknownTopic
from pxrs.log.contract import TopicLog
from pxrs.model import Topic
from pxrs.publishing.feed import Feed
from pxrs.publishing.forgetting import forget_topic, needed_batches
from pxrs.publishing.manifest import Publisher
from pxrs.publishing.planning import Span
from pxrs.publishing.records import Manifest, Part, published_spans, routed_prefix
from pxrs.publishing.staging.directory import DirectoryStaging
from pxrs.publishing.staging.files import routed_writer
from pxrs.publishing.staging.routing import by_column
from pxrs.testing.transfer import Transfer, rows_of
from tests.integration.publishing.driver import (
    QUERY,
    SEED,
    SOAK,
    STEPS_MAX,
    Crash,
    Driver,
    Held,
    Mutation,
    NotExact,
    Place,
    Places,
    Steps,
    WatchedLog,
    batch_of,
    crash,
    make_old,
    next_driver,
    settle,
    step_count,
    table_of,
    try_every_crash,
    try_schedules,
)

pytestmark = pytest.mark.sampled(2, of="module")

NAMES = ("out", "more", "third")
WRITER = routed_writer(QUERY)
ALL_TOPICS = 0
"""A seed of drivers with three tasks, whose first batch has rows for every topic."""


class RoutedPlace(Place):
    """A place whose query writes to three topics."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # A try that died may have staged rows for topics that its successor has none for. They are swept a day later.
        self.has_gone_on = False
        for name in NAMES[1:]:
            self.hub.create_topic(name, partitions=2)

    def driver(self, *arguments: Any, **named: Any) -> RoutedDriver:
        return RoutedDriver(self, *arguments, **named)

    def find(self, topic_id: str, name: str) -> TopicLog | None:
        names = [name] if name else [topic.name for topic in self.hub.topics()]
        for each in names:
            try:
                if (found := self.hub.topic(each)).id == topic_id:
                    return found.log
            except UnknownTopic:
                continue
        return None

    def manifest(self) -> Manifest | None:
        entry = self.hub.registry.get(routed_prefix("") + QUERY)
        return None if entry is None else Manifest.load(entry)

    def arrived(self) -> int:
        return sum(self.counts().values())

    def counts(self) -> dict[str, int]:
        topics = {topic.name for topic in self.hub.topics()} & set(NAMES)
        return {name: sum(self.hub.topic(name).end(number) for number in (0, 1)) for name in topics}

    def account(self) -> Transfer:
        found = Counter(row for name in self.counts() for row in rows_of(self.hub.topic(name)))
        sent = Counter(self.sent)
        return Transfer(len(self.sent), (sent - found).total(), (found - sent).total())


class RoutedDriver(Driver):
    place: RoutedPlace

    def make_publisher(self) -> Publisher:
        def find(topic_id: str, name: str) -> Any:
            found = self.place.find(topic_id, name)
            return None if found is None else WatchedLog(found, self.hook, "log")

        return self.place.mutation.publisher(self.registry, None, self.staging, find)

    def clean_up(self) -> None:
        for name in NAMES:
            self.publisher.finish_others(self.hub.topic(name).id)
        self._is_clean = True

    def _attempt(self, batch: int, task: int, rows: Sequence[tuple[bytes, bytes]]) -> Any:
        names = self.random.sample(NAMES, self.random.randrange(1, 4))
        table = table_of(rows).append_column("topic", pa.array([self.random.choice(names) for _ in rows]))
        return self.staging.stage_routed(by_column(self._topic), WRITER, batch, task, [table])

    def _topic(self, name: str) -> Topic:
        return self.hub.topic(name).topic

    def publish(self, batch: int, files: list[Any], feeds: Sequence[Feed]) -> None:
        self.publisher.publish_routed(QUERY, batch, parts_of_tasks(files), feeds)


def parts_of_tasks(staged: list[Any]) -> list[Part]:
    parts: dict[str, Part] = {}
    for task in staged:
        for topic, found in task:
            parts.setdefault(topic.name, Part(topic.id, topic.name, [], [])).files.append(found.name)
    return [parts[name] for name in sorted(parts)]


@pytest.fixture
def kind() -> type[Place]:
    return RoutedPlace


@pytest.fixture
def place(places: Places) -> RoutedPlace:
    found = places()
    assert isinstance(found, RoutedPlace)
    return found


def test_k1_a_driver_may_die_at_every_step_and_its_successor_routes_the_rows_anew(
    places: Places, is_one_hub: bool
) -> None:
    assert try_every_crash(places, None, is_one_hub, steps_max=STEPS_MAX) > 20


def test_k1_two_drivers_at_once_that_route_the_rows_differently(places: Places) -> None:
    for only in ("registry", "log"):
        try_schedules(places, False, only)


def test_k1_a_zombie_goes_on_when_its_successor_is_done(places: Places) -> None:
    count = step_count(places(None, False))
    steps = range(1, count) if SOAK else sorted(random.Random(SEED).sample(range(1, count), 8))
    for at in steps:
        place = places(None, False)
        zombie = Held(place, at)
        next_driver(at)(place)
        zombie.go_on()
        settle(place)
        place.check(f"SEED={SEED}: held at step {at}")
        place.close()


def leave_behind(place: RoutedPlace, at: int = 1, only: str = "commit") -> Manifest:
    """A driver commits its first batch, and dies after this step. Returns its manifest."""
    driver = place.driver(Steps(at, crash, only), tasks=3, seed=ALL_TOPICS)
    driver.claim()
    with pytest.raises(Crash):
        batch_of(driver, 0, (0, 10), (0, 10))
    found = place.manifest()
    assert found is not None
    assert not found.is_published
    assert {part.name for part in found.parts} == set(NAMES)
    return found


@pytest.mark.parametrize("step", [(1, "commit"), (1, "append"), (3, "append")])
def test_k1_a_batch_whose_driver_died_between_two_topics_is_finished_by_a_query_that_writes_to_one_of_them(
    place: RoutedPlace, step: tuple[int, str]
) -> None:
    found = leave_behind(place, *step)
    files = {name for part in found.parts for name in part.files}
    assert files <= {path.name for path in place.staged()}
    assert place.arrived() < 20
    part = found.parts[-1]
    topic = place.find(part.topic, part.name)
    other = Publisher(place.hub.registry, topic, DirectoryStaging(place.url), place.find)
    other.finish_others()
    assert place.arrived() == 20
    found = place.manifest() or found
    assert found.is_published
    assert [part.files for part in found.parts] == [[] for _ in found.parts]
    assert not files & {path.name for path in place.staged()}


def test_k1_a_query_at_work_finishes_what_a_routed_one_has_left(place: RoutedPlace) -> None:
    """The routed query has read the same partitions earlier, so its rows must be stored before those of the other
    one."""
    staging = DirectoryStaging(place.url)
    other = Publisher(place.hub.registry, place.hub.topic("out").log, staging, place.find)
    found = leave_behind(place)
    assert any(part.name == "out" for part in found.parts)
    for batch in (0, 1):  # at batch 0 the manifest is left to its own driver, at batch 1 it is finished
        name = staging.stage(place.target.topic, "other", batch, 0, [table_of([(b"k", b"v")])]).name
        other.publish("other", batch, [name or ""])
    assert place.arrived() == 22


def test_k2_a_smaller_batch_is_refused_whatever_topics_it_names(place: RoutedPlace) -> None:
    driver = place.driver()
    driver.claim()
    for batch in (0, 1):
        batch_of(driver, batch, (5 * batch, 5 * batch + 5))
    before = place.arrived()
    (staged,) = [driver.staging.stage(place.hub.topic("third").topic, WRITER, 0, 0, [table_of([(b"k", b"v")])])]
    with pytest.raises(BatchRefused, match="an old checkpoint location"):
        driver.publisher.publish_routed(QUERY, 0, [Part(place.hub.topic("third").id, "third", [staged.name], [])])
    assert place.arrived() == before


def test_k3_the_manifest_names_what_was_read_and_moves_the_checkpoints(place: RoutedPlace) -> None:
    driver = place.driver()
    driver.claim()
    batch_of(driver, 0, (0, 5), (0, 3))
    assert place.checkpoints() == {0: 5, 1: 3}
    topic = place.source.id
    spans = {(topic, 0): Span(driver.epochs[0], 0, 5), (topic, 1): Span(driver.epochs[1], 0, 4)}
    assert published_spans(place.hub.registry, "g", spans) == {(topic, 0): None}


@pytest.mark.parametrize("is_forgotten", [True, False], ids=["whole", "cut short"])
def test_a_topic_that_is_deleted_after_the_commit_loses_its_rows_and_no_others(
    place: RoutedPlace, is_forgotten: bool
) -> None:
    """is_forgotten: whether the deletion has removed what was staged for the topic, too."""
    gone, *others = leave_behind(place).parts
    (place.hub.delete_topic if is_forgotten else place.hub.log.delete_topic)(gone.name)
    place.hub.create_topic(gone.name, partitions=2)  # a new topic with the same name and another id
    place.driver().clean_up()
    found = place.manifest()
    assert found is not None
    assert found.is_published
    assert {name for name, count in place.counts().items() if count} == {part.name for part in others}
    forget_topic(place.hub.registry, DirectoryStaging(place.url), gone.topic)
    found = place.manifest()
    assert found is not None
    assert [part.topic for part in found.parts] == [part.topic for part in others]


def test_a_topic_that_is_deleted_while_it_is_appended_to_stops_no_other_one(place: RoutedPlace) -> None:
    def delete() -> None:
        found = place.manifest()
        assert found is not None
        place.hub.delete_topic(found.parts[0].name)

    driver = place.driver(Steps(1, delete, "append"), tasks=3, seed=ALL_TOPICS)
    driver.claim()
    batch_of(driver, 0, (0, 20), (0, 20))
    found = place.manifest()
    assert found is not None
    assert found.is_published
    assert len(place.counts()) == 2
    assert all(place.counts().values())


def test_a_topic_of_the_last_batch_that_is_deleted_while_the_next_one_is_committed_does_no_harm(
    place: RoutedPlace,
) -> None:
    driver = place.driver(tasks=3, seed=ALL_TOPICS)
    driver.claim()
    batch_of(driver, 0, (0, 5), (0, 5))
    last = place.manifest()
    assert last is not None

    def delete() -> None:
        gone = next(part for part in last.parts if part.name != "third")
        forget_topic(place.hub.registry, DirectoryStaging(place.url), gone.topic)

    before = place.arrived()
    topic = place.hub.topic("third")
    driver = place.driver(Steps(1, delete, "get"))
    staged = driver.staging.stage(topic.topic, WRITER, 1, 0, [table_of([(b"k", b"v")])])
    driver.publisher.publish_routed(QUERY, 1, [Part(topic.id, "third", [staged.name], [])])
    assert place.arrived() == before + 1
    assert (place.manifest() or last).is_published


def test_what_a_routed_manifest_names_is_not_swept(place: RoutedPlace) -> None:
    manifest = leave_behind(place)
    staging, registry = DirectoryStaging(place.url), place.hub.registry
    make_old(Path(place.url, "staging"))
    for part in manifest.parts:
        assert needed_batches(registry, part.topic) == {WRITER: 0}
        staging.sweep(part.topic, needed_batches(registry, part.topic))
    place.driver().clean_up()
    assert place.arrived() == 20
    assert all(needed_batches(registry, part.topic) == {} for part in manifest.parts)


def test_a_damaged_topic_stops_no_query_that_writes_to_another_one(
    place: RoutedPlace, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = leave_behind(place)
    own, damaged = manifest.parts[0], manifest.parts[-1]
    assert own.topic != damaged.topic

    def find(topic_id: str, name: str) -> TopicLog | None:
        if topic_id == damaged.topic:
            raise DamagedFrame("topic.json", 0, "it is damaged")
        return place.find(topic_id, name)

    topic = place.find(own.topic, own.name)
    other = Publisher(place.hub.registry, topic, DirectoryStaging(place.url), find)
    other.finish_others()
    assert place.counts()[own.name] > 0
    assert "it is damaged" in caplog.text
    name = other._staging.stage(place.hub.topic(own.name).topic, "other", 0, 0, [table_of([(b"k", b"v")])]).name
    other.publish("other", 0, [name or ""])
    place.driver().clean_up()
    assert place.arrived() == 21


def test_k1_an_error_of_the_disk_while_a_query_finishes_its_own_batch_is_raised_as_it_is(place: RoutedPlace) -> None:
    """After a restart the source reads nothing of a batch that is committed, so the repeated batch names no topics. A
    BatchRefused would tell the user to start with a new checkpoint location."""
    found = leave_behind(place)

    def find(topic_id: str, name: str) -> TopicLog | None:
        if topic_id == found.parts[-1].topic:
            raise OSError(errno.ENOSPC, "no space left")
        return place.find(topic_id, name)

    staging = DirectoryStaging(place.url)
    with pytest.raises(OSError, match="no space left"):
        Publisher(place.hub.registry, None, staging, find).publish_routed(QUERY, 0, [])
    Publisher(place.hub.registry, None, staging, place.find).publish_routed(QUERY, 0, [])
    assert place.arrived() == 20


def test_a_batch_that_does_not_fit_one_commit_is_refused_with_advice(
    place: RoutedPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on etcd, where one commit names at most 127 keys."""
    driver = place.driver()
    driver.claim()
    files = driver.stage(0, {number: Span(driver.epochs[number], 0, 5) for number in (0, 1)})
    feeds = driver.staging.feeds(QUERY, 0, driver.incarnation)
    monkeypatch.setattr(place.hub.registry, "limits", replace(place.hub.registry.limits, commit_keys_max=4))
    with pytest.raises(BatchRefused, match=r"does not fit into one commit of this registry: .*4.* fewer topics"):
        driver.publish(0, files, feeds)
    assert place.arrived() == 0
    monkeypatch.setattr(place.hub.registry, "limits", replace(place.hub.registry.limits, commit_keys_max=5))
    driver.publish(0, files, feeds)
    assert place.arrived() == 10


@pytest.mark.parametrize("names", [["out", "nowhere"], ["nowhere"], ["out", None]])
def test_a_row_that_names_no_topic_leaves_nothing_staged(place: RoutedPlace, names: list[str | None]) -> None:
    driver = place.driver()
    tables = [table_of([(b"k", b"v")] * 6000).append_column("topic", pa.array(["out"] * 6000))]
    tables.append(table_of([(b"k", b"v")] * len(names)).append_column("topic", pa.array(names, pa.string())))
    with pytest.raises((UnknownTopic, ValueError), match=r"nowhere.*create it|null in the column topic"):
        driver.staging.stage_routed(by_column(driver._topic), QUERY, 0, 0, tables)
    assert not place.staged()


class TopicByTopic(Publisher):
    """Each topic has a manifest and a commit of its own, as if it were the only one."""

    def publish_routed(
        self, query: str, batch: int, parts: Sequence[Part], feeds: Sequence[Feed] = (), *more: Any
    ) -> None:
        assert self._find is not None
        for part in parts:
            topic = self._find(part.topic, part.name)
            Publisher(self._registry, topic, self._staging).publish(query, batch, part.files)

    def finish_others(self, topic: str = "") -> None: ...


class OwnParts(Publisher):
    """A replay publishes what it has staged itself, in place of what the manifest names."""

    def publish_routed(
        self, query: str, batch: int, parts: Sequence[Part], feeds: Sequence[Feed] = (), *more: Any
    ) -> None:
        entry = self._registry.get(self._prefix + query)
        if entry is not None and (last := Manifest.load(entry)).batch == batch and not last.is_published:
            mine = Manifest(batch, [], last.ranges, parts=[part._replace(ends=[0, 0]) for part in parts])
            self._own = {part.topic for part in parts}
            version = self._registry.commit({entry.key: entry.version}, {entry.key: mine.dump()})[entry.key]
            self._finish(entry.key, mine, version)
            return
        super().publish_routed(query, batch, parts, feeds)

    def finish_others(self, topic: str = "") -> None: ...


class ClearedBetween(Publisher):
    """The staged files of a topic go as soon as they are appended, before the manifest says so."""

    def _append_part(self, writer: str, batch: int, part: Part) -> None:
        super()._append_part(writer, batch, part)
        self._staging.clear(part.topic, writer, batch)


@pytest.mark.parametrize("publisher", [TopicByTopic, OwnParts, ClearedBetween])
def test_mutation_is_caught(places: Places, publisher: type[Publisher]) -> None:
    with pytest.raises(NotExact):
        try_every_crash(places, Mutation(publisher), False)


def race_to_different_topics(place: RoutedPlace) -> None:
    """Two drivers come with the first batch of a query. One has routed its row to `out`, the other one to `more`, and
    publishes it when the first one has found no manifest. Raises NotExact."""

    def publish(driver: RoutedDriver, name: str) -> None:
        topic = place.hub.topic(name)
        staged = driver.staging.stage(topic.topic, WRITER, 0, 0, [table_of([(b"k", b"v")])])
        driver.publisher.publish_routed(QUERY, 0, [Part(topic.id, name, [staged.name], [])])

    second = place.driver()
    publish(place.driver(Steps(1, lambda: publish(second, "more"), "get")), "out")
    if place.arrived() != 1:
        raise NotExact(f"{place.counts()}")


def test_k1_two_drivers_that_route_the_first_batch_to_different_topics_publish_it_once(place: RoutedPlace) -> None:
    race_to_different_topics(place)


class KeyByTopics(Publisher):
    """The key of the manifest depends on the topics, so that two routings of a batch do not share it."""

    def publish_routed(
        self, query: str, batch: int, parts: Sequence[Part], feeds: Sequence[Feed] = (), *more: Any
    ) -> None:
        self._prefix = routed_prefix("-".join(part.name for part in parts))
        super().publish_routed(query, batch, parts, feeds)


def test_mutation_a_key_that_two_routings_do_not_share_is_caught(places: Places) -> None:
    place = places(Mutation(KeyByTopics))
    assert isinstance(place, RoutedPlace)
    with pytest.raises(NotExact):
        race_to_different_topics(place)
