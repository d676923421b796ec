"""Keeps one control stream to one of the servers, while anybody needs it.

One thread connects, reads the stream until it ends, and connects again: to the next server of the address, because the
one that was lost may not even refuse, with growing, random pauses after all of them were tried. It connects only while
somebody needs it: a caller that waits for a stream, or an armed watch or subscription (`arming`).

| state of the link | becomes | when |
|---|---|---|
| idle | connecting | `need`, or `take` waits |
| connecting | connected | a server has answered the hello: those who wait in `take` go on, `on_stream` arms all again |
| connecting | connecting | no server answers: after a pause |
| connecting | refused | a server will not serve this client: `take` raises why; connecting again after a pause |
| connected | connecting, idle | the stream has ended, or the server has said goodbye: answers may still come on it |
| any | closed | `close` |
"""

from __future__ import annotations

import copy
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Final

from pxrs.errors import Closed, InvalidUrl, PxrsError, Unauthenticated
from pxrs.registry.address import REFUSALS_MIN
from pxrs.remote.client import tls
from pxrs.remote.client.channel import Channel
from pxrs.remote.client.control import ControlStream, Hello
from pxrs.remote.client.faults import AWAY, NothingListens, Refused, Unanswered
from pxrs.remote.client.settings import Settings
from pxrs.waiting import start_thread

_logger = logging.getLogger(__name__)

