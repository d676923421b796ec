"""Work queues when the worst moment is chosen: leases lost, replies lost, wake-ups missed, interrupts, damage."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import pytest

from pxrs import ConsumeOnce, QueueListener
from pxrs.clock import Clock, ManualClock
from pxrs.consumer.consumer import Consumer
from pxrs.errors import (
    Closed,
    InvalidGroup,
    OutcomeUnknown,
    PartitionLost,
    PxrsError,
    RegistryUnavailable,
    TransactionEnded,
    TransactionTooLarge,
    UnknownQueue,
    UsedAfterFork,
)
from pxrs.hub import Hub
from pxrs.log.memory import MemoryLog
from pxrs.model import Message
from pxrs.queue.combine import Combiner
from pxrs.queue.outcomes import OutcomeSweep
from pxrs.queue.records import OUTCOMES
from pxrs.registry.contract import Commit, Entry
from pxrs.registry.memory import LIMITS, MemoryStore
from pxrs.registry.state import Change
from pxrs.registry.steps import Write, drive
from pxrs.testing import waiting
from pxrs.testing.hooked import HookedRegistry, SharedStore, store_of, take_value, wall_time_shifted
from pxrs.testing.waiting import aside
from tests.unit.queue_heads import is_waiting

PATIENCE_S = 30.0
eventually = partial(waiting.eventually, patience_s=PATIENCE_S)
INTERRUPT_EACH = 7
"""At every so many calls: all of them take half a minute."""


class QuietStore(MemoryStore):
    """As PostgreSQL has it: a quiet commit wakes nobody."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._is_quiet = threading.local()

    def commit(self, commit: Commit) -> dict[str, int]:
        self._is_quiet.now = commit.quiet
        try:
            return super().commit(commit)
        finally:
            self._is_quiet.now = False

    def _apply(self, change: Change) -> int:
        handles = self._handles
        if getattr(self._is_quiet, "now", False):
            self._handles = weakref.WeakSet()
        try:
            return super()._apply(change)
        finally:
            self._handles = handles


@pytest.fixture
def place() -> Iterator[SharedStore]:
    with ExitStack() as stack:
        yield SharedStore(stack, MemoryStore(ManualClock(10_000)))


def once(matches: Callable[[Commit], bool], act: Callable[[Commit], Any]) -> Callable[[Commit], None]:
    """Do this at the first commit that is such a one."""
    left = [act]

    def hook(commit: Commit) -> None:
        if left and matches(commit):
            left.pop()(commit)

    return hook


def takes(commit: Commit) -> bool:
    return any("/inflight/" in key for key in commit.put)


def puts(commit: Commit) -> bool:
    return any("/ready/" in key for key in commit.put)


def lose_the_reply(commit: Commit) -> None:
    raise OutcomeUnknown("the reply was lost")


def be_away(commit: Commit) -> None:
    raise RegistryUnavailable("away")


def values(hub: Hub, queue: str) -> list[bytes]:
    return sorted(item.value for item in hub.queue(queue).peek(100))


# Leases and elections.


def stop_while_looking(place: SharedStore, registry: HookedRegistry) -> Callable[[], int]:
    """At the next look that finds something the process stops for a minute. How often it has looked since."""
    looks: list[int] = []

    def scanned(prefix: str, found: list[Entry]) -> list[Entry]:
        if prefix.endswith("/ready/") and (found or looks):
            looks.append(len(found))
            if len(looks) == 1:
                place.clock.advance(60)
        return found

    registry.scanned = scanned
    return lambda: len(looks)


def test_z3_a_lease_lost_inside_a_take_is_replaced_and_the_item_taken(place: SharedStore) -> None:
    hub, registry = place.hooked()
    queue = hub.create_queue("q")
    assert take_value(hub, "q", timeout=0) is None
    queue.put("x")
    looks = stop_while_looking(place, registry)
    assert aside(lambda: take_value(hub, "q", timeout=1)).result(PATIENCE_S) == b"x"
    assert looks() < 10


