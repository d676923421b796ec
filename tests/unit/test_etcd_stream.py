"""The watch stream of etcd, against a server that answers as the test says: no change goes without a wake."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("pyetcd")

from pxrs import grpc_fork  # noqa: F401 - first: it imports gRPC in its own way
from pxrs.errors import AccessDenied, Closed, RegistryUnavailable
from pxrs.registry.etcd import stream as module
from pxrs.registry.etcd.faults import Fault, Proof
from pxrs.registry.etcd.stream import Stream
from pxrs.testing.waiting import aside, eventually

import grpc  # isort: skip
from pyetcd import etcdrpc as rpc  # isort: skip

BOUND_S = 30.0


class Broken(grpc.RpcError):  # type: ignore[misc]
    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "as the test says"


class Call:
    """One stream, on etcd's side: what it was sent, and what it answers."""

    def __init__(self, requests: Iterator[Any]) -> None:
        self.sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.is_cancelled = threading.Event()
        self.may_ask = threading.Event()
        """While it is not set, gRPC's thread does not fetch the next request."""
        self.may_ask.set()
        self.requests_ended = aside(lambda: self._fetch(requests))
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def _fetch(self, requests: Iterator[Any]) -> None:
        for each in requests:
            self.sent.put(each)
            self.may_ask.wait(BOUND_S)

    def __iter__(self) -> Iterator[Any]:
        while (answer := self._answers.get()) is not None:
            if isinstance(answer, Exception):
                raise answer
            yield answer

    def cancel(self) -> None:
        self.is_cancelled.set()
        self.answer(Broken(grpc.StatusCode.CANCELLED))

    def answer(self, response: Any) -> None:
        """A response, an error that ends the stream, or None: the server ends it in good order."""
        self._answers.put(response)

    def created(self, number: int) -> None:
        self.answer(rpc.WatchResponse(created=True, watch_id=number))

    def changed(self, number: int, *keys: bytes) -> None:
        response = rpc.WatchResponse(watch_id=number)
        for key in keys:
            response.events.add().kv.key = key
        self.answer(response)

    def denied(self) -> None:
        reason = "rpc error: permission denied"
        self.answer(rpc.WatchResponse(created=True, canceled=True, watch_id=-1, cancel_reason=reason))

    def next_asked(self) -> bytes:
        """The first key of the next range that the client asks to watch."""
        key: bytes = self.sent.get(timeout=BOUND_S).create_request.key
        return key

    def next_cancelled(self) -> int:
        """The next watch that the client cancels."""
        number: int = self.sent.get(timeout=BOUND_S).cancel_request.watch_id
        return number


class Etcd:
    """A `Link` to a server whose streams are in `calls`."""

    timeout_s = BOUND_S
    where = "etcd://test"

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self.learned: list[Fault] = []
        self.refusals: list[Exception] = []
        """What the next attempts to connect raise."""

    def connect(self) -> tuple[Any, Any]:
        if self.refusals:
            raise self.refusals.pop(0)
        return self, ()

    def watch(self, requests: Iterator[Any], metadata: Any) -> Call:
        call = Call(requests)
        self.calls.put(call)
        return call

    def learn(self, fault: Fault, connection: Any, metadata: Any) -> None:
        self.learned.append(fault)

    def next_call(self) -> Call:
        return self.calls.get(timeout=BOUND_S)


class Watched:
    """A range, and how often it was woken."""

    def __init__(self, stream: Stream, name: bytes) -> None:
        self.name, self._stream = name, stream
        self._wakes = threading.Semaphore(0)

    def open(self) -> Future[None]:
        return aside(lambda: self._stream.open({self.name: (self.name, b"", self._wakes.release)}))

    def wakes(self) -> None:
        """Take one wake, which must come."""
        assert self._wakes.acquire(timeout=BOUND_S), "no wake"

    def is_quiet(self) -> bool:
        return not self._wakes.acquire(blocking=False)


