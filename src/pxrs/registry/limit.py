"""One time limit for several calls of a store.

A store bounds each of its calls by its `timeout_s`. Code that makes several calls of the store within one call of the
user sets a limit for all of them together, so that the user does not wait for `timeout_s` several times:

    with time_limit(registry.timeout_s):
        entry = registry.get(key)           # both together take no longer than this
        registry.commit({key: entry.version}, ...)

The limit (`pxrs.waiting.time_limit`) holds for the thread that sets it, and for calls of a log. It is counted on the
machine's monotonic clock, not on the registry's clock: it bounds how long a call waits, and says nothing about whether
a lease is alive.
"""

from __future__ import annotations

import time

from pxrs.errors import RegistryUnavailable
from pxrs.waiting import limit_until, seconds_left, time_limit

__all__ = ["check_time", "seconds_left", "time_limit"]


def check_time(where: str) -> None:
    """Raise RegistryUnavailable if this thread's limit has passed. Called before a request is sent, so that the error
    means that the request had no effect."""
    if time.monotonic() >= limit_until():
        raise RegistryUnavailable(f"{where}: the time limit of this call was over before the call was sent")
