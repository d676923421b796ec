"""Queues that are deleted, and perhaps made again, while others use them."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest

from pxrs import ConsumeOnce, QueueListener
from pxrs.errors import (
    Closed,
    InvalidItem,
    NotPermitted,
    OutcomeUnknown,
    PxrsError,
    RegistryUnavailable,
    TransactionTooLarge,
    UnknownQueue,
)
from pxrs.hub import Hub
from pxrs.queue.combine import Combiner
from pxrs.queue.records import QUEUES
from pxrs.registry.contract import ABSENT, Commit
from pxrs.registry.memory import LIMITS
from pxrs.registry.steps import Write
from pxrs.testing.hooked import HookedRegistry, SharedStore, store_of, take_value
from pxrs.testing.waiting import aside
from tests.unit.queue_faults import PATIENCE_S, RecountingRegistry, eventually, is_waiting, raise_once, values

# Queues that are deleted, and perhaps made again, within the second for which their settings are known.


@pytest.mark.parametrize("kind", [HookedRegistry, RecountingRegistry])
@pytest.mark.parametrize("is_made_again", [False, True])
def test_z2_r4_what_a_transaction_puts_into_a_queue_that_was_just_deleted_is_not_lost(
    place: SharedStore, is_made_again: bool, kind: type[HookedRegistry]
) -> None:
    mine, other = place.open(kind(place.store)), place.open(kind(place.store))
    source = mine.create_queue("source")
    mine.create_queue("target")
    source.put("coin")
    other.queue("target").put("warm")
    tx = other.transaction()
    assert tx.take("source", timeout=PATIENCE_S) is not None
    tx.put("target", "coin")
    mine.delete_queue("target")
    if is_made_again:
        mine.create_queue("target")
    with pytest.raises(UnknownQueue):
        tx.commit()
    assert tx.outcome() == "rolled back"
    assert values(mine, "source") == [b"coin"]
    check_no_leftovers(mine)


@pytest.mark.parametrize("kind", [HookedRegistry, RecountingRegistry])
@pytest.mark.parametrize("is_strict", [False, True])
def test_z2_r4_a_put_into_a_queue_that_was_just_made_again_is_in_the_new_one(
    place: SharedStore, is_strict: bool, kind: type[HookedRegistry]
) -> None:
    mine, other = place.open(kind(place.store)), place.open(kind(place.store))
    for before in (False, True):
        mine.create_queue("q", fifo=before)
        handle = other.queue("q")
        handle.put("warm")
        mine.delete_queue("q")
        mine.create_queue("q", fifo=is_strict)
        handle.put("one")
        handle.put_many(["two", "three"])
        assert values(mine, "q") == [b"one", b"three", b"two"]
        check_no_leftovers(mine)
        mine.delete_queue("q")


def test_z2_a_put_into_a_queue_that_was_just_deleted_is_refused(place: SharedStore) -> None:
    mine, other = place.open(), place.open()
    mine.create_queue("q")
    handle = other.queue("q")
    handle.put("warm")
    mine.delete_queue("q")
    for put in (lambda: handle.put("x"), lambda: handle.put_many(["x"])):
        with pytest.raises(UnknownQueue):
            put()
    check_no_leftovers(mine)


def test_z7_an_item_with_a_priority_is_refused_by_a_queue_that_was_made_again_as_a_strict_one(
    place: SharedStore,
) -> None:
    mine, other = place.open(), place.open()
    mine.create_queue("q")
    handle = other.queue("q")
    handle.put("warm", priority=1)
    mine.delete_queue("q")
    mine.create_queue("q", fifo=True)
    with pytest.raises(InvalidItem, match="is a FIFO queue"):
        handle.put("x", priority=1)
    assert values(mine, "q") == []


@pytest.mark.parametrize("has_put", [False, True], ids=["reads its existence", "has read its existence"])
def test_z5_a_dead_letter_is_not_tried_again_in_a_strict_queue_that_was_just_deleted(
    place: SharedStore, has_put: bool
) -> None:
    mine, other = place.open(), place.open()
    mine.create_queue("q", policy=ConsumeOnce(), fifo=True).put("x")
    if has_put:
        other.queue("q").put("y")
    tx = other.transaction()
    assert tx.take("q", timeout=PATIENCE_S) is not None
    tx.rollback("bad")
    dead = other.queue("q").dead_letters()
    entries = list(dead._chosen(other.queue("q").settings, None))
    mine.delete_queue("q")
    dead._chosen = lambda queue, ids: iter(entries)  # type: ignore[method-assign]
    with pytest.raises(UnknownQueue):
        dead.retry()


def check_no_leftovers(hub: Hub) -> None:
    known = {queue.settings.id for queue in hub.queues()}
    for folder in ("items/", "standing/", "deleted/"):
        assert {entry.key.split("/")[1] for entry in hub.registry.scan(folder)} <= known


def test_z8_puts_into_one_queue_are_committed_together(place: SharedStore) -> None:
    registry = HookedRegistry(place.store)
    combiner = Combiner(registry)
    version = registry.commit(put={"there": b""})["there"]
    commits: list[Commit] = []
    inside, gate = threading.Event(), threading.Event()

    def pause(commit: Commit) -> None:
        commits.append(commit)
        inside.set()
        gate.wait(PATIENCE_S)

    registry.before = pause

    def put(key: str, expected: int) -> Future[dict[str, int]]:
        return aside(lambda: combiner.commit(Write({"there": expected, key: ABSENT}, {key: b""})))

    first = put("a", version)
    assert inside.wait(PATIENCE_S)
    others = [put("b", version), put("c", version)]
    eventually(lambda: len(combiner._waiting) == 2)
    stale = put("d", version + 1)
    eventually(lambda: len(combiner._waiting) == 3)
    changes = aside(lambda: combiner.commit(Write({"there": version}, {"there": b"x"})))
    eventually(lambda: len(combiner._waiting) == 4)
    gate.set()
    for each in (first, *others, changes):
        assert each.result(PATIENCE_S)
    assert isinstance(stale.exception(PATIENCE_S), PxrsError)
    assert sorted(commits[1].put) == ["b", "c"]
    assert list(commits[1].expect).count("there") == 1


def test_a_commit_that_waits_for_those_of_other_threads_is_given_up_after_the_timeout_and_not_sent(
    place: SharedStore,
) -> None:
    """While the store does not answer, each commit before it takes the whole `timeout`."""
    registry = HookedRegistry(place.store)
    registry.timeout_s = 0.2
    combiner = Combiner(registry)
    inside, gate = threading.Event(), threading.Event()

    def hang(commit: Commit) -> None:
        inside.set()
        gate.wait(PATIENCE_S)

    registry.before = hang
    first = aside(lambda: combiner.commit(Write({"a": ABSENT}, {"a": b""})))
    assert inside.wait(PATIENCE_S)
    second = aside(lambda: combiner.commit(Write({"b": ABSENT}, {"b": b""})))
    error = second.exception()
    assert isinstance(error, RegistryUnavailable)
    assert "took 0.2 s (`timeout` of the address), so this one was not sent" in str(error)
    gate.set()
    assert first.result()
    assert [entry.key for entry in registry.scan("")] == ["a"]


def test_w4_a_put_that_a_server_does_not_permit_fails_alone_when_it_was_merged_with_others(place: SharedStore) -> None:
    registry = HookedRegistry(place.store)
    combiner = Combiner(registry)
    inside, gate = threading.Event(), threading.Event()

    def refuse(commit: Commit) -> None:
        inside.set()
        gate.wait(PATIENCE_S)
        if any(key.startswith("secret/") for key in commit.put):
            raise NotPermitted("the token does not permit this")

    registry.before = refuse

    def put(key: str) -> Future[dict[str, int]]:
        return aside(lambda: combiner.commit(Write({key: ABSENT}, {key: b""})))

    first = put("mail/0")
    assert inside.wait(PATIENCE_S)
    puts = {}
    for count, key in enumerate(("mail/1", "secret/1", "mail/2", "secret/2", "mail/3"), 1):
        puts[key] = put(key)
        eventually(lambda count=count: len(combiner._waiting) == count)
    gate.set()
    assert first.result()
    failed = {key for key, each in puts.items() if isinstance(each.exception(PATIENCE_S), NotPermitted)}
    assert failed == {"secret/1", "secret/2"}
    assert [entry.key for entry in registry.scan("")] == ["mail/0", "mail/1", "mail/2", "mail/3"]


def test_z8_that_the_queues_are_there_counts_in_the_limits_of_a_transaction(place: SharedStore) -> None:
    hub, registry = place.hooked()
    registry.limits = replace(LIMITS, commit_keys_max=20)
    names = [f"q{number}" for number in range(12)]
    for name in names:
        hub.create_queue(name, fifo=name.endswith("1"))
    tx = hub.transaction()

    def put_much() -> None:
        for _ in range(20):
            for name in names:
                tx.put(name, "x")

    with pytest.raises(TransactionTooLarge):
        put_much()
    tx.commit()
    hub.create_queue("many", fifo=True).put_many([f"{number}" for number in range(100)])
    assert hub.queue("many").depth().ready == 100


def delete_and_fail(place: SharedStore, when: str) -> Hub:
    """A queue whose deletion was begun, and the hub of the one who did."""
    hub, registry = place.hooked()
    hub.create_queue("q").put_many(["1", "2"])
    if when == "at once":
        registry.after = raise_once(
            lambda commit: any(key.startswith(QUEUES) for key in commit.delete), OutcomeUnknown("?")
        )
    else:
        registry.before = raise_once(
            lambda commit: any("/ready/" in key for key in commit.delete), RegistryUnavailable("away")
        )
    with pytest.raises((RegistryUnavailable, OutcomeUnknown)):
        hub.delete_queue("q")
    assert hub.registry.scan("items/")
    return hub


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_deletion_that_was_cut_short_can_be_repeated(place: SharedStore, when: str) -> None:
    hub = delete_and_fail(place, when)
    hub.delete_queue("q")
    for folder in ("items/", "standing/", "deleted/"):
        assert not hub.registry.scan(folder)
    with pytest.raises(UnknownQueue):
        hub.delete_queue("q")


def test_a_deletion_that_was_cut_short_is_finished_by_whoever_sweeps(place: SharedStore) -> None:
    delete_and_fail(place, "later")
    other = place.open()
    queue = other.create_queue("other")
    assert take_value(other, "other", timeout=0) is None
    eventually(lambda: not other.registry.scan("deleted/"))
    assert all(entry.key.startswith(queue.settings.root) for entry in other.registry.scan("items/"))


# Waiting takers and listeners.


@pytest.mark.parametrize("is_made_again", [False, True])
def test_r2_a_queue_deleted_before_the_watch_ends_the_wait(place: SharedStore, is_made_again: bool) -> None:
    mine, other = place.open(), place.open()
    mine.create_queue("q")
    other.queue("q")  # known there, for a second
    mine.delete_queue("q")
    if is_made_again:
        mine.create_queue("q").put("x")
    with pytest.raises(UnknownQueue):
        aside(lambda: take_value(other, "q")).result(PATIENCE_S)
    if is_made_again:
        assert take_value(other, "q", timeout=PATIENCE_S) == b"x"


def test_z6_a_listener_closes_though_its_queue_was_made_again(place: SharedStore) -> None:
    mine, other = place.open(), place.open()
    mine.create_queue("q")
    handle = other.queue("q")
    mine.delete_queue("q")
    mine.create_queue("q")
    store_of(other).catalog._known.clear()  # a second later
    listener = QueueListener(handle, lambda tx, item: None).start()
    eventually(lambda: is_waiting(other, "q"))
    aside(listener.close).result(PATIENCE_S)


def test_z6_a_listener_that_was_closed_is_not_started_again(place: SharedStore) -> None:
    listener = QueueListener(place.open().create_queue("q"), lambda tx, item: None)
    listener.start().close()
    with pytest.raises(Closed, match="create another one"):
        listener.start()


def test_z2_what_is_put_into_a_queue_that_was_made_again_is_not_lost(place: SharedStore) -> None:
    mine, other = place.open(), place.open()
    source = mine.create_queue("source")
    mine.create_queue("target")
    source.put("work")
    tx = other.transaction()
    item = tx.take("source", timeout=PATIENCE_S)
    assert item is not None
    tx.put("target", item.value)
    mine.delete_queue("target")
    mine.create_queue("target")
    store_of(other).catalog._known.clear()  # a second later
    with pytest.raises(UnknownQueue):
        tx.commit()
    assert tx.outcome() == "rolled back"
    assert (source.depth().ready, mine.queue("target").depth().ready) == (1, 0)
    known = {queue.settings.id for queue in mine.queues()}
    assert {entry.key.split("/")[1] for entry in mine.registry.scan("items/")} <= known


def test_deleted_queues_leave_nothing_behind_in_the_store_or_in_a_process(place: SharedStore) -> None:
    mine, other = place.open(), place.open()
    for _ in range(10):
        mine.create_queue("q", fifo=True).put("x")
        assert take_value(other, "q", timeout=PATIENCE_S) == b"x"
        assert take_value(mine, "q", timeout=0) is None
        mine.delete_queue("q")
        catalog = store_of(other).catalog
        catalog._known = {name: (queue, 0.0) for name, (queue, _) in catalog._known.items()}
    with pytest.raises(UnknownQueue):
        other.queue("q")
    for store in (store_of(mine), store_of(other)):
        eventually(lambda store=store: store.versions.is_empty and not (store._heads or store.keeper._queues))  # type: ignore[misc]
    eventually(lambda: not mine.registry.scan("items/"))
