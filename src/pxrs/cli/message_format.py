"""How `pxrs tail` prints a message: as text for people, as JSON, by a format of the user's, or the value alone."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from string import Formatter
from typing import Final

from pxrs.cli.message_json import line_of
from pxrs.cli.terminal import data_line, data_text, is_terminal
from pxrs.model import Message
from pxrs.wording import printable, rfc3339

Writer = Callable[[Message], bytes]


def as_text(message: Message) -> bytes:
    """Partition, offset and time, the key if there is one, and the value."""
    place = f"{message.partition}/{message.offset} {_time_text(message)}"
    return _encoded(f"{data_line(place, message.key, message.value)}\n")


def as_json(message: Message) -> bytes:
    return f"{line_of(message)}\n".encode()


def as_raw(message: Message) -> bytes:
    """The bytes of the value as they are, and a line feed; an empty line for a message without a value."""
    return (message.value or b"") + b"\n"


def by_format(text: str) -> Writer:
    """A writer of messages by a format such as `{partition} {key}={value}\\n`. Raises ValueError."""
    parts: list[Callable[[Message], bytes]] = []
    for literal, name, spec, conversion in Formatter().parse(_unescaped(text)):
        if literal:
            parts.append(_constant(literal.encode(errors="surrogateescape")))
        if name is None:
            continue
        if spec or conversion or name not in _FIELDS:
            wrong = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise ValueError(f"unknown field {{{wrong}}}; choose from {', '.join(f'{{{each}}}' for each in _FIELDS)}")
        parts.append(_FIELDS[name])
    return lambda message: b"".join([part(message) for part in parts])


def _constant(data: bytes) -> Writer:
    return lambda message: data


def _data(data: bytes | None) -> bytes:
    """As it is stored; on a terminal without what that would act upon."""
    return _encoded(printable(data_text(data))) if is_terminal() else data or b""


def _length(data: bytes | None) -> bytes:
    return b"%d" % (-1 if data is None else len(data))


def _headers(message: Message) -> bytes:
    return b",".join(_data(f"{name}=".encode() + (data or b"")) for name, data in message.headers or ())


_FIELDS: Final[dict[str, Writer]] = {
    "topic": lambda message: _data(message.topic.encode()),
    "partition": lambda message: b"%d" % message.partition,
    "offset": lambda message: b"%d" % message.offset,
    "time": lambda message: _time_text(message).encode(),
    "timestamp": lambda message: b"%d" % message.timestamp,
    "key": lambda message: _data(message.key),
    "value": lambda message: _data(message.value),
    "key_bytes": lambda message: _length(message.key),
    "value_bytes": lambda message: _length(message.value),
    "headers": _headers,
}
_ESCAPE: Final = re.compile(r"\\(?:([nrt0\\])|x([0-9a-fA-F]{2}))")
_ESCAPED: Final = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "\\": "\\"}


def _unescaped(text: str) -> str:
    """The text with `\\n` and the like replaced. A byte such as `\\xff` becomes a lone surrogate, as in file names."""

    def meant(found: re.Match[str]) -> str:
        if found[1]:
            return _ESCAPED[found[1]]
        return bytes([int(found[2], 16)]).decode(errors="surrogateescape")

    return _ESCAPE.sub(meant, text)


def _time_text(message: Message) -> str:
    """In RFC 3339. The sender sets the time of a message, which may be beyond the calendar."""
    return rfc3339(message.timestamp) or f"{message.timestamp}us"


def _encoded(text: str) -> bytes:
    return text.encode(getattr(sys.stdout, "encoding", None) or "utf-8", "backslashreplace")
