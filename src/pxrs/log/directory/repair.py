"""Repairs what the consistency checker finds: `pxrs check --repair`.

`plan` says what would be done and changes nothing; `Step.perform` does it. No byte is thrown away:

| what is wrong | what is done |
|---|---|
| frames of a segment cannot be read | a new segment goes on from there: `mending.py`; the damaged one stays as it is |
| the first frame of a segment cannot be read | the same; the damaged segment is kept beside it under another name |
| a segment is missing, or published bytes of the last one | a new segment with a gap for the lost offsets |
| an index, or the producers' state | the file is renamed; it is made again from the segments |
| `published`, damaged or of another partition | the file is renamed; the end is found again in the last segment |
| `start`, damaged or of another partition | the file is renamed; the first segment that is there is the beginning |
| `reserved`, damaged | the file is renamed, and written anew, beyond every offset that can have been given away |

What it cannot repair, because what is needed is nowhere in the directory: a damaged or missing `topic.json`, the
missing folder of a topic or partition, a segment or `reserved` that belongs elsewhere, a folder that no topic leads to.

A step is done under the partition's append lock, as a roll is, and looks at the files again first. Readers and
producers of other processes go on: nothing that they have mapped is cut (L2).
"""

from __future__ import annotations

import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from pxrs import clock, disk
from pxrs.disk import replace_file
from pxrs.errors import DamagedFrame, MisplacedFile
from pxrs.log.batch import place_id
from pxrs.log.contract import DamagedTopic
from pxrs.log.directory.append_lock import AppendLock
from pxrs.log.directory.check import Finding
from pxrs.log.directory.description import look_up
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.directory.mending import Lost, Mended, gaps, mend
from pxrs.log.directory.published import NAME as PUBLISHED
from pxrs.log.directory.published import NOTHING, Published, PublishedFile
from pxrs.log.directory.reserved import RESERVED, RESERVED_OFFSETS, dump_reserved
from pxrs.log.directory.sealed import index_path
from pxrs.log.directory.segments.files import SUFFIX, segment_bases, segment_path
from pxrs.log.directory.segments.writing import next_segment
from pxrs.log.directory.start import NAME as START
from pxrs.log.directory.start import read_start, write_start
from pxrs.model import Topic
from pxrs.wording import counted

LOCK_S: Final = 10.0
_KEPT: Final = "damaged"
"""In the name under which a file is kept that is replaced or removed."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that is wrong, and what is done about it."""

    finding: Finding
    action: str
    """What is done, or why nothing can be done."""
    lost: int = 0
    """How many offsets become a gap: their messages cannot be read any more."""
    do: Callable[[], str] | None = None
    """Does it, and returns what was done. None if nothing can be done."""

    @property
    def is_possible(self) -> bool:
        return self.do is not None

    def perform(self) -> str:
        assert self.do is not None
        return self.do()


def plan(path: Path, findings: Iterable[Finding]) -> list[Step]:
    """What can be done about these findings of the checker, in the order in which it has to be done."""
    places: defaultdict[tuple[str, int | None], list[Finding]] = defaultdict(list)
    for finding in findings:
        places[finding.topic, finding.partition].append(finding)
    steps: list[Step] = []
    for (name, number), found in places.items():
        topic = look_up(path / "topics", name) if name else None
        if number is None or topic is None or isinstance(topic, DamagedTopic):
            steps += [Step(each, _HOPELESS) for each in found]
        else:
            steps += _PartitionRepair(path, topic, number).steps(found)
    return steps


_HOPELESS: Final = (
    "cannot be repaired: what is needed is nowhere in the directory; put the file or folder back from a backup, or "
    "delete the topic"
)


