"""Which batches of which producers a partition has stored, so that a retry is stored once (L4).

A producer numbers its batches in each partition 0, 1, 2... (the sequence). `Producers` remembers, for each of at most
PRODUCERS_MAX producers, the offsets of its last BATCHES_KEPT batches, until it has sent nothing for SILENT_S_MAX. A
batch of a producer that was forgotten is refused with UnknownProducer: it may be a retry of a batch that is stored.

The first batch (sequence 0) of a producer that is not remembered is ambiguous: the producer may be new, or it may have
been forgotten and resend its first batch. So the sender names an offset at which the partition ended before its first
try (`Incoming.since`). If all batches of forgotten producers lie before that offset, the producer is new. Otherwise
`recall` searches the partition's own batches from that offset on.

A gap in the offsets (`Header.is_gap`) stands for batches that cannot be read any more, of producers that are not known
(`lost`). A producer whose last known batch lies before the gap, and that goes on behind the batch after that one, has
stored others in the gap: it counts as forgotten. If it goes on with the very next batch, that one is stored: wherever
it was, it cannot be read.

This module reads no clock and no file; times are arguments.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from pxrs.errors import SequenceGap, UnknownProducer
from pxrs.log.batch import NO_PRODUCER, Header, Origin

PRODUCERS_MAX: Final = 1_000
BATCHES_KEPT: Final = 5
SILENT_S_MAX: Final = 7 * 86_400.0


class Incoming(NamedTuple):
    """A batch that is to be appended."""

    origin: Origin
    rows: int
    since: int | None = None
    """An offset at which the partition ended before the producer's first try; None if it is not known."""


class Placement(NamedTuple):
    """The offset of a batch's first record."""

    offset: int
    is_new: bool
    """The batch is to be stored there. False: it is a duplicate of one that is stored there already."""


class _Known(NamedTuple):
    """What is remembered of one producer."""

    epoch: int
    batches: tuple[tuple[int, int], ...]
    """(sequence, base offset) of its last BATCHES_KEPT batches, the newest last."""
    seen_at: float = 0.0
    """When its last batch was noted, in seconds since 1970 by the clock of the process that noted it."""

    def with_batch(self, origin: Origin, base_offset: int, now: float) -> _Known:
        if origin.epoch > self.epoch:
            return _Known(origin.epoch, ((origin.sequence, base_offset),), now)
        return _Known(self.epoch, (*self.batches, (origin.sequence, base_offset))[-BATCHES_KEPT:], now)


