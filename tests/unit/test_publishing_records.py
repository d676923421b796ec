"""The states of a manifest: the tables are complete, the publisher keeps to them, and the documents draw them."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pxrs.errors import AppendFailed, BatchRefused, RegistryUnavailable
from pxrs.log.memory import MemoryLog, MemoryTopic
from pxrs.model import Topic
from pxrs.publishing import manifest
from pxrs.publishing.manifest import JOB, Publisher
from pxrs.publishing.records import (
    ON_ARRIVAL,
    TRANSITIONS,
    Event,
    Manifest,
    ManifestState,
    Order,
    Step,
    manifests_of,
    step_for,
)
from pxrs.publishing.staging.directory import DirectoryStaging
from pxrs.registry.memory import MemoryRegistry
from pxrs.registry.outage import ride_out

FLOWS = Path(__file__).parents[2] / "docs" / "flows.md"
ABSENT, COMMITTED, PUBLISHED = ManifestState


class Recorded(MemoryRegistry):
    """Notes the state of every manifest before and after each commit."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[ManifestState, ManifestState]] = []

    def commit(self, *arguments: Any, **named: Any) -> dict[str, int]:
        before = self._states()
        try:
            return super().commit(*arguments, **named)
        finally:
            after = self._states()
            for key in before.keys() | after.keys():
                if before.get(key) != after.get(key):
                    self.changes.append((_state(before.get(key)), _state(after.get(key))))

    def _states(self) -> Mapping[str, bytes]:
        return {entry.key: entry.value for entry in self.scan("spark/")}


def _state(value: bytes | None) -> ManifestState:
    if value is None:
        return ABSENT
    return PUBLISHED if b'"is_published":true' in value else COMMITTED


@pytest.fixture
def topic() -> MemoryTopic:
    topic = MemoryLog().create_topic(Topic("out", "0" * 32, 1))
    assert isinstance(topic, MemoryTopic)
    return topic


def test_there_is_a_step_for_every_batch_that_can_come() -> None:
    impossible = {(ABSENT, Order.SAME), (ABSENT, Order.EARLIER)}
    assert set(ON_ARRIVAL) == set(itertools.product(ManifestState, Order)) - impossible
    for (state, order), step in ON_ARRIVAL.items():
        if step is Step.COMMIT:
            assert (state, Event.COMMIT) in TRANSITIONS
        if step in (Step.FINISH_THEN_LOOK, Step.FINISH_THEN_STOP):
            assert (state, Event.FINISH) in TRANSITIONS
        assert (step is Step.REFUSE) == (order is Order.EARLIER), "K2"


@pytest.mark.parametrize(
    ("last", "batch", "step"),
    [
        (None, 0, Step.COMMIT),
        (Manifest(3, ["file"]), 4, Step.FINISH_THEN_LOOK),
        (Manifest(3, ["file"]), 3, Step.FINISH_THEN_STOP),
        (Manifest(3, [], is_published=True), 4, Step.COMMIT),
        (Manifest(3, [], is_published=True), 3, Step.STOP),
    ],
)
def test_k1_what_a_driver_does_with_the_manifest_that_it_finds(last: Manifest | None, batch: int, step: Step) -> None:
    assert step_for("q", last, Manifest(batch, [])) is step


@pytest.mark.parametrize("is_published", [True, False])
def test_k2_an_earlier_batch_and_another_one_of_the_same_number_are_refused(is_published: bool) -> None:
    last = Manifest(3, [], {"g/t": {"0": [0, 5]}}, is_published, planned="plan")
    with pytest.raises(BatchRefused, match="comes with batch 2"):
        step_for("q", last, Manifest(2, []))
    with pytest.raises(BatchRefused, match="with other input: offsets 0 to 6 of g/t/0"):
        step_for("q", last, Manifest(3, [], {"g/t": {"0": [0, 6]}}))
    with pytest.raises(BatchRefused, match="planned it again"):
        step_for("q", last, Manifest(3, [], planned="another"))
    step_for("q", last, Manifest(3, [], {"g/t": {"0": [0, 5]}}, planned="plan"))


