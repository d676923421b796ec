"""What a query reads next: pure functions on offsets, without Spark, a log or a clock.

Spark keeps one JSON text for each micro-batch: how far it has come when the batch is done. Ours names for each
partition the last range that the query took, with the epoch under which it owned it (K3):

    {"topic": "<id>", "partitions": {"0": [epoch, start, end], ...}}

A batch is what differs between two of them. So a partition that went to somebody else and came back may go on at
another place than where this query left it, and a batch that Spark repeats after a crash names exactly what it read
the first time.

Two checkpoints tell how far the work is: Spark's, in its checkpoint location, and the group's, in the registry. Spark's
may be ahead by what was finished just before a crash; the group's may be ahead if somebody else went on, or if the
group was reset. `resume_at` and `may_replay` say which one counts, and when neither does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from pxrs.errors import CheckpointsDiffer, InvalidOption
from pxrs.group.records import BY_HAND, Checkpoint

EARLIEST: Final = -2
LATEST: Final = -1
"""Stand for the first and for the next offset of a partition, as in the JSON of offsets of Spark's Kafka source."""
Offsets = str | dict[int, int]
"""A word such as "earliest", or offsets by partition, in which EARLIEST and LATEST may stand."""

REPLACED: Final = (
    "Start the query with a new checkpoint location: its group then begins the new topic where startingOffsets says"
)
"""How a query goes on whose topic is another one now."""
TASK_IDS: Final = 100_000
"""A task of a table has at most so many ids, unless the table needs more than `TABLE_TASKS_MAX` tasks then: about a
second's work, against which the cost of a task and of its connection is small."""
TABLE_TASKS_MAX: Final = 256
"""A bound for tables whose ids are far apart; of a larger table, each task reads more."""


class Span(NamedTuple):
    """Offsets of one partition, taken under an epoch of its owner."""

    epoch: int
    start: int
    end: int


Spans = dict[int, Span]


class Range(NamedTuple):
    """Offsets of one partition, for one task."""

    partition: int
    start: int
    end: int


class IdRange(NamedTuple):
    """Ids of a table, in which the rows of all its partitions lie, for one task."""

    start: int
    end: int


def resolve_within(
    name: str,
    extents: Sequence[tuple[int, int]],
    offsets: Offsets,
    option: str,
    is_allowed: Callable[[int], bool] | None = None,
) -> dict[int, int]:
    """What a user gave for the offsets of all partitions, as numbers. Raises InvalidOption if a partition is missing or
    unknown, or an offset is beyond the end.

    extents: by partition, its first offset and its end; is_allowed: whether an offset beyond the end may be given."""
    numbers = range(len(extents))
    if isinstance(offsets, str):
        offsets = dict.fromkeys(numbers, EARLIEST if offsets == "earliest" else LATEST)
    if set(offsets) != set(numbers):
        raise InvalidOption(option, f"{name} has the partitions 0 to {len(extents) - 1}: name each of them")
    result = {}
    for number, offset in sorted(offsets.items()):
        first, end = extents[number]
        result[number] = first if offset == EARLIEST else end if offset == LATEST else offset
        if result[number] > end and (is_allowed is None or not is_allowed(offset)):
            raise InvalidOption(option, f"{name}/{number} ends at offset {end}, and {offset} is beyond it")
    return result


def dump_offset(topic: str, spans: Mapping[int, Span]) -> dict[str, Any]:
    """As Spark keeps it. The same spans give the same text: Spark compares the texts."""
    return {"topic": topic, "partitions": {str(number): list(spans[number]) for number in sorted(spans)}}


def load_offset(offset: Mapping[str, Any], topic: str, name: str) -> Spans:
    """Raises CheckpointsDiffer if it is of another topic than that with this id."""
    if offset.get("topic") != topic:
        raise CheckpointsDiffer(
            f"the topic {name} was deleted and made again since Spark wrote its checkpoint, or the query has read "
            f"another topic with this checkpoint location before. {REPLACED}"
        )
    return {int(number): Span(*span) for number, span in offset["partitions"].items()}


def batch_between(start: Mapping[int, Span], end: Mapping[int, Span]) -> Spans:
    """What a batch reads that leads from the one to the other."""
    return {number: span for number, span in end.items() if start.get(number) != span and span.start < span.end}


