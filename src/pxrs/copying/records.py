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
    parts = key.split("/")
    return len(parts) == 4 and parts[0] == "topics" and parts[2] == "copies"


def new_id() -> str:
    """The id of a new copy. It is random, and a UUID of version 5, by which a backup finds the rows of copies whose
    record it does not have (`backup.partitions`): ids of ordinary producers are of version 4."""
    return uuid.uuid5(uuid.uuid4(), "topic copy").hex


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of one partition of the source that is being copied, or was copied last."""

    partition: int
    end: int
    """The offset behind the last message. The range begins at the partition's position."""
    since: dict[int, int]
    """By partition of the target that gets rows: where it ended before the piece was first sent."""


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
    source: dict[str, str] = field(default_factory=dict)
    """The name and address of the source, for people who look into the registry."""

    @property
    def producer(self) -> uuid.UUID:
        return uuid.UUID(hex=self.id)

    def begun(self, piece: Piece) -> CopyRecord:
        """The record before this piece is sent."""
        return replace(self, number=self.number + 1, piece=piece)

    def done(self) -> CopyRecord:
        """The record after the last piece is stored."""
        if self.piece is None:
            return self
        return self.moved(self.piece.partition, self.piece.end)

    def moved(self, partition: int, position: int) -> CopyRecord:
        """The record with another position of a partition, and no piece under way."""
        positions = list(self.positions)
        positions[partition] = position
        return replace(self, positions=tuple(positions), piece=None)

    def dump(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def load(cls, key: str, value: bytes) -> Self:
        try:
            found = json.loads(value)
            piece = found.pop("piece")
            if piece is not None:
                since = {int(number): int(end) for number, end in piece["since"].items()}
                piece = Piece(int(piece["partition"]), int(piece["end"]), since)
            uuid.UUID(hex=found["id"])
            positions = tuple(map(int, found.pop("positions")))
            return cls(**found, positions=positions, piece=piece)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RegistryCorrupt(key, f"it is no record of a copy: {error!r}") from error
