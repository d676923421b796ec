"""What keeps leases alive: one scheduler, workers that do not wait for each other, and a bound on them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager

import pytest

from pxrs.clock import ManualClock
from pxrs.errors import LeaseExpired, RegistryUnavailable
from pxrs.registry import renewal
from pxrs.registry.lease import Lease
from pxrs.registry.memory import MemoryRegistry, MemoryStore
from pxrs.registry.renewal import Renewals, RenewalState, Renewer
from pxrs.testing.waiting import aside, eventually

TTL_S = 8.0


class Stored:
    """The store's side of a lease. A renewal waits for `may_answer`."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.asked = threading.Semaphore(0)
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.end_calls = 0
        self.let_go_calls = 0

    def renew(self) -> float:
        sent_at = self.clock.now()
        self.asked.release()
        assert self.may_answer.wait(60)
        return sent_at + TTL_S

    def end(self) -> None:
        self.end_calls += 1

    def let_go(self) -> None:
        self.let_go_calls += 1


class Place:
    def __init__(self, workers_max: int) -> None:
        self.clock = ManualClock()
        self.renewer = Renewer(self.clock, workers_max)
        self.stored: list[Stored] = []
        self.leases: list[Lease] = []
        """Kept, as a registry keeps the leases that it renews."""
        self.blocked = 0
        """How many workers are blocked by something other than a renewal."""
        self.others = set(threading.enumerate())

    def lease(self, *, renewed: bool = True, hangs: bool = False) -> Lease:
        stored = Stored(self.clock)
        self.stored.append(stored)
        if hangs:
            stored.may_answer.clear()
        lease = Lease(
            f"l{len(self.stored)}",
            TTL_S,
            self.clock.now() + TTL_S,
            secret="not to be shown",
            stored=stored,
            on_closed=lambda _: None,
            clock=self.clock,
        )
        self.leases.append(lease)
        if renewed:
            self.renewer.add(lease)
        return lease

    def threads(self) -> list[threading.Thread]:
        mine = set(threading.enumerate()) - self.others
        return [thread for thread in mine if thread.name.startswith("pxrs-renewal")]

    def pass_time(self, seconds: float, step: float = TTL_S / 16) -> None:
        """Let time pass in steps, each only when the scheduling thread has acted on the one before."""
        for _ in range(round(seconds / step)):
            self.clock.advance(step)
            self.settle()

    def settle(self) -> None:
        """Wait until nothing is due, no renewal is under way that can be answered, and no free worker has work."""
        eventually(self._is_settled)

    def _is_settled(self) -> bool:
        with self.renewer._lock:
            states = [each.renewal.state for each in self.leases if isinstance(each.renewal, Renewals)]
            running = [each for each in self.leases if each.renewal and each.renewal.thread]  # type: ignore[attr-defined]
            return (
                all(due > self.clock.now() for due, _, each in self.renewer._heap if each.due == due)
                and not any(each.stored.may_answer.is_set() for each in running)  # type: ignore[attr-defined]
                and (RenewalState.QUEUED not in states or len(running) + self.blocked == len(self.renewer._workers))
            )


@contextmanager
def place(workers_max: int = 4) -> Iterator[Place]:
    it = Place(workers_max)
    try:
        yield it
    finally:
        for stored in it.stored:
            stored.may_answer.set()
        it.renewer.close()
        eventually(lambda: not it.threads())


def test_r6_a_renewal_that_hangs_does_not_expire_another_lease() -> None:
    with place() as here:
        stuck, other = here.lease(hangs=True), here.lease()
        here.pass_time(3 * TTL_S)
        assert not stuck.alive
        assert other.alive
        assert other.deadline > here.clock.now() + TTL_S / 2


def test_r6_the_loss_of_a_lease_is_told_while_its_renewal_still_hangs() -> None:
    with place() as here:
        stuck = here.lease(hangs=True)
        here.pass_time(TTL_S)
        assert stuck.lost.wait(30)


@pytest.mark.parametrize("by", ["close", "end"])
def test_a_lease_that_its_holder_ends_during_a_renewal_is_not_logged_as_expired(
    caplog: pytest.LogCaptureFixture, by: str
) -> None:
    with caplog.at_level(logging.WARNING):
        with place() as here:
            lease = here.lease(hangs=True)
            here.clock.advance(TTL_S / 4)
            assert here.stored[0].asked.acquire(timeout=30)
            ending = aside(getattr(lease, by))
            assert lease.lost.wait(30)
            here.stored[0].may_answer.set()
            ending.result()
        assert caplog.messages == []  # and all threads of the Renewer have ended


