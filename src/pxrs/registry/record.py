"""A value of a registry key as a frozen dataclass, stored as a JSON object with one member for each field."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final, Self

from pxrs.errors import RegistryCorrupt

_decode: Final = json.JSONDecoder().decode


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
            found = _decode(value.decode())
            fields = cls.__dataclass_fields__
            if not found.keys() <= fields.keys():
                found = {name: value for name, value in found.items() if name in fields}
            return cls(**found)
        except (ValueError, TypeError, AttributeError) as error:
            raise RegistryCorrupt(key, f"not a valid {cls.__name__.lower()} record: {error}") from error