def test_z3_z7_a_lease_lost_inside_a_take_of_a_strict_queue_does_not_stall_it(place: SharedStore) -> None:
    hub, registry = place.hooked()
    queue = hub.create_queue("q", fifo=True)
    taking = aside(lambda: take_value(hub, "q"))
    eventually(lambda: is_waiting(hub, "q"))
    looks = stop_while_looking(place, registry)
    queue.put("x")
    assert taking.result(PATIENCE_S) == b"x"
    assert looks() < 20


def test_r5_z7_a_sweeper_whose_election_was_not_answered_still_sweeps(place: SharedStore) -> None:
    hub, registry = place.hooked()
    registry.after = once(lambda commit: any(key.endswith("/sweeper") for key in commit.ephemeral), lose_the_reply)
    hub.create_queue("q").put("late", delay=0.1)
    place.clock.advance(0.1)
    assert take_value(hub, "q", timeout=PATIENCE_S) == b"late"


# Queues that are deleted, and made again.


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
    with pytest.raises(Closed, match="make another one"):
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


# Wake-ups.


def test_r2_one_that_waits_is_woken_when_a_take_of_the_item_it_could_not_see_fails(place: SharedStore) -> None:
    hub, registry = place.hooked()
    hub.create_queue("q").put("x")
    inside, gate = threading.Event(), threading.Event()

    def fail(commit: Commit) -> None:
        inside.set()
        gate.wait(PATIENCE_S)
        raise RegistryUnavailable("timed out")

    registry.before = once(takes, fail)
    first = aside(lambda: take_value(hub, "q", timeout=0))
    assert inside.wait(PATIENCE_S)
    second = aside(lambda: take_value(hub, "q"))
    eventually(lambda: is_waiting(hub, "q"))
    gate.set()
    with pytest.raises(RegistryUnavailable):
        first.result(PATIENCE_S)
    assert second.result(PATIENCE_S) == b"x"


def test_r2_one_that_waits_is_woken_by_the_items_that_did_not_fit_into_anothers_take(place: SharedStore) -> None:
    place = place.on(QuietStore(place.clock))
    hub, registry = place.hooked()
    registry.limits = replace(LIMITS, commit_bytes_max=12_000, value_bytes_max=8_000)
    hub.create_queue("q").put_many([b"x" * 3_000] * 4)
    inside, gate = threading.Event(), threading.Event()

    def pause(commit: Commit) -> None:
        inside.set()
        gate.wait(PATIENCE_S)

    registry.before = once(takes, pause)
    tx = hub.transaction()
    first = aside(lambda: tx.take_many("q", 30, timeout=0))
    assert inside.wait(PATIENCE_S)
    second = aside(lambda: take_value(hub, "q"))
    eventually(lambda: is_waiting(hub, "q"))
    gate.set()
    assert len(first.result(PATIENCE_S)) == 2
    assert second.result(PATIENCE_S) == b"x" * 3_000
    tx.rollback()


def test_r5_z7_the_lost_request_of_a_take_does_not_stall_a_strict_queue(place: SharedStore) -> None:
    place = place.on(QuietStore(place.clock))
    hub, registry = place.hooked()
    queue = hub.create_queue("q", fifo=True)
    taking = aside(lambda: take_value(hub, "q"))
    eventually(lambda: is_waiting(hub, "q"))
    registry.before = once(takes, lose_the_reply)
    queue.put("x")
    assert taking.result(PATIENCE_S) == b"x"


# From topic to queue.


def with_topic(hub: Hub, count: int) -> Hub:
    hub.create_topic("t", partitions=1)
    hub.create_queue("jobs")
    with hub.producer("t") as out:
        for number in range(count):
            out.send(b"%d" % number)
    return hub


def checkpoint_of(hub: Hub) -> int | None:
    return hub.group("g").describe().partitions[0].checkpoint


def value_of(message: Message) -> bytes:
    assert message.value is not None
    return message.value


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def test_z1_r5_a_loop_begun_anew_after_an_unknown_outcome_doubles_nothing(place: SharedStore) -> None:
    hub, registry = place.hooked()
    with_topic(hub, 3)
    registry.after = once(puts, lose_the_reply)
    outcomes = []

    def read(inbox: Consumer) -> None:
        for message in inbox:
            tx = hub.transaction()
            try:
                with tx:
                    tx.put("jobs", value_of(message))
                    tx.checkpoint(inbox)
            except OutcomeUnknown:
                outcomes.append(tx.outcome())
                raise

    with hub.consumer("t", "g", until="end") as inbox:
        with pytest.raises(OutcomeUnknown):
            read(inbox)
        read(inbox)
    assert outcomes == ["committed"]
    assert (values(hub, "jobs"), checkpoint_of(hub)) == (numbers(3), 3)


