"""`--log-format`: the log of a command on standard error, as text or as one JSON object a line.

Without the option nothing is set up: Python prints warnings and errors, without their fields. The choice is kept in the
environment variable PXRS_LOG_FORMAT, which the processes that a command starts inherit.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import typer

VARIABLE: Final = "PXRS_LOG_FORMAT"
FORMATS: Final = ("text", "json")
LEVEL: Final = logging.INFO
"""From which level on the records of pxrs are printed. Those of other libraries are printed from WARNING on."""
_OF_EVERY_RECORD: Final = frozenset([*vars(logging.makeLogRecord({})), "message", "asctime"])
"""The attributes that every log record has; its other attributes are the fields that were added with `extra`."""
_OF_EVERY_LINE: Final = frozenset(["time", "level", "logger", "text", "pid", "traceback"])


def chosen() -> str | None:
    """The format that was chosen; None if none was."""
    found = os.environ.get(VARIABLE)
    return found if found in FORMATS else None


def set_up(log_format: str | None) -> None:
    """Print the log in this format from now on. Raises BadParameter if there is no such format."""
    if log_format is None:
        return
    if log_format not in FORMATS:
        raise typer.BadParameter(f"{log_format!r}: choose from {', '.join(FORMATS)}", param_hint="--log-format")
    os.environ[VARIABLE] = log_format
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    logging.getLogger().handlers = [handler]
    logging.getLogger("pxrs").setLevel(LEVEL)


@contextmanager
def kept() -> Iterator[None]:
    """Within it, a command may call `set_up`. Afterwards logging is as it was before: the process may go on."""
    root, ours = logging.getLogger(), logging.getLogger("pxrs")
    handlers, level, variable = root.handlers, ours.level, os.environ.get(VARIABLE)
    try:
        yield
    finally:
        root.handlers = handlers
        ours.setLevel(level)
        if variable is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = variable


class JsonLines(logging.Formatter):
    """One JSON object a line: when, how serious, which logger, the text, and each field of the record. A field of the
    same name as one of these gets an underscore behind it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": record.getMessage(),
            "pid": record.process,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps({**line, **fields_of(record)}, default=str)


class TextLines(logging.Formatter):
    """A line for people: when, how serious, which logger, the text; then the lines of a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        from pxrs.wording import printable

        line = f"{_time(record)} {record.levelname.lower():<7} {record.name}: {printable(record.getMessage())}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What was added to the record with `extra`."""
    added = {name: value for name, value in vars(record).items() if name not in _OF_EVERY_RECORD}
    return {f"{name}_" if name in _OF_EVERY_LINE else name: value for name, value in added.items()}


def _time(record: logging.LogRecord) -> str:
    from pxrs.wording import rfc3339

    return rfc3339(int(record.created * 1e6)) or str(record.created)
