"""One time limit for several calls of a store.

A store bounds each of its calls by its `timeout_s`. Code that makes several calls on behalf of one call of its user
sets a limit for all of them, so that the user does not wait that long once for each:

    with time_limit(registry.timeout_s):
        entry = registry.get(key)           # both together take no longer than this
        registry.commit({key: entry.version}, ...)

The limit belongs to the thread that sets it. It is on the machine's monotonic clock: it bounds how long a call waits
and proves nothing about a lease.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pxrs.errors import RegistryUnavailable


class _Limit(threading.local):
    until = math.inf


_limit = _Limit()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Calls of a store that this thread makes in the block end within so many seconds. An outer limit still counts."""
    before = _limit.until
    _limit.until = min(before, time.monotonic() + seconds)
    try:
        yield
    finally:
        _limit.until = before


def seconds_left(seconds: float) -> float:
    """So many seconds, or what this thread's limit leaves of them."""
    return max(0.0, min(seconds, _limit.until - time.monotonic()))


def check_time(where: str) -> None:
    """Raise RegistryUnavailable if this thread's limit has passed: what it was about to call has had no effect."""
    if time.monotonic() >= _limit.until:
        raise RegistryUnavailable(f"{where}: the time for this call was over before it was sent")
