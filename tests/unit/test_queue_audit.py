"""Work queues: queues deleted while others put, checkpoints and what comes after them, clocks, damage, limits."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pxrs import ConsumeOnce, FixedBackoff, QueueListener
from pxrs.clock import ManualClock
from pxrs.consumer.consumer import Consumer
from pxrs.errors import (
    Closed,
    InvalidGroup,
    InvalidItem,
    OutcomeLost,
    OutcomeUnknown,
    PartitionLost,
    PxrsError,
    RegistryCorrupt,
    RegistryUnavailable,
    TransactionEnded,
    TransactionTooLarge,
    UnknownQueue,
)
from pxrs.hub import Hub
from pxrs.model import Message
from pxrs.queue.combine import Combiner
from pxrs.queue.handle import QueueHandle
from pxrs.queue.outcomes import OutcomeSweep, Slot, dump_outcome, resolve
from pxrs.queue.records import OUTCOMES, QUEUES
from pxrs.queue.transaction import Outcome, Transaction
from pxrs.registry.contract import ABSENT, Commit, Entry
from pxrs.registry.memory import LIMITS, MemoryStore
from pxrs.registry.steps import Write, drive
from pxrs.testing import waiting
from pxrs.testing.hooked import HookedRegistry, SharedStore, store_of, take_value, wall_time_shifted
from pxrs.testing.waiting import aside
from tests.unit.queue_heads import is_waiting

PATIENCE_S = 30.0
eventually = partial(waiting.eventually, patience_s=PATIENCE_S)


class RecountingRegistry(HookedRegistry):
    """As ZooKeeper has it: the versions of a key that is made again are those of the one before it (R4)."""

    def _get(self, key: str) -> Entry | None:
        found = super()._get(key)
        return replace(found, version=1) if found is not None and key.startswith(QUEUES) else found

    def _commit(self, commit: Commit) -> dict[str, int]:
        expect = dict(commit.expect)
        for key, version in commit.expect.items():
            if key.startswith(QUEUES) and version == 1 and (found := super()._get(key)) is not None:
                expect[key] = found.version
        return super()._commit(replace(commit, expect=expect))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(10_000)


@pytest.fixture
def place(clock: ManualClock) -> Iterator[SharedStore]:
    with ExitStack() as stack:
        yield SharedStore(stack, MemoryStore(clock))


def values(hub: Hub, queue: str) -> list[bytes]:
    return sorted(item.value for item in hub.queue(queue).peek(100))


def once(matches: Callable[[Commit], bool], error: BaseException) -> Callable[[Commit], None]:
    """Raise this at the first commit that is such a one."""
    left = [error]

    def hook(commit: Commit) -> None:
        if left and matches(commit):
            raise left.pop()

    return hook


def names_slots(commit: Commit) -> bool:
    return any(key.startswith(OUTCOMES) for key in commit.put)


def gives_back(commit: Commit) -> bool:
    return any("/inflight/" in key for key in commit.delete) and any("/ready/" in key for key in commit.put)


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
    with pytest.raises(InvalidItem, match="first in, first out"):
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
        registry.after = once(lambda commit: any(key.startswith(QUEUES) for key in commit.delete), OutcomeUnknown("?"))
    else:
        registry.before = once(
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


# From topic to queue.


def with_topic(hub: Hub, count: int, partitions: int = 1) -> Hub:
    hub.create_topic("t", partitions=partitions)
    hub.create_queue("jobs")
    with hub.producer("t") as out:
        for number in range(count):
            out.send(b"%d" % number, partition=number % partitions)
    return hub


def offsets(messages: list[Message]) -> list[int]:
    return [message.offset for message in messages]


@pytest.mark.parametrize("fault", ["none", "lost reply"])
def test_z1_what_is_handed_out_after_a_checkpoint_is_not_of_that_transaction(place: SharedStore, fault: str) -> None:
    hub, registry = place.hooked()
    with_topic(hub, 6)
    with hub.consumer("t", "g") as inbox:
        first = inbox.poll(3, timeout=PATIENCE_S)
        tx = hub.transaction()
        tx.put("jobs", "of the first")
        tx.checkpoint(inbox)
        second = inbox.poll(3, timeout=PATIENCE_S)
        if fault == "lost reply":
            registry.after = once(names_slots, OutcomeUnknown("?"))
            with pytest.raises(OutcomeUnknown):
                tx.commit()
            assert tx.outcome() == "committed"
        else:
            tx.commit()
        assert (offsets(first), offsets(second)) == ([0, 1, 2], [3, 4, 5])
        inbox._member.commit()  # what the member's thread does by itself
        assert hub.group("g").describe().partitions[0].checkpoint == 3
        if fault == "lost reply":
            assert offsets(inbox.poll(3, timeout=0.2)) == []  # the second is done by asking for more
            return
        tx = hub.transaction()
        tx.checkpoint(inbox)
        tx.rollback()
        assert offsets(inbox.poll(3, timeout=PATIENCE_S)) == [3, 4, 5]


def test_z1_a_transaction_over_several_polls_is_done_up_to_its_last_checkpoint(place: SharedStore) -> None:
    hub = with_topic(place.open(), 6)
    with hub.consumer("t", "g") as inbox:
        tx = hub.transaction()
        for _ in range(2):
            assert inbox.poll(2, timeout=PATIENCE_S)
            tx.checkpoint(inbox)
        assert offsets(inbox.poll(2, timeout=PATIENCE_S)) == [4, 5]
        tx.commit()
    assert hub.group("g").describe().partitions[0].checkpoint == 4


@pytest.mark.parametrize("how", ["poll", "for"])
def test_z1_what_was_read_beside_an_open_transaction_is_neither_lost_nor_doubled(place: SharedStore, how: str) -> None:
    hub = with_topic(place.open(), 12, partitions=3)
    seen: list[bytes | None] = []
    tx = hub.transaction()

    def read(inbox: Consumer, messages: list[Message]) -> None:
        seen.extend(message.value for message in messages)
        if len(seen) == 1:
            tx.put("jobs", "of the first")
            tx.checkpoint(inbox)
        elif len(seen) == 7:
            tx.commit()

    with hub.consumer("t", "g", until="end") as inbox:
        if how == "poll":
            while messages := inbox.poll(1, timeout=PATIENCE_S):
                read(inbox, messages)
        else:
            for message in inbox:
                read(inbox, [message])
    assert sorted(seen, key=lambda value: int(value or b"")) == [b"%d" % number for number in range(12)]
    assert [each.checkpoint for each in hub.group("g").describe().partitions] == [4, 4, 4]


def test_z1_a_checkpoint_that_its_commit_would_refuse_is_refused_at_once(place: SharedStore) -> None:
    hub = with_topic(place.open(), 2)
    tx = hub.transaction()
    with hub.consumer("t", "g", ack="manual") as inbox:
        inbox.poll(1, timeout=PATIENCE_S)
        with pytest.raises(InvalidGroup, match="ack='auto'"):
            tx.checkpoint(inbox)
    errors: list[BaseException | None] = []

    def handle(message: Message) -> None:
        errors.append(aside(lambda: tx.checkpoint(running)).exception(PATIENCE_S))

    with hub.consumer("t", "h", until="end") as running:
        running.run(handle)
    assert [type(error) for error in errors] == [InvalidGroup] * 2
    with pytest.raises(Closed):
        tx.checkpoint(running)


def lose_partition(inbox: Consumer) -> None:
    lane = inbox._lanes[0]
    inbox._member.lease.expire()  # type: ignore[union-attr]
    inbox._member.wake()
    eventually(lambda: inbox._lanes.get(0) not in (None, lane))


@pytest.mark.parametrize("before", ["rollback", "reading"])
def test_z1_a_partition_that_was_lost_before_does_not_refuse_a_later_transaction(
    place: SharedStore, before: str
) -> None:
    hub = with_topic(place.open(), 4)
    with hub.consumer("t", "g") as inbox:
        assert inbox.poll(2, timeout=PATIENCE_S)
        tx = hub.transaction()
        if before == "rollback":
            tx.checkpoint(inbox)
        lose_partition(inbox)
        tx.rollback()
        messages = inbox.poll(2, timeout=PATIENCE_S)
        with hub.transaction() as tx:
            tx.put("jobs", "x")
            tx.checkpoint(inbox)
        assert hub.group("g").describe().partitions[0].checkpoint == messages[-1].offset + 1


def test_z1_a_partition_lost_between_the_poll_and_the_checkpoint_refuses_the_transaction(place: SharedStore) -> None:
    hub = with_topic(place.open(), 4)
    with hub.consumer("t", "g") as inbox:
        assert inbox.poll(2, timeout=PATIENCE_S)
        lose_partition(inbox)
        tx = hub.transaction()
        tx.put("jobs", "x")
        tx.checkpoint(inbox)
        with pytest.raises(PartitionLost):
            tx.commit()
    assert values(hub, "jobs") == []


# Interrupts, and ends that come from elsewhere.


def test_r5_an_interrupt_as_a_commit_begins_keeps_no_item(place: SharedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = place.open()
    hub.create_queue("q").put("x")
    now, left = place.store.clock.now, [KeyboardInterrupt]

    def interrupted() -> float:
        if left and sys._getframe(1).f_code.co_name == "_commit_as":
            raise left.pop()
        return now()

    monkeypatch.setattr(place.store.clock, "now", interrupted)
    with pytest.raises(KeyboardInterrupt), hub.transaction() as tx:
        assert tx.take("q", timeout=PATIENCE_S) is not None
    assert not left
    assert tx.outcome() == "rolled back"
    assert take_value(hub, "q", timeout=PATIENCE_S) == b"x"


def test_r5_a_slot_that_was_never_sent_is_settled_however_old_the_machine(place: SharedStore) -> None:
    registry = place.open().registry
    steps = resolve(Slot(f"{OUTCOMES}taker-1"), "transaction", registry.clock.now, time.time())
    assert not drive(steps, registry)


def test_z2_items_whose_choice_was_interrupted_are_taken_by_this_process(place: SharedStore) -> None:
    hub = place.open()
    queue = hub.create_queue("q")
    assert take_value(hub, "q", timeout=0) is None
    head = store_of(hub).head(queue.settings)
    share_out, left = head._share_out, [KeyboardInterrupt]

    def interrupted(count: int) -> Any:
        found = share_out(count)
        if found and left:
            raise left.pop()
        return found

    head._share_out = interrupted
    waiting = aside(lambda: take_value(hub, "q"))
    eventually(lambda: is_waiting(hub, "q"))
    queue.put("x")
    with pytest.raises(KeyboardInterrupt):
        waiting.result(PATIENCE_S)
    assert aside(lambda: take_value(hub, "q")).result(PATIENCE_S) == b"x"


def test_z2_a_block_whose_hub_was_closed_meanwhile_does_not_end_as_if_it_had_committed(place: SharedStore) -> None:
    hub, observer = place.open(), place.open()
    hub.create_queue("q").put("x")
    tx = hub.transaction()

    def work() -> None:
        with tx:
            assert tx.take("q", timeout=PATIENCE_S) is not None
            aside(hub.close).result(PATIENCE_S)

    with pytest.raises(Closed):
        work()
    assert tx.outcome() == "rolled back"
    assert values(observer, "q") == [b"x"]


def test_z2_a_take_that_waits_keeps_no_other_thread_of_the_transaction(place: SharedStore) -> None:
    hub = place.open()
    queue = hub.create_queue("q")
    hub.create_queue("other").put("x")
    tx = hub.transaction()
    waiting = aside(lambda: tx.take("q"))
    eventually(lambda: is_waiting(hub, "q"))
    began = time.monotonic()
    assert tx.take("q", timeout=0.05) is None
    assert tx.take("other", timeout=PATIENCE_S) is not None
    tx.rollback()
    assert time.monotonic() - began < PATIENCE_S / 2
    queue.put("late")
    with pytest.raises(TransactionEnded):
        waiting.result(PATIENCE_S)
    assert values(hub, "q") == [b"late"]


# Work that nobody waits for.


@pytest.mark.parametrize("error", [OSError(5, "I/O error"), ValueError("damaged")])
def test_z2_the_keeper_drops_nothing_whatever_goes_wrong(place: SharedStore, error: Exception) -> None:
    hub, registry = place.hooked()
    transactions = []
    for name in ("a", "b"):
        hub.create_queue(name, fifo=True).put(name)
        tx = hub.transaction()
        assert tx.take(name, timeout=PATIENCE_S) is not None
        transactions.append(tx)
    left: list[Exception] = [RegistryUnavailable("away"), RegistryUnavailable("away"), error]

    def fail(commit: Commit) -> None:
        if left and gives_back(commit):
            raise left.pop(0)

    registry.before = fail
    for tx in transactions:
        tx.rollback("no")
    assert [take_value(hub, name, timeout=PATIENCE_S) for name in ("a", "b")] == [b"a", b"b"]
    assert not left


def test_r5_a_damaged_slot_keeps_nothing_else(place: SharedStore) -> None:
    hub, registry = place.hooked()
    for name in ("a", "b"):
        hub.create_queue(name).put(name)
    first, second = hub.transaction(), hub.transaction()
    for tx, name in ((first, "a"), (second, "b")):
        assert tx.take(name, timeout=PATIENCE_S) is not None

    def damage(commit: Commit) -> None:
        slots = [key for key in commit.put if key.startswith(OUTCOMES)]
        if slots:
            registry.after = lambda commit: None
            registry.commit(put=dict.fromkeys(slots, b"damaged"))
            raise OutcomeUnknown("?")

    registry.after = damage
    with pytest.raises(OutcomeUnknown):
        first.commit()
    with pytest.raises(RegistryCorrupt):
        first.outcome()
    registry.before = once(gives_back, RegistryUnavailable("away"))
    second.rollback("no")
    assert take_value(hub, "b", timeout=PATIENCE_S) == b"b"


def test_r5_a_sweeper_whose_clock_is_ahead_removes_no_outcome_early(
    place: SharedStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying, sweeping = place.open(), place.open()
    dying.create_queue("q")
    assert take_value(sweeping, "q", timeout=0) is None
    keeper = store_of(sweeping).keeper
    eventually(lambda: keeper._swept and keeper._deaths is not None)
    with dying.transaction() as tx:
        tx.put("q", "x")
    assert len(place.store.scan(OUTCOMES, None, None)) == 1
    with wall_time_shifted(clock, 3_700):
        place.store.end_lease(store_of(dying)._taker.lease.id)
        sweeps: list[None] = []
        registry = sweeping.registry
        scan = registry.scan

        def counted(prefix: str, *rest: Any) -> list[Entry]:
            if prefix == OUTCOMES:
                sweeps.append(None)
            return scan(prefix, *rest)

        monkeypatch.setattr(registry, "scan", counted)
        for _ in range(2):
            done = len(sweeps)
            keeper._deaths.wake()
            keeper.wake()
            eventually(lambda done=done: len(sweeps) > done)  # type: ignore[misc]
        assert len(place.store.scan(OUTCOMES, None, None)) == 1
    clock.advance(3_700)
    keeper.wake()
    eventually(lambda: not place.store.scan(OUTCOMES, None, None))


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


# Waits, deletions and outcomes beside each other.


def test_z6_a_listener_beside_others_who_wait_can_be_closed(place: SharedStore) -> None:
    hub = place.open()
    queue = hub.create_queue("q")
    for _ in range(3):
        waits = [aside(lambda: take_value(hub, "q")) for _ in range(2)]
        eventually(lambda: is_waiting(hub, "q"))
        listener = QueueListener(queue, lambda tx, item: None, threads=2).start()
        eventually(lambda: sum(head._waiters for head in store_of(hub)._heads.values()) == 4)
        aside(listener.close).result(PATIENCE_S)
        queue.put_many(["a", "b"])
        assert sorted(each.result(PATIENCE_S) or b"" for each in waits) == [b"a", b"b"]


def test_r5_an_outcome_that_nobody_can_tell_any_more_ends_and_wedges_nobody(
    place: SharedStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = place.open()
    queue = hub.create_queue("q")
    hub.create_topic("t", partitions=1)
    with hub.producer("t") as out:
        for number in range(3):
            out.send(b"%d" % number)
    monkeypatch.setattr(Transaction, "outcome", lost)
    with hub.consumer("t", "g") as inbox:
        (first,) = inbox.poll(1)
        with hub.transaction() as tx:
            tx.checkpoint(inbox)
            tx._state = "rolled back"  # what it says is asked of `outcome`
        assert inbox.poll(1) == [first], "it comes again"
    failing = QueueListener(queue, lambda tx, item: None)
    queue.put("a")
    failing.start()
    eventually(lambda: failing.failed >= 1)
    monkeypatch.undo()
    queue.put("b")
    eventually(lambda: failing.committed == 1)
    failing.close()


def lost(transaction: Transaction) -> Outcome:
    raise OutcomeLost("not on record any more")


def test_r4_a_deletion_takes_no_other_queue_of_the_same_name(
    place: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = RecountingRegistry(place.store)
    hub, other = place.open(registry), place.open()
    hub.create_queue("q")

    commit = registry._commit

    def late(given: Commit) -> dict[str, int]:
        monkeypatch.undo()
        other.delete_queue("q")
        other.create_queue("q").put("precious")
        return commit(given)

    monkeypatch.setattr(registry, "_commit", late)
    with pytest.raises(UnknownQueue):
        hub.delete_queue("q")
    with other.transaction() as tx:
        item = tx.take("q", timeout=0)
        assert item is not None
        assert item.value == b"precious"


def test_z8_partitions_that_wait_for_their_checkpoint_are_not_put_into_the_transaction(place: SharedStore) -> None:
    hub, registry = place.hooked()
    registry.limits = replace(LIMITS, commit_keys_max=20)
    hub.create_queue("q")
    hub.create_topic("t", partitions=40)
    with hub.producer("t") as out:
        for number in range(40):
            out.send(b"x", partition=number)
    with hub.consumer("t", "g", commit_interval=3600, until="end") as inbox:
        for _ in range(35):
            inbox.poll(1)
        with hub.transaction() as tx:
            tx.put("q", "done")
            tx.checkpoint(inbox)
        assert tx.outcome() == "committed"


def test_r5_slots_of_the_long_gone_are_removed_by_sweepers_that_live_shortly(
    place: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = place.open().registry
    registry.commit(put={f"{OUTCOMES}gone-0": dump_outcome("t", "committed", time.time())})
    drive(OutcomeSweep().sweep(set(), registry.clock.now(), time.time()), registry)
    assert registry.scan(OUTCOMES)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 8 * 86_400)
    drive(OutcomeSweep().sweep(set(), registry.clock.now(), time.time()), registry)
    assert not registry.scan(OUTCOMES)
