"""Schedules in which two threads of a producer, or an interrupt, meet at a bad moment."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from pxrs.errors import AppendFailed, AppendUnknown
from pxrs.log.contract import Append, Tell, by_partition
from pxrs.log.outcomes import Outcome
from pxrs.model import Topic
from pxrs.producer.appender import UNRETURNED_MAX, Appender, Call
from pxrs.producer.outbox import Outbox
from pxrs.producer.producer import Producer
from pxrs.producer.receipts import Receipt, Result, SentBatch
from pxrs.producer.sending import SendingThread
from tests.unit.producer.failing import Fickle, Gate, expire, is_given, make

SOON_S = 30.0
"""For what takes no time on an idle machine."""


class Held(Fickle):
    """Appends with a batch of partition 1 wait at a gate."""

    def __init__(self, topic: Topic) -> None:
        super().__init__(topic)
        self.gate = Gate()
        self.waiting: list[list[Append]] = []
        """The appends that have come to the gate."""

    def append(self, appends: Sequence[Append]) -> list[Outcome]:
        if any(each.partition == 1 for each in appends):
            self.waiting.append(list(appends))
            self.gate(appends)
        return super().append(appends)


@pytest.fixture
def held() -> Iterator[Held]:
    topic = Held(make(2).topic)
    yield topic
    topic.gate.opened.set()


def started(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """Make the call on a thread of its own. Also returns a list that gets what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