class Place:
    def __init__(self) -> None:
        self.etcd = Etcd()
        self.stream = Stream(self.etcd, ignored=b"/;")  # type: ignore[arg-type]
        self.a, self.b, self.c = (Watched(self.stream, name) for name in (b"/a", b"/b", b"/c"))

    def live(self, *all_watched: Watched) -> Call:
        """A stream on which these are live, with the numbers 1, 2, ..."""
        opening = []
        call: Call | None = None
        for number, each in enumerate(all_watched, 1):
            opening.append(each.open())
            call = call or self.etcd.next_call()
            assert call.next_asked() == each.name
            call.created(number)
            opening[-1].result(BOUND_S)
        assert call is not None
        return call

    def sync(self, call: Call, watched: Watched, number: int) -> None:
        """Return when all answers before this have been handled."""
        call.changed(number, watched.name)
        watched.wakes()

    def has_thread(self) -> bool:
        return any(thread.name == "pxrs-etcd-watch" for thread in threading.enumerate())


@contextmanager
def place() -> Iterator[Place]:
    here = Place()
    assert not here.has_thread()
    try:
        yield here
    finally:
        here.stream.close()
        eventually(lambda: not here.has_thread())


def test_r2_a_watch_is_open_when_etcd_has_confirmed_it_and_wakes_for_its_own_keys() -> None:
    with place() as here:
        opening = here.a.open()
        call = here.etcd.next_call()
        assert call.next_asked() == b"/a"
        assert not here.stream.is_live(b"/a")
        assert not opening.done(), "etcd has not confirmed it"
        call.created(7)
        opening.result(BOUND_S)
        assert here.stream.is_live(b"/a")
        second = here.b.open()
        assert call.next_asked() == b"/b", "on the same stream"
        call.changed(7, b"/a")
        here.a.wakes()
        assert not second.done(), "the answer was one of another watch"
        call.created(9)
        second.result(BOUND_S)
        call.changed(9, b"/b")
        here.b.wakes()
        call.changed(7, b"/;leases/x")
        call.changed(7)
        call.changed(7, b"/;leases/x", b"/a")
        here.a.wakes()
        here.sync(call, here.b, 9)
        assert here.a.is_quiet(), "keys of the registry's own are no change"
        assert here.b.is_quiet()


@pytest.mark.parametrize("ends_by", ["an error", "the server", "a cancelled watch", "a mistake"])
def test_r2_when_a_stream_ends_all_wake_and_once_more_when_they_are_live_again(ends_by: str) -> None:
    with place() as here:
        call = here.live(here.a, here.b)
        if ends_by == "a cancelled watch":  # a compaction, say
            call.answer(rpc.WatchResponse(canceled=True, watch_id=2, compact_revision=5))
        elif ends_by == "a mistake":
            call.created(8)  # nobody has asked
        else:
            call.answer(Broken(grpc.StatusCode.UNAVAILABLE) if ends_by == "an error" else None)
        here.a.wakes()
        here.b.wakes()
        after = here.etcd.next_call()
        assert call.is_cancelled.is_set()
        call.requests_ended.result(BOUND_S)
        asked = [after.next_asked(), after.next_asked()]
        assert asked == [b"/a", b"/b"]
        assert not here.stream.is_live(b"/a")
        assert here.a.is_quiet(), "a scan now could still miss what changes before the confirmation"
        after.changed(2, b"/b")  # 2 was the number of /b on the stream before
        after.created(2)
        here.a.wakes()
        assert here.stream.is_live(b"/a")
        assert here.b.is_quiet()
        after.created(1)
        here.b.wakes()
        after.changed(1, b"/b")
        here.b.wakes()
        assert here.a.is_quiet()
        assert [fault.proof for fault in here.etcd.learned] == ([Proof.LOST] if ends_by == "an error" else [])


def test_r2_a_watch_that_is_opened_between_two_streams_is_asked_for_on_the_next_one() -> None:
    with place() as here:
        call = here.live(here.a)
        here.etcd.refusals = [RegistryUnavailable("no route")] * 3
        call.answer(Broken(grpc.StatusCode.UNAVAILABLE))
        here.a.wakes()
        opening = here.b.open()
        after = here.etcd.next_call()
        assert {after.next_asked(), after.next_asked()} == {b"/a", b"/b"}
        assert here.a.is_quiet(), "no wakes between"
        after.created(1)
        after.created(2)
        opening.result(BOUND_S)
        here.a.wakes()


