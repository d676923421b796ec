"""What `GroupHandle.describe` returns: values that say who is there, who owns what, and how far the group is; and the
same as text.

`str(description)` is made here, without colours or packages, and `pxrs group describe` draws the same cells. No cell
contains a character that a terminal would act upon: the names of members and hosts are whatever their processes said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from pxrs.group.lag import Seen, TopicLag
from pxrs.group.records import Paused
from pxrs.group.snapshot import GroupState
from pxrs.log.numbering import TopicPartition
from pxrs.wording import counted, decisions, printable, time_text

Columns = Sequence[tuple[str, bool]]
"""The name of each column, and whether it holds numbers, which are aligned at the right."""
MEMBER_COLUMNS: Final = (
    ("member", False),
    ("host", False),
    ("topic", False),
    ("since", False),
    ("pid", True),
    ("partitions", True),
)
PARTITION_COLUMNS: Final = (
    ("topic", False),
    ("partition", True),
    ("epoch", True),
    ("checkpoint", True),
    ("end", True),
    ("lag", True),
    ("owner", False),
    ("when", False),
    ("by", False),
)
TOPICS_SHOWN_MAX: Final = 3
"""How many topics of a member are named in the text."""

_SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("owner", pa.string()),
        pa.field("owner_name", pa.string()),
        pa.field("target", pa.string()),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("checkpoint", pa.int64()),
        pa.field("when", pa.timestamp("us", "UTC")),
        pa.field("by", pa.string()),
        pa.field("start", pa.int64()),
        pa.field("end", pa.int64()),
        pa.field("lag", pa.int64()),
        pa.field("is_lag_exact", pa.bool_(), nullable=False),
        pa.field("paused_at", pa.int64()),
        pa.field("error", pa.string()),
        pa.field("error_type", pa.string()),
        pa.field("traceback", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class MemberDescription:
    incarnation: str
    name: str
    host: str
    pid: int
    topic: str
    """The name of the topic that the member reads; the names of all, with commas between them, if it reads several."""
    since: float
    """When the member joined, in wall-clock seconds of its own machine."""
    partitions: int
    """How many partitions the member owns, of all topics together."""
    topics: tuple[str, ...] = ()
    """The names of the topics that the member reads."""


@dataclass(frozen=True, slots=True)
class PartitionDescription:
    topic: str
    """The name of the topic, or its id if the name is not known any more."""
    topic_id: str
    partition: int
    owner: str | None
    """The incarnation that owns the partition; None if it is free."""
    owner_name: str | None
    is_owner_there: bool
    """Whether the owner is there. False also if the owner is gone and no other member has claimed the partition
    since."""
    target: str | None
    """The incarnation that the partition is meant for; None if that is gone and the leader has not chosen another one
    yet."""
    epoch: int
    checkpoint: int | None
    """The offset of the next message to read."""
    when: float | None
    by: str | None
    start: int | None
    end: int | None
    lag: int | None
    """The lag: how many messages are yet to be handled, or an upper bound of that; None if the topic does not exist or
    cannot be read."""
    is_lag_exact: bool
    """False if `lag` is an upper bound, or None. It is a bound of a table, where it counts the ids of other partitions
    too, and of a partition without a checkpoint, where it counts from the partition's start."""
    paused: Paused | None
    """The message that holds the partition up, and why."""

    @property
    def error(self) -> str | None:
        """What holds the partition up: the class and message of what the handler raised."""
        return None if self.paused is None else self.paused.error

    @property
    def error_type(self) -> str | None:
        """The class alone; empty if the pause was written by version 0.1, as is `traceback`."""
        return None if self.paused is None else self.paused.error_type

    @property
    def traceback(self) -> str | None:
        return None if self.paused is None else self.paused.traceback


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group as it was while it was read; not at one moment (R1)."""

    name: str
    generation: int
    """The generation of the targets. It rises with every rebalance."""
    leader: str | None
    """The incarnation of the leader, if that is there."""
    members: tuple[MemberDescription, ...]
    partitions: tuple[PartitionDescription, ...]
    topics: tuple[TopicLag, ...]
    """The lag in each topic and source that the group reads."""

    @property
    def lag(self) -> int | None:
        """The lag of all topics and sources together: exact or an upper bound, see `is_lag_exact`. None if it is not
        known for one of them: `lag_problem` says why."""
        lags = [each.lag for each in self.topics]
        return None if None in lags else sum(lag for lag in lags if lag is not None)

    @property
    def is_lag_exact(self) -> bool:
        """False if `lag` is an upper bound, or None."""
        return all(each.is_exact for each in self.topics)

    @property
    def lag_problem(self) -> str | None:
        """Why `lag` is None, and what to do about it."""
        problems = [each.problem for each in self.topics if each.problem is not None]
        return "; ".join(problems) or None

    @property
    def lag_text(self) -> str:
        """The lag for people: `12`, `<= 12` if it is an upper bound, or `unknown`."""
        return lag_text(self.lag, self.is_lag_exact)

    def to_arrow(self) -> pa.Table:
        """A row for each partition."""
        rows = [
            {
                **{name: getattr(row, name) for name in _SCHEMA.names if name not in ("when", "paused_at")},
                "when": None if row.when is None else round(row.when * 1e6),
                "paused_at": None if row.paused is None else row.paused.offset,
            }
            for row in self.partitions
        ]
        return pa.Table.from_pylist(rows, _SCHEMA)

    def __str__(self) -> str:
        """Tables to be printed: members, owners, epochs, checkpoints and lag."""
        return group_text(self)


def describe_partition(
    state: GroupState, target: str | None, place: TopicPartition, name: str, seen: Seen
) -> PartitionDescription:
    owner, _ = state.owner(place)
    checkpoint = state.checkpoints[place][0] if place in state.checkpoints else None
    start, end = seen.extents[place[1]] if place[1] < seen.count else (None, None)
    offset = None if checkpoint is None else checkpoint.offset
    lag = seen.partition_lag(place[1], offset)
    return PartitionDescription(
        name,
        *place,
        owner=owner.incarnation,
        owner_name=None if owner.incarnation is None else owner.name,
        is_owner_there=owner.incarnation in state.members,
        target=target,
        epoch=owner.epoch,
        checkpoint=None if checkpoint is None else checkpoint.offset,
        when=None if checkpoint is None else checkpoint.when,
        by=None if checkpoint is None else checkpoint.by,
        start=start,
        end=end,
        lag=lag,
        is_lag_exact=seen.is_partition_exact(lag, offset),
        paused=state.paused[place][0] if place in state.paused else None,
    )


# As text.


def group_text(found: GroupDescription) -> str:
    """One line about the group, then a table of its members, one of its partitions, and why partitions are paused."""
    members, partitions = counted(len(found.members), "member"), counted(len(found.partitions), "partition")
    parts = [f"group {found.name}: {members}, {partitions}, generation {found.generation}, lag {found.lag_text}"]
    if found.members:
        parts.append(_table(MEMBER_COLUMNS, member_rows(found)))
    if found.partitions:
        parts.append(_table(PARTITION_COLUMNS, partition_rows(found)))
    if problems := [printable(each.problem) for each in found.topics if each.problem is not None]:
        parts.append("\n".join(problems))
    if paused := [f"{place_text(row)} {pause_text(row)}" for row in found.partitions if row.paused is not None]:
        parts.append("\n".join([*paused, *advice(found)]))
    return "\n\n".join(parts)


def member_rows(found: GroupDescription) -> list[tuple[str, ...]]:
    """The cells of MEMBER_COLUMNS, a row for each member."""
    return [
        (
            printable(f"{member.name} (leader)" if member.incarnation == found.leader else member.name),
            printable(member.host),
            printable(_topics_text(member)),
            time_text(member.since),
            str(member.pid),
            str(member.partitions),
        )
        for member in found.members
    ]


def _topics_text(member: MemberDescription) -> str:
    """The topics of a member, in a cell that stays narrow if it reads many."""
    shown, more = member.topics[:TOPICS_SHOWN_MAX], len(member.topics) - TOPICS_SHOWN_MAX
    return f"{', '.join(shown)} and {more} more" if more > 0 else member.topic


def partition_rows(found: GroupDescription) -> list[tuple[str, ...]]:
    """The cells of PARTITION_COLUMNS, a row for each partition."""
    names = {member.incarnation: member.name for member in found.members}
    return [
        (
            printable(row.topic),
            str(row.partition),
            *("-" if number is None else f"{number:,}" for number in (row.epoch, row.checkpoint, row.end)),
            "-" if row.lag is None else lag_text(row.lag, row.is_lag_exact),
            printable(_owner(row, names)),
            time_text(row.when),
            printable(row.by or ""),
        )
        for row in found.partitions
    ]


def lag_text(lag: int | None, is_exact: bool) -> str:
    """A lag for people."""
    if lag is None:
        return "unknown"
    return f"{lag:,}" if is_exact else f"<= {lag:,}"


def place_text(row: PartitionDescription) -> str:
    return f"{printable(row.topic)}/{row.partition}"


def pause_text(row: PartitionDescription) -> str:
    """The message at which a partition is paused, and what its handler raised."""
    assert row.paused is not None
    what = "is about to skip" if row.paused.skip else "is paused at"
    return f"{what} offset {row.paused.offset}: {printable(row.paused.error)}"


def advice(found: GroupDescription, place: Sequence[str] = ()) -> list[str]:
    """The commands that let each paused partition continue, a line for each.

    place: the options that name the hub on the command line."""
    return [
        printable(f"continue {place_text(row)} with {decisions(found.name, row.topic, row.partition, place)}")
        for row in found.partitions
        if row.paused is not None and not row.paused.skip
    ]


def _owner(row: PartitionDescription, names: dict[str, str]) -> str:
    """Which member has the partition, and to which one it moves."""
    if row.owner is None:
        has = "free"
    else:
        has = (row.owner_name or row.owner) if row.is_owner_there else f"{row.owner_name or row.owner} (gone)"
    if row.target is None or row.target not in names or row.target == row.owner:
        return has
    return f"{has} -> {names[row.target]}"


def _table(columns: Columns, rows: Sequence[tuple[str, ...]]) -> str:
    lines = [tuple(name for name, _ in columns), *rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if is_number else text.ljust(width)
            for text, width, (_, is_number) in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    )
