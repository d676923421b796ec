"""Where the last segment of a partition ends, found in its frames when the published end cannot be used.

Pure: it looks at bytes and changes nothing. `recovery` and the checker decide by it.

A frame that is not whole has one of three causes:
- An append that a crash has torn. Nothing of it was published, and nothing whole lies behind it. It is cut off.
- Damage. Either the published end lies behind it although no byte is missing, or whole frames lie behind it. Nothing is
  cut.
- A file that ends too early: a copy that was made while the log was appended to, with `published` copied later than the
  segment. All whole frames are kept, and the offsets up to the published end become a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pyarrow as pa

from pxrs.errors import DamagedFrame, MisplacedFile
from pxrs.log.batch import ALIGNMENT, HEADER_BYTES, Header, read_header
from pxrs.log.directory.published import Published
from pxrs.log.directory.segments import scanning
from pxrs.log.directory.segments.frames import next_frame
from pxrs.log.directory.segments.scanning import FrameCheck, Scan


class Scanned(NamedTuple):
    """The whole frames at the beginning of a segment."""

    found: list[tuple[int, Header]]
    position: int
    """The position behind the last whole frame."""
    end: int
    """The offset behind the last whole frame."""
    damage: DamagedFrame | None
    """Why the bytes behind them are no whole frame of this partition; None if there are none."""

    @property
    def scan(self) -> Scan:
        return Scan(self.found, self.position, self.damage)


class Damage(NamedTuple):
    """A stretch of a segment that cannot be read, with whole frames behind it."""

    position: int
    offset: int
    next_offset: int
    """The offset of the first whole frame behind the damage."""
    what: str


def scan(data: pa.Buffer, path: str, base: int, place: int) -> Scanned:
    """The frames of a segment that begins at `base`, payloads too, up to the first that is not whole. Raises
    MisplacedFile if the segment belongs to another partition, or bears another segment's name."""
    found: list[tuple[int, Header]] = []
    position, end, is_ours = 0, base, False
    try:
        for at, header in _whole(data, path, 0, base, place):
            if not at and header.base_offset != base:
                raise MisplacedFile(path, 0, f"its first offset is {header.base_offset}, but its name says {base}")
            found.append((at, header))
            position, end = at + header.frame_bytes, header.next_offset
            is_ours = is_ours or header.place_id is not None
    except DamagedFrame as damage:
        # A foreign frame before any frame that names this partition: the file is misplaced. Behind one, it is what was
        # on the medium before an append that a power loss tore.
        if isinstance(damage, MisplacedFile) and not is_ours:
            raise
        return Scanned(found, position, end, damage)
    return Scanned(found, position, end, None)


def _whole(data: pa.Buffer, path: str, begin: int, offset: int, place: int) -> Iterator[tuple[int, Header]]:
    """The whole frames of this partition from `begin` on, with consecutive offsets from `offset` on. Raises
    DamagedFrame at the first frame that is none of these."""
    return scanning.whole_frames(data, path, begin, _in_order(path, offset), place)


def _in_order(path: str, offset: int) -> FrameCheck:
    """Checks that each frame begins at the offset at which the one before it ends, and the first at `offset`. The
    offset of a segment's first frame is not checked here: `scan` tells by it that a file has another one's name."""

    def check(at: int, header: Header) -> None:
        nonlocal offset
        if header.base_offset != offset and at:
            raise DamagedFrame(path, at, f"found offset {header.base_offset} where {offset} was expected")
        offset = header.next_offset

    return check


def is_later_than(offset: int) -> Callable[[Header], bool]:
    """A test for `has_later_append`: whether a frame has an offset behind this one."""
    return lambda header: header.base_offset > offset


def check_short(data: pa.Buffer, path: str, base: int, scanned: Scanned, last: Published, place: int) -> None:
    """Check a segment whose whole frames end before what was published: its file must end too early, as in a copy that
    was made under load. Raises DamagedFrame if no byte is missing, or if whole appends lie behind the damage."""
    if scanned.damage is not None and scanning.has_later_append(
        data, path, scanned.position, is_later_than(scanned.end), place
    ):
        raise scanned.damage
    if last.segment == base and data.size >= last.segment_bytes:
        raise scanned.damage or DamagedFrame(
            path, scanned.position, f"it ends at offset {scanned.end}, but messages up to {last.end} were published"
        )


def whole_behind(
    data: pa.Buffer, path: str, scanned: Scanned, place: int, until: int
) -> tuple[list[tuple[int, Header]], list[Damage]]:
    """All whole frames behind the first damage, and the damaged stretches between them. What follows the last of the
    frames is no damage: it may be an append that was torn.

    until: no offset from this one on was ever given away."""
    found: list[tuple[int, Header]] = []
    damaged: list[Damage] = []
    position, end = scanned.position, scanned.end
    while run := next_run(data, path, position, end, place, until):
        what = _what_is_wrong(data, path, position, end, place)
        damaged.append(Damage(position, end, run[0][1].base_offset, what))
        found += run
        position, end = run[-1][0] + run[-1][1].frame_bytes, run[-1][1].next_offset
    return found, damaged


def next_run(
    data: pa.Buffer, path: str, damaged: int, expected: int, place: int, until: int
) -> list[tuple[int, Header]]:
    """The first whole frames behind damage, without a break; none if there are none.

    A message may hold a copy of a frame. Where the header of the damaged frame is whole, it tells where the frame ends,
    and nothing inside is looked at. Else a copy would have to name this partition and an offset behind the damaged one.

    damaged, expected: the position and the offset of the frame that cannot be read. until: see `whole_behind`."""
    view = memoryview(data)
    begin, least = damaged + ALIGNMENT, expected + 1
    try:
        header = read_header(view[damaged : damaged + HEADER_BYTES], path, damaged, place)
        if header.base_offset == expected:
            begin, least = damaged + header.frame_bytes, header.next_offset
    except DamagedFrame:
        pass  # the search begins right behind the header
    while (begin := next_frame(view, path, begin, data.size, place)) < data.size:
        first = read_header(view[begin : begin + HEADER_BYTES], path, begin, place)
        run: list[tuple[int, Header]] = []
        try:
            for at, header in _whole(data, path, begin, first.base_offset, place):
                if header.base_offset < least or header.next_offset > until:
                    break
                run.append((at, header))
        except DamagedFrame:
            pass  # the run ends there
        if run:
            return run
        begin += ALIGNMENT
    return []


def _what_is_wrong(data: pa.Buffer, path: str, position: int, expected: int, place: int) -> str:
    try:
        header = next(iter(_whole(data, path, position, expected, place)))[1]
    except DamagedFrame as damage:
        return damage.what
    return f"found offset {header.base_offset} where {expected} was expected"