def test_r2_requests_that_a_stream_has_not_sent_when_it_ends_do_not_count_for_the_next_one() -> None:
    with place() as here:
        call = here.live(here.a)
        call.may_ask.clear()
        opening = [here.b.open()]
        assert call.next_asked() == b"/b"
        opening.append(here.c.open())
        eventually(lambda: b"/c" in here.stream._ranges)
        call.answer(None)
        after = here.etcd.next_call()
        assert [after.next_asked() for _ in range(3)] == [b"/a", b"/b", b"/c"]
        call.may_ask.set()
        call.requests_ended.result(BOUND_S)
        assert call.sent.empty()
        for number in (1, 2, 3):
            after.created(number)
        for each in opening:
            each.result(BOUND_S)
        last = Watched(here.stream, b"/d")
        opened = last.open()
        assert after.next_asked() == b"/d"
        after.created(4)
        opened.result(BOUND_S)


def test_a_watch_that_is_opened_during_a_pause_does_not_wait_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S_MIN", 300.0)
    monkeypatch.setattr(module, "PAUSE_S_MAX", 300.0)
    with place() as here:
        call = here.live(here.a)
        call.answer(None)
        here.a.wakes()
        opening = here.b.open()
        after = here.etcd.next_call()
        assert {after.next_asked(), after.next_asked()} == {b"/a", b"/b"}
        after.created(1)
        after.created(2)
        opening.result(BOUND_S)


def test_a_watch_that_is_removed_before_its_confirmation_is_cancelled_and_takes_no_answer_of_another() -> None:
    with place() as here:
        call = here.live(here.a)
        removed, opening = here.b.open(), here.c
        assert call.next_asked() == b"/b"
        third = opening.open()
        assert call.next_asked() == b"/c"
        here.stream.remove(b"/b")
        with pytest.raises(Closed):
            removed.result(BOUND_S / 2)
        call.created(2)
        assert call.next_cancelled() == 2
        call.answer(rpc.WatchResponse(canceled=True, watch_id=2))
        call.created(3)
        third.result(BOUND_S)
        call.changed(3, b"/c")
        here.c.wakes()
        call.changed(2, b"/b")
        here.sync(call, here.a, 1)
        assert here.b.is_quiet()
        assert not call.is_cancelled.is_set(), "the stream goes on"


def test_a_live_watch_that_is_removed_is_cancelled_and_wakes_no_more() -> None:
    with place() as here:
        call = here.live(here.a, here.b)
        here.stream.remove(b"/a")
        here.stream.remove(b"/a")
        here.stream.remove(b"/never")
        assert call.next_cancelled() == 1
        assert not here.stream.is_live(b"/a")
        call.changed(1, b"/a")  # was on its way
        call.answer(rpc.WatchResponse(canceled=True, watch_id=1))
        here.sync(call, here.b, 2)
        assert here.a.is_quiet()
        assert not call.is_cancelled.is_set()
        call.answer(None)
        here.b.wakes()
        after = here.etcd.next_call()
        assert after.next_asked() == b"/b"
        after.created(1)
        here.b.wakes()
        assert here.a.is_quiet()
        assert after.sent.empty(), "what was removed is not asked for again"


def test_the_stream_and_its_thread_end_with_the_last_watch_and_begin_with_the_next() -> None:
    with place() as here:
        call = here.live(here.a)
        here.stream.remove(b"/a")
        assert call.is_cancelled.wait(BOUND_S)
        eventually(lambda: not here.has_thread())
        call.requests_ended.result(BOUND_S)
        assert here.a.is_quiet()
        assert here.etcd.learned == [], "nothing has failed"
        here.live(here.b)


def test_r2_the_next_watch_may_come_while_the_last_one_leaves() -> None:
    """The new range is added to the stream that is just about to be cancelled."""
    with place() as here:
        call = here.live(here.a)
        cancel, opening = call.cancel, []

        def open_first() -> None:
            call.cancel = cancel  # type: ignore[method-assign]
            opening.append(here.b.open())
            assert call.next_cancelled() == 1
            assert call.next_asked() == b"/b"
            cancel()

        call.cancel = open_first  # type: ignore[method-assign]
        here.stream.remove(b"/a")
        after = here.etcd.next_call()
        assert after.next_asked() == b"/b"
        after.created(1)
        opening[0].result(BOUND_S)
        after.changed(1, b"/b")
        here.b.wakes()


