"""What is copied of one partition: its sealed segments, its last segment up to an end, the producers' state.

Segments are copied in several passes, because a pass over a large hub takes long: what one pass has copied, the next
one need not. Retention may remove segments between two passes. So each pass notes which segment follows which, and the
copy consists of the segments that follow each other without a hole up to the last one.

The end. The registry is copied before the ends of the partitions are read, so that no checkpoint in the copy is beyond
the end of its partition. What was appended since is copied too, up to the first frame of a Spark batch whose manifest
the copied keys do not have. Such a frame was appended after the registry was copied, because its manifest was committed
before it; and the restored query would publish the batch again, perhaps with its rows in another order, while the log
would take some of its pieces for duplicates (K1). The same is true of a piece of `pxrs topic copy` whose number the
copied record of that copy has not reached, and of every piece of a copy of which the copied keys have no record.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from pxrs.backup.manifest import CopiedFile, CopiedPartition
from pxrs.backup.target import Target
from pxrs.errors import BackupError
from pxrs.log.batch import Header, place_id
from pxrs.log.directory.producers_file import producers_path
from pxrs.log.directory.published import Published
from pxrs.log.directory.segments.files import segment_bases, segment_path
from pxrs.log.directory.segments.frames import headers_of
from pxrs.log.directory.start import read_start
from pxrs.model import Topic

_PUBLISHER_UUID_VERSION: Final = 5
"""Producers of queries have ids that are computed from names (`producer_of`), and those of copies the same form
(`copying.records.new_id`); those of other producers are random."""


class End(NamedTuple):
    """Where the copy of a partition ends: how much of which segment is copied."""

    segment: int
    bytes: int
    offset: int
    whole_offset: int


@dataclass(slots=True)
class PartitionCopy:
    """The copy of one partition as far as it was made."""

    topic: Topic
    number: int
    folder: str
    has_begun: bool = False
    """Whether `start` was read, by the first pass."""
    start: int | None = None
    """The first offset as the first pass has read it; None if it is not known."""
    following: dict[int, int] = field(default_factory=dict)
    """By the first offset of each sealed segment that was copied: that of the next one."""
    files: dict[int, list[CopiedFile]] = field(default_factory=dict)
    """The copies that belong to a sealed segment, by its first offset."""
    tail: list[CopiedFile] = field(default_factory=list)
    end: End | None = None

    @property
    def id(self) -> int:
        return place_id(self.topic.id, self.number)

    def copy_sealed(self, target: Target, published: Published, known: Mapping[str, CopiedFile]) -> int:
        """Copy the sealed segments that no earlier pass has copied; returns how many. Raises FileNotFoundError if the
        topic was deleted. known: the files of the last whole backup."""
        if not self.has_begun:
            # Read before the segments are listed: retention writes it before it unlinks any.
            self.start = read_start(self.folder, self.id, is_retained=self.topic.is_retained)
            self.has_begun = True
        bases = [base for base in segment_bases(self.folder) if base <= published.segment]
        copied = 0
        for at, base in enumerate(bases[:-1] if bases and bases[-1] == published.segment else bases):
            if base in self.files:
                continue
            following = bases[at + 1] if at + 1 < len(bases) else published.segment
            source = segment_path(self.folder, base)
            try:
                self.files[base] = self._copy(target, base, os.stat(source).st_size, known)
            except FileNotFoundError:
                if not os.path.isdir(self.folder):
                    raise
                continue  # retention has removed the segment
            self.following[base] = following
            copied += 1
        return copied

    def copy_tail(self, target: Target, end: End, known: Mapping[str, CopiedFile]) -> None:
        """Copy the last segment up to the end."""
        self.end = end
        self.files.pop(end.segment, None)
        self.following.pop(end.segment, None)
        exists = os.path.exists(segment_path(self.folder, end.segment))
        self.tail = self._copy(target, end.segment, end.bytes, known) if exists or end.bytes else []

    def _copy(self, target: Target, base: int, size: int, known: Mapping[str, CopiedFile]) -> list[CopiedFile]:
        source = Path(segment_path(self.folder, base))
        folder = f"logs/{self.topic.id}/partitions/partition-{self.number}"
        path = f"logs/{self.topic.id}/{self.number}/{base:020d}-{size}.log"
        place = f"{folder}/{source.name}"
        of_last = known.get(path)
        found = target.keep(source, path, place, size, of_last) or target.copy(source, path, place, size, of_last)
        return [found, *self._copy_producers(target, str(source), base, folder)]

    def _copy_producers(self, target: Target, segment: str, base: int, folder: str) -> list[CopiedFile]:
        try:
            data = Path(producers_path(segment)).read_bytes()
        except FileNotFoundError:
            return []
        path = f"logs/{self.topic.id}/{self.number}/{base:020d}-{xxhash.xxh3_64_hexdigest(data)}.producers"
        return [target.write(path, f"{folder}/{os.path.basename(producers_path(segment))}", data)]

    def find_end(self, before: Published | None, now: Published, batches: Mapping[bytes, int], floor: int) -> End:
        """Where the copy ends if `now` is what is published.

        before:  what was published before the registry was copied; None if the topic was not there yet.
        batches: the last batch of each query, and the last piece of each copy, that the copied keys know, by the id of
                 its producer.
        floor:   the greatest checkpoint of the partition in the copied keys."""
        end = End(now.segment, now.segment_bytes, now.end, now.end if now.whole_end is None else now.whole_end)
        if now.whole_end is not None:
            return end
        bases = [base for base in segment_bases(self.folder) if base <= now.segment]
        for at, base in enumerate(bases):
            if before is not None and base < before.segment:
                continue
            begin = before.segment_bytes if before is not None and base == before.segment else 0
            limit = now.segment_bytes if base == now.segment else None
            next_base = bases[at + 1] if at + 1 < len(bases) else now.end
            if (cut := self._cut(base, begin, limit, next_base, batches, floor)) is not None:
                return cut
        return end

    def _cut(
        self, base: int, begin: int, limit: int | None, next_base: int, batches: Mapping[bytes, int], floor: int
    ) -> End | None:
        """The place of the first frame of a batch or piece that is not part of the backup; None if there is none."""
        path = segment_path(self.folder, base)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None  # retention has removed the segment
        try:
            size = os.fstat(descriptor).st_size if limit is None else limit
            for position, header in headers_of(descriptor, path, begin, size, self.id):
                if header.base_offset >= next_base:
                    return None  # left behind the segment's end by a failed sync
                if header.base_offset >= floor and _is_foreign(header, batches):
                    return End(base, position, header.base_offset, header.base_offset)
        finally:
            os.close(descriptor)
        return None

    def finish(self) -> tuple[CopiedPartition, list[CopiedFile]]:
        """The partition as it is in the backup, and its files: the segments that follow each other up to the end."""
        assert self.end is not None
        files, base = list(self.tail), self.end.segment
        before = {following: each for each, following in self.following.items()}
        while (earlier := before.get(base)) is not None:
            base = earlier
            files += self.files[base]
        start = self._start_of(base)
        has_file = start > 0 or self.topic.is_retained
        return CopiedPartition(self.number, start, self.end.offset, self.end.whole_offset, has_file), files

    def _start_of(self, base: int) -> int:
        """The first offset of the backup, if its first segment begins at `base`. Raises BackupError if there are
        earlier segments that retention has not removed: then the copied ones do not follow each other, and the backup
        would lack messages."""
        now = read_start(self.folder, self.id, is_retained=self.topic.is_retained)
        if now is None or base <= now:
            return base if self.start is None else max(self.start, base)
        if (first := segment_bases(self.folder)[0]) < base:
            raise BackupError(
                f"{self.topic.name}/{self.number}: the segments between the offsets {first} and {base} were changed "
                "while they were copied, for example by a repair: run the backup again"
            )
        return now  # the hub itself lacks its first segment: the restored one reports the same damage


def _is_foreign(header: Header, batches: Mapping[bytes, int]) -> bool:
    """Whether the frame belongs to a batch of a query, or a piece of a copy, that the copied keys do not know."""
    if (last := batches.get(header.producer)) is not None:
        return header.epoch > last
    return header.producer[6] >> 4 == _PUBLISHER_UUID_VERSION
