"""The consistency checker: reads every byte of a log in a directory, and reports everything that is wrong.

It can be run at any time, beside producers, consumers and retention, and by a user that may only read: it takes no
lock, changes no file, and looks only at what is published. A file that retention or a deletion removes meanwhile is no
finding. Behind a damaged frame the checker goes on at the next whole one, so one run reports all damage.

After a start of the machine nothing is published until a process opens the partition. Until then the last segment is
judged as recovery will judge it: a torn append at its end is no finding, unless it was published before.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from pxrs import disk
from pxrs.errors import DamagedFrame, InvalidUrl, LogBusy, LogNotReadable, MisplacedFile
from pxrs.log.batch import ALIGNMENT, HEADER_BYTES, Header, place_id, read_header, read_payload
from pxrs.log.contract import DamagedTopic
from pxrs.log.directory.description import look_up
from pxrs.log.directory.index import Index
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.directory.producers_file import load_producers, producers_path
from pxrs.log.directory.published import NAME as PUBLISHED
from pxrs.log.directory.published import NOTHING, Published, PublishedFile
from pxrs.log.directory.reserved import is_reserved, read_reserved
from pxrs.log.directory.scanning import is_later_than, next_run
from pxrs.log.directory.sealed import index_path
from pxrs.log.directory.segments.files import segment_bases, segment_path
from pxrs.log.directory.segments.frames import next_frame
from pxrs.log.directory.segments.scanning import has_later_append
from pxrs.log.directory.start import missing_before, read_start
from pxrs.model import STORED_TOPIC_NAME, Topic
from pxrs.wording import counted

_OFFSET_MAX: Final = (1 << 63) - 1
_PARTITION_FOLDER: Final = re.compile(r"partition-(0|[1-9][0-9]*)")


class Finding(NamedTuple):
    """One thing that is wrong, and where."""

    topic: str
    partition: int | None
    """None if the finding concerns the topic as a whole."""
    file: str
    position: int
    what: str


class Checked(NamedTuple):
    """A file that was read, how many messages it holds, and what is wrong with it."""

    topic: str
    partition: int | None
    file: str
    messages: int
    bytes: int
    findings: list[Finding]


class _Place(NamedTuple):
    """A partition and its folder."""

    topic: str
    number: int
    folder: str
    id: int
    """The `place_id` by which files name the partition."""
    is_synced: bool = True
    """Whether appends are synced. If not, a power loss may have taken any part of the last segment."""
    is_retained: bool = True
    """Whether the topic has a retention setting. True if that is not known, because `topic.json` is damaged."""

    def wrong(self, file: str, position: int, what: str) -> Finding:
        return Finding(self.topic, self.number, file, position, what)

    def only(self, file: str, what: str) -> Checked:
        """The only finding of a file."""
        return Checked(self.topic, self.number, file, 0, 0, [self.wrong(file, 0, what)])


class _Bounds(NamedTuple):
    """Which offsets and bytes a segment must have."""

    end: int | None
    """The offset at which the segment must end; None if no end was published since the machine started."""
    limit: int | None
    """How many bytes of the segment may be read; None if all."""
    is_sealed: bool
    end_min: int = 0
    """The offset up to which messages were published before the last start of the machine."""


def check(path: Path) -> Iterator[Checked]:
    """Read the log in this directory, file by file. Raises InvalidUrl if there is none. The iterator raises
    LogNotReadable at the first file that this process may not read: whether the file is damaged is then not known."""
    DirectoryLog(path).close()  # raises an error if the path cannot hold a log
    topics = path / "topics"
    with _permitted():
        if not _is_folder(topics):
            what = "it has no folder topics" if _is_folder(path) else "there is no such directory"
            raise InvalidUrl(f"{path} is no log: {what}; give the directory that was given to pxrs.open")
    return _check_permitted(topics)


def _check_permitted(topics: Path) -> Iterator[Checked]:
    with _permitted():
        yield from _check_topics(topics)


@contextlib.contextmanager
def _permitted() -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise disk.log_error(error) from error


def _is_folder(path: Path) -> bool:
    """Whether the path, or what it links to, is a folder. Raises PermissionError if that cannot be told, which
    `Path.is_dir` does not do in every version of Python."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except PermissionError:
        raise
    except OSError:
        return False


def _check_topics(topics: Path) -> Iterator[Checked]:
    for name in sorted(os.listdir(topics)):
        if STORED_TOPIC_NAME.fullmatch(name):
            yield from _check_topic(name, topics / name)
    yield from _check_nameless(topics)


