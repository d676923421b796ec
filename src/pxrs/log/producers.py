"""Which batches of which producers a partition has stored, so that a retry is stored once (L4).

Bookkeeping without a clock. A producer numbers its batches 0, 1, 2... in each partition; the last few of each
producer are remembered with their offsets, of so many producers and for so long after their last batch. What cannot be
told apart is refused, never stored blindly: who was forgotten gets UnknownProducer.

A producer that begins looks the same as one that was forgotten and tries its first batch again. So the sender says
where the partition ended before its first try: if everything of those who were forgotten lies before that, it is new.
If not, the log itself is asked, from there on (`recall`).
"""

from __future__ import annotations

import json
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from pxrs.errors import MisplacedFile, SequenceGap, UnknownProducer
from pxrs.log.batch import NO_PRODUCER, Header, Origin
from pxrs.log.directory.index import read_with_checksum, with_checksum

PRODUCERS_MAX: Final = 1_000
BATCHES_KEPT: Final = 5
SILENT_S_MAX: Final = 7 * 86_400.0


class Asked(NamedTuple):
    """A batch that wants a place."""

    origin: Origin
    rows: int
    since: int | None = None
    """An offset at which the partition ended before the producer's first try; None if nobody knows one."""


class Placed(NamedTuple):
    """Where a batch goes, or where it already is."""

    offset: int
    is_new: bool


class _Known(NamedTuple):
    """A producer as the partition last saw it. The batches are in the order of their sequences, the last one newest."""

    epoch: int
    batches: tuple[tuple[int, int], ...]
    """(sequence, base offset)."""
    seen_at: float = 0.0
    """Seconds since 1970, by the clock of whoever noted it."""

    def with_batch(self, origin: Origin, base_offset: int, now: float) -> _Known:
        if origin.epoch > self.epoch:
            return _Known(origin.epoch, ((origin.sequence, base_offset),), now)
        return _Known(self.epoch, (*self.batches, (origin.sequence, base_offset))[-BATCHES_KEPT:], now)


class Producers:
    """The producers of one partition. Not thread-safe: the append lock guards it."""

    def __init__(self, producers_max: int = PRODUCERS_MAX, forgotten: int = -1) -> None:
        self._producers_max = producers_max
        self._known: dict[uuid.UUID, _Known] = {}  # the longest silent first
        self.forgotten = forgotten
        """Every batch of a producer that was forgotten has this offset or a smaller one."""

    def recall(
        self,
        asked: list[Asked],
        end: int,
        stored_since: Callable[[int], Iterable[tuple[Origin, int]] | None],
        now: float,
    ) -> list[Asked]:
        """Find out about producers who may have been forgotten. The same batches, for `place`: of one that was looked
        for, nothing is in doubt any more.

        stored_since: the origins of the batches from an offset on, with their own offsets; None if not all of them are
        there any more."""
        doubtful: dict[int, set[uuid.UUID]] = {}
        for each in asked if self.forgotten >= 0 else ():
            if each.since is not None and self._is_in_doubt(each):
                doubtful.setdefault(each.since, set()).add(each.origin.producer)
        certain: set[uuid.UUID] = set()
        for since, producers in doubtful.items():
            stored = stored_since(since)
            if stored is not None:
                for origin, offset in stored:
                    if origin.producer in producers:
                        self._note(origin, offset, now)  # and forgets nobody: `place` asks for them next
                certain |= producers
        return [each._replace(since=end) if each.origin.producer in certain else each for each in asked]

    def _is_in_doubt(self, asked: Asked) -> bool:
        producer = asked.origin.producer
        if producer == NO_PRODUCER or producer in self._known:
            return False
        return self.forgotten >= (0 if asked.since is None else asked.since)

    def place(self, asked: Iterable[Asked], end: int) -> list[Placed]:
        """Where batches go if they are appended at `end` together, duplicates among them included.

        Raises UnknownProducer or SequenceGap for any of them. Notes nothing: call `note` for each new one when it is
        stored."""
        placed = []
        seen: dict[uuid.UUID, _Known] = {}
        for each in asked:
            origin = each.origin
            if origin.producer == NO_PRODUCER:
                placed.append(Placed(end, True))
                end += each.rows
                continue
            known = seen.get(origin.producer) or self._known.get(origin.producer)
            if known is None and self._is_in_doubt(each):
                raise UnknownProducer(f"{_name(origin)}: producers were forgotten, and it may be one of them")
            offset = _check(origin, known)
            if offset is not None:
                placed.append(Placed(offset, False))
                continue
            seen[origin.producer] = (known or _Known(origin.epoch, ())).with_batch(origin, end, 0.0)
            placed.append(Placed(end, True))
            end += each.rows
        return placed

    def note(self, origin: Origin, base_offset: int, now: float) -> None:
        """Remember a stored batch. One that is known already or older is left alone, so a recovery may note twice."""
        self._note(origin, base_offset, now)
        self._forget_beyond()

    def note_all(self, headers: Iterable[Header], now: float) -> None:
        """Remember what a part of the log holds: of each producer, its last batches."""
        last: dict[bytes, deque[Header]] = {}  # the one that was silent longest first
        for header in headers:
            kept = last.pop(header.producer, None) or deque(maxlen=BATCHES_KEPT)
            kept.append(header)
            last[header.producer] = kept
        for kept in last.values():
            for header in kept:
                self._note(header.origin, header.base_offset, now)
        self._forget_beyond()

    def _note(self, origin: Origin, base_offset: int, now: float) -> None:
        if origin.producer == NO_PRODUCER:
            return
        known = self._known.get(origin.producer, _Known(origin.epoch, ()))
        if origin.epoch < known.epoch:
            return
        if origin.epoch == known.epoch and known.batches and origin.sequence <= known.batches[-1][0]:
            return
        self._known.pop(origin.producer, None)
        self._known[origin.producer] = known.with_batch(origin, base_offset, now)

    def forget_silent(self, before: float) -> None:
        """Those whose last batch was noted before this time."""
        for producer in [producer for producer, known in self._known.items() if known.seen_at < before]:
            self._forget(producer)

    def _forget_beyond(self) -> None:
        while len(self._known) > self._producers_max:
            self._forget(next(iter(self._known)))

    def _forget(self, producer: uuid.UUID) -> None:
        self.forgotten = max(self.forgotten, self._known[producer].batches[-1][1])
        del self._known[producer]

    def dump(self) -> dict[str, Any]:
        """The whole state for JSON, the longest silent producer first."""
        return {
            "forgotten": self.forgotten,
            "producers": [
                [producer.hex, known.epoch, [list(batch) for batch in known.batches], known.seen_at]
                for producer, known in self._known.items()
            ],
        }

    def load(self, dumped: dict[str, Any]) -> None:
        """Take a dumped state in place of this one. Raises KeyError, TypeError or ValueError if it is none."""
        known = {
            uuid.UUID(hex=producer): _Known(int(epoch), tuple((int(s), int(o)) for s, o in batches), float(seen_at))
            for producer, epoch, batches, seen_at in dumped["producers"]
        }
        if not all(each.batches for each in known.values()):
            raise ValueError("a producer without a batch")
        self._known, self.forgotten = known, int(dumped["forgotten"])
        self._forget_beyond()

    def __len__(self) -> int:
        return len(self._known)


