"""Manifests that cannot be finished: whom they stop, and what is said about them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pxrs.errors import (
    AppendFailed,
    BatchRefused,
    SequenceGap,
    UnknownTopic,
)
from pxrs.log.producers import Producers
from tests.integration.publishing.driver import (
    FORGOTTEN,
    QUERY,
    TARGET_PARTITIONS,
    Crash,
    Driver,
    Place,
    Places,
    Steps,
    batch_of,
    crash,
    fed_batch,
    make_old,
    table_of,
    unwilling,
)


def leave_behind(place: Place) -> Driver:
    """A driver whose first batch has a manifest, and dies."""
    driver = Driver(place, Steps(1, crash, "commit"))
    driver.claim()
    with pytest.raises(Crash):
        batch_of(driver, 0, (0, 5), (0, 5))
    return driver


@pytest.mark.parametrize("error", [FORGOTTEN, SequenceGap("a new epoch begins with batch 0")])
def test_k1_a_manifest_that_cannot_be_finished_stops_its_own_query_alone(
    place: Place, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    leave_behind(place)
    other = unwilling(place, error=error)
    other.clean_up()
    for batch in range(4):
        fed_batch(other, "newer", batch, (5 * batch + 5, 5 * batch + 10))
    assert place.arrived() == 20
    assert caplog.messages == [f"batch 0 of query {QUERY} is not finished and cannot be finished: {error}"]


@pytest.mark.parametrize("error", [AppendFailed("no space left"), UnknownTopic("out")])
def test_k1_what_concerns_the_topic_stops_everybody(place: Place, error: Exception) -> None:
    leave_behind(place)
    with pytest.raises(type(error)):
        unwilling(place, error=error).clean_up()


def cut_staged(place: Place, size: int = -40) -> str:
    """Cut off the last file that the manifest names; what is said of it."""
    found = place.manifest()
    assert found is not None
    path = Path(place.url, "staging", place.target.id, QUERY, "0", found.files[-1])
    path.write_bytes(path.read_bytes()[:size])
    return f"the staged file {path} cannot be read: "


def empty_staged(place: Place) -> str:
    return cut_staged(place, 0)


def damage_manifest(place: Place) -> str:
    key = f"spark/{place.target.id}/{QUERY}"
    place.hub.registry.commit(put={key: b"damaged"})
    return f"{key}: not a valid manifest record: "


@pytest.mark.parametrize("damage", [cut_staged, empty_staged, damage_manifest])
def test_k1_what_is_damaged_stops_its_own_query_alone(
    place: Place, damage: Callable[[Place], str], caplog: pytest.LogCaptureFixture
) -> None:
    leave_behind(place)
    said = damage(place)
    staged = set(place.staged())
    make_old(Path(place.url, "staging", place.target.id))
    other = Driver(place)
    other.clean_up()
    other.claim()
    in_part = place.arrived()
    for batch in range(3):
        fed_batch(other, "newer", batch, (5 * batch + 5, 5 * batch + 10))
    at_work = Driver(place)
    at_work.claim()
    for batch in range(3, 5):
        fed_batch(at_work, "newer", batch, (5 * batch + 5, 5 * batch + 10))
    assert place.arrived() == in_part + 25
    assert len(caplog.messages) == 2, "one of each publisher"
    assert all(said in message and QUERY in message for message in caplog.messages)
    files = {path for path in staged if path.suffix == ".frames"}
    assert files <= set(place.staged()), "who mends it needs them"
    with pytest.raises(BatchRefused, match=r"new checkpoint location") as caught:
        at_work.publisher.publish(QUERY, 0, sorted(path.name for path in files))
    assert said in str(caught.value)
    assert place.arrived() == in_part + 25


def test_k1_what_stops_everybody_stops_every_batch(place: Place) -> None:
    other = unwilling(place, error=AppendFailed("no space left"))
    leave_behind(place)
    other.claim()
    name = other.staging.stage(other.topic, "other", 0, 0, [table_of([(b"k", b"v")])]).name
    other.publisher.publish("other", 0, [name])  # somebody may still be at it
    name = other.staging.stage(other.topic, "other", 1, 0, [table_of([(b"k", b"v")])]).name
    for _ in range(3):
        with pytest.raises(AppendFailed):
            other.publisher.publish("other", 1, [name])
    assert place.arrived() == 1


def test_k1_its_own_query_hears_what_to_do_about_a_manifest_that_cannot_be_finished(place: Place) -> None:
    leave_behind(place)
    again = unwilling(place)
    for batch, span in ((0, (0, 5)), (1, (5, 10))):
        with pytest.raises(
            BatchRefused, match=r"were forgotten\..*topic out.*look at the end.*new checkpoint location"
        ):
            batch_of(again, batch, span, span)


def test_k1_a_manifest_of_an_earlier_version_knows_no_ends(
    places: Places, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is finished as long as the log has forgotten no producer; if not, it stops nobody else."""

    def left_behind(place: Place) -> None:
        leave_behind(place)
        key = f"spark/{place.target.id}/{QUERY}"
        entry = place.hub.registry.get(key)
        assert entry is not None
        found = json.loads(entry.value)
        for name in ("ends", "planned", "at"):
            del found[name]
        place.hub.registry.commit({key: entry.version}, {key: json.dumps(found).encode()})

    place = places()
    left_behind(place)
    Driver(place).clean_up()
    assert place.arrived() == 10
    monkeypatch.setattr(Producers.__init__, "__defaults__", (0, -1))
    place = places()
    left_behind(place)
    for number in range(TARGET_PARTITIONS):
        with place.hub.producer("out") as producer:
            producer.send(b"of somebody who is forgotten", partition=number)
    other = Driver(place)
    other.clean_up()
    other.claim()
    fed_batch(other, "other", 0, (5, 10))
    assert place.arrived() == TARGET_PARTITIONS + 5
    assert len(caplog.messages) == 1
