"""One watch stream of etcd for all prefixes that are watched through an open registry (W6).

The problem: a stream ends (after a restart, a network failure, a compaction, or when a member has lost its peers), and
changes happen until the next stream has begun.

Invariant: after any change there is a wake. When a stream ends, changes may be missed, so all prefixes that were live
on it wake. A prefix that is watched again on the next stream wakes once more, after etcd has confirmed the watch: a
scan after that wake sees every change before the confirmation, and the stream reports every later one. So a watch
always begins at the current revision, never at an old one, which a compaction may have removed.

States of a prefix (`_Range`), all of them changed under `_lock`:

| state | `id` | `is_live` | becomes |
|---|---|---|---|
| waiting for a stream | None | False | asked, when a stream begins or one is there already |
| asked: in `_outbox` or `_asked` | None | False | live, by the answer `created`, in the order of the requests; denied |
| live | a number | True | waiting, when the stream ends; gone, by `remove` |
| denied once | None | False | waiting: a token that has expired looks the same, so log in and ask again |
| denied again | None | False | failed, if it never was live: `open` raises; otherwise waiting, with growing pauses |

On failure: the stream is made again for as long as there are prefixes, with growing pauses and no wakes between. The
thread, and the one that gRPC uses to send requests, start with the first prefix and end with the last.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc
from pyetcd import etcdrpc as rpc

from pxrs.errors import AccessDenied, Closed, RegistryError, RegistryUnavailable
from pxrs.registry.etcd.connection import Connection, Metadata
from pxrs.registry.etcd.faults import Fault, Proof, fault_of
from pxrs.registry.etcd.link import PAUSE_S_MAX, PAUSE_S_MIN, Link
from pxrs.waiting import start_thread

log = logging.getLogger(__name__)

CLOSE_S_MAX = 1.0

Key = object
"""Identifies a watched range; chosen by the caller."""


class _Range:
    """A range of keys that is watched. Only `Stream` touches it."""

    def __init__(self, first: bytes, end: bytes, wake: Callable[[], None]) -> None:
        self.first, self.end, self.wake = first, end, wake
        self.id: int | None = None
        """etcd's number of the watch on the present stream."""
        self.is_live = False
        """Whether etcd has confirmed the watch on the present stream: every change wakes."""
        self.was_live = False
        """Whether it was live on any stream: then `open` has returned."""
        self.is_removed = False
        self.denials = 0
        """How often etcd has refused it since it was last live."""
        self.failure: RegistryError | None = None
        """Why it will never be live."""


