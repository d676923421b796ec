"""Errors as plain dictionaries that JSON can hold, for processes that share no Python objects.

    {"code": "log.offset-trimmed", "bases": ["log", "error"], "message": "t/0: offset 3 was removed ...",
     "fields": {"place": "t/0", "offset": 3, "first_offset": 10}, "notes": [], "cause": null}

`bases` has the codes of the classes above, nearest first. A receiver that does not know `code`, because it is an older
version, makes an error of the first class in `bases` that it knows and whose attributes were all sent. That error has
the sender's message and attributes, and the sender's code as `original_code`. The same happens if the receiver is newer
and its class has an attribute that the sender did not send.

JSON knows no tuples, sets or bytes; they are tagged: {"$tuple": [...]}, {"$set": [...]}, {"$bytes": base64}, and
{"$map": [[key, value], ...]} for a dictionary whose keys are not all text. An object of another kind is sent as its
`repr`, {"$repr": text}, and is a `Shown` for the receiver.
"""

from __future__ import annotations

import base64
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pxrs.errors import BY_CODE, PxrsError, RemoteCause
from pxrs.errors.general import described, restore

CAUSES_MAX: Final = 10
"""How many causes of causes are sent."""
_NOT_FIELDS: Final = ("__notes__", "original_code")
"""Attributes of an error that have a place of their own in the dictionary."""


class Shown:
    """An object of the sender that was sent as its `repr`."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shown) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


def to_dict(error: PxrsError) -> dict[str, Any]:
    """The error as a dictionary that JSON can hold."""
    return _to_dict(error, CAUSES_MAX)


def _to_dict(error: PxrsError, causes_left: int) -> dict[str, Any]:
    codes = [kind.code for kind in type(error).__mro__ if "code" in vars(kind) and issubclass(kind, PxrsError)]
    if error.original_code is not None:
        codes.insert(0, error.original_code)
    fields = {name: _plain(value) for name, value in error.state().items() if name not in _NOT_FIELDS}
    cause = described(error.__cause__) if causes_left else None
    return {
        "code": codes[0],
        "bases": codes[1:],
        "message": str(error),
        "fields": fields,
        "notes": list(getattr(error, "__notes__", [])),
        "cause": _cause(cause, causes_left),
    }


def _cause(cause: BaseException | None, causes_left: int) -> dict[str, Any] | None:
    if isinstance(cause, PxrsError):
        return _to_dict(cause, causes_left - 1)
    return {"kind": cause.kind, "message": cause.text} if isinstance(cause, RemoteCause) else None


def from_dict(data: Mapping[str, Any]) -> PxrsError:
    """The error that `to_dict` was given, or of the nearest base that this version knows: see above."""
    code, message = str(data.get("code", "error")), str(data.get("message", ""))
    fields = {
        name: _value(value)
        for name, value in dict(data.get("fields") or {}).items()
        if name.isidentifier() and not name.startswith("_") and not hasattr(PxrsError, name)
    }
    kind = _known((code, *map(str, data.get("bases") or ())), fields)
    error = restore(kind, (message,), fields, _cause_of(data.get("cause")))
    if kind.code != code:
        error.original_code = code
    for note in data.get("notes") or ():
        error.add_note(str(note))
    return error


def _known(codes: Iterable[str], fields: Mapping[str, Any]) -> type[PxrsError]:
    for code in codes:
        kind = BY_CODE.get(code)
        if kind is not None and all(name in fields for name in field_names(kind)):
            return kind
    return PxrsError


def field_names(kind: type[PxrsError]) -> list[str]:
    """The attributes that every error of this class has: the arguments of its constructor."""
    given = inspect.signature(kind.__init__).parameters.values()
    return [each.name for each in given if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)][1:]


def _cause_of(data: Mapping[str, Any] | None) -> BaseException | None:
    if not data:
        return None
    return from_dict(data) if "code" in data else RemoteCause(str(data.get("kind", "")), str(data.get("message", "")))


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, tuple):
        return {"$tuple": [_plain(each) for each in value]}
    if isinstance(value, set | frozenset):
        return {"$set": sorted(map(_plain, value), key=repr)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _plain(each) for key, each in value.items()}
        return {"$map": [[_plain(key), _plain(each)] for key, each in value.items()]}
    return {"$repr": repr(value)}


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(each) for each in plain]
    if not isinstance(plain, dict):
        return plain
    match plain:
        case {"$tuple": list(items)}:
            return tuple(_value(each) for each in items)
        case {"$set": list(items)}:
            return frozenset(_value(each) for each in items)
        case {"$bytes": str(text)}:
            return base64.b64decode(text)
        case {"$map": list(pairs)}:
            return {_value(key): _value(each) for key, each in pairs}
        case {"$repr": str(text)}:
            return Shown(text)
    return {key: _value(each) for key, each in plain.items()}
