"""The bounds of what brokers can make a storage node hold (W5), and how it keeps its data. Each is an option of
`pxrs storage`: `--limit NAME=VALUE`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StorageLimits:
    connections_max: int = 2_000
    """How many connections of all brokers are open at a time. Others are closed at once."""
    streams_max: int = 2_000
    """How many calls of gRPC are open at a time."""
    request_bytes_max: int = 1 << 20
    """How long a ticket or the body of an action may be."""
    add_bytes_max: int = 256 << 20
    """How many bytes of entries are received and not synced yet. Streams wait until others are synced."""
    read_bytes_max: int = 16 << 20
    """How many bytes one read returns at most, whatever a broker asks for; at least one entry."""
    read_held_bytes_max: int = 256 << 20
    """How many bytes of entries that brokers have not taken yet are held for all reads."""
    read_stalled_s: float = 30.0
    """How long a broker may take for a part of a read, or wait for room."""
    threads: int = 16
    """How many fences and reads run at a time."""
    segment_bytes: int = 256 << 20
    """After this length the journal goes on in another file."""
    free_bytes_min: int = 64 << 20
    """With less room on its disk the node takes no entries."""
    collect_s: float = 30.0
    """How often the node looks for ledgers that are garbage, and for segments to compact."""
    compact_below: float = 0.5
    """A segment is compacted when less than this part of it still counts."""
    alive_s: float = 3.0
    """How often the node records its load and its journal's end in the registry."""
    lease_s: float = 10.0
    """For this time after its last renewal the node counts as alive."""
    drain_s: float = 5.0
    """How long a node that was told to stop waits for answers that are under way."""
    keepalive_s: float = 20.0
    """After how many seconds without a message a broker is asked whether it is there."""
    keepalive_timeout_s: float = 10.0
    """How long that question may stay unanswered. Then the connection is closed, with all its streams."""
