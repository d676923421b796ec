"""The answers of storage nodes as values, and the settings by which a process connects to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import grpc
import xxhash

from pxrs import disk
from pxrs.cluster.ledgers import EntryHead
from pxrs.errors import InvalidUrl, PxrsError
from pxrs.remote import flight, wire
from pxrs.remote.client.settings import Certificates

TIMEOUT_S: Final = 5.0
UNANSWERED_BYTES_MAX: Final = 256 << 20


class Fenced(NamedTuple):
    """A node's answer to a fence."""

    lac: int
    """The highest entry that the node knows to be confirmed; -1 if there is none."""
    last: int
    """The highest entry that the node has; -1 if there is none."""


class EntryRead(NamedTuple):
    """A node's answer for one entry."""

    entry: int
    head: EntryHead | None
    """None if the node does not have the entry, cannot read it, or does not know whether it had it."""
    body: memoryview = memoryview(b"")
    error: PxrsError | None = None
    """Why the node cannot read the entry. Treat this like a node that does not answer, never as a missing entry."""
    is_unknown: bool = False
    """The node is in doubt about the ledger (C7): it does not have the entry now, and may have had it."""

    @property
    def is_missing(self) -> bool:
        return self.head is None and self.error is None and not self.is_unknown


class IndexPage(NamedTuple):
    """Entries of a ledger that a node has."""

    entries: list[tuple[int, EntryHead]]
    """Number and head of each entry. `checksum` is 0, because the answer does not contain it."""
    lac: int
    fenced: int | None
    """The highest recovery number with which the ledger is fenced on the node; None if it is not fenced."""
    has_more: bool


class Hello(NamedTuple):
    """The identity of the node at an address."""

    node: str
    cluster: str
    starts: int
    format: int
    version: str


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How a broker connects to storage nodes."""

    timeout_s: float = TIMEOUT_S
    """How long a node may take to answer."""
    unanswered_bytes_max: int = UNANSWERED_BYTES_MAX
    token_file: Path | None = None
    """A file with the token for nodes that run with `--auth`. It is read again for each call."""
    certificates: Certificates | None = field(default=None, repr=False)
    """None: no TLS."""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The gRPC metadata with the token. Raises InvalidUrl, whose text does not contain the token."""
        if self.token_file is None:
            return ()
        try:
            token = self.token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = disk.explain(error) if isinstance(error, OSError) else error
            raise InvalidUrl(f"the token file {self.token_file} cannot be read: {why}") from error
        if not (token and token.isascii() and token.isprintable()):
            raise InvalidUrl(f"the token file {self.token_file} does not contain a token: give one line")
        return ((wire.TOKEN_METADATA, f"Bearer {token}"),)


def read_entry(message: bytes, *, is_whole: bool) -> EntryRead:
    """Decode an answer of `DoGet`. is_whole: the message has the whole body, so its checksum is verified; a mismatch is
    returned as `error`. Raises KeyError, TypeError, ValueError, MalformedMessage."""
    found = flight.read_flight_data(message)
    about = wire.loads(found.app_metadata)
    entry = int(about["entry"])
    if about.get("missing"):
        return EntryRead(entry, None)
    if about.get("unknown"):
        return EntryRead(entry, None, is_unknown=True)
    if "error" in about:
        return EntryRead(entry, None, error=wire.error_of(about["error"]))
    head, body = EntryHead(*about["head"]), memoryview(found.body)
    if is_whole and xxhash.xxh3_64_intdigest(body) != head.checksum:
        return EntryRead(entry, None, error=PxrsError(f"entry {entry} was damaged in transit"))
    return EntryRead(entry, head, body)


def open_channel(address: str, settings: LinkSettings) -> grpc.Channel:
    options = (
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
        # Reconnect soon to a node that was restarted.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # In spite of its name, how long one attempt to connect may take until the node has sent its HTTP/2 settings. A
        # node that was just resumed, is busy or far away needs as long for that as for any other answer.
        ("grpc.min_reconnect_backoff_ms", int(settings.timeout_s * 1_000)),
        ("grpc.max_send_message_length", wire.MESSAGE_BYTES_MAX),
        ("grpc.max_receive_message_length", wire.MESSAGE_BYTES_MAX),
        ("grpc.enable_http_proxy", 0),
    )
    if settings.certificates is None:
        return grpc.insecure_channel(address, options=options)
    found = settings.certificates
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(found.ca, found.key, found.cert), options=options)
