"""Which of the open hubs of one directory is the janitor: a claim in the registry with a lease, like a leader's.

Taking the claim is one commit:

    expects   the janitor key in the version that was read, and `alive/<incarnation in it>` ABSENT
    puts      the janitor key with a new incarnation and term + 1, and `alive/<new incarnation>` under a new lease

So of two hubs that find the janitor gone, one gets a Conflict. A candidate takes a lease only when it has found the
janitor gone, so a candidate that waits costs the registry two reads at a time and no lease.

What a hub is, and what it may do:

| role | when | duties |
|---|---|---|
| SOLE | its log belongs to this process alone (memory:) | all |
| ELECTED | it holds the claim, and its lease lives | all |
| CANDIDATE | another hub holds the claim, and that one's lease lives | none |
| APART | its registry is not shared with others, cannot be reached, or is not the hub's | those without registry |
| BARRED | this process may not write to the directory, or a server keeps the log (W4) | none |

The janitor key's version is the fence: what the janitor writes about its rounds expects it and names the lease.
"""

from __future__ import annotations

import enum
import os
import socket
import uuid
from dataclasses import dataclass
from typing import Final

from pxrs import disk
from pxrs.errors import (
    Closed,
    Conflict,
    LeaseExpired,
    LogNotWritable,
    OutcomeUnknown,
    PxrsError,
    RegistryUnavailable,
)
from pxrs.hub_parts import HubParts
from pxrs.registry.contract import ABSENT, Entry, Registry
from pxrs.registry.lease import Lease
from pxrs.upkeep.records import JanitorClaim, RoundReport, UpkeepKeys

LEASE_TTL_S: Final = 15.0
"""The ttl of the janitor's lease: for this time after its last renewal, no other hub is elected."""


class Role(enum.Enum):
    """See the table above."""

    SOLE = "sole"
    ELECTED = "elected"
    CANDIDATE = "candidate"
    APART = "apart"
    BARRED = "barred"

    @property
    def duties(self) -> str:
        return {"sole": "all", "elected": "all", "apart": "without registry"}.get(self.value, "none")


@dataclass(frozen=True, slots=True)
class Standing:
    """What `Election.stand` found."""

    role: Role
    reason: str = ""
    """Why the role is APART or BARRED."""
    error: PxrsError | None = None
    """The error behind the reason, if there is one: an outage of the registry, WrongRegistry, LogNotWritable."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the registry says about the janitor of a hub."""

    claim: JanitorClaim | None = None
    is_alive: bool = False
    report: RoundReport | None = None


@dataclass(frozen=True, slots=True)
class _Held:
    """The claim of this process."""

    keys: UpkeepKeys
    claim: JanitorClaim
    version: int
    """The version of the janitor key: the fence."""
    lease: Lease