def producers_path(segment: str) -> str:
    return segment.removesuffix(".log") + ".producers"


def dump_producers(producers: Producers, place: int, base: int) -> bytes:
    """As it is kept beside the segment that begins at `base`: JSON, with a checksum of its text. It names the partition
    by its `place_id`, and the segment."""
    return with_checksum(json.dumps({"place": f"{place:016x}", "segment": base, **producers.dump()}))


def load_producers(path: str, place: int, base: int) -> Producers | None:
    """None if the file is missing or damaged: the state is then found in the segments before it. Raises MisplacedFile
    if it belongs to another partition or segment."""
    producers = Producers()
    try:
        text = read_with_checksum(path)
        if text is None:
            return None
        found = json.loads(text)
        producers.load(found)
        # The format before has neither field.
        written_for = found.get("place", f"{place:016x}"), found.get("segment", base)
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return None
    if written_for != (f"{place:016x}", base):
        raise MisplacedFile(path, 0, "it was written for another topic, partition or segment")
    return producers


def _name(origin: Origin) -> str:
    return f"producer {origin.producer} epoch {origin.epoch} batch {origin.sequence}"


def _check(origin: Origin, known: _Known | None) -> int | None:
    name = _name(origin)
    if known is None:
        if origin.sequence != 0:
            raise UnknownProducer(f"{name}: nothing is known of the batches before it")
        return None
    stored = known.epoch, known.batches[-1][0]
    if origin.epoch < known.epoch:
        raise UnknownProducer(f"{name}: epoch {known.epoch} has taken its place", stored)
    if origin.epoch > known.epoch:
        if origin.sequence != 0:
            raise SequenceGap(f"{name}: a new epoch begins with batch 0")
        return None
    last = known.batches[-1][0]
    if origin.sequence == last + 1:
        return None
    if origin.sequence > last:
        raise SequenceGap(f"{name}: the last one stored is {last}")
    for sequence, offset in known.batches:
        if sequence == origin.sequence:
            return offset
    raise UnknownProducer(f"{name}: the last one stored is {last}, and only {BATCHES_KEPT} are remembered", stored)
