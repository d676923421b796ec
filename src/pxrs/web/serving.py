"""The HTTP server of the page: uvicorn, with limits on everything that a client can make it hold."""

from __future__ import annotations

import socket
import threading
from typing import Final

import uvicorn

from pxrs.hub import Hub
from pxrs.ports import cannot_listen
from pxrs.web.access import Access
from pxrs.web.connections import HEAD_S, BoundedProtocol
from pxrs.web.observer import Observer
from pxrs.web.routes import page

HEAD_BYTES_MAX: Final = 16 << 10
STOP_S: Final = 2


class WebServer:
    """`start` binds and serves on a thread of its own; `close` ends it, and leaves the hub open."""

    def __init__(
        self, hub: Hub, listen: str = "127.0.0.1:8080", access: Access | None = None, hosts: tuple[str, ...] = ()
    ) -> None:
        self.observer = Observer(hub)
        self._socket = _bound(listen)
        self.address = f"{listen.rpartition(':')[0]}:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                page(self.observer, access, hosts),
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                h11_max_incomplete_event_size=HEAD_BYTES_MAX,
                timeout_keep_alive=int(HEAD_S),
                timeout_graceful_shutdown=STOP_S,
            )
        )
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="pxrs-web", daemon=True)

    @property
    def url(self) -> str:
        return f"http://{self.address}/"

    @property
    def connection_count(self) -> int:
        return len(self._server.server_state.connections)

    def start(self) -> None:
        self.observer.start()
        self._thread.start()

    def close(self) -> None:
        """Idempotent. First no more requests, then no more looks."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(STOP_S + 5)
        self._socket.close()
        self.observer.close()

    def __enter__(self) -> WebServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bound(listen: str) -> socket.socket:
    """Raises CannotListen. listen: HOST:PORT."""
    host, _, text = listen.rpartition(":")
    host, port = host.strip("[]"), int(text)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(128)
    except OSError as error:
        made.close()
        raise cannot_listen(listen, error) from error
    return made