@pytest.mark.parametrize("how", ["poll", "for"])
def test_z1_messages_whose_transaction_failed_come_again_if_the_reader_goes_on(place: SharedStore, how: str) -> None:
    hub, registry = place.hooked()
    with_topic(hub, 4)
    registry.before = once(puts, be_away)
    failures = []
    with hub.consumer("t", "g", until="end") as inbox:

        def handle(messages: list[Message]) -> None:
            try:
                with hub.transaction() as tx:
                    for message in messages:
                        tx.put("jobs", value_of(message))
                    tx.checkpoint(inbox)
            except RegistryUnavailable as error:
                failures.append(error)

        if how == "poll":
            while messages := inbox.poll(2):
                handle(messages)
        else:
            for message in inbox:
                handle([message])
    assert len(failures) == 1
    assert (values(hub, "jobs"), checkpoint_of(hub)) == (numbers(4), 4)


def test_z1_a_commit_refused_for_a_lost_partition_cannot_be_tried_again(place: SharedStore) -> None:
    hub = with_topic(place.open(), 2)
    with hub.consumer("t", "g") as inbox:
        tx = hub.transaction()
        for message in inbox.poll(10, timeout=PATIENCE_S):
            tx.put("jobs", value_of(message))
        tx.checkpoint(inbox)
        lane = inbox._lanes[0]
        inbox._member.lease.expire()  # type: ignore[union-attr]
        inbox._member.wake()
        eventually(lambda: inbox._lanes.get(0) not in (None, lane))
        with pytest.raises(PartitionLost):
            tx.commit()
        assert tx.outcome() == "rolled back"
        with pytest.raises(TransactionEnded):
            tx.commit()
        with hub.transaction() as tx:
            for message in inbox.poll(10, timeout=PATIENCE_S):
                tx.put("jobs", value_of(message))
            tx.checkpoint(inbox)
    assert (values(hub, "jobs"), checkpoint_of(hub)) == (numbers(2), 2)


def test_z1_r5_trying_again_inside_the_loop_after_an_unknown_outcome_is_refused(place: SharedStore) -> None:
    hub, registry = place.hooked()
    with_topic(hub, 3)
    registry.after = once(puts, lose_the_reply)
    refusals = []
    with hub.consumer("t", "g", until="end") as inbox:
        for message in inbox:
            while True:
                try:
                    with hub.transaction() as tx:
                        tx.put("jobs", value_of(message))
                        tx.checkpoint(inbox)
                    break
                except OutcomeUnknown:
                    continue
                except InvalidGroup as error:
                    refusals.append(str(error))
                    break
    assert (values(hub, "jobs"), checkpoint_of(hub)) == (numbers(3), 3)
    assert len(refusals) == 1
    assert "what was handed out is done" in refusals[0]


@pytest.mark.parametrize("fault", ["lost reply", "lost request"])
@pytest.mark.parametrize("how", ["poll", "for"])
def test_z1_r5_a_reader_that_settles_an_unknown_outcome_and_reads_on_loses_and_doubles_nothing(
    place: SharedStore, how: str, fault: str
) -> None:
    hub, registry = place.hooked()
    with_topic(hub, 4)
    if fault == "lost reply":
        registry.after = once(puts, lose_the_reply)
    else:
        registry.before = once(puts, lose_the_reply)
    outcomes = []
    with hub.consumer("t", "g", until="end") as inbox:

        def handle(messages: list[Message]) -> None:
            tx = hub.transaction()
            try:
                with tx:
                    for message in messages:
                        tx.put("jobs", value_of(message))
                    tx.checkpoint(inbox)
            except OutcomeUnknown:
                outcomes.append(tx.outcome())

        if how == "poll":
            while messages := inbox.poll(2):
                handle(messages)
        else:
            for message in inbox:
                handle([message])
    assert outcomes == ["committed" if fault == "lost reply" else "rolled back"]
    assert (values(hub, "jobs"), checkpoint_of(hub)) == (numbers(4), 4)


