"""The registry on ZooKeeper (tested with 3.9), through the `kazoo` client.

    zookeeper://user:password@host:2181,host:2181/chroot?namespace=prod&timeout=10&sessions=256&ca=FILE

A commit is one ZooKeeper transaction, a lease a session of its own, a watch a tree of one-shot watches. A read is sent
behind an empty transaction, because `sync` alone is not linearizable (R1). Nodes get an ACL that lets every client use
them, or, with a user in the address, that user alone. The chroot and all folders are made when first needed; empty ones
are not removed.

What it costs: a read costs as much as a write. A folder is listed whole, whatever the limit of a scan. Each lease that
the handle renews has a connection and a thread, at most `sessions` of them. What ZooKeeper cannot do: compare more of a
version than the number of writes, which a re-created key counts from 0 again (R4).

Where to start reading: `registry.py` (the class `ZooKeeperRegistry`), `commit.py` and `multi.py` (a commit as a
transaction), `lease.py` (sessions of leases), `watcher.py`. `client.py` is kazoo's client with bounds, `session.py`
makes calls through it, `layout.py` says where a key lives, `bulk.py` reads many nodes by one request.
"""

from __future__ import annotations

import re
import ssl

from pxrs.errors import InvalidUrl
from pxrs.registry.address import Address
from pxrs.registry.contract import Registry
from pxrs.registry.zookeeper.client import Endpoint
from pxrs.registry.zookeeper.layout import Layout
from pxrs.registry.zookeeper.lease import SESSIONS_MAX
from pxrs.registry.zookeeper.registry import ZooKeeperRegistry

__all__ = ["ZooKeeperRegistry", "open"]

DEFAULT_PORT = 2181
TIMEOUT_S = 10.0
CHROOT_BYTES_MAX = 128
SESSIONS_LIMIT = 100_000
"""The largest value of the option `sessions`."""
_CHROOT = re.compile(r"(/(?!\.{1,2}(/|$))[!-.0-~]+)*")


def open(address: Address) -> Registry:
    """Open a handle; it connects in the background, and the first call waits for it."""
    address.refuse_unknown_options(("timeout", "sessions", "ca", "cert", "key", "password_file"))
    hosts = tuple(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in address.hosts(DEFAULT_PORT))
    user, password = address.credentials()
    if user is not None and password is None:
        raise InvalidUrl(f"{address.text}: the user has no password; give it in the address or by password_file=FILE")
    ca, cert, key = _certificates(address)
    login = None if user is None else f"{user}:{password}"
    endpoint = Endpoint(address.text, hosts, address.seconds("timeout", TIMEOUT_S), login, ca, cert, key)
    return ZooKeeperRegistry(endpoint, Layout(_root(address)), sessions_max=_sessions(address))


def _sessions(address: Address) -> int:
    text = address.options.get("sessions", str(SESSIONS_MAX))
    if not text.isdecimal() or not 0 < int(text) <= SESSIONS_LIMIT:
        raise InvalidUrl(f"{address.text}: sessions must be a number from 1 to {SESSIONS_LIMIT:,}, not {text!r}")
    return int(text)


def _root(address: Address) -> str:
    chroot = f"/{address.path}" if address.path else ""
    if not _CHROOT.fullmatch(chroot) or len(chroot) > CHROOT_BYTES_MAX:
        raise InvalidUrl(f"{address.text}: the path {chroot!r} is not a valid ZooKeeper path")
    root = f"{chroot}/{address.namespace}"
    if root.startswith("/zookeeper/") or root == "/zookeeper":
        raise InvalidUrl(f"{address.text}: /zookeeper is reserved by ZooKeeper; choose another path or namespace")
    return root


def _certificates(address: Address) -> tuple[str | None, str | None, str | None]:
    ca, cert, key = (None if path is None else str(path) for path in map(address.file, ("ca", "cert", "key")))
    if (cert is None) != (key is None):
        raise InvalidUrl(f"{address.text}: give cert=FILE and key=FILE together")
    try:  # kazoo would retry for ever with a file that it cannot use
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except (OSError, ValueError) as error:
        raise InvalidUrl(f"{address.text}: a certificate or key cannot be used: {error}") from error
    return ca, cert, key
