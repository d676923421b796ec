"""`OpenHub`: what an open hub consists of, what refers to it, and in which order it closes.

`close` goes from the users of the log and the registry to those two: queues; consumers, which still write checkpoints;
producers, which still append; upkeep; sources; the event log, into which all of these write; the log; the registry.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Final, Protocol, Self, TypeVar

from pxrs import dropped
from pxrs.address import LazyRegistry
from pxrs.hub_clients import HubClients
from pxrs.hub_parts import HubParts
from pxrs.hub_queues import HubQueues
from pxrs.hub_sources import HubSources
from pxrs.hub_topics import HubTopics
from pxrs.log.contract import Log
from pxrs.metrics import otel
from pxrs.registry.contract import Registry
from pxrs.upkeep.janitor import Janitor

LEASE_TTL_DEFAULT: Final = 10.0


class _Made(Protocol):
    """What a hub makes: it refers to the hub."""

    hub: object


M = TypeVar("M", bound=_Made)


class OpenHub:
    """The base of `Hub`, which has the operations. The objects with a leading underscore do their work."""

    def __init__(
        self,
        log: Log,
        registry: Registry | LazyRegistry,
        *,
        lease_ttl: float = LEASE_TTL_DEFAULT,
        upkeep: bool = True,
    ) -> None:
        """`pxrs.open` makes the log and the registry from their addresses. The hub closes them.

        lease_ttl, upkeep: see `open`; lease_ttl in seconds."""
        self.log = log
        """The topics by name, without what the hub adds to them."""
        lazy = registry if isinstance(registry, LazyRegistry) else LazyRegistry(registry)
        self.parts = HubParts(log, lazy, lease_ttl)
        """What the hub consists of, for the modules that do its work."""
        self.url = log.url
        """The directory, memory:, the server's address without its options, or of a hub without a directory the
        registry's address without a password."""
        self.registry_address = lazy.shown
        """The address of the registry, without a password."""
        self._sources = HubSources(self.parts)
        self._topics = HubTopics(self.parts, self._sources)
        self._queues = HubQueues(self.parts)
        self._janitor = Janitor(self.parts, takes_part=upkeep)
        self._clients = HubClients(self.parts, self._topics, self._sources, self._janitor)
        otel.attach()

    @property
    def registry(self) -> Registry:
        """The registry, where the coordination is kept; opened by the first use. It is closed with the hub: keep a
        reference to the hub."""
        self.parts.check_usable()
        return self.parts.registry.get()

    def _topics_of(self, hub: OpenHub) -> HubTopics:
        return hub._topics

    def _keep(self, made: M) -> M:
        """Make an object that this hub made refer to the hub, because a hub that nothing refers to closes its log and
        registry."""
        made.hub = self
        return made

    def close(self) -> None:
        """Close the queues, the consumers, the producers, sending what waits in them, the upkeep, the sources, the
        event log, the log and the registry, in this order. Consumers are closed at the same time, on threads of their
        own.

        Raises the first error after all are closed."""
        if os.getpid() != self.parts.pid:
            return  # in a forked child: the hub belongs to the parent
        clients = self._clients.end()
        # What follows is done again if an interrupt ended it the first time.
        closing: list[Callable[[], None]] = [
            self.parts.close_queues,
            *clients,
            self._janitor.close,
            self._sources.close,
            self.parts.events.close,
            self.log.close,
            self.parts.registry.close,
        ]
        errors = []
        for close in closing:
            try:
                close()
            except Exception as error:  # noqa: BLE001 - raised below, when the rest is closed too
                errors.append(error)
        if errors:
            raise errors[0]

    def __del__(self) -> None:
        parts = getattr(self, "parts", None)
        if parts is None or parts.is_closed or os.getpid() != parts.pid or sys.is_finalizing():
            return
        name = repr(self)
        dropped.apart(self.close)
        dropped.warn(name, "its files, threads and registry are closed now", self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"pxrs: closing the hub {self.url} failed too: {failure}")

    def __repr__(self) -> str:
        return f"<Hub {self.url}{' closed' if self.parts.is_closed else ''}>"
