"""Watches and subscriptions of this process that the server holds, and that each new stream must get anew (R2).

The server forgets them with the stream. So when a stream begins, every one is asked for again, and is woken once the
server has confirmed it: what has changed between is seen by whoever looks after that wake, and what changes later
causes an event. Only ASKED_MAX of them are asked for at a time: a server reads no more than a bounded number of
requests that it has not answered, and must always read the next renewal of a lease (W6).

| state of one | becomes | when |
|---|---|---|
| asked | armed | the server confirms it; `wait` returns, or, if it was armed before, it is woken |
| asked | failed | the server refuses it, and it was never armed: `wait` raises |
| asked | waiting | the server refuses it, and it was armed before: it is woken, now and then again |
| waiting | asked | after a pause |
| any | asked | a new stream begins |
| any | gone | `remove`: the server is told to forget it |
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from pxrs.remote.client.control import Answer, ControlStream
from pxrs.remote.client.faults import Unanswered
from pxrs.waiting import Callback, call_all

_logger = logging.getLogger(__name__)

ASKED_MAX: Final = 32
"""How many are asked for at a time. With `connection.CALLS_MAX` it must leave room for renewals."""
AGAIN_S: Final = 1.0
"""After how long one that the server has refused is asked for again."""
LOOK_S: Final = 5.0
"""How often one that the server refuses is woken: no event comes for it, so whoever waits must look now and then."""


class Armed:
    """One watch or subscription. Its fields are guarded by the lock of `Arms`."""

    def __init__(self, number: int, call: str, undo: str, arguments: Mapping[str, Any], wake: Callback) -> None:
        self.number, self.call, self.undo, self.wake = number, call, undo, wake
        self.arguments = {**arguments, "number": number}
        self.stream: ControlStream | None = None
        """The stream on which it was last asked for."""
        self.is_asked = False
        """Whether the server has not answered that yet."""
        self.was_armed = False
        self.is_refused = False
        """Whether the server has refused it although it was armed before, so that no event comes for it."""
        self.woken_at = 0.0
        """When it was last woken because of that."""
        self.failure: Exception | None = None
        self.done = threading.Event()
        """Set when it was first armed, or has failed."""


class Arms:
    """All that are armed over one connection. Threads share it. It holds no reference to the connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._all: dict[int, Armed] = {}
        self._stream: ControlStream | None = None
        self._asked: set[int] = set()
        """The numbers of those that the server of this stream has not answered yet."""
        self._queued: dict[int, Armed] = {}
        """Those that are to be asked for on this stream after others are answered, in order."""
        self._timer: threading.Timer | None = None

    def add(self, call: str, undo: str, arguments: Mapping[str, Any], wake: Callback) -> Armed:
        """Ask for it, now or when there is a stream; then call `wait`."""
        with self._lock:
            armed = Armed(next(self._numbers), call, undo, arguments, wake)
            self._all[armed.number] = armed
            stream = self._stream
        if stream is not None:
            self._ask(armed, stream)
        return armed

    def wait(self, armed: Armed, until: float) -> None:
        """Return when every later change will wake it. Raises what the server answers, or Unanswered."""
        if not armed.done.wait(max(0.0, until - time.monotonic())):
            raise Unanswered(f"the server did not confirm {armed.call} in time", was_sent=True)
        if armed.failure is not None:
            raise armed.failure
        if not armed.was_armed:
            raise Unanswered(f"{armed.call} was cancelled before the server confirmed it", was_sent=True)

    def remove(self, armed: Armed) -> bool:
        """Forget it, here and on the server. Whether it was there."""
        with self._lock:
            is_there = self._all.pop(armed.number, None) is not None
            stream = armed.stream
        if is_there:
            if stream is not None:
                self._undo(armed, stream)
            armed.done.set()  # whoever waits for it must not wait any longer
        return is_there

    def take_stream(self, stream: ControlStream) -> None:
        """A stream has begun: ask for all of them on it."""
        with self._lock:
            self._stream = stream
            self._asked.clear()
            self._queued.clear()
            everything = list(self._all.values())
        for armed in everything:
            self._ask(armed, stream)

    def lose_stream(self) -> None:
        """The stream has ended, and the next one may be long in coming: wake all that were armed, so that whoever waits
        looks, perhaps at another server."""
        with self._lock:
            wakes = [armed.wake for armed in self._all.values() if armed.was_armed]
        call_all(wakes)

    def take_event(self, number: int) -> None:
        """The server says that something may be new."""
        with self._lock:
            armed = self._all.get(number)
        if armed is not None:
            call_all((armed.wake,))

    def close(self) -> None:
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _ask(self, armed: Armed, stream: ControlStream, *, is_again: bool = False) -> None:
        with self._lock:
            # The next stream may have begun since the caller has seen this one.
            if armed.number not in self._all or stream is not self._stream:
                return
            if armed.stream is stream and (armed.is_asked or not is_again):
                return
            if len(self._asked) >= ASKED_MAX:
                self._queued[armed.number] = armed
                return
            self._asked.add(armed.number)
            armed.stream, armed.is_asked = stream, True
        try:
            stream.send(armed.call, armed.arguments, lambda answer: self._take_answer(armed, stream, answer))
        except Unanswered:
            return  # the stream has ended: `take_stream` is called with the next one

    def _ask_next(self, stream: ControlStream) -> None:
        with self._lock:
            if stream is not self._stream or not self._queued or len(self._asked) >= ASKED_MAX:
                return
            armed = self._queued.pop(next(iter(self._queued)))
        self._ask(armed, stream, is_again=True)

    def _take_answer(self, armed: Armed, stream: ControlStream, answer: Answer) -> None:
        if isinstance(answer, Unanswered):
            return  # as above
        self._settle(armed, stream, answer)
        self._ask_next(stream)

    def _settle(self, armed: Armed, stream: ControlStream, answer: dict[str, Any] | Exception) -> None:
        is_woken = False
        with self._lock:
            if armed.stream is not stream:
                return  # it was asked for again on the next stream
            self._asked.discard(armed.number)
            armed.is_asked = False
            is_there = armed.number in self._all
            if not isinstance(answer, Exception):
                is_woken, armed.was_armed, armed.is_refused = armed.was_armed, True, False
            elif armed.was_armed:
                is_woken = not armed.is_refused or time.monotonic() >= armed.woken_at + LOOK_S
                armed.is_refused = True
                if is_woken:
                    armed.woken_at = time.monotonic()
                self._ask_later(armed)
            else:
                armed.failure = answer
        if not is_there:
            self._undo(armed, stream)  # it was removed while it was asked for
            return
        armed.done.set()
        if is_woken:
            call_all((armed.wake,))

    def _undo(self, armed: Armed, stream: ControlStream) -> None:
        try:
            stream.send(armed.undo, {"number": armed.number})
        except Unanswered:
            return  # the stream has ended, and the server has forgotten it with the stream

    def _ask_later(self, armed: Armed) -> None:
        """Under the lock."""
        _logger.info("the server refused %s, retrying in %g s", armed.call, AGAIN_S)
        if self._timer is None:
            self._timer = threading.Timer(AGAIN_S, self._ask_again)
            self._timer.daemon = True
            self._timer.start()

    def _ask_again(self) -> None:
        with self._lock:
            self._timer = None
            stream = self._stream
            refused = [armed for armed in self._all.values() if armed.is_refused]
        if stream is not None:
            for armed in refused:
                self._ask(armed, stream, is_again=True)
