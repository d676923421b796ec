"""The coordination kernel: versioned keys, multi-key compare-and-commit, leases and watches on any store.

    with registry.open("postgresql://me@db/coordination") as store:
        version = store.commit(put={"config/rate": b"10"})["config/rate"]
        store.commit(expect={"config/rate": version}, put={"config/rate": b"20"})   # or Conflict

What it promises is in `contract.py`, and `pxrs.testing.registry_contract` proves it for every backend. Groups, queues
and the Spark sink are written over this contract alone and never ask which store they run on.

Where to start reading: `contract.py` (the class `Registry`), `lease.py` and `renewal.py` (leases and what keeps them
alive), `watch.py`, then a backend. `memory.py` is the shortest one. In each of the folders `file/`, `sql/`, `etcd/` and
`zookeeper/`, `registry.py` is the backend's `Registry` and `lease.py` its leases. docs/registry.md is for users.

An installed package adds a store of its own by an entry point of the group `pxrs.registries`: the name is the scheme,
the object a function that takes an `Address` and returns a `Registry`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Final

from pxrs import plugins
from pxrs.errors import InvalidUrl, MissingDependency
from pxrs.registry.address import Address, parse
from pxrs.registry.contract import ABSENT, Entry, Limits, Registry
from pxrs.registry.lease import Lease
from pxrs.registry.values import Snapshot, SqlPlace
from pxrs.registry.watch import Watch

__all__ = [
    "ABSENT",
    "ENTRY_POINTS",
    "SCHEMES",
    "Entry",
    "Lease",
    "Limits",
    "Registry",
    "Snapshot",
    "SqlPlace",
    "Watch",
    "open",
    "schemes",
]

ENTRY_POINTS: Final = "pxrs.registries"
"""The group of entry points by which installed packages add schemes."""


def _opener(scheme: str, module: str, extra: str = "") -> Callable[[Address], Registry]:
    """A function that imports the module when it is called and has its `open` make the registry. extra: the optional
    dependency of pxrs that brings the module's driver."""

    def open_there(address: Address) -> Registry:
        try:
            backend = importlib.import_module(module)
        except ImportError as error:
            if not extra or (error.name or "").startswith("pxrs"):
                raise
            raise MissingDependency.of_extra(f"{scheme}:", error.name, extra) from error
        registry: Registry = backend.open(address)
        return registry

    return open_there


SCHEMES: Final[dict[str, Callable[[Address], Registry]]] = {
    "memory": _opener("memory", "pxrs.registry.memory"),
    "file": _opener("file", "pxrs.registry.file"),
    "sqlite": _opener("sqlite", "pxrs.registry.sql", "sql"),
    "postgresql": _opener("postgresql", "pxrs.registry.sql", "sql"),
    "oracle": _opener("oracle", "pxrs.registry.sql", "oracle"),
    "etcd": _opener("etcd", "pxrs.registry.etcd", "etcd"),
    "zookeeper": _opener("zookeeper", "pxrs.registry.zookeeper", "zookeeper"),
    "pxrs": _opener("pxrs", "pxrs.remote.client", "remote"),
}
"""Scheme -> what opens an address of it. `schemes` adds those of installed packages."""


def schemes() -> list[str]:
    """The schemes that `open` knows: those of SCHEMES, then those of installed packages."""
    return plugins.names(SCHEMES, ENTRY_POINTS)


def open(url: str | os.PathLike[str]) -> Registry:
    """Open a registry by its address; each takes `?namespace=NAME` and its own options (docs/registry.md).

    memory:                          in this process alone
    file:DIR or a plain path         this machine's processes, no server
    sqlite:///FILE                   this machine's processes, one database file
    postgresql://user@host/database  and oracle://user@host/?service_name=NAME; postgresql+psycopg:// is the same
    etcd://host:port,host:port       zookeeper://host:port,host:port/chroot
    pxrs://host:port,host:port       the registry of the hub that `pxrs serve` keeps there
    """
    address = parse(url)
    if address.scheme not in SCHEMES and address.scheme not in (known := schemes()):
        raise InvalidUrl(f"unknown scheme {address.scheme!r}; choose from {', '.join(known)}, or give a directory")
    return plugins.function_named("scheme", address.scheme, SCHEMES, ENTRY_POINTS, InvalidUrl)(address)
