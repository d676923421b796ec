"""What a streaming query reads next: pure functions on offsets, without Spark, a log or a clock.

For each micro-batch, Spark keeps one text that says how far the query has come when the batch is finished: for each
partition, the last range that the query took and the epoch of the owner key at that time (K3). `offsets.py` has the
form of the text. A batch reads what differs between two of these texts. So a partition that another member owned in
between may go on at another offset than where this query left it, and a batch that Spark repeats after a crash reads
the same offsets again.

Partitions are numbered consecutively over all topics of a query (`pxrs.log.joined`).

There are two checkpoints: Spark's, in its checkpoint location, and the group's, in the registry. Spark's may be ahead
by what was finished just before a crash; the group's may be ahead if another member went on, or if the group was reset.
`resume_at` and `may_replay` decide which one counts, and raise CheckpointsDiffer if neither can.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, Protocol, TypeVar

from pxrs.errors import CheckpointsDiffer
from pxrs.group.records import BY_HAND, Checkpoint

REPLACED: Final = (
    "Start the query with a new checkpoint location: its group then begins the new topic where startingOffsets says"
)
"""The advice for a query whose topic was deleted and created again."""
RESTART: Final = (
    "The query's lease ran out, or another member took the partition, before the batch was finished. Start the query "
    "again: it reads the batch again with the same offsets, and nothing is lost or duplicated"
)
"""The advice for a batch whose partitions were lost before it was published."""
TASK_IDS: Final = 100_000
"""How many ids of a table one task reads at most, unless that would take more than `TABLE_TASKS_MAX` tasks: about a
second's work, against which the cost of a task and of its connection is small."""
TABLE_TASKS_MAX: Final = 256
"""How many tasks read a table at most by default; of a table with more ids, each task reads more of them."""


class Span(NamedTuple):
    """Offsets of one partition, and the epoch of its owner key when a query took them."""

    epoch: int
    start: int
    end: int


Spans = dict[int, Span]


class Range(NamedTuple):
    """Offsets of one partition, for one task."""

    partition: int
    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start


class IdRange(NamedTuple):
    """Ids of a table, in which the rows of all its partitions lie, for one task."""

    start: int
    end: int


class Delay:
    """Delays batches with few rows, until there are more or the first of them has waited long enough. The caller gives
    the time."""

    def __init__(self, rows_min: int, delay_s: float) -> None:
        """rows_min: a batch with this number of rows is not delayed. delay_s: how long a batch is delayed at most after
        its first rows were noticed."""
        self._rows_min, self._delay_s = rows_min, delay_s
        self.due = math.inf
        """When the batch is due that is delayed now; infinite if none is delayed."""

    def is_due(self, rows: int, now: float) -> bool:
        """Whether a batch of these rows is to be planned now."""
        if 0 < rows < self._rows_min and now < min(self.due, now + self._delay_s):
            self.due = min(self.due, now + self._delay_s)
            return False
        self.due = math.inf
        return True


def batch_between(start: Mapping[int, Span], end: Mapping[int, Span]) -> Spans:
    """What the batch reads after which the query has come from `start` to `end`."""
    return {number: span for number, span in end.items() if start.get(number) != span and span.start < span.end}


def resume_at(finished: Span | None, checkpoint: Checkpoint, is_shared: bool, partition: str) -> int:
    """The offset at which a partition goes on, given what Spark has finished of it and the group's checkpoint after the
    claim.

    A reset by a person counts if it came after Spark's last range. Otherwise the checkpoint that is further ahead
    counts. If the query is alone in its group, no other member can have gone further: a group's checkpoint that is
    ahead then means that an old checkpoint location was restored, whose state lacks what the group counts as done, and
    CheckpointsDiffer is raised. partition: as `<topic>/<number>`, for the error."""
    if finished is None:
        return checkpoint.offset
    if checkpoint.by in BY_HAND and checkpoint.epoch > finished.epoch:
        return checkpoint.offset
    if checkpoint.offset > finished.end and not is_shared:
        raise CheckpointsDiffer(
            f"{partition}: Spark's checkpoint ends at offset {finished.end}, the group's at {checkpoint.offset}: an "
            f"old checkpoint location was restored, or another consumer read in this group. {_advice(finished.end)}"
        )
    return max(checkpoint.offset, finished.end)


def is_reached(span: Span, checkpoint: Checkpoint) -> bool:
    """Whether the group's checkpoint is at the end of a batch's range, and was not put there by a person's reset."""
    return checkpoint.offset == span.end and checkpoint.by not in BY_HAND


