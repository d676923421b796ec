"""A process that takes items: a lease, a key that lives as long as the lease, and slots for outcomes.

What a taker has in flight hangs on its key: while that is there, nobody else touches it, however long a handler
works; when it is gone, whoever sweeps the queue gives the items back.

Slots settle what a lost reply leaves open (R5). Each commit of a transaction also writes its id into a slot of its own,
expecting the slot as it was. Who must know what became of the commit writes "aborted" there, expecting the same: one of
the two wins, also if the other is still on its way. A slot is used again, so that outcomes leave nothing behind but a
few keys for each taker, which go with it, or an hour after a sweeper has seen that it is gone. That hour is counted on
one machine's clock: the clocks of two are never compared."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from pxrs.errors import (
    Conflict,
    LeaseExpired,
    OutcomeLost,
    OutcomeUnknown,
    PxrsError,
    RegistryCorrupt,
    RegistryUnavailable,
)
from pxrs.queue.records import OUTCOMES, TAKERS
from pxrs.registry.contract import ABSENT, Entry, Registry

OUTCOME_KEPT_S: Final = 3_600.0
SETTLE_ATTEMPTS: Final = 5
_CLOSE_KEYS_MAX: Final = 50
_ANCIENT_S: Final = 7 * 86_400.0


@dataclass(slots=True)
class Slot:
    key: str
    version: int = ABSENT
    is_doubted: bool = False
    """A request may be on its way that expects it as it once was: it is not deleted while the lease lives."""
    sent_at: float | None = None
    """When a commit that writes it was last sent, on the registry's clock; None: never."""

    def committed(self, transaction: str) -> bytes:
        return _outcome(transaction, "committed")


class Taker:
    """Made when a process first needs it; made anew when its lease is lost."""

    def __init__(self, registry: Registry, ttl: float) -> None:
        self.id = uuid.uuid4().hex
        self.key = f"{TAKERS}{self.id}"
        self._registry = registry
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self._slots_count = 0
        self.lease = registry.lease(ttl)
        about = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        try:
            registry.commit({self.key: ABSENT}, ephemeral={self.key: json.dumps(about).encode()}, lease=self.lease)
        except (OutcomeUnknown, LeaseExpired) as error:  # its lease too may end before that, as after a stop
            self.lease.close()
            raise RegistryUnavailable(f"{registry.url}: it is not known whether this process is registered") from error
        except BaseException:
            self.lease.close()
            raise

    @property
    def is_alive(self) -> bool:
        return self.lease.alive

    def slot(self) -> Slot:
        """One that no other transaction uses now."""
        with self._lock:
            if self._free:
                return self._free.pop()
            self._slots_count += 1
            return Slot(f"{OUTCOMES}{self.id}-{self._slots_count}")

    def give_back(self, slot: Slot) -> None:
        """Its transaction's outcome is known."""
        with self._lock:
            self._free.append(slot)

    def close(self) -> None:
        """Leave: nothing is in flight here any more, or it is given up."""
        try:
            with self._lock:
                used = [slot for slot in self._free if slot.version != ABSENT and not slot.is_doubted]
            for at in range(0, len(used), _CLOSE_KEYS_MAX):
                some = used[at : at + _CLOSE_KEYS_MAX]
                expect = {slot.key: slot.version for slot in some}
                self._registry.commit(expect, delete=list(expect), lease=self.lease, quiet=True)
        except PxrsError:
            pass  # they are swept an hour after this taker's end
        finally:
            self.lease.close()


def settle(registry: Registry, slot: Slot, transaction: str) -> bool:
    """Whether the transaction was committed. If it was not, it never will be. Raises OutcomeLost if nobody can tell,
    and RegistryCorrupt if what is on record is damaged.

    No lease is named: what decides is the slot alone."""
    slot.is_doubted = True
    for _ in range(SETTLE_ATTEMPTS):
        found = registry.get(slot.key)
        version = ABSENT if found is None else found.version
        if found is not None and version != slot.version:
            written_by, outcome = _load(slot.key, found.value)
            if written_by != transaction:
                break
            slot.version = version
            return outcome == "committed"
        is_old = slot.sent_at is not None and registry.clock.now() - slot.sent_at > OUTCOME_KEPT_S / 2
        if version != slot.version or (found is None and is_old):
            break  # it was swept, or may have been
        try:
            aborted = _outcome(transaction, "aborted")
            slot.version = registry.commit({slot.key: version}, {slot.key: aborted}, quiet=True)[slot.key]
            return False
        except (Conflict, OutcomeUnknown):
            continue  # one of the two has just landed: read again
    raise OutcomeLost(f"{registry.url}: what became of transaction {transaction} is not on record any more")


class Leftovers:
    """The slots of takers that are gone, and since when a sweeper knows that."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._since: dict[tuple[str, int], float] = {}
        """By key and version, on this registry's clock."""

    @property
    def due_at(self) -> float:
        """When the first of them may be removed."""
        return min(self._since.values(), default=float("inf")) + OUTCOME_KEPT_S

    def sweep(self, alive: Collection[str]) -> None:
        """Remember those of takers that are not among these, and remove what was remembered for long enough."""
        now = self._registry.clock.now()
        left = [entry for entry in self._registry.scan(OUTCOMES) if _taker_of(entry) not in alive]
        self._since = {_slot(entry): self._since.get(_slot(entry), now) for entry in left}
        old = [_slot(entry) for entry in left if now - self._since[_slot(entry)] > OUTCOME_KEPT_S or _is_ancient(entry)]
        for at in range(0, len(old), _CLOSE_KEYS_MAX):
            expect = dict(old[at : at + _CLOSE_KEYS_MAX])
            self._registry.commit(expect, delete=list(expect), quiet=True)


def _slot(entry: Entry) -> tuple[str, int]:
    return entry.key, entry.version


def _taker_of(entry: Entry) -> str:
    return entry.key[len(OUTCOMES) :].rpartition("-")[0]


def _is_ancient(entry: Entry) -> bool:
    """So old that no two clocks differ by as much: for where no sweeper lives long enough to know better."""
    try:
        return time.time() - float(json.loads(entry.value)["at"]) > _ANCIENT_S
    except (ValueError, TypeError, KeyError):
        return False


def _outcome(transaction: str, outcome: str) -> bytes:
    return json.dumps({"transaction": transaction, "outcome": outcome, "at": time.time()}).encode()


def _load(key: str, value: bytes) -> tuple[str, str]:
    """Of which transaction, and what became of it."""
    try:
        found = json.loads(value)
        return found["transaction"], found["outcome"]
    except (ValueError, TypeError, KeyError) as error:
        raise RegistryCorrupt(key, f"it is no outcome: {error!r}") from error
