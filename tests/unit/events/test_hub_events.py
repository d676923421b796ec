"""`hub.events` and `hub.audit`: internal topics, who and when, following."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.errors import Closed, InvalidArgument, InvalidTopic, UnknownTopic
from pxrs.events import Event, storing
from pxrs.events.recording import user
from pxrs.testing.waiting import aside

WAIT_S = 20.0


@pytest.fixture(params=["memory", "directory"])
def at(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else str(tmp_path / "hub")


def test_what_an_administrator_does_is_kept_with_who_and_when(at: str) -> None:
    before = datetime.now(UTC)
    with pxrs.open(at) as hub:
        id = hub.create_topic("orders", partitions=2).id
        hub.delete_topic("orders")
        hub.record_audit("backup", target="elsewhere", who="somebody")
        created, deleted, backup = hub.audit()
        assert list(hub.audit(since=before)) == [created, deleted, backup]
        assert list(hub.audit(since=timedelta(0))) == []
        assert list(hub.events()) == []
    assert (created.name, deleted.name, backup.name) == ("audit.create_topic", "audit.delete_topic", "audit.backup")
    assert created.fields == {"who": user(), "topic": "orders", "topic_id": id, "partitions": 2}
    assert backup.fields["who"] == "somebody"
    assert created.at <= deleted.at <= backup.at


def test_internal_topics_are_hidden_and_cannot_be_created_or_written_to_by_users(at: str) -> None:
    with pxrs.open(at) as hub:
        assert hub.topics(internal=True) == []
        hub.create_topic("orders", partitions=1)
        assert [event.name for event in hub.audit()] == ["audit.create_topic"]
        assert [topic.name for topic in hub.topics()] == ["orders"]
        assert [topic.name for topic in hub.topics(internal=True)] == ["_audit", "orders"]
        (kept,) = (topic for topic in hub.topics(internal=True) if topic.name == "_audit")
        assert kept.retention_s is not None
        assert kept.retention_bytes is not None
        with pytest.raises(InvalidTopic, match="'_mine' cannot be created: names that begin with '_'"):
            hub.create_topic("_mine")
        with pytest.raises(InvalidTopic, match="cannot be written to"):
            hub.producer("_audit")
        with pytest.raises(InvalidTopic, match="cannot be written to"):
            hub.consumer("orders", "g", dead_letters="_events")
        with pytest.raises(UnknownTopic):
            hub.topic("_events")


def test_spark_writes_to_no_internal_topic() -> None:
    names = pytest.importorskip("pxrs.spark.names")
    with pxrs.open("memory:") as hub:
        hub.create_topic("orders", partitions=1)
        assert len(list(hub.audit())) == 1
        with pytest.raises(InvalidTopic, match="cannot be written to"):
            names.topic_to_write(hub, "_audit")
        assert names.topic_to_write(hub, "orders").name == "orders"


def test_events_are_followed_from_before_the_first_one_until_the_hub_is_closed(at: str) -> None:
    seen: list[Event] = []
    came, errors = threading.Semaphore(0), list[BaseException]()
    hub = pxrs.open(at)

    def follow() -> None:
        try:
            for event in hub.audit(follow=True):
                seen.append(event)
                came.release()
        except BaseException as error:  # noqa: BLE001 - asserted below
            errors.append(error)

    reader = threading.Thread(target=follow)
    reader.start()
    try:
        for number in range(3):
            hub.record_audit("backup", target=str(number))
            if number == 0:
                hub.create_topic("makes-the-directory", partitions=1)
            assert came.acquire(timeout=WAIT_S)
    finally:
        hub.close()
        reader.join(WAIT_S)
    assert not reader.is_alive()
    assert [event.fields["target"] for event in seen if event.name == "audit.backup"][-2:] == ["1", "2"]
    assert [type(error) for error in errors] == [Closed]


def test_an_event_makes_no_hub_where_there_is_none(tmp_path: Path) -> None:
    with pxrs.open(tmp_path / "none") as hub:
        hub.record_audit("backup", target="x")
        assert list(hub.audit()) == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("since", [-1, "1h", datetime(2026, 1, 1), True])
def test_a_wrong_since_is_refused(since: object) -> None:
    with pxrs.open("memory:") as hub, pytest.raises(InvalidArgument, match="since is"):
        hub.events(since=since)  # type: ignore[arg-type]


def test_events_are_kept_for_a_week_and_the_audit_for_a_year_and_survives_a_power_loss(at: str) -> None:
    with pxrs.open(at) as hub:
        hub.create_topic("orders", partitions=1)
        hub.parts.events.record("member.joined", group="g", member="m")
        assert hub.parts.events.flush(WAIT_S)
        found = {each.name: each for each in hub.topics(internal=True)}
    kept = {name: (each.durability, each.retention_s, each.retention_bytes) for name, each in found.items()}
    assert kept["_events"] == ("os", 7 * 86_400, 64 << 20)
    assert kept["_audit"] == ("disk", 365 * 86_400, 64 << 20)


def test_who_records_events_also_removes_old_ones_in_a_hub_without_upkeep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RETAIN_S": 0.0, "RETENTION_BYTES": 1, "SEGMENT_BYTES": 4_096}.items():
        monkeypatch.setattr(storing, name, value)
    with pxrs.open(tmp_path / "hub", upkeep=False) as hub:
        hub.create_topic("orders", partitions=1)
        for _ in range(5):
            hub.parts.events.record("member.failed", group="g", member="m", error="x" * 5_000)
            assert hub.parts.events.flush(WAIT_S)
        assert hub.topic("_events").start(0) > 0


def test_who_follows_goes_on_with_the_topic_that_is_made_again(at: str) -> None:
    with pxrs.open(at) as hub:
        hub.create_topic("orders", partitions=1)
        following = hub.audit(follow=True)
        assert next(following).fields["topic"] == "orders"
        coming = aside(lambda: next(following))
        hub.delete_topic("_audit")
        assert coming.result(20).name == "audit.delete_topic"


@pytest.mark.parametrize("action", ["", "Deploy", "a.b", "x" * 60, 7])
def test_an_action_that_no_server_would_take_is_refused_at_once(action: Any) -> None:
    with pxrs.open("memory:") as hub:
        with pytest.raises(InvalidArgument, match="action"):
            hub.record_audit(action)
        hub.record_audit("rolled_out", version=2)
        assert [each.fields["version"] for each in hub.audit()] == [2]


def test_the_topic_of_events_may_be_deleted_and_is_made_again(at: str) -> None:
    with pxrs.open(at) as hub:
        hub.create_topic("orders", partitions=1)
        assert len(list(hub.audit())) == 1
        hub.delete_topic("_audit")
        assert [event.fields["topic"] for event in hub.audit()] == ["_audit"]
