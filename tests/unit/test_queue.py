"""Work queues in memory: transactions, policies, items and their settings."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

import pxrs
from pxrs import AtLeastOnce, ConsumeOnce, ConsumeTimes, ExponentialBackoff, FixedBackoff
from pxrs.errors import (
    Closed,
    Conflict,
    InvalidItem,
    InvalidQueue,
    QueueExists,
    RegistryUnavailable,
    TransactionEnded,
    TransactionLost,
    TransactionTooLarge,
    UnknownQueue,
)
from pxrs.hub import Hub
from pxrs.queue.records import OUTCOMES, TAKERS
from pxrs.queue.transaction import Transaction
from pxrs.registry.contract import Commit
from pxrs.registry.memory import LIMITS, MemoryRegistry, MemoryStore
from pxrs.testing.hooked import SharedStore, wall_time_shifted
from tests.unit.queue_faults import PATIENCE_S, die, eventually, fail

# Transactions.


def test_z1_a_clean_exit_commits_what_was_taken_and_put(hub: Hub) -> None:
    mail, sent = hub.create_queue("mail"), hub.create_queue("sent")
    number = mail.put("hello", key=b"k")
    with hub.transaction() as tx:
        item = tx.take("mail", timeout=0)
        assert item is not None
        assert (item.id, item.value, item.key, item.deliveries, item.queue) == (number, b"hello", b"k", 1, "mail")
        tx.put(sent, item.value)
        assert (mail.depth().in_flight, sent.depth().ready) == (1, 0)
    assert tx.outcome() == "committed"
    assert (mail.depth().ready, mail.depth().in_flight, sent.depth().ready) == (0, 0, 1)


def test_z1_an_exception_rolls_back(hub: Hub) -> None:
    mail = hub.create_queue("mail")
    hub.create_queue("sent")
    mail.put("hello")
    assert fail(hub, "mail", target="sent").outcome() == "rolled back"
    assert (mail.depth().ready, hub.queue("sent").depth().ready) == (1, 0)
    assert [item.error for item in mail.peek()] == ["ZeroDivisionError: it failed"]


def test_z1_take_n_and_put_k_of_several_queues(hub: Hub) -> None:
    for name in "abc":
        hub.create_queue(name).put_many([name] * 3)
    tx = hub.transaction()
    assert len(tx.take_many("a", 2)) == 2
    assert len(tx.take_many("b", 10)) == 3
    for _ in range(4):
        tx.put("c", "new")
    tx.commit()
    assert [hub.queue(name).depth().ready for name in "abc"] == [1, 0, 7]


def test_z2_an_ended_transaction_says_so(hub: Hub) -> None:
    hub.create_queue("q").put("x")
    tx = hub.transaction()
    tx.take("q")
    tx.rollback()
    tx.rollback()  # once more is no harm
    for use in (tx.commit, lambda: tx.put("q", "y"), lambda: tx.take("q")):
        with pytest.raises(TransactionEnded, match="rolled back"):
            use()


def test_z2_nobody_else_gets_what_is_taken_and_everybody_what_is_given_back(place: SharedStore, hub: Hub) -> None:
    hub.create_queue("q").put("x")
    other = place.open()
    tx = hub.transaction()
    assert tx.take("q") is not None
    with other.transaction() as theirs:
        assert theirs.take("q", timeout=0) is None
        tx.rollback()
        assert theirs.take("q", timeout=0) is not None


def test_z2_an_explicit_end_inside_the_block_is_the_end(hub: Hub) -> None:
    queue = hub.create_queue("q")
    with hub.transaction() as tx:
        tx.put("q", "x")
        tx.commit()
    with hub.transaction() as tx:
        tx.put("q", "y")
        tx.rollback()
    assert queue.depth().ready == 1


def test_z3_a_dead_process_loses_its_items_and_its_commit_is_refused(place: SharedStore, hub: Hub) -> None:
    queue = hub.create_queue("q")
    queue.put("x")
    other = place.open()
    with other.transaction() as theirs:
        assert theirs.take("q", timeout=0) is not None
        theirs.rollback()
    tx = hub.transaction()
    assert tx.take("q") is not None
    tx.put("q", "never")
    die(place, hub)
    with other.transaction() as theirs:
        item = theirs.take("q", timeout=PATIENCE_S)
        assert item is not None
        assert item.deliveries == 3
        with pytest.raises(TransactionLost) as caught:
            tx.commit()
        assert caught.value.items == (item.id,)
    assert tx.outcome() == "rolled back"
    assert queue.depth().ready == queue.depth().in_flight == 0
    with hub.transaction() as again:  # with a new lease
        again.put("q", "y")
    assert queue.depth().ready == 1


class Holding(MemoryRegistry):
    """A store behind a slow network: what is held lands when told."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.is_holding = False
        self.held: list[Commit] = []

    def _commit(self, commit: Commit) -> dict[str, int]:
        if self.is_holding and threading.current_thread() is threading.main_thread():
            self.held.append(commit)
            raise pxrs.errors.OutcomeUnknown("no reply")
        return super()._commit(commit)

    def land(self, commit: Commit) -> dict[str, int]:
        return super()._commit(commit)