class _PartitionRepair:
    """Repairs one partition."""

    def __init__(self, path: Path, topic: Topic, number: int) -> None:
        self.topic, self.number, self._root = topic, number, path
        self.folder = str(path / "topics" / topic.name / "partitions" / f"partition-{number}")
        self.id = place_id(topic.id, number)

    def steps(self, findings: list[Finding]) -> list[Step]:
        if not os.path.isdir(self.folder):
            return [Step(each, _HOPELESS) for each in findings]
        small = [each for each in findings if not each.file.endswith(SUFFIX)]
        segments = {each.file: each for each in reversed(findings) if each.file.endswith(SUFFIX)}
        # `published` first: where the last segment must end is read from it. The other small files last: an index is
        # made again from segments that can be read.
        small.sort(key=lambda each: os.path.basename(each.file) != PUBLISHED)
        first = [self._small(each) for each in small if os.path.basename(each.file) == PUBLISHED]
        rest = [self._small(each) for each in small if os.path.basename(each.file) != PUBLISHED]
        return [*first, *(self._segment(each) for each in reversed(segments.values())), *rest]

    # Small files.

    def _small(self, finding: Finding) -> Step:
        file, name = finding.file, os.path.basename(finding.file)
        if name == PUBLISHED:
            return self._published_file(finding)
        if name == START:
            again = "the first segment that is there is taken for the beginning"
            return Step(finding, f"rename it; {again}", 0, lambda: self._rename(file, self._begin_anew))
        if name == RESERVED and "another topic or partition" not in finding.what:
            again = "it is written anew, beyond every offset that can have been given away"
            return Step(finding, f"rename it; {again}", 0, lambda: self._rename(file, self._reserve_anew))
        if name.endswith((".index", ".producers")):
            return Step(finding, "rename it; it is made again from the segments", 0, lambda: self._rename(file))
        return Step(finding, _HOPELESS)

    def _rename(self, file: str, then: Callable[[], None] = lambda: None) -> str:
        with self._locked():
            kept = _keep(file)
            then()
            disk.sync_folder(self.folder)
        return f"renamed to {kept}"

    def _begin_anew(self) -> None:
        if bases := segment_bases(self.folder):
            write_start(self.folder, self.id, bases[0])

    def _reserve_anew(self) -> None:
        published, last = self._look()
        end = max(last.end, 0 if published is None else published.end)
        reserved = dump_reserved(end + RESERVED_OFFSETS, self.id)
        replace_file(f"{self.folder}/{RESERVED}", reserved, is_durable=True)

    # The published end.

    def _published_file(self, finding: Finding) -> Step:
        try:
            published, _ = self._read_published()
        except MisplacedFile:
            again = "the end is found again in the last segment"
            return Step(finding, f"rename it; {again}", 0, lambda: self._rename(finding.file))
        if published is None:
            action = "keep a copy of it; the end is found again in the last segment"
            return Step(finding, action, 0, lambda: self._find_end(finding.file))
        start = read_start(self.folder, self.id, is_retained=self.topic.is_retained) or 0
        if published.end < start:
            action = f"go on at offset {start}, behind a gap"
            return Step(finding, action, 0, lambda: self._fill(published, start))
        return Step(finding, "nothing is to be done: it is sound by now")

    def _find_end(self, file: str) -> str:
        """Let a process that opens the partition find the end. If the last segment is damaged, its repair does so."""
        kept = _keep(file, is_copied=True)
        log = DirectoryLog(self._root)
        try:
            topic = log.topic(self.topic.name)
            with suppress(DamagedFrame):
                topic.end(self.number)
        finally:
            log.close()
        return f"a copy of it is {kept}"

    def _fill(self, published: Published, start: int) -> str:
        with self._locked():
            now, _ = self._look()
            if now != published:
                return f"{self.folder}/{PUBLISHED} was written since; check again"
            content = gaps(published.end, start, self.id, clock.wall_time_us())
            mended = Mended(published.end, content, start, [])
            new = segment_path(self.folder, published.end)
            kept = self._make_room(new, published.end, published.segment)
            replace_file(new, content, is_durable=True)
            disk.sync_folder(self.folder)
            self._publish(mended)
        return f"{new} was written{kept}"

    # Segments.

    def _segment(self, finding: Finding) -> Step:
        try:
            mended = self._mended(int(Path(finding.file).name.removesuffix(SUFFIX)))
        except (DamagedFrame, OSError, ValueError) as error:
            what = error.what if isinstance(error, DamagedFrame) else str(error)
            return Step(finding, f"cannot be repaired: {what}; put the right file in its place")
        if mended is None:
            return Step(finding, "nothing is to be done: the next process that opens the partition goes on behind it")
        new = segment_path(self.folder, mended.base)
        lost = sum(each.next_offset - each.offset for each in mended.lost)
        kept = "; the damaged file is kept beside it" if new == finding.file and os.path.exists(new) else ""
        action = f"go on in {'a new ' if kept else ''}{new}{kept}; {_told(mended.lost)}"
        return Step(finding, action, lost, lambda: self._replace(finding.file))

    def _mended(self, base: int) -> Mended | None:
        """What takes the place of the damage in this segment, or of the segment if it is missing."""
        published, last = self._look()
        bases = segment_bases(self.folder)
        now = clock.wall_time_us()
        tail = published.segment if published is not None else (bases[-1] if bases else last.segment)
        following = next((each for each in bases if each > base), None)
        is_last = base >= tail
        end = (None if published is None else published.end) if is_last else (tail if following is None else following)
        if base not in bases:
            until = last.end if end is None else end
            what = "the segment is missing"
            return Mended(base, gaps(base, until, self.id, now), until, [Lost(base, until, what)])
        path = segment_path(self.folder, base)
        data = pa.py_buffer(Path(path).read_bytes())
        if is_last and published is not None:
            data = data.slice(0, min(data.size, published.segment_bytes))
        end_min = last.end if self.topic.durability == "disk" else 0
        return mend(data, path, base, self.id, end=end, end_min=end_min, stored_at=now)

    def _replace(self, file: str) -> str:
        base = int(Path(file).name.removesuffix(SUFFIX))
        with self._locked():
            published, _ = self._look()
            bases = segment_bases(self.folder)
            is_last = base >= (published.segment if published is not None else bases[-1] if bases else 0)
            mended = self._mended(base)
            if mended is None:
                return f"{file} is sound by now"
            new = segment_path(self.folder, mended.base)
            kept = self._make_room(new, mended.base, base)
            replace_file(new, mended.content, is_durable=True)
            disk.sync_folder(self.folder)
            if is_last and mended.base == base:
                # A writer that has the damaged file open would go on in it: a new segment makes it open that one.
                next_segment(self.folder, mended.end).close()
                self._publish(Mended(mended.end, b"", mended.end, []))
            elif is_last:
                self._publish(mended)
            for each in {base, mended.base}:  # the indexes of files that are damaged or gone
                if os.path.exists(index := index_path(segment_path(self.folder, each))):
                    kept += f"; {index} renamed to {_keep(index)}"
            disk.sync_folder(self.folder)
        return f"{new} was written{kept}; {_told(mended.lost)}"

    def _make_room(self, new: str, new_base: int, base: int) -> str:
        """Keep what has the name of the new segment. Raises DamagedFrame if that is another segment than the damaged
        one."""
        if not os.path.exists(new):
            return ""
        if new_base != base and os.path.getsize(new):
            raise DamagedFrame(new, 0, "another segment lies where the readable part of the damaged one ends")
        return f"; what was there is in {_keep(new, is_copied=True)}"

    def _publish(self, mended: Mended) -> None:
        file = PublishedFile(f"{self.folder}/{PUBLISHED}", self.id)
        try:
            file.rebuild(mended.base, len(mended.content), mended.end)
        finally:
            file.close()

    # What these share.

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = AppendLock(self.folder, f"{self.topic.name}/{self.number}", LOCK_S)
        try:
            lock.acquire()
            yield
        finally:
            lock.release()
            lock.close()

    def _look(self) -> tuple[Published | None, Published]:
        """What is published in this boot, and what was in any; nothing if the file is damaged or misplaced, because
        its repair comes first."""
        try:
            return self._read_published()
        except MisplacedFile:
            return None, NOTHING

    def _read_published(self) -> tuple[Published | None, Published]:
        try:
            file = PublishedFile(f"{self.folder}/{PUBLISHED}", self.id, os.O_RDONLY)
        except FileNotFoundError:
            return None, NOTHING
        try:
            return file.read(), file.last()
        finally:
            file.close()


def _told(lost: list[Lost]) -> str:
    parts = [
        f"{each.offset} to {each.next_offset - 1} ({each.what})" for each in lost if each.offset < each.next_offset
    ]
    if not parts:
        return "no offset is lost"
    count = sum(each.next_offset - each.offset for each in lost)
    return f"{counted(count, 'offset')} without messages: {', '.join(parts)}"


def _keep(file: str, *, is_copied: bool = False) -> str:
    """Give a file another name, or copy it; returns the name of what is kept."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for number in range(1_000):
        kept = f"{file}.{_KEPT}-{stamp}" + (f"-{number}" if number else "")
        if not os.path.exists(kept):
            break
    if is_copied:
        shutil.copyfile(file, kept)  # the name must not be missing for a moment: readers use it
        disk.sync_folder(os.path.dirname(file))
    else:
        os.rename(file, kept)
    return kept
