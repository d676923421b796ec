"""One name that writes with and without the option `topic`: an application's writes from `foreachBatch`, or a query
whose sink was changed between two starts. Its two manifests have different keys, and may name the same topic.
"""

from __future__ import annotations

from collections import Counter

import pytest

from pxrs.errors import BatchRefused
from pxrs.log.contract import TopicLog
from pxrs.publishing.forgetting import needed_batches
from pxrs.publishing.manifest import Publisher
from pxrs.publishing.records import Part
from pxrs.publishing.staging.directory import DirectoryStaging
from pxrs.publishing.staging.files import routed_writer
from pxrs.testing.transfer import rows_of
from tests.integration.publishing.driver import Crash, Place, Steps, Watched, WatchedLog, crash, nothing, table_of

NAME = "app-audit"


class Writer:
    """Writes to the topic `out`, by the option or by a column of the rows."""

    def __init__(self, place: Place, *, is_routed: bool, hook: Steps | None = None) -> None:
        self.place, self.is_routed = place, is_routed
        self.staging = DirectoryStaging(place.url)
        log: TopicLog = WatchedLog(place.target.log, hook or nothing, "log")  # type: ignore[assignment]
        registry: object = Watched(place.hub.registry, hook or nothing, "registry", "commit")
        self.publisher = Publisher(
            registry,  # type: ignore[arg-type]
            None if is_routed else log,
            self.staging,
            lambda id, name: log if id == place.target.id else None,
        )

    def stage(self, batch: int, values: list[bytes]) -> list[str]:
        table = table_of([(b"key", value) for value in values])
        if not self.is_routed:
            return [self.staging.stage(self.place.target.topic, NAME, batch, 0, [table]).name or ""]
        found = self.staging.stage_routed(
            lambda rows: [(self.place.target.topic, rows)], routed_writer(NAME), batch, 0, [table]
        )
        return [staged.name or "" for _, staged in found]

    def publish(self, batch: int, files: list[str], planned: str = "") -> None:
        if self.is_routed:
            parts = [Part(self.place.target.id, "out", files, [])]
            self.publisher.publish_routed(NAME, batch, parts, planned=planned)
        else:
            self.publisher.publish(NAME, batch, files, planned=planned)

    def write(self, batch: int, *values: bytes, planned: str = "") -> None:
        self.publish(batch, self.stage(batch, list(values)), planned)


def arrived(place: Place) -> Counter[bytes]:
    return Counter(value for _, value in rows_of(place.target))


both_ways = pytest.mark.parametrize("is_routed", [True, False], ids=["column first", "option first"])


@both_ways
def test_two_writes_of_one_number_to_one_topic_both_count(place: Place, is_routed: bool) -> None:
    """Each has a manifest of its own: the log must not take the second one for a repetition of the first one."""
    Writer(place, is_routed=is_routed).write(5, b"one")
    Writer(place, is_routed=not is_routed).write(5, b"other")
    for kind in (True, False):  # a repeated batch makes both writes again
        Writer(place, is_routed=kind).write(5, b"repeated")
    assert arrived(place) == Counter([b"one", b"other"])


@both_ways
def test_two_writes_at_the_same_time_do_not_remove_each_others_staged_files(place: Place, is_routed: bool) -> None:
    """As from a pool of threads in `foreachBatch`."""
    first, second = Writer(place, is_routed=is_routed), Writer(place, is_routed=not is_routed)
    files = first.stage(5, [b"one"])
    second.write(5, b"other")
    first.publish(5, files)
    assert arrived(place) == Counter([b"one", b"other"])


@both_ways
def test_a_batch_whose_driver_died_is_not_lost_if_the_next_one_is_written_in_the_other_way(
    place: Place, is_routed: bool
) -> None:
    """A process that has published before does not look for the manifests of others first."""
    second = Writer(place, is_routed=not is_routed)
    with pytest.raises(Crash):
        Writer(place, is_routed=is_routed, hook=Steps(1, crash, "commit")).write(5, b"one")
    second.write(6, b"other")
    Writer(place, is_routed=False).publisher.finish_others()
    assert [value for _, value in rows_of(place.target)] == [b"one", b"other"], "in the order of the batches"


@both_ways
@pytest.mark.parametrize("step", ["commit", "append"])
def test_k1_a_batch_that_is_repeated_after_its_sink_was_changed_counts_once(
    place: Place, is_routed: bool, step: str
) -> None:
    with pytest.raises(Crash):
        Writer(place, is_routed=is_routed, hook=Steps(1, crash, step)).write(5, b"one", planned="plan of 5")
    changed = Writer(place, is_routed=not is_routed)
    changed.write(5, b"one", planned="plan of 5")
    assert arrived(place) == Counter([b"one"])
    assert not place.staged()
    changed.write(6, b"two", planned="plan of 6")
    assert arrived(place) == Counter([b"one", b"two"])


@both_ways
def test_k2_a_smaller_version_of_a_name_is_refused_with_advice_that_helps(place: Place, is_routed: bool) -> None:
    """A new checkpoint location, which is the advice for a query's own id, would not help."""
    writer = Writer(place, is_routed=is_routed)
    writer.write(5, b"one")
    with pytest.raises(
        BatchRefused, match=r"audit has already written version 5, and now comes with 4\. .*another txnAppId"
    ):
        writer.write(4, b"other")
    assert arrived(place) == Counter([b"one"])


def test_the_staged_files_of_both_manifests_are_kept(place: Place) -> None:
    for batch, kind in ((6, True), (5, False)):
        writer = Writer(place, is_routed=kind, hook=Steps(1, crash, "commit"))
        if not kind:
            writer.publisher._find = None  # so that it does not finish the first one
        with pytest.raises(Crash):
            writer.write(batch, b"v%d" % batch)
    needed = needed_batches(place.hub.registry, place.target.id)
    assert sorted(batch for batch in needed.values() if batch is not None) == [5, 6]
    folders = {path.parent.parent.name for path in place.staged()}
    assert needed.keys() == folders
