"""The consistency checker: reads every byte of a log in a directory, and tells of everything that is not as it must be.

It can be run at any time, beside producers and consumers: it takes no lock, changes nothing, and looks only at what is
published. Behind a damaged frame it goes on at the next one that it finds, so one run tells of all damage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from pxrs.errors import DamagedFrame, LogError
from pxrs.log.batch import ALIGNMENT, HEADER_BYTES, MAGIC, Header, read_header, read_payload
from pxrs.log.directory import DirectoryLog, DirectoryTopic
from pxrs.log.index import Index
from pxrs.log.segment import index_path, segment_bases, segment_path


class Finding(NamedTuple):
    """Something that is wrong, and where."""

    topic: str
    partition: int
    file: str
    position: int
    what: str


class Checked(NamedTuple):
    """A segment that was read: what it holds, and what was found in it."""

    topic: str
    partition: int
    file: str
    messages: int
    bytes: int
    findings: list[Finding]


def check(path: Path) -> Iterator[Checked]:
    """Read the log in this directory, segment by segment."""
    log = DirectoryLog(path)
    try:
        for topic in log.topics():
            opened = log.topic(topic.name)
            assert isinstance(opened, DirectoryTopic)
            for partition in range(topic.partitions):
                yield from _check_partition(opened, partition)
    finally:
        log.close()


def _check_partition(topic: DirectoryTopic, number: int) -> Iterator[Checked]:
    folder = topic.partition_folder(number)
    try:
        published = topic.published(number)
    except LogError as error:
        file = getattr(error, "file", folder)
        finding = Finding(topic.name, number, file, getattr(error, "position", 0), str(error))
        yield Checked(topic.name, number, file, 0, 0, [finding])
        return
    bases = [base for base in segment_bases(folder) if base <= published.segment]
    for base, following in pairwise([*bases, None]):
        assert base is not None
        yield _check_segment(topic.name, number, folder, base, following, published.segment_bytes, published.end)


def _check_segment(
    topic: str, number: int, folder: str, base: int, following: int | None, tail_bytes: int, end: int
) -> Checked:
    path = segment_path(folder, base)
    try:
        data = pa.py_buffer(Path(path).read_bytes())
    except FileNotFoundError:  # retention was faster
        return Checked(topic, number, path, 0, 0, [])
    limit = data.size if following is not None else tail_bytes
    expected_end = following if following is not None else end
    index, messages = Index(), 0
    findings: list[Finding] = []

    def tell(position: int, what: str) -> None:
        findings.append(Finding(topic, number, path, position, what))

    offset, is_known = base, True
    for position, result in _walk(data, path, min(limit, data.size)):
        if offset >= expected_end:
            break  # left behind by a failed sync; the next segment has taken its place
        if isinstance(result, DamagedFrame):
            tell(position, result.what)
            is_known = False  # how many messages it held
            continue
        if is_known and result.base_offset != offset:
            tell(position, f"offset {result.base_offset} where {offset} must be: messages are missing")
        offset, is_known, messages = result.next_offset, True, messages + result.rows
        index.note(result, position)
    if data.size < limit:
        tell(data.size, f"{limit - data.size:,} published bytes are missing at the end")
    if not findings and offset != expected_end:
        tell(data.size, f"it ends at offset {offset}, and {expected_end} is where it must end")
    if following is not None and not findings:
        findings += _check_index(topic, number, path, index)
    return Checked(topic, number, path, messages, data.size, findings)


def _walk(data: pa.Buffer, path: str, limit: int) -> Iterator[tuple[int, Header | DamagedFrame]]:
    """Every frame up to the limit, and for each stretch that is none, its damage."""
    view = memoryview(data)
    position = 0
    while position < limit:
        try:
            header = read_header(view[position : position + HEADER_BYTES], path, position)
            length = min(header.frame_bytes, data.size - position)
            read_payload(header, data.slice(position, length), path, position)
        except DamagedFrame as damage:
            yield position, damage
            position = _next_frame(view, path, position + ALIGNMENT, limit)
            continue
        yield position, header
        position += header.frame_bytes


def _next_frame(view: memoryview, path: str, begin: int, limit: int) -> int:
    for position in range(begin // ALIGNMENT * ALIGNMENT, limit - HEADER_BYTES + 1, ALIGNMENT):
        if bytes(view[position : position + 4]) != MAGIC:
            continue
        try:
            read_header(view[position : position + HEADER_BYTES], path, position)
        except DamagedFrame:
            continue
        return position
    return limit


def _check_index(topic: str, number: int, segment: str, true: Index) -> list[Finding]:
    path = index_path(segment)
    if not os.path.exists(path):
        return []  # made when it is needed
    stored = Index.load(Path(path).read_bytes())
    if stored is None:
        return [Finding(topic, number, path, 0, "the index is damaged; remove it, it is made again")]
    if stored.dump() != true.dump():
        return [Finding(topic, number, path, 0, "the index does not fit its segment; remove it, it is made again")]
    return []
