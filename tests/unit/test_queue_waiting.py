"""Threads that wait for items of a queue, listeners, leases that are lost, and wake-ups."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pxrs import ConsumeTimes, QueueListener
from pxrs.clock import ManualClock
from pxrs.errors import (
    InvalidQueue,
    OutcomeLost,
    RegistryUnavailable,
    TransactionLost,
    UnknownQueue,
)
from pxrs.hub import Hub
from pxrs.queue.outcomes import OutcomeSweep, dump_outcome
from pxrs.queue.records import OUTCOMES, TAKERS
from pxrs.queue.transaction import Outcome, Transaction
from pxrs.registry.contract import Commit, Entry
from pxrs.registry.memory import LIMITS, MemoryRegistry
from pxrs.registry.steps import drive
from pxrs.testing.hooked import HookedRegistry, SharedStore, store_of, take_value
from pxrs.testing.waiting import aside
from tests.unit.queue_faults import (
    PATIENCE_S,
    QuietStore,
    RecountingRegistry,
    die,
    eventually,
    is_waiting,
    lose_the_reply,
    once,
    takes,
    waiters,
)

# Waiting.


def test_a_waiting_taker_wakes_when_something_is_put(place: SharedStore, hub: Hub) -> None:
    queue = hub.create_queue("q")
    other = place.open()
    found: list[Any] = []

    def wait() -> None:
        with other.transaction() as tx:
            found.append((tx.take("q", timeout=PATIENCE_S), time.monotonic()))

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: other.parts.queue_store()._heads and waiters(other) == 1)
    began = time.monotonic()
    queue.put("x")
    thread.join(PATIENCE_S)
    ((item, at),) = found
    assert item.value == b"x"
    assert at - began < PATIENCE_S / 2
    assert waiters(other) == 0


def test_several_waiting_threads_get_one_each(hub: Hub) -> None:
    queue = hub.create_queue("q")
    found: list[bytes] = []

    def wait() -> None:
        with hub.transaction() as tx:
            item = tx.take("q", timeout=PATIENCE_S)
            assert item is not None
            found.append(item.value)

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    eventually(lambda: hub.parts.queue_store()._heads and waiters(hub) == 8)
    queue.put_many(list("abcdefgh"))
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(found) == [b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h"]


def test_a_deleted_queue_ends_the_wait_and_refuses_what_was_taken(place: SharedStore, hub: Hub) -> None:
    queue = hub.create_queue("q")
    queue.put("x")
    hub.create_queue("other").put("y")
    tx = hub.transaction()
    tx.take("q")
    tx.take("other")
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            place.open().transaction().take("q", timeout=PATIENCE_S)
        except UnknownQueue as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: len(hub.registry.scan(TAKERS)) == 2)
    hub.delete_queue("q")
    thread.join(PATIENCE_S)
    assert len(caught) == 1
    with pytest.raises(TransactionLost):
        tx.commit()
    assert hub.queue("other").depth().ready == 1
    assert hub.create_queue("q").depth().ready == 0


# Listeners.


def test_z6_a_listener_commits_what_its_handlers_put(hub: Hub) -> None:
    queue, done = hub.create_queue("q"), hub.create_queue("done")
    queue.put_many(str(n) for n in range(50))
    with QueueListener(queue, lambda tx, item: tx.put("done", item.value), threads=4) as listener:
        eventually(lambda: done.depth().ready == 50)
    assert (listener.committed, listener.failed) == (50, 0)
    assert sorted(int(item.value) for item in done.peek(50)) == list(range(50))


def test_z6_an_exception_of_a_handler_gives_back_and_ends_in_the_dead_letters(hub: Hub) -> None:
    queue = hub.create_queue("q", ConsumeTimes(2))
    hub.create_queue("done")
    queue.put("poison")

    def handle(tx: Any, item: Any) -> None:
        tx.put("done", "never")
        raise ValueError(item.deliveries)

    with QueueListener(queue, handle) as listener:
        eventually(lambda: queue.depth().dead == 1)
    assert (listener.committed, listener.failed) == (0, 2)
    assert hub.queue("done").depth().ready == 0
    assert queue.dead_letters().list()[0].error == "ValueError: 2"


def test_z6_closing_wakes_those_who_wait_and_lets_handlers_finish(hub: Hub) -> None:
    queue = hub.create_queue("q")
    began, may_end = threading.Event(), threading.Event()

    def handle(tx: Any, item: Any) -> None:
        began.set()
        may_end.wait(PATIENCE_S)

    listener = QueueListener(queue, handle, threads=8).start()
    queue.put("x")
    assert began.wait(PATIENCE_S)
    closing = threading.Thread(target=listener.close)
    closing.start()
    assert listener.committed == 0
    may_end.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert (listener.committed, queue.depth().in_flight) == (1, 0)


CALLS = ("get", "scan", "commit", "lease", "watch")


@pytest.mark.parametrize("away", [CALLS, *((call,) for call in CALLS)], ids="-".join)
def test_z6_a_listener_survives_an_outage(place: SharedStore, away: tuple[str, ...]) -> None:
    refused: set[str] = set()
    """What the listener's own thread was refused."""

    class Flaky(MemoryRegistry):
        away: tuple[str, ...] = ()

        def _check(self, call: str) -> None:
            if call in self.away:
                if threading.current_thread().name.startswith("pxrs-queue-q-"):
                    refused.add(call)
                raise RegistryUnavailable("away")

        def _get(self, key: str) -> Any:
            self._check("get")
            return super()._get(key)

        def _scan(self, *arguments: Any) -> Any:
            self._check("scan")
            return super()._scan(*arguments)

        def _commit(self, commit: Commit) -> dict[str, int]:
            self._check("commit")
            return super()._commit(commit)

        def _lease(self, ttl: float, renewed: bool) -> Any:
            self._check("lease")
            return super()._lease(ttl, renewed)

        def _watch(self, watches: Any) -> None:
            self._check("watch")
            super()._watch(watches)

    registry = Flaky(place.store)
    hub, observer = place.open(registry), place.open()
    queue = hub.create_queue("q")
    done = hub.create_queue("done")
    with QueueListener(queue, lambda tx, item: tx.put("done", item.value)):
        observer.queue("q").put("before")
        eventually(lambda: observer.queue("done").depth().ready == 1 and waiters(hub) == 1)
        registry.away = away
        if "lease" in away:
            die(place, hub)
        observer.queue("q").put_many(["during"] * 3)
        eventually(lambda: refused)
        registry.away = ()
        eventually(lambda: observer.queue("done").depth().ready == 4)
    assert done.depth().ready == 4


