"""Limits of a storage node: the memory and connections that brokers can make it use (W5), and the intervals of its
work. `pxrs storage --limit NAME=VALUE` sets each of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pxrs.server.settings import MAY_BE_ZERO


@dataclass(frozen=True, slots=True)
class StorageLimits:
    connections_max: int = 2_000
    """Maximum number of open connections of all brokers. Further connections are closed at once."""
    streams_max: int = 2_000
    """Maximum number of open gRPC calls."""
    request_bytes_max: int = 1 << 20
    """Maximum length of a ticket or of the body of an action."""
    add_bytes_max: int = 256 << 20
    """Maximum number of bytes of entries that are received and not yet synced. Beyond it, streams wait."""
    read_bytes_max: int = 16 << 20
    """Maximum number of bytes that one read returns, whatever the broker asks for; at least one entry."""
    read_held_bytes_max: int = 256 << 20
    """Maximum number of bytes held in memory for all reads until brokers receive them."""
    read_stalled_s: float = 30.0
    """How long a broker may take to receive a part of a read, and how long a read waits for memory."""
    threads: int = 16
    """Maximum number of fences and reads that run at a time."""
    segment_bytes: int = 256 << 20
    """Length at which the journal continues in another file."""
    free_bytes_min: int = 64 << 20
    """With less free space on its disk the node accepts no entries."""
    collect_s: float = 30.0
    """Interval between two rounds of garbage collection and compaction."""
    compact_below: float = 0.5
    """A segment is compacted when less than this fraction of it is still needed."""
    scrub_bytes_s: int = field(default=10_000_000, metadata={MAY_BE_ZERO: True})
    """How many bytes of its sealed segments a node reads a second at most, to find damage. 0: none."""
    scrub_round_s: float = 3600.0
    """How long reading all sealed segments takes at least: a small journal is not read all the time."""
    alive_s: float = 3.0
    """Interval at which the node writes a changed load to the registry."""
    lease_s: float = 10.0
    """TTL of the node's lease: how long it counts as alive without renewing it."""
    drain_s: float = 5.0
    """How long a node that is stopping waits for calls that are under way."""
    keepalive_s: float = 20.0
    """Interval without a message after which the node pings a broker."""
    keepalive_timeout_s: float = 10.0
    """How long a ping may remain unanswered before the connection is closed, with all its streams."""