def _check_topic(name: str, link: Path) -> Iterator[Checked]:
    if not _is_folder(link):
        # A deletion removes the link before the folder, and a creation makes the link last.
        if link.is_symlink() and not _is_folder(link):
            yield _of_topic(name, link, "the folder that it leads to is missing, and with it all messages")
        return
    folder = link.resolve()  # resolved once: a topic that is created meanwhile under the same name has another folder
    topic, what = _read_topic(link)
    there = _partition_numbers(folder)
    if not folder.exists() or link.resolve() != folder:
        return  # it was deleted meanwhile
    numbers = there if topic is None else set(range(topic.partitions))
    if what is None and (more := len(there - numbers)):
        what = f"the topic has {counted(len(numbers), 'partition')}, and there are folders of {more} more"
    if what is not None:
        yield _of_topic(name, folder / "topic.json", what)
    for number in sorted(numbers | there):
        # A folder is named by the id of its topic. A folder in place of the link was made by hand: see `topic.json`.
        identity = place_id(folder.name if topic is None or link.is_symlink() else topic.id, number)
        partition = str(folder / "partitions" / f"partition-{number}")
        is_certain = (topic is None or topic.durability == "disk") and not is_reserved(partition)
        place = _Place(name, number, partition, identity, is_certain, topic is None or topic.is_retained)
        yield from _check_partition(place)


def _check_nameless(topics: Path) -> Iterator[Checked]:
    """Report folders with messages that no topic links to. One without messages is left by an interrupted creation."""
    logs = topics.parent / "logs"
    folders = sorted(each for each in logs.glob("*") if not each.name.startswith("."))
    linked = _linked(topics)
    for folder in folders:
        if folder.name in linked or not any(map(_size, folder.glob("partitions/*/*.log"))):
            continue
        # Look again: the topic may have been created or deleted a moment ago.
        if folder.name not in _linked(topics) and folder.exists():
            yield _of_topic("", folder, "no topic leads to it, and it holds messages")


def _linked(topics: Path) -> set[str]:
    """The names of the folders that links point to, including links of topics that are being deleted."""
    found = set()
    for each in topics.iterdir():
        with contextlib.suppress(OSError):  # not a link, or deleted meanwhile
            found.add(os.path.basename(os.readlink(each)))
    return found


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _of_topic(name: str, file: Path, what: str) -> Checked:
    return Checked(name, None, str(file), 0, 0, [Finding(name, None, str(file), 0, what)])


def _read_topic(link: Path) -> tuple[Topic | None, str | None]:
    """The topic, or what is wrong with `topic.json`. Both are None if the topic was deleted meanwhile."""
    try:
        found = look_up(link.parent, link.name)
    except (OSError, LogBusy) as error:
        return None, _unreadable(error) if isinstance(error, OSError) else str(error)
    if isinstance(found, DamagedTopic):
        if isinstance(found.error, LogNotReadable):
            raise found.error
        return None, found.error.what
    return found, None  # None: it was deleted meanwhile


def _partition_numbers(folder: Path) -> set[int]:
    try:
        names = os.listdir(folder / "partitions")
    except PermissionError:
        raise
    except OSError:
        return set()  # so that each partition that must be there is reported as missing
    return {int(found[1]) for name in names if (found := _PARTITION_FOLDER.fullmatch(name))}


def _check_partition(place: _Place) -> Iterator[Checked]:
    try:
        published, last, bases = _look(place)
    except MisplacedFile as error:
        yield place.only(error.file, error.what)
        bases = segment_bases(place.folder)
        yield from _check_reserved(place)
        yield from _check_start(place, bases, None)
        yield from _check_unpublished(place, NOTHING, bases)
        return
    except OSError as error:
        if os.path.exists(os.path.dirname(os.path.dirname(place.folder))):  # else the topic was deleted meanwhile
            missing = "the partition's folder is missing"
            yield place.only(place.folder, missing if isinstance(error, FileNotFoundError) else _unreadable(error))
        return
    yield from _check_reserved(place)
    yield from _check_start(place, bases, published)
    if published is None:
        if _is_damaged(place):
            what = "a part of it is damaged; whoever opens the partition finds the end again in the last segment"
            yield place.only(f"{place.folder}/{PUBLISHED}", what)
        yield from _check_unpublished(place, last, bases)
        return
    bases = [base for base in bases if base <= published.segment]
    for base, following in pairwise([*bases, published.segment]):
        if base != following:
            yield _check_segment(place, base, _Bounds(following, None, True))
    if published.segment in bases:
        bounds = _Bounds(published.end, published.segment_bytes, False)
        yield _check_segment(place, published.segment, bounds)
    else:
        what = f"the segment is missing, and messages up to offset {published.end:,} are published"
        yield place.only(segment_path(place.folder, published.segment), what)


