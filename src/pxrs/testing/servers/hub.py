"""`pxrs serve` in a process of its own, in front of a hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pxrs.testing.servers.certificates import Certificates
from pxrs.testing.servers.command import CommandServer


class HubServer(CommandServer):
    """`pxrs serve`, alone in front of the hub in `data`, by default a new directory. `flags` are added to its command
    line. The registry is the hub's own, or the one at the address `registry`. forked: see `CommandServer`."""

    def __init__(
        self,
        data: Path | None = None,
        registry: str | None = None,
        *,
        flags: Sequence[str] = (),
        tls: Certificates | None = None,
        forked: bool = False,
    ) -> None:
        super().__init__(tls=tls, forked=forked)
        self._data, self._registry, self._flags = data, registry, tuple(flags)

    @property
    def data(self) -> Path:
        """The hub's directory."""
        return self.directory / "data" if self._data is None else self._data

    def _prepare(self, folder: Path) -> None:
        (folder / "data" if self._data is None else self._data).mkdir(exist_ok=True)

    def _command(self, folder: Path) -> list[str]:
        data = folder / "data" if self._data is None else self._data
        command = self._pxrs("serve", str(data), "--listen", f"{self.host}:{self.port}")
        if self._registry is not None:
            command += ["--registry", self._registry]
        if self.tls is not None:
            command += ["--tls-cert", str(self.tls.server_cert), "--tls-key", str(self.tls.server_key)]
        return [*command, *self._flags]
