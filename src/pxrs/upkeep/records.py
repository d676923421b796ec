"""What upkeep keeps in the registry, as JSON that a person can read.

    upkeep/<hub id>/janitor                the hub that was elected last, and its term; its version is the fence
    upkeep/<hub id>/alive/<incarnation>    ephemeral: the janitor of this incarnation has a lease
    upkeep/<hub id>/report                 the last round of the janitor

The janitor and report keys are persistent and never deleted (R4): a re-created key could have an old version again.
Several hubs may share a registry, so each has keys of its own, under the id that its directory records.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from pxrs.registry.record import Record

ENTRIES_MAX: Final = 100
TEXT_CHARACTERS_MAX: Final = 500
"""How many entries, and characters in each, a report has at most: it must fit into a value of any registry."""


class UpkeepKeys:
    """The keys of one hub."""

    def __init__(self, hub: str) -> None:
        """hub: its id."""
        self.janitor = f"upkeep/{hub}/janitor"
        self.report = f"upkeep/{hub}/report"
        self._alive = f"upkeep/{hub}/alive/"

    def alive(self, incarnation: str) -> str:
        return f"{self._alive}{incarnation}"


@dataclass(frozen=True, slots=True)
class JanitorClaim(Record):
    """The hub that was elected. It is the janitor as long as the key `alive/<incarnation>` exists."""

    incarnation: str
    term: int
    host: str = ""
    pid: int = 0
    since: float = 0.0
    """When it was elected, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class RoundReport(Record):
    """What one round of upkeep did."""

    ended_at: float = 0.0
    """When the round ended, in seconds since 1970."""
    took_s: float = 0.0
    removed: dict[str, dict[str, int]] = field(default_factory=dict)
    """The new first offset of each partition from which retention has removed messages, by topic and partition."""
    errors: dict[str, str] = field(default_factory=dict)
    """What failed, by subject, such as "retention of orders". The rest of the round was done."""
    by: str = ""
    """The incarnation of the janitor; empty if it was a round without election."""

    def bounded(self) -> RoundReport:
        """The report as the registry keeps it: at most ENTRIES_MAX partitions and ENTRIES_MAX errors, with short texts.
        The log of the janitor's process names them all."""
        places = [(topic, number, start) for topic, starts in self.removed.items() for number, start in starts.items()]
        removed: dict[str, dict[str, int]] = {}
        for topic, number, start in places[:ENTRIES_MAX]:
            removed.setdefault(topic, {})[number] = start
        errors = {subject: text[:TEXT_CHARACTERS_MAX] for subject, text in list(self.errors.items())[:ENTRIES_MAX]}
        if len(self.errors) > len(errors):
            errors["others"] = f"{len(self.errors) - len(errors)} more failed"
        return replace(self, removed=removed, errors=errors)