@pytest.mark.parametrize("ending", ["close", "crash"])
def test_z1_the_checkpoint_is_never_beyond_the_commits_of_a_transaction_over_several_messages(
    place: SharedStore, ending: str
) -> None:
    place = place.on(MemoryStore())  # the system's clock: the member is to commit by itself, all the time
    log = MemoryLog()
    hub = with_topic(place.open(log=log), 10)
    committed = 0
    tx = None
    inbox = hub.consumer("t", "g", until="end", commit_interval=0.001)
    for message in inbox:
        tx = tx or hub.transaction()
        tx.put("jobs", value_of(message))
        tx.checkpoint(inbox)
        inbox._member.commit()
        assert checkpoint_of(hub) == committed
        if message.offset % 3 == 2:
            tx.commit()
            tx, committed = None, message.offset + 1
            assert checkpoint_of(hub) == committed
        if message.offset == 7:
            break
    assert tx is not None
    unfinished = tx
    if ending == "crash":
        assert inbox._member.lease is not None
        place.store.end_lease(inbox._member.lease.id)
        place.store.end_lease(store_of(hub)._taker.lease.id)
    with contextlib.suppress(PxrsError):
        inbox.close()
    later = place.open(log=log)
    assert (values(later, "jobs"), checkpoint_of(later)) == (numbers(6), 6)
    with later.consumer("t", "g", until="end") as inbox:
        for message in inbox:
            with later.transaction() as tx:
                tx.put("jobs", value_of(message))
                tx.checkpoint(inbox)
    with pytest.raises(PxrsError):
        unfinished.commit()
    assert (values(later, "jobs"), checkpoint_of(later)) == (numbers(10), 10)


def test_z1_a_checkpoint_in_a_callback_is_refused_and_what_is_in_hand_stays_undone(place: SharedStore) -> None:
    hub = place.open()
    hub.create_topic("t", partitions=4)
    hub.create_queue("jobs")
    with hub.producer("t") as out:
        for number in range(40):
            out.send(b"x", key=b"%d" % number)
    calls: list[PxrsError | None] = []

    def revoked(partitions: Any) -> None:
        try:
            with hub.transaction() as tx:
                tx.put("jobs", "audit")
                tx.checkpoint(inbox)
            calls.append(None)
        except PxrsError as error:
            calls.append(error)

    inbox = hub.consumer("t", "g", on_revoked=revoked)
    eventually(lambda: len(inbox.assignment) == 4)
    assert inbox.poll(100, timeout=PATIENCE_S)
    with hub.consumer("t", "g"):
        eventually(lambda: calls)
        assert {each.checkpoint for each in hub.group("g").describe().partitions} <= {None, 0}
        assert all(isinstance(error, InvalidGroup) and "callback" in str(error) for error in calls)
    assert values(hub, "jobs") == []


def test_z1_two_transactions_with_checkpoints_of_two_consumers_in_opposite_order_do_not_lock_up(
    place: SharedStore,
) -> None:
    hub = with_topic(place.open(), 1)
    with hub.consumer("t", "g") as one, hub.consumer("t", "h") as two:
        for inbox in (one, two):
            assert inbox.poll(1, timeout=PATIENCE_S)
        first, second = hub.transaction(), hub.transaction()
        first.checkpoint(one)
        second.checkpoint(two)
        for tx, inbox in ((first, two), (second, one)):
            with pytest.raises(InvalidGroup, match="another transaction"):
                tx.checkpoint(inbox)
        for committing in [aside(first.commit), aside(second.commit)]:
            committing.result(PATIENCE_S)
    assert checkpoint_of(hub) == 1


# Outcomes.


