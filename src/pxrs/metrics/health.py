"""Whether a process is alive and ready, as functions that `endpoint.py` calls for /healthz and /readyz.

Alive means: restarting the process would not help. Ready means: it does its work now. docs/health.md says what each
command answers, and when.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

SILENT_S: Final = 60.0
"""A loop that has not called `Beat.beat` for so long counts as dead."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to a question about health."""

    is_ok: bool
    reason: str = ""
    """Why not, in one sentence; empty if it is."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """More about it, as JSON."""


Probe = Callable[[], Verdict]


def always() -> Verdict:
    """The process answers; nothing else is asked."""
    return Verdict(True)


class Beat:
    """Notices that the loop of a process has stopped. The loop calls `beat`, any thread `verdict`."""

    def __init__(self, what: str, silent_s: float = SILENT_S, clock: Callable[[], float] = time.monotonic) -> None:
        """what: names the loop, for the reason."""
        self._what, self._silent_s, self._clock = what, silent_s, clock
        self._last = clock()

    def beat(self) -> None:
        self._last = self._clock()

    def verdict(self) -> Verdict:
        silent_s = self._clock() - self._last
        if silent_s < self._silent_s:
            return Verdict(True)
        return Verdict(False, f"{self._what} has made no progress for {silent_s:.0f} s")


class Readiness:
    """A verdict that one thread sets and others read."""

    def __init__(self, reason: str) -> None:
        """reason: why the process is not ready yet."""
        self._lock = threading.Lock()
        self._verdict = Verdict(False, reason)

    def set(self, verdict: Verdict) -> None:
        with self._lock:
            self._verdict = verdict

    def verdict(self) -> Verdict:
        with self._lock:
            return self._verdict
