"""The registry on etcd: transactions on modification revisions, native leases, native watches.

Keys lie under `/<namespace>/`, so that a role that may read and write that prefix has all permissions that it takes. A
key's version is its modification revision, which etcd counts for the whole store and never reuses.

Where to start reading: `registry.py` (the class `EtcdRegistry`: reads, commits), `lease.py`, `stream.py` (watches).
`link.py` sends calls to the cluster, over a `connection.py` to one member at a time; `faults.py` says what an error
proves about a call; `narrowing.py` keeps scans with a limit cheap. `pxrs.grpc_fork` is about processes that fork.
"""

from __future__ import annotations

from pxrs import disk, grpc_fork  # first: `grpc_fork` imports gRPC in its own way
from pxrs.errors import InvalidUrl
from pxrs.registry.address import Address
from pxrs.registry.contract import Registry
from pxrs.registry.etcd.connection import Certificates
from pxrs.registry.etcd.link import Login
from pxrs.registry.etcd.registry import EtcdRegistry

PORT = 2379
TIMEOUT_S = 10.0


def open(address: Address) -> Registry:
    """Connect to the first member that answers. Options:

    timeout=SECONDS            bounds every call, 10 by default
    tls=true                   encrypt, and trust the authorities that gRPC ships
    ca=FILE cert=FILE key=FILE encrypt, trust this authority, show this certificate (PEM)
    password_file=FILE         the password of `user@`, if not in the address or the environment

    Raises RegistryUnavailable if no member answers in time, AccessDenied if the credentials are refused.
    """
    grpc_fork.check(address.text)
    address.refuse_unknown_options(("timeout", "tls", "ca", "cert", "key", "password_file"))
    if address.path:
        raise InvalidUrl(f"{address.text}: etcd takes no path; write ?namespace={address.path} for a namespace")
    hosts = address.hosts(PORT)
    registry = EtcdRegistry(
        address.text,
        address.namespace,
        [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in hosts],
        certificates=_certificates(address),
        login=_login(address),
        timeout_s=address.seconds("timeout", TIMEOUT_S),
        refused_s=address.refused_s,
    )
    try:
        registry.check_access()
    except BaseException:
        registry.close()
        raise
    return registry


def _certificates(address: Address) -> Certificates | None:
    """What TLS needs, or None for no TLS."""
    ca, cert, key = address.file("ca"), address.file("cert"), address.file("key")
    if (cert is None) != (key is None):
        raise InvalidUrl(f"{address.text}: give cert=FILE and key=FILE together")
    is_implied = ca is not None or cert is not None
    if not address.flag("tls", is_implied):
        if is_implied:
            raise InvalidUrl(f"{address.text}: tls=false contradicts ca, cert and key")
        return None
    try:
        return Certificates(*(None if path is None else path.read_bytes() for path in (ca, cert, key)))
    except OSError as error:
        raise InvalidUrl(f"{address.text}: {disk.explain(error)}") from error


def _login(address: Address) -> Login | None:
    user, password = address.credentials()
    if user is None and password is None:
        return None
    if user is None or password is None:
        missing = "user: write etcd://USER@HOST" if user is None else "password: give password_file=FILE"
        raise InvalidUrl(f"{address.text}: no {missing}")
    return Login(user, password)
