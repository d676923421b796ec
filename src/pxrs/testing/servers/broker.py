"""`pxrs broker` in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pxrs.testing.servers.certificates import Certificates
from pxrs.testing.servers.command import CommandServer


class BrokerServer(CommandServer):
    """A broker of the cluster of this registry. `flags` are added to its command line. forked: see `CommandServer`."""

    def __init__(
        self,
        registry: str,
        name: str = "",
        *,
        flags: Sequence[str] = (),
        tls: Certificates | None = None,
        forked: bool = False,
    ) -> None:
        super().__init__(tls=tls, forked=forked)
        self._registry, self.name, self._flags = registry, name, tuple(flags)
        self.advertised: str | None = None
        """The address that clients and other brokers are told, such as that of a proxy; None: its own."""

    def _command(self, folder: Path) -> list[str]:
        command = self._pxrs("broker", "--registry", self._registry, "--listen", f"{self.host}:{self.port}")
        command += ["--name", self.name]
        if self.advertised is not None:
            command += ["--advertise", self.advertised]
        if self.tls is not None:
            command += ["--tls-cert", str(self.tls.server_cert), "--tls-key", str(self.tls.server_key)]
        return [*command, *self._flags]
