"""A faulty network: a TCP proxy that loses, delays and cuts on demand.

How a client behaves when a reply is lost, when a request is executed after its sender has stopped waiting, or when
nobody answers, cannot be seen by killing servers. A proxy between client and server produces each of these cases
exactly.

One thread owns every socket (`pxrs.testing.relay`), and each change of mode runs in that thread: once `drop_replies()`
has returned, no byte of a reply passes any more.
"""

from __future__ import annotations

import queue
import selectors
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Self

from pxrs.launching import HOST, free_ports
from pxrs.testing.relay import READ_BYTES, Mode, Relay

CALL_S_MAX: Final = 10.0


class Proxy:
    """A TCP proxy on 127.0.0.1 in front of `target_host:target_port`, which passes everything until told otherwise."""

    def __init__(self, target_host: str, target_port: int) -> None:
        self.host = HOST
        (self.port,) = free_ports(1)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Functions that the owning thread is to call."""
        self._selector = selectors.DefaultSelector()
        self._relay = Relay(self.port, (target_host, target_port), self._selector)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name=f"proxy-{self.port}", daemon=True)
        self._is_closing = False

    # Lifecycle

    def start(self) -> Self:
        """Listen and serve, if not yet."""
        if self._thread.ident is None:
            self._wake_receiver.setblocking(False)
            self._selector.register(self._wake_receiver, selectors.EVENT_READ)
            self._relay.listen()
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

    @property
    def fault(self) -> str | None:
        """The fault that lasts until `restore`; None if everything passes."""
        mode = self._relay.mode
        return None if mode is Mode.PASS else mode.value

    def cut(self) -> None:
        """Reset every connection and refuse new ones until `restore`. What was held back is lost."""
        self._call(lambda: self._relay.enter(Mode.CUT))

    def stall(self) -> None:
        """Accept and keep connections, and pass nothing either way until `restore`; then all of it."""
        self._call(lambda: self._relay.enter(Mode.STALL))

    def drop_replies(self, close_after: float | None = None) -> None:
        """Pass requests and throw the replies away, until `restore`.

        With `close_after`, a connection is reset that many seconds after its first lost reply; 0 is
        as soon as the server has answered. `restore` resets the others that lost one, because a
        reply with a hole in it must not be taken for a reply.
        """
        self._call(lambda: self._relay.enter(Mode.DROP_REPLIES, close_after))

    def hold_requests(self) -> None:
        """Keep back what clients send until `release_requests`; replies still pass.

        A client that gives up by itself may send a cancellation after its request (gRPC does), which
        then lands right behind it. For a request that lands late and whole, call `reset_connections`
        once `wait_for_request` has returned: the client gives up on that, and can add nothing.
        """
        self._call(lambda: self._relay.enter(Mode.HOLD_REQUESTS))

    def release_requests(self) -> None:
        """Deliver what was held, also of clients that have closed their connections since, and pass everything."""
        self.restore()

    def restore(self) -> None:
        """Pass everything again, what was held back first."""
        self._call(lambda: self._relay.enter(Mode.PASS))

    def reset_connections(self) -> None:
        """Reset the present connections. New ones are treated as the mode says.

        While requests are held, only the clients' ends are: what they sent still lands on `release_requests`.
        """
        self._call(self._relay.reset_all_but_held)

    def wait_for_request(self, timeout: float) -> None:
        """Wait until bytes of a client were passed or held since the mode was set; raise TimeoutError if none come.

        Any bytes count, a client's keep-alive too: where that matters, give the client under test its own proxy.
        """
        if not self._relay.request_was_seen.wait(timeout):
            raise TimeoutError(f"no request within {timeout} s")

    # The thread that owns the sockets.

    def _call(self, action: Callable[[], None]) -> None:
        """Run `action` in the owning thread and wait for it."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                action()
            except BaseException as error:  # noqa: BLE001 - raised in the calling thread
                done.set_exception(error)
            else:
                done.set_result(None)

        self._calls.put(run)
        self._wake_sender.send(b"!")
        done.result(CALL_S_MAX)

    def _serve(self) -> None:
        relay = self._relay
        while not self._is_closing:
            for key, _ in self._selector.select(relay.seconds_to_next_reset()):
                if key.fileobj is self._wake_receiver:
                    self._run_calls()
                elif key.fileobj is relay.listener:
                    relay.accept()
                elif key.data is not None:
                    relay.pump(key.data)
            relay.reset_overdue()

    def _run_calls(self) -> None:
        self._wake_receiver.recv(READ_BYTES)
        while not self._calls.empty():
            self._calls.get()()

    def _end(self) -> None:
        self._is_closing = True
        self._relay.end()
