"""Waiting for messages of a source without reading them."""

from __future__ import annotations

from collections.abc import Mapping

from pxrs.log.contract import Source
from pxrs.waiting import Cancel, wait_for


def wait_for_messages(
    source: Source,
    positions: Mapping[int, int],
    timeout: float | None = None,
    cancel: Cancel | None = None,
) -> set[int]:
    """Wait until any of these partitions has messages from its offset on, and read nothing. Returns those that have;
    none if the time is up or `cancel` was set. Unlike `Source.fetch` this waits for offsets beyond the end too.

    timeout: in seconds; None for no limit, 0 to look once"""
    ready: set[int] = set()

    def look() -> bool:
        nonlocal ready
        chosen = source.readable(positions)
        ready = {number for number in chosen if source.has_gaps or source.end(number) > positions[number]}
        return bool(ready)

    wait_for(
        look,
        lambda callback: source.subscribe(positions, callback),
        timeout,
        cancel,
        lambda: source.look_again_s(positions),
    )
    return ready
