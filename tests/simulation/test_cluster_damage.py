"""Simulated clusters whose disks lose what they had synced (C7, C8, C9): nothing that was acknowledged is lost, all
come to rest, and each defect of the protocol is caught by at least one in a hundred of these schedules.

How many of 3,000 schedules catch each defect, in percent:

    doubt not journaled                           1.3
    doubt without refusing writers                1.1
    missing for unknown                           4.6
    last fragment only                            1.2
    scan before the start's commit                1.5
    doubt ended before the close                  2.7
    late lac ignored                              2.4
    (b) with one silent node                      6.8
    two refusals beat a copy                     13.7
    old copy proven                               5.2
    closed ledgers not compared                   7.6
    complete after a doubtful replacement         2.2
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from pxrs.cluster.ledgers import LedgerRecord
from pxrs.cluster.recovery import MISSING, Recovery, Searched
from pxrs.cluster.replication import LedgerWriter
from pxrs.cluster.storage.core import DoubtItem, Entries, JournalItem, NodeCore, Outcome
from pxrs.testing.simulator.cluster_machine import Machine
from pxrs.testing.simulator.cluster_schedule import ClusterDefects
from pxrs.testing.simulator.cluster_simulation import simulate_cluster
from pxrs.testing.simulator.cluster_themes import DAMAGED
from pxrs.testing.simulator.ghost import Violation
from tests.simulation.test_cluster_mutations import Mutation, seeds_to_catch

IS_SOAK = bool(os.environ.get("PXRS_SOAK"))
SEEDS = 3_000 if IS_SOAK else 400
FAULTS = ("harm", "cut", "copy", "rot", "power", "power all", "kill", "died before its doubt")
"""What must have happened in one of a hundred schedules at least, on average (`ClusterSchedule.counts`)."""


# Storage nodes.


class DoubtsInMemory(Machine):
    """Which ledgers are in doubt is not journaled."""

    def journal_doubt(self, items: list[JournalItem]) -> None:
        super().journal_doubt([item for item in items if not isinstance(item, DoubtItem)])


class TakesWritersInDoubt(NodeCore):
    """A node in doubt takes entries of writers whose fences it may have lost."""

    def begin_doubt(self, unclosed: Iterable[str], highest: Iterable[str]) -> list[JournalItem]:
        return super().begin_doubt(unclosed, ())


class SaysMissing(NodeCore):
    """A node in doubt answers that it does not have the entry."""

    def read(self, *given: Any) -> Outcome:
        outcome = super().read(*given)
        if isinstance(outcome.reply, Entries):
            return outcome._replace(reply=outcome.reply._replace(is_in_doubt=False))
        return outcome


class LooksAtLastFragments(Machine):
    """Only ledgers whose last fragment names the node are in doubt."""

    def named(self, record: LedgerRecord) -> set[str]:
        return {node for node in record.fragments[-1].nodes if node is not None}


class ScansEarly(Machine):
    """The ledgers' records are read before the start is committed, while another process is still the node."""

    def begin_doubt(self) -> None:
        self.early, self.scanned = self.scanned, None
        super().begin_doubt()

    def scan(self) -> tuple[list[str], list[str]]:
        early, self.early = getattr(self, "early", None), None
        return early or super().scan()


class EndsDoubtEarly(Machine):
    """The doubt about a ledger ends at the next look, closed or not."""

    def settle(self, run: int) -> None:
        if run == self.run and self.is_up:
            for ledger in self.core.doubts():
                self.core.end_doubt(ledger)
        super().settle(run)


class BelievesOldCopies(Machine):
    """A mark is taken for a proof although the journal is shorter."""

    def is_proven(self, proof: int | None) -> bool:
        return super().is_proven(None if proof is None else min(proof, len(self.disk.journal)))


class ComparesNothing(Machine):
    """Closed ledgers are not compared with the journal after a start in doubt."""

    def compare(self, record: LedgerRecord | None, version: int) -> None:
        pass


# Recovery, and the writer.