def test_r5_a_request_that_lands_when_its_slot_is_cleared_away_is_refused(place: SharedStore) -> None:
    hub, registry = place.hooked()
    observer = place.open()
    hub.create_queue("q")
    late: list[Commit] = []

    def delay(commit: Commit) -> None:
        late.append(commit)
        lose_the_reply(commit)

    def land(commit: Commit | None = None) -> None:
        for each in late:
            with contextlib.suppress(PxrsError):  # refused, as it should be
                place.store.commit(each)

    registry.before = once(puts, delay)
    tx = hub.transaction()
    tx.put("q", "x")
    with pytest.raises(OutcomeUnknown):
        tx.commit()
    assert tx.outcome() == "rolled back"
    registry.after = land
    assert take_value(hub, "q", timeout=0) is None
    hub.close()
    land()
    assert late
    assert observer.queue("q").depth().ready == 0


def test_r5_an_outcome_that_is_not_on_record_any_more_is_not_made_up(place: SharedStore) -> None:
    hub, registry = place.hooked()
    observer = place.open()
    hub.create_queue("q")

    def be_cut_off(commit: Commit) -> None:
        def away() -> None:
            raise RegistryUnavailable("away")

        registry.reach = away
        lose_the_reply(commit)

    registry.after = once(puts, be_cut_off)
    tx = hub.transaction()
    tx.put("q", "x")
    with pytest.raises(OutcomeUnknown):
        tx.commit()
    store_of(hub)._taker.lease.abandon()
    outcomes = OutcomeSweep()

    def sweep() -> None:
        drive(outcomes.sweep(set(), observer.registry.clock.now(), time.time()), observer.registry)

    for _ in range(2):  # as another process's sweeper does by then
        sweep()
        place.clock.advance(3_700)
    sweep()
    assert not observer.registry.scan(OUTCOMES)
    registry.reach = lambda: None
    with pytest.raises(OutcomeUnknown, match="not on record"):
        tx.outcome()
    assert observer.queue("q").depth().ready == 1


