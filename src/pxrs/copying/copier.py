"""Copies the pieces of one topic into another one: see the package."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from pxrs.copying.pieces import Cut, mark_before, mark_of, next_cut, rows_between, split
from pxrs.copying.records import CopyRecord, Piece, copy_key, new_id
from pxrs.errors import (
    AppendFailed,
    Conflict,
    CopyFailed,
    InvalidArgument,
    OffsetOutOfRange,
    OffsetTrimmed,
    OutcomeUnknown,
    UnknownProducer,
)
from pxrs.log.batch import Origin
from pxrs.log.contract import Append, TopicLog
from pxrs.log.outcomes import MaybeStored, NotStored, StoredAt
from pxrs.registry.contract import ABSENT, Registry

TRIES_MAX: Final = 10
"""How often a piece is sent, and how often the record is read again after a lost reply, before the copy ends."""
RETRY_S_MAX: Final = 60.0
"""After how long a piece that cannot be stored is not sent again: a log that does not answer may take its whole
`patience` each time."""
_PAUSE_S: Final = (0.05, 2.0)
"""The pause before the second try, and the longest one; each is twice the one before."""


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy has done so far, and what it has to do."""

    messages: int
    """How many messages this call has copied. Those of a piece that an earlier call had sent are not counted if all of
    them were stored."""
    offsets: int
    """How many offsets of the source lie behind the copy, since this call began."""
    total: int
    """How many offsets of the source were to be copied when this call began."""


