"""What became of a transaction whose commit was sent and whose reply was lost (R5).

The problem: reading that the commit has not been applied proves nothing, because it may be applied later. So the commit
and whoever resolves it write the same key, the slot `outcomes/<taker>-<number>`, and expect the same version of it:

- a transaction's commit puts its id and "committed";
- `resolve` puts its id and "aborted".

Exactly one of the two commits succeeds. After "aborted" was written, the transaction's commit is refused whenever it
arrives.

A taker uses its slots again, one transaction at a time each, so that outcomes leave only a few keys for each taker. The
taker deletes them when it leaves; otherwise `OutcomeSweep` deletes them `OUTCOME_KEPT_S` after a sweeper first saw that
the taker was gone. That time is counted on the clock of the sweeper alone: clocks of two machines are not compared. A
process that was out of reach for longer may find nothing: OutcomeLost.

Nothing here does I/O or reads a clock: the procedures are generators (`pxrs.registry.steps`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from pxrs.errors import Conflict, OutcomeLost, OutcomeUnknown, RegistryCorrupt
from pxrs.queue.records import OUTCOMES
from pxrs.registry.contract import ABSENT, Entry
from pxrs.registry.steps import Get, Scan, Steps, Write

OUTCOME_KEPT_S: Final = 3_600.0
RESOLVE_ATTEMPTS: Final = 5
SWEEP_KEYS_MAX: Final = 50
_ANCIENT_S: Final = 7 * 86_400.0
"""Older than any difference between two machines' clocks. A slot of that age is deleted at once: where no sweeper lives
for `OUTCOME_KEPT_S`, slots would pile up otherwise."""


@dataclass(slots=True)
class Slot:
    """A key for outcomes, used by one transaction at a time."""

    key: str
    version: int = ABSENT
    """The version that this process has written last; what the next commit expects."""
    is_doubted: bool = False
    """A commit may still be on its way that expects an earlier version of this key. Then the key is not deleted while
    the taker's lease lives: on a store that counts versions from 1 again, that commit could be applied."""
    sent_at: float | None = None
    """When a commit that writes the key was last sent, on the registry's clock; None: never."""


def dump_outcome(transaction: str, outcome: str, at: float) -> bytes:
    """A slot's value, in JSON. at: seconds since 1970. The two texts hold nothing that JSON would have to escape."""
    return f'{{"transaction": "{transaction}", "outcome": "{outcome}", "at": {at!r}}}'.encode()


def load_outcome(key: str, value: bytes) -> tuple[str, str]:
    """The id of a transaction, and "committed" or "aborted"."""
    try:
        found = json.loads(value)
        return found["transaction"], found["outcome"]
    except (ValueError, TypeError, KeyError) as error:
        raise RegistryCorrupt(key, f"not a valid outcome record: {error!r}") from error


def resolve(slot: Slot, transaction: str, now: Callable[[], float], at: float) -> Steps[bool]:
    """Whether the transaction was committed. If it was not, it cannot be any more.

    now: the registry's clock. at: seconds since 1970.
    The write names no lease: also a process whose lease has ended has to know. Raises OutcomeLost if the slot's key may
    have been swept, OutcomeUnknown if the replies to all attempts were lost, so that a later call can still find out,
    and RegistryCorrupt if the value is damaged."""
    slot.is_doubted = True
    for _ in range(RESOLVE_ATTEMPTS):
        found: Entry | None = yield Get(slot.key)
        version = ABSENT if found is None else found.version
        if found is not None and version != slot.version:
            written_by, outcome = load_outcome(slot.key, found.value)
            if written_by != transaction:
                break
            slot.version = version
            return outcome == "committed"
        is_old = slot.sent_at is not None and now() - slot.sent_at > OUTCOME_KEPT_S / 2
        if version != slot.version or (found is None and is_old):
            break  # the key was swept, or may have been
        try:
            aborted = dump_outcome(transaction, "aborted", at)
            written = yield Write({slot.key: version}, {slot.key: aborted}, is_leased=False, is_quiet=True)
            slot.version = written[slot.key]
            return False
        except (Conflict, OutcomeUnknown):
            continue  # the transaction's commit, or this write, has just been applied: read again
    else:
        raise OutcomeUnknown(
            f"the outcome of transaction {transaction} is not known yet: no write to {slot.key} was answered"
        )
    raise OutcomeLost(f"the outcome of transaction {transaction} is no longer recorded: {slot.key}")


class OutcomeSweep:
    """Deletes the slots of takers that are gone. It remembers since when a sweeper knows that they are."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], float] = {}
        """By key and version of a slot: when it was first seen without its taker, on the registry's clock."""

    @property
    def due_at(self) -> float:
        """When the first of these slots may be deleted, on the registry's clock."""
        return min(self._since.values(), default=float("inf")) + OUTCOME_KEPT_S

    def sweep(self, alive: Collection[str], now: float, wall_time: float) -> Steps[None]:
        """Remember the slots of takers that are not in `alive`, and delete those that were remembered for long enough.

        now: the registry's clock. wall_time: seconds since 1970."""
        found: list[Entry] = yield Scan(OUTCOMES)
        left = [entry for entry in found if _taker_of(entry) not in alive]
        self._since = {_versioned(entry): self._since.get(_versioned(entry), now) for entry in left}
        old = [
            _versioned(entry)
            for entry in left
            if now - self._since[_versioned(entry)] > OUTCOME_KEPT_S or _is_ancient(entry, wall_time)
        ]
        for at in range(0, len(old), SWEEP_KEYS_MAX):
            expect = dict(old[at : at + SWEEP_KEYS_MAX])
            yield Write(expect, delete=list(expect), is_leased=False, is_quiet=True)


def delete_slots(slots: Collection[Slot]) -> Steps[None]:
    """A taker leaves: delete the keys of its slots. Those that are doubted, or that were never written, are left.

    Without its lease, which may have ended: nobody else writes these keys, and the outcomes in them are known."""
    used = [slot for slot in slots if slot.version != ABSENT and not slot.is_doubted]
    for at in range(0, len(used), SWEEP_KEYS_MAX):
        expect = {slot.key: slot.version for slot in used[at : at + SWEEP_KEYS_MAX]}
        yield Write(expect, delete=list(expect), is_leased=False, is_quiet=True)


def _versioned(entry: Entry) -> tuple[str, int]:
    return entry.key, entry.version


def _taker_of(entry: Entry) -> str:
    return entry.key[len(OUTCOMES) :].rpartition("-")[0]


def _is_ancient(entry: Entry, wall_time: float) -> bool:
    try:
        return wall_time - float(json.loads(entry.value)["at"]) > _ANCIENT_S
    except (ValueError, TypeError, KeyError):
        return False  # it is damaged: then `OUTCOME_KEPT_S` decides
