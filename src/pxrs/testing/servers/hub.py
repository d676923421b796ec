"""`pxrs serve` in a process of its own, in front of a hub."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc

from pxrs.testing.forked import Forked
from pxrs.testing.servers.certificates import Certificates
from pxrs.testing.servers.process import PROBE_S_MAX, Server

_HEALTH = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"


class HubServer(Server):
    """`pxrs serve`, alone in front of the hub in `data`, by default a new directory. `flags` are added to its command
    line. The registry is the hub's own, or the one at the address `registry`.

    forked: fork the process from one that has imported what it needs (`pxrs.testing.forked`), which takes a tenth of
            the time. Not for use in a script that has no `if __name__ == "__main__"`."""

    scheme = "pxrs"

    def __init__(
        self,
        data: Path | None = None,
        registry: str | None = None,
        *,
        flags: Sequence[str] = (),
        tls: Certificates | None = None,
        forked: bool = False,
    ) -> None:
        super().__init__()
        self._data, self._registry, self._flags, self.tls = data, registry, tuple(flags), tls
        self._is_forked = forked

    @property
    def data(self) -> Path:
        """The hub's directory."""
        return self.directory / "data" if self._data is None else self._data

    def _prepare(self, folder: Path) -> None:
        (folder / "data" if self._data is None else self._data).mkdir(exist_ok=True)

    def _command(self, folder: Path) -> list[str]:
        data = folder / "data" if self._data is None else self._data
        command = [sys.executable, "-m", "pxrs.cli", "serve", str(data), "--listen", f"{self.host}:{self.port}"]
        if self._registry is not None:
            command += ["--registry", self._registry]
        if self.tls is not None:
            command += ["--tls-cert", str(self.tls.server_cert), "--tls-key", str(self.tls.server_key)]
        return [*command, *self._flags]

    def _launch(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes] | Forked:
        if not self._is_forked:
            return super()._launch(command, log)
        with log.open("ab") as output:
            at = output.fileno()
            arguments = command[3:]
            return Forked("pxrs.cli", arguments, stdout=at, stderr=at, cwd=log.parent, has_group=True, is_mortal=True)

    def is_ready(self) -> bool:
        """Whether the server's health check says that it serves."""
        if self._is_paused:
            return False
        with self._channel() as channel:
            try:
                return bool(channel.unary_unary(_HEALTH)(b"", timeout=PROBE_S_MAX) == _SERVING)
            except grpc.RpcError:
                return False

    def _channel(self) -> grpc.Channel:
        # A pool of its own: a channel that is made anew for a server that was away must not share its backoff.
        options = (("grpc.use_local_subchannel_pool", 1),)
        if self.tls is None:
            return grpc.insecure_channel(f"{self.host}:{self.port}", options)
        credentials = grpc.ssl_channel_credentials(self.tls.ca.read_bytes())
        return grpc.secure_channel(f"{self.host}:{self.port}", credentials, options)
