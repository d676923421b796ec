"""Pure: the records in the registry of rows that tasks of Spark have staged for topics of the cluster (K1, K5).

    cluster/staged/<topic id>/<query>/<batch>/<file>    StagedFile: the ledger that has the rows
    cluster/staging/feeds/<query>/<batch>-<digest>      StoredFeed: what a batch reads of a topic, with its fences
    cluster/staging/topics/<topic id>                   KeptTopic: files were staged for this topic

<query> is routed-<query> if the rows name their topics. Clients cannot write these keys (C6); brokers do.

A staged file is a ledger of its own, with the topic's quorum. Entry 0 names the file, and every other entry is one
piece: a head (`piece_head`) and the encoded batch. The file is finished when its ledger is closed. A ledger that was
never closed is not recovered. A broker creates the records of the file and of its ledger in one commit and deletes them
in one commit, so the storage nodes remove the ledger as garbage when the file is removed (C5).

A file may wait for days to be published. No broker owns it, so `keeper` chooses the broker that replaces lost copies of
a finished file. Brokers that know different brokers to be alive may choose differently. Two repairs at once do no harm,
because every commit of a repair expects the ledger's record, and a file that was removed has none.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa

from pxrs.cluster.ledgers import LedgerName, encode, parsed
from pxrs.errors import BatchRefused
from pxrs.log.batch import Payload
from pxrs.publishing.feed import Feed
from pxrs.publishing.staging.frames import Piece

STAGED: Final = "cluster/staged/"
LEDGER: Final = "staged-"
"""With this begins the id of the ledger of a staged file."""
FEEDS: Final = "cluster/staging/feeds/"
KEPT: Final = "cluster/staging/topics/"
_HEAD: Final = struct.Struct("<4sHHIIQQqq16x")
"""MAGIC, format, codec, partition, rows, bytes, checksum, first and last timestamp: 64 bytes, so that the batch begins
at a multiple of 64 bytes too."""
_MAGIC: Final = b"PXSP"
_FORMAT: Final = 1


class StagedName(NamedTuple):
    """The name of a staged file."""

    topic: str
    """The topic's id."""
    query: str
    batch: int
    file: str

    @property
    def key(self) -> str:
        return f"{batch_prefix(self.topic, self.query, self.batch)}{self.file}"

    @classmethod
    def of_key(cls, key: str) -> StagedName:
        topic, query, batch, file = key.removeprefix(STAGED).split("/")
        return cls(topic, query, int(batch), file)

    def ledger(self) -> LedgerName:
        """The ledger of a new file. Names of files are never reused, so the ids of their ledgers are not either."""
        return LedgerName(f"{LEDGER}{self.topic}-{self.file}", 0, 0)


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A staged file, finished or not."""

    ledger: str
    """The id of its ledger."""
    begun_at: float
    """When it was begun, in seconds since 1970."""

    @property
    def ledger_key(self) -> str:
        return LedgerName.of_id(self.ledger).key

    def dump(self) -> bytes:
        return encode(asdict(self)).encode()

    @classmethod
    def parse(cls, key: str, value: bytes) -> StagedFile:
        """Raises RegistryCorrupt."""
        return parsed(key, value, lambda found: cls(str(found["ledger"]), float(found["begun_at"])))


@dataclass(frozen=True, slots=True)
class StoredFeed:
    """A feed that the tasks of a batch have announced in one run of the query."""

    run: str
    feed: str
    """The result of `Feed.dump`."""
    at: float
    """When it was announced, in seconds since 1970."""

    def dump(self) -> bytes:
        return encode(asdict(self)).encode()

    @classmethod
    def parse(cls, key: str, value: bytes) -> StoredFeed:
        """Raises RegistryCorrupt."""
        return parsed(key, value, lambda found: cls(str(found["run"]), str(found["feed"]), float(found["at"])))


@dataclass(frozen=True, slots=True)
class KeptTopic:
    """Files were staged for the topic; all of them may have been removed since."""

    at: float
    """When a file was last begun for it, in seconds since 1970."""

    def dump(self) -> bytes:
        return encode(asdict(self)).encode()

    @classmethod
    def parse(cls, key: str, value: bytes) -> KeptTopic:
        """Raises RegistryCorrupt."""
        return parsed(key, value, lambda found: cls(float(found["at"])))


def topic_prefix(topic: str) -> str:
    return f"{STAGED}{topic}/"


def query_prefix(topic: str, query: str) -> str:
    return f"{STAGED}{topic}/{query}/"


def batch_prefix(topic: str, query: str, batch: int) -> str:
    return f"{STAGED}{topic}/{query}/{batch}/"


def feed_key(query: str, batch: int, run: str, feed: Feed) -> str:
    """The key contains a digest of the run's id, not the id itself: a user chooses the id, and it may be too long for a
    key."""
    digest = hashlib.sha256("\0".join((run, feed.incarnation, feed.topic)).encode()).hexdigest()[:32]
    return f"{FEEDS}{query}/{batch}-{digest}"


def batch_of_feed(key: str) -> int:
    return int(key.rpartition("/")[2].partition("-")[0])


def keeper(ledger: str, brokers: Collection[str]) -> str | None:
    """Which of these brokers keeps the copies of a staged file's ledger; None if there is no broker. When a broker
    comes or goes, only the ledgers that fall to it, or were its own, get another keeper (rendezvous hashing)."""
    return max(brokers, key=lambda broker: hashlib.sha256(f"{broker}\0{ledger}".encode()).digest(), default=None)


def kept_key(topic: str) -> str:
    return KEPT + topic


def about(name: StagedName) -> bytes:
    """The body of entry 0 of a file's ledger. It is for people who inspect the ledger; pxrs does not read it."""
    found: Mapping[str, Any] = {"staged": name._asdict()}
    return encode(found).encode()


def piece_head(piece: Piece) -> bytes:
    """The head that precedes the encoded batch of a piece in its entry."""
    payload = piece.payload
    return _HEAD.pack(
        _MAGIC,
        _FORMAT,
        payload.codec,
        piece.partition,
        payload.rows,
        payload.data.size,
        payload.checksum,
        payload.first_timestamp,
        payload.last_timestamp,
    )


def read_piece(body: pa.Buffer, where: str) -> Piece:
    """The piece in the body of an entry, whose checksum the link has verified. where: names the entry in errors. Raises
    BatchRefused."""
    if body.size < _HEAD.size:
        raise BatchRefused(f"{where} is not a piece of a staged file: it is too short, {body.size} bytes")
    magic, version, codec, partition, rows, size, checksum, first, last = _HEAD.unpack(body.slice(0, _HEAD.size))
    if magic != _MAGIC or version != _FORMAT or size != body.size - _HEAD.size:
        raise BatchRefused(
            f"{where} is not a piece of a staged file of format {_FORMAT}: it begins with {magic!r}, format {version}, "
            f"{size} bytes of {body.size - _HEAD.size}"
        )
    return Piece(partition, Payload(body.slice(_HEAD.size), checksum, rows, first, last, codec))
