"""The exception of a handler as bounded text, to be logged, shown, and stored with the message or item that failed.

The text of an exception may have megabytes, its traceback thousands of frames, and either may have characters that
UTF-8 cannot encode. So `failure_of` cuts and escapes them: storing a failure must not fail itself.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

TEXT_CHARACTERS_MAX: Final = 2_000
TRACEBACK_CHARACTERS_MAX: Final = 2_000
TYPE_CHARACTERS_MAX: Final = 200
_LINE_CHARACTERS_MAX: Final = 400
_FRAMES_MAX: Final = 50
_LEFT_OUT: Final = "... {} lines omitted"
_OWN_CODE: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as text, or the text of a failure that was no exception."""

    text: str
    """Its class and its message, as the last line of a traceback has them."""
    type: str = ""
    """The name of its class, with the module unless it is a built-in one. Empty if nothing was raised."""
    traceback: str = ""
    """Where it was raised, the innermost frames last, with its causes. What is too long was left out at the front."""

    def followed_by(self, what: str, error: BaseException) -> Failure:
        """The same failure, with the text of a second error: one that was raised while the first one was handled."""
        second = failure_of(error).text
        room = max(0, TEXT_CHARACTERS_MAX - len(second) - len(what) - 4)
        return Failure(f"{_shortened(self.text, room)}; {what}: {second}", self.type, self.traceback)


def failure_of(error: BaseException) -> Failure:
    """The exception, bounded. The frames of pxrs that called the user's code are left out."""
    start = error.__traceback__
    while start is not None and start.tb_next is not None and start.tb_frame.f_code.co_filename.startswith(_OWN_CODE):
        start = start.tb_next
    found = traceback.TracebackException(type(error), error, start, limit=-_FRAMES_MAX, compact=True)
    lines = [_shortened(line, _LINE_CHARACTERS_MAX) for part in found.format() for line in part.splitlines()]
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    text = "".join(found.format_exception_only()).strip()
    return Failure(
        _shortened(text, TEXT_CHARACTERS_MAX),
        _shortened(name, TYPE_CHARACTERS_MAX),
        last_lines("\n".join(lines), TRACEBACK_CHARACTERS_MAX),
    )


def place_of(error: BaseException) -> Hashable:
    """The class of an exception and the line that raised it: the kind by which `LimitedLog` counts failures."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return type(error), None if at is None else (at.tb_frame.f_code.co_filename, at.tb_lineno)


def last_lines(text: str, characters_max: int) -> str:
    """The text, or if it is too long as many of its last lines as fit, below a line that says how many are missing."""
    if len(text) <= characters_max:
        return text
    lines = text.split("\n")
    start, room = len(lines), characters_max - len(_LEFT_OUT.format(len(lines)))
    while start and len(lines[start - 1]) < room:
        start -= 1
        room -= len(lines[start]) + 1
    return "\n".join([_LEFT_OUT.format(start), *lines[start:]]) if room >= 0 else ""


def _shortened(text: str, characters_max: int) -> str:
    """The text, cut to this length. Lone surrogates, which file names may have and UTF-8 cannot encode, are escaped."""
    text = text[: characters_max + 1].encode(errors="backslashreplace").decode()
    return text if len(text) <= characters_max else text[: max(0, characters_max - 4)] + " ..."
