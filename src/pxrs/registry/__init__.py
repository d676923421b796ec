"""The coordination kernel: versioned keys, compare-and-commit of several keys at once, leases and watches.

A registry holds keys, which are slash paths, and values, which are bytes. Every write gives its key a new version, and
a commit names the versions that it expects: it changes all its keys, or none. A lease proves that its holder is alive,
and the ephemeral keys of a lease are deleted with it. A watch tells that something below a prefix has changed, never
what.

What every registry promises is written in `contract.py` and proved by `pxrs.testing.registry_contract`, which runs over
each of the stores: memory, files, SQLite, PostgreSQL, Oracle, etcd, ZooKeeper. A call either had its effect, or raises
an error that says that it had none, or raises OutcomeUnknown.

Start reading at `contract.py`; `memory.py` is the shortest implementation. An installed package adds a store of its own
by an entry point of the group `pxrs.registries`: the name is the scheme, the object a function that takes an `Address`
and returns a `Registry`.
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
from pxrs.registry.watch import Watch

__all__ = ["ABSENT", "ENTRY_POINTS", "SCHEMES", "Entry", "Lease", "Limits", "Registry", "Watch", "open", "schemes"]

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
            raise MissingDependency(
                f"{scheme} needs {error.name}: pip install 'pxrs[{extra}]'", name=error.name
            ) from error
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
    """
    address = parse(url)
    if address.scheme not in SCHEMES and address.scheme not in (known := schemes()):
        raise InvalidUrl(f"unknown scheme {address.scheme!r}; choose from {', '.join(known)}, or give a directory")
    return plugins.function_named("scheme", address.scheme, SCHEMES, ENTRY_POINTS, InvalidUrl)(address)
