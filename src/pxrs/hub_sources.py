"""The registered sources of an open hub, and the names that they share with its topics.

A name is that of a topic or that of a registered source. Whoever creates a topic or registers a source looks for the
other kind first. The two looks are not atomic: topics are named by the log, sources by the registry. If both appear at
the same moment, the topic is the one that `readable` finds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from pxrs import arguments
from pxrs.errors import (
    Conflict,
    GroupActive,
    InvalidTopic,
    InvalidUrl,
    NoDirectory,
    PxrsError,
    SourceExists,
    TopicExists,
    UnknownTopic,
)
from pxrs.events.recording import attempted
from pxrs.hub_parts import HubParts
from pxrs.log.contract import Source

if TYPE_CHECKING:
    from pxrs.sources.catalog import Catalog, RegisteredSource
    from pxrs.sources.sql_table import SqlTable

_logger = logging.getLogger(__name__)

REMOVE_ATTEMPTS_MAX: Final = 10
"""How often `HubSources.remove` reads the source's record again because another process has registered it anew."""


class HubSources:
    """Finds, registers and forgets sources. Threads share it."""

    def __init__(self, parts: HubParts) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._catalog: Catalog | None = None

    def catalog(self) -> Catalog:
        """The sources that are registered in the hub's registry, which is opened for it."""
        from pxrs.sources.catalog import Catalog

        registry = self._parts.registry.get()
        with self._lock:
            if self._catalog is None:
                self._catalog = Catalog(registry)
            return self._catalog

    def catalog_if_there(self) -> Catalog | None:
        """As `catalog`; None if the registry is missing: to look for a name must not create an empty registry."""
        return None if self._parts.registry.is_missing else self.catalog()

    def add(
        self, name: str, url: str, settings: Mapping[str, Any], *, identity: str | None, exist_ok: bool
    ) -> RegisteredSource:
        """Register the source, unless a topic has its name; settings: by the names of the arguments of
        `Hub.add_source`. Raises SourceExists, InvalidTopic, InvalidUrl."""
        from pxrs.sources.catalog import RegisteredSource, checked_name

        self._parts.check_registry()
        checked_name(name)
        arguments.flag(InvalidTopic, "exist_ok", exist_ok)
        _check_url(url)
        wanted = RegisteredSource(name=name, address="", **_as_fields(settings))
        return self._add(wanted, url, identity, exist_ok)

    def _add(self, wanted: RegisteredSource, url: str, identity: str | None, exist_ok: bool) -> RegisteredSource:
        log = self._parts.log
        if wanted.name in {*(each.name for each in log.topics()), *(each.name for each in log.damaged_topics())}:
            raise SourceExists(f"{wanted.name} is a topic: choose another name for the source")
        with attempted(self._parts.events, "add_source", source=wanted.name):
            added, is_new = self.catalog().add(wanted, url, identity, exist_ok=exist_ok)
        if is_new:
            self._parts.events.audit("add_source", source=added.name, source_id=added.id)
        return added

    def records(self) -> list[RegisteredSource]:
        """All, in the order of their names."""
        self._parts.check_usable()
        catalog = self.catalog_if_there()
        return [] if catalog is None else catalog.records()

    def open(self, name: str, url: str | None) -> SqlTable:
        """Open the source; url: its address with user and password, None to take those from the environment. Raises
        UnknownSource, WrongSource, ReadFailed."""
        self._parts.check_usable()
        arguments.text(InvalidTopic, "source", name, "its name")
        if url is not None:
            _check_url(url)
        return self.catalog().open(name, url)

    def remove(self, name: str) -> None:
        """Forget the source. Raises UnknownSource, and GroupActive while a group has members that read it."""
        self._parts.check_registry()
        arguments.text(InvalidTopic, "source", name, "its name")
        self._remove(name)

    def _remove(self, name: str) -> None:
        from pxrs.group.listing import members_of

        catalog = self.catalog()
        for attempt in range(REMOVE_ATTEMPTS_MAX):
            record = catalog.get(name)
            if readers := members_of(self._parts.registry.get(), record.id):
                group, member = readers[0]
                raise GroupActive(f"source {name} is read by {member} of group {group}: stop its members first")
            try:
                with attempted(self._parts.events, "remove_source", source=name):
                    catalog.remove(record)
                self._parts.events.audit("remove_source", source=name, source_id=record.id)
                return
            except Conflict:  # another process has registered it anew, and members may read that: look again
                if attempt == REMOVE_ATTEMPTS_MAX - 1:
                    raise

    def readable(self, name: str) -> Source:
        """The topic of this name; without one, the registered source. Raises UnknownTopic, and what opening it
        raises."""
        self._parts.check_usable()
        arguments.text(InvalidTopic, "topic", name, "its name")
        try:
            return self._parts.log.topic(name)
        except (UnknownTopic, NoDirectory):
            catalog = self.catalog_if_there()
            if catalog is None or catalog.find(name) is None:
                raise
            return catalog.open(name)

    def refuse_name(self, topic: str) -> None:
        """Raise TopicExists if a registered source has the name that a new topic is to get.

        A registry that cannot be asked does not prevent the topic from being created, which needs no registry."""
        try:
            catalog = self.catalog_if_there()
            is_taken = catalog is not None and catalog.find(topic) is not None
        except PxrsError as error:
            _logger.warning("topic %s: whether a registered source has this name is not known: %s", topic, error)
            return
        if is_taken:
            raise TopicExists(f"{topic} is a registered source: choose another name, or remove that first")

    def close(self) -> None:
        """Close the sources that were opened."""
        with self._lock:
            catalog = self._catalog
        if catalog is not None:
            catalog.close()


def _as_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by the names of the arguments of `Hub.add_source`, checked, as fields of `RegisteredSource`."""
    from pxrs.sources.sql_table.identity import checked_table

    fields = dict(settings)
    if fields["settle_s"] is not None:
        fields["settle_s"] = arguments.seconds(InvalidTopic, "settle_s", fields["settle_s"])
    columns = fields["value_columns"]
    if isinstance(columns, str):
        raise InvalidTopic(f"value_columns is {columns!r}: give a list of names")
    fields["id"] = fields["id"] or ""
    fields["table"] = checked_table(arguments.text(InvalidTopic, "table", fields["table"], "its name"))
    fields["value_columns"] = None if columns is None else tuple(columns)
    fields["poll_s"] = arguments.seconds(InvalidTopic, "poll_s", fields["poll_s"], 0, arguments.DAY_S, above=True)
    return fields


def _check_url(given: object) -> None:
    """Without showing it: there may be a password in it."""
    if not isinstance(given, str):
        raise InvalidUrl(f"url is of the type {type(given).__name__}: give the address of the database, a str")
