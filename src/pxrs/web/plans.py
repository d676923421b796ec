"""The plans of actions that were shown and not confirmed yet.

A plan is kept for `KEPT_S`, for whoever has asked for it, and is done at most once: a second click, and a page that was
left open over lunch, change nothing. At most `PLANS_MAX` are kept, the newest; so many people do not decide at a time.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pxrs.errors import InvalidArgument
from pxrs.web.actions import Plan

KEPT_S: Final = 600.0
PLANS_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class _Kept:
    action: str
    who: str | None
    plan: Plan
    until: float


class Plans:
    """Threads share it."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        """By id, oldest first. An id cannot be guessed."""

    def keep(self, action: str, who: str | None, plan: Plan) -> str:
        """The id by which `take` finds the plan. who: the token that has asked for it, if there are several tokens."""
        id = secrets.token_urlsafe(16)
        with self._lock:
            self._kept[id] = _Kept(action, who, plan, self._monotonic() + KEPT_S)
            while len(self._kept) > PLANS_MAX:
                del self._kept[next(iter(self._kept))]
        return id

    def take(self, id: object, action: str, who: str | None) -> Plan:
        """The plan, which nobody gets again. Raises InvalidArgument."""
        with self._lock:
            kept = self._kept.get(id) if isinstance(id, str) else None
            if kept is None or (kept.action, kept.who) != (action, who):
                raise InvalidArgument(
                    "this action was done already, or was not previewed here: nothing was changed. Review the current "
                    "state and try again"
                )
            del self._kept[str(id)]
        if self._monotonic() > kept.until:
            minutes = f"{KEPT_S / 60:.0f} minutes"
            raise InvalidArgument(
                f"the preview is more than {minutes} old: nothing was changed. Review the current state and try again"
            )
        return kept.plan
