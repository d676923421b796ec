"""Spark's progress reports of streaming queries, as values: pure, no Spark.

Spark reports each batch as JSON. Of a source it shows the offset before the batch, the offset after it, and the latest
one. For topics these are, by topic and partition, the last range that the query took, and the ends of all partitions
(`pxrs.publishing`):

    {"topics": {"<id>": {"name": "orders", "partitions": {"0": [epoch, start, end]}}}}      startOffset, endOffset
    {"topics": {"<id>": {"name": "orders", "partitions": {"0": end}}}}                      latestOffset

Offsets that earlier versions have stored are {"topic": "<id>", "partitions": {...}} instead. Offsets of other formats
are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

REASON_CHARS_MAX: Final = 2_000
_TRACEBACK: Final = re.compile(r"^.*Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(\S.*)", re.MULTILINE)
_FAILED: Final = re.compile(r"^\[STREAM_FAILED\] Query \[.*?\] terminated with exception: ")
_JAVA_CLASS: Final = re.compile(r"^(?:[a-z]\w*\.)+[A-Z]\w*: ")
_SQLSTATE: Final = re.compile(r"(?:[;.]? SQLSTATE: \w+)+;?$")

Report = Mapping[str, Any]
"""The JSON of a progress report, loaded."""


@dataclass(frozen=True, slots=True)
class TopicProgress:
    """What a batch has read of one topic."""

    rows: int
    """How many messages the batch was to read. A member of a shared group may find that others have read some."""
    lag: int | None
    """How many messages were left to read when the batch was reported. None if that is not known: the report does not
    say where the query is in a partition of which it has read nothing."""


@dataclass(frozen=True, slots=True)
class BatchReport:
    """A micro-batch that Spark has finished."""

    number: int
    rows: int
    """How many rows the sources gave to Spark. A query that reads a topic in several places counts a message once."""
    bytes: int | None
    """The sum of what the sources reported as `bytes`. None if no source did: Spark 4.3 takes no such metrics from
    sources in Python."""
    duration_ms: int
    rows_per_s: float
    state_rows: int
    topics: Mapping[str, TopicProgress]
    """By the name of the topic; by its id where the source does not report names."""
    phases_ms: Mapping[str, int]
    """How long each phase took, by Spark's names, such as latestOffset, queryPlanning, addBatch, walCommit."""

    @property
    def lag(self) -> int | None:
        """The lag of all topics. None if that of one topic is not known, or if no topic is read."""
        lags = [each.lag for each in self.topics.values()]
        return sum(lag for lag in lags if lag is not None) if lags and None not in lags else None


def batch_of(report: Report) -> BatchReport | None:
    """The batch that a report is about; None for the reports of an idle query."""
    durations = report.get("durationMs") or {}
    if "addBatch" not in durations:
        return None
    sources = report.get("sources") or []
    sizes = [int(size) for source in sources if (size := (source.get("metrics") or {}).get("bytes")) is not None]
    return BatchReport(
        report["batchId"],
        sum(_rows_of(source) for source in sources) if sources else report.get("numInputRows") or 0,
        sum(sizes) if sizes else None,
        durations.get("triggerExecution", durations["addBatch"]),
        report.get("processedRowsPerSecond") or 0.0,
        sum(operator.get("numRowsTotal", 0) for operator in report.get("stateOperators") or []),
        _merged(found for source in sources for found in _topics_of(source)),
        dict(durations),
    )


def _merged(topics: Iterable[tuple[str, TopicProgress]]) -> dict[str, TopicProgress]:
    """By name; what two sources report of topics with the same name is added up."""
    found: dict[str, TopicProgress] = {}
    for name, each in topics:
        before = found.get(name, TopicProgress(0, 0))
        lag = None if before.lag is None or each.lag is None else before.lag + each.lag
        found[name] = TopicProgress(before.rows + each.rows, lag)
    return found


def _rows_of(source: Report) -> int:
    """The rows of one source, as Spark counts them. For topics at most the number of messages that the batch planned to
    read: Spark counts a message twice if the query has the source in two places."""
    counted = source.get("numInputRows") or 0
    planned = [each.rows for _, each in _topics_of(source)]
    return min(counted, sum(planned)) if planned else counted


def _topics_of(source: Report) -> Iterator[tuple[str, TopicProgress]]:
    before = {topic: partitions for topic, _, partitions in _by_topic(source.get("startOffset"))}
    latest = {topic: partitions for topic, _, partitions in _by_topic(source.get("latestOffset"))}
    for topic, name, partitions in _by_topic(source.get("endOffset")):
        if not all(map(_is_span, partitions.values())):
            continue  # the offset of another format, which has fields of the same names
        began = before.get(topic, {})
        spans = [span for number, span in partitions.items() if span != began.get(number)]
        yield name, TopicProgress(sum(span[-1] - span[-2] for span in spans), _lag(partitions, latest.get(topic)))


def _lag(partitions: Mapping[str, Any], ends: Mapping[str, Any] | None) -> int | None:
    if ends is None or not all(isinstance(end, int) for end in ends.values()):
        return None
    if any(end and number not in partitions for number, end in ends.items()):
        return None
    lags: list[int] = [max(0, end - partitions[number][-1]) for number, end in ends.items() if number in partitions]
    return sum(lags)


def _is_span(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(isinstance(each, int) for each in value)


def _by_topic(offset: Any) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Id, name and partitions of each topic in an offset; nothing for the offsets of other formats. Some
    of Spark's reports have an offset as text, others as parsed JSON."""
    if isinstance(offset, str):
        try:
            offset = json.loads(offset)
        except ValueError:
            return
    if not isinstance(offset, dict):
        return
    topics = offset.get("topics")
    if isinstance(topics, dict):
        for topic, found in topics.items():
            if isinstance(found, dict) and isinstance(found.get("partitions"), dict):
                yield topic, found.get("name") or topic, found["partitions"]
    elif isinstance(offset.get("topic"), str) and isinstance(offset.get("partitions"), dict):
        yield offset["topic"], offset.get("name") or offset["topic"], offset["partitions"]


def short_reason(text: str) -> str:
    """The cause in the text of a Spark error: the last line of a Python traceback in it, else its first line."""
    if found := _TRACEBACK.findall(text):
        reason = re.sub(r"^(?:\w+\.)+(?=\w+(?::|$))", "", found[-1])
    else:
        reason = _FAILED.sub("", text.strip()).partition("\n")[0]
        reason = _JAVA_CLASS.sub("", reason).removeprefix("[USER_RAISED_EXCEPTION] ")
    return _SQLSTATE.sub("", reason.strip())[:REASON_CHARS_MAX]
