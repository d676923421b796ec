"""The processes of a replicated cluster: `pxrs storage` and `pxrs broker`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pxrs.testing.servers.command import CommandServer


class StorageProcess(CommandServer):
    """`pxrs storage`. `flags` are added to its command line. forked: see `CommandServer`."""

    def __init__(
        self,
        registry: str,
        data: Path | None = None,
        *,
        advertise: str | None = None,
        flags: Sequence[str] = (),
        forked: bool = True,
    ) -> None:
        """data: the node's directory, by default a new one. advertise: the address that brokers are told, such as that
        of a proxy."""
        super().__init__(forked=forked)
        self._registry, self._data, self.advertise, self._flags = registry, data, advertise, tuple(flags)

    @property
    def data(self) -> Path:
        """The node's directory."""
        return self.directory / "data" if self._data is None else self._data

    def _command(self, folder: Path) -> list[str]:
        data = folder / "data" if self._data is None else self._data
        where = ["--dir", str(data), "--listen", f"{self.host}:{self.port}"]
        told = [] if self.advertise is None else ["--advertise", self.advertise]
        return self._pxrs("storage", "--registry", self._registry, *where, *told, *self._flags)


class BrokerProcess(CommandServer):
    """`pxrs broker`. `flags` are added to its command line. forked: see `CommandServer`."""

    def __init__(
        self,
        registry: str,
        name: str = "",
        *,
        advertise: str | None = None,
        flags: Sequence[str] = (),
        forked: bool = True,
    ) -> None:
        """advertise: the address that clients and other brokers are told, such as that of a proxy."""
        super().__init__(forked=forked)
        self._registry, self.name, self.advertise, self._flags = registry, name, advertise, tuple(flags)

    def _command(self, folder: Path) -> list[str]:
        where = ["--listen", f"{self.host}:{self.port}", "--name", self.name]
        told = [] if self.advertise is None else ["--advertise", self.advertise]
        return self._pxrs("broker", "--registry", self._registry, *where, *told, *self._flags)