def _check_reserved(place: _Place) -> list[Checked]:
    try:
        read_reserved(place.folder, place.id)
    except DamagedFrame as damage:
        return [place.only(damage.file, damage.what)]
    return []


def _check_start(place: _Place, bases: list[int], published: Published | None) -> Iterator[Checked]:
    """Check that the first segment is there, and that the end is not before it. Called after `bases` were listed,
    because retention writes `start` before it unlinks segments."""
    try:
        start = read_start(place.folder, place.id, is_retained=place.is_retained)
    except DamagedFrame as damage:
        yield place.only(damage.file, damage.what)
        return
    there = bases or ([] if published is None else [published.segment])
    if start is not None and (first := min(there, default=start)) > start:
        missing = missing_before(place.folder, start, first)
        yield place.only(missing.file, missing.what)
    if published is not None and start is not None and published.end < start:
        again, _ = _read_published(place)
        if again is None or again.end >= start:
            return  # messages were appended and removed by retention between the two looks
        what = (
            f"the log ends at offset {published.end}, and retention has removed everything before {start}, as in a "
            f"copy that was made while the log was appended to; whoever appends goes on at {start}"
        )
        yield place.only(f"{place.folder}/{PUBLISHED}", what)


def _check_unpublished(place: _Place, last: Published, bases: list[int]) -> Iterator[Checked]:
    """Check a partition that no process has opened since the machine started. `last`: what was published before."""
    tail = None
    if bases:
        # Without syncs a power loss may have taken published messages of the last segment, never a whole segment.
        end_min = last.end if place.is_synced or last.segment > bases[-1] else 0
        tail = _check_segment(place, bases[-1], _Bounds(None, None, False, end_min))
    elif last.end:
        what = f"messages up to offset {last.end:,} were published, and no segment is there"
        tail = place.only(f"{place.folder}/{PUBLISHED}", what)
    if _is_opened(place):
        # A process has opened the partition meanwhile, and may have appended to the segment that was read.
        yield from _check_partition(place)
        return
    for base, following in pairwise(bases):
        yield _check_segment(place, base, _Bounds(following, None, True))
    if tail is not None:
        yield tail


def _is_opened(place: _Place) -> bool:
    try:
        return _read_published(place)[0] is not None
    except MisplacedFile:
        return False  # no process can open the partition


def _look(place: _Place) -> tuple[Published | None, Published, list[int]]:
    """What is published in this boot, what was published last in any boot, and the segments that are there."""
    while True:
        published, last = _read_published(place)
        bases = segment_bases(place.folder)
        if published is None or published.segment in bases:
            return published, last, bases
        again, _ = _read_published(place)
        if again is not None and again.segment == published.segment:
            return published, last, bases
        # A writer went on in another segment, and retention removed the first one: look again.


def _is_damaged(place: _Place) -> bool:
    try:
        file = _open_published(place)
    except FileNotFoundError:
        return False
    try:
        return file.is_damaged()
    finally:
        file.close()


def _read_published(place: _Place) -> tuple[Published | None, Published]:
    """Raises MisplacedFile."""
    try:
        file = _open_published(place)
    except FileNotFoundError:
        return None, NOTHING
    try:
        return file.read(), file.last()
    finally:
        file.close()


def _open_published(place: _Place) -> PublishedFile:
    """For reading only, because the checker creates no file and may lack write permission."""
    return PublishedFile(f"{place.folder}/{PUBLISHED}", place.id, os.O_RDONLY)


def _check_segment(place: _Place, base: int, bounds: _Bounds) -> Checked:
    path = segment_path(place.folder, base)
    try:
        data = pa.py_buffer(Path(path).read_bytes())
    except FileNotFoundError:  # retention has removed the segment
        return Checked(place.topic, place.number, path, 0, 0, [])
    except OSError as error:
        return place.only(path, _unreadable(error))
    limit = data.size if bounds.limit is None else bounds.limit
    index, messages = Index(), 0
    findings: list[Finding] = []
    offset, is_known = base, True
    for position, result in _walk(place, data, path, min(limit, data.size)):
        if bounds.end is not None and offset >= bounds.end:
            break  # left by a failed sync; the log went on in the next segment
        if isinstance(result, DamagedFrame):
            what = result.what
        elif is_known and result.base_offset != offset:
            what = f"offset {result.base_offset} where {offset} must be: messages are missing"
        else:
            what = None
        if what is not None:
            if bounds.end is None and not _is_certain(place, data, path, position, offset, result):
                break  # not synced before the machine stopped; the next process that opens the partition cuts it off
            findings.append(place.wrong(path, position, what))
        if isinstance(result, DamagedFrame):
            is_known = False  # the damaged frame does not tell how many messages it held
            continue
        offset, is_known = result.next_offset, True
        messages += 0 if result.is_gap else result.rows
        index.note(result, position)
    what = _wrong_end(bounds, data.size, offset, is_sound=not findings)
    if what is not None:
        findings.append(place.wrong(path, data.size, what))
    if bounds.is_sealed and not findings:
        findings += _check_index(place, path, index)
    findings += _check_producers(place, path, base)
    return Checked(place.topic, place.number, path, messages, data.size, findings)


