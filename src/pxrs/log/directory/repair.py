"""Repairs what the consistency checker finds: `pxrs check --repair`.

`plan` says what would be done and changes nothing; `Step.perform` does it. No byte is thrown away:

| what is wrong | what is done |
|---|---|
| frames of a segment cannot be read | a new segment goes on from there: `mending.py`; the damaged one stays as it is |
| the first frame of a segment cannot be read | the same; the damaged segment is kept beside it under another name |
| a segment is missing, or published bytes of the last one | a new segment with a gap for the lost offsets |
| an index, or the producers' state | the file is renamed; it is made again from the segments |
| `published`, damaged or of another partition | a copy is kept; the end is found again in the last segment |
| `start`, damaged or of another partition | a copy is kept; the first segment that is there is the beginning |
| `reserved`, damaged | a copy is kept; it is written anew, beyond every offset that is known to have been given away |

What it cannot repair, because what is needed is nowhere in the directory: a damaged or missing `topic.json`, the
missing folder of a topic or partition, a segment or `reserved` that belongs elsewhere, a folder that no topic leads to.

A step is done under the partition's append lock, as a roll is, and looks at the files again first: what was written
since the plan was made is left alone. Readers and producers of other processes go on: nothing that they have mapped is
cut (L2), and producers whose last batches are lost are told so by the gap (`pxrs.log.producers`).

A repair that is killed leaves files that the next one finishes, and a log that other processes can use meanwhile. The
last segment is therefore sealed before it is repaired (`_seal`). No offset is given away twice: where neither
`published` nor the last segment tells how many were, the new segment begins further on, behind a gap.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from pxrs import clock, disk
from pxrs.disk import replace_file
from pxrs.errors import DamagedFrame, MisplacedFile
from pxrs.log.batch import place_id
from pxrs.log.contract import DamagedTopic
from pxrs.log.directory.append_lock import AppendLock
from pxrs.log.directory.check import Finding
from pxrs.log.directory.description import look_up
from pxrs.log.directory.kept_files import Signature, keep, signature
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.directory.mending import OFFSET_MAX, Lost, Mended, gaps, mend
from pxrs.log.directory.published import NAME as PUBLISHED
from pxrs.log.directory.published import NOTHING, Published, PublishedFile
from pxrs.log.directory.recovery import Recovery
from pxrs.log.directory.reserved import RESERVED, RESERVED_OFFSETS, dump_reserved, read_reserved
from pxrs.log.directory.scanning import scan, whole_behind
from pxrs.log.directory.sealed import index_path
from pxrs.log.directory.segments.files import SUFFIX, segment_bases, segment_path
from pxrs.log.directory.segments.writing import next_segment
from pxrs.log.directory.start import NAME as START
from pxrs.log.directory.start import read_start, write_start
from pxrs.model import Topic
from pxrs.wording import counted

LOCK_S: Final = 10.0
_FIRST: Final = (RESERVED, PUBLISHED)
"""What is repaired before the segments: it tells where they end."""


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
    "cannot be repaired: the directory does not contain the missing data; put the file or folder back from a backup, "
    "or delete the topic"
)


class _Known(NamedTuple):
    """What the file `published` tells."""

    published: Published | None
    """The end in this boot; None if the file does not tell it: it is missing, damaged, misplaced, of an earlier boot,
    or older than the segments."""
    last: Published
    """The last end that the file tells, of any boot."""
    is_of_this_boot: bool = False
    """Whether messages were published since the machine started, so that no power loss has taken any."""
    is_damaged: bool = False
    """Whether the file should tell the end and does not, so that bytes behind the last whole frame may be those of
    messages that were acknowledged. After a start of the machine they are an append that was torn."""


class _PartitionRepair:
    """Repairs one partition."""

    def __init__(self, path: Path, topic: Topic, number: int) -> None:
        self.topic, self.number, self._root = topic, number, path
        # Resolved: if the topic is deleted and another one gets its name before a step is done, the folder is gone.
        self.folder = str((path / "topics" / topic.name).resolve() / "partitions" / f"partition-{number}")
        self.id = place_id(topic.id, number)

    def steps(self, findings: list[Finding]) -> list[Step]:
        if not os.path.isdir(self.folder):
            return [Step(each, _HOPELESS) for each in findings]
        segments = {each.file: each for each in reversed(findings) if each.file.endswith(SUFFIX)}
        small = {each.file: each for each in reversed(findings) if not each.file.endswith(SUFFIX)}
        # First the files that tell where the last segment must end. The other small files last: an index is made again
        # from segments that can be read.
        first = [
            self._small(small.pop(f"{self.folder}/{name}"), segments) for name in _FIRST if self._is_in(name, small)
        ]
        rest = [self._small(each, segments) for each in reversed(small.values())]
        return [*first, *(self._segment(each) for each in reversed(segments.values())), *rest]

    def _is_in(self, name: str, findings: Container[str]) -> bool:
        return f"{self.folder}/{name}" in findings

    # Small files.

    def _small(self, finding: Finding, segments: Container[str]) -> Step:
        file, name = finding.file, os.path.basename(finding.file)
        seen = signature(file)
        if name == PUBLISHED:
            return self._published_file(finding, segments)
        if name == START:
            again = "the first existing segment becomes the beginning"
            return Step(finding, f"keep a copy of it; {again}", 0, lambda: self._rewrite(file, seen, self._begin_anew))
        if name == RESERVED and "another topic or partition" not in finding.what:
            again = "it is rewritten with an offset above all that may have been assigned"
            action = f"keep a copy of it; {again}"
            return Step(finding, action, 0, lambda: self._rewrite(file, seen, self._reserve_anew))
        if name.endswith((".index", ".producers")):
            return Step(finding, "rename it; it is rebuilt from the segments", 0, lambda: self._rename(file, seen))
        return Step(finding, _HOPELESS)

    def _rename(self, file: str, seen: Signature | None) -> str:
        with self._locked():
            if signature(file) != seen:
                return _changed(file)
            kept = keep(file)
            disk.sync_folder(self.folder)
        return f"renamed to {kept}"

    def _rewrite(self, file: str, seen: Signature | None, write: Callable[[], None]) -> str:
        """Replace a file that must not be missing at any moment: its absence means something else."""
        with self._locked():
            if signature(file) != seen:
                return _changed(file)
            kept = keep(file, is_copied=True)
            write()
            disk.sync_folder(self.folder)
        return f"{file} was rewritten; a copy of the damaged one is {kept}"

    def _begin_anew(self) -> None:
        bases = segment_bases(self.folder)
        write_start(self.folder, self.id, bases[0] if bases else 0)

    def _reserve_anew(self) -> None:
        reserved = dump_reserved(self._reserved_at_least(), self.id)
        replace_file(f"{self.folder}/{RESERVED}", reserved, is_durable=True)

    def _reserved(self) -> int:
        """The first offset that was never reserved, as far as that is known. Raises MisplacedFile."""
        try:
            return read_reserved(self.folder, self.id)
        except MisplacedFile:
            raise
        except DamagedFrame:
            return self._reserved_at_least()

    def _reserved_at_least(self) -> int:
        """An offset that no process has given away, found without `reserved`: one reservation beyond the last offset
        that the other files tell."""
        last, end = self._look().last, 0
        if bases := segment_bases(self.folder):
            path = segment_path(self.folder, bases[-1])
            data = pa.py_buffer(Path(path).read_bytes())
            scanned = scan(data, path, bases[-1], self.id)
            behind, _ = whole_behind(data, path, scanned, self.id, OFFSET_MAX)
            end = behind[-1][1].next_offset if behind else scanned.end
        return max(last.end, end) + RESERVED_OFFSETS

    # The published end.

    def _published_file(self, finding: Finding, segments: Container[str]) -> Step:
        published = self._look().published
        if published is None:
            try:
                mended = self._mended(self._last_base())
            except (DamagedFrame, OSError) as error:
                return Step(finding, _refused(error))
            action = "keep a copy of it; the end is taken from the last segment"
            if mended is None or any(self._is_in(_name(base), segments) for base in (self._last_base(), mended.base)):
                return Step(finding, action, 0, lambda: self._find_end(finding.file))
            lost = _count(mended.lost)
            action = f"{action}; continue in {segment_path(self.folder, mended.base)}; {_told(mended.lost)}"
            return Step(finding, action, lost, lambda: self._find_end(finding.file))
        start = self._start()
        if published.end < start:
            action = f"continue at offset {start}, after a gap"
            return Step(finding, action, 0, lambda: self._fill(published, start))
        return Step(finding, "nothing to do: it is no longer damaged")

    def _find_end(self, file: str) -> str:
        """Find the end in the last segment, and publish it. Where bytes behind the last whole frame cannot be read,
        they stay where they are, and a new segment goes on behind a gap: they may be messages that were acknowledged,
        and consumers may have read them."""
        with self._locked():
            if self._look().published is not None:
                return _changed(file)
            base = self._last_base()
            if (mended := self._mended(base)) is not None:
                done = self._seal(base, mended.end) + self._write_segment(mended, base)
            else:
                done = self._publish(NOTHING) + "the end was taken from the last segment"
        if mended is None:  # let a process that opens the partition find the end
            log = DirectoryLog(self._root)
            try:
                log.topic(self.topic.name).end(self.number)
            finally:
                log.close()
        return done

    def _fill(self, published: Published, start: int) -> str:
        with self._locked():
            if self._look().published != published:
                return _changed(f"{self.folder}/{PUBLISHED}")
            content = gaps(published.end, start, self.id, clock.wall_time_us())
            mended = Mended(published.end, content, start, [])
            return self._seal(published.segment, start) + self._write_segment(mended, published.segment)

    # Segments.

    def _segment(self, finding: Finding) -> Step:
        try:
            mended = self._mended(_base(finding.file))
        except (DamagedFrame, OSError, ValueError) as error:
            return Step(finding, _refused(error))
        if mended is None:
            return Step(finding, "nothing to do: the next process that opens the partition continues after it")
        new = segment_path(self.folder, mended.base)
        kept = "; the damaged file is kept beside it" if os.path.exists(new) else ""
        action = f"continue in {'a new ' if kept else ''}{new}{kept}; {_told(mended.lost)}"
        return Step(finding, action, _count(mended.lost), lambda: self._replace(finding.file))

    def _mended(self, base: int) -> Mended | None:
        """What takes the place of the damage in this segment, or of the segment if it is missing. None if nothing has
        to, or if retention has removed the segment."""
        known, bases, now = self._look(), segment_bases(self.folder), clock.wall_time_us()
        published = known.published
        is_last = base >= self._last_base()
        end = None if published is None else published.end
        # Behind `end_min` no offset was given away. A power loss takes messages that were read, and not their offsets.
        end_min = known.last.end if known.is_of_this_boot else max(known.last.end, self._reserved())
        if not is_last:
            end = next((each for each in bases if each > base), self._last_base())
        torn = RESERVED_OFFSETS if known.is_damaged else 0
        if base not in bases:
            until = end_min + torn if end is None else end
            lost = Lost(base, until, "the segment is missing")
            is_gone = until <= max(base, self._start())
            return None if is_gone else Mended(base, gaps(base, until, self.id, now), until, [lost])
        path = segment_path(self.folder, base)
        data = pa.py_buffer(Path(path).read_bytes())
        if is_last and published is not None:
            data = data.slice(0, min(data.size, published.segment_bytes))
        return mend(data, path, base, self.id, end=end, end_min=end_min, torn=torn, stored_at=now)

    def _replace(self, file: str) -> str:
        base = _base(file)
        with self._locked():
            is_last = base >= self._last_base()
            mended = self._mended(base)
            if mended is None:
                return f"nothing: {file} is no longer damaged, or retention has removed it"
            done = self._seal(base, mended.end) if is_last else ""
            return done + self._write_segment(mended, base)

    def _write_segment(self, mended: Mended, base: int) -> str:
        """Write the segment that takes the place of damage in the one at `base`; that one is not changed, or is kept
        under another name. The caller holds the append lock."""
        new = segment_path(self.folder, mended.base)
        kept = self._make_room(new, mended.base, base)
        replace_file(new, mended.content, is_durable=True)
        disk.sync_folder(self.folder)
        for each in sorted({base, mended.base}):  # the indexes of files that are damaged or gone
            if os.path.exists(index := index_path(segment_path(self.folder, each))):
                kept += f"; {index} renamed to {keep(index)}"
        disk.sync_folder(self.folder)
        return f"{new} was written{kept}; {_told(mended.lost)}"

    def _seal(self, base: int, end: int) -> str:
        """Go on in a new segment at the offset `end`, as a roll does, before the last one, which begins at `base`, is
        repaired. So a repair that is killed leaves a sealed segment that is damaged, which the next repair finds, and
        no process goes on in a segment of which a part was replaced. Returns what `_publish` does."""
        if os.path.exists(old := segment_path(self.folder, base)):
            with open(old, "rb") as file:  # a segment is synced before the next one is made (L3)
                disk.sync_data(file.fileno())
        if end > base:
            next_segment(self.folder, end).close()
        return self._publish(Published(0, end, 0, end))

    def _publish(self, published: Published) -> str:
        """Write `published`. Returns where the former content is kept, if it was damaged."""
        path = f"{self.folder}/{PUBLISHED}"
        kept = f"a copy of {path} is {keep(path, is_copied=True)}; " if self._look().is_damaged else ""
        file = PublishedFile(path, self.id)
        try:
            file.start_anew(published)
        finally:
            file.close()
        return kept

    def _make_room(self, new: str, new_base: int, base: int) -> str:
        """Keep what has the name of the new segment. Raises DamagedFrame if that is another segment than the damaged
        one."""
        if not os.path.exists(new):
            return ""
        if new_base != base and os.path.getsize(new):
            raise DamagedFrame(new, 0, "another segment exists where the readable part of the damaged one ends")
        return f"; the former file is kept as {keep(new, is_copied=True)}"

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

    def _start(self) -> int:
        """The first offset that retention has left; 0 if that is not known."""
        try:
            return read_start(self.folder, self.id, is_retained=self.topic.is_retained) or 0
        except DamagedFrame:
            return 0

    def _last_base(self) -> int:
        """The first offset of the segment that is appended to, as far as that is known."""
        known, bases = self._look(), segment_bases(self.folder)
        if known.published is not None:
            return known.published.segment
        return bases[-1] if bases else self._start()

    def _look(self) -> _Known:
        """What is published. Under the append lock it is exact; a plan is made without the lock."""
        try:
            file = PublishedFile(f"{self.folder}/{PUBLISHED}", self.id, os.O_RDONLY)
        except FileNotFoundError:
            return _Known(None, NOTHING)
        try:
            while (published := file.read()) is not None:
                if not self._is_outdated(published, file):
                    return _Known(published, published, True)
                if file.read() == published:  # else another process has appended meanwhile
                    return _Known(None, published, True, is_damaged=True)
            return _Known(None, file.last(), file.is_of_this_boot(), file.has_damaged_slot())
        except MisplacedFile:
            return _Known(None, NOTHING, is_damaged=True)
        finally:
            file.close()

    def _is_outdated(self, published: Published, file: PublishedFile) -> bool:
        """Whether more was appended than this end tells, as after the restore of an older copy of the file."""
        place = f"{self.topic.name}/{self.number}"
        recovery = Recovery(
            self.folder, place, self.id, file, is_synced=lambda: False, known_start=lambda: self._start()
        )
        return recovery.is_outdated(published)


def _base(file: str) -> int:
    return int(os.path.basename(file).removesuffix(SUFFIX))


def _name(base: int) -> str:
    return os.path.basename(segment_path("", base))


def _changed(file: str) -> str:
    return f"nothing: {file} was written since the plan was made; check again"


def _refused(error: Exception) -> str:
    what = error.what if isinstance(error, DamagedFrame) else str(error)
    return f"cannot be repaired: {what}; put the right file in its place"


def _count(lost: list[Lost]) -> int:
    return sum(each.next_offset - each.offset for each in lost)


def _told(lost: list[Lost]) -> str:
    parts = [
        f"{each.offset} to {each.next_offset - 1} ({each.what})" for each in lost if each.offset < each.next_offset
    ]
    if not parts:
        return "no offset is lost"
    return f"{counted(_count(lost), 'offset')} without messages: {', '.join(parts)}"