def test_a_permission_that_is_denied_twice_is_an_error_and_once_a_reason_to_log_in() -> None:
    with place() as here:
        call = here.live(here.a)
        opening = here.b.open()
        assert call.next_asked() == b"/b"
        call.denied()
        here.a.wakes()
        call = here.etcd.next_call()
        assert [fault.proof for fault in here.etcd.learned] == [Proof.LOGIN]
        assert [call.next_asked(), call.next_asked()] == [b"/a", b"/b"]
        call.created(1)
        here.a.wakes()
        assert not opening.done(), "the token may have expired"
        call.denied()
        with pytest.raises(AccessDenied):
            opening.result(BOUND_S)
        here.sync(call, here.a, 1)
        assert not call.is_cancelled.is_set(), "the others are none the worse for it"
        call.answer(None)
        here.a.wakes()
        call = here.etcd.next_call()
        assert call.next_asked() == b"/a"
        call.denied()  # a permission was taken away, or a token has expired
        call = here.etcd.next_call()
        assert call.next_asked() == b"/a"
        call.denied()
        call = here.etcd.next_call()
        assert call.next_asked() == b"/a", "one that was live is asked for until it is live again"
        assert [fault.proof for fault in here.etcd.learned] == [Proof.LOGIN] * 2
        call.created(4)
        here.a.wakes()
        call.answer(None)
        here.a.wakes()
        call = here.etcd.next_call()
        assert call.next_asked() == b"/a"
        call.denied()
        here.etcd.next_call()
        assert [fault.proof for fault in here.etcd.learned] == [Proof.LOGIN] * 3, "the next token has expired too"


def test_credentials_that_are_refused_twice_are_an_error_of_those_who_wait() -> None:
    with place() as here:
        here.etcd.refusals = [AccessDenied("no")]
        opening = here.a.open()
        call = here.etcd.next_call()
        assert call.next_asked() == b"/a"
        call.created(1)
        opening.result(BOUND_S)
        here.etcd.refusals = [AccessDenied("no")]
        opening = here.b.open()
        assert call.next_asked() == b"/b"
        call.answer(None)
        here.a.wakes()
        call = here.etcd.next_call()
        assert [call.next_asked(), call.next_asked()] == [b"/a", b"/b"]
        call.created(1)
        call.created(2)
        opening.result(BOUND_S)
        here.a.wakes()
        here.etcd.refusals = [AccessDenied("no")] * 2
        opening = here.c.open()
        assert call.next_asked() == b"/c"
        call.answer(None)
        with pytest.raises(AccessDenied):
            opening.result(BOUND_S)
        here.a.wakes()
        after = here.etcd.next_call()
        assert [after.next_asked(), after.next_asked()] == [b"/a", b"/b"]
        after.created(1)
        here.a.wakes()


def test_a_watch_that_is_not_confirmed_in_time_is_an_error_and_is_forgotten() -> None:
    with place() as here:
        call = here.live(here.a)
        here.etcd.timeout_s = 0.05
        began = time.monotonic()
        with pytest.raises(RegistryUnavailable):
            here.b.open().result(BOUND_S)
        assert time.monotonic() - began < BOUND_S / 2
        assert call.next_asked() == b"/b"
        call.created(2)
        assert call.next_cancelled() == 2
        here.sync(call, here.a, 1)
        here.etcd.timeout_s = BOUND_S
        opening = here.b.open()
        assert call.next_asked() == b"/b"
        call.created(3)
        opening.result(BOUND_S)


def test_a_thread_that_cannot_be_started_is_started_for_the_next_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise RuntimeError("can't start new thread")

    with place() as here:
        with monkeypatch.context() as patch:
            patch.setattr(module, "start_thread", refuse)
            with pytest.raises(RuntimeError):
                here.a.open().result(BOUND_S)
        here.live(here.a)


def test_closing_ends_the_stream_and_those_who_wait() -> None:
    with place() as here:
        call = here.live(here.a)
        opening = here.b.open()
        assert call.next_asked() == b"/b"
        here.stream.close()
        with pytest.raises(Closed):
            opening.result(BOUND_S)
        assert call.is_cancelled.is_set()
        assert not here.has_thread()
        call.requests_ended.result(BOUND_S)
        with pytest.raises(Closed):
            here.c.open().result(BOUND_S)
        assert here.etcd.learned == []
        here.stream.close()
