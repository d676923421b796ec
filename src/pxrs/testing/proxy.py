"""A faulty network: a TCP proxy that loses, delays and cuts on demand.

What distinguishes a coordination client is how it behaves when a reply is lost, when a request
lands after its sender gave up, or when nobody answers. Killing servers shows little of that; a
proxy between client and server can show each of them exactly.

One thread owns every socket, and each change of mode runs in that thread: once `drop_replies()`
has returned, no byte of a reply passes any more. Buffers are bounded; a full one is no longer
read, so that the sender is slowed down as by a slow network.
"""

from __future__ import annotations

import enum
import queue
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Self

from pxrs.testing.servers.process import HOST, free_ports

BUFFER_BYTES_MAX = 1 << 20
READ_BYTES = 1 << 16
# A request that lands after its client has gone must not be followed at once by the end of the connection: servers
# cancel the requests of a connection that ends.
LATE_LINGER_S = 1.0
CALL_S_MAX = 10.0


class Mode(enum.Enum):
    """What the proxy does with the bytes of both directions."""

    PASS = "pass"
    CUT = "cut"
    STALL = "stall"
    DROP_REPLIES = "drop replies"
    HOLD_REQUESTS = "hold requests"


_REQUESTS_PASS = frozenset({Mode.PASS, Mode.DROP_REPLIES})
_REPLIES_PASS = frozenset({Mode.PASS, Mode.HOLD_REQUESTS})


class _Pipe:
    """One direction of a connection: what was read from `source` and not yet written to `sink`."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.buffer = bytearray()
        self.has_ended = False
        self.was_reset = False
        self.end_was_passed = False

    @property
    def wants_input(self) -> bool:
        return not self.has_ended and len(self.buffer) < BUFFER_BYTES_MAX

    def read(self) -> int:
        """Take what has arrived; return how many bytes."""
        if not self.wants_input:
            return 0
        try:
            data = self.source.recv(READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            data, self.was_reset = b"", True
        self.has_ended = not data
        self.buffer += data
        return len(data)

    def write(self) -> None:
        """Pass on what the sink takes now; raise OSError if the sink is gone."""
        with suppress(BlockingIOError):
            while self.buffer:
                del self.buffer[: self.sink.send(self.buffer)]

    def pass_end(self) -> None:
        """Tell the sink of an orderly end, once all has been written."""
        if self.has_ended and not self.was_reset and not self.buffer and not self.end_was_passed:
            self.end_was_passed = True
            with suppress(OSError):
                self.sink.shutdown(socket.SHUT_WR)


class _Link:
    """One client's connection and ours to the server for it."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.requests, self.replies = _Pipe(client, server), _Pipe(server, client)
        self.client_is_gone = False
        self.has_lost_replies = False
        self.reset_at: float | None = None

    def is_finished(self) -> bool:
        both_ended = self.requests.end_was_passed and self.replies.end_was_passed
        return both_ended or (self.client_is_gone and not self.requests.buffer and self.reset_at is None)