def test_at_the_bound_a_lease_waits_and_passes_its_own_deadline(caplog: pytest.LogCaptureFixture) -> None:
    with place(workers_max=3) as here, caplog.at_level(logging.WARNING):
        for _ in range(3):
            here.lease(hangs=True)
        here.pass_time(TTL_S / 4 + TTL_S / 4)
        late = here.lease()
        here.pass_time(TTL_S - TTL_S / 16)
        assert late.alive
        assert len(here.threads()) == 1 + 3
        here.pass_time(TTL_S / 16)
        assert not late.alive
        assert late.lost.is_set()
        assert here.stored[-1].asked.acquire(blocking=False) is False, "its renewal was never begun"
        with pytest.raises(LeaseExpired):
            late.check()
        for stored in here.stored:
            stored.may_answer.set()
        eventually(lambda: [each for each in caplog.messages if f"lease {late.id} could not be renewed" in each])


def test_threads_do_not_grow_with_leases_and_end_with_the_last_one() -> None:
    with place() as here:
        leases = [here.lease() for _ in range(100)]
        for _ in range(4):
            here.pass_time(TTL_S / 4)
            for stored in here.stored:
                assert stored.asked.acquire(timeout=30)
        assert len(here.threads()) == 2, "one schedules, one renews"
        assert all(lease.alive for lease in leases)
        for lease in leases:
            lease.close()
        eventually(lambda: not here.threads())
        assert [stored.end_calls for stored in here.stored] == [1] * 100
        again = here.lease()
        here.pass_time(TTL_S / 4)
        assert here.stored[-1].asked.acquire(timeout=30), "the threads start again"
        assert again.alive


def test_workers_that_were_added_for_hanging_renewals_end_when_those_return() -> None:
    with place() as here:
        for _ in range(3):
            here.lease(hangs=True)
        here.pass_time(TTL_S / 2)
        assert len(here.threads()) == 1 + 3
        for stored in here.stored:
            stored.may_answer.set()
        eventually(lambda: len(here.threads()) == 2)


def test_closing_waits_for_the_renewal_that_is_under_way() -> None:
    with place() as here:
        lease = here.lease(hangs=True)
        here.pass_time(TTL_S / 4)
        assert here.stored[0].asked.acquire(timeout=30)
        closing = aside(lease.close)
        assert eventually(lambda: lease.lost.is_set())
        assert here.stored[0].end_calls == 0
        here.stored[0].may_answer.set()
        closing.result(30)
        assert here.stored[0].end_calls == 1


def test_a_renewal_that_is_queued_is_not_made_after_stop() -> None:
    with place(workers_max=1) as here:
        here.lease(hangs=True)
        queued = here.lease()
        here.pass_time(TTL_S / 4)
        assert isinstance(queued.renewal, Renewals)
        assert queued.renewal.state is RenewalState.QUEUED
        queued.renewal.stop(0.0)
        here.stored[0].may_answer.set()
        here.settle()
        eventually(lambda: here.renewer._idle_count == 1)
        assert not here.stored[1].asked.acquire(blocking=False)


def test_a_lease_that_is_added_after_close_is_not_renewed() -> None:
    with place() as here:
        here.renewer.close()
        here.lease()
        here.clock.advance(TTL_S / 2)
        assert not here.threads()


def test_leases_are_renewed_by_the_next_thread_if_one_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = 2
    start = renewal.start_thread

    def refuse(run: Callable[[], None], name: str) -> threading.Thread:
        nonlocal refusals
        if name == "pxrs-renewal" and refusals:
            refusals -= 1
            raise RuntimeError("can't start new thread")
        return start(run, name)

    monkeypatch.setattr(renewal, "start_thread", refuse)
    with place() as here, caplog.at_level(logging.WARNING):
        lease = here.lease()
        here.pass_time(TTL_S / 2)
        assert here.stored[0].asked.acquire(timeout=30)
        assert not refusals
        assert lease.alive
        eventually(lambda: "can't start new thread" in caplog.text)
        with monkeypatch.context() as patch:
            patch.setattr(renewal, "start_thread", _no_thread)
            here.renewer.stop(lease.renewal, 30)  # type: ignore[arg-type]
            eventually(lambda: not here.threads())
            with pytest.raises(RuntimeError):
                here.lease()
        here.lease()
        here.pass_time(TTL_S / 2)
        assert here.stored[-1].asked.acquire(timeout=30)


def _no_thread(run: Callable[[], None], name: str) -> threading.Thread:
    raise RuntimeError("can't start new thread")


def test_a_lease_that_is_not_renewed_costs_no_thread_and_is_let_go_by_close() -> None:
    with place() as here:
        lease = here.lease(renewed=False)
        assert not lease.is_renewed
        here.clock.advance(TTL_S / 2)
        assert lease.renew() == here.clock.now() + TTL_S
        here.clock.advance(TTL_S)
        with pytest.raises(LeaseExpired):
            lease.renew()
        lease.close()
        lease.close()
        assert (here.stored[0].end_calls, here.stored[0].let_go_calls) == (0, 1)
        assert not here.threads()