def may_replay(span: Span, finished: Span | None, checkpoint: Checkpoint, is_shared: bool, partition: str) -> bool:
    """Whether a batch that Spark repeats may read this range again: it may if the group is still where the range
    begins.

    If the group's checkpoint is at the end of the range (`is_reached`), the sink has published the batch together with
    the checkpoint, and ignores the repeated rows. Only the state of the query is rebuilt from them, and a query in a
    shared group has no state. False: the batch reads nothing of this range. Raises CheckpointsDiffer instead if the
    query is alone in its group."""
    if is_reached(span, checkpoint):
        return not is_shared
    if resume_at(finished, checkpoint, True, partition) == span.start:
        return True
    if is_shared:
        return False
    raise CheckpointsDiffer(
        f"{partition}: Spark repeats the offsets {span.start} to {span.end - 1}, but the group's checkpoint is "
        f"{checkpoint.offset}. {_advice(span.start)}"
    )


def _advice(offset: int) -> str:
    # With a new checkpoint location, Spark numbers its batches from 0 again, and the query id is another. If only the
    # group were reset, a topic would refuse batches whose numbers it has, and a file sink would skip them in silence.
    return (
        "Start with a new checkpoint location, and leave the group as it is. Only if the sink is neither a pxrs topic "
        f"nor files can you follow Spark instead: reset the group to offset {offset}"
    )


def share_out(available: Mapping[int, int], rows_max: int) -> dict[int, int]:
    """How many rows of each partition a batch of at most `rows_max` rows has: one of each partition, and the rest in
    proportion to what each of them has.

    So a partition with few rows is read in every batch, however many rows the others have. If there are more partitions
    than rows, the first partitions have one row each: `first_of` chooses them."""
    wanted = min(rows_max, sum(available.values()))
    shares = {number: min(count, 1) for number, count in available.items()}
    for number in [number for number, share in shares.items() if share][rows_max:]:
        shares[number] = 0
    more = {number: count - shares[number] for number, count in available.items()}
    rest, total = wanted - sum(shares.values()), sum(more.values())
    if rest:
        for number, count in more.items():
            shares[number] += count * rest // total
    # What rounding has left over goes to the partitions with the most rows left.
    left = wanted - sum(shares.values())
    for number in sorted(more, key=lambda number: shares[number] - available[number])[:left]:
        shares[number] += 1
    return shares


def first_of(available: Iterable[int], after: int, count_max: int) -> list[int]:
    """Up to `count_max` partitions in turn: those with numbers above `after` first, then the others."""
    ordered = sorted(available, key=lambda number: (number <= after, number))
    return ordered[:count_max]


class HasRows(Protocol):
    """An input of a task, such as a range of a partition, whose number of rows is known."""

    @property
    def rows(self) -> int: ...


R = TypeVar("R", bound=HasRows)


def gather(parts: Sequence[R], rows_min: int) -> list[list[R]]:
    """Group these parts, such as ranges of partitions, into the inputs of tasks. Short parts are combined until a task
    has `rows_min` rows, because each task has a fixed cost."""
    tasks: list[list[R]] = []
    rows = rows_min
    for each in parts:
        if rows >= rows_min:
            tasks.append([])
            rows = 0
        tasks[-1].append(each)
        rows += each.rows
    return tasks


def split(ranges: Sequence[Range], count_min: int) -> list[list[Range]]:
    """The same offsets cut into at least `count_min` ranges together, as far as there are rows: for each range, its
    pieces. Long ranges are cut more often."""
    total = sum(each.end - each.start for each in ranges)
    if len(ranges) >= count_min or not total:
        return [[each] for each in ranges]
    parts: list[list[Range]] = []
    for each in ranges:
        rows = each.end - each.start
        pieces = min(rows, max(1, -(-rows * count_min // total)))
        parts.append([Range(each.partition, first, last) for first, last in _cut(each.start, each.end, pieces)])
    return parts


def split_ids(ranges: Iterable[Range], count_min: int | None) -> list[IdRange]:
    """The ranges of ids that tasks read, so that together they read every id in the range of any partition once.

    count_min: the least number of tasks, as far as there are ids. By default, `TASK_IDS` decides."""
    merged: list[IdRange] = []
    for _, start, end in sorted(ranges, key=lambda each: each.start):
        if start >= end:
            continue
        if merged and start <= merged[-1].end:
            merged[-1] = IdRange(merged[-1].start, max(end, merged[-1].end))
        else:
            merged.append(IdRange(start, end))
    total = sum(end - start for start, end in merged)
    wanted = count_min or min(TABLE_TASKS_MAX, -(-total // TASK_IDS))
    parts: list[IdRange] = []
    for start, end in merged:
        pieces = min(end - start, max(1, -(-(end - start) * wanted // total)))
        parts += [IdRange(first, last) for first, last in _cut(start, end, pieces)]
    return parts


def _cut(start: int, end: int, pieces: int) -> Iterable[tuple[int, int]]:
    """The range in pieces of about the same length."""
    return pairwise(start + (end - start) * piece // pieces for piece in range(pieces + 1))