def test_r3_q2_a_commit_that_lands_after_the_item_went_to_another_is_refused(place: SharedStore) -> None:
    registry = Holding(place.store)
    hub, other = place.open(registry), place.open()
    hub.create_queue("q").put("x")
    with other.transaction() as theirs:
        theirs.take("q", timeout=0)
        theirs.rollback()
    tx = hub.transaction()
    tx.take("q")
    registry.is_holding = True
    # The keeper must not settle it: this process is stopped.
    hub.parts.queue_store().keeper.close()
    with pytest.raises(pxrs.errors.OutcomeUnknown, match="no reply"):
        tx.commit()
    die(place, hub)
    with other.transaction() as theirs:
        assert theirs.take("q", timeout=PATIENCE_S) is not None
        (held,) = registry.held
        with pytest.raises((Conflict, pxrs.errors.LeaseExpired)):
            registry.land(held)
        # Each of the two fences is enough: the lease's, and the item's own version.
        with pytest.raises(Conflict):
            registry.land(Commit(held.expect, held.put, {}, held.delete, None, False))
        with pytest.raises(pxrs.errors.LeaseExpired):
            registry.land(Commit({}, held.put, {}, held.delete, held.lease, False))
    registry.is_holding = False
    assert tx.outcome() == "rolled back"


def test_z3_what_a_closed_hub_had_taken_is_there_at_once(place: SharedStore) -> None:
    hub = place.open()
    hub.create_queue("q").put("x")
    tx = hub.transaction()
    assert tx.take("q") is not None
    hub.close()
    with place.open().transaction() as theirs:
        assert theirs.take("q", timeout=0) is not None
    with pytest.raises((TransactionEnded, Closed)):
        tx.commit()


def test_q1_what_the_last_of_all_processes_held_goes_to_the_first_that_comes(place: SharedStore, hub: Hub) -> None:
    hub.create_queue("q").put("x")
    tx = hub.transaction()
    assert tx.take("q") is not None
    die(place, hub)
    hub.parts.queue_store().keeper.close()  # it sleeps on
    with place.open().transaction() as theirs:
        assert theirs.take("q", timeout=PATIENCE_S) is not None


def test_q1_one_that_lost_its_lease_while_it_waited_still_gets_what_comes(place: SharedStore, hub: Hub) -> None:
    queue = hub.create_queue("q")
    found: list[Any] = []

    def wait() -> None:
        with hub.transaction() as tx:
            found.append(tx.take("q", timeout=PATIENCE_S))

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: hub.registry.scan(TAKERS))
    die(place, hub)
    queue.put("x")
    thread.join(PATIENCE_S)
    assert [item.value for item in found] == [b"x"]