def test_r3_a_renewal_whose_reply_comes_after_the_deadline_is_refused() -> None:
    with place() as here:
        lease = here.lease(renewed=False, hangs=True)
        renewing = aside(lease.renew)
        assert here.stored[0].asked.acquire(timeout=30)
        here.clock.advance(TTL_S)
        here.stored[0].may_answer.set()
        with pytest.raises(LeaseExpired, match="after its deadline"):
            renewing.result(30)
        assert not lease.alive


def test_r3_a_lease_that_is_ended_while_a_renewal_returns_gets_no_new_deadline() -> None:
    with place() as here:
        lease = here.lease(renewed=False)
        expiring: list[Future[None]] = []

        class Late(threading.Event):
            """Another thread ends the lease right after it was found alive, before the new deadline is set."""

            asked = 0

            def is_set(self) -> bool:
                was_set = super().is_set()
                self.asked += 1
                if self.asked == 6:  # four times before the renewal is sent, twice after its reply
                    expiring.append(aside(lease.expire))
                    wait(expiring, timeout=0.2)
                return was_set

        lease.lost = Late()
        lease.renew()
        expiring[0].result(30)
        assert lease.deadline == float("-inf")
        assert not lease.alive


def test_r3_a_renewal_that_waited_for_another_one_is_not_sent_once_the_lease_has_ended() -> None:
    with place() as here:
        lease = here.lease(renewed=False, hangs=True)
        first = aside(lease.renew)
        assert here.stored[0].asked.acquire(timeout=30)
        waits = threading.Event()
        lock = lease._renewing

        class Noted:
            def acquire(self, timeout: float) -> bool:
                waits.set()
                return lock.acquire(timeout=timeout)

            def release(self) -> None:
                lock.release()

        lease._renewing = Noted()  # type: ignore[assignment]
        second = aside(lease.renew)
        assert waits.wait(30)
        lease.expire()
        here.stored[0].may_answer.set()
        for each in (first, second):
            with pytest.raises(LeaseExpired):
                each.result(30)
        assert not here.stored[0].asked.acquire(blocking=False), "the store would have kept the lease for another ttl"


def test_end_tells_of_a_store_that_did_not_answer_and_may_be_called_again() -> None:
    with place() as here:
        lease = here.lease()
        answers: list[Callable[[], None]] = [lambda: None, _unreachable]
        here.stored[0].end = lambda: answers.pop()()  # type: ignore[method-assign]
        with pytest.raises(RegistryUnavailable):
            lease.end()
        assert not lease.alive
        lease.end()
        assert not answers
        lease.close()


def _unreachable() -> None:
    raise RegistryUnavailable("no route")


def test_a_handler_of_the_program_that_blocks_logging_does_not_expire_other_leases() -> None:
    """The scheduling thread logs nothing itself."""
    may_log = threading.Event()
    logger = logging.getLogger("pxrs.registry.renewal")
    with place() as here:

        class Blocked(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                here.blocked += 1
                assert may_log.wait(60)
                here.blocked -= 1

        handler = Blocked(logging.WARNING)
        logger.addHandler(handler)
        try:
            lost, other = here.lease(), here.lease()
            lost.abandon()
            here.pass_time(TTL_S)
            eventually(lambda: here.blocked)
            here.pass_time(2 * TTL_S)
            assert not lost.alive
            assert other.alive
        finally:
            may_log.set()
            logger.removeHandler(handler)


@pytest.mark.parametrize("fault", ["a handler blocks", "a filter raises"])
def test_a_renewal_that_failed_is_tried_again_whatever_becomes_of_its_log_line(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_log = threading.Event()
    logger = logging.getLogger("pxrs.registry.renewal")
    monkeypatch.setattr(threading, "excepthook", lambda given: None)
    with place(workers_max=2) as here:

        def fail(record: logging.LogRecord) -> bool:
            if fault == "a filter raises":
                raise ValueError("a mistake of the program")
            here.blocked += 1
            assert may_log.wait(60)
            here.blocked -= 1
            return False

        logger.addFilter(fail)
        monkeypatch.setattr(logger, "level", logging.INFO)
        try:
            lease = here.lease()
            answers = [False] if fault == "a handler blocks" else [False, False, False, False]
            renew = here.stored[0].renew

            def renew_later() -> float:
                if answers:
                    answers.pop()
                    raise RegistryUnavailable("no route")
                return renew()

            here.stored[0].renew = renew_later  # type: ignore[method-assign]
            here.pass_time(3 * TTL_S)
            assert not answers
            assert lease.alive
        finally:
            may_log.set()
            logger.removeFilter(fail)


def test_the_secret_is_not_shown() -> None:
    with MemoryRegistry(MemoryStore()) as registry:
        lease = registry.lease(30)
        assert lease.secret not in f"{lease!r} {registry!r} {lease.id}"
        assert len(lease.secret) >= 64
