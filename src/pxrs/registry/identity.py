"""The id by which a registry is told from others."""

from __future__ import annotations

import contextlib
import uuid
from typing import Final

from pxrs.errors import Conflict
from pxrs.registry.contract import ABSENT, Registry

_KEY: Final = "spark/registry"
"""Where the id is kept. The name is that of version 0.1, in which only the Spark sink asked for it."""


def fingerprint(registry: Registry) -> str:
    """Tells two registries apart, or two namespaces of one: an id that the registry holds itself, made by whoever asks
    first. Addresses cannot tell them apart, because one store can be addressed in many ways."""
    while (found := known_fingerprint(registry)) is None:
        with contextlib.suppress(Conflict):  # somebody else was first
            registry.commit({_KEY: ABSENT}, {_KEY: uuid.uuid4().hex.encode()})
    return found


def known_fingerprint(registry: Registry) -> str | None:
    """As `fingerprint`, but None if the registry holds no id yet. Writes nothing."""
    entry = registry.get(_KEY)
    return None if entry is None else entry.value.decode()
