"""What a group reads that is no topic of a hub, such as somebody else's table, and when its checkpoints do not fit.

A topic has an id of its own. The id of a table comes from its address, or from the user. So two things can go wrong
when a member joins, and both are refused before anything is written:

- The group has checkpoints of the table under another id, and none under this one: it would start again from the
  beginning (`IdentityChanged`).
- It has checkpoints under this id that were written for other partitions: rows between the checkpoints of two
  partitions would be passed over, or handled again, when they change places (`SourceChanged`).

The group keeps a `SourceRead` for each such source, written in one commit with the first checkpoints under its id and
expecting its version. So of two members that begin at the same moment under two ids, one finds the other's record.
Version 0.1 wrote no such record; what can be seen of its checkpoints is checked. A deleted group's records stay, as all
guards do (R4), with an empty id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pxrs.errors import IdentityChanged, SourceChanged
from pxrs.group.records import BY_HAND, Checkpoint, Keys, SourceRead
from pxrs.log.contract import Source, TopicLog

_NOT_RUN: Final = (*BY_HAND, "start")
"""By whom a checkpoint was written if no member has handled anything."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A source that a group is about to read."""

    key: str
    """Where the group keeps its `SourceRead`: by the fingerprint, which is the same however the table is addressed."""
    read: SourceRead
    partitions: int
    former_ids: tuple[str, ...] = ()
    """Other ids that it may have been read under by version 0.1."""


def foreign_of(keys: Keys, source: Source) -> Foreign | None:
    """None of a topic. A source whose fingerprint is not known is only known by its id."""
    if isinstance(source, TopicLog):
        return None
    read = SourceRead(source.id, source.name, source.address, source.meaning)
    return Foreign(f"{keys.sources}{source.fingerprint or source.id}", read, source.partitions, source.former_ids)


def check_meaning(
    group: str, ours: Foreign, known: Iterable[SourceRead], checkpoints: Mapping[int, Checkpoint]
) -> None:
    """Raise SourceChanged if the group's checkpoints under this id are of other partitions.

    known: all that the group has on record; checkpoints: under this id, by partition."""
    if not checkpoints:
        return
    records = [read for read in known if read.id == ours.read.id]
    for read in records:
        if read.meaning not in ("", ours.read.meaning):
            raise SourceChanged(group, ours.read.name, read.meaning, ours.read.meaning)
    has_run = any(checkpoint.by not in _NOT_RUN for checkpoint in checkpoints.values())
    count = max(checkpoints) + 1
    if count > ours.partitions or (has_run and not records and len(checkpoints) < ours.partitions):
        raise SourceChanged(group, ours.read.name, f"{count} partitions", ours.read.meaning)


def other_ids(ours: Foreign, known: SourceRead | None) -> Iterator[tuple[str, str]]:
    """Ids under which the group may have checkpoints of the same source, and how it was addressed, as far as known.

    known: what is on record under the source's key."""
    former = dict.fromkeys(ours.former_ids, "")
    if known is not None and known.id:
        former[known.id] = known.address
    for id, address in former.items():
        if id != ours.read.id:
            yield id, address


def changed(group: str, ours: Foreign, former: str, address: str) -> IdentityChanged:
    return IdentityChanged(group, ours.read.name, ours.read.id, former, address)
