"""The pure and the shared parts: state, codec, lease, watch, clocks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import pytest

from pxrs.clock import ManualClock, SystemClock, boot_id
from pxrs.errors import Closed, LeaseExpired, RegistryCorrupt, RegistryUnavailable
from pxrs.registry.file.codec import Seal, decode_entry, decode_snapshot, encode_entry, encode_snapshot
from pxrs.registry.lease import Lease
from pxrs.registry.memory import MemoryRegistry, MemoryStore
from pxrs.registry.renewal import Renewer
from pxrs.registry.state import Change, State
from pxrs.registry.watch import PrefixWatch, SharedWatches, Watch
from pxrs.testing.waiting import aside, eventually

CHANGES = [
    Change(),
    Change(put={"a": b"", "b/c": bytes(range(256))}, delete=("d", "e/f")),
    Change(ephemeral={"m": b"x" * 1000}, put={"n": b"1"}, lease="l1"),
    Change(lease_begins="l2"),
    Change(leases_end=("l2", "l3")),
]


@pytest.mark.parametrize("synced", [None, 0, 41])
@pytest.mark.parametrize("step", [*CHANGES, Seal("0000000001-abc")], ids=lambda step: repr(step)[:40])
def test_an_entry_is_read_as_it_was_written(step: Change | Seal, synced: int | None) -> None:
    assert decode_entry(encode_entry(step, synced), "here") == (step, synced)


def test_any_damage_of_an_entry_is_noticed() -> None:
    data = encode_entry(CHANGES[1], 41)
    dice = random.Random(3)
    for _ in range(500):
        damaged = bytearray(data)
        if dice.random() < 0.5:
            damaged[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        else:
            del damaged[dice.randrange(len(data)) :]
        with pytest.raises(RegistryCorrupt, match="here"):
            decode_entry(bytes(damaged), "here")


def test_a_snapshot_holds_the_whole_state() -> None:
    state = State()
    state.apply(Change(lease_begins="l"), 1)
    state.apply(Change(put={"a": b"1", "b": b""}, ephemeral={"m": b"2"}, lease="l"), 2)
    copy, number = decode_snapshot(encode_snapshot(state, 7), "here")
    assert number == 7
    assert copy.records == state.records
    assert copy.leases == state.leases == {"l": {"m"}}
    copy.apply(Change(leases_end=("l",)), 8)
    assert list(copy.records) == ["a", "b"]


def test_the_system_clock_goes_on_and_the_boot_has_a_name() -> None:
    clock = SystemClock()
    assert clock.now() <= clock.now()
    assert len(boot_id()) == 36
    event = threading.Event()
    assert not clock.wait(event, clock.now() + 0.01)
    event.set()
    assert clock.wait(event, clock.now() + 10)


class Renewals:
    """A store's side of a lease, to be told what to answer."""

    def __init__(self, clock: ManualClock, answer: Callable[[], float]) -> None:
        self.answer = answer
        self.asked = threading.Semaphore(0)
        self.ended = 0
        self.renewer = Renewer(clock)
        self.lease = Lease("l", 8.0, clock.now() + 8.0, secret="s", stored=self, on_closed=id, clock=clock)
        self.renewer.add(self.lease)

    def renew(self) -> float:
        try:
            return self.answer()
        finally:
            self.asked.release()

    def await_answer(self) -> None:
        """Return when one more renewal was answered and the time of the next one is set: the clock may go on."""
        assert self.asked.acquire(timeout=30)
        eventually(lambda: self.lease.renewal.thread is None)  # type: ignore[union-attr]

    def end(self) -> None:
        self.ended += 1

    def let_go(self) -> None:
        raise AssertionError("a renewed lease is ended")


def test_r6_a_lease_is_renewed_well_before_its_deadline() -> None:
    clock = ManualClock()
    store = Renewals(clock, lambda: clock.now() + 8.0)
    for _ in range(10):
        clock.advance(2.0)
        store.await_answer()
        assert store.lease.alive
    store.lease.close()
    store.lease.close()
    assert store.ended == 1
    assert not store.lease.alive


def test_x12_a_holder_that_cannot_reach_the_store_is_out_at_its_deadline() -> None:
    clock = ManualClock()

    def unreachable() -> float:
        raise RegistryUnavailable("no route")

    store = Renewals(clock, unreachable)
    for _ in range(3):
        clock.advance(2.0)
        store.await_answer()
        assert store.lease.alive
    clock.advance(2.0)
    assert not store.lease.alive
    with pytest.raises(LeaseExpired):
        store.lease.check()
    store.lease.close()