class Producers:
    """The producers of one partition. Not thread-safe: callers hold the partition's append lock."""

    def __init__(self, producers_max: int = PRODUCERS_MAX, forgotten: int = -1) -> None:
        self._producers_max = producers_max
        self._known: dict[uuid.UUID, _Known] = {}  # ordered by the last batch, the oldest first
        self.forgotten = forgotten
        """The highest offset of a batch of any producer that was forgotten; -1 if none was."""
        self.lost = -1
        """The last offset of the last gap; -1 if there is none."""

    def recall(
        self,
        incoming: list[Incoming],
        end: int,
        stored_since: Callable[[int], Iterable[tuple[Origin, int]] | None],
        now: float,
    ) -> list[Incoming]:
        """Search the stored batches for producers that may have been forgotten, and remember those that are found.
        Returns the same batches for `place`; the `since` of a producer that was searched for is `end`, so that `place`
        takes a producer that was not found for a new one.

        stored_since: given an offset, returns the origins and offsets of the batches from there on; None if some of
        them cannot be read any more."""
        ambiguous: dict[int, set[uuid.UUID]] = {}
        for each in incoming if self.forgotten >= 0 else ():
            if each.since is not None and self._may_be_forgotten(each):
                ambiguous.setdefault(each.since, set()).add(each.origin.producer)
        searched: set[uuid.UUID] = set()
        for since, producers in ambiguous.items():
            stored = stored_since(since)
            if stored is not None:
                for origin, offset in stored:
                    if origin.producer in producers:
                        # Not `note`, which may forget another producer: `place` is called with this state.
                        self._note(origin, offset, now)
                searched |= producers
        return [each._replace(since=end) if each.origin.producer in searched else each for each in incoming]

    def _may_be_forgotten(self, incoming: Incoming) -> bool:
        producer = incoming.origin.producer
        if producer == NO_PRODUCER or producer in self._known:
            return False
        return self.forgotten >= (0 if incoming.since is None else incoming.since)

    def place(self, incoming: Iterable[Incoming], end: int) -> list[Placement]:
        """The offsets of these batches if they are appended together at `end`. Duplicates, also of each other, get the
        offset that is stored.

        Raises UnknownProducer or SequenceGap if one of the batches must be refused. Changes nothing: call `note` for
        each new batch once it is stored."""
        placed = []
        seen: dict[uuid.UUID, _Known] = {}
        for each in incoming:
            origin = each.origin
            if origin.producer == NO_PRODUCER:
                placed.append(Placement(end, True))
                end += each.rows
                continue
            known = seen.get(origin.producer) or self._known.get(origin.producer)
            if known is None and self._may_be_forgotten(each):
                raise UnknownProducer(
                    f"{_name(origin)}: the state of some producers was discarded, and this may be one of them"
                )
            offset = _check(origin, known, self.lost)
            if offset is not None:
                placed.append(Placement(offset, False))
                continue
            seen[origin.producer] = (known or _Known(origin.epoch, ())).with_batch(origin, end, 0.0)
            placed.append(Placement(end, True))
            end += each.rows
        return placed

    def note(self, origin: Origin, base_offset: int, now: float) -> None:
        """Remember a stored batch. A batch that is remembered already, or older than the last one of its producer,
        changes nothing, so that recovery may call this twice for one batch."""
        self._note(origin, base_offset, now)
        self._forget_beyond()

    def note_all(self, headers: Iterable[Header], now: float) -> None:
        """Remember the last BATCHES_KEPT batches of each producer among these frames, given in the order of the log."""
        last: dict[bytes, deque[Header]] = {}  # ordered by the last batch, the oldest first
        for header in headers:
            if header.is_gap:
                self.lost = max(self.lost, header.next_offset - 1)
                self.forgotten = max(self.forgotten, self.lost)
                continue
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
        """Forget the producers whose last batch was noted before this time, in seconds since 1970."""
        for producer in [producer for producer, known in self._known.items() if known.seen_at < before]:
            self._forget(producer)

    def _forget_beyond(self) -> None:
        while len(self._known) > self._producers_max:
            self._forget(next(iter(self._known)))

    def _forget(self, producer: uuid.UUID) -> None:
        self.forgotten = max(self.forgotten, self._known[producer].batches[-1][1])
        del self._known[producer]

    def dump(self) -> dict[str, Any]:
        """The whole state for JSON, the producer with the oldest last batch first."""
        return {
            "forgotten": self.forgotten,
            "lost": self.lost,
            "producers": [
                [producer.hex, known.epoch, [list(batch) for batch in known.batches], known.seen_at]
                for producer, known in self._known.items()
            ],
        }

    def load(self, dumped: dict[str, Any]) -> None:
        """Replace this state by a dumped one. Raises KeyError, TypeError or ValueError if it is no dumped state."""
        known = {
            uuid.UUID(hex=producer): _Known(int(epoch), tuple((int(s), int(o)) for s, o in batches), float(seen_at))
            for producer, epoch, batches, seen_at in dumped["producers"]
        }
        if not all(each.batches for each in known.values()):
            raise ValueError("a producer has no batches, but must have at least one")
        self._known, self.forgotten = known, int(dumped["forgotten"])
        self.lost = int(dumped.get("lost", -1))  # version 0.1 does not write it
        self._forget_beyond()

    def __len__(self) -> int:
        return len(self._known)


def named(error: UnknownProducer | SequenceGap, place: str) -> UnknownProducer | SequenceGap:
    """The same error, whose message begins with the partition that has raised it."""
    if isinstance(error, UnknownProducer):
        return UnknownProducer(f"{place}: {error.what}", error.stored)
    return SequenceGap(f"{place}: {error}")


def _name(origin: Origin) -> str:
    return f"producer {origin.producer} epoch {origin.epoch} batch {origin.sequence}"


def _check(origin: Origin, known: _Known | None, lost: int) -> int | None:
    """The offset of a batch that is stored; None if it is the next one of its producer. lost: see `Producers`."""
    name = _name(origin)
    if known is None:
        if origin.sequence != 0:
            raise UnknownProducer(f"{name}: the batches before it are unknown")
        return None
    stored = known.epoch, known.batches[-1][0]
    if origin.epoch < known.epoch:
        raise UnknownProducer(f"{name}: epoch {known.epoch} has replaced it", stored)
    if origin.epoch > known.epoch:
        if origin.sequence != 0 and known.batches[-1][1] < lost:
            raise UnknownProducer(f"{name}: the batches before it are in the gap up to offset {lost}, or missing")
        if origin.sequence != 0:
            raise SequenceGap(f"{name}: a new epoch must begin with batch 0")
        return None
    last = known.batches[-1][0]
    if origin.sequence == last + 1:
        return None
    if origin.sequence > last and known.batches[-1][1] < lost:
        raise UnknownProducer(
            f"{name}: the last batch that can be read is {last}, and a gap up to offset {lost} follows"
        )
    if origin.sequence > last:
        raise SequenceGap(f"{name}: the last stored batch is {last}")
    for sequence, offset in known.batches:
        if sequence == origin.sequence:
            return offset
    raise UnknownProducer(
        f"{name}: the last stored batch is {last}, and only the last {BATCHES_KEPT} are remembered", stored
    )