def test_z6_a_handler_keeps_its_item_for_as_long_as_it_takes(place: SharedStore, hub: Hub) -> None:
    queue = hub.create_queue("q")
    other = place.open()
    queue.put("x")
    began, may_end = threading.Event(), threading.Event()

    def handle(tx: Any, item: Any) -> None:
        began.set()
        may_end.wait(PATIENCE_S)

    with QueueListener(queue, handle) as listener:
        assert began.wait(PATIENCE_S)
        taker = store_of(hub)._taker
        assert taker is not None
        for _ in range(12):  # more than one lease, and it is renewed
            place.clock.advance(2.4)
            eventually(lambda: taker.lease.deadline > place.clock.now() + 7)
        with other.transaction() as tx:
            assert tx.take("q", timeout=0) is None
        may_end.set()
        eventually(lambda: listener.committed == 1)


def test_z6_a_handler_may_commit_or_roll_back_by_itself(hub: Hub) -> None:
    queue = hub.create_queue("q", ConsumeTimes(2))
    queue.put_many(["commit", "rollback"])
    with QueueListener(queue, lambda tx, item: getattr(tx, item.value.decode())()) as listener:
        eventually(lambda: queue.depth().dead == 1 and listener.committed == 1)
    assert listener.failed == 2


def test_z6_a_handler_that_ends_the_process_ends_the_listener(hub: Hub) -> None:
    queue = hub.create_queue("q")
    queue.put("x")

    def handle(tx: Any, item: Any) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        QueueListener(queue, handle, threads=4).run()
    assert queue.depth().ready == 1


def test_bad_listeners_are_refused(hub: Hub) -> None:
    queue = hub.create_queue("q")
    for threads in (0, 1.5, True, 2_000):
        with pytest.raises(InvalidQueue, match="threads"):
            QueueListener(queue, print, threads=threads)  # type: ignore[arg-type]
    with pytest.raises(InvalidQueue, match="handler"):
        QueueListener(queue, "handler")  # type: ignore[arg-type]


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