def test_k1_the_publisher_makes_no_other_transitions(
    topic: MemoryTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, staging = Recorded(), DirectoryStaging(str(tmp_path))
    publisher = Publisher(registry, topic, staging)

    def publish(query: str, batch: int) -> None:
        name = staging.stage(topic.topic, query, batch, 0, [pa.record_batch({"value": [b"%d" % batch]})]).name
        publisher.publish(query, batch, [name or ""])

    publish("q", 0)
    publish("q", 1)
    with monkeypatch.context() as patch:
        patch.setattr(topic, "append", fail)
        with pytest.raises(AppendFailed):
            publish("q", 2)
    publish("q", 3)  # the driver that finds batch 2 unfinished
    publish("q", 3)
    publish(JOB + "1", 0)
    publisher.forget(JOB + "1")
    with pytest.raises(BatchRefused):
        publish("q", 2)
    allowed = {(state, after) for (state, _), after in TRANSITIONS.items()}
    assert set(registry.changes) == allowed
    stored = [record for batch in topic.read(0, 0, 1 << 20) for record in batch.records.column("value").to_pylist()]
    assert stored == [b"0", b"1", b"2", b"3", b"0"]
    assert [entry.key for entry in registry.scan(manifests_of(topic.id))] == [f"{manifests_of(topic.id)}q"]


def fail(*_: object) -> None:
    raise AppendFailed("no space left")


def test_the_documents_draw_the_tables() -> None:
    text = FLOWS.read_text()
    (section,) = re.findall(r"^## A Spark batch\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    arrows = re.findall(r"^    (\w+) --> (\w+) : (.*)$", section, re.MULTILINE)
    assert sorted(arrows) == sorted((a.value, b.value, event.value) for (a, event), b in TRANSITIONS.items())
    rows = re.findall(r"^\| (absent|committed|published) \| (\w+) \| (.*) \|$", section, re.MULTILINE)
    assert rows == [(state.value, order.value, step.value) for (state, order), step in ON_ARRIVAL.items()]


def test_a_driver_that_was_stopped_after_it_read_the_manifests_sweeps_nothing_staged_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on two days later. A manifest names the files by then, and is not published yet."""
    staging, registry = DirectoryStaging(str(tmp_path)), MemoryRegistry()
    publisher = Publisher(registry, MemoryTopic(Topic("t", "a" * 32, 1), MemoryLog()), staging)
    now, swept = [1_000_000.0], []
    scan = registry.scan

    def stopped_after(prefix: str) -> list[Any]:
        found = scan(prefix)
        now[0] += 2 * 86_400
        return found

    monkeypatch.setattr(manifest.time, "time", lambda: now[0])
    monkeypatch.setattr(registry, "scan", stopped_after)
    monkeypatch.setattr(staging, "sweep", lambda topic, needed, now=None: swept.append(now))
    publisher.finish_others()
    assert swept == [1_000_000.0]


def test_the_manifest_of_a_job_that_nobody_removed_is_kept_for_a_day(
    topic: MemoryTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit may be repeated within that time, and must find the manifest."""
    registry, staging = MemoryRegistry(), DirectoryStaging(str(tmp_path))
    publisher, key = Publisher(registry, topic, staging), f"{manifests_of(topic.id)}{JOB}1"
    name = staging.stage(topic.topic, JOB + "1", 0, 0, [pa.record_batch({"value": [b"v"]})]).name
    publisher.publish(JOB + "1", 0, [name or ""])
    publisher.finish_others()
    assert registry.get(key) is not None
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * 86_400)
    publisher.finish_others()
    assert registry.get(key) is None


def test_a_call_that_may_not_be_waited_for_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        raise RegistryUnavailable("away")

    monkeypatch.setattr(time, "sleep", lambda seconds: 1 // 0)
    with pytest.raises(RegistryUnavailable):
        ride_out(call, 60.0, lambda: False)
    assert len(calls) == 1
