"""The offsets that a batch of a streaming query reads: passed from the query's source to its sink.

The source and the sink of a query run in different processes, and only their tasks know the query's id. So the tasks
that read store the feed where the driver's commit finds it (`Staging.announce`), before their rows reach the sink. The
commit moves the group's checkpoints to the ends of the feed's spans, and expects the owner keys in the versions of
`fences`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from pxrs.publishing.planning import Span, Spans


@dataclass(frozen=True, slots=True)
class Feed:
    """The offsets of one topic that a batch reads as a member of one group."""

    group: str
    topic: str
    """The topic's id."""
    incarnation: str
    """Id of the group's member that planned the batch."""
    registry: str
    """The fingerprint of the registry that has the group; not its address. A sink with another registry cannot write
    the group's checkpoints."""
    spans: Spans
    """By partition: the offsets, and the epoch of the owner key under which they were planned."""
    fences: dict[int, int]
    """By partition: the version of the owner key when the batch was planned."""
    is_shared: bool
    """Whether the group may have other members (K4)."""
    lease_s: float = 0.0
    """How long the member's lease lives without a renewal. The sink retries an unreachable registry for at least this
    long."""
    name: str = ""
    """The topic's name, to be shown in errors. Empty in feeds that an earlier version has stored."""

    def dump(self) -> str:
        parts = {number: [*span, self.fences[number]] for number, span in self.spans.items()}
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("spans", "fences")}
        return json.dumps({**plain, "partitions": parts})

    @classmethod
    def load(cls, text: str) -> Feed:
        found = json.loads(text)
        parts = {int(number): part for number, part in found.pop("partitions").items()}
        spans = {number: Span(*part[:3]) for number, part in parts.items()}
        return cls(**found, spans=spans, fences={number: part[3] for number, part in parts.items()})