class Stream:
    """Wakes each watched range after every change in it. Threads share it."""

    def __init__(self, link: Link, *, ignored: bytes) -> None:
        """Keys that begin with `ignored` do not count as changes."""
        self._link, self._ignored = link, ignored
        self._lock = threading.Condition(threading.Lock())
        self._ranges: dict[Key, _Range] = {}
        self._outbox: queue.SimpleQueue[_Range | int | None] | None = None
        """What to send on the present stream: a range to watch, the number of a watch to cancel, None to end."""
        self._asked: deque[_Range] = deque()
        """Ranges that were sent on the present stream and are not answered yet; etcd answers in order."""
        self._by_id: dict[int, _Range] = {}
        self._call: Any = None
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        """Set by `open` and `close`: a pause before the next stream ends at once."""
        self._failure: RegistryError | None = None
        """Why the last stream ended or could not be made; None while one has confirmed a range."""
        self._was_refused = False
        """Whether the last attempt to connect was refused for want of permission."""
        self._is_cancelled = False
        """Whether this object has cancelled the present stream, because nothing is left to be watched."""
        self._is_closed = False

    def open(self, wanted: Mapping[Key, tuple[bytes, bytes, Callable[[], None]]]) -> None:
        """Watch these ranges: first key, end (empty for a single key), what to call after a change. Returns when every
        later change in them will wake; raises if that takes too long or is not allowed, and then watches none."""
        ranges = {key: _Range(*given) for key, given in wanted.items()}
        until = time.monotonic() + self._link.timeout_s
        try:
            with self._lock:
                self._check_open()
                self._ranges.update(ranges)
                if self._outbox is not None:
                    for each in ranges.values():
                        self._outbox.put(each)
                if self._thread is None:
                    self._thread = start_thread(self._follow_always, "pxrs-etcd-watch")
                self._hurry.set()
                while not all(each.was_live for each in ranges.values()):
                    failures = [each.failure for each in ranges.values() if each.failure is not None]
                    if failures:
                        raise failures[0]
                    self._check_open()
                    if any(each.is_removed for each in ranges.values()):
                        raise Closed("the watch was closed while it was being created")
                    if not self._lock.wait(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                        raise self._failure or RegistryUnavailable("etcd did not confirm a watch in time")
        except BaseException:
            for key, each in ranges.items():
                self._remove(key, each)
            raise

    def remove(self, key: Key) -> None:
        """Watch this range no longer. One that is not watched is no error."""
        found = self._ranges.get(key)
        if found is not None:
            self._remove(key, found)

    def is_live(self, key: Key) -> bool:
        """Whether every change of this range wakes now, as far as is known."""
        found = self._ranges.get(key)
        return found is not None and found.is_live

    def close(self) -> None:
        """Stop, from any thread. Idempotent."""
        with self._lock:
            self._is_closed = True
            call, thread = self._call, self._thread
            self._hurry.set()
            self._lock.notify_all()
        if call is not None:  # otherwise the thread looks at `_is_closed` before it begins a stream
            call.cancel()
            if thread is not None and thread is not threading.current_thread():
                thread.join(CLOSE_S_MAX)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the registry was closed while a watch was being created")

    def _remove(self, key: Key, watched: _Range) -> None:
        with self._lock:
            if self._ranges.get(key) is watched:
                del self._ranges[key]
            watched.is_removed, watched.is_live = True, False
            self._lock.notify_all()  # the thread that waits in `open` for this range
            if watched.id is not None:
                self._by_id.pop(watched.id, None)
                if self._outbox is not None:
                    self._outbox.put(watched.id)
                watched.id = None
            call = None if self._ranges else self._call
            if not self._ranges:
                self._is_cancelled = True
                self._hurry.set()
        if call is not None:  # nothing is left to be watched: the thread ends
            call.cancel()

    # What runs in the thread that follows the stream.

    def _follow_always(self) -> None:
        pause_s = PAUSE_S_MIN
        while True:
            with self._lock:
                if self._is_closed or not self._ranges:
                    self._thread = None
                    return
                self._hurry.clear()
            try:
                self._follow(*self._connect())
            except Closed:
                self.close()  # the link was closed, which the registry does for good
                continue
            except RegistryError as error:
                log.info("watches cannot be created now, will try again: %s", error)
                self._failure = error
            except Exception:
                log.exception("watches failed and will be created again")
            if self._end_stream():
                pause_s = PAUSE_S_MIN
            self._hurry.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def _end_stream(self) -> bool:
        """Forget the stream that ended, and wake every range that was live on it; whether there was one."""
        with self._lock:
            live = [each for each in self._ranges.values() if each.is_live]
            for each in self._ranges.values():
                each.is_live, each.id = False, None
            self._by_id.clear()
            self._asked.clear()
        for each in live:
            each.wake()
        return bool(live)

    def _connect(self) -> tuple[Connection, Metadata]:
        try:
            found = self._link.connect()
        except AccessDenied as error:
            with self._lock:
                if self._was_refused:  # the second time in a row, so not because of an expired token
                    for each in self._ranges.values():
                        each.failure = None if each.was_live else error
                    self._lock.notify_all()
                self._was_refused = True
            raise
        self._was_refused = False
        return found

    def _follow(self, connection: Connection, metadata: Metadata) -> None:
        """Follow one stream to its end. Raises AccessDenied."""
        outbox: queue.SimpleQueue[_Range | int | None] = queue.SimpleQueue()
        try:
            with self._lock:
                if self._is_closed or not self._ranges:
                    return
                for each in self._ranges.values():
                    outbox.put(each)
                self._outbox, self._is_cancelled = outbox, False
                self._call = connection.watch(self._requests(outbox), metadata=metadata)
            for response in self._call:
                if not self._take(response, connection, metadata):
                    break
        except grpc.RpcError as error:
            if not self._is_closed and not self._is_cancelled:
                self._link.learn(fault_of(error), connection, metadata)
        except ValueError:
            return  # the connection was closed after it was returned
        finally:
            outbox.put(None)
            with self._lock:
                call, self._call, self._outbox = self._call, None, None
            if call is not None:
                call.cancel()

    def _requests(self, outbox: queue.SimpleQueue[_Range | int | None]) -> Iterator[Any]:
        """Called by gRPC, on a thread of its own. Some servers end the stream when the requests end, so this
        generator ends only with the stream."""
        while (item := outbox.get()) is not None:
            if isinstance(item, int):
                yield rpc.WatchRequest(cancel_request=rpc.WatchCancelRequest(watch_id=item))
                continue
            with self._lock:
                if item.is_removed or self._outbox is not outbox:
                    continue
                self._asked.append(item)
            yield rpc.WatchRequest(create_request=rpc.WatchCreateRequest(key=item.first, range_end=item.end))

    def _take(self, response: Any, connection: Connection, metadata: Metadata) -> bool:
        """Handle a response of etcd. Returns False if a new stream must be made."""
        if response.canceled:
            return self._take_cancelled(response, connection, metadata)
        if response.created:
            self._begin(response.watch_id)
        elif any(not event.kv.key.startswith(self._ignored) for event in response.events):
            found = self._by_id.get(response.watch_id)
            if found is not None:
                found.wake()
        return True

    def _begin(self, watch_id: int) -> None:
        """etcd has confirmed the oldest request in `_asked`: its range is live from now on."""
        with self._lock:
            watched = self._asked.popleft()
            if watched.is_removed:
                if self._outbox is not None:
                    self._outbox.put(watch_id)
                return
            had_begun = watched.was_live
            watched.id, watched.is_live, watched.was_live, watched.denials = watch_id, True, True, 0
            self._by_id[watch_id] = watched
            self._failure = None
            self._lock.notify_all()
        if had_begun:
            watched.wake()

    def _take_cancelled(self, response: Any, connection: Connection, metadata: Metadata) -> bool:
        if response.watch_id in self._by_id:
            return False  # etcd has ended the watch itself, for instance because of a compaction
        if "permission denied" not in response.cancel_reason:
            return not response.created  # otherwise this confirms a watch that `remove` has cancelled
        with self._lock:
            watched = self._asked.popleft()
            watched.denials += 1
            error = AccessDenied(response.cancel_reason)
            if watched.denials > 1 and not watched.was_live:
                watched.failure = error
                self._lock.notify_all()
                return True
        if watched.denials == 1:
            self._link.learn(Fault(Proof.LOGIN, response.cancel_reason), connection, metadata)
        raise error