def test_r3_a_renewal_that_comes_back_after_the_deadline_revives_nothing() -> None:
    clock = ManualClock()
    was_asked, may_answer = threading.Event(), threading.Event()

    def slow() -> float:
        was_asked.set()
        may_answer.wait(10)
        return clock.now() + 8.0

    store = Renewals(clock, slow)
    clock.advance(2.0)
    assert was_asked.wait(30)
    clock.advance(7.0)
    assert not store.lease.alive
    may_answer.set()
    store.await_answer()
    assert not store.lease.alive
    store.lease.close()


def test_a_lease_that_the_store_has_ended_is_out_at_once() -> None:
    clock = ManualClock()

    def gone() -> float:
        raise LeaseExpired("gone")

    store = Renewals(clock, gone)
    clock.advance(2.0)
    assert store.lease.lost.wait(10)
    assert not store.lease.alive
    store.lease.close()


def test_memory_leases_follow_a_manual_clock() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    with MemoryRegistry(store) as holder, MemoryRegistry(store) as other:
        lease = holder.lease(10)
        lease.abandon()
        holder.commit(ephemeral={"m": b""}, lease=lease)
        clock.advance(9.9)
        assert other.get("m") is not None
        with other.watch("m") as watch:
            clock.advance(0.2)
            assert watch.wait(30)
            assert other.get("m") is None


def test_a_renewal_that_fails_in_an_unforeseen_way_still_ends_at_the_deadline() -> None:
    clock = ManualClock()

    def broken() -> float:
        raise OSError("disk on fire")

    store = Renewals(clock, broken)
    clock.advance(2.0)
    assert store.asked.acquire(timeout=10)
    clock.advance(6.0)
    assert store.lease.lost.wait(10), "those who wait for the loss are told, without asking"
    store.lease.close()


def test_a_memory_lease_that_is_due_before_the_others_is_noticed_in_time() -> None:
    clock = ManualClock()
    with MemoryRegistry(MemoryStore(clock)) as registry:
        registry.lease(600).abandon()
        lease = registry.lease(5)
        lease.abandon()
        registry.commit(ephemeral={"m": b""}, lease=lease)
        with registry.watch("m") as watch:
            clock.advance(6)
            assert watch.wait(30)


def test_a_watch_covers_its_prefixes_and_single_keys() -> None:
    watch = Watch(("a/", "b"), id)
    assert [key for key in ("a", "a/x", "ab", "b", "b/x", "bc") if watch.covers(key)] == ["a/x", "b"]
    assert Watch(("",), id).covers("anything")


class WokenTooLate(threading.Event):
    """The first wait ends without a wake, and the wake comes before the waiter has looked any further."""

    has_come = False

    def wait(self, timeout: float | None = None) -> bool:
        woken = super().wait(timeout)
        if not woken and not self.has_come:
            self.has_come = True
            self.set()
        return woken


def test_r2_a_wake_at_the_very_end_of_the_time_is_not_lost() -> None:
    watch = Watch(("",), id)
    watch._raised = WokenTooLate()
    assert not watch.wait(0)
    assert watch.wait(0), "it came at the end of the time, and is for the next call"


def test_wakes_are_collected_and_a_closed_watch_says_so() -> None:
    closed: list[Watch] = []
    watch = Watch(("",), closed.append)
    watch.wake()
    watch.wake()
    assert watch.wait(0)
    assert not watch.wait(0)
    watch.close()
    watch.close()
    assert closed == [watch]
    with pytest.raises(Closed):
        watch.wait(0)


def test_closing_wakes_who_waits_and_every_later_wait_says_so() -> None:
    watch = Watch(("",), lambda _: None)
    waiting = aside(lambda: watch.wait(None))
    watch.close()
    with pytest.raises(Closed):
        waiting.result(30)
    for _ in range(2):
        with pytest.raises(Closed):
            aside(lambda: watch.wait(None)).result(30)


def test_w6_callbacks_are_called_for_each_wake_and_for_the_end(caplog: pytest.LogCaptureFixture) -> None:
    watch, calls = Watch(("",), lambda _: None), []

    def fail() -> None:
        calls.append("failing")
        raise ValueError("a mistake")

    first, _ = watch.subscribe(fail), watch.subscribe(lambda: calls.append("other"))
    watch.wake()
    assert calls == ["failing", "other"], "a callback that raises keeps no other from being called"
    assert "a mistake" in caplog.text
    assert watch.wait(0)
    first.close()
    watch.wake()
    watch.close()
    assert calls == ["failing", "other", "other", "other"]


