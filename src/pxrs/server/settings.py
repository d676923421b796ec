"""The bounds of what clients can make the server hold (W5). Each is an option of `pxrs serve`, with a
name of its own or as `--limit NAME=VALUE`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAY_BE_ZERO: Final = "may_be_zero"
"""In the metadata of a limit that `--limit` accepts as 0."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """A client that exceeds a bound is slowed down, or gets `ServerBusy`. What one control stream, append or token may
    have is no other client's concern; `connections_max`, `streams_max` and the bytes of appends and reads are shared by
    all clients."""

    connections_max: int = 2_000
    """How many connections of all clients are open at a time. Others are closed at once."""
    streams_max: int = 4_000
    """How many calls of gRPC are open at a time: control streams, reads, appends and actions of all clients."""
    token_streams_max: int = 2_000
    """How many of them clients with the same token have: one token cannot keep all others out."""
    request_bytes_max: int = 16 << 20
    """How long a control message, a ticket or the body of an action may be. A commit of the registry has to fit in."""
    calls_max: int = 256
    """How many calls of one control stream may be unanswered. The server reads no further message of the stream until
    one of them is answered."""
    control_bytes_max: int = 32 << 20
    """How many bytes of unanswered calls of one control stream are held, at least one call."""
    answer_bytes_max: int = 8 << 20
    """How many bytes of answers that the client has not taken yet are held for one control stream. Beyond, none of its
    calls is begun but renewals of leases."""
    watches_max: int = 1_000
    """How many prefixes of the registry one control stream may watch."""
    subscriptions_max: int = 10_000
    """How many subscriptions to topics one control stream may have."""
    leases_max: int = 10_000
    """How many leases the server keeps in hand for all clients. A lease that is not in hand is attached to again."""
    append_bytes_max: int = 256 << 20
    """How many bytes of appends the server holds at a time. Streams wait until others are stored."""
    append_batches_max: int = 1_000
    """How many batches one append may have."""
    append_decoded_bytes_max: int = 512 << 20
    """How many bytes a compressed batch may have once it is decompressed."""
    append_rest_s: float = 30.0
    """How long the server holds the beginning of an append and waits for the rest of it, and how long an answer may
    wait to be taken by the client."""
    read_bytes_max: int = 16 << 20
    """How many bytes one read returns at most, whatever a client asks for; at least one batch."""
    read_held_bytes_max: int = 256 << 20
    """How many bytes of batches that clients have not taken yet are held for all reads. If there is no more room,
    nothing is read ahead for clients that pause, and clients that have taken nothing for `read_stalled_s` lose their
    streams."""
    read_stalled_s: float = 10.0
    threads: int = 16
    """How many calls of the hub run at a time, for each of the pools but those of staging and renewals."""
    staging_threads: int = 4
    """How many batches of Spark are staged or published at a time."""
    renewal_threads: int = 8
    """How many renewals of leases run at a time."""
    drain_s: float = 10.0
    """How long a server that was told to stop waits for answers that are under way."""
    keepalive_s: float = 20.0
    """After how many seconds without a message a client is asked whether it is there."""
    keepalive_timeout_s: float = 10.0
    """How long that question may stay unanswered. Then the connection is closed, with all its streams."""
