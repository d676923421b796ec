"""Damaged records, clocks that differ, limits of a store, and mistakes of callers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pxrs import ConsumeOnce
from pxrs.errors import (
    InvalidItem,
    RegistryCorrupt,
    TransactionTooLarge,
    UnknownQueue,
)
from pxrs.hub import Hub
from pxrs.queue.handle import QueueHandle
from pxrs.queue.records import OUTCOMES, QUEUES
from pxrs.registry.memory import LIMITS
from pxrs.testing.hooked import SharedStore, take_value, wall_time_shifted
from tests.unit.queue_faults import PATIENCE_S, eventually, values, with_topic

# Limits.


def test_z8_what_is_too_much_for_the_store_is_told_by_the_take(place: SharedStore) -> None:
    hub, registry = place.hooked()
    registry.limits = replace(LIMITS, commit_bytes_max=40_000, value_bytes_max=20_000)
    hub.create_queue("out")
    hub.create_queue("q").put_many(["x"] * 300)
    tx = hub.transaction()
    for _ in range(3):
        tx.put("out", b"x" * 7_000)
    taken = 0

    def take_all() -> None:
        nonlocal taken
        while items := tx.take_many("q", 60, timeout=0):
            taken += len(items)

    with pytest.raises(TransactionTooLarge, match="bytes"):
        take_all()
    tx.commit()
    assert 50 < taken < 300
    assert (hub.queue("q").depth().ready, hub.queue("out").depth().ready) == (300 - taken, 3)


@pytest.mark.parametrize("limit", [{"commit_keys_max": 12}, {"commit_bytes_max": 9_000}])
def test_z8_what_is_too_much_for_the_store_is_told_by_the_checkpoint(place: SharedStore, limit: dict[str, int]) -> None:
    hub, registry = place.hooked()
    registry.limits = replace(LIMITS, **limit)
    with_topic(hub, 8, partitions=8)
    with hub.consumer("t", "g", until="end") as inbox:
        eventually(lambda: len(inbox.assignment) == 8)
        tx = hub.transaction()

        def read_all() -> None:
            for _ in range(8):
                assert inbox.poll(1, timeout=PATIENCE_S)
                tx.checkpoint(inbox)

        with pytest.raises(TransactionTooLarge):
            read_all()
        tx.commit()
    assert 2 <= sum(each.checkpoint or 0 for each in hub.group("g").describe().partitions) < 8


# Damage, and what is given by mistake.


def test_z7_a_damaged_turn_keeps_no_other_queue(place: SharedStore) -> None:
    hub = place.open()
    strict, other = hub.create_queue("a", fifo=True), hub.create_queue("b")
    hub.registry.commit(put={strict.settings.turn: b"damaged"})
    with pytest.raises(RegistryCorrupt):
        take_value(hub, "a", timeout=0)
    other.put("late", delay=0.1)
    place.clock.advance(0.1)
    assert take_value(hub, "b", timeout=PATIENCE_S) == b"late"


def test_z7_a_damaged_number_is_told_for_what_it_is(place: SharedStore) -> None:
    hub = place.open()
    strict = hub.create_queue("q", fifo=True)
    hub.registry.commit(put={strict.settings.sequence: b"damaged"})
    with pytest.raises(RegistryCorrupt, match="sequence"):
        strict.put("x")


def test_damaged_settings_keep_no_other_queue_from_being_listed(place: SharedStore) -> None:
    hub = place.open()
    hub.create_queue("q")
    hub.registry.commit(put={f"{QUEUES}broken": b"damaged"})
    assert [queue.name for queue in hub.queues()] == ["q"]
    with pytest.raises(RegistryCorrupt):
        hub.queue("broken")
    with pytest.raises(UnknownQueue):
        hub.queue("none")


@pytest.mark.parametrize("is_strict", [False, True])
def test_z5_a_damaged_dead_letter_keeps_no_other(
    place: SharedStore, is_strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    hub = place.open()
    queue = hub.create_queue("q", policy=ConsumeOnce(), fifo=is_strict)
    queue.put_many(["1", "2", "3"])
    tx = hub.transaction()
    ids = [item.id for item in tx.take_many("q", 3, timeout=PATIENCE_S)]
    tx.rollback("bad")
    damaged = hub.registry.scan(queue.settings.dead)[0].key
    hub.registry.commit(put={damaged: b"damaged"})
    dead = queue.dead_letters()
    with caplog.at_level(logging.ERROR):
        assert [item.id for item in dead.list()] == ids[1:]
    assert damaged in caplog.text
    assert dead.retry([ids[1]]) == 1
    assert dead.retry() == 1
    assert values(hub, "q") == [b"2", b"3"]
    assert dead.purge() == 1
    assert len(dead) == 0


def test_a_damaged_item_keeps_no_other_from_being_looked_at(place: SharedStore) -> None:
    hub = place.open()
    queue = hub.create_queue("q")
    queue.put_many(["1", "2"])
    hub.registry.commit(put={hub.registry.scan(queue.settings.ready)[0].key: b"damaged"})
    assert values(hub, "q") == [b"2"]


MISTAKES: dict[str, Callable[[Hub, QueueHandle], Any]] = {
    "list(-1)": lambda hub, queue: queue.dead_letters().list(-1),
    "list of no number": lambda hub, queue: queue.dead_letters().list("3"),  # type: ignore[arg-type]
    "take None": lambda hub, queue: hub.transaction().take(None, timeout=0),  # type: ignore[arg-type]
    "take many True": lambda hub, queue: hub.transaction().take_many(queue, True, timeout=0),
    "put into None": lambda hub, queue: hub.transaction().put(None, "x"),  # type: ignore[arg-type]
    "checkpoint of no consumer": lambda hub, queue: hub.transaction().checkpoint("x"),  # type: ignore[arg-type]
    "put_many of a text": lambda hub, queue: queue.put_many("to: anna"),
    "put_many of bytes": lambda hub, queue: queue.put_many(b"to: anna"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_z2_a_mistake_has_an_error_of_its_own(place: SharedStore, mistake: Callable[[Hub, QueueHandle], Any]) -> None:
    hub = place.open()
    queue = hub.create_queue("q")
    with pytest.raises(InvalidItem):
        mistake(hub, queue)
    assert queue.depth().ready == 0


def test_z2_a_rollback_takes_any_reason(place: SharedStore) -> None:
    hub = place.open()
    queue = hub.create_queue("q", policy=ConsumeOnce())
    queue.put("x")
    tx = hub.transaction()
    assert tx.take("q", timeout=PATIENCE_S) is not None
    tx.rollback(123)  # type: ignore[arg-type]
    assert [item.error for item in queue.dead_letters()] == ["123"]


# Damage, and clocks that differ.


@pytest.mark.parametrize("damage", ["in flight", "outcome", "delayed key", "delayed", "ready"])
def test_z3_z7_a_damaged_record_keeps_nothing_else_from_coming_back(place: SharedStore, damage: str) -> None:
    hub = place.open()
    first, second = hub.create_queue("a"), hub.create_queue("b")
    name, transaction, taker = "5000.00000000000000abcdefabcd.0", "0" * 12, "0" * 32
    key = {
        "in flight": f"{first.settings.inflight}{name}~{transaction}~{taker}",
        "outcome": f"{OUTCOMES}{taker}-1",
        "delayed key": f"{first.settings.delayed}zzz~{name}",
        "delayed": f"{first.settings.delayed}{1:016x}~{name}",
        "ready": f"{second.settings.ready}{name}",
    }[damage]
    dead = f"{second.settings.inflight}5000.00000000000001abcdefabcd.0~{transaction}~{'1' * 32}"
    hub.registry.commit(put={key: b"damaged", dead: b'{"put_at":1,"deliveries":1}\nof a dead process'})
    second.put("delayed", delay=0.1)
    assert take_value(hub, "a", timeout=0) is None  # looked after, and before the other
    found = [take_value(hub, "b", timeout=PATIENCE_S)]
    place.clock.advance(0.1)
    found.append(take_value(hub, "b", timeout=PATIENCE_S))
    assert found == [b"of a dead process", b"delayed"]
    assert hub.registry.get(key) is not None


def test_z7_a_strict_queue_without_backoff_does_not_wait_for_a_clock_that_is_ahead(place: SharedStore) -> None:
    ahead, other = place.open(), place.open()
    ahead.create_queue("q", fifo=True).put("x")
    tx = ahead.transaction()
    assert tx.take("q", timeout=PATIENCE_S) is not None
    with wall_time_shifted(place.clock, 3_600):
        tx.rollback()
    assert take_value(other, "q", timeout=2) == b"x"


@pytest.mark.parametrize("how", ["retry", "purge"])
def test_z5_a_dead_letter_of_a_clock_that_is_ahead_can_be_chosen(place: SharedStore, how: str) -> None:
    ahead, other = place.open(), place.open()
    ahead.create_queue("q", policy=ConsumeOnce()).put_many(["x", "y"])
    tx = ahead.transaction()
    items = tx.take_many("q", 2, timeout=PATIENCE_S)
    with wall_time_shifted(place.clock, 3_600):
        tx.rollback("bad")
    dead = other.queue("q").dead_letters()
    choose = getattr(dead, how)
    assert choose([]) == 0
    assert choose([items[0].id]) == 1
    assert [item.id for item in dead] == [items[1].id]
    assert choose() == 1
    assert len(dead) == 0