def test_r2_a_doubt_about_a_folder_wakes_all_that_may_be_concerned() -> None:
    shared = SharedWatches()
    watches = {prefix: Watch((prefix,), shared.remove) for prefix in ("", "a/", "a/b/", "a/b/key", "a/c/", "ab/")}
    for watch in watches.values():
        shared.add(watch)

    def woken() -> set[str]:
        return {prefix for prefix, watch in watches.items() if watch.wait(0)}

    shared.wake_under("a/b/")
    assert woken() == {"", "a/", "a/b/", "a/b/key"}
    shared.wake_under("")
    assert woken() == watches.keys()
    shared.wake(["x"])
    assert woken() == {""}
    shared.wake(["a/b/key", "ab/x"])
    assert woken() == {"", "a/", "a/b/", "a/b/key", "ab/"}
    second = Watch(("a/",), shared.remove)
    shared.add(second)
    (prefix,) = [each for each in shared.prefixes() if each.prefix == "a/"]
    prefix.wake()
    assert woken() == {"a/"}
    assert second.wait(0)
    assert shared.remove(second) == []
    assert shared.remove(second) == [], "it was removed before"
    assert shared.remove(watches["a/"]) == [prefix]
    assert shared.remove(watches["a/"]) == []


class Arming:
    """A store that arms prefixes when it is told to, and can refuse."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.armed: list[list[str]] = []
        self.disarmed: list[str] = []
        self.refusals: list[Exception] = []

    def arm(self, watches: Sequence[PrefixWatch]) -> None:
        self.begun.release()
        assert self.go.acquire(timeout=30)
        if self.refusals:
            raise self.refusals.pop()
        self.armed.append(sorted(watch.prefix for watch in watches))

    def disarm(self, watch: PrefixWatch) -> None:
        self.disarmed.append(watch.prefix)

    def open(self, shared: SharedWatches, *prefixes: str) -> Watch:
        def forget(closed: Watch) -> None:
            for each in shared.remove(closed):
                self.disarm(each)

        watch = Watch(prefixes, forget)
        shared.add(watch)
        try:
            shared.arm(watch, self.arm, self.disarm)
        except BaseException:
            watch.close()
            raise
        return watch


def test_w6_a_prefix_is_armed_once_and_no_handle_is_open_before_it_is_armed() -> None:
    shared, store = SharedWatches(), Arming()
    first = aside(lambda: store.open(shared, "a/", "b"))
    assert store.begun.acquire(timeout=30)
    second = aside(lambda: store.open(shared, "b"))
    third = aside(lambda: store.open(shared, "b", "c"))
    assert store.begun.acquire(timeout=30), "c is armed by the third meanwhile"
    assert not second.done()
    store.go.release(2)
    watches = [each.result(30) for each in (first, second, third)]
    assert sorted(store.armed) == [["a/", "b"], ["c"]]
    shared.wake(["b"])
    assert [watch.wait(0) for watch in watches] == [True, True, True]
    shared.wake(["a/x/y", "bb"])
    assert [watch.wait(0) for watch in watches] == [True, False, False]
    watches[0].close()
    assert store.disarmed == ["a/"]
    shared.wake(None)
    assert [watch.wait(0) for watch in watches[1:]] == [True, True]
    for watch in watches[1:]:
        watch.close()
    assert sorted(store.disarmed) == ["a/", "b", "c"]
    assert len(shared) == 0


def test_r2_who_waits_for_another_to_arm_a_prefix_arms_it_if_that_fails() -> None:
    shared, store = SharedWatches(), Arming()
    store.refusals.append(RegistryUnavailable("down"))
    first = aside(lambda: store.open(shared, "a/"))
    assert store.begun.acquire(timeout=30)
    second = aside(lambda: store.open(shared, "a/"))
    eventually(lambda: len(shared) == 2)
    store.go.release()
    with pytest.raises(RegistryUnavailable):
        first.result(30)
    assert store.begun.acquire(timeout=30)
    assert not second.done()
    store.go.release()
    watch = second.result(30)
    assert store.armed == [["a/"]]
    shared.wake(["a/b"])
    assert watch.wait(0)


def test_a_prefix_whose_handle_is_closed_while_it_is_armed_is_forgotten() -> None:
    shared, store = SharedWatches(), Arming()
    opening = aside(lambda: store.open(shared, "a/"))
    assert store.begun.acquire(timeout=30)
    shared.handles()[0].close()  # as closing the registry does
    store.go.release()
    with pytest.raises(Closed):
        opening.result(30)
    assert store.disarmed[-1] == "a/", "after it was armed"
    assert len(store.disarmed) == 2


def test_r2_a_prefix_that_is_opened_again_while_it_was_armed_for_a_closed_handle_is_armed_for_itself() -> None:
    shared, store = SharedWatches(), Arming()
    opening = aside(lambda: store.open(shared, "a/"))
    assert store.begun.acquire(timeout=30)
    shared.handles()[0].close()
    again = aside(lambda: store.open(shared, "a/"))
    assert store.begun.acquire(timeout=30), "the store knows the prefix of the closed handle only"
    store.go.release(2)
    with pytest.raises(Closed):
        opening.result(30)
    again.result(30)
    assert store.disarmed == ["a/", "a/"], "the first one: when its handle was closed, and after it was armed"
    assert store.armed == [["a/"], ["a/"]]
