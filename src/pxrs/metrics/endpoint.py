"""/metrics, /healthz and /readyz over HTTP, on a thread of its own.

It is for a scraper and a supervisor on a network that is trusted: there is no authentication, and it answers on
loopback unless another address is given. What clients can make it hold is bounded: at most CONNECTIONS_MAX connections,
each with one request of a few kilobytes and CONNECTION_S in all, however slowly it sends or reads. One thread at a time
collects metrics, so that a slow collection cannot take all connections from the health checks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import Any, Final, Self

from pxrs.errors import InvalidArgument
from pxrs.limited_log import LimitedLog
from pxrs.metrics.health import Probe, always
from pxrs.ports import cannot_listen

CONNECTIONS_MAX: Final = 16
CONNECTION_S: Final = 15.0
"""How long a connection lives at most. Prometheus gives up after 10 s by default."""
READ_S: Final = 5.0
"""How long a request may pause."""
COLLECT_S: Final = 10.0
"""How long a request waits while another one collects metrics."""
REQUEST_BYTES_MAX: Final = 16 << 10
_LOOK_S: Final = 0.2
"""How often connections that are too old are looked for."""
_BUSY: Final = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_log: Final = LimitedLog(logging.getLogger(__name__))

Render = Callable[[str], tuple[bytes, str]]
"""The body and content type of /metrics, given the header Accept."""


def parse_listen(listen: str, option: str = "--metrics-listen") -> tuple[str, int]:
    """Host and port of HOST:PORT, [IPV6]:PORT, :PORT or PORT; the host is 127.0.0.1 if none is given. Raises
    InvalidArgument. option: what the error names."""
    host, _, port = listen.rpartition(":")
    if not port.isdecimal() or int(port) > 65_535 or (":" in host and not (host[0] == "[" and host[-1] == "]")):
        raise InvalidArgument(f"{option} is {listen!r}: give HOST:PORT, such as 127.0.0.1:9464 or [::1]:9464")
    return host.strip("[]") or "127.0.0.1", int(port)


class Endpoint:
    """Listens from `start` to `close`."""

    def __init__(self, listen: str, render: Render, *, live: Probe = always, ready: Probe = always) -> None:
        """Binds the port, so that one that is in use is reported before anything else is started. Raises
        CannotListen, InvalidArgument."""
        host, port = parse_listen(listen)
        try:
            self._server = _Server(host, port, _Pages(render, live, ready))
        except UnicodeError as error:
            raise InvalidArgument(f"cannot listen for metrics on {listen}: {host[:100]!r} is no host name") from error
        except OSError as error:
            raise cannot_listen(listen, error, " for metrics") from error
        bound = self._server.socket.getsockname()[1]
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        """Host and port."""
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        """Start the thread; a second call does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._server.serve_forever, args=(_LOOK_S,), name="pxrs-metrics", daemon=True
            )
            self._thread.start()
        return self

    def close(self) -> None:
        """Close the port and all connections. May be called again."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._server.shutdown()
            thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Pages:
    """What is answered to each path."""

    def __init__(self, render: Render, live: Probe, ready: Probe) -> None:
        self._render = render
        self._probes = {"/healthz": live, "/readyz": ready}
        self._collecting = threading.Lock()

    def answer(self, path: str, accept: str) -> tuple[int, str, bytes]:
        """Status, content type and body."""
        if path == "/metrics":
            return self._metrics(accept)
        probe = self._probes.get(path)
        if probe is None:
            return 404, "text/plain; charset=utf-8", b"there are /metrics, /healthz and /readyz\n"
        verdict = probe()
        about = {"ok": verdict.is_ok, **({"reason": verdict.reason} if verdict.reason else {}), **verdict.fields}
        body = json.dumps(about, default=str).encode() + b"\n"
        return 200 if verdict.is_ok else 503, "application/json", body

    def _metrics(self, accept: str) -> tuple[int, str, bytes]:
        if not self._collecting.acquire(timeout=COLLECT_S):
            return 503, "text/plain; charset=utf-8", b"another request has been collecting metrics all the time\n"
        try:
            body, content_type = self._render(accept)
        finally:
            self._collecting.release()
        return 200, content_type, body


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, host: str, port: int, pages: _Pages) -> None:
        self.pages = pages
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._guard = threading.Lock()
        self._since: dict[socket.socket, float] = {}
        """When each open connection was accepted. Guarded by `_guard`."""
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), _Request)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the name service for the name of the host.
        super(HTTPServer, self).server_bind()
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            request.settimeout(0)
            try:
                request.send(_BUSY)
            except OSError:
                pass  # the client does not read, or is gone
            finally:
                request.close()
            return
        with self._guard:
            self._since[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError as error:  # the limit of threads is reached
            _log.log("thread", logging.WARNING, "a request for metrics has no thread: %s", error)
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Called by the thread of the connection, when the request is answered."""
        with self._guard:
            was_open = self._since.pop(request, None) is not None
        super().shutdown_request(request)
        if was_open:
            self._slots.release()

    def service_actions(self) -> None:
        """Called by the thread that accepts, every `_LOOK_S`: end the connections that are too old."""
        self._end_before(time.monotonic() - CONNECTION_S)

    def _end_before(self, moment: float) -> None:
        with self._guard:
            old = [request for request, since in self._since.items() if since <= moment]
            for request in old:
                with contextlib.suppress(OSError):  # the client has closed it
                    request.shutdown(socket.SHUT_RDWR)  # the connection's thread then ends, and closes it

    def server_close(self) -> None:
        super().server_close()
        self._end_before(float("inf"))

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.log("request", logging.WARNING, "a request for metrics or health failed", exc_info=sys.exc_info()[1])


class _Bounded:
    """The lines of a request, up to REQUEST_BYTES_MAX; then nothing, as if the request ended there."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, REQUEST_BYTES_MAX

    def readline(self, size: int) -> bytes:
        line: bytes = self._file.readline(min(size, self._left))
        self._left -= len(line)
        return line

    def close(self) -> None:
        self._file.close()


class _Request(BaseHTTPRequestHandler):
    """One connection, which has one request."""

    server: _Server
    timeout = READ_S
    protocol_version = "HTTP/1.0"
    server_version = "pxrs"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile = _Bounded(self.rfile)  # type: ignore[assignment]

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def _answer(self, *, has_body: bool) -> None:
        path = self.path.partition("?")[0]
        try:
            status, content_type, body = self.server.pages.answer(path, self.headers.get("Accept", ""))
        except Exception as error:  # noqa: BLE001 - the client is told, and the log says why
            _log.log("answer", logging.ERROR, "%s cannot be answered: %s", path, error, exc_info=error)
            status, content_type, body = 500, "text/plain; charset=utf-8", b"failed; the log of the process says why\n"
        try:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if has_body:
                self.wfile.write(body)
        except OSError:
            self.close_connection = True  # the client is gone, or reads too slowly

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            self.close_connection = True  # the client is gone, or the connection was ended as too old

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: a scraper sends one every few seconds."""
