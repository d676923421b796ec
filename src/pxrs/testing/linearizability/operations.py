"""The operations of a history, and the same as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

ABSENT: Final = 0
"""The version of a key that does not exist."""
UNSEEN: Final = -1
"""The version of an unknown commit that nobody ever observed. It equals no version in the history."""

Outcome = Literal["ok", "conflict", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Get:
    """A read of one key. `ret=None`: it never returned, and says nothing."""

    client: int
    call: float
    ret: float | None
    key: str
    value: bytes | None = None
    version: int = ABSENT

    def __post_init__(self) -> None:
        _require_order(self.call, self.ret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A compare-and-commit. `versions` are those returned, for the keys in `put`, when the outcome is ok."""

    client: int
    call: float
    ret: float | None
    expect: Mapping[str, int] = field(default_factory=dict)
    put: Mapping[str, bytes] = field(default_factory=dict)
    delete: tuple[str, ...] = ()
    outcome: Outcome = "ok"
    versions: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_order(self.call, self.ret)
        if self.outcome not in ("ok", "conflict", "unknown"):
            raise ValueError(f"outcome {self.outcome!r} is not one of ok, conflict, unknown")
        if self.ret is None and self.outcome != "unknown":
            raise ValueError(f"a commit that never returned has outcome unknown, not {self.outcome}")
        if both := set(self.put) & set(self.delete):
            raise ValueError(f"keys both put and deleted in one commit: {sorted(both)}")

    @property
    def keys(self) -> set[str]:
        return {*self.expect, *self.put, *self.delete}


Operation = Get | Commit


def dump(history: Iterable[Operation]) -> str:
    """One JSON object per line, in the order given. `load` reads it back to equal operations."""
    return "".join(json.dumps(_to_json(operation)) + "\n" for operation in history)


def load(text: str) -> list[Operation]:
    """Read what `dump` wrote."""
    return [_from_json(json.loads(line)) for line in text.splitlines() if line.strip()]


def _to_json(operation: Operation) -> dict[str, Any]:
    common = {"client": operation.client, "call": operation.call, "ret": operation.ret}
    if isinstance(operation, Get):
        value = None if operation.value is None else _text(operation.value)
        return {"op": "get", **common, "key": operation.key, "value": value, "version": operation.version}
    return {
        "op": "commit",
        **common,
        "expect": dict(operation.expect),
        "put": {key: _text(value) for key, value in operation.put.items()},
        "delete": list(operation.delete),
        "outcome": operation.outcome,
        "versions": dict(operation.versions),
    }


def _from_json(fields: dict[str, Any]) -> Operation:
    kind = fields.pop("op")
    if kind == "get":
        value = fields.pop("value")
        return Get(**fields, value=None if value is None else _bytes(value))
    if kind == "commit":
        put = {key: _bytes(value) for key, value in fields.pop("put").items()}
        return Commit(**fields | {"put": put, "delete": tuple(fields["delete"])})
    raise ValueError(f"unknown operation {kind!r}")


# Latin-1 maps every byte to the character of that number: lossless, and short test values stay readable.
def _text(value: bytes) -> str:
    return value.decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")


def _require_order(call: float, ret: float | None) -> None:
    if ret is not None and ret < call:
        raise ValueError(f"an operation returned at {ret}, before its call at {call}")


def returned(operation: Operation) -> float:
    """When the operation returned."""
    assert operation.ret is not None, "only operations with a known outcome have a return"
    return operation.ret


def version_text(version: int) -> str:
    """A version, for people."""
    return {ABSENT: "absent", UNSEEN: "at a version never seen"}.get(version, f"@{version}")


def describe(operation: Operation, since: float = 0.0) -> str:
    """The operation in one line. since: the time that the times in it are counted from."""
    until = "..." if operation.ret is None else f"{operation.ret - since:.6f}"
    head = f"client {operation.client} [{operation.call - since:.6f}, {until}]"
    if isinstance(operation, Get):
        seen = "absent" if operation.value is None else f"{operation.value!r} @{operation.version}"
        return f"{head} get {operation.key} -> {seen}"
    parts = [f"expect {key} {version_text(version)}" for key, version in operation.expect.items()]
    parts += [f"put {key}={value!r}" for key, value in operation.put.items()]
    parts += [f"delete {key}" for key in operation.delete]
    versions = "".join(f" {key}@{version}" for key, version in operation.versions.items())
    return f"{head} commit {', '.join(parts)} -> {operation.outcome}{versions}"
