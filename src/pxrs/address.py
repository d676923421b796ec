"""Addresses of logs and registries, and the tables that map a scheme to what opens it.

A hub is a log and a registry, and `pxrs.open` takes an address of each:

    table               entry points       schemes of pxrs itself
    LOGS                pxrs.logs          memory:, file: (a directory; a plain path is the same), pxrs: (a server)
    registry.SCHEMES    pxrs.registries    memory:, file:, sqlite:, postgresql:, oracle:, etcd:, zookeeper:, pxrs:

An installed package adds a scheme by an entry point of the group in the second column. The entry point's name is the
scheme; its object is a function that takes an `Address` and returns a `Log` or a `Registry`. A scheme of pxrs itself
cannot be replaced.

A log is opened at once. A registry is opened by its first use (`LazyRegistry`): many hubs only append and read, and
need no server for that, and no empty registry may appear at a path that somebody has mistyped.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pxrs import plugins
from pxrs import registry as registries
from pxrs.errors import Closed, InvalidUrl, MissingDependency
from pxrs.registry.address import Address, parse
from pxrs.registry.contract import Registry

if TYPE_CHECKING:
    from pxrs.log.contract import Log  # imports pyarrow, which a command that only checks an address does without

__all__ = ["LOGS", "LOG_ENTRY_POINTS", "Address", "LazyRegistry", "is_missing", "log_schemes", "open_log", "parse"]

LOG_ENTRY_POINTS: Final = "pxrs.logs"
"""The group of entry points by which installed packages add schemes of logs."""


def _open_memory(address: Address) -> Log:
    from pxrs.log.memory import MemoryLog

    if address.rest or address.options:
        raise InvalidUrl(f"{address.text}: write memory: and nothing more")
    return MemoryLog()


def _open_directory(address: Address) -> Log:
    from pxrs.log.directory.log import DirectoryLog

    path = address.directory()
    if address.options:
        raise InvalidUrl(f"{address.text}: a directory takes no options; unknown: {', '.join(address.options)}")
    return DirectoryLog(path)


def _open_remote(address: Address) -> Log:
    try:
        from pxrs.remote import client
    except ImportError as error:
        if (error.name or "").startswith("pxrs"):
            raise
        raise MissingDependency.of_extra("pxrs:", error.name, "remote") from error
    return client.open_log(address)


LOGS: Final[dict[str, Callable[[Address], Log]]] = {
    "memory": _open_memory,
    "file": _open_directory,
    "pxrs": _open_remote,
}
"""Scheme -> what opens the log at an address of it. `log_schemes` adds those of installed packages."""


def log_schemes() -> list[str]:
    """The schemes that `open_log` knows: those of LOGS, then those of installed packages."""
    return plugins.names(LOGS, LOG_ENTRY_POINTS)


def open_log(url: str | os.PathLike[str]) -> Log:
    """Open the log at this address. Raises InvalidUrl, and what the log itself raises."""
    address = parse(url)
    if address.scheme not in LOGS and address.scheme not in (known := log_schemes()):
        if address.scheme in registries.schemes():
            raise InvalidUrl(
                f"{address.text} keeps no messages: write pxrs.open(DIRECTORY, registry='{address.scheme}:...'), or "
                f"pxrs.open(registry='{address.scheme}:...') for queues alone"
            )
        others = "".join(f", {scheme}:" for scheme in known if scheme not in LOGS)
        raise InvalidUrl(f"unknown scheme {address.scheme!r}; give a directory, pxrs://HOST:PORT or memory:{others}")
    return plugins.function_named("scheme", address.scheme, LOGS, LOG_ENTRY_POINTS, InvalidUrl)(address)


def is_missing(address: Address) -> bool:
    """Whether a registry's address names a directory or file of this machine that does not exist, so that opening it
    would create an empty registry. False for servers: those are asked when they are used."""
    if address.scheme == "file":
        return not address.directory().is_dir()
    return address.scheme == "sqlite" and not Path(address.rest.removeprefix("///")).is_file()


class LazyRegistry:
    """The registry of a hub, opened by the first `get`. Threads share it."""

    def __init__(self, registry: Registry | str | os.PathLike[str]) -> None:
        """registry: an address, or a registry that is open already; both are closed by `close`.

        Raises InvalidUrl for an address that cannot be understood or has an unknown scheme; nothing is opened."""
        self._url: str | os.PathLike[str] = registry.url if isinstance(registry, Registry) else registry
        self._registry = registry if isinstance(registry, Registry) else None
        try:
            self.address = parse(self._url)
        except InvalidUrl as error:
            raise InvalidUrl(f"registry: {error}") from None
        if self._registry is None and self.address.scheme not in registries.SCHEMES:
            known = registries.schemes()
            if self.address.scheme not in known:
                raise InvalidUrl(f"registry: unknown scheme {self.address.scheme!r}; choose from {', '.join(known)}")
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def shown(self) -> str:
        """The registry's address without a password."""
        return self.address.shown

    @property
    def is_in_memory(self) -> bool:
        """Whether the registry is in the memory of this process, and ends with it."""
        return self.address.scheme == "memory"

    @property
    def is_open(self) -> bool:
        """Whether somebody has used it."""
        return self._registry is not None

    @property
    def is_missing(self) -> bool:
        """Whether the registry is not open, and opening it would create an empty one: see `is_missing` of this
        module."""
        return self._registry is None and is_missing(self.address)

    def get(self) -> Registry:
        """The registry, opened if it is not yet. Raises Closed, and what opening it raises."""
        with self._lock:
            if self._is_closed:
                raise Closed(f"the registry {self.shown} was closed with its hub")
            if self._registry is None:
                self._registry = registries.open(self._url)
            return self._registry

    def close(self) -> None:
        """Close the registry if it was opened; `get` raises Closed from now on. May be called again."""
        with self._lock:
            self._is_closed = True
            registry = self._registry
        if registry is not None:
            registry.close()
