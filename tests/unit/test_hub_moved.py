"""A hub's directory that is renamed or replaced under an open handle: an error of its own, and nothing is written."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pxrs
from pxrs.errors import HubMoved


@pytest.fixture(params=["renamed", "another hub", "a copy", "an empty folder"])
def replace(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], None]:
    def perform(folder: Path) -> None:
        folder.rename(tmp_path / "away")
        if request.param == "another hub":
            with pxrs.open(folder) as hub:
                hub.create_topic("t", partitions=1)
        elif request.param == "a copy":
            shutil.copytree(tmp_path / "away", folder, symlinks=True)
        elif request.param == "an empty folder":
            folder.mkdir()

    return perform


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[pxrs.Hub]:
    hub = pxrs.open(tmp_path / "data", f"sqlite:///{tmp_path}/reg.db")
    hub.create_topic("t", partitions=1, retention=1.0, retention_bytes=1)
    with hub.producer("t", linger_s=0) as out:
        out.send(b"first").result()
    yield hub
    with contextlib.suppress(pxrs.errors.PxrsError):  # of producers whose messages could not be stored
        hub.close()


def values(folder: Path) -> list[bytes | None]:
    with pxrs.open(folder) as hub:
        return [message.value for message in hub.topic("t").messages(0)] if hub.topics() else []


def test_an_append_is_refused_and_reaches_neither_directory(
    hub: pxrs.Hub, replace: Callable[[Path], None], tmp_path: Path
) -> None:
    out = hub.producer("t", linger_s=0)
    out.send(b"second").result()
    replace(tmp_path / "data")
    with pytest.raises(HubMoved, match=str(tmp_path / "data")):
        out.send(b"third").result(30)
    with pytest.raises(HubMoved):
        out.close()
    assert values(tmp_path / "away") == [b"first", b"second"]
    if (tmp_path / "data").exists():
        assert b"third" not in values(tmp_path / "data")


def test_every_other_use_is_refused_too(hub: pxrs.Hub, replace: Callable[[Path], None], tmp_path: Path) -> None:
    topic = hub.topic("t")
    topic.end(0)
    replace(tmp_path / "data")
    for use in (
        lambda: topic.read(0, 0),
        lambda: topic.end(0),
        topic.retain,
        hub.topics,
        lambda: hub.topic("t"),
        lambda: hub.create_topic("more"),
        lambda: hub.delete_topic("t"),
        lambda: hub.producer("t"),
        lambda: hub.consumer("t", "g"),
        lambda: hub.group("g"),
        lambda: hub.queues(),
        hub.adopt_registry,
    ):
        with pytest.raises(HubMoved):
            use()
    assert not list(tmp_path.glob("data/topics/more"))


def test_a_consumer_is_refused_at_its_next_commit(
    hub: pxrs.Hub, replace: Callable[[Path], None], tmp_path: Path
) -> None:
    with hub.consumer("t", "g", commit_interval=3600) as inbox:
        assert inbox.poll(1, timeout=30)
        replace(tmp_path / "data")
        with pytest.raises(HubMoved):
            inbox.commit()
        with pytest.raises(HubMoved):
            inbox.poll(1, timeout=30)


def test_the_registry_that_lies_in_the_directory_is_not_opened_in_another_one(
    replace: Callable[[Path], None], tmp_path: Path
) -> None:
    with pxrs.open(tmp_path / "data") as hub:
        hub.create_topic("t", partitions=1)
        replace(tmp_path / "data")
        with pytest.raises(HubMoved):
            hub.registry.get("a")
        assert not (tmp_path / "data" / "registry").exists()


def test_a_topic_that_was_deleted_is_unknown_and_its_hub_not_moved(hub: pxrs.Hub, tmp_path: Path) -> None:
    out = hub.producer("t", linger_s=0)
    with pxrs.open(tmp_path / "data", f"sqlite:///{tmp_path}/reg.db") as other:
        other.delete_topic("t")
    with pytest.raises(pxrs.errors.UnknownTopic):
        out.send(b"late").result(30)
    with pytest.raises(pxrs.errors.UnknownTopic):
        out.close()


def test_a_directory_that_is_made_after_the_hub_was_opened_is_its_own(tmp_path: Path) -> None:
    with pxrs.open(tmp_path / "data") as early, pxrs.open(tmp_path / "data") as maker:
        assert early.topics() == []
        maker.create_topic("t")
        assert [topic.name for topic in early.topics()] == ["t"]
