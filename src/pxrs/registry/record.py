"""A value of a registry key as a frozen dataclass, stored as a JSON object with one member for each field."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

from pxrs.errors import RegistryCorrupt


@dataclass(frozen=True, slots=True)
class Record:
    """The base of such dataclasses."""

    def dump(self) -> bytes:
        """The value to store."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def load(cls, key: str, value: bytes) -> Self:
        """The record that was stored under this key. Raises RegistryCorrupt, which names the key. Members that this
        version has no field for are left out: a later version wrote them."""
        try:
            found = json.loads(value)
            return cls(**{name: found[name] for name in cls.__dataclass_fields__ if name in found})
        except (ValueError, TypeError, AttributeError) as error:
            raise RegistryCorrupt(key, f"it is no {cls.__name__.lower()}: {error}") from error
