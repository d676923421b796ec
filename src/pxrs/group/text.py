"""A group's description as text: the cells of its two tables, and the tables themselves without colours or packages.

`str(description)` is made here, and `pxrs group describe` draws the same cells. No cell contains a character that a
terminal would act upon: the names of members and hosts are whatever their processes said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from pxrs.wording import counted, printable, time_text

if TYPE_CHECKING:
    from pxrs.group.description import GroupDescription, PartitionDescription

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
        parts.append("\n".join(paused))
    return "\n\n".join(parts)


def member_rows(found: GroupDescription) -> list[tuple[str, ...]]:
    """The cells of MEMBER_COLUMNS, a row for each member."""
    return [
        (
            printable(f"{member.name} (leader)" if member.incarnation == found.leader else member.name),
            printable(member.host),
            printable(member.topic),
            time_text(member.since),
            str(member.pid),
            str(member.partitions),
        )
        for member in found.members
    ]


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
