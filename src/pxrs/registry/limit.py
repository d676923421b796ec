"""One time limit for several calls of a store.

A store bounds each of its calls by its `timeout_s`. Code that makes several calls of the store within one call of the
user sets a limit for all of them together, so that the user does not wait for `timeout_s` several times:

    with time_limit(registry.timeout_s):
        entry = registry.get(key)           # both together take no longer than this
        registry.commit({key: entry.version}, ...)

The limit holds for the thread that sets it. It is counted on the machine's monotonic clock, not on the registry's
clock: it bounds how long a call waits, and says nothing about whether a lease is alive.
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
    """All calls of a store that this thread makes inside the block end within this number of seconds together. If an
    outer block has an earlier limit, that one counts."""
    before = _limit.until
    _limit.until = min(before, time.monotonic() + seconds)
    try:
        yield
    finally:
        _limit.until = before


def seconds_left(seconds: float) -> float:
    """The smaller one of `seconds` and the time until this thread's limit."""
    return max(0.0, min(seconds, _limit.until - time.monotonic()))


def check_time(where: str) -> None:
    """Raise RegistryUnavailable if this thread's limit has passed. Called before a request is sent, so that the error
    means that the request had no effect."""
    if time.monotonic() >= _limit.until:
        raise RegistryUnavailable(f"{where}: the time for this call was over before it was sent")
