"""Sources that are no topics of a hub, such as tables of other systems: the record that a group keeps of each, and when
the checkpoints of the group do not fit.

A topic has an id of its own. The id of a table comes from the user, or is computed from its address, its columns and
its partitions. So two things can go wrong when a member joins, and both are refused before anything is written:

- The group reads the table under another id, with the same columns and partitions: under this id it would start again
  from the beginning (`IdentityChanged`).
- The group reads the table with other columns, partitions or another partitioner, under this id or another one: rows
  that change their partition would be passed over or handled again (`SourceChanged`).

The group keeps a `SourceRead` for each such source, under a key that depends on the table alone (`Source.mark`). It is
written in one commit with the first checkpoints under its id, and the commit expects its version. So of two members
that begin at the same moment under two ids, the second one's commit is refused, and it then reads the first one's
record. An administrator who imports or resets checkpoints under another id replaces the record: from then on the group
reads the table under that id, and members with the former one are refused.

Version 0.1 wrote no such record; what can be seen of its checkpoints is checked: see `former_reads` and
`check_meaning`. The record of a source that a group has forgotten stays, as all guards do (R4), with an empty id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pxrs.errors import IdentityChanged, SourceChanged
from pxrs.group.records import BY_HAND, Checkpoint, Keys, SourceRead
from pxrs.log.contract import Source, TopicLog

_NOT_RUN: Final = (*BY_HAND, "start")
"""Values of `Checkpoint.by` for checkpoints that were written before any member handled a message."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A source that a group is about to read."""

    key: str
    """Where the group keeps its `SourceRead`: see `Source.mark`."""
    read: SourceRead
    partitions: int
    former_ids: tuple[str, ...] = ()
    """Other ids that it may have been read under by version 0.1."""


def foreign_of(keys: Keys, source: Source) -> Foreign | None:
    """How the group keeps this source on record; None if it is a topic, which has a random id of its own."""
    if isinstance(source, TopicLog):
        return None
    read = SourceRead(source.id, source.name, source.address, source.meaning)
    return Foreign(f"{keys.sources}{source.mark or source.id}", read, source.partitions, source.former_ids)


def foreign_parts(keys: Keys, source: Source) -> dict[str, Foreign]:
    """The record that the group stores of each part of this source, by the id of the part. Topics have none."""
    found = {part.id: foreign_of(keys, part) for part in source.parts}
    return {id: foreign for id, foreign in found.items() if foreign is not None}


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
            raise changed(group, ours, read)
    has_run = any(checkpoint.by not in _NOT_RUN for checkpoint in checkpoints.values())
    count = max(checkpoints) + 1
    if count > ours.partitions or (has_run and not records and len(checkpoints) < ours.partitions):
        raise changed(group, ours, SourceRead(ours.read.id, meaning=f"{count} partitions"))


def former_reads(ours: Foreign, known: Mapping[str, SourceRead], has_checkpoints: bool) -> Iterator[SourceRead]:
    """The records under which the group may have read the same table with another id. If it has a checkpoint under one
    of these ids, the member is refused with `changed`.

    known: the group's records by key. has_checkpoints: whether the group has any under the id that is read now. Then
    the ids of version 0.1, of which there is no record, do not count: somebody has imported checkpoints since."""
    for key, read in known.items():
        # Compare addresses too: the database may report the fingerprint to one role and not to another.
        if read.id not in ("", ours.read.id) and (key == ours.key or read.address == ours.read.address):
            yield read
    if not has_checkpoints:
        yield from (SourceRead(id) for id in ours.former_ids if id != ours.read.id)


def changed(group: str, ours: Foreign, former: SourceRead) -> IdentityChanged | SourceChanged:
    """The error for a group that has checkpoints of the source as `former` says."""
    now = ours.read
    if former.meaning not in ("", now.meaning):
        return SourceChanged(group, now.name, former.meaning, now.meaning, former.id)
    return IdentityChanged(group, now.name, now.id, former.id, former.address)
