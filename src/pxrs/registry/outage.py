"""Repeats registry calls while the registry cannot be reached: a process that starts waits for its registry, and an
outage does not end a streaming query.

`ride_out` repeats one call. A call is repeated only if it had no effect (RegistryUnavailable), or if the caller says
that it may be made twice. Every wait has a bound: after it, the last error is raised.

`StartWait` is for the start of a process: all calls that the start makes go through one of these objects. Each of them
may be made twice, so an unknown outcome is settled by the next call, which looks whether the first one has landed:

- a read, a watch and a lease change nothing that others rely on;
- a commit that expects versions, or absence, of what it writes takes effect once: the repetition raises Conflict, and
  the value there, which is unique to the process, tells whose commit it was (R5);
- a commit of ephemeral keys writes the same value under the same lease.

`PatientCalls` is for the driver of a streaming query. A query owns its partitions until its lease ends, so an outage
that is shorter than the lease need not end the query.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from pxrs.errors import Closed, LeaseExpired, OutcomeUnknown, RegistryError, RegistryUnavailable
from pxrs.registry.contract import Entry, Registry

_logger = logging.getLogger(__name__)
T = TypeVar("T")

UNREACHABLE: Final = (RegistryUnavailable, OutcomeUnknown)
"""The errors after which `ride_out` repeats a call that may be made twice."""
START_ERRORS: Final = (*UNREACHABLE, LeaseExpired)
"""The errors after which `StartWait` repeats a call."""
_PAUSE_S: Final = (0.05, 1.0)
"""Between two calls: the first pause, doubled each time, and the longest."""
_LOOK_S: Final = 0.1
"""How often a process that waits looks whether it is to stop."""
_TRIES_MAX: Final = 20
"""How often a commit whose outcome is unknown is made again."""


START_WAIT_S: Final = 300.0
"""How long a process that starts waits for its registry, unless it is told otherwise."""
SAY_S: Final = 30.0
"""How often a process that waits logs that it still does."""
WAITING: Final = "waiting for the registry"


def ride_out(
    call: Callable[[], T],
    patience_s: float,
    may_wait: Callable[[], bool] = lambda: True,
    errors: tuple[type[Exception], ...] = (RegistryUnavailable,),
    pause: Callable[[float], object] = time.sleep,
    tell: Callable[[Exception, float], None] | None = None,
) -> T:
    """The result of `call`, which is repeated after these errors for up to `patience_s` after the first one of them.

    may_wait: called before each pause; if it returns False, the last error is raised.
    errors:   if OutcomeUnknown is among them, `call` must be one that may be made twice.
    pause:    waits for so many seconds.
    tell:     called after each error, with the seconds that are left; by default the first error is logged."""
    pause_s, pause_s_max = _PAUSE_S
    until: float | None = None
    while True:
        try:
            return call()
        except errors as error:
            now = time.monotonic()
            if until is None:
                until = now + patience_s
                if tell is None:
                    _logger.warning(
                        "the registry cannot be reached, trying again for up to %g s: %s", patience_s, error
                    )
            if now >= until or not may_wait():
                raise
            if tell is not None:
                tell(error, until - now)
        pause(min(pause_s, until - now))
        pause_s = min(2 * pause_s, pause_s_max)


class StartWait:
    """How long a process that starts waits for its registry, and what it says meanwhile. The thread that starts the
    process calls the object; other threads may call `stop` and read the fields."""

    def __init__(self, seconds: float = START_WAIT_S, what: str = "the registry") -> None:
        """seconds: for how long each call is repeated; 0 repeats nothing. what: whom the process waits for, for the
        error."""
        self.seconds, self._what = seconds, what
        self.reason: str | None = WAITING
        """Why the start does not go on, for /readyz; None after a call that was answered."""
        self.outages = 0
        """How many calls had to be repeated."""
        self._is_stopped = False
        """Not an event: a signal handler sets it, and the thread that it interrupts may hold the lock of an event."""
        self._said_at: float | None = None
        """When the present outage was last logged; None if there is none."""

    def __call__(self, call: Callable[[], T]) -> T:
        """The result of `call`, which may be made twice: it is repeated while the registry cannot be reached, while its
        outcome is unknown, and if a lease that it took expired meanwhile.

        Raises Closed after `stop`; when the time is over, an error of the same kind as the last one, which says what
        was waited for; at once all that cannot pass, such as AccessDenied."""
        self._check()
        try:
            found = ride_out(call, self.seconds, errors=START_ERRORS, pause=self._pause, tell=self._tell)
        except START_ERRORS as error:
            if self.seconds <= 0:
                raise
            raise with_advice(
                error,
                f"waited {self.seconds:g} s for {self._what}, which is not available: {error}. Check that it is "
                "running and reachable from here, correct its address, or pass a longer --registry-wait",
            ) from error
        self.reason = None
        if self._said_at is not None:
            self._said_at = None
            _logger.warning("%s is available again; the start continues", self._what)
        return found

    def stop(self) -> None:
        """End the wait, now or when it begins: the call raises Closed. A request that is under way is not ended."""
        self._is_stopped = True

    def _check(self) -> None:
        if self._is_stopped:
            raise Closed(f"stopped while waiting for {self._what}")

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            self._check()
            time.sleep(min(left_s, _LOOK_S))

    def _tell(self, error: Exception, left_s: float) -> None:
        self.reason = f"{WAITING}: {error}"
        self.outages += 1
        now = time.monotonic()
        if self._said_at is None or now >= self._said_at + SAY_S:
            self._said_at = now
            _logger.warning("waiting for %s, for up to %.0f s more: %s", self._what, left_s, error)


class PatientCalls:
    """Calls of a registry, each repeated while the registry cannot be reached."""

    def __init__(self, registry: Registry, patience_s: float) -> None:
        self._registry = registry
        self.patience_s = patience_s
        """For how long each call is repeated."""

    def get(self, key: str) -> Entry | None:
        return ride_out(lambda: self._registry.get(key), self.patience_s)

    def scan(self, prefix: str) -> list[Entry]:
        return ride_out(lambda: self._registry.scan(prefix), self.patience_s)

    def commit(self, expect: Mapping[str, int], put: Mapping[str, bytes]) -> dict[str, int]:
        """Commit, and repeat the commit while its outcome is unknown. It must expect a version of a key that it writes:
        if an earlier try took effect, the next one then raises Conflict."""
        pause, pause_max = _PAUSE_S
        unknown: OutcomeUnknown | None = None
        for _ in range(_TRIES_MAX):
            try:
                return ride_out(lambda: self._registry.commit(expect, put), self.patience_s)
            except OutcomeUnknown as error:
                unknown = error
            except RegistryUnavailable as error:
                if unknown is None:
                    raise
                raise unknown from error  # this try was not applied, but an earlier one may have been, or may still be
            time.sleep(pause)
            pause = min(2 * pause, pause_max)
        assert unknown is not None
        raise unknown


def with_advice(error: Exception, message: str) -> RegistryError:
    """An error of the same kind with this message: an unknown outcome stays unknown."""
    return OutcomeUnknown(message) if isinstance(error, OutcomeUnknown) else RegistryUnavailable(message)