def test_r5_a_hub_leaves_no_outcomes_behind_and_uses_few(place: SharedStore) -> None:
    observer = place.open()
    hub = place.open()
    hub.create_queue("q")
    for _ in range(20):
        with hub.transaction() as tx:
            tx.put("q", "x")
    assert len(observer.registry.scan(OUTCOMES)) == 1
    hub.close()
    assert observer.registry.scan(OUTCOMES) == observer.registry.scan(TAKERS) == []


def test_r5_a_hub_whose_lease_has_ended_leaves_no_outcomes_behind(place: SharedStore) -> None:
    observer, hub = place.open(), place.open()
    hub.create_queue("q")
    with hub.transaction() as tx:
        tx.put("q", "x")
    die(place, hub)
    assert len(observer.registry.scan(OUTCOMES)) == 1
    hub.close()
    assert observer.registry.scan(OUTCOMES) == []


def test_z2_a_rollback_succeeds_when_the_store_is_away_and_leaves_no_lock(place: SharedStore) -> None:
    class Away(MemoryRegistry):
        is_away = False

        def _commit(self, commit: Commit) -> dict[str, int]:
            if self.is_away:
                raise RegistryUnavailable("away")
            return super()._commit(commit)

    registry = Away(place.store)
    hub = place.open(registry)
    queue = hub.create_queue("q")
    queue.put("x")
    tx = hub.transaction()
    tx.take("q")
    registry.is_away = True
    tx.rollback()
    assert tx.outcome() == "rolled back"
    assert queue.depth().in_flight == 1
    registry.is_away = False
    eventually(lambda: queue.depth().ready == 1)


# Queues and items.


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b", "ä", "-a", "x" * 101, None, 7])
def test_bad_names_of_queues_are_refused(hub: Hub, name: Any) -> None:
    with pytest.raises(InvalidQueue, match="queue name"):
        hub.create_queue(name)


def test_unknown_and_double_queues_are_errors_at_once(hub: Hub) -> None:
    hub.create_queue("mail")
    with pytest.raises(QueueExists, match="mail"):
        hub.create_queue("mail")
    for use in (lambda: hub.queue("mial"), lambda: hub.delete_queue("mial"), lambda: hub.transaction().take("mial")):
        with pytest.raises(UnknownQueue, match=r"no queue 'mial'; existing: mail"):
            use()
    assert [queue.name for queue in hub.queues()] == ["mail"]


def test_q3_the_settings_belong_to_the_queue(place: SharedStore, hub: Hub) -> None:
    made = hub.create_queue("q", ConsumeTimes(3), fifo=True, backoff=ExponentialBackoff(timedelta(seconds=2), cap=60))
    found = place.open().queue("q")
    assert found.settings == made.settings
    assert found.policy == ConsumeTimes(3)
    assert found.is_fifo
    assert found.backoff == ExponentialBackoff(2.0, 2.0, 60.0, 0.2)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"policy": 3}, "policy"),
        ({"policy": "once"}, "policy"),
        ({"backoff": 3}, "backoff"),
    ],
)
def test_bad_settings_are_refused(hub: Hub, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidQueue, match=named):
        hub.create_queue("q", **settings)
    assert not hub.queues()


def test_bad_policies_are_refused() -> None:
    for times in (0, -1, 1.5, True, "3"):
        with pytest.raises(InvalidQueue, match="ConsumeTimes"):
            ConsumeTimes(times)  # type: ignore[arg-type]
    for make in (
        lambda: FixedBackoff(-1),
        lambda: FixedBackoff("1"),  # type: ignore[arg-type]
        lambda: ExponentialBackoff(1, factor=0.5),
        lambda: ExponentialBackoff(1, jitter=2),
        lambda: ExponentialBackoff(1, cap=float("nan")),
    ):
        with pytest.raises(InvalidQueue):
            make()


