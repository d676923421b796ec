"""Transactions that are interrupted or never ended, outcomes that nobody asked for, and the jobs of the keeper."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from types import FrameType
from typing import Any

import pytest

from pxrs.clock import ManualClock
from pxrs.errors import (
    Closed,
    OutcomeUnknown,
    PxrsError,
    RegistryCorrupt,
    RegistryUnavailable,
    TransactionEnded,
    UsedAfterFork,
)
from pxrs.hub import Hub
from pxrs.queue.combine import Combiner
from pxrs.queue.outcomes import OutcomeSweep, Slot, resolve
from pxrs.queue.records import OUTCOMES
from pxrs.registry.contract import Commit, Entry
from pxrs.registry.memory import MemoryStore
from pxrs.registry.steps import Write, drive
from pxrs.testing.hooked import HookedRegistry, SharedStore, store_of, take_value, wall_time_shifted
from pxrs.testing.waiting import aside
from tests.unit.queue_faults import (
    PATIENCE_S,
    eventually,
    gives_back,
    is_waiting,
    lose_the_reply,
    once,
    puts,
    raise_once,
    values,
)

INTERRUPT_EACH = 1 if os.environ.get("PXRS_SOAK") else 19
"""At every so many calls, from one on that SEED chooses: all of them take half a minute."""


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
    registry.before = raise_once(gives_back, RegistryUnavailable("away"))
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
    with pytest.raises(OutcomeUnknown, match="no longer recorded"):
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
    at = 1 + int(os.environ["SEED"]) % each
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
    assert check_interrupts(place, INTERRUPT_EACH) * INTERRUPT_EACH > 280


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
