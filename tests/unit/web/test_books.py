"""What the page costs the registry: a refresh scans the groups that have changed, once each, and nothing else."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import pxrs
from pxrs.errors import NotPermitted, RegistryUnavailable
from pxrs.group.records import Checkpoint, Keys
from pxrs.hub import Hub
from pxrs.log.memory import MemoryLog
from pxrs.registry import Entry, Watch
from pxrs.registry.memory import MemoryRegistry, MemoryStore
from pxrs.testing.hooked import FaultyRegistry
from pxrs.testing.many_groups import add_group, counted_calls, fill
from pxrs.testing.waiting import eventually
from pxrs.web import groups, views, watching
from pxrs.web.observer import Observer


@pytest.fixture
def hub() -> Iterator[pxrs.Hub]:
    with pxrs.open("memory:") as made:
        yield made


@pytest.fixture
def observer(hub: pxrs.Hub) -> Iterator[Observer]:
    hub.create_topic("orders", 4)
    add_group(hub.registry, "billing", hub.topics())
    add_group(hub.registry, "mail", hub.topics())
    made = Observer(hub)
    yield made
    made.close()


def look(observer: Observer) -> dict[str, object]:
    observer.forget()
    found = observer.see(lambda: views.overview(observer))
    return {row["group"]: (row["members"], row["partitions"], row["lag"]) for row in found["groups"]}


def write(hub: pxrs.Hub, group: str, offset: int) -> None:
    topic = hub.topic("orders").topic
    checkpoint = Checkpoint(offset, time.time(), "m", 1)
    hub.registry.commit(put={Keys(group).checkpoint(topic.id, 0): checkpoint.dump()})


def test_a_refresh_without_a_change_asks_the_registry_for_nothing(hub: pxrs.Hub, observer: Observer) -> None:
    look(observer)
    with counted_calls(hub.registry) as calls:
        look(observer)
        look(observer)
    assert not calls


def test_only_the_group_that_has_changed_is_read_again(hub: pxrs.Hub, observer: Observer) -> None:
    with hub.producer("orders") as out:
        out.send(b"x", partition=0)
    before = look(observer)
    assert before == {"billing": (1, 4, 1), "mail": (1, 4, 1)}
    write(hub, "mail", 1)
    with counted_calls(hub.registry) as calls:
        assert look(observer) == {"billing": (1, 4, 1), "mail": (1, 4, 0)}
    assert calls == {"scan": 1}


def test_lag_grows_without_a_call_of_the_registry(hub: pxrs.Hub, observer: Observer) -> None:
    look(observer)
    with hub.producer("orders") as out:
        for _ in range(10):
            out.send(b"x")
    with counted_calls(hub.registry) as calls:
        assert look(observer) == {"billing": (1, 4, 10), "mail": (1, 4, 10)}
    assert not calls


def test_a_new_group_is_found_and_a_deleted_one_vanishes(hub: pxrs.Hub, observer: Observer) -> None:
    look(observer)
    add_group(hub.registry, "new", hub.topics())
    assert set(look(observer)) == {"billing", "mail", "new"}
    hub.group("mail").delete(force=True)
    assert set(look(observer)) == {"billing", "new"}


def test_a_new_group_is_found_also_while_others_change(
    hub: pxrs.Hub, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    look(observer)
    add_group(hub.registry, "new", hub.topics())
    write(hub, "mail", 0)
    assert set(look(observer)) == {"billing", "mail"}, "the names are not listed at every refresh"
    monkeypatch.setattr(observer.groups, "_list_again", 0.0)
    write(hub, "mail", 0)
    assert set(look(observer)) == {"billing", "mail", "new"}


def test_a_new_group_is_found_by_its_events_while_others_change(hub: pxrs.Hub, observer: Observer) -> None:
    observer.start()
    look(observer)
    with hub.consumer("orders", "new") as consumer:
        consumer.poll(timeout=0.0)  # joins; there is nothing to read
        eventually(lambda: "new" in observer.history.groups())
        write(hub, "mail", 0)
        look(observer)
        with counted_calls(hub.registry) as calls:
            assert "new" in look(observer)
        assert calls["scan"] <= 2, "the group, and mail if it was not read before"


def test_more_groups_than_watches_are_read_again_every_few_seconds(
    hub: pxrs.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "WATCHES_MAX", 1)
    monkeypatch.setattr(groups, "UNWATCHED_S", 0.0)
    hub.create_topic("orders", 4)
    for name in ("a", "b", "c"):
        add_group(hub.registry, name, hub.topics())
    observer = Observer(hub)
    with hub.producer("orders") as out:
        out.send(b"x", partition=0)
    assert look(observer)["c"] == (1, 4, 1)
    write(hub, "c", 1)
    assert look(observer)["c"] == (1, 4, 0)
    observer.close()


def test_without_permission_for_watches_the_page_looks_every_few_seconds(
    hub: pxrs.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*prefixes: str) -> Watch:
        raise NotPermitted("no watch")

    monkeypatch.setattr(hub.registry, "watch", refused)
    monkeypatch.setattr(watching, "LOOK_S", 0.0)
    hub.create_topic("orders", 4)
    add_group(hub.registry, "mail", hub.topics())
    observer = Observer(hub)
    with hub.producer("orders") as out:
        out.send(b"x", partition=0)
    assert look(observer) == {"mail": (1, 4, 1)}
    write(hub, "mail", 1)
    add_group(hub.registry, "new", hub.topics())
    assert look(observer)["mail"] == (1, 4, 0)
    monkeypatch.setattr(observer.groups, "_list_again", 0.0)
    assert set(look(observer)) == {"mail", "new"}
    observer.close()


@pytest.mark.parametrize("at", range(1, 9))
def test_a_request_that_fails_is_made_again_at_the_next_refresh_and_the_page_is_made_during_an_outage(at: int) -> None:
    store = MemoryStore()
    registry = FaultyRegistry(store, at)
    registry.is_counting = False
    with Hub(MemoryLog(), registry) as hub, MemoryRegistry(store) as other:
        hub.create_topic("orders", 4)
        registry.is_counting = True
        add_group(other, "billing", hub.topics())
        observer = Observer(hub)
        look(observer)
        assert observer.problem is not None
        assert look(observer) == {"billing": (1, 4, 0)}
        assert observer.problem is None
        observer.close()


def test_a_change_is_read_at_the_next_refresh_if_reading_it_fails(
    hub: pxrs.Hub, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    look(observer)
    write(hub, "mail", 1)
    hub.create_queue("mails").put(b"x")
    with monkeypatch.context() as patch:

        def away(*arguments: object) -> list[Entry]:
            raise RegistryUnavailable("no answer")

        patch.setattr(hub.registry, "_scan", away)
        look(observer)
        assert "no answer" in str(observer.problem)
    with hub.producer("orders") as out:
        out.send(b"x", partition=0)
    assert look(observer) == {"billing": (1, 4, 1), "mail": (1, 4, 0)}
    assert [each.name for each in (queue.queue for queue in observer.queues.by_name.values())] == ["mails"]
    assert observer.problem is None


def test_a_hub_without_a_directory_has_queues_and_no_events(tmp_path: Path) -> None:
    with pxrs.open(None, tmp_path / "registry") as hub:
        hub.create_queue("mails").put(b"x")
        observer = Observer(hub)
        observer.start()
        found = observer.see(lambda: views.overview(observer))
        assert (found["topics"], [row["ready"] for row in found["queues"]]) == ([], [1])
        assert found["problem"] is None
        eventually(lambda: observer.history.problem)
        observer.close()


def test_numbers_of_a_group_are_those_of_describe(hub: pxrs.Hub, observer: Observer) -> None:
    with hub.producer("orders") as out:
        for number in range(50):
            out.send(b"x", key=str(number))
    write(hub, "mail", 3)
    look(observer)
    found = hub.group("mail").describe()
    assert views.described(observer.groups.find("mail", 0.0)) == views.described(found)


@pytest.fixture
def fast_folder() -> Iterator[Path]:
    """In memory where that is possible: a thousand topics are created, and each is synced to the disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


def test_200_groups_1000_topics_10000_partitions(fast_folder: Path) -> None:
    """A refresh costs one scan for each group that has changed. `benchmarks.web` measures how long the first look
    takes: about 0.5 s of CPU. Here it must not take many times as long."""
    with pxrs.open(fast_folder / "hub", "memory:", upkeep=False) as hub:
        topics = fill(hub, groups=200, topics=1_000, partitions=10_000)
        began = time.process_time()
        observer = Observer(hub)
        found = observer.see(partial(views.overview, observer))
        took_s = time.process_time() - began
        assert (len(found["groups"]), len(found["topics"])) == (200, 1_000)
        assert sum(row["partitions"] for row in found["groups"]) == 10_000
        assert took_s < 2.0
        for number in range(7):
            key = Keys(f"group-{number * 20:03d}").checkpoint(topics[0].id, 0)
            hub.registry.commit(put={key: Checkpoint(0, time.time(), "m", 2).dump()})
        observer.forget()
        with counted_calls(hub.registry) as calls:
            observer.see(lambda: views.overview(observer))
        assert calls == {"scan": 7}
        observer.close()
