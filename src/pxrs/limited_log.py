"""Logging of events that may repeat without end: a few records of each kind in a minute, then a count of the rest.

A handler that fails on every message, or a disk that stays full, would otherwise write the same record thousands of
times. Nothing is left out silently: for each kind, the number of records that were left out is logged when the minute
is over, with the text of the last one, or by `flush`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from pxrs.wording import counted

RECORDS_MAX: Final = 5
WINDOW_S: Final = 60.0
KINDS_MAX: Final = 1_000
"""How many kinds are distinguished. If more have records in one window, the further ones share one limit."""
_OTHERS: Final = object()
"""The kind that stands for all kinds above KINDS_MAX."""


@dataclass(slots=True)
class _Window:
    """What was logged of one kind since the first record of the window."""

    ends_at: float
    logged: int = 0
    left_out: int = 0
    level: int = logging.WARNING
    message: str = ""
    """Level, message, args and extra are of the last record that was left out."""
    args: tuple[object, ...] = ()
    extra: Mapping[str, object] = field(default_factory=dict)


class LimitedLog:
    """Wraps a logger. Any thread may call it.

        log = LimitedLog(logging.getLogger(__name__))
        log.log("disk full", logging.WARNING, "cannot append to %s: %s", topic, error, extra={"topic": topic})

    The owner calls `flush` when it is closed, so that the last counts are logged too."""

    def __init__(
        self,
        logger: logging.Logger,
        *,
        records_max: int = RECORDS_MAX,
        window_s: float = WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """records_max: how many records of each kind are logged within `window_s` seconds. clock: replaced by tests."""
        self._logger, self._clock = logger, clock
        self._records_max, self._window_s = records_max, window_s
        self._lock = threading.Lock()
        self._windows: dict[Hashable, _Window] = {}
        self._timer: threading.Timer | None = None
        """Runs while a window has records that were left out: it logs their count when the window ends."""

    def log(
        self,
        kind: Hashable,
        level: int,
        message: str,
        *args: object,
        exc_info: BaseException | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> bool:
        """Log a record, unless `records_max` of this kind were logged within the window. Whether it was logged."""
        if not self._logger.isEnabledFor(level):
            return False
        with self._lock:
            over = self._take_over(self._clock())
            window = self._window(kind)
            is_logged = window.logged < self._records_max
            if is_logged:
                window.logged += 1
            else:
                window.left_out += 1
                window.level, window.message, window.args, window.extra = level, message, args, extra or {}
                self._start_timer()
        # Outside the lock: a handler of the logging may be slow, or log through this object itself.
        self._tell(over)
        if is_logged:
            self._logger.log(level, message, *args, exc_info=exc_info, extra=extra, stacklevel=2)
        return is_logged

    def flush(self) -> None:
        """Log the counts of all records that were left out and not yet counted in a record."""
        with self._lock:
            windows, self._windows = list(self._windows.values()), {}
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        self._tell(window for window in windows if window.left_out)

    def _window(self, kind: Hashable) -> _Window:
        if kind not in self._windows and len(self._windows) >= KINDS_MAX:
            kind = _OTHERS
        return self._windows.setdefault(kind, _Window(self._clock() + self._window_s))

    def _take_over(self, now: float) -> list[_Window]:
        """Forget the windows that have ended; return those of them that left something out."""
        ended = {kind: window for kind, window in self._windows.items() if now >= window.ends_at}
        for kind in ended:
            del self._windows[kind]
        return [window for window in ended.values() if window.left_out]

    def _start_timer(self) -> None:
        """Start a timer that calls `_on_time` when the first window ends that has left records out."""
        if self._timer is not None:
            return
        times = [window.ends_at for window in self._windows.values() if window.left_out]
        if times:
            self._timer = threading.Timer(max(0.0, min(times) - self._clock()), self._on_time)
            self._timer.name, self._timer.daemon = "pxrs-limited-log", True
            self._timer.start()

    def _on_time(self) -> None:
        with self._lock:
            if self._timer is not threading.current_thread():
                return  # `flush` came first
            self._timer = None
            over = self._take_over(self._clock())
            self._start_timer()
        self._tell(over)

    def _tell(self, windows: Iterable[_Window]) -> None:
        for window in windows:
            last = logging.LogRecord("", window.level, "", 0, window.message, window.args, None).getMessage()
            count = "1 similar record was" if window.left_out == 1 else f"{window.left_out:,} similar records were"
            extra = {**window.extra, "left_out": window.left_out}
            self._logger.log(
                window.level, "%s (%s not logged; this is the last)", last, count, extra=extra, stacklevel=3
            )


class Outage:
    """Logs failures of something that is tried again and again until it works, such as a write to a full disk.

        outage = Outage(logger, "group g, member m", extra={"group": "g"})
        while True:
            try:
                step()
            except StorageFull as error:
                outage.failed(error)
            else:
                outage.worked()

    The first failure of each class of error is logged, then at most one a minute, with the number of those in between;
    and once it is over. It is over when a step works and none has failed for `quiet_s` seconds: some steps may work
    while others fail. Any thread may call it."""

    def __init__(
        self,
        logger: logging.Logger,
        what: str,
        *,
        level: int = logging.WARNING,
        extra: Mapping[str, object] | None = None,
        every_s: float = WINDOW_S,
        quiet_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """what: the step that fails; each record begins with it. level, extra: of the records. clock: for tests."""
        self._logger, self._what, self._level, self._extra, self._clock = logger, what, level, dict(extra or {}), clock
        self._every_s, self._quiet_s = every_s, quiet_s
        self._lock = threading.Lock()
        self._logged_at: dict[type[BaseException], float] = {}
        """When a failure of each exception class was last logged, in this outage or an earlier one."""
        self._since: float | None = None
        """When the present outage began; None if the last step succeeded."""
        self._failed_at = 0.0
        self._failures = self._left_out = 0
        self._is_logged = False
        """Whether a failure of the present outage was logged. Only then its end is logged."""

    def failed(self, error: BaseException) -> None:
        """A step failed, and will be tried again."""
        with self._lock:
            now = self._failed_at = self._clock()
            self._since = now if self._since is None else self._since
            self._failures += 1
            is_logged = now >= self._logged_at.get(type(error), -self._every_s + now) + self._every_s
            if not is_logged:
                self._left_out += 1
                return
            self._logged_at[type(error)] = now
            left_out, self._left_out, self._is_logged = self._left_out, 0, True
        were = "was" if left_out == 1 else "were"
        more = f" ({counted(left_out, 'earlier failure')} {were} not logged)" if left_out else ""
        fields = {**self._extra, "error_type": type(error).__name__, "left_out": left_out}
        self._logger.log(self._level, "%s: %s; will try again%s", self._what, error, more, extra=fields, stacklevel=2)

    def worked(self) -> None:
        """A step worked."""
        if self._since is None:  # read without the lock: after a failure on another thread the step is called again
            return
        with self._lock:
            if self._since is None or self._clock() < self._failed_at + self._quiet_s:
                return
            failures, lasted_s, is_logged = self._failures, self._failed_at - self._since, self._is_logged
            self._since = None
            if is_logged:  # if nothing was logged, the failures are counted in the next record
                self._failures = self._left_out = 0
            self._is_logged = False
        if is_logged:
            fields = {**self._extra, "failures": failures}
            text = "%s: works again; it failed %s in %.1f s"
            times = counted(failures, "time")
            self._logger.log(self._level, text, self._what, times, lasted_s, extra=fields, stacklevel=2)
