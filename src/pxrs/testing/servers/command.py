"""A command of pxrs that serves gRPC until it is stopped, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pxrs.testing.forked import Forked
from pxrs.testing.servers.certificates import Certificates
from pxrs.testing.servers.process import PROBE_S_MAX, Server

if TYPE_CHECKING:
    import grpc

_HEALTH = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"


class CommandServer(Server):
    """`pxrs COMMAND`. It is ready when its health check says that it serves."""

    scheme = "pxrs"

    def __init__(self, *, tls: Certificates | None = None, forked: bool = False) -> None:
        """tls: the certificates that the command was given.

        forked: fork the process from one that has imported what it needs (`pxrs.testing.forked`), which takes a tenth
                of the time. Not for use in a script that has no `if __name__ == "__main__"`."""
        super().__init__()
        self.tls = tls
        self._is_forked = forked

    def _prepare(self, folder: Path) -> None:
        pass

    @staticmethod
    def _pxrs(*arguments: str) -> list[str]:
        """The command line of pxrs with these arguments."""
        return [sys.executable, "-m", "pxrs.cli", *arguments]

    def _launch(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes] | Forked:
        if not self._is_forked:
            return super()._launch(command, log)
        with log.open("ab") as output:
            at = output.fileno()
            arguments = command[3:]
            return Forked("pxrs.cli", arguments, stdout=at, stderr=at, cwd=log.parent, has_group=True, is_mortal=True)

    def is_ready(self) -> bool:
        """Whether the server's health check says that it serves."""
        import grpc  # here, so that a missing extra is told by the module that names it

        if self._is_paused:
            return False
        with self._channel() as channel:
            try:
                return bool(channel.unary_unary(_HEALTH)(b"", timeout=PROBE_S_MAX) == _SERVING)
            except grpc.RpcError:
                return False

    def _channel(self) -> grpc.Channel:
        import grpc

        # A pool of its own: a channel that is made anew for a server that was away must not share its backoff.
        options = (("grpc.use_local_subchannel_pool", 1),)
        if self.tls is None:
            return grpc.insecure_channel(f"{self.host}:{self.port}", options)
        credentials = grpc.ssl_channel_credentials(self.tls.ca.read_bytes())
        return grpc.secure_channel(f"{self.host}:{self.port}", credentials, options)
