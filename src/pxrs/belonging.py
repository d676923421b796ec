"""Whether an open hub has the registry that its directory belongs to, and what it may do if not.

| | with the hub's registry | with another one | while none is recorded |
|---|---|---|---|
| send, read without a group, create and delete topics | yes | yes | yes |
| retention of a topic without `keep_unread` | yes | yes | yes |
| retention of a topic with `keep_unread` | yes | WrongRegistry | RetentionPostponed |
| join a group (consumers, workers, streaming queries) | yes | WrongRegistry | yes, and records its registry |
| publish batches (Spark's sink) | yes | WrongRegistry | yes, and records its registry |
| reset, import, delete, retry, skip; queues | yes | WrongRegistry | yes |
| look at groups | yes | yes, at those of that registry | yes |

A registry in memory belongs to one process and ends with it, so it is never recorded. In a hub without a recorded
registry, a process with a registry in memory may do all of the above except retention with `keep_unread`. A hub in
memory belongs to one process as well, and has no record.

A hub that was opened without a directory has no record to compare its registry with. It may use the queues of that
registry and the groups of sources that are no topics. It may not change a group of topics: only the record in the
topics' directory says whether this is their registry.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable

from pxrs import disk
from pxrs.address import LazyRegistry
from pxrs.errors import Conflict, InvalidUrl, RetentionPostponed, WrongRegistry
from pxrs.group.records import Home, Keys
from pxrs.hub_record import HubRecord, HubRecordFile
from pxrs.registry.contract import ABSENT, Registry
from pxrs.registry.identity import fingerprint, known_fingerprint

_logger = logging.getLogger(__name__)


class Belonging:
    """Compares the registry that one open hub was given with the one that its directory records. Threads share it."""

    def __init__(
        self,
        url: str,
        record: HubRecordFile,
        registry: LazyRegistry,
        check_place: Callable[[], None],
    ) -> None:
        """registry: the one that the hub was opened with; check_place: raises HubMoved."""
        self.record = record
        self._url, self._registry, self._check_place = url, registry, check_place
        self._id: str | None = None
        """The id of the registry that the hub was opened with, once it was asked for."""

    @property
    def shown(self) -> str:
        """The address of the registry that the hub was opened with, without a password."""
        return self._registry.shown

    def check(self) -> Home | None:
        """The hub's identity, None if it has none yet. Raises WrongRegistry, HubMoved."""
        self._check_place()
        return self._checked(self.record.read())

    def is_recorded(self) -> bool:
        """Whether the directory records which registry the hub belongs to. Raises DamagedFrame."""
        record = self.record.read()
        return record is not None and bool(record.registry)

    def join(self) -> Home | None:
        """As `check`, for a member of a group, and for a process that publishes batches: what they write counts only in
        this registry. If no registry is recorded for the hub, record this one."""
        self._check_place()
        record = self.record.read()
        if (record is None or not record.registry) and not self._registry.is_in_memory:
            self.record.check_writable()  # before the registry is given an id
            record = self.record.claim(self._own_id() or fingerprint(self._registry.get()), self.shown)
        return self._checked(record)

    def begin(self, *, keeps_unread: bool) -> None:
        """Before a topic is created: write the record of a new directory. If the topic has `keep_unread`, also record
        the registry, unless the directory was made by version 0.1: its groups may be in another registry."""
        self._check_place()
        try:
            disk.make_folders(self.record.folder)
        except OSError as error:
            raise disk.log_error(error, self.record.folder) from error
        self.record.begin()
        record = self.record.read()
        if keeps_unread and record is not None and not record.registry and not self._registry.is_in_memory:
            self.record.check_writable()
            self.record.claim(fingerprint(self._registry.get()), self.shown)

    def adopt(self, topics: Iterable[str]) -> tuple[str, str]:
        """Record the registry that the hub was opened with, whatever was recorded before. Returns the addresses of
        both, the former one empty if it is not known.

        topics: the ids of the hub's topics. Groups of this registry with checkpoints of one of them are this hub's,
        whatever id the hub had when the checkpoints were written."""
        if self._registry.is_in_memory:
            raise InvalidUrl(f"the registry {self.shown} exists only in this process, so a hub cannot belong to it")
        self._check_place()
        if not self.record.folder.is_dir():
            raise InvalidUrl(f"the directory {self.record.folder} does not exist")
        self.record.check_writable()
        before, after = self.record.adopt(fingerprint(self._registry.get()), self.shown)
        _take_groups(self._registry.get(), set(topics), self._home(after))
        return "" if before is None else before.address, after.address

    def check_retention(self, topic: str) -> None:
        """Raise RetentionPostponed or WrongRegistry if retention of a topic with `keep_unread` must remove nothing."""
        self._check_place()
        record = self.record.read()
        if record is None or not record.registry:
            raise RetentionPostponed(
                f"retention removes nothing from {topic}, because the registry of the groups of the hub {self._url} is "
                "not recorded: it is recorded when a member of a group joins, or by `pxrs registry adopt --at "
                f"{self._url} --registry URL`"
            )
        self._checked(record)

    def _checked(self, record: HubRecord | None) -> Home | None:
        if record is None:
            return None
        if record.registry and record.registry != self._own_id():
            raise WrongRegistry(self._url, record.address, self.shown)
        return None if self._registry.is_in_memory else self._home(record)

    def _home(self, record: HubRecord) -> Home:
        return Home(record.hub, f"{socket.gethostname()}:{self._url} (hub {record.hub[:8]})")

    def _own_id(self) -> str | None:
        """The id of the registry; None if it has none yet, or is missing: looking must not create an empty registry."""
        if self._id is None:
            if self._registry.is_missing:
                return None
            self._id = known_fingerprint(self._registry.get())
        return self._id


def _take_groups(registry: Registry, topics: set[str], home: Home) -> None:
    from pxrs.group.listing import groups

    for name in groups(registry):
        keys = Keys(name)
        read = {entry.key.split("/")[3] for entry in registry.scan(keys.checkpoints)}
        entry = registry.get(keys.home)
        known = Home() if entry is None else Home.load(entry.key, entry.value)
        if known.hub == home.hub or not read & topics:
            continue
        try:
            registry.commit({keys.home: ABSENT if entry is None else entry.version}, {keys.home: home.dump()})
        except Conflict:
            _logger.warning("group %s: a member is joining from %s; run `pxrs registry adopt` again", name, known.place)