def test_close_raises_the_error_of_the_last_batch_while_another_thread_tells_it(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the last append has taken the batch from its lane, and is about to tell the outbox the error. The
    leader wakes up, because another append has returned, and sees no batch without a result."""
    held.refusals = {1: AppendFailed("refused")}
    settle = Outbox.settle
    out = Producer(held, linger_s=0, tries_max=1)

    def late(self: Outbox, results: Sequence[Result], failed: Mapping[int, BaseException]) -> None:
        if failed:
            out.sending._appender._changed()
            self.done.wait_for(lambda: self.is_ended, 0.3)
        settle(self, results, failed)

    monkeypatch.setattr(Outbox, "settle", late)
    receipt = out.send(b"a", partition=1)
    assert held.gate.reached.wait(SOON_S)
    closing, raised = started(out.close)
    assert wait_until(lambda: out.sending.outbox.is_drained)
    held.gate.opened.set()
    closing.join(SOON_S)
    with pytest.raises(AppendFailed, match="refused"):
        receipt.result(SOON_S)
    assert [str(each) for each in raised] == ["refused"]


def wait_until(is_true: Callable[[], object]) -> bool:
    for _ in range(int(SOON_S * 100)):
        if is_true():
            return True
        threading.Event().wait(0.01)
    return False


def test_what_is_being_sorted_when_the_producer_is_closed_fails_with_what_was_sent_before_it(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` has made the leader take the last messages. Before they are in their lanes, what was sent before them
    fails: stored, they would be acknowledged although one before them is missing."""
    held.refusals = {1: AppendFailed("refused")}
    begin_round = Outbox.begin_round
    out = Producer(held, linger_s=60, tries_max=1)
    first = out.send(b"first", partition=1)
    with pytest.raises(TimeoutError):
        out.flush(timeout=0)
    assert held.gate.reached.wait(SOON_S)

    def late(self: Outbox, batches: Sequence[SentBatch]) -> bool:
        if self.is_drained and batches:
            held.gate.opened.set()
            assert self.done.wait_for(lambda: first.is_done, SOON_S)
            held.refusals = {}
        return begin_round(self, batches)

    monkeypatch.setattr(Outbox, "begin_round", late)
    second = out.send(b"second", partition=1)
    with pytest.raises(AppendFailed, match="refused"):
        out.close()
    with pytest.raises(AppendFailed, match="because an earlier batch of the partition failed"):
        second.result(SOON_S)
    assert held.values(1) == []


class Telling(Fickle):
    """Tells of partition 0 at once, and of the others when the gate is open."""

    def __init__(self, topic: Topic) -> None:
        super().__init__(topic)
        self.gate = Gate()

    def append_each(self, appends: Sequence[Append], tell: Tell) -> None:
        found = by_partition(appends, self.append(appends))
        tell({0: found.pop(0)})
        self.gate(appends)
        tell(found)


def test_what_an_append_has_told_counts_although_it_returns_while_it_is_found_to_be_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = Telling(make(2).topic)
    answer, note_slow = Appender._answer, Appender.note_slow
    answered, noting = threading.Event(), set[int]()

    def noted(self: Appender, call: Call) -> None:
        noting.add(threading.get_ident())
        note_slow(self, call)
        topic.gate.opened.set()

    def late(self: Appender, call: Call, outcomes: Mapping[int, Sequence[Outcome]]) -> None:
        if threading.get_ident() in noting:
            topic.gate.opened.set()
            assert answered.wait(SOON_S)
        answer(self, call, outcomes)
        answered.set()

    monkeypatch.setattr(Appender, "_answer", late)
    monkeypatch.setattr(Appender, "note_slow", noted)
    with Producer(topic, linger_s=0.05, tries_max=1) as out:
        receipts = [out.send(b"a", partition=partition) for partition in range(2)]
        out.flush()
        assert [each.result(SOON_S) for each in receipts] == [(0, 0), (1, 0)]


def test_a_partition_whose_appends_never_return_takes_no_more_than_two_threads(held: Held) -> None:
    out = Producer(held, linger_s=0, delivery_timeout=60)
    for number in range(4):
        receipt = out.send(b"a", partition=1)
        if number < UNRETURNED_MAX:
            expire(out, is_given)
        else:
            expire(out, lambda lane: True, left_s=0.1)
        with pytest.raises(AppendFailed):
            receipt.result(SOON_S)
    assert len(held.waiting) == UNRETURNED_MAX
    assert wait_until(lambda: out.sending._busy == UNRETURNED_MAX), "a leader that looks for an append counts as busy"
    held.gate.opened.set()
    assert wait_until(lambda: not out.sending._busy)
    out.send(b"b", partition=1).result(SOON_S)
    with pytest.raises(AppendUnknown):
        out.close()


def test_a_partition_whose_append_never_returns_goes_on_although_nothing_else_is_sent(held: Held) -> None:
    """The former leader is in the append, and the present one makes no appends that are apart from others."""
    out = Producer(held, linger_s=0, delivery_timeout=60)
    receipt = out.send(b"a", partition=1)
    expire(out, is_given)
    with pytest.raises(AppendUnknown):
        receipt.result(SOON_S)
    out.send(b"b", partition=1)
    assert wait_until(lambda: len(held.waiting) == 2)
    held.gate.opened.set()
    with pytest.raises(AppendUnknown):
        out.close()


def test_the_delivery_timeout_counts_from_the_first_message_and_not_from_when_it_is_taken(
    topic: Fickle, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[SentBatch] = []
    add = Appender.add

    def noted(self: Appender, batches: Sequence[SentBatch]) -> None:
        taken.extend(batches)
        add(self, batches)

    monkeypatch.setattr(Appender, "add", noted)
    with Producer(topic, linger_s=60, delivery_timeout=100) as out:
        before = out.sending.outbox.lingers_since
        out.send(b"a", partition=0)
        assert wait_until(lambda: out.sending.outbox.lingers_since > before), "the leader has seen the message"
        seen = time.monotonic()
        out.flush()
        assert taken[0].expires_at <= seen + 100


def test_a_message_that_has_lingered_for_most_of_its_time_is_stored(topic: Fickle) -> None:
    """It is the first one, and to be tried apart from others: there is no second thread yet."""
    linger_s, left_s = 60, 19
    with Producer(topic, linger_s=linger_s, delivery_timeout=linger_s + left_s) as out:
        outbox = out.sending.outbox
        before = outbox.lingers_since
        receipt = out.send(b"a", partition=0)
        assert wait_until(lambda: outbox.lingers_since > before), "the leader has seen the message"
        with outbox.lock:  # as if it had been sent that long ago
            outbox.lingers_since -= linger_s
            outbox.chunk.opened_at -= linger_s
        out.sending._appender._changed()
        assert receipt.result(SOON_S) == (0, 0)


def test_a_look_up_that_never_returns_holds_up_another_partition_once(monkeypatch: pytest.MonkeyPatch) -> None:
    topic, asked, gate = make(2), threading.Event(), threading.Event()
    end = topic.end

    def hanging(partition: int) -> int:
        asked.set()
        assert partition == 1 or gate.wait(SOON_S)
        return end(partition)

    def sent(out: Producer) -> list[Receipt]:
        receipts = [out.send(b"a", partition=partition) for partition in range(2)]
        with pytest.raises(TimeoutError):
            out.flush(timeout=0)
        return receipts

    monkeypatch.setattr(topic, "end", hanging)
    out = Producer(topic, linger_s=60, delivery_timeout=90)
    first = sent(out)
    assert asked.wait(SOON_S)
    expire(out, lambda lane: lane.is_trying)
    with pytest.raises(AppendFailed, match="it was not sent to the log"):
        out.flush()
    for each in first:
        with pytest.raises(AppendFailed):
            each.result(0)
    stuck, stored = sent(out)
    assert stored.result(SOON_S) == (1, 0)
    assert not stuck.is_done
    gate.set()
    out.close()
    assert stuck.result(0) == (0, 0)


def test_a_thread_that_is_not_needed_ends_only_if_another_one_is_free(
    topic: Fickle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pxrs.producer.sending._IDLE_S", 0.001)
    with Producer(topic) as out:
        sending, me = out.sending, threading.current_thread()
        try:
            sending._threads, sending._busy = 3, 2
            assert sending._help(me), "the two others are busy"
            sending._busy = 0
            assert not sending._help(me)
            assert sending._threads == 2, "the next one finds that it is needed"
        finally:
            sending._threads, sending._busy = 1, 0


def test_close_with_a_timeout_lets_the_leader_fail_what_waits_because_an_interrupt_could_divide_it(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandon, threads = Appender.abandon, list[threading.Thread]()

    def noted(self: Appender) -> None:
        threads.append(threading.current_thread())
        abandon(self)

    monkeypatch.setattr(Appender, "abandon", noted)
    monkeypatch.setattr("pxrs.producer.sending.LATE_S", 60.0)  # `close` waits half of it for the leader
    out = Producer(held, linger_s=0)
    receipt = out.send(b"a", partition=1)
    assert held.gate.reached.wait(SOON_S)
    with pytest.raises(TimeoutError):
        out.close(timeout=0.05)
    with pytest.raises(AppendUnknown):
        receipt.result(0)
    assert threads
    assert threading.current_thread() not in threads


def test_a_producer_whose_second_thread_could_not_be_started_starts_one_later(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: SendingThread) -> None:
        raise RuntimeError("can't start new thread")

    with Producer(held, linger_s=0) as out:
        with monkeypatch.context() as patched:
            patched.setattr(SendingThread, "_new_thread", refused)
            out.send(b"a", partition=0).result(SOON_S)
        stuck = out.send(b"stuck", partition=1)
        assert held.gate.reached.wait(SOON_S)
        with contextlib.ExitStack() as stack:
            stack.callback(held.gate.opened.set)
            assert out.send(b"b", partition=0).result(SOON_S / 3) == (0, 1)
        assert stuck.result(SOON_S) == (1, 0)


def test_an_interrupt_of_flush_loses_no_error(topic: Fickle, monkeypatch: pytest.MonkeyPatch) -> None:
    topic.refusals = {0: AppendFailed("refused")}

    def interrupted(error: BaseException) -> BaseException:
        raise KeyboardInterrupt

    with Producer(topic, linger_s=60, delivery_timeout=90, tries_max=1) as out:
        out.send(b"a", partition=0)
        with monkeypatch.context() as patched:
            patched.setattr("pxrs.producer.outbox.copy_of", interrupted)
            with pytest.raises(KeyboardInterrupt):
                out.flush()
        with pytest.raises(AppendFailed, match="refused"):
            out.flush()
