"""Threads for calls that may block. The event loop must never wait for a file or a registry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from pxrs.server.settings import ServerLimits

T = TypeVar("T")
EVENT_THREADS: Final = 4
"""How many calls may wait at a time until their events are stored."""


class Pools:
    """`calls` for small calls, `data` for reads and appends, `staging` for what Spark's tasks stage, which may be much
    at a time, `renewals` for renewals of leases alone: a renewal must not wait behind a slow commit (R6, W6).
    `events` for events of clients: such a call waits until they are stored, and a slow disk must not delay commits.
    `releases` for what a client that is gone has left open. `tokens` for the tokens file: a client whose token is
    revoked must not delay that by calls that block (W5)."""

    def __init__(self, limits: ServerLimits) -> None:
        self.calls = ThreadPoolExecutor(limits.threads, "pxrs-serve-call")
        self.data = ThreadPoolExecutor(limits.threads, "pxrs-serve-data")
        self.staging = ThreadPoolExecutor(limits.staging_threads, "pxrs-serve-staging")
        self.renewals = ThreadPoolExecutor(limits.renewal_threads, "pxrs-serve-renewal")
        self.events = ThreadPoolExecutor(EVENT_THREADS, "pxrs-serve-events")
        self.releases = ThreadPoolExecutor(1, "pxrs-serve-release")
        self.tokens = ThreadPoolExecutor(1, "pxrs-serve-tokens")

    def close(self) -> None:
        """Start nothing more, and wait for what runs: the hub may be closed afterwards."""
        for pool in (self.calls, self.data, self.staging, self.renewals, self.events, self.tokens):
            pool.shutdown(wait=True, cancel_futures=True)
        self.releases.shutdown(wait=True)  # nothing is left open: this pool finishes all that was given to it


async def run(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Run the function on a thread of the pool; its result."""
    return await asyncio.get_running_loop().run_in_executor(pool, work)


def take_error(done: asyncio.Future[Any]) -> None:
    """A callback of a future whose result nobody needs any more: its error is not reported as forgotten."""
    if not done.cancelled():
        done.exception()
