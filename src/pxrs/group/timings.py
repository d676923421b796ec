"""How long a member waits for what: `Timings`, which users give as arguments of a consumer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pxrs import arguments
from pxrs.errors import InvalidGroup
from pxrs.registry.lease import LEASE_TTL_MIN

LEASE_TTL_DEFAULT: Final = 10.0
HANDOVER_TIMEOUT_DEFAULT: Final = 30.0
PROGRESS_TIMEOUT_DEFAULT: Final = 300.0
COMMIT_INTERVAL_DEFAULT: Final = 1.0


@dataclass(frozen=True, slots=True)
class Timings:
    """In seconds."""

    lease_ttl: float = LEASE_TTL_DEFAULT
    """How long after the last renewal of its lease a member counts as dead."""
    handover_timeout: float = HANDOVER_TIMEOUT_DEFAULT
    """How long this member may take to finish what it has in hand before a partition is taken from it."""
    progress_timeout: float | None = PROGRESS_TIMEOUT_DEFAULT
    """How long a handler may take for one message before its member gives up its partitions. None: any time."""
    commit_interval: float = COMMIT_INTERVAL_DEFAULT
    """How often the checkpoints of what is done are written."""

    def __post_init__(self) -> None:
        arguments.seconds(InvalidGroup, "lease_ttl", self.lease_ttl, LEASE_TTL_MIN, arguments.DAY_S)
        for name in ("handover_timeout", "progress_timeout", "commit_interval"):
            value = getattr(self, name)
            if value is not None or name != "progress_timeout":
                arguments.seconds(InvalidGroup, name, value, 0, arguments.DAY_S, above=True)
        if self.lease_ttl < LEASE_TTL_MIN:
            raise InvalidGroup(
                f"lease_ttl is {self.lease_ttl!r}: no store grants a lease for less than {LEASE_TTL_MIN} s"
            )
