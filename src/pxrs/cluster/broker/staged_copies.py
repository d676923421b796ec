"""Which ledgers of staged rows this broker is to repair (`pxrs.cluster.staged.keeper`, P6, K5).

A staged file is mostly published and removed within seconds, so a broker looks at the ledger of a file only if it sees
the file a second time, `copies_grace_s` later or after LOOK_S. Of a closed ledger the record is kept in memory. It may
be old, if another broker thought for a while that it was the keeper: a repair begins with the record as it is then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Final

from pxrs.cluster import staged
from pxrs.cluster.broker.context import Broker
from pxrs.cluster.broker.opened import NodeCount, counts
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.cluster.records import TopicRecord
from pxrs.cluster.staged import StagedFile, StagedName
from pxrs.errors import RegistryCorrupt
from pxrs.events.model import Json
from pxrs.registry.contract import Entry

_logger = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""How often the files are listed, unless `copies_grace_s` is shorter."""
PAUSE_S_MAX: Final = 60.0
"""How often at least the ledger of a file that is not finished is read. It may be written, or its writer has died: then
a sweep removes it by its age."""
DAMAGED_MAX: Final = 100
"""How many damaged records are logged."""
READS_MAX: Final = 500
"""How many ledgers are read at one look. The others are read at the next ones."""


@dataclass(slots=True)
class _File:
    """A file that this broker is the keeper of."""

    name: StagedName
    due: float
    """When the ledger is read, on the monotonic clock."""
    pause_s: float
    record: LedgerRecord | None = None
    """The ledger, once it is closed."""


class StagedLedgers:
    """One thread looks; others repair."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._lock = threading.Lock()
        self._every_s = min(LOOK_S, broker.settings.copies_grace_s)
        self._next = 0.0
        """When the files are listed again, on the monotonic clock."""
        self._files: dict[str, _File] = {}
        """By ledger."""
        self._damaged: set[str] = set()
        """The keys of damaged records that were logged."""

    def look(self, now: float) -> list[tuple[StagedOwner, LedgerRecord]]:
        """The closed ledgers that fall to this broker, of topics that are there. now: on the monotonic clock. Raises
        what the registry raises."""
        if now >= self._next:
            self._next = now + self._every_s
            self._list(now)
        topics = self.topics()
        with self._lock:
            files = [(file.name, file.record) for file in self._files.values() if file.record is not None]
        return [(StagedOwner(self, name, topics[name.topic]), record) for name, record in files if name.topic in topics]

    def is_mine(self, ledger: str) -> bool:
        """Whether this broker is the keeper of a ledger, among the brokers that it sees."""
        brokers = [name for name, broker in self._broker.view.seen.brokers.items() if not broker.is_leaving]
        return staged.keeper(ledger, brokers) == self._broker.membership.incarnation

    def topics(self) -> dict[str, TopicRecord]:
        """By id. What was staged for a topic that is not among them is removed, and gets no copies."""
        return {record.topic.id: record for record, _ in self._broker.view.seen.topics.values()}

    def repaired(self, record: LedgerRecord, counted: Mapping[str, NodeCount]) -> None:
        with self._lock:
            file = self._files.get(record.id)
            if file is not None:
                file.record = record
        now = counts(self._broker.view.seen.alive)
        self.read_again({node for node in record.named if now.get(node) != counted.get(node)})

    def read_again(self, nodes: Set[str]) -> None:
        """These storage nodes may have found that they lack entries: read the records again that say that every node
        has all its entries, and name one of them."""
        if not nodes:
            return
        with self._lock:
            for file in self._files.values():
                if file.record is not None and file.record.is_complete and file.record.named & nodes:
                    file.record, file.due = None, 0.0
        self._next = 0.0

    def _list(self, now: float) -> None:
        """List the files, and read the ledgers that are due."""
        registry = self._broker.registry
        found: dict[str, _File] = {}
        for entry in registry.scan(staged.STAGED):
            ledger = self._ledger_of(entry)
            if ledger is not None and self.is_mine(ledger):
                known = self._files.get(ledger)
                found[ledger] = known or _File(StagedName.of_key(entry.key), now + self._every_s, self._every_s)
        with self._lock:
            self._files = found
        unread = [file for file in found.values() if file.record is None and file.due <= now]
        for file in sorted(unread, key=lambda file: file.due)[:READS_MAX]:
            with self._lock:
                file.pause_s = min(file.pause_s * 2, PAUSE_S_MAX)
                file.due = now + file.pause_s
            record = self._read(file.name.ledger().key)
            with self._lock:
                file.record = record

    def _ledger_of(self, entry: Entry) -> str | None:
        """None if the record is damaged, which is logged once and does not keep other files from being looked at."""
        try:
            return StagedFile.parse(entry.key, entry.value).ledger
        except RegistryCorrupt as error:
            self._tell_damaged(entry.key, error)
            return None

    def _read(self, key: str) -> LedgerRecord | None:
        """The record of a ledger that is closed; None if it is not, is gone, or is damaged."""
        entry = self._broker.registry.get(key)
        try:
            record = None if entry is None else LedgerRecord.parse(entry.key, entry.value)
        except RegistryCorrupt as error:
            self._tell_damaged(key, error)
            return None
        return record if record is not None and record.is_closed else None

    def _tell_damaged(self, key: str, error: RegistryCorrupt) -> None:
        if key not in self._damaged and len(self._damaged) < DAMAGED_MAX:
            self._damaged.add(key)
            _logger.error("a file of staged rows cannot be repaired, because its record is damaged: %s", error)


class StagedOwner:
    """The ledger of one staged file (`repairing.Ledgers`)."""

    event = "staged.repaired"

    def __init__(self, ledgers: StagedLedgers, name: StagedName, topic: TopicRecord) -> None:
        self._ledgers, self._name, self._topic = ledgers, name, topic

    @property
    def topic(self) -> TopicRecord:
        return self._topic

    @property
    def is_over(self) -> bool:
        return not self._ledgers.is_mine(self._name.ledger().id) or self._name.topic not in self._ledgers.topics()

    def expected(self) -> Mapping[str, int]:
        """The ledger's record alone: it is removed in one commit with the file."""
        return {}

    def fields(self) -> dict[str, Json]:
        topic = self._topic.topic
        return {"topic": topic.name, "topic_id": topic.id, "query": self._name.query, "batch": self._name.batch}

    def repaired(self, record: LedgerRecord, counted: Mapping[str, NodeCount]) -> None:
        self._ledgers.repaired(record, counted)
