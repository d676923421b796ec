"""The JSON objects that clients send, and the arguments of calls in them: each is checked before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pxrs.errors import InvalidArgument
from pxrs.remote import flight, wire

_MISSING: Any = object()
ITEMS_MAX: Final = 200_000
"""How many values a JSON object of a client may have, those of inner objects and lists included. Each takes up to a
hundred bytes of memory, and as little as two bytes of the message."""


def parse(data: flight.Bytes, what: str, bytes_max: int) -> dict[str, Any]:
    """The JSON object that a client sent. what: names it in the InvalidArgument that is raised if it is none, or is too
    large."""
    if len(data) > bytes_max:
        raise InvalidArgument(f"{what} has {len(data):,} bytes; the maximum is {bytes_max:,}")
    text = bytes(data)
    if sum(map(text.count, (b",", b"[", b"{"))) > ITEMS_MAX:  # those in texts count too, which are few
        raise InvalidArgument(f"{what} has more than {ITEMS_MAX:,} values: send it in several calls")
    try:
        return wire.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{what} is not one JSON object: {str(error)[:200]}") from error


class Given:
    """Reads the arguments of one call. Each method raises InvalidArgument if what was sent is of another type."""

    def __init__(self, call: str, found: Mapping[str, Any]) -> None:
        self.call, self.found = call, found

    def _get(self, name: str, kind: type | tuple[type, ...], what: str, default: Any = _MISSING) -> Any:
        value = self.found.get(name, default)
        if value is _MISSING:
            raise InvalidArgument(f"{self.call}: {name} is missing: send {what}")
        if value is default:
            return value
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InvalidArgument(f"{self.call}: {name} must be {what}")
        return value

    def text(self, name: str) -> str:
        value: str = self._get(name, str, "a string")
        return value

    def text_or_none(self, name: str) -> str | None:
        value: str | None = self._get(name, (str, type(None)), "a string or null", None)
        return value

    def flag(self, name: str) -> bool:
        value: bool = self._get(name, bool, "true or false", False)
        return value

    def whole(self, name: str) -> int:
        value: int = self._get(name, int, "an integer")
        return value

    def whole_or_none(self, name: str) -> int | None:
        value: int | None = self._get(name, (int, type(None)), "an integer or null", None)
        return value

    def number(self, name: str) -> float:
        value: float = self._get(name, (int, float), "a number")
        return value

    def wholes(self, name: str) -> list[int]:
        found = self._get(name, list, "a list of integers")
        if not all(type(each) is int for each in found):
            raise InvalidArgument(f"{self.call}: {name} must be a list of integers")
        return list(found)

    def partitions(self) -> list[int]:
        """The argument `partitions`, each once: what is done for each may take its time."""
        return list(dict.fromkeys(self.wholes("partitions")))

    def texts(self, name: str) -> list[str]:
        found = self._get(name, list, "a list of strings", [])
        if not all(isinstance(each, str) for each in found):
            raise InvalidArgument(f"{self.call}: {name} must be a list of strings")
        return list(found)

    def pairs(self, name: str) -> dict[int, int] | None:
        """A list of pairs of integers, as a dictionary; None if it was not sent, or is null."""
        found = self._get(name, (list, type(None)), "a list of pairs of integers, or null", None)
        if found is None:
            return None
        for each in found:
            if not isinstance(each, list) or len(each) != 2 or not all(type(number) is int for number in each):
                raise InvalidArgument(f"{self.call}: {name} must be a list of pairs of integers")
        return dict(found)

    def mapping(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self._get(name, dict, "an object", {})
        return found

    def versions(self, name: str) -> dict[str, int]:
        found = self.mapping(name)
        if not all(type(each) is int for each in found.values()):
            raise InvalidArgument(f"{self.call}: each version in {name} must be an integer")
        return found

    def values(self, name: str) -> dict[str, bytes]:
        try:
            return {key: wire.bytes_of(value) for key, value in self.mapping(name).items()}
        except ValueError as error:
            raise InvalidArgument(f"{self.call}: {name} has a value that is not a base64 string") from error