class Proxy:
    """A TCP proxy on 127.0.0.1 in front of `target_host:target_port`, which passes everything until told otherwise."""

    def __init__(self, target_host: str, target_port: int) -> None:
        self.host = HOST
        (self.port,) = free_ports(1)
        self._target = (target_host, target_port)
        self._mode = Mode.PASS
        self._close_after_s: float | None = None
        self._links: set[_Link] = set()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._request_was_seen = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name=f"proxy-{self.port}", daemon=True)
        self._is_closing = False

    # Lifecycle

    def start(self) -> Self:
        """Listen and serve, if not yet."""
        if self._thread.ident is None:
            self._wake_receiver.setblocking(False)
            self._selector.register(self._wake_receiver, selectors.EVENT_READ)
            self._listen()
            self._thread.start()
        return self

    def close(self) -> None:
        """Reset every connection and end."""
        if self._thread.is_alive():
            self._call(self._end)
            self._thread.join(CALL_S_MAX)
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # Faults

    def cut(self) -> None:
        """Reset every connection and refuse new ones until `restore`. What was held back is lost."""
        self._call(lambda: self._enter(Mode.CUT))

    def stall(self) -> None:
        """Accept and keep connections, and pass nothing either way until `restore`; then all of it."""
        self._call(lambda: self._enter(Mode.STALL))

    def drop_replies(self, close_after: float | None = None) -> None:
        """Pass requests and throw the replies away, until `restore`.

        With `close_after`, a connection is reset that many seconds after its first lost reply; 0 is
        as soon as the server has answered. `restore` resets the others that lost one, because a
        reply with a hole in it must not be taken for a reply.
        """
        self._call(lambda: self._enter(Mode.DROP_REPLIES, close_after))

    def hold_requests(self) -> None:
        """Keep back what clients send until `release_requests`; replies still pass.

        A client that gives up by itself may send a cancellation after its request (gRPC does), which
        then lands right behind it. For a request that lands late and whole, call `reset_connections`
        once `wait_for_request` has returned: the client gives up on that, and can add nothing.
        """
        self._call(lambda: self._enter(Mode.HOLD_REQUESTS))

    def release_requests(self) -> None:
        """Deliver what was held, also of clients that have closed their connections since, and pass everything."""
        self.restore()

    def restore(self) -> None:
        """Pass everything again, what was held back first."""
        self._call(lambda: self._enter(Mode.PASS))

    def reset_connections(self) -> None:
        """Reset the present connections. New ones are treated as the mode says.

        While requests are held, only the clients' ends are: what they sent still lands on `release_requests`.
        """
        self._call(self._reset_all_but_held)

    def wait_for_request(self, timeout: float) -> None:
        """Wait until bytes of a client were passed or held since the mode was set; raise TimeoutError if none come.

        Any bytes count, a client's keep-alive too: where that matters, give the client under test its own proxy.
        """
        if not self._request_was_seen.wait(timeout):
            raise TimeoutError(f"no request within {timeout} s")

    # All below runs in the thread that owns the sockets.

    def _call(self, action: Callable[[], None]) -> None:
        """Run `action` in the owning thread and wait for it."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                action()
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                done.set_exception(error)
            else:
                done.set_result(None)

        self._calls.put(run)
        self._wake_sender.send(b"!")
        done.result(CALL_S_MAX)

    def _serve(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select(self._seconds_to_next_reset()):
                if key.fileobj is self._wake_receiver:
                    self._run_calls()
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._links:  # not reset by an earlier event of this round
                    self._pump(key.data)
            self._reset_overdue()

    def _run_calls(self) -> None:
        self._wake_receiver.recv(READ_BYTES)
        while not self._calls.empty():
            self._calls.get()()

    def _end(self) -> None:
        self._is_closing = True
        self._stop_listening()
        self._reset_all()

    def _enter(self, mode: Mode, close_after_s: float | None = None) -> None:
        self._mode, self._close_after_s = mode, close_after_s
        self._request_was_seen.clear()
        if mode is Mode.CUT:
            self._stop_listening()
            self._reset_all()
            return
        self._listen()
        for link in list(self._links):
            if mode in _REPLIES_PASS and link.has_lost_replies:
                self._reset(link)
            else:
                self._pump(link)

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = socket.create_server((self.host, self.port))
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except OSError:
            return  # it gave up while it waited
        server = socket.socket()
        for end in (client, server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _Link(client, server)
        self._links.add(link)
        try:
            server.connect(self._target)
        except BlockingIOError:
            pass  # its outcome shows when the socket is read or written
        except OSError:
            self._reset(link)
            return
        self._watch(link)

    def _pump(self, link: _Link) -> None:
        """Move what can be moved now, as far as the mode lets it."""
        received = link.requests.read()
        link.replies.read()
        try:
            self._pass_requests(link)
        except OSError:  # the server is gone, or never was there
            self._reset(link)
            return
        self._pass_replies(link)
        if received:
            self._request_was_seen.set()
        if self._mode in _REPLIES_PASS and link.replies.was_reset and not link.replies.buffer:
            self._reset(link)  # the server died or was never there, and the client shall see the difference
        elif link.is_finished():
            self._close(link)
        else:
            self._watch(link)

    def _pass_requests(self, link: _Link) -> None:
        if self._mode not in _REQUESTS_PASS:
            return
        if link.requests.has_ended and link.requests.buffer and link.reset_at is None:
            link.reset_at = time.monotonic() + LATE_LINGER_S
        link.requests.write()
        if link.reset_at is None:
            link.requests.pass_end()
            link.client_is_gone |= link.requests.was_reset

    def _pass_replies(self, link: _Link) -> None:
        if self._mode is Mode.DROP_REPLIES:
            self._lose_replies(link)
        elif link.client_is_gone:
            link.replies.buffer.clear()
        elif self._mode in _REPLIES_PASS:
            try:
                link.replies.write()
            except OSError:
                link.client_is_gone = True
            link.replies.pass_end()

    def _lose_replies(self, link: _Link) -> None:
        if link.replies.buffer:
            link.replies.buffer.clear()
            link.has_lost_replies = True
        if link.has_lost_replies and self._close_after_s is not None and link.reset_at is None:
            link.reset_at = time.monotonic() + self._close_after_s

    def _watch(self, link: _Link) -> None:
        """Ask for the events that this link can use now."""
        requests_pass, replies_pass = self._mode in _REQUESTS_PASS, self._mode in _REPLIES_PASS
        self._watch_end(link, link.client, link.requests, replies_pass and bool(link.replies.buffer))
        self._watch_end(link, link.server, link.replies, requests_pass and bool(link.requests.buffer))

    def _watch_end(self, link: _Link, end: socket.socket, source: _Pipe, wants_output: bool) -> None:
        if end.fileno() < 0:
            return
        events = selectors.EVENT_READ * source.wants_input | selectors.EVENT_WRITE * wants_output
        known = self._selector.get_map().get(end)
        if known is None:
            if events:
                self._selector.register(end, events, link)
        elif not events:
            self._selector.unregister(end)
        elif events != known.events:
            self._selector.modify(end, events, link)

    def _seconds_to_next_reset(self) -> float | None:
        times = [link.reset_at for link in self._links if link.reset_at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _reset_overdue(self) -> None:
        now = time.monotonic()
        for link in list(self._links):
            if link.reset_at is not None and link.reset_at <= now:
                self._reset(link)

    def _reset_all(self) -> None:
        for link in list(self._links):
            self._reset(link)

    def _reset_all_but_held(self) -> None:
        for link in list(self._links):
            if self._mode is Mode.HOLD_REQUESTS and link.requests.buffer:
                self._close_end(link.client, with_reset=True)
                link.requests.has_ended = link.client_is_gone = True
            else:
                self._reset(link)

    def _reset(self, link: _Link) -> None:
        self._close(link, with_reset=True)

    def _close(self, link: _Link, *, with_reset: bool = False) -> None:
        self._links.discard(link)
        self._close_end(link.client, with_reset=with_reset)
        self._close_end(link.server, with_reset=with_reset)

    def _close_end(self, end: socket.socket, *, with_reset: bool) -> None:
        if end.fileno() < 0:
            return
        if end in self._selector.get_map():
            self._selector.unregister(end)
        if with_reset:
            # With no time to linger, closing sends a reset instead of an orderly end.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.close()