class IgnoresLateConfirmations(Recovery):
    """What a node says to be confirmed counts only until enough nodes are fenced."""

    def fenced(self, node: str, lac: int) -> list[Any]:
        return super().fenced(node, lac if self.cursor < 0 else -1)


class EndsWithASilentNode(Recovery):
    """One node of a write set need not have answered if the others do not know."""

    def _is_settled(self, entry: int, answers: Any) -> bool:
        nodes = [(position, node) for position, node in self.record.nodes_of(entry) if not self._is_out(node)]
        silent = [position for position, _ in nodes if position not in answers]
        return super()._is_settled(entry, {**answers, **dict.fromkeys(silent[:1], MISSING)})


class RefusalsBeatCopies(Recovery):
    """An entry that enough nodes do not have is left out although a node has returned it."""

    def _look(self) -> list[Any]:
        searched = self._searched.get(self.cursor)
        if searched is not None and self._is_left_out(searched):
            searched.head = None
            return self._finish()
        return super()._look()

    def _is_left_out(self, searched: Searched) -> bool:
        is_open = self._proposed is None and not self.stopped and not self._is_measuring
        is_found = searched.head is not None and len(searched.copies) < self.record.quorum.ack_quorum
        return is_open and is_found and self.cursor > self.lac and self._is_missing(self.cursor, searched.answers)


class ClosesAsCompleteAfterDoubt(LedgerWriter):
    """A node that may have lost entries is replaced like one that does not answer."""

    def failed(self, node: str, tenure: int, *, is_lasting: bool = False) -> list[Any]:
        before = self._has_gaps
        actions = super().failed(node, tenure, is_lasting=is_lasting)
        self._has_gaps = before
        return actions


MUTATIONS = [
    Mutation("doubt not journaled", ClusterDefects(machine=DoubtsInMemory), 40),
    Mutation("doubt without refusing writers", ClusterDefects(node=TakesWritersInDoubt), 25),
    Mutation("missing for unknown", ClusterDefects(node=SaysMissing), 40),
    Mutation("last fragment only", ClusterDefects(machine=LooksAtLastFragments), 40),
    Mutation("scan before the start's commit", ClusterDefects(machine=ScansEarly), 86),
    Mutation("doubt ended before the close", ClusterDefects(machine=EndsDoubtEarly), 40),
    Mutation("late lac ignored", ClusterDefects(recovery=IgnoresLateConfirmations), 68),
    Mutation("(b) with one silent node", ClusterDefects(recovery=EndsWithASilentNode), 24),
    Mutation("two refusals beat a copy", ClusterDefects(recovery=RefusalsBeatCopies), 14),
    Mutation("old copy proven", ClusterDefects(machine=BelievesOldCopies), 22),
    Mutation("closed ledgers not compared", ClusterDefects(machine=ComparesNothing), 10),
    Mutation("complete after a doubtful replacement", ClusterDefects(writer=ClosesAsCompleteAfterDoubt), 41),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_defect_is_caught_and_the_sound_code_passes_the_same_seeds(mutation: Mutation) -> None:
    tried = seeds_to_catch(mutation, SEEDS, DAMAGED)
    assert tried is not None, f"not caught within {SEEDS} seeds"
    for seed in tried:
        simulate_cluster(seed, theme=DAMAGED)


@pytest.mark.skipif(not IS_SOAK, reason="takes minutes; `make soak` runs it")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_defect_is_caught_by_one_schedule_in_a_hundred(mutation: Mutation) -> None:
    caught = 0
    for seed in range(3_000):
        try:
            simulate_cluster(seed, mutation.defects, theme=DAMAGED)
        except Violation:
            caught += 1
    assert caught >= 30


def test_damage_within_the_quorum_loses_nothing_and_every_cluster_comes_to_rest() -> None:
    faults: Counter[str] = Counter()
    for seed in range(SEEDS):
        faults.update(simulate_cluster(seed, theme=DAMAGED).counts)
    assert {name: faults[name] for name in FAULTS if faults[name] < SEEDS / 100} == {}
    assert faults["beyond"] < SEEDS / 4, "few schedules end early"
