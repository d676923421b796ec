"""Publishing done wrong on purpose: the account of the messages must not come out even."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pxrs.errors import (
    BatchRefused,
)
from pxrs.group.checkpoints import CheckpointWrite, FencedWrite
from pxrs.group.records import Checkpoint, Keys
from pxrs.log.batch import Origin
from pxrs.publishing.feed import Feed
from pxrs.publishing.manifest import Publisher
from pxrs.publishing.records import Manifest, query_of
from pxrs.publishing.staging import appends
from pxrs.publishing.staging.directory import DirectoryStaging
from pxrs.registry.contract import ABSENT
from tests.integration.publishing.driver import (
    QUERY,
    SEED,
    TARGET_PARTITIONS,
    Driver,
    Mutation,
    NotExact,
    Places,
    Steps,
    check_a_stale_owner_publishes_nothing,
    next_driver,
    run_quietly,
    step_count,
    take_over,
    try_every_crash,
    try_schedules,
)

pytestmark = pytest.mark.sampled(2, of="module")


class Direct(Publisher):
    """No manifest: the driver's commit appends what its tasks have staged."""

    def publish(
        self, query: str, batch: int, files: Sequence[str], feeds: Sequence[Feed] = (), planned: str = ""
    ) -> None:
        self._append(self._prefix + query, Manifest(batch, list(files), ends=[0] * TARGET_PARTITIONS))
        parts: dict[str, CheckpointWrite] = {}
        for feed in feeds:
            self._add_checkpoints(feed, parts)
        checkpoints = FencedWrite(list(parts.values()))
        self._registry.commit(checkpoints.expect, checkpoints.put)
        self._staging.clear(self.topic_id, query, batch)


class OwnFiles(Publisher):
    """A replay publishes what it has staged itself, in place of what the manifest names."""

    def publish(
        self, query: str, batch: int, files: Sequence[str], feeds: Sequence[Feed] = (), planned: str = ""
    ) -> None:
        entry = self._registry.get(self._prefix + query)
        if entry is not None and (last := Manifest.load(entry)).batch == batch and not last.is_published:
            mine = Manifest(batch, list(files), last.ranges, ends=last.ends or [0] * TARGET_PARTITIONS)
            self._finish(
                entry.key, mine, self._registry.commit({entry.key: entry.version}, {entry.key: mine.dump()})[entry.key]
            )
            return
        super().publish(query, batch, files, feeds)

    def finish_others(self) -> None:
        """It would finish what the manifest names before the replay comes."""


class LateCheckpoints(Publisher):
    """The checkpoints are written when the batch is published, in a commit of their own (K3)."""

    def publish(
        self, query: str, batch: int, files: Sequence[str], feeds: Sequence[Feed] = (), planned: str = ""
    ) -> None:
        super().publish(query, batch, files)
        for feed in feeds:
            keys = Keys(feed.group)
            spans = feed.spans.items()
            put = {keys.checkpoint(feed.topic, number): Checkpoint(span.end).dump() for number, span in spans}
            self._registry.commit(put=put)


class Overwriting(Publisher):
    """What is there when the last batch is finished is written over, whatever it is by then."""

    def publish(
        self, query: str, batch: int, files: Sequence[str], feeds: Sequence[Feed] = (), planned: str = ""
    ) -> None:
        ours = Manifest(batch, list(files), ends=[0] * TARGET_PARTITIONS)
        key = self._prefix + query
        entry = self._registry.get(key)
        if entry is not None:
            last = Manifest.load(entry)
            self._finish(key, last, entry.version)
            if last.batch == batch:
                return
            entry = self._registry.get(entry.key)
        version = self._write(key, ours, ABSENT if entry is None else entry.version, ())
        if version is None:
            self.publish(query, batch, files, feeds)
        else:
            self._finish(key, ours, version)


class ClearedFirst(Publisher):
    """The staged files go before it is written down that they are published."""

    def _append(self, key: str, manifest: Manifest) -> None:
        super()._append(key, manifest)
        self._staging.clear(self.topic_id, query_of(key), manifest.batch)


class SameNames(DirectoryStaging):
    """Staged files without the random part of their names: two tries of a task write to the same one."""

    def stage(self, *arguments: Any) -> Any:
        staged = super().stage(*arguments)
        topic, query, batch = arguments[:3]
        folder = self._root / topic.id / query / str(batch)
        plain = f"{str(staged.name)[:5]}.frames"
        (folder / str(staged.name)).rename(folder / plain)
        return staged._replace(name=plain)


def delete_staged(driver: Driver, batch: int) -> None:
    """An abort that takes back what its tasks have staged."""
    driver.staging.clear(driver.topic.id, QUERY, batch)


def delete_manifest(driver: Driver, batch: int) -> None:
    """An abort that takes the commit back."""
    registry = driver.hub.registry
    entry = registry.get(f"spark/{driver.topic.id}/{QUERY}")
    if entry is not None and Manifest.load(entry).batch == batch:
        registry.commit(delete=[entry.key])


def test_mutation_no_manifest_is_caught(places: Places) -> None:
    with pytest.raises(NotExact):
        try_every_crash(places, Mutation(Direct))


def test_mutation_the_sequence_is_the_batch_alone_is_caught(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = places()
    for origin in (lambda who, batch, piece: Origin(who, batch, 0), lambda who, batch, piece: Origin(who, 0, batch)):
        with monkeypatch.context() as patch:
            patch.setattr(appends, "Origin", origin)
            place = places()
            Driver(place).run()
            with pytest.raises(NotExact):
                place.check()
    Driver(whole).run()
    whole.check()


@pytest.mark.parametrize("abort", [delete_staged, delete_manifest])
def test_mutation_an_abort_that_undoes_is_caught(places: Places, abort: Callable[[Driver, int], None]) -> None:
    with pytest.raises(NotExact):
        try_failed_appends(places, Mutation(abort=abort))
    try_failed_appends(places)


def try_failed_appends(places: Places, mutation: Mutation | None = None) -> None:
    """The driver's commit took effect, and an error follows: Spark calls `abort`. Raises NotExact."""

    def fail() -> None:
        raise BatchRefused("something else")

    for at in range(1, step_count(places(), "append") + 1):
        place = places(mutation)
        run_quietly(Driver(place, Steps(at, fail, "append")).run)
        if (end := run_quietly(lambda: next_driver(at)(place))) is not None:  # noqa: B023
            raise NotExact(f"SEED={SEED}: failed at append {at}, and the next one cannot go on: {end}") from end
        place.check(f"SEED={SEED}: failed at append {at}")


def test_mutation_staged_names_without_the_random_part_are_caught(places: Places) -> None:
    with pytest.raises(NotExact):
        try_every_crash(places, Mutation(staging=SameNames))


def test_mutation_a_replay_that_publishes_its_own_files_is_caught(places: Places) -> None:
    with pytest.raises(NotExact):
        try_every_crash(places, Mutation(OwnFiles))


def test_mutation_checkpoints_beside_the_manifest_are_caught(places: Places) -> None:
    with pytest.raises(NotExact):
        try_every_crash(places, Mutation(LateCheckpoints), successor=take_over)
    with pytest.raises(NotExact):
        check_a_stale_owner_publishes_nothing(places(Mutation(LateCheckpoints)))


def test_mutation_a_manifest_that_is_written_over_is_caught(places: Places) -> None:
    with pytest.raises(NotExact):
        try_schedules(places, False, "", Mutation(Overwriting))


def test_mutation_files_that_go_before_the_manifest_says_so_are_caught(places: Places) -> None:
    with pytest.raises(NotExact):
        try_every_crash(places, Mutation(ClearedFirst))
