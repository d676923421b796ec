"""The account at the end of the demo: compares what the processes report with what must be true. Does no I/O and does
not wait.

The workers' part is computed from the events that each worker has printed: every message was handled, in order, and
none again that was before an accepted checkpoint. Spark's part compares what Spark has written with what Python
computes from the same orders.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from itertools import pairwise

from pxrs.cli.demo.orders import Order, Totals
from pxrs.cli.demo.orders import totals as totals_of
from pxrs.cli.demo.sender import Place
from pxrs.group.description import lag_text


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the account."""

    what: str
    expected: str
    found: str

    @property
    def is_right(self) -> bool:
        return self.expected == self.found


@dataclass(frozen=True, slots=True)
class Account:
    messages: int
    lost: int
    """Messages that were acknowledged to the sender and never handled."""
    order_violations: int
    duplicates: int
    """Messages that were handled under a later epoch although a checkpoint that was accepted under an earlier one
    covers them."""
    redone: int
    """Messages that were handled again because they were in hand, and not covered by a checkpoint, when a worker was
    killed or stopped."""

    def lines(self, sent: int) -> list[Line]:
        """sent: how many messages were to be sent."""
        return [
            Line("messages handled", f"{sent:,}", f"{self.messages - self.lost:,}"),
            Line("lost", "0", f"{self.lost:,}"),
            Line("order violations", "0", f"{self.order_violations:,}"),
            Line("duplicates covered by a checkpoint", "0", f"{self.duplicates:,}"),
        ]


def account(sent: Iterable[Place], told: Iterable[str]) -> Account:
    """Compute the account from the events of the workers, which may come in any order: the epochs say which owner came
    first."""
    handled: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    committed: dict[Place, int] = {}
    for line in told:
        what, *rest = line.split()
        if what in ("handled", "committed"):
            partition, epoch, offset = map(int, rest)
            if what == "handled":
                handled[partition][epoch].append(offset)
            else:
                committed[partition, epoch] = max(offset, committed.get((partition, epoch), 0))
    violations = duplicates = redone = 0
    done: set[Place] = set()
    for partition, epochs in handled.items():
        reached = checkpoint = 0
        for epoch, offsets in sorted(epochs.items()):
            # The first message of an owner may be before the end of the former owner, never behind it; the others are
            # consecutive.
            violations += offsets[0] > reached
            violations += sum(after != before + 1 for before, after in pairwise(offsets))
            duplicates += sum(offset < checkpoint for offset in offsets)
            redone += sum(offset >= checkpoint and (partition, offset) in done for offset in offsets)
            done.update((partition, offset) for offset in offsets)
            reached = max(reached, offsets[-1] + 1)
            checkpoint = max(checkpoint, committed.get((partition, epoch), 0))
    places = set(sent)
    violations += len(done - places)  # messages that nobody has sent
    return Account(len(places), len(places - done), violations, duplicates, redone)


@dataclass(frozen=True, slots=True)
class Made:
    """What Spark has written."""

    totals: Totals
    """The totals in the topic."""
    archived: Sequence[tuple[tuple[str, datetime], Decimal]]
    """The totals in the Parquet files, one for each window that has ended."""
    dead_letters: Sequence[tuple[str, str]]
    """The origin of each dead letter, and its reason."""
    lag: int | None


def spark_lines(sent: Sequence[tuple[Place, Order]], topic: str, closed_before: datetime, made: Made) -> list[Line]:
    """closed_before: windows that begin before this time have ended for Spark."""
    totals = totals_of(order for _, order in sent)
    closed = {place: total for place, total in totals.items() if place[1] < closed_before}
    bad = [(f"{topic}/{partition} offset {offset}", order.flaw) for (partition, offset), order in sent if order.flaw]
    return [
        Line("Spark: correct totals in the topic", f"{len(totals):,}", _equal(totals, made.totals.items())),
        Line("Spark: their sum in the topic", _money(totals.values()), _money(made.totals.values())),
        Line("Spark: correct totals in Parquet", f"{len(closed):,}", _equal(closed, made.archived)),
        Line("Spark: their sum in Parquet", _money(closed.values()), _money(total for _, total in made.archived)),
        Line("Spark: dead letters, with place and reason", f"{len(bad):,}", _same(bad, made.dead_letters)),
        Line("Spark: lag, read outside Spark", "0", lag_text(made.lag, is_exact=True)),
    ]


def _equal(expected: Totals, found: Iterable[tuple[tuple[str, datetime], Decimal]]) -> str:
    return _same(expected.items(), found)


def _same(expected: Iterable[object], found: Iterable[object]) -> str:
    """How many values are correct, and how many others there are."""
    wanted, there = Counter(expected), Counter(found)
    others = (there - wanted).total()
    return f"{(there & wanted).total():,}" + (f", and {others:,} wrong" if others else "")


def _money(amounts: Iterable[Decimal]) -> str:
    return f"{sum(amounts, Decimal()):,.2f}"


def are_right(lines: Iterable[Line]) -> bool:
    return all(line.is_right for line in lines)


def reasons(dead_letters: Iterable[tuple[str, str]]) -> Mapping[str, int]:
    """How often each reason occurs, the most frequent first."""
    return dict(Counter(reason for _, reason in dead_letters).most_common())
