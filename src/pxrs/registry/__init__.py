"""The coordination kernel: versioned keys, multi-key compare-and-commit, leases and watches on any store.

    with registry.open("postgresql://me@db/coordination") as store:
        version = store.commit(put={"config/rate": b"10"})["config/rate"]
        store.commit(expect={"config/rate": version}, put={"config/rate": b"20"})   # or Conflict

What it promises is in `contract.py`, and `pxrs.testing.registry_contract` proves it for every backend. Groups, queues
and the Spark sink are written over this contract alone and never ask which store they run on.

Where to start reading: `contract.py` (the class `Registry`), `lease.py` and `renewal.py` (leases and what keeps them
alive), `watch.py`, then a backend. `memory.py` is the shortest one. In each of the folders `file/`, `sql/`, `etcd/` and
`zookeeper/`, `registry.py` is the backend's `Registry` and `lease.py` its leases. docs/registry.md is for users.
"""

from __future__ import annotations

import importlib
import os

from pxrs.errors import InvalidUrl, MissingDependency
from pxrs.registry.address import parse
from pxrs.registry.contract import ABSENT, Entry, Limits, Registry
from pxrs.registry.lease import Lease
from pxrs.registry.watch import Watch

__all__ = ["ABSENT", "SCHEMES", "Entry", "Lease", "Limits", "Registry", "Watch", "open"]

SCHEMES = {
    "memory": ("pxrs.registry.memory", ""),
    "file": ("pxrs.registry.file", ""),
    "sqlite": ("pxrs.registry.sql", "sql"),
    "postgresql": ("pxrs.registry.sql", "sql"),
    "oracle": ("pxrs.registry.sql", "oracle"),
    "etcd": ("pxrs.registry.etcd", "etcd"),
    "zookeeper": ("pxrs.registry.zookeeper", "zookeeper"),
}
"""Scheme -> the module that opens it, and the extra that brings its driver."""


def open(url: str | os.PathLike[str]) -> Registry:
    """Open a registry by its address; each takes `?namespace=NAME` and its own options (docs/registry.md).

    memory:                          in this process alone
    file:DIR or a plain path         this machine's processes, no server
    sqlite:///FILE                   this machine's processes, one database file
    postgresql://user@host/database  and oracle://user@host/?service_name=NAME; postgresql+psycopg:// is the same
    etcd://host:port,host:port       zookeeper://host:port,host:port/chroot
    """
    address = parse(url)
    if address.scheme not in SCHEMES:
        raise InvalidUrl(f"unknown scheme {address.scheme!r}; choose from {', '.join(SCHEMES)}, or give a directory")
    module, extra = SCHEMES[address.scheme]
    try:
        backend = importlib.import_module(module)
    except ImportError as error:
        if not extra or (error.name or "").startswith("pxrs"):
            raise
        raise MissingDependency(
            f"{address.scheme} needs {error.name}: pip install 'pxrs[{extra}]'", name=error.name
        ) from error
    registry: Registry = backend.open(address)
    return registry