def test_r5_many_open_transactions_do_not_keep_a_hub_from_closing_while_the_store_is_silent(
    place: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("store", "keeper"):
        monkeypatch.setattr(f"pxrs.queue.{module}.CLOSE_S_MAX", 0.3, raising=False)
    hub, registry = place.hooked()
    hub.create_queue("q").put_many(["x"] * 30)
    transactions = [hub.transaction() for _ in range(30)]
    for tx in transactions:
        assert tx.take("q", timeout=0) is not None

    tries: list[bool] = []

    def be_silent() -> None:
        tries.append(True)
        time.sleep(0.1)  # the store's timeout
        raise RegistryUnavailable("no answer in time")

    registry.reach = be_silent
    hub.close()
    assert len(tries) < len(transactions) / 2, "each of them was tried, until its timeout"
    assert {tx.outcome() for tx in transactions} == {"rolled back"}


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


# Processes and threads that are cut short.


def test_z8_a_forked_child_is_told_so_though_a_commit_was_going_on(place: SharedStore) -> None:
    hub, registry = place.hooked()
    queue = hub.create_queue("q")
    inside, gate = threading.Event(), threading.Event()

    def pause(commit: Commit) -> None:
        inside.set()
        gate.wait(PATIENCE_S)

    registry.before = once(puts, pause)
    putting = aside(lambda: queue.put("x"))
    assert inside.wait(PATIENCE_S)
    child = os.fork()
    if child == 0:
        code = 8
        try:
            queue.put("y")
        except UsedAfterFork:
            code = 7
        finally:
            os._exit(code)
    try:
        _, status = eventually(lambda: (found := os.waitpid(child, os.WNOHANG))[0] and found)
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    finally:
        gate.set()
    assert os.waitstatus_to_exitcode(status) == 7
    putting.result(PATIENCE_S)


def story(hub: Hub) -> None:
    for name in ("q", "strict"):
        with hub.transaction() as tx:
            for item in tx.take_many(name, 2, timeout=0):
                tx.put("out", item.value)
    tx = hub.transaction()
    tx.take("q", timeout=0)
    tx.take("strict", timeout=0.001)
    tx.rollback("no")
    with hub.transaction() as tx:
        tx.take("empty", timeout=0.001)


def interrupt(hub: Hub, at: int, caller: str = "") -> str | None:
    """Tell the story with a KeyboardInterrupt at this call of a function of queues, by this caller if one is named.
    Where that was."""
    where: list[str] = []
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        if event != "call" or "/pxrs/queue/" not in frame.f_code.co_filename:
            return
        if caller and (frame.f_back is None or frame.f_back.f_code.co_qualname != caller):
            return
        count += 1
        if count == at:
            where.append(f"call {at}: {frame.f_code.co_qualname}")
            sys.settrace(None)
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        story(hub)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return where[0] if where else None


def check_that_all_is_left(hub: Hub, where: str) -> None:
    """By the process that was interrupted, which lives on: each item once, in the end."""

    def finish() -> bool:
        for name in ("q", "strict"):
            with hub.transaction() as tx:
                for item in tx.take_many(name, 5, timeout=0):
                    tx.put("out", item.value)
        if hub.queue("out").depth().ready == 6:
            return True
        gc.collect()  # the traceback may have kept the transaction
        store_of(hub).keeper.wake()
        return False

    try:
        aside(lambda: eventually(finish, patience_s=PATIENCE_S / 2)).result(PATIENCE_S)
    except (AssertionError, TimeoutError):
        raise AssertionError(f"{where}: items are kept, or a lock is") from None
    assert values(hub, "out") == [b"1", b"2", b"3", b"a", b"b", b"c"], where
    if "Head.leave" not in where:  # who was just about to leave is counted on: a watch too many, and no more
        assert not any(head._waiters for head in store_of(hub)._heads.values()), where


def check_interrupts(place: SharedStore, each: int, caller: str = "") -> int:
    """One in each telling of the story, at every so many calls. How many that were."""
    at = 1
    while True:
        hub = place.on(MemoryStore(place.clock)).open()
        for name in ("q", "strict", "out", "empty"):
            hub.create_queue(name, fifo=name == "strict")
        hub.queue("q").put_many(["a", "b", "c"])
        hub.queue("strict").put_many(["1", "2", "3"])
        where = interrupt(hub, at, caller)
        if where is None:
            return at // each
        check_that_all_is_left(hub, where)
        hub.close()
        at += each


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # some are raised where nobody can
def test_z2_an_interrupt_at_any_call_loses_nothing_and_locks_nothing(place: SharedStore) -> None:
    assert check_interrupts(place, INTERRUPT_EACH) > 40


@pytest.mark.parametrize("caller", ["Head.enter", "TransactionProtocol._note_taken", "Combiner.commit"])
def test_z2_an_interrupt_at_a_delicate_call_loses_nothing_and_locks_nothing(place: SharedStore, caller: str) -> None:
    assert check_interrupts(place, 1, caller) > 0


def test_z2_a_transaction_that_was_dropped_gives_back_and_warns(place: SharedStore) -> None:
    hub = place.open()
    hub.create_queue("q", fifo=True).put_many(["1", "2"])

    def drop() -> None:
        assert hub.transaction().take("q", timeout=PATIENCE_S) is not None
        gc.collect()

    with pytest.warns(ResourceWarning, match="neither committed nor rolled back"):
        drop()
    store_of(hub).keeper.wake()  # its next turn, which comes within a lease's time
    assert take_value(hub, "q", timeout=PATIENCE_S) == b"1"


def test_z8_an_interrupted_leader_takes_none_of_its_followers_along(
    place: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = HookedRegistry(place.store)
    combiner = Combiner(registry)
    inside, gate = threading.Event(), threading.Event()

    def pause(commit: Commit) -> None:
        inside.set()
        gate.wait(PATIENCE_S)

    registry.before = once(lambda commit: True, pause)

    def put(key: str) -> Future[dict[str, int]]:
        return aside(lambda: combiner.commit(Write({}, {key: b""})))

    first = put("a")
    assert inside.wait(PATIENCE_S)
    perform, interrupts = combiner._perform, [KeyboardInterrupt]

    def interrupted(together: Any) -> None:
        if interrupts:
            raise interrupts.pop()
        perform(together)

    monkeypatch.setattr(combiner, "_perform", interrupted)
    followers = [put("b"), put("c")]
    eventually(lambda: len(combiner._waiting) == 2)
    gate.set()
    assert first.result(PATIENCE_S)
    assert sorted(type(each.exception(PATIENCE_S)).__name__ for each in followers) == ["KeyboardInterrupt", "NoneType"]
    assert put("later").result(PATIENCE_S)


# Order and size.


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