class Election:
    """Takes, keeps and gives up the claim of one open hub. Used by one thread at a time."""

    def __init__(self, parts: HubParts) -> None:
        self._parts = parts
        self._held: _Held | None = None

    def stand(self) -> Standing:
        """Keep the claim, or take it if the janitor is gone. Returns the role of this hub until the next call."""
        parts = self._parts
        if parts.log.is_kept_by_server:
            kept = LogNotWritable(parts.url, f"{parts.url}: the server does the upkeep; clients cannot")
            return Standing(Role.BARRED, str(kept), kept)
        if parts.log.folder is None:
            return Standing(Role.SOLE)
        if (refusal := disk.write_refusal(parts.log.folder)) is not None:
            self.resign()  # the directory may have been writable when the claim was taken
            error = disk.log_error(refusal)
            return Standing(Role.BARRED, str(error), error)
        try:
            keys = self._keys()
            if keys is None:
                self.resign()
                return Standing(Role.APART, "the hub has no registry yet that its processes share")
            registry = parts.registry.get()
            is_janitor = self._is_held(registry, keys) or self._take(registry, keys)
            return Standing(Role.ELECTED if is_janitor else Role.CANDIDATE)
        except Closed:
            raise
        except PxrsError as raised:
            # A read that failed says nothing about the claim: it is kept while its lease lives, which keeps all others
            # from being elected. The outcome of a claim may be unknown; without its lease it has no effect.
            if not (isinstance(raised, RegistryUnavailable) and self._held is not None and self._held.lease.alive):
                self.resign()
            return Standing(Role.APART, str(raised), raised)

    def _keys(self) -> UpkeepKeys | None:
        """The keys of the election; None if no election is possible: no registry that other processes share, or no id
        of the hub."""
        registry, belonging = self._parts.registry, self._parts.belonging
        if self._parts.log.is_kept_by_server:  # a client: it is never elected, and shows who was
            home = self._parts.check_registry()
        elif belonging is None or registry.is_in_memory or registry.is_missing:
            return None
        else:
            home = belonging.check()
        return None if home is None else UpkeepKeys(home.hub)

    def _is_held(self, registry: Registry, keys: UpkeepKeys) -> bool:
        """Whether this process still is the janitor. If not, it resigns: its lease must not outlive its claim."""
        held = self._held
        if held is None:
            return False
        if held.lease.alive and held.keys.janitor == keys.janitor:
            entry = registry.get(keys.janitor)
            if entry is not None and entry.version == held.version:
                return True
        self.resign()
        return False

    def _take(self, registry: Registry, keys: UpkeepKeys) -> bool:
        entry = registry.get(keys.janitor)
        last = None if entry is None else JanitorClaim.load(entry.key, entry.value)
        if last is not None and registry.get(keys.alive(last.incarnation)) is not None:
            return False
        now = self._parts.log.clock.wall_time_us() / 1e6
        term = 1 if last is None else last.term + 1
        claim = JanitorClaim(uuid.uuid4().hex, term, socket.gethostname(), os.getpid(), now)
        expect = {keys.janitor: ABSENT if entry is None else entry.version}
        if last is not None:
            expect[keys.alive(last.incarnation)] = ABSENT
        lease = registry.lease(LEASE_TTL_S)
        try:
            versions = registry.commit(
                expect, {keys.janitor: claim.dump()}, ephemeral={keys.alive(claim.incarnation): b""}, lease=lease
            )
        except (Conflict, LeaseExpired):
            # Another hub was elected, or the store was too slow: the next call looks again.
            lease.close()
            return False
        except BaseException:
            lease.close()
            raise
        self._held = _Held(keys, claim, versions[keys.janitor], lease)
        return True

    def report(self, report: RoundReport) -> bool:
        """Write the report of a round, fenced by the claim. False if this process is not the janitor any more; then it
        resigns."""
        held = self._held
        if held is None:
            return False
        try:
            self._parts.registry.get().commit(
                {held.keys.janitor: held.version},
                {held.keys.report: report.bounded().dump()},
                lease=held.lease,
                quiet=True,
            )
        except (Conflict, LeaseExpired):
            self.resign()
            return False
        except OutcomeUnknown:
            # The report is about this round, whenever it is applied, and the fence refuses it after another election.
            return True
        return True

    @property
    def incarnation(self) -> str:
        """The incarnation of this process's claim; empty if it has none."""
        return "" if self._held is None else self._held.claim.incarnation

    def resign(self) -> None:
        """Give the claim up: the next hub that looks is elected."""
        held, self._held = self._held, None
        if held is not None:
            held.lease.close()

    def look(self) -> Known:
        """What the registry says about the janitor, without taking the claim. Empty if no election is possible.

        Raises WrongRegistry, and what the registry raises."""
        keys = self._keys()
        if keys is None:
            return Known()
        registry = self._parts.registry.get()
        entry = registry.get(keys.janitor)
        if entry is None:
            return Known()
        claim = JanitorClaim.load(entry.key, entry.value)
        is_alive = registry.get(keys.alive(claim.incarnation)) is not None
        return Known(claim, is_alive, _report_of(registry.get(keys.report)))


def _report_of(entry: Entry | None) -> RoundReport | None:
    return None if entry is None else RoundReport.load(entry.key, entry.value)