def _is_certain(
    place: _Place, data: pa.Buffer, path: str, position: int, offset: int, result: Header | DamagedFrame
) -> bool:
    """Whether damage in the last segment cannot be an append that a power loss has torn: the file begins with a frame
    of another partition or offset; or a later append proves that the damaged bytes were synced; or, where appends are
    not synced, whole frames follow the damage."""
    if position == 0 and isinstance(result, Header | MisplacedFile):
        return True
    if place.is_synced:
        return has_later_append(data, path, position, is_later_than(offset), place.id)
    return bool(next_run(data, path, position, offset, place.id, _OFFSET_MAX))


def _wrong_end(bounds: _Bounds, size: int, offset: int, *, is_sound: bool) -> str | None:
    """What is wrong with the end of a file of this size whose frames end at this offset. If damage was found in it,
    only missing bytes count, because the damage explains a wrong end."""
    if bounds.limit is not None and size < bounds.limit:
        return (
            f"{bounds.limit - size:,} published bytes are missing at the end, as in a copy that was made while the log "
            "was appended to; whoever opens the partition goes on behind what is whole"
        )
    if is_sound and bounds.end is not None and offset != bounds.end:
        return f"it ends at offset {offset}, and {bounds.end} is where it must end"
    if bounds.end is None and offset < bounds.end_min:
        return f"it ends at offset {offset}, and messages up to {bounds.end_min} were published"
    return None


def _walk(place: _Place, data: pa.Buffer, path: str, limit: int) -> Iterator[tuple[int, Header | DamagedFrame]]:
    """Every frame up to the limit, and the damage in place of each stretch of bytes that is no frame."""
    view = memoryview(data)
    position = 0
    while position < limit:
        try:
            header = read_header(view[position : position + HEADER_BYTES], path, position, place.id)
            length = min(header.frame_bytes, data.size - position)
            read_payload(header, data.slice(position, length), path, position)
        except DamagedFrame as damage:
            yield position, damage
            position = next_frame(view, path, position + ALIGNMENT, limit, place.id)
            continue
        yield position, header
        position += header.frame_bytes


def _check_index(place: _Place, segment: str, true: Index) -> list[Finding]:
    path = index_path(segment)
    try:
        stored = Index.load(Path(path).read_bytes())
    except FileNotFoundError:
        return []  # an index is made when it is needed; or retention has removed it
    except OSError as error:
        return [place.wrong(path, 0, _unreadable(error))]
    if stored is None:
        return [place.wrong(path, 0, "the index is damaged; remove it, it is made again")]
    if stored.place_id not in (None, place.id):
        return [place.wrong(path, 0, "it was written for another topic or partition; remove it, it is made again")]
    if stored.place_id is None:
        true.last_stored = stored.last_stored  # a field that the format before did not have
    if stored.dump(place.id) != true.dump(place.id):
        return [place.wrong(path, 0, "the index does not fit its segment; remove it, it is made again")]
    return []


def _check_producers(place: _Place, segment: str, base: int) -> list[Finding]:
    """Check the producers' state at the beginning of a segment. If it is missing, older segments give it."""
    path = producers_path(segment)
    what = "the producers' state is damaged; remove it, it is found again in the segments"
    try:
        is_sound = load_producers(path, place.id, base) is not None or not os.path.exists(path)
    except MisplacedFile as error:
        return [place.wrong(path, 0, f"{error.what}; remove it, it is found again in the segments")]
    except OSError as error:
        return [place.wrong(path, 0, _unreadable(error))]
    except (ValueError, KeyError, TypeError, AttributeError):
        is_sound = False
    return [] if is_sound else [place.wrong(path, 0, what)]


def _unreadable(error: OSError) -> str:
    """What is wrong with a file that cannot be read. Raises the error itself if only the permission is lacking."""
    if isinstance(error, PermissionError):
        raise error
    return f"it cannot be read: {disk.explain(error)}"
