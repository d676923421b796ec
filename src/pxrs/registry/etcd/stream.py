"""A watch as a stream of etcd's.

The problem: a stream ends, by a restart, a cut, a compaction, a member that lost its peers, and changes happen
meanwhile.

Invariant: after any change there is a wake. A stream that ends is a doubt, so it wakes; one that was made again wakes
once more, after etcd has said that it is there: a change before that moment is seen by whoever looks after that wake,
a later one comes through the stream. So a stream always begins now, never at an old revision, which a compaction may
have removed.

On failure: made again for as long as the watch is open, with growing pauses and no wakes between.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from pyetcd import etcdrpc as rpc

from pxrs.errors import AccessDenied, Closed, RegistryError, RegistryUnavailable
from pxrs.registry.etcd.faults import Fault, Proof, fault_of
from pxrs.registry.etcd.link import PAUSE_S_MAX, PAUSE_S_MIN, Link

log = logging.getLogger(__name__)

CLOSE_S_MAX = 1.0


class Stream:
    """Calls `wake` after every change in any of the ranges. A thread of its own follows it."""

    def __init__(
        self, link: Link, ranges: Sequence[tuple[bytes, bytes]], wake: Callable[[], None], *, ignored: bytes
    ) -> None:
        """A range is its first key and its end, or a key and nothing. Keys that begin with `ignored` do not count."""
        self._link, self._ranges, self._wake, self._ignored = link, tuple(ranges), wake, ignored
        self.is_live = False
        """Whether every change wakes now, as far as is known."""
        self._settled = threading.Event()
        self._has_begun = False
        self._failure: RegistryError | Closed | None = None
        self._closed = threading.Event()
        self._call: Any = None
        self._thread = threading.Thread(target=self._follow_always, name="pxrs-etcd-watch", daemon=True)

    def start(self) -> None:
        """Return when every later change will wake; raise if that takes too long or is not allowed."""
        self._thread.start()
        self._settled.wait(self._link.timeout_s)
        if self._closed.is_set():
            raise Closed("the registry was closed while a watch was made")
        if not self._has_begun:
            raise self._failure or RegistryUnavailable("etcd did not confirm a watch in time")

    def close(self) -> None:
        """Stop, from any thread."""
        self._closed.set()
        self._settled.set()
        call = self._call
        if call is None:
            return  # it is on its way to a connection, and will look before it begins a stream
        call.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S_MAX)

    def _follow_always(self) -> None:
        pause_s = PAUSE_S_MIN
        while not self._closed.is_set():
            try:
                self._follow()
            except Closed as error:
                self._failure = error
                self._settled.set()
                return
            except RegistryError as error:
                log.info("a watch waits to be made: %s", error)
                was_denied = isinstance(self._failure, AccessDenied)
                self._failure = error
                if was_denied and isinstance(error, AccessDenied):
                    self._settled.set()
            except Exception:
                log.exception("a watch broke off and will be made anew")
            if self.is_live:
                self.is_live = False
                pause_s = PAUSE_S_MIN
                self._wake()
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def _follow(self) -> None:
        """Follow one stream to its end."""
        connection, metadata = self._link.connect()
        ended = threading.Event()
        missing = len(self._ranges)
        try:
            self._call = connection.watch(self._requests(ended), metadata=metadata)
            if self._closed.is_set():
                self._call.cancel()
            for response in self._call:
                if response.canceled:
                    if missing and "permission denied" in response.cancel_reason:
                        raise self._denial(response.cancel_reason, connection, metadata)
                    break
                if response.created:
                    missing -= 1
                    if missing == 0:
                        self._begin()
                elif any(not event.kv.key.startswith(self._ignored) for event in response.events):
                    self._wake()
        except grpc.RpcError as error:
            if not self._closed.is_set():  # else it was cancelled by `close`
                self._link.learn(fault_of(error), connection, metadata)
        except ValueError:
            return  # the connection was closed since it was asked for
        finally:
            ended.set()
            call, self._call = self._call, None
            if call is not None:
                call.cancel()

    def _requests(self, ended: threading.Event) -> Iterator[Any]:
        for key, range_end in self._ranges:
            yield rpc.WatchRequest(create_request=rpc.WatchCreateRequest(key=key, range_end=range_end))
        # Some servers take the end of the requests for the end of the watch.
        ended.wait()

    def _begin(self) -> None:
        self.is_live = True
        if self._has_begun:
            self._wake()
        self._has_begun = True
        self._failure = None
        self._settled.set()

    def _denial(self, reason: str, connection: Any, metadata: Any) -> RegistryError:
        """A token that is no longer good looks the same here, so the first time is a reason to log in again."""
        if not isinstance(self._failure, AccessDenied):
            self._link.learn(Fault(Proof.LOGIN, reason), connection, metadata)
        return AccessDenied(reason)