def test_z8_bad_items_are_refused_and_nothing_is_put(hub: Hub) -> None:
    queue = hub.create_queue("q")
    strict = hub.create_queue("strict", fifo=True)
    large = b"x" * (LIMITS.value_bytes_max + 1)
    for put in (
        lambda: queue.put(3),  # type: ignore[arg-type]
        lambda: queue.put(None),  # type: ignore[arg-type]
        lambda: queue.put("\ud800"),
        lambda: queue.put("x", priority=1.5),  # type: ignore[arg-type]
        lambda: queue.put("x", priority=5_000),
        lambda: queue.put("x", delay=-1),
        lambda: queue.put("x", delay="1"),  # type: ignore[arg-type]
        lambda: queue.put("x", key="k" * 2_000),
        lambda: queue.put(large),
        lambda: strict.put("x", priority=1),
        lambda: strict.put("x", delay=1),
        lambda: hub.transaction().put("q", large),
        lambda: hub.transaction().take_many("q", 0),
    ):
        with pytest.raises(InvalidItem):
            put()
    assert queue.depth().ready == queue.depth().delayed == strict.depth().ready == 0


def test_z8_the_largest_item_is_put_taken_given_back_and_buried(hub: Hub) -> None:
    queue = hub.create_queue("q", ConsumeTimes(2))
    with pytest.raises(InvalidItem, match=r"the limit of this store is ([\d,]+)") as caught:
        queue.put(b"x" * LIMITS.value_bytes_max)
    most = int(str(caught.value).partition("this store is ")[2].partition(":")[0].replace(",", ""))
    queue.put(b"x" * most)
    for _ in range(2):
        fail(hub, "q", "\N{PILE OF POO}" * 1_000)
    assert [len(item.value) for item in queue.dead_letters()] == [most]


def test_z8_a_transaction_that_grows_too_large_says_so_and_keeps_what_it_has(hub: Hub) -> None:
    queue = hub.create_queue("q")

    def put_all(tx: Transaction, count: int, size: int) -> None:
        for _ in range(count):
            tx.put("q", b"x" * size)

    def take_all(tx: Transaction) -> None:
        while tx.take_many("q", 3_000, timeout=0):
            pass

    with hub.transaction() as tx, pytest.raises(TransactionTooLarge, match="bytes in one transaction"):
        put_all(tx, 100, 1_000_000)
    assert queue.depth().ready == LIMITS.commit_bytes_max // 1_000_000
    with hub.transaction() as tx, pytest.raises(TransactionTooLarge, match="keys in one commit"):
        put_all(tx, 10_000, 1)
    assert queue.depth().ready > 4_000
    with hub.transaction() as tx:
        with pytest.raises(TransactionTooLarge):
            take_all(tx)
        assert queue.depth().in_flight > 4_000
    assert queue.depth().in_flight == 0


def test_z7_priorities_come_first_and_age_decides_among_equals(hub: Hub) -> None:
    queue = hub.create_queue("q")
    for value, priority in (("c", 0), ("d", 0), ("a", 9), ("e", -3), ("b", 1)):
        queue.put(value, priority=priority)
    with hub.transaction() as tx:
        taken = [tx.take("q") for _ in range(5)]
    assert [item.value for item in taken if item] == [b"a", b"b", b"c", b"d", b"e"]
    assert [item.priority for item in taken if item] == [9, 1, 0, 0, -3]


def test_z7_a_delayed_item_comes_when_it_is_due(place: SharedStore, hub: Hub) -> None:
    queue = hub.create_queue("q")
    queue.put("later", delay=timedelta(seconds=3))
    queue.put("never", delay=3_600)
    assert queue.depth().delayed == 2
    with hub.transaction() as tx:
        assert tx.take("q", timeout=0) is None
        place.clock.advance(2.9)
        assert tx.take("q", timeout=0.05) is None
        place.clock.advance(0.1)
        item = tx.take("q", timeout=PATIENCE_S)
        assert item is not None
        assert item.value == b"later"


