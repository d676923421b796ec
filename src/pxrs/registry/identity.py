"""The id that a registry holds in itself. Two registries, or two namespaces of one store, have different ids."""

from __future__ import annotations

import contextlib
import uuid
from typing import Final

from pxrs.errors import Conflict
from pxrs.registry.contract import ABSENT, Registry

REGISTRY_ID: Final = "spark/registry"
"""Where the id is kept. The name is that of version 0.1, in which only the Spark sink asked for it."""


def fingerprint(registry: Registry) -> str:
    """The id of the registry; whoever asks first creates it. Addresses cannot serve as ids, because one store can be
    addressed in many ways."""
    while (found := known_fingerprint(registry)) is None:
        with contextlib.suppress(Conflict):  # another process created the id meanwhile; the loop reads it
            registry.commit({REGISTRY_ID: ABSENT}, {REGISTRY_ID: uuid.uuid4().hex.encode()})
    return found


def known_fingerprint(registry: Registry) -> str | None:
    """As `fingerprint`, but None if the registry holds no id yet. Writes nothing."""
    entry = registry.get(REGISTRY_ID)
    return None if entry is None else entry.value.decode()
