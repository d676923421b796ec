"""ZooKeeper, from the jars inside the package `pyspark`."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from pxrs.launching import HOST, free_ports, package_folder
from pxrs.spark.java import find_java
from pxrs.testing.servers.certificates import Certificates
from pxrs.testing.servers.cluster import Cluster, QuorumServer
from pxrs.testing.servers.process import (
    PROBE_S_MAX,
)

# What the server needs of Spark's jars. All of them on the class path would double the time to start.
_ZOOKEEPER_JARS = (
    *("zookeeper", "zookeeper-jute", "snappy-java", "metrics-core", "commons-io"),
    *("slf4j-api", "log4j-api", "log4j-core", "log4j-slf4j2-impl"),  # without these its log says nothing
    *(
        "netty-handler",
        "netty-transport",
        "netty-common",
        "netty-buffer",
        "netty-codec-base",
        "netty-resolver",
    ),
    *("netty-transport-native-unix-common", "netty-transport-classes-epoll"),  # for TLS
)
# Two cores may run three of these beside the tests: small, one compiler, no parallel collector.
_JVM_FLAGS = ("-Xmx64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


class ZooKeeperServer(QuorumServer):
    """One ZooKeeper, alone or as the member `number` of `members` (number to peer and election port).

    Session time-outs are clamped to 2 and 20 ticks unless given. With `tls` it serves TLS only, and
    with `client_auth` it also asks clients for a certificate. More flags for its Java may be given in the environment
    variable SERVER_JVMFLAGS, as for ZooKeeper's own scripts.
    """

    scheme = "zookeeper"

    def __init__(
        self,
        *,
        tick_ms: int = 500,
        session_ms_min: int | None = None,
        session_ms_max: int | None = None,
        tls: Certificates | None = None,
        client_auth: bool = False,
        settings: Mapping[str, str] | None = None,
        number: int = 1,
        members: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        super().__init__()
        self.tls = tls
        self._tick_ms = tick_ms
        self._session_ms = (session_ms_min or 2 * tick_ms, session_ms_max or 20 * tick_ms)
        self._client_auth = client_auth
        self._settings = dict(settings or {})
        self._number = number
        self._members = dict(members or {})

    def _prepare(self, folder: Path) -> None:
        data = folder / "data"
        data.mkdir()
        (data / "myid").write_text(f"{self._number}\n")
        settings = {
            "tickTime": self._tick_ms,
            "initLimit": 10,
            "syncLimit": 5,
            "minSessionTimeout": self._session_ms[0],
            "maxSessionTimeout": self._session_ms[1],
            "dataDir": data,
            "admin.enableServer": "false",
            "4lw.commands.whitelist": "*",
            **{f"server.{i}": f"{HOST}:{peer}:{vote}" for i, (peer, vote) in self._members.items()},
            **self._port_settings(folder),
            **self._settings,
        }
        (folder / "zoo.cfg").write_text("".join(f"{key}={value}\n" for key, value in settings.items()))

    def _port_settings(self, folder: Path) -> dict[str, object]:
        if self.tls is None:
            return {"clientPort": self.port, "clientPortAddress": self.host}
        both = folder / "server.pem"  # ZooKeeper takes key and certificate from one file
        both.write_bytes(self.tls.server_key.read_bytes() + self.tls.server_cert.read_bytes())
        return {
            "secureClientPort": self.port,
            "secureClientPortAddress": self.host,
            "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
            "ssl.keyStore.location": both,
            "ssl.trustStore.location": self.tls.ca,
            "ssl.clientAuth": "need" if self._client_auth else "none",
        }

    def _command(self, folder: Path) -> list[str]:
        jars = package_folder("pyspark", "pyspark") / "jars"
        found = [next(jars.glob(f"{name}-[0-9]*.jar"), None) for name in _ZOOKEEPER_JARS]
        class_path = ":".join(str(jar) for jar in found if jar)
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        flags = (*_JVM_FLAGS, *os.environ.get("SERVER_JVMFLAGS", "").split())
        return [str(find_java()), *flags, "-cp", class_path, main, str(folder / "zoo.cfg")]

    def is_ready(self) -> bool:
        """Say whether ZooKeeper serves: its port opens earlier than that."""
        return b"Mode:" in self._ask(b"srvr")

    def is_leader(self) -> bool:
        return b"Mode: leader" in self._ask(b"srvr")

    def has_session(self, session: int) -> bool:
        """Say whether the server still counts the session among its own; False once it has expired."""
        return f"0x{session:x}".encode() in self._ask(b"dump")

    def _ask(self, word: bytes) -> bytes:
        """Return the answer to a four-letter word, nothing if there is none."""
        if self._is_paused:
            return b""
        try:
            with self._connect() as connection:
                connection.sendall(word)
                return b"".join(iter(functools.partial(connection.recv, 4096), b""))
        except OSError:
            return b""

    def _connect(self) -> socket.socket:
        # A short time: a question that arrives while the server starts is never answered.
        plain = socket.create_connection((self.host, self.port), PROBE_S_MAX / 4)
        if self.tls is None:
            return plain
        try:
            return self.tls.client_context().wrap_socket(plain, server_hostname=self.host)
        except BaseException:
            plain.close()
            raise


class ZooKeeperCluster(Cluster[ZooKeeperServer]):
    """A ZooKeeper ensemble of `n` nodes; the options are those of each node."""

    def __init__(
        self,
        n: int = 3,
        *,
        tick_ms: int = 500,
        session_ms_min: int | None = None,
        session_ms_max: int | None = None,
        tls: Certificates | None = None,
        client_auth: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        ports = free_ports(2 * n)
        members = {i + 1: (ports[2 * i], ports[2 * i + 1]) for i in range(n)}
        super().__init__(
            [
                ZooKeeperServer(
                    tick_ms=tick_ms,
                    session_ms_min=session_ms_min,
                    session_ms_max=session_ms_max,
                    tls=tls,
                    client_auth=client_auth,
                    settings=settings,
                    number=number,
                    members=members,
                )
                for number in members
            ]
        )
