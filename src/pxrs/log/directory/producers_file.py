"""The file beside a segment that holds the producers' state as it was at the segment's beginning.

With it, opening a partition reads the frames of the last segment alone (L4). Without it, the state is found again in
the frames of older segments.
"""

from __future__ import annotations

import json

from pxrs.disk import read_with_checksum, with_checksum
from pxrs.errors import MisplacedFile
from pxrs.log.producers import Producers


def producers_path(segment: str) -> str:
    return segment.removesuffix(".log") + ".producers"


def dump_producers(producers: Producers, place: int, base: int) -> bytes:
    """The content of the file beside the segment that begins at `base`: JSON, with a checksum of its text. It names the
    partition by its `place_id`, and the segment."""
    return with_checksum(json.dumps({"place": f"{place:016x}", "segment": base, **producers.dump()}))


def load_producers(path: str, place: int, base: int) -> Producers | None:
    """The state in the file; None if the file is missing or damaged: the state is then found in the segments before it.
    Raises MisplacedFile if the file belongs to another partition or segment."""
    producers = Producers()
    try:
        text = read_with_checksum(path)
        if text is None:
            return None
        found = json.loads(text)
        producers.load(found)
        # The format before has neither field.
        written_for = found.get("place", f"{place:016x}"), found.get("segment", base)
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return None
    if written_for != (f"{place:016x}", base):
        raise MisplacedFile(path, 0, "it was written for another topic, partition or segment")
    return producers
