"""The offset of a streaming query as the streaming engine keeps it: pure, no I/O.

For each micro-batch, Spark keeps one JSON text that says how far the query has come when the batch is finished. Ours
names, for each topic and partition, the last range that the query took and the epoch of the owner key at that time
(K3):

    {"topics": {"<topic id>": {"name": "orders", "partitions": {"0": [epoch, start, end], ...}}, ...}}

A topic of which nothing was read yet is named without partitions. The name is for people; the id decides. Up to version
0.2.dev1 a query read one topic, and the text was {"topic": "<topic id>", "partitions": {...}}: it is still read.

Within a process the partitions of all topics of a query have consecutive numbers (`Numbering`), and `Spans` are by
these numbers. The numbers change when a topic is added, so they are never stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pxrs.log.contract import Source
from pxrs.log.numbering import Numbering
from pxrs.publishing.planning import Span, Spans


@dataclass(frozen=True, slots=True)
class OffsetForm:
    """Converts between spans and the texts that the engine keeps, for a query that reads certain topics."""

    names: Mapping[str, str]
    """The names of the topics, by id."""
    numbering: Numbering

    @classmethod
    def of(cls, topics: Iterable[Source]) -> OffsetForm:
        """Make the converter for a query that reads these topics."""
        chosen = list(topics)
        return cls({each.id: each.name for each in chosen}, Numbering((each.id, each.partitions) for each in chosen))

    def dump(self, spans: Mapping[int, Span]) -> dict[str, Any]:
        """The offset as JSON values. Equal spans of the same topics give equal texts: Spark compares offsets as
        text."""
        return self._by_topic({number: list(spans[number]) for number in sorted(spans)})

    def dump_ends(self, ends: Sequence[int]) -> dict[str, Any]:
        """The same form with the ends of all partitions, which Spark shows in its progress reports."""
        return self._by_topic(dict(enumerate(ends)))

    def _by_topic(self, values: Mapping[int, object]) -> dict[str, Any]:
        found: dict[str, dict[str, Any]] = {
            topic: {"name": self.names[topic], "partitions": {}} for topic in self.numbering.topics
        }
        for number, value in values.items():
            topic, partition = self.numbering.place(number)
            found[topic]["partitions"][str(partition)] = value
        return {"topics": found}

    def load(self, offset: Mapping[str, Any]) -> Spans:
        """The spans of an offset that the engine has kept, of the topics that are read now."""
        spans: Spans = {}
        for topic, found in _topics(offset).items():
            for partition, span in found["partitions"].items():
                number = self.numbering.number_of(topic, int(partition))
                if number is not None:
                    spans[number] = Span(*span)
        return spans

    def is_of_others(self, offset: Mapping[str, Any]) -> bool:
        """Whether none of the topics that an offset names is read now."""
        return not _topics(offset).keys() & self.names.keys()

    def missing(self, offset: Mapping[str, Any]) -> dict[str, str]:
        """The topics that an offset names and that are not read now: their names by id. The name is empty in offsets
        that name one `topic`, as earlier versions wrote them."""
        return {topic: found.get("name", "") for topic, found in _topics(offset).items() if topic not in self.names}


def _topics(offset: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The name and partitions in the offset, by topic id, whichever of the two forms the offset has."""
    if "topic" in offset:
        return {offset["topic"]: {"partitions": offset["partitions"]}}
    topics: Mapping[str, Mapping[str, Any]] = offset["topics"]
    return topics
