"""Which batches of which producers a partition has stored, so that a retry is stored once (L4).

Bookkeeping without a clock. A producer numbers its batches 0, 1, 2... in each partition; the last few of each
producer are remembered with their offsets. What cannot be told apart is refused, never stored blindly: a producer that
was forgotten (the longest silent one goes first, beyond a bound) gets UnknownProducer unless it begins at 0.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import xxhash

from pxrs.errors import SequenceGap, UnknownProducer
from pxrs.log.batch import NO_PRODUCER, Origin

PRODUCERS_MAX: Final = 1_000
BATCHES_KEPT: Final = 5


class Placed(NamedTuple):
    """Where a batch goes, or where it already is."""

    offset: int
    is_new: bool


class _Known(NamedTuple):
    """A producer as the partition last saw it. The batches are in the order of their sequences, the last one newest."""

    epoch: int
    batches: tuple[tuple[int, int], ...]
    """(sequence, base offset)."""

    def with_batch(self, origin: Origin, base_offset: int) -> _Known:
        if origin.epoch > self.epoch:
            return _Known(origin.epoch, ((origin.sequence, base_offset),))
        return _Known(self.epoch, (*self.batches, (origin.sequence, base_offset))[-BATCHES_KEPT:])


class Producers:
    """The producers of one partition. Not thread-safe: the append lock guards it."""

    def __init__(self, producers_max: int = PRODUCERS_MAX) -> None:
        self._producers_max = producers_max
        self._known: dict[uuid.UUID, _Known] = {}  # the longest silent first

    def check(self, origin: Origin) -> int | None:
        """The offset of the batch if it is a duplicate, None if it is new. Raises UnknownProducer, SequenceGap."""
        return None if origin.producer == NO_PRODUCER else _check(origin, self._known.get(origin.producer))

    def place(self, batches: Iterable[tuple[Origin, int]], end: int) -> list[Placed]:
        """Where batches of (origin, rows) go if they are appended at `end` together, duplicates among them included.

        Raises as `check` does, for any of them. Notes nothing: call `note` for each new one when it is stored."""
        placed = []
        seen: dict[uuid.UUID, _Known] = {}
        for origin, rows in batches:
            if origin.producer == NO_PRODUCER:
                placed.append(Placed(end, True))
                end += rows
                continue
            known = seen.get(origin.producer) or self._known.get(origin.producer)
            offset = _check(origin, known)
            if offset is not None:
                placed.append(Placed(offset, False))
                continue
            seen[origin.producer] = (known or _Known(origin.epoch, ())).with_batch(origin, end)
            placed.append(Placed(end, True))
            end += rows
        return placed

    def note(self, origin: Origin, base_offset: int) -> None:
        """Remember a stored batch. One that is known already or older is left alone, so a recovery may note twice."""
        if origin.producer == NO_PRODUCER:
            return
        known = self._known.get(origin.producer, _Known(origin.epoch, ()))
        if origin.epoch < known.epoch:
            return
        if origin.epoch == known.epoch and known.batches and origin.sequence <= known.batches[-1][0]:
            return
        self._known.pop(origin.producer, None)
        self._known[origin.producer] = known.with_batch(origin, base_offset)
        while len(self._known) > self._producers_max:
            del self._known[next(iter(self._known))]

    def dump(self) -> dict[str, Any]:
        """The whole state for JSON, the longest silent producer first."""
        return {
            "producers": [
                [producer.hex, known.epoch, [list(batch) for batch in known.batches]]
                for producer, known in self._known.items()
            ]
        }

    def load(self, dumped: dict[str, Any]) -> None:
        """Take a dumped state in place of this one. Raises KeyError, TypeError or ValueError if it is none."""
        known = {
            uuid.UUID(hex=producer): _Known(int(epoch), tuple((int(s), int(o)) for s, o in batches))
            for producer, epoch, batches in dumped["producers"]
        }
        if not all(each.batches for each in known.values()):
            raise ValueError("a producer without a batch")
        self._known = dict(list(known.items())[-self._producers_max :])

    def __len__(self) -> int:
        return len(self._known)


def producers_path(segment: str) -> str:
    return segment.removesuffix(".log") + ".producers"


def dump_producers(producers: Producers) -> bytes:
    """As it is kept beside a segment: JSON, with a checksum of its text."""
    text = json.dumps(producers.dump())
    return f"{xxhash.xxh3_64_hexdigest(text.encode())} {text}\n".encode()


def load_producers(path: str) -> Producers | None:
    """None if the file is missing or damaged: the state is then found in the segments before it."""
    try:
        with open(path, "rb") as file:
            checksum, _, text = file.read().rstrip(b"\n").partition(b" ")
    except FileNotFoundError:
        return None
    if xxhash.xxh3_64_hexdigest(text).encode() != checksum:
        return None
    producers = Producers()
    producers.load(json.loads(text))
    return producers


def _check(origin: Origin, known: _Known | None) -> int | None:
    name = f"producer {origin.producer} epoch {origin.epoch} batch {origin.sequence}"
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