CONNECT_S_MAX: Final = 5.0
"""After this, a server that neither accepts nor refuses is passed over."""
REFUSED_GAP_S: Final = 2.0
"""What was refused so long before the next attempt does not count: nobody needed a connection in between."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.05, 0.25
"""Seconds between two attempts to connect. Short, because a lease is renewed four times in its ttl: a client whose
server was away for half of a ttl may have a quarter of it left, and needs some of that for the renewal (W2)."""
CLOSE_S_MAX: Final = 1.0


class Link:
    """Threads share it."""

    def __init__(
        self,
        settings: Settings,
        on_event: Callable[[int], object],
        on_stream: Callable[[ControlStream], object],
        on_goodbye: Callable[[], object],
        on_loss: Callable[[], object],
    ) -> None:
        """The reader calls these functions, and none of them may wait. on_event: with the number of a watch or
        subscription. on_stream: when a stream has begun. on_goodbye: when the server will end. on_loss: when a stream
        has ended."""
        self._settings = settings
        self._on_event, self._on_stream, self._on_goodbye, self._on_loss = on_event, on_stream, on_goodbye, on_loss
        self._changed = threading.Condition(threading.Lock())
        """Guards the fields below."""
        self._needs = 0
        """How many armed watches and subscriptions, and callers of `take`, need a stream."""
        self._stream: ControlStream | None = None
        """The stream that requests are sent on; None if there is none, or if its server has said goodbye."""
        self._begun: ControlStream | None = None
        """The stream that the thread connects or reads now."""
        self._leaving: list[ControlStream] = []
        """Streams whose servers have said goodbye, and on which calls may still be answered."""
        self._refusal: Exception | None = None
        """Why the last server that answered will not serve this client; None once it may."""
        self._why = "no answer in time"
        """Why there is no stream now."""
        self._refused = 0
        """How many of the latest attempts to connect were refused, one after the other without another outcome or a
        pause of REFUSED_GAP_S."""
        self._refused_at = self._refused_last = 0.0
        """When the first and the last of them were, on the monotonic clock."""
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self.last_hello: Hello | None = None
        """What the last server that answered has said; None if none ever has."""

    @property
    def was_connected(self) -> bool:
        """Whether a server has ever answered."""
        return self.last_hello is not None

    @property
    def is_closed(self) -> bool:
        return self._closing.is_set()

    def need(self) -> None:
        """From now on, until `release`, there must be a stream."""
        with self._changed:
            self._need()

    def release(self) -> None:
        with self._changed:
            self._needs -= 1

    def take(self, until: float, *, is_patient: bool = False) -> ControlStream:
        """The stream, once there is one. Raises Unanswered at this moment of the monotonic clock; Closed; and at once
        why the server refuses this client.

        is_patient: wait until then also for a first connection that is refused again and again; otherwise
                    NothingListens is raised after `Settings.refused_s`."""
        began = time.monotonic()
        with self._changed:
            self._check_open()
            if self._stream is not None:
                return self._stream
            self._need()
            try:
                while self._stream is None:
                    if self._refusal is not None:
                        raise copy.copy(self._refusal)
                    if not is_patient:
                        self._check_listening(began)
                    left = until - time.monotonic()
                    if left <= 0:
                        raise Unanswered(self._why_not(), was_sent=False)
                    self._changed.wait(left)
                    self._check_open()
                return self._stream
            finally:
                self._needs -= 1

    def _check_listening(self, began: float) -> None:
        """Raise NothingListens if every attempt to connect was refused for `Settings.refused_s`, at least one to each
        server, and one since the caller began to wait; and no server has ever answered. Under the lock."""
        is_enough = self._refused >= max(REFUSALS_MIN, len(self._settings.targets)) and self._refused_last >= began
        is_long = self._refused_last - self._refused_at >= self._settings.refused_s
        if is_enough and is_long and not self.was_connected:
            raise NothingListens(
                f"no server answers: {self._why}, at each of {self._refused} attempts; is `pxrs serve` running there?"
            )

    def _why_not(self) -> str:
        if self.was_connected:
            return self._why
        return f"no server answers: {self._why}; is `pxrs serve` running there?"

    def close(self) -> None:
        """End the stream and the thread, from any thread. Idempotent."""
        self._closing.set()
        with self._changed:
            streams, thread = [*self._leaving, *(() if self._begun is None else (self._begun,))], self._thread
            self._changed.notify_all()
        for stream in streams:
            stream.end("the connection was closed")
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S_MAX)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise Closed(f"the connection to {self._settings.shown} was closed")

    def _need(self) -> None:
        """Under the lock."""
        if not self._needs:
            self._refusal = None  # it may be old: nobody has tried since
        self._needs += 1
        if self._thread is None and not self._closing.is_set():
            self._thread = start_thread(self._run, "pxrs-remote")
        self._changed.notify_all()

    # What runs in the thread.

    def _run(self) -> None:
        at, pause_s = 0, PAUSE_S_MIN
        targets = self._settings.targets
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._needs or self._closing.is_set())
            if self._closing.is_set():
                return
            try:
                stream = self._connect(targets[at % len(targets)])
            except Exception as error:  # noqa: BLE001 - told to those who wait, and tried again
                self._note_failure(error)
                at += 1
                if at % len(targets) == 0:
                    self._closing.wait(random.uniform(pause_s / 2, pause_s))
                    pause_s = min(2 * pause_s, PAUSE_S_MAX)
                continue
            began = time.monotonic()
            try:
                self._on_stream(stream)
                why = stream.run()
            except Exception as error:  # a defect; without this thread nothing would ever be connected again
                _logger.exception("the stream to %s failed unexpectedly", stream.channel.target)
                why = stream.end(f"unexpected error: {error}")
            self._note_loss(stream, why)
            at += 1
            if time.monotonic() - began < PAUSE_S_MAX:  # a server that accepts streams and ends them at once
                self._closing.wait(random.uniform(pause_s / 2, pause_s))
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
            else:
                pause_s = PAUSE_S_MIN

    def _connect(self, target: str) -> ControlStream:
        channel = Channel(target, self._settings)
        stream = ControlStream(channel, self._on_event, self._note_goodbye)
        with self._changed:
            self._begun = stream
        try:
            self._check_open()
            stream.greet(min(CONNECT_S_MAX, self._settings.timeout_s))
        except Unauthenticated as error:
            stream.end(str(error))
            where = self._settings.token_place
            raise Unauthenticated(f"{self._settings.shown}: {error}. A client reads its token from {where}") from None
        except BaseException as error:
            stream.end(str(error))
            if isinstance(error, Unanswered) and not self.was_connected:
                refusal = tls.refusal(str(error), target, self._settings)
                if refusal is not None:
                    raise refusal from error
            raise
        with self._changed:
            self._stream, self._refusal, self.last_hello = stream, None, stream.hello
            self._changed.notify_all()
        _logger.info("connected to %s, server instance %s", target, stream.hello.instance)
        return stream

    def _note_failure(self, error: Exception) -> None:
        with self._changed:
            if str(error) != self._why:
                _logger.info("%s cannot be reached: %s", self._settings.shown, error)
            self._why = str(error)
            self._count_refusal(isinstance(error, Unanswered) and "Connection refused" in str(error))
            is_final = isinstance(error, Refused | InvalidUrl) or (
                isinstance(error, PxrsError) and not isinstance(error, AWAY)
            )
            if is_final:
                self._refusal = error
            self._changed.notify_all()

    def _count_refusal(self, is_refused: bool) -> None:
        """After an attempt to connect that has failed. Under the lock."""
        now = time.monotonic()
        if not is_refused or now - self._refused_last > REFUSED_GAP_S:
            self._refused, self._refused_at = 0, now
        if is_refused:
            self._refused += 1
            self._refused_last = now

    def _note_goodbye(self) -> None:
        with self._changed:
            self._stream = None
        self._on_goodbye()

    def _note_loss(self, stream: ControlStream, why: str) -> None:
        with self._changed:
            self._stream = None
            self._leaving = [each for each in (*self._leaving, stream) if not each.is_ended]
            self._why = f"the connection to {stream.channel.target} was lost: {why}"
        if not self._closing.is_set():
            _logger.info("%s; reconnecting", self._why)
            self._on_loss()
