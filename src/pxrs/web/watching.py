"""Watches of the registry, also for a page whose token does not permit them.

A server permits a watch of all groups or queues to those alone who may read all of them. A page with fewer permissions
looks again every `LOOK_S` instead: a scan shows it what it may see.

A book that is made while the registry cannot be reached opens its watch when it is first refreshed (`LateWatch`), so
that an outage at the start is a problem that the page shows, and not the end of the process.
"""

from __future__ import annotations

import time
from typing import Final, Protocol

from pxrs.errors import NotPermitted
from pxrs.registry.contract import Registry

LOOK_S: Final = 5.0


class Watching(Protocol):
    """What the books need of a watch."""

    def wait(self, timeout: float) -> bool:
        """Whether something may have changed since the last call."""

    def close(self) -> None: ...


class Periodic:
    """In place of a watch: something may have changed every `LOOK_S`."""

    def __init__(self) -> None:
        self._next = time.monotonic() + LOOK_S

    def wait(self, timeout: float) -> bool:
        """Does not wait, whatever the time."""
        is_due = time.monotonic() >= self._next
        if is_due:
            self._next = time.monotonic() + LOOK_S
        return is_due

    def close(self) -> None:
        pass


class LateWatch:
    """A watch that the first `wait` opens."""

    def __init__(self, registry: Registry, prefix: str) -> None:
        self._registry, self._prefix = registry, prefix
        self._watch: Watching | None = None

    def wait(self, timeout: float) -> bool:
        """True after it was opened: what was read before may be old. Raises what the registry raises."""
        if self._watch is None:
            self._watch = watch(self._registry, self._prefix)
            return True
        return self._watch.wait(timeout)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()


def watch(registry: Registry, prefix: str) -> Watching:
    try:
        return registry.watch(prefix)
    except NotPermitted:
        return Periodic()