class Copier:
    """Copies from one topic into another. Belongs to one thread."""

    def __init__(
        self,
        source: TopicLog,
        target: TopicLog,
        registry: Registry,
        on_progress: Callable[[Copied], None] | None = None,
    ) -> None:
        """registry: that of the target's hub."""
        self._source, self._target, self._registry = source, target, registry
        self._on_progress = on_progress
        self._key = copy_key(target.id, source.id)
        self._version = ABSENT
        self._messages = self._offsets = self._total = 0
        self._ends: dict[int, int] = {}
        """By partition of the target: an offset that it is known to have ended at, or behind."""

    def begin(self, begins: str | None, starts: Callable[[], Mapping[int, int]], *, may_add: bool) -> CopyRecord:
        """The record of this copy; if there is none, a new one that begins at `starts`.

        begins:  from where it is asked to begin, as text; None if nothing was asked for.
        may_add: whether a new copy may be made into a topic that has messages already.
        Raises CopyFailed, InvalidArgument."""
        entry = self._registry.get(self._key)
        names = f"{self._source.name} into {self._target.name}"
        if entry is None:
            if not may_add and any(each.end for each in self._target.bounds(self._numbers).values()):
                raise CopyFailed(
                    f"{self._target.name} has or had messages, and no copy of {names} is recorded: all messages of the "
                    "source would be appended. Copy into another topic, or confirm that they are to be appended: "
                    "append=True, --append"
                )
            found = starts()
            positions = tuple(found[number] for number in range(self._source.partitions))
            source = {"topic": self._source.name}
            return CopyRecord(new_id(), begins or "", positions, source=source)
        self._version = entry.version
        record = CopyRecord.load(entry.key, entry.value)
        if begins is not None and begins != record.begins:
            raise InvalidArgument(
                f"the copy of {names} began at {record.begins or 'the first message'} and continues where it stopped; "
                f"it cannot begin at {begins}: omit that, or copy into another topic"
            )
        self._check_source(record)
        self._check_target(record)
        return record

    def _check_source(self, record: CopyRecord) -> None:
        """Raise CopyFailed if the source is not the one that was copied so far: an older copy of its directory, or a
        hub that was restored from a backup, has topics with the same ids."""
        for number, position in enumerate(record.positions):
            mark = record.marks[number] if record.marks else ""
            try:
                found = mark_before(self._source, number, position)
            except OffsetOutOfRange as error:
                raise self._is_another(f"{error}, but messages up to {position} were copied") from error
            if found and mark and found != mark:
                raise self._is_another(f"{self._source.name}/{number} has a different message at offset {position - 1}")

    def _check_target(self, record: CopyRecord) -> None:
        """Raise CopyFailed if the target lacks what was stored: an older copy of its directory has taken its place,
        while its registry is elsewhere and has the record."""
        for number, bounds in self._target.bounds(record.stored).items():
            if bounds.end < record.stored[number]:
                raise CopyFailed(
                    f"{self._target.name}/{number} ends at offset {bounds.end}, but ended at {record.stored[number]} "
                    f"when {self._source.name} was copied: the target may have been restored from an older copy, and "
                    "lacks messages that are recorded as copied. Copy into another topic"
                )

    def _is_another(self, why: str) -> CopyFailed:
        return CopyFailed(
            f"{why}: this is not the {self._source.name} that was copied into {self._target.name}; it may have been "
            "restored from an older copy. The differences are unknown: copy into another topic"
        )

    @property
    def _numbers(self) -> range:
        return range(self._target.partitions)

    def run(self, record: CopyRecord, ends: Mapping[int, int]) -> Copied:
        """Copy everything before these offsets of the source, by partition. Raises CopyFailed, and what the logs and
        the registry raise; then call it again, in this process or another one."""
        begins = dict(enumerate(record.positions))
        self._total = sum(max(0, ends[number] - start) for number, start in begins.items())
        self._ends = {number: bounds.end for number, bounds in self._target.bounds(self._numbers).items()}
        if record.piece is not None:
            record = self._send_again(record)
        while (partition := _furthest_behind(record.positions, begins, ends)) is not None:
            found = self._next_cut(record, partition, ends[partition])
            parts = split(self._source, self._target, partition, found)
            before = record.positions[partition]
            if parts:
                since = {number: self._ends[number] for number, _ in parts}
                record = self._commit(record.begun(Piece(partition, found.end, since, mark_of(found.rows[-1]))))
                self._send(record, parts)
                record = record.done(self._stored(since))
            else:
                record = record.moved(partition, found.end)  # a gap
            self._progress(found.end - before)
        self._commit(record)
        return Copied(self._messages, self._offsets, self._total)

    def _next_cut(self, record: CopyRecord, partition: int, end: int) -> Cut:
        start = record.positions[partition]
        try:
            found = next_cut(self._source, partition, start, end)
        except OffsetTrimmed as error:
            raise CopyFailed(
                f"{error}: retention has removed messages of {self._source.name} before they were copied. Give the "
                "source a longer retention with `pxrs topic alter`, and copy the remaining messages into another topic"
            ) from error
        if found.end == start:
            raise self._is_another(f"{self._source.name}/{partition} ends at offset {start}, but ended at {end}")
        return found

    def _send_again(self, record: CopyRecord) -> CopyRecord:
        """Send the piece that an earlier process has recorded, and perhaps sent."""
        piece = record.piece
        assert piece is not None
        start = record.positions[piece.partition]
        try:
            found = rows_between(self._source, piece.partition, start, piece.end)
        except OffsetTrimmed as error:
            raise CopyFailed(
                f"{error}: retention has removed messages that were being copied when the copy was interrupted, so it "
                f"is unknown which of them are in {self._target.name}: copy the remaining ones into another topic"
            ) from error
        except OffsetOutOfRange as error:
            raise self._is_another(f"{error}, but messages up to {piece.end} were being copied") from error
        if mark_of(found.rows[-1]) != piece.mark:
            raise self._is_another(f"{self._source.name}/{piece.partition} has a different message before {piece.end}")
        self._send(record, split(self._source, self._target, piece.partition, found))
        self._progress(piece.end - start)
        return record.done(self._stored(piece.since))

    def _stored(self, numbers: Iterable[int]) -> dict[int, int]:
        return {number: self._ends[number] for number in numbers}

    def _progress(self, offsets: int) -> None:
        self._offsets += offsets
        if self._on_progress is not None:
            self._on_progress(Copied(self._messages, self._offsets, self._total))

    def _commit(self, after: CopyRecord) -> CopyRecord:
        """Write the record. Returns when it is known to be there."""
        value, is_sent = after.dump(), False
        for _ in range(TRIES_MAX):
            try:
                self._version = self._registry.commit({self._key: self._version}, {self._key: value})[self._key]
                return after
            except OutcomeUnknown:
                is_sent = True
            except Conflict:
                if not is_sent:
                    break
            # A commit whose reply was lost may be there now, or come later: then the next one is refused.
            entry = self._registry.get(self._key)
            if entry is not None and entry.value == value:
                self._version = entry.version
                return after
            if (ABSENT if entry is None else entry.version) != self._version:
                break
        raise CopyFailed(
            f"another process is copying {self._source.name} into {self._target.name}, or has written {self._key}: let "
            "it finish, or stop it, and copy again"
        )

    def _send(self, record: CopyRecord, parts: Sequence[tuple[int, pa.RecordBatch]]) -> None:
        """Append the rows of the record's piece to the partitions of the target, until all are stored."""
        piece = record.piece
        assert piece is not None
        origin, codec = Origin(record.producer, record.number, 0), self._target.topic.codec
        left = [
            Append.encoded(number, records, origin, piece.since.get(number), codec=codec) for number, records in parts
        ]
        pause_s, pause_s_max = _PAUSE_S
        until = time.monotonic() + RETRY_S_MAX
        for attempt in range(TRIES_MAX):
            if attempt:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, pause_s_max)
            again = []
            for append, outcome in zip(left, self._target.append(left), strict=True):
                if isinstance(outcome, StoredAt):
                    self._check_duplicate(record, append, outcome)
                    self._messages += 0 if outcome.is_duplicate else append.payload.rows
                    end = outcome.offset + append.payload.rows
                    self._ends[append.partition] = max(end, self._ends.get(append.partition, 0))
                    continue
                error = self._checked(outcome)
                again.append(append)
            if not again:
                return
            left = again
            if time.monotonic() >= until:
                break
        raise error

    def _check_duplicate(self, record: CopyRecord, append: Append, outcome: StoredAt) -> None:
        """Raise CopyFailed if the batch is taken for one that was stored before its piece was recorded."""
        if outcome.is_duplicate and append.since is not None and outcome.offset < append.since:
            raise CopyFailed(
                f"{self._target.name}/{append.partition} already has piece {record.number} of this copy, which is not "
                f"recorded: {self._key} is older than the target, as if only the registry had been restored. It is "
                "unknown which messages were copied: copy into another topic"
            )

    def _checked(self, outcome: NotStored | MaybeStored) -> Exception:
        """The error of a batch that can be sent again. Raises the error of one that cannot."""
        error = outcome.error
        if isinstance(error, UnknownProducer):
            raise CopyFailed(
                f"{error}. If another process copies the same topics, let it finish. Otherwise the copy was "
                f"interrupted long ago, and retention has removed from {self._target.name} what would show whether "
                "its last messages were stored: copy into another topic"
            ) from error
        if isinstance(outcome, NotStored) and not isinstance(error, AppendFailed):
            raise error
        return error


def _furthest_behind(positions: Sequence[int], begins: Mapping[int, int], ends: Mapping[int, int]) -> int | None:
    """The partition of which the smallest part is copied; None if all are. So the partitions advance together, and
    messages of the same time come to lie near each other in the target."""
    left = [number for number, position in enumerate(positions) if position < ends[number]]
    if not left:
        return None
    return min(left, key=lambda number: (positions[number] - begins[number]) / (ends[number] - begins[number]))
