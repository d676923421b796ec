"""Pure: which segments of a partition retention may remove."""

from __future__ import annotations

from pxrs.log.directory.reading import SealedSegment
from pxrs.log.retention import credible_time
from pxrs.model import Topic


def keep_from(topic: Topic, segments: list[SealedSegment], tail_bytes: int, now: int) -> int:
    """The first offset to keep. Whole segments are removed, the oldest first, while they are too old or while there are
    too many bytes.

    segments: those that another one follows, in order. tail_bytes: the size of the last segment, which is kept."""
    total = tail_bytes + sum(segment.bytes for segment in segments)
    keep = segments[0].base if segments else 0
    stored = [segment.last_stored for segment in segments]
    for at, segment in enumerate(segments):
        is_old = topic.retention_s is not None and credible_time(stored, at, now) < oldest_kept(topic.retention_s, now)
        is_much = topic.retention_bytes is not None and total > topic.retention_bytes
        if not is_old and not is_much:
            break
        keep, total = segment.following, total - segment.bytes
    return keep


def oldest_kept(retention_s: float, now: int) -> int:
    """The time before which messages may be removed, in microseconds since 1970."""
    return now - int(retention_s * 1_000_000)
