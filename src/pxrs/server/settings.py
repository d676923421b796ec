"""The bounds of what clients can make the server hold (W5). Each is an option of `pxrs serve`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """A client that exceeds a bound is slowed down, or gets `ServerBusy`; no other client notices."""

    streams_max: int = 4_000
    """How many calls of gRPC are open at a time: control streams, reads and appends of all clients."""
    calls_max: int = 256
    """How many calls of one control stream may be unanswered. The server reads no further message of the stream until
    one of them is answered."""
    watches_max: int = 1_000
    """How many watches one control stream may have."""
    subscriptions_max: int = 10_000
    """How many subscriptions to topics one control stream may have."""
    leases_max: int = 10_000
    """How many leases the server keeps in hand for all clients. A lease that is not in hand is attached to again."""
    append_bytes_max: int = 256 << 20
    """How many bytes of appends the server holds at a time. Streams wait until others are stored."""
    append_batches_max: int = 1_000
    """How many batches one append may have."""
    read_bytes_max: int = 16 << 20
    """How many bytes one read returns at most, whatever a client asks for; at least one batch."""
    readers_max: int = 64
    """How many reads of what is there are under way at a time. Others wait."""
    ranges_max: int = 256
    """How many reads of ranges are under way at a time. Others wait. A task of Spark takes as long to read its range as
    it takes to handle the rows; such reads must not keep consumers waiting."""
    threads: int = 16
    """How many calls of the hub run at a time, for each of the pools but those of staging and renewals."""
    staging_threads: int = 4
    """How many batches of Spark are staged or published at a time."""
    renewal_threads: int = 8
    """How many renewals of leases run at a time."""
    drain_s: float = 10.0
    """How long a server that was told to stop waits for answers that are under way."""
