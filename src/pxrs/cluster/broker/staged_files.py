"""Writes and reads a staged file, which is one ledger (`pxrs.cluster.staged`)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

from pxrs.cluster.broker.beginning import chosen_nodes
from pxrs.cluster.broker.context import Broker
from pxrs.cluster.broker.entries import Entry
from pxrs.cluster.broker.reading import body_of
from pxrs.cluster.broker.writing import LedgerShell
from pxrs.cluster.ledgers import Fragment, LedgerRecord
from pxrs.cluster.records import TopicRecord
from pxrs.cluster.staged import KeptTopic, StagedFile, StagedName, about, kept_key, piece_head, read_piece
from pxrs.errors import BatchRefused, PartitionUnavailable, PxrsError, ReadFailed
from pxrs.publishing.staging.files import NewFile, Staged
from pxrs.publishing.staging.frames import Piece
from pxrs.registry.contract import ABSENT

_logger = logging.getLogger(__name__)

PENDING_BYTES_MAX: Final = 16 << 20
"""Maximum number of unacknowledged bytes of one file. It is small because a broker may receive many files at a time."""
SPREAD_S: Final = 0.5
"""How long `finish` waits for the acknowledgements of all nodes, although Qa of them are enough."""
LOOK_S: Final = 0.005
"""Interval at which `finish` checks for these acknowledgements."""
TRIES_MAX: Final = 3
"""How often an entry is read, each time with the current record of the ledger: the copies may have moved."""


class LedgerFile(NewFile):
    """A staged file that is being written. Not thread-safe."""

    def __init__(self, broker: Broker, topic: TopicRecord, name: StagedName, now: float) -> None:
        """Create the records of the file and of its ledger. now: in seconds since 1970. Raises NotEnoughNodes, and what
        the registry raises."""
        self._broker, self.name = broker, name
        nodes = chosen_nodes(broker, topic)
        record = LedgerRecord(*name.ledger(), 0, topic.quorum, 0, (Fragment(0, nodes),))
        versions = broker.registry.commit(
            {record.key: ABSENT, name.key: ABSENT},
            {
                record.key: record.dump(),
                name.key: StagedFile(record.id, now).dump(),
                kept_key(name.topic): KeptTopic(now).dump(),
            },
        )
        self._rows = 0
        self._is_ended = False
        """Whether the file was finished or discarded."""
        self._changed = threading.Condition()
        """The lock of this condition variable guards the fields below, and the writer."""
        self._pending: deque[int] = deque()
        """The sizes of the unconfirmed entries, in order."""
        self.pending_bytes = 0
        """The sum of `_pending`."""
        self._stopped: str | None = None
        """Why the writer has stopped; None if it has not, or has closed the ledger."""
        self._writer = LedgerShell(
            broker, topic, record, versions[record.key], self._changed, self._confirmed, self._on_stopped
        )
        text = about(name)
        with self._changed:
            self._append(Entry((), (text,), len(text), 0, 0, 0, broker.clock.wall_time_us()))

    def add(self, piece: Piece) -> None:
        payload = piece.payload
        head = piece_head(piece)
        size = len(head) + payload.data.size
        with self._changed:
            self._wait_for_room()
            now = self._broker.clock.wall_time_us()
            self._append(Entry((), (head, payload.data), size, self._rows, payload.rows, payload.last_timestamp, now))
            self._rows += payload.rows

    def finish(self) -> Staged:
        with self._changed:
            self._check()
            # A ledger that is closed before all its nodes have answered is not `is_complete`, and status reports it.
            until = time.monotonic() + SPREAD_S
            while not self._writer.is_everywhere and self._stopped is None and time.monotonic() < until:
                self._changed.wait(LOOK_S)
        try:
            self._writer.close(time.monotonic() + self._broker.settings.append_s)
        except PartitionUnavailable:
            # Nobody else closes the ledger. If it is closed, the reply to this commit was lost, and another broker has
            # given the ledger other nodes before the commit was made again.
            is_there = self._broker.registry.get(self.name.key) is not None
            if is_there and closed_ledger(self._broker, self.name) is None:
                raise
            # If the record is gone, another driver has published the batch and removed the file.
        self._is_ended = True
        return Staged(self.name.file, self._rows)

    def discard(self) -> None:
        with self._changed:
            self._is_ended = True
            self._writer.stop()
            self._changed.notify_all()
        record = self._writer.record
        try:
            self._broker.registry.commit(delete=[self.name.key, record.key])
        except PxrsError as error:  # not raised: the caller is handling another error
            _logger.warning("the staged file %s could not be removed; a later sweep does: %s", self.name.file, error)

    # Under the lock.

    def _append(self, entry: Entry) -> None:
        self._pending.append(entry.size)
        self.pending_bytes += entry.size
        self._writer.append(entry)

    def _check(self) -> None:
        if self._is_ended:
            raise ValueError(f"the staged file {self.name.file} was finished or discarded")
        if self._stopped is not None:
            raise PartitionUnavailable(f"the staged file {self.name.file}", f"its writer has stopped: {self._stopped}")

    def _wait_for_room(self) -> None:
        """Wait until fewer than PENDING_BYTES_MAX bytes are unacknowledged. Raises PartitionUnavailable if the nodes
        acknowledge nothing for `append_s`."""
        self._check()
        while self.pending_bytes >= PENDING_BYTES_MAX:
            waiting = self.pending_bytes
            until = time.monotonic() + self._broker.settings.append_s
            while self.pending_bytes == waiting:
                if not self._changed.wait(until - time.monotonic()) and time.monotonic() >= until:
                    raise PartitionUnavailable(
                        f"the staged file {self.name.file}", "too few storage nodes acknowledge its entries"
                    )
                self._check()

    def _confirmed(self, writer: LedgerShell, count: int) -> None:
        for _ in range(count):
            self.pending_bytes -= self._pending.popleft()
        self._changed.notify_all()

    def _on_stopped(self, writer: LedgerShell, why: str) -> None:
        self._stopped = self._stopped or why
        self._changed.notify_all()


def closed_ledger(broker: Broker, name: StagedName) -> LedgerRecord | None:
    """The ledger of a finished file; None if the file was removed or never finished."""
    entry = broker.registry.get(name.key)
    if entry is None:
        return None
    ledger = broker.registry.get(StagedFile.parse(entry.key, entry.value).ledger_key)
    record = None if ledger is None else LedgerRecord.parse(ledger.key, ledger.value)
    return record if record is not None and record.is_closed else None


def read_file(broker: Broker, name: StagedName) -> Iterator[Piece]:
    """The pieces of a file, in order. Raises FileNotFoundError if the file was removed or never finished, BatchRefused
    if an entry is not a piece of a staged file, ReadFailed if an entry can be read from no node."""
    entry, tries = 1, 0
    while True:
        record = closed_ledger(broker, name)
        if record is None:
            raise FileNotFoundError(f"the staged file {name.file} of batch {name.batch} of query {name.query} is gone")
        assert record.last is not None
        if record.last < 0:
            raise BatchRefused(f"the ledger {record.id} of the staged file {name.file} is empty")
        try:
            for read in broker.reader.read(record, entry, record.last):
                yield read_piece(body_of(read), f"entry {read.entry} of ledger {record.id}")
                entry, tries = read.entry + 1, 0
            return
        except ReadFailed:
            tries += 1
            if tries == TRIES_MAX:
                raise
