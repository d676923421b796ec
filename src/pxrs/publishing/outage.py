"""Repeats registry calls while the registry cannot be reached, so that an outage does not end a streaming query.

A query owns its partitions until its lease ends, so an outage that is shorter than the lease need not end the query. A
call is repeated only if it had no effect (RegistryUnavailable), or if the caller says that it may be made twice. Every
wait has a bound: after it, the last error is raised.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from pxrs.errors import OutcomeUnknown, RegistryError, RegistryUnavailable
from pxrs.registry.contract import Entry, Registry

_logger = logging.getLogger(__name__)
T = TypeVar("T")

UNREACHABLE: Final = (RegistryUnavailable, OutcomeUnknown)
"""The errors after which `ride_out` repeats a call that may be made twice."""
_PAUSE_S: Final = (0.05, 1.0)
"""Between two calls: the first pause, doubled each time, and the longest."""
_TRIES_MAX: Final = 20
"""How often a commit whose outcome is unknown is made again."""


def ride_out(
    call: Callable[[], T],
    patience_s: float,
    may_wait: Callable[[], bool] = lambda: True,
    errors: tuple[type[Exception], ...] = (RegistryUnavailable,),
) -> T:
    """The result of `call`, which is repeated after these errors for up to `patience_s` after the first one of them.

    may_wait: called before each pause; if it returns False, the last error is raised.
    errors:   if OutcomeUnknown is among them, `call` must be one that may be made twice."""
    pause, pause_max = _PAUSE_S
    until: float | None = None
    while True:
        try:
            return call()
        except errors as error:
            now = time.monotonic()
            if until is None:
                until = now + patience_s
                _logger.warning("the registry cannot be reached, trying again for up to %g s: %s", patience_s, error)
            if now >= until or not may_wait():
                raise
        time.sleep(min(pause, until - now))
        pause = min(2 * pause, pause_max)


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
