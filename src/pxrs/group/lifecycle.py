"""The states of a member between `start` and the end, and the error that has ended it. No I/O, no thread, no clock.

    state      becomes    when
    ------     -------    ------------------------------------------------------------------------------------------
    JOINED     JOINED     its lease is lost: the next round joins again, as a new incarnation (X11)
    JOINED     AWAY       a handler has made no progress for `progress_timeout`: everything is given up (X13)
    AWAY       JOINED     the handler has returned (`come_back`): the next round joins again
    any        FAILED     a round raised an error that is not an outage, or a callback of the user raised: the member
                          leaves the group, and `check` raises the error on the user's threads
    any        CLOSING    `close` was called, or `close_later` in a callback: no round begins any more
    CLOSING    CLOSED     the member has left the group, with or without its last commit

FAILED and CLOSING exclude nothing: a failed member is still to be closed, which then has nothing to release.
"""

from __future__ import annotations

import threading


class Lifecycle:
    """Threads share it. Each field is written under the member's mutex, except `closing`, which is an event."""

    def __init__(self) -> None:
        self.is_away = False
        """AWAY: the member has left the group because a handler makes no progress."""
        self.closing = threading.Event()
        """CLOSING: set by `close` and `close_later`."""
        self.closes_itself = False
        """`close_later` was called: the member's own work leaves the group, because no `close` waits to do it."""
        self.is_closed = False
        """CLOSED."""
        self.error: BaseException | None = None
        """FAILED: what has ended this member."""
        self._unraised: BaseException | None = None
        """An error of a round, of a callback or of a close in the background, until `check` or `close` has raised
        it."""

    @property
    def first_error(self) -> BaseException | None:
        """The error because of which this member has ended or has to end; None if there is none. An error of a callback
        counts until `check` or `close` has raised it."""
        return self._unraised if self.error is None else self.error

    @property
    def has_unraised(self) -> bool:
        return self._unraised is not None

    def check(self) -> None:
        """Raise what has ended this member. For the user's threads: `close` does not raise it again."""
        if self.error is None:
            self.error = self._unraised
        if self.error is not None:
            if self._unraised is self.error:
                self._unraised = None
            raise self.error

    def note(self, error: BaseException) -> None:
        """An error that is to be raised by the next `check` or `close`; only the first one is kept."""
        if self._unraised is None:
            self._unraised = error

    def fail(self, error: BaseException) -> None:
        """The member has ended because of this error."""
        if error is not self.error:  # else `check` has raised it
            self.note(error)
        self.error = error

    def take_unraised(self) -> BaseException | None:
        """For `close`, which raises it."""
        error, self._unraised = self._unraised, None
        return error
