"""The messages between brokers and a storage node, as bytes (docs/cluster-format.md). Nothing here does I/O.

They are messages of Arrow Flight's service, with JSON in `app_metadata` and the bytes of entries in `data_body`. In a
stream of adds, the sender packs all waiting adds into one message, and one answer gives the number of adds of the
stream that are synced. So a small entry costs neither a message nor an answer of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pxrs.cluster.ledgers import EntryHead
from pxrs.errors import InvalidArgument, PxrsError
from pxrs.remote import flight, wire

ADDS: Final = "adds"
"""The value of `storage` in the descriptor of a stream of adds."""
HELLO: Final = "storage.hello"
FENCE: Final = "storage.fence"
INDEX: Final = "storage.index"
LEDGERS: Final = "storage.ledgers"
LACKING: Final = "storage.lacking"
COLLECT: Final = "storage.collect"
ABOUT_BYTES_MAX: Final = 1 << 20
"""How long the JSON of a message of adds may be. As objects it takes ten times that memory."""
_BODY_TAG: Final = b"\xc2\x3e"
_METADATA_TAG: Final = b"\x1a"

_TYPES: Final = frozenset((str, int, int, recovery, *[int] * len(EntryHead._fields)) for recovery in (int, type(None)))
"""The types of the fields of an add: with a recovery number, and with None in its place."""

Piece = bytes | memoryview


class Add(NamedTuple):
    """The request to store an entry on a node."""

    ledger: str
    entry: int
    lac: int
    recovery: int | None
    head: EntryHead
    body: Sequence[Piece]


def data(about: Mapping[str, Any], pieces: Iterable[Piece] = ()) -> bytes:
    """An encoded `FlightData` message without an Arrow header."""
    metadata = wire.dumps(about)
    body = [piece for piece in pieces if len(piece)]
    parts: list[Piece] = [_METADATA_TAG, flight.varint(len(metadata)), metadata]
    if body:
        parts += (_BODY_TAG, flight.varint(sum(map(len, body))), *body)
    return b"".join(parts)


def adds_begin(node: str) -> bytes:
    """The first message of a stream of adds."""
    return flight.flight_data(flight.FlightData(command=wire.dumps({"storage": ADDS, "node": node})))


def adds(batch: Sequence[Add]) -> bytes:
    """One message with these adds."""
    about = [[each.ledger, each.entry, each.lac, each.recovery, *each.head] for each in batch]
    return data({"adds": about}, (piece for each in batch for piece in each.body))


def read_adds(message: bytes) -> list[Add]:
    """The adds of a message; their bodies are slices of it. Raises InvalidArgument, MalformedMessage."""
    found = flight.read_flight_data(message)
    if len(found.app_metadata) > ABOUT_BYTES_MAX:
        raise InvalidArgument(
            f"a message of adds has more than {ABOUT_BYTES_MAX:,} bytes of JSON: send several messages"
        )
    try:
        batch, at = [], 0
        view = memoryview(found.body)
        for row in wire.loads(found.app_metadata)["adds"]:
            if tuple(map(type, row)) not in _TYPES:
                raise ValueError("a field is missing or has the wrong type")
            ledger, entry, lac, recovery, *head = row
            about = EntryHead._make(head)
            body = view[at : at + about.size]
            at += about.size
            if about.size < 0 or len(body) != about.size or entry < 0 or not 0 <= about.checksum < 1 << 64:
                raise ValueError("a number is out of range")
            batch.append(Add(ledger, entry, lac, recovery, about, (body,)))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"a message with adds is malformed: {str(error)[:200]}") from error
    return batch


def answer(synced: int, refused: Sequence[tuple[int, PxrsError]]) -> bytes:
    """An answer in a stream of adds: the first `synced` adds of the stream are synced, except for those that this
    answer or an earlier one lists as refused. Adds are numbered from 0 in each stream."""
    about: dict[str, Any] = {"synced": synced}
    if refused:
        about["refused"] = [[number, wire.error_to_dict(error)] for number, error in refused]
    return flight.result(wire.dumps(about))


def read_answer(message: bytes) -> tuple[int, list[tuple[int, PxrsError]]]:
    """Raises KeyError, TypeError, ValueError, MalformedMessage."""
    found = wire.loads(flight.read_result(message))
    return int(found["synced"]), [(int(number), wire.error_of(error)) for number, error in found.get("refused", ())]
