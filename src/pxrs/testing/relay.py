"""The sockets of a faulty network: connections, what passes on them, and what is lost or held back.

One thread owns a `Relay` and all its sockets; every method is called in that thread (`Proxy` sees to it). So there is
no lock, and a change of mode takes effect between two reads of a socket.

What passes in which mode:

    mode            connections             requests            replies
    PASS            accepted                pass                pass
    CUT             reset, new ones refused lost                lost
    STALL           accepted                held back           held back
    DROP_REPLIES    accepted                pass                lost
    HOLD_REQUESTS   accepted                held back           pass

Buffers are bounded. A full one is not read any more, so that its sender is slowed down as by a slow network.
"""

from __future__ import annotations

import enum
import selectors
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Final

from pxrs.launching import HOST

BUFFER_BYTES_MAX: Final = 1 << 20
READ_BYTES: Final = 1 << 16
LATE_LINGER_S: Final = 1.0
"""How long a connection stays open to the server after a request was delivered whose client has gone: servers cancel
the requests of a connection that ends."""


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


class Relay:
    """The connections of one proxy, from its port to the target."""

    def __init__(self, port: int, target: tuple[str, int], selector: selectors.BaseSelector) -> None:
        """selector: where the relay registers its sockets. The owner of the relay waits for it, and calls `accept` for
        an event of `listener` and `pump` for an event of a connection."""
        self._port, self._target, self._selector = port, target, selector
        self._mode = Mode.PASS
        self._close_after_s: float | None = None
        self._links: set[_Link] = set()
        self.listener: socket.socket | None = None
        self.request_was_seen = threading.Event()
        """Set when bytes of a client were passed or held back since the mode was set."""

    @property
    def mode(self) -> Mode:
        return self._mode

    def enter(self, mode: Mode, close_after_s: float | None = None) -> None:
        """Change the mode. close_after_s: see `Proxy.drop_replies`."""
        self._mode, self._close_after_s = mode, close_after_s
        self.request_was_seen.clear()
        if mode is Mode.CUT:
            self._stop_listening()
            self._reset_all()
            return
        self.listen()
        for link in list(self._links):
            if mode in _REPLIES_PASS and link.has_lost_replies:
                self._reset(link)
            else:
                self.pump(link)

    def end(self) -> None:
        """Reset every connection, and accept no more."""
        self._stop_listening()
        self._reset_all()

    def listen(self) -> None:
        if self.listener is None:
            self.listener = socket.create_server((HOST, self._port))
            self.listener.setblocking(False)
            self._selector.register(self.listener, selectors.EVENT_READ)

    def _stop_listening(self) -> None:
        if self.listener is not None:
            self._selector.unregister(self.listener)
            self.listener.close()
            self.listener = None

    def accept(self) -> None:
        """Accept a connection, and connect to the target for it."""
        assert self.listener is not None
        try:
            client, _ = self.listener.accept()
        except OSError:
            return  # the client has closed the connection meanwhile
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

    def pump(self, link: _Link) -> None:
        """Move the bytes that can be moved now and may pass in this mode. A link that was closed is left alone: an
        earlier event of the same round has reset it."""
        if link not in self._links:
            return
        received = link.requests.read()
        link.replies.read()
        try:
            self._pass_requests(link)
        except OSError:  # the connection to the server has ended, or could not be made
            self._reset(link)
            return
        self._pass_replies(link)
        if received:
            self.request_was_seen.set()
        if self._mode in _REPLIES_PASS and link.replies.was_reset and not link.replies.buffer:
            self._reset(link)  # the server has reset the connection, which the client must see as a reset too
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
        """Register for the events that this link can use now."""
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

    def seconds_to_next_reset(self) -> float | None:
        """In how many seconds `reset_overdue` has something to do; None: never, as things are."""
        times = [link.reset_at for link in self._links if link.reset_at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def reset_overdue(self) -> None:
        now = time.monotonic()
        for link in list(self._links):
            if link.reset_at is not None and link.reset_at <= now:
                self._reset(link)

    def _reset_all(self) -> None:
        for link in list(self._links):
            self._reset(link)

    def reset_all_but_held(self) -> None:
        """Reset every connection. While requests are held back, of a connection that has some only the client's end is
        reset, so that they can still be delivered."""
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
            # With a linger time of 0, `close` sends RST instead of FIN.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.close()
