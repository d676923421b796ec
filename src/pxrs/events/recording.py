"""`Recorder`, which groups, queues, consumers and upkeep are given to record events, and the one place that logs
them."""

from __future__ import annotations

import getpass
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Final, Protocol

from pxrs.errors import OutcomeUnknown
from pxrs.events.model import Event, Json
from pxrs.events.names import kind_of, text_of
from pxrs.wording import printable

LOG_FIELDS: Final = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime"}
"""The attributes that every record of the log has. A field of the same name gets an underscore behind it."""


class Recorder(Protocol):
    """Records events. Never blocks on a disk or a network, and never raises because an event could not be stored."""

    def record(self, name: str, on_stored: Callable[[], None] | None = None, /, **fields: Json) -> None:
        """Log the event and keep it.

        on_stored: called on another thread once the event is stored; never if it is dropped. It must not block."""

    def audit(self, action: str, /, **fields: Json) -> None:
        """Record the action of an administrator, `audit.<action>`. who: by default the user of this process."""


class LoggedOnly:
    """Logs events and keeps none: for members and queues that were made without a hub."""

    def record(self, name: str, on_stored: Callable[[], None] | None = None, /, **fields: Json) -> None:
        log_event(Event(name, now_us(), fields))

    def audit(self, action: str, /, **fields: Json) -> None:
        self.record(f"audit.{action}", **{"who": user(), **fields})


LOGGED_ONLY: Final = LoggedOnly()


class Attempt:
    """What is known of an action while it is done."""

    has_effect = False
    """Whether a part of it is done."""


@contextmanager
def attempted(recorder: Recorder, action: str, **fields: Json) -> Iterator[Attempt]:
    """Around an action of an administrator. If it ends with an error although a part of it was done, or may have been
    (OutcomeUnknown), the action is recorded as `audit.cut_short`: nothing is changed without a line in `_audit`."""
    attempt = Attempt()
    try:
        yield attempt
    except BaseException as error:  # also of an interrupt
        if attempt.has_effect or isinstance(error, OutcomeUnknown):
            told = {"error": str(error) or type(error).__name__, "error_type": type(error).__name__}
            recorder.audit("cut_short", action=action, **fields, **told)
        raise


def log_event(event: Event) -> None:
    """Write the event's one line to the log, with its name and its fields as attributes."""
    kind = kind_of(event.name)
    logger = logging.getLogger(kind.logger)
    if logger.isEnabledFor(kind.level):
        text = printable(text_of(event.name, event.fields.items()))
        logger.log(kind.level, "%s", text, extra={"event": event.name, **_safe(event.fields)})


def _safe(fields: Mapping[str, Json]) -> dict[str, Json]:
    return {f"{name}_" if name in LOG_FIELDS or name == "event" else name: value for name, value in fields.items()}


def now_us() -> int:
    """The time of day in microseconds since 1970."""
    return time.time_ns() // 1_000


@cache
def user() -> str:
    """Who runs this process: user@host."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container without an entry for the user id
        name = str(os.getuid()) if hasattr(os, "getuid") else "unknown"
    return f"{name}@{socket.gethostname()}"
