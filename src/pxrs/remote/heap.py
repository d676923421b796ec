"""The C library's heap, for processes that send and receive batches.

A batch of half a megabyte is copied several times between the log and the network. glibc gets memory for such a block
from the kernel and returns it when the block is freed; each time, the kernel has to supply and to clear every page, and
that costs more than all the copying. glibc adapts: after it has freed a large block once, it keeps blocks up to that
size in its heap, and twice as much of free memory. `keep_freed_blocks` makes it do so from the beginning. Measured on
the durable appends of `benchmarks.serve`: a third of the server's CPU time (decision 0057).
"""

from __future__ import annotations

from typing import Final

KEPT_BYTES: Final = 31 << 20
"""The largest block that is kept in the heap; 32 MiB is glibc's limit. Twice as much of free memory is kept."""


def keep_freed_blocks() -> None:
    """Let this process keep freed blocks of up to KEPT_BYTES for the next batch. Harmless with another C library."""
    bytes(KEPT_BYTES)  # allocated without touching its pages, and freed at once
