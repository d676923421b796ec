"""Real etcd, PostgreSQL, ZooKeeper, `pxrs serve`, `pxrs storage` and `pxrs broker` servers for tests.

Each is a context manager.

A test of coordination is worth what its server is worth, so these are the real programs, out of
Python packages, with durable writes on. Each has ports on 127.0.0.1 and a temporary folder of its
own, and can be killed, paused and restarted on the same data:

    with EtcdServer() as etcd:
        etcd.kill()
        etcd.restart()

Invariants: `start` returns a server that answers, or raises with the end of its log and leaves
nothing behind. Only processes started here are ever signalled. Every wait is bounded. On Linux the
servers also die with the process that started them, however that one ends; elsewhere a test run
that is killed outright leaves its servers running.
"""

from pxrs.launching import free_ports
from pxrs.testing.servers.broker import BrokerServer
from pxrs.testing.servers.certificates import Certificates, certificates
from pxrs.testing.servers.cluster import Cluster, QuorumServer
from pxrs.testing.servers.etcd import EtcdCluster, EtcdServer
from pxrs.testing.servers.hub import HubServer
from pxrs.testing.servers.postgres import PostgresServer, installed_postgres
from pxrs.testing.servers.process import Server, ServerFailed, started_servers
from pxrs.testing.servers.storage import StorageServer
from pxrs.testing.servers.zookeeper import ZooKeeperCluster, ZooKeeperServer

__all__ = [
    "BrokerServer",
    "Certificates",
    "Cluster",
    "EtcdCluster",
    "EtcdServer",
    "HubServer",
    "PostgresServer",
    "QuorumServer",
    "Server",
    "ServerFailed",
    "StorageServer",
    "ZooKeeperCluster",
    "ZooKeeperServer",
    "certificates",
    "free_ports",
    "installed_postgres",
    "started_servers",
]
