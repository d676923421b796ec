"""`pxrs storage` in a process of its own: one storage node of a cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pxrs.testing.servers.certificates import Certificates
from pxrs.testing.servers.hub import HubServer


class StorageServer(HubServer):
    """A storage node of the cluster of this registry, in `data`, by default a new directory. Else as `HubServer`."""

    def __init__(
        self,
        registry: str,
        data: Path | None = None,
        *,
        flags: Sequence[str] = (),
        tls: Certificates | None = None,
        forked: bool = False,
    ) -> None:
        super().__init__(data, registry, flags=flags, tls=tls, forked=forked)
        self._cluster_registry = registry

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def node(self) -> str:
        """The id of the node, as its directory has it now."""
        return str(json.loads((self.data / "node.json").read_bytes())["node"])

    def _command(self, folder: Path) -> list[str]:
        data = folder / "data" if self._data is None else self._data
        command = [sys.executable, "-m", "pxrs.cli", "storage", "--registry", self._cluster_registry]
        command += ["--dir", str(data), "--listen", self.address]
        if self.tls is not None:
            command += ["--tls-cert", str(self.tls.server_cert), "--tls-key", str(self.tls.server_key)]
        return [*command, *self._flags]