def resume_at(finished: Span | None, checkpoint: Checkpoint, is_shared: bool, place: str) -> int:
    """Where a partition goes on, given what Spark has finished of it and the group's checkpoint after the claim.

    A person's reset counts, if it came later than Spark's last range. Else the one that is further ahead; but for a
    query that is alone in its group nobody else can have gone further, so there an old checkpoint location was
    restored: its state lacks what the group counts as done. Raises CheckpointsDiffer."""
    if finished is None:
        return checkpoint.offset
    if checkpoint.by in BY_HAND and checkpoint.epoch > finished.epoch:
        return checkpoint.offset
    if checkpoint.offset > finished.end and not is_shared:
        raise CheckpointsDiffer(
            f"{place}: Spark's checkpoint ends at offset {finished.end}, the group's at {checkpoint.offset}: an old "
            f"checkpoint location was restored, or somebody else consumed in this group. {_advice(finished.end)}"
        )
    return max(checkpoint.offset, finished.end)


def is_reached(span: Span, checkpoint: Checkpoint) -> bool:
    """Whether the group counts a batch's range as done. A person's reset says nothing about the batch."""
    return checkpoint.offset == span.end and checkpoint.by not in BY_HAND


def may_replay(span: Span, finished: Span | None, checkpoint: Checkpoint, is_shared: bool, place: str) -> bool:
    """Whether a batch that Spark repeats may read this range again: nobody else has gone on from where it begins.

    The group's checkpoint may stand at its end (`is_reached`): then the sink has published the batch together with the
    checkpoint and will do nothing more. Only the query's state is made from these rows again; in a shared group there
    is none. False: read nothing of it. Raises CheckpointsDiffer if the query is alone."""
    if is_reached(span, checkpoint):
        return not is_shared
    if resume_at(finished, checkpoint, True, place) == span.start:
        return True
    if is_shared:
        return False
    raise CheckpointsDiffer(
        f"{place}: Spark repeats the offsets {span.start} to {span.end - 1}, and the group's checkpoint is "
        f"{checkpoint.offset}. {_advice(span.start)}"
    )


def _advice(offset: int) -> str:
    # A topic and a file sink know the numbers of the batches that they have: those would be refused, or left out.
    return (
        "Start with a new checkpoint location, and leave the group as it is. Only if the sink is neither a pxrs topic "
        f"nor files can you follow Spark instead: reset the group to offset {offset}"
    )


def share_out(available: Mapping[int, int], rows_max: int) -> dict[int, int]:
    """How many rows of each partition, at most so many together: one of each, and the rest by what each has more.

    So a short partition has its turn, however much comes into a long one. If there are more partitions than rows, the
    first have one: `first_of` chooses them."""
    wanted = min(rows_max, sum(available.values()))
    shares = {number: min(count, 1) for number, count in available.items()}
    for number in [number for number, share in shares.items() if share][rows_max:]:
        shares[number] = 0
    more = {number: count - shares[number] for number, count in available.items()}
    rest, total = wanted - sum(shares.values()), sum(more.values())
    if rest:
        for number, count in more.items():
            shares[number] += count * rest // total
    # What rounding left goes to those of which most is left.
    left = wanted - sum(shares.values())
    for number in sorted(more, key=lambda number: shares[number] - available[number])[:left]:
        shares[number] += 1
    return shares


def first_of(available: Iterable[int], after: int, count_max: int) -> list[int]:
    """Up to so many partitions, beginning behind `after` and going round, so that each has its turn."""
    ordered = sorted(available, key=lambda number: (number <= after, number))
    return ordered[:count_max]


def gather(ranges: Sequence[Range], rows_min: int) -> list[list[Range]]:
    """Tasks of one range each; short ones together until they have so many rows, because a task has a fixed cost."""
    tasks: list[list[Range]] = []
    rows = rows_min
    for each in ranges:
        if rows >= rows_min:
            tasks.append([])
            rows = 0
        tasks[-1].append(each)
        rows += each.end - each.start
    return tasks


def split(ranges: Sequence[Range], count_min: int | None) -> list[Range]:
    """The same offsets in at least so many tasks, as far as there are rows: the longest ranges are cut most."""
    if count_min is None or not ranges or len(ranges) >= count_min:
        return list(ranges)
    total = sum(each.end - each.start for each in ranges)
    if not total:
        return list(ranges)
    parts: list[Range] = []
    for each in ranges:
        rows = each.end - each.start
        pieces = min(rows, max(1, -(-rows * count_min // total)))
        parts += [Range(each.partition, first, last) for first, last in _cut(each.start, each.end, pieces)]
    return parts


def split_ids(ranges: Iterable[Range], count_min: int | None) -> list[IdRange]:
    """Tasks that together read each id once that is in the range of any partition.

    count_min: at least so many tasks, as far as there are ids. By default as many as `TASK_IDS` asks for."""
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
