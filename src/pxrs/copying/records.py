"""What the registry holds of a copy: `topics/<id of the target>/copies/<id of the source>`."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, field, replace
from typing import Self

from pxrs.errors import RegistryCorrupt


def copies_prefix(target: str) -> str:
    """The keys of all copies into the topic with this id."""
    return f"topics/{target}/copies/"


def copy_key(target: str, source: str) -> str:
    """The key of the copy from one topic into another one, by their ids."""
    return f"{copies_prefix(target)}{source}"


def is_copy_key(key: str) -> bool:
    """Whether this is the key of a copy."""
    parts = key.split("/")
    return len(parts) == 4 and (parts[0], parts[2]) == ("topics", "copies")


def new_id() -> str:
    """The id of a new copy. It has the form of the ids of queries, by which a backup tells batches that belong to a
    record in the registry from those of other producers (`pxrs.backup.partitions`)."""
    return uuid.uuid5(uuid.uuid4(), "copy").hex


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of one partition of the source that is being copied, or was copied last."""

    partition: int
    end: int
    """The offset behind the last message. The range begins at the partition's position."""
    since: dict[int, int]
    """By partition of the target that gets rows: where it ended before the piece was first sent."""
    mark: str = ""
    """That of the last message of the range: see `pieces.mark_of`."""


@dataclass(frozen=True, slots=True)
class CopyRecord:
    """How far a copy has come."""

    id: str
    """Identifies the copy, as the producer of its batches: a UUID, as 32 hexadecimal digits."""
    begins: str
    """From where the copy was asked to begin, to be compared with what is asked for later."""
    positions: tuple[int, ...]
    """By partition of the source: everything from the beginning of the copy up to this offset is in the target."""
    number: int = 0
    """That of the last piece: the epoch of its batches."""
    piece: Piece | None = None
    """The last piece, while it is not known to be stored."""
    marks: tuple[str, ...] = ()
    """By partition of the source: the mark of the message before the position, by which a source that is not the one
    that was copied is told; empty if that offset is a gap, or if nothing was copied of the partition."""
    stored: dict[int, int] = field(default_factory=dict)
    """By partition of the target that got rows of the last piece that is known to be stored: where it ended then."""
    source: dict[str, str] = field(default_factory=dict)
    """The name and address of the source, for people who look into the registry."""

    @property
    def producer(self) -> uuid.UUID:
        return uuid.UUID(hex=self.id)

    def begun(self, piece: Piece) -> CopyRecord:
        """The record before this piece is sent."""
        return replace(self, number=self.number + 1, piece=piece)

    def done(self, stored: dict[int, int]) -> CopyRecord:
        """The record after the last piece is stored. stored: see the field."""
        if self.piece is None:
            return self
        return replace(self.moved(self.piece.partition, self.piece.end, self.piece.mark), stored=stored)

    def moved(self, partition: int, position: int, mark: str = "") -> CopyRecord:
        """The record with another position of a partition, and no piece under way."""
        positions, marks = list(self.positions), list(self.marks or ("",) * len(self.positions))
        positions[partition], marks[partition] = position, mark
        return replace(self, positions=tuple(positions), marks=tuple(marks), piece=None)

    def dump(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def load(cls, key: str, value: bytes) -> Self:
        try:
            found = json.loads(value)
            piece = found.pop("piece")
            if piece is not None:
                piece = Piece(int(piece["partition"]), int(piece["end"]), _ends(piece["since"]), str(piece["mark"]))
            uuid.UUID(hex=found["id"])
            positions, marks = tuple(map(int, found.pop("positions"))), tuple(map(str, found.pop("marks")))
            stored = _ends(found.pop("stored"))
            return cls(**found, positions=positions, marks=marks, piece=piece, stored=stored)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RegistryCorrupt(key, f"it is not the record of a copy: {error!r}") from error


def _ends(found: dict[str, object]) -> dict[int, int]:
    """Offsets by partition, from JSON, whose names are text."""
    return {int(number): int(str(end)) for number, end in found.items()}