def test_z4_z5_consume_times_ends_in_the_dead_letters_with_the_reason(hub: Hub) -> None:
    queue = hub.create_queue("q", ConsumeTimes(3))
    number = queue.put("x")
    for _ in range(3):
        fail(hub, "q")
    with hub.transaction() as tx:
        assert tx.take("q", timeout=0) is None
    (dead,) = queue.dead_letters().list()
    assert (dead.id, dead.value, dead.deliveries) == (number, b"x", 3)
    assert dead.error == "ZeroDivisionError: it failed"
    assert dead.died_at is not None


def test_z4_consume_once_is_delivered_once(hub: Hub) -> None:
    queue = hub.create_queue("q", ConsumeOnce())
    queue.put("x")
    fail(hub, "q")
    assert (queue.depth().ready, queue.depth().dead) == (0, 1)


def test_z4_at_least_once_never_gives_up(hub: Hub) -> None:
    queue = hub.create_queue("q", AtLeastOnce())
    queue.put("x")
    for _ in range(20):
        fail(hub, "q")
    assert (queue.depth().ready, queue.depth().dead) == (1, 0)


def test_z5_dead_letters_are_listed_retried_and_purged(hub: Hub) -> None:
    queue = hub.create_queue("q", ConsumeOnce())
    ids = queue.put_many(list("abcd"))
    for _ in range(4):
        fail(hub, "q")
    dead = queue.dead_letters()
    assert [item.id for item in dead.list(2)] == ids[:2]
    assert len(dead) == 4
    assert dead.retry([ids[0], "no such id"]) == 1
    assert dead.purge([ids[1]]) == 1
    assert dead.purge([]) == dead.retry(iter(())) == 0
    assert [item.id for item in dead] == ids[2:]
    with hub.transaction() as tx:
        item = tx.take("q")
        assert item is not None
        assert (item.id, item.deliveries) == (ids[0], 1)
    assert dead.retry() == 2
    assert dead.purge() == 0
    assert queue.depth().ready == 2


def test_z5_a_dead_letter_of_a_machine_whose_clock_is_ahead_can_be_retried(place: SharedStore, hub: Hub) -> None:
    queue = hub.create_queue("q", ConsumeOnce())
    queue.put_many(list("ab"))
    with wall_time_shifted(place.clock, 3_600):
        fail(hub, "q")
        fail(hub, "q")
    dead = queue.dead_letters()
    assert dead.retry(dead.list()[0].id) == 1
    assert dead.purge() == 1


def test_z7_an_item_that_came_back_waits_and_others_do_not(place: SharedStore, hub: Hub) -> None:
    queue = hub.create_queue("q", backoff=FixedBackoff(2))
    queue.put("slow")
    queue.put("quick")
    fail(hub, "q")
    assert queue.depth().delayed == 1
    with hub.transaction() as tx:
        quick = tx.take("q", timeout=PATIENCE_S)
        assert tx.take("q", timeout=0) is None
        place.clock.advance(2)
        slow = tx.take("q", timeout=PATIENCE_S)
    assert [item.value for item in (quick, slow) if item] == [b"quick", b"slow"]


def test_z7_backoff_grows_to_its_cap_with_jitter() -> None:
    backoff = ExponentialBackoff(first=1, factor=3, cap=50, jitter=0.5)
    assert [backoff.delay_s(n, lambda: 0.5) for n in (1, 2, 3, 4)] == [1, 3, 9, 27]
    assert [backoff.delay_s(n, lambda: 1.0) for n in (5, 10_000)] == [50, 50]
    assert backoff.delay_s(2, lambda: 0.0) == 1.5
    assert backoff.delay_s(2, lambda: 1.0) == 4.5
    assert FixedBackoff(timedelta(minutes=1)).delay_s(9, lambda: 0.0) == 60
