"""Queues with `fifo=True`: order, turns and backoffs."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from pxrs import ConsumeTimes, FixedBackoff
from pxrs.errors import (
    TransactionLost,
    TransactionTooLarge,
)
from pxrs.hub import Hub
from pxrs.registry.contract import Commit, Entry
from pxrs.registry.memory import LIMITS
from pxrs.testing.hooked import SharedStore, store_of, take_value, wall_time_shifted
from pxrs.testing.waiting import aside
from tests.unit.queue_faults import PATIENCE_S, die, eventually, fail, is_waiting, takes

# Order.


def test_z7_strict_fifo_is_one_transaction_at_a_time_in_order(place: SharedStore, hub: Hub) -> None:
    queue = hub.create_queue("q", fifo=True)
    queue.put_many(list("abc"))
    other = place.open()
    with hub.transaction() as tx, other.transaction() as theirs:
        assert [item.value for item in tx.take_many("q", 2)] == [b"a", b"b"]
        assert theirs.take("q", timeout=0) is None
        tx.rollback()
        assert [item.value for item in theirs.take_many("q", 1)] == [b"a"]
        assert [item.value for item in theirs.take_many("q", 5)] == [b"b", b"c"]


def test_z7_in_a_strict_queue_an_item_that_came_back_is_the_next_and_all_wait_for_it(
    place: SharedStore, hub: Hub
) -> None:
    queue = hub.create_queue("q", ConsumeTimes(2), fifo=True, backoff=FixedBackoff(2))
    queue.put_many(list("abc"))
    fail(hub, "q")
    with hub.transaction() as tx:
        place.clock.advance(1.9)
        assert tx.take("q", timeout=0) is None
    place.clock.advance(0.1)
    fail(hub, "q")
    assert [item.value for item in queue.dead_letters()] == [b"a"]
    with hub.transaction() as tx:
        assert [item.value for item in tx.take_many("q", 3)] == [b"b", b"c"]
        queue.dead_letters().retry()
        tx.put("q", "d")
    with hub.transaction() as tx:
        assert [item.value for item in tx.take_many("q", 3)] == [b"a", b"d"]


def test_z7_the_turn_of_a_dead_process_goes_to_the_next_with_its_items_first(place: SharedStore, hub: Hub) -> None:
    hub.create_queue("q", fifo=True).put_many(list("abc"))
    other = place.open()
    with other.transaction() as theirs:
        assert theirs.take("q") is not None
        theirs.rollback()
    tx = hub.transaction()
    assert len(tx.take_many("q", 2)) == 2
    die(place, hub)
    with other.transaction() as theirs:
        assert [theirs.take("q", timeout=PATIENCE_S).value for _ in range(3)] == [b"a", b"b", b"c"]  # type: ignore[union-attr]
        with pytest.raises(TransactionLost):
            tx.commit()


def test_q3_the_order_of_a_strict_queue_is_that_of_the_commits(place: SharedStore, hub: Hub) -> None:
    queue = hub.create_queue("q", fifo=True)
    other = place.open()
    first, second = hub.transaction(), other.transaction()
    first.put("q", "put first, committed last")
    second.put("q", "put last, committed first")
    second.commit()
    first.commit()
    assert [item.value for item in queue.peek(2)] == [b"put last, committed first", b"put first, committed last"]


def test_q3_many_putters_of_a_strict_queue_leave_no_gap(place: SharedStore) -> None:
    hubs = [place.open() for _ in range(4)]
    hubs[0].create_queue("q", fifo=True)

    def put(hub: Hub, number: int) -> None:
        for count in range(25):
            hub.queue("q").put(f"{number}-{count}")

    threads = [threading.Thread(target=put, args=(hub, number)) for number, hub in enumerate(hubs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = [item.value.decode() for item in hubs[0].queue("q").peek(200)]
    assert len(values) == 100
    for number in range(4):
        assert [value for value in values if value.startswith(f"{number}-")] == [f"{number}-{n}" for n in range(25)]


# Clocks.


def given_back(hub: Hub, pause: float) -> None:
    hub.create_queue("q", fifo=True, backoff=FixedBackoff(pause)).put("x")
    tx = hub.transaction()
    assert tx.take("q", timeout=PATIENCE_S) is not None
    tx.rollback("no")


def test_z7_a_strict_queue_does_not_wait_for_a_clock_that_was_set_back(place: SharedStore) -> None:
    hub = place.open()
    given_back(hub, 0.5)
    with wall_time_shifted(place.clock, -3_600):
        assert take_value(hub, "q", timeout=PATIENCE_S) == b"x"


def test_z7_one_that_waits_for_a_backoff_sees_that_the_clock_was_set_forward(place: SharedStore) -> None:
    hub = place.open()
    given_back(hub, 20)
    waiting = aside(lambda: take_value(hub, "q"))
    eventually(lambda: is_waiting(hub, "q"))
    with wall_time_shifted(place.clock, 30):
        assert waiting.result(PATIENCE_S) == b"x"


def test_z7_clocks_that_differ_a_little_do_not_undo_a_backoff(place: SharedStore) -> None:
    hub = place.open()
    given_back(hub, 20)
    with wall_time_shifted(place.clock, -2):
        assert take_value(hub, "q", timeout=0) is None


# Scans and sizes.


def test_z7_r1_a_scan_that_misses_an_earlier_item_does_not_change_a_strict_order(place: SharedStore) -> None:
    hub, registry = place.hooked()
    hub.create_queue("q", fifo=True)
    other = place.open().queue("q")
    left = [True]

    def scanned(prefix: str, found: list[Entry]) -> list[Entry]:
        if not (left and prefix.endswith("/ready/")):
            return found
        left.clear()
        other.put("1")  # behind the scan, which has passed its place
        other.put("2")  # and before it
        return place.store.scan(prefix, None, None)[1:2]

    registry.scanned = scanned
    assert [take_value(hub, "q", timeout=1) for _ in range(2)] == [b"1", b"2"]


def test_z7_what_was_taken_while_the_sweeper_looked_comes_back_before_the_turn_is_free(place: SharedStore) -> None:
    hub, registry = place.hooked()
    queue = hub.create_queue("q", fifo=True)
    queue.put("0")
    assert take_value(hub, "q", timeout=PATIENCE_S) == b"0"
    keeper = store_of(hub).keeper
    eventually(lambda: keeper._swept and keeper._deaths is not None)
    queue.put_many(["1", "2"])
    dying, next_one = place.open(), place.open()
    held = [dying.transaction(), next_one.transaction()]
    taken: list[bytes] = []

    def take_and_die(prefix: str, found: list[Entry]) -> list[Entry]:
        if prefix.endswith("/inflight/") and not taken:
            item = held[0].take("q", timeout=1)
            assert item is not None
            taken.append(item.value)
            store_of(dying)._taker.lease.close()
        return found

    def be_quick(commit: Commit) -> None:
        if len(taken) == 1 and queue.settings.turn in commit.put and not takes(commit):
            item = held[1].take("q", timeout=0)
            taken.append(b"nothing" if item is None else item.value)

    registry.scanned, registry.after = take_and_die, be_quick
    keeper._deaths.wake()
    keeper.wake()
    eventually(lambda: len(taken) == 2)
    assert taken == [b"1", b"1"]


def test_z8_the_bytes_of_keys_count_before_the_store_refuses(place: SharedStore) -> None:
    hub, registry = place.hooked()
    registry.limits = replace(LIMITS, commit_keys_max=1_000, commit_bytes_max=800_000, value_bytes_max=700_000)
    queue = hub.create_queue("q")
    tx = hub.transaction()

    def put_much() -> None:
        for _ in range(900):
            tx.put("q", b"v", key=b"k" * 1024)

    with pytest.raises(TransactionTooLarge, match="bytes"):
        put_much()
    tx.commit()
    assert queue.depth().ready > 300
