"""`pxrs storage` in a process of its own: one storage node of a cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pxrs.testing.servers.certificates import Certificates
from pxrs.testing.servers.command import CommandServer


class StorageServer(CommandServer):
    """A storage node of the cluster of this registry, in `data`, by default a new directory. `flags` are added to its
    command line. forked: see `CommandServer`."""

    def __init__(
        self,
        registry: str,
        data: Path | None = None,
        *,
        flags: Sequence[str] = (),
        tls: Certificates | None = None,
        forked: bool = False,
    ) -> None:
        super().__init__(tls=tls, forked=forked)
        self._registry, self._data, self._flags = registry, data, tuple(flags)
        self.advertised: str | None = None
        """The address that brokers are told, such as that of a proxy; None: `address`."""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def data(self) -> Path:
        """The node's directory."""
        return self.directory / "data" if self._data is None else self._data

    @property
    def node(self) -> str:
        """The id of the node, as its directory has it now."""
        return str(self._cookie()["node"])

    @property
    def starts(self) -> int:
        """How often the node was started on this disk."""
        return int(self._cookie()["starts"])

    def _cookie(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.data / "node.json").read_bytes())
        return found

    def _command(self, folder: Path) -> list[str]:
        data = folder / "data" if self._data is None else self._data
        command = self._pxrs("storage", "--registry", self._registry, "--dir", str(data), "--listen", self.address)
        if self.advertised is not None:
            command += ["--advertise", self.advertised]
        if self.tls is not None:
            command += ["--tls-cert", str(self.tls.server_cert), "--tls-key", str(self.tls.server_key)]
        return [*command, *self._flags]
