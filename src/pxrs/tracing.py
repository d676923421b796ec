"""Spans of OpenTelemetry for what is sent and handled, linked through W3C `traceparent` headers of messages.

Tracing is on if the program has configured a tracer provider before it makes a producer or a consumer. Nothing of
OpenTelemetry is imported otherwise, and nothing is added to messages.

| span              | when                                                      | links                                |
|-------------------|-----------------------------------------------------------|--------------------------------------|
| `send <topic>`    | a producer appends a batch                                | the spans in which `send` was called |
| `receive <topic>` | a loop, `poll` or `batches` hands out messages of a batch | what the messages name               |
| `process <topic>` | `run`, also of `pxrs worker`, calls the handler           | what the message names               |

A message names one span in its header `traceparent`: one that the sender has given; else the span in which `send` was
called; else the span of its batch. A batch has at most LINKS_MAX links.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pyarrow as pa
    from opentelemetry.trace import Link, Span, SpanContext, Tracer

HEADER: Final = "traceparent"
LINKS_MAX: Final = 64
PAIR_BYTES: Final = 96
"""At least what a header with a span takes in a stored batch."""
_FORM: Final = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")


def tracer() -> Tracer | None:
    """The tracer of pxrs; None if the program has configured no tracer provider."""
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    provider = api.get_tracer_provider()
    if isinstance(provider, api.ProxyTracerProvider | api.NoOpTracerProvider):
        return None
    return provider.get_tracer("pxrs")


def text_of(context: SpanContext) -> bytes:
    """A span as the value of the header."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}".encode()


def context_of(text: bytes | None) -> SpanContext | None:
    """The span that a header names; None if its value is not of W3C's form."""
    from opentelemetry.trace import SpanContext, TraceFlags

    found = None if text is None else _FORM.fullmatch(text)
    if found is None or text is None or text.startswith(b"ff"):
        return None
    trace, span, flags = (int(part, 16) for part in found.groups())
    context = SpanContext(trace, span, is_remote=True, trace_flags=TraceFlags(flags))
    return context if context.is_valid else None


def named_in(headers: pa.Array) -> list[bytes]:
    """The distinct values of `traceparent` in a column of headers, at most LINKS_MAX."""
    import pyarrow.compute as pc

    if headers.null_count == len(headers):
        return []
    pairs = headers.flatten()
    values = pc.struct_field(pairs, "value").filter(pc.equal(pc.struct_field(pairs, "key"), HEADER))
    return values.unique().drop_null().slice(0, LINKS_MAX).to_pylist()  # type: ignore[no-any-return]


def with_header(headers: pa.Array, text: bytes) -> pa.Array:
    """The column with the header added to each row that has none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = pa.array(range(len(headers)), pa.int64())
    pairs, owners = headers.flatten(), pc.cast(pc.list_parent_indices(headers), pa.int64())
    having = owners.filter(pc.equal(pc.struct_field(pairs, "key"), HEADER))
    lacks = pc.invert(pc.is_in(rows, value_set=having))
    lacking = rows.filter(lacks)
    kind = headers.type.value_type
    names, values = pa.array([HEADER], pa.string()), pa.array([text], pa.binary())
    pair = pa.StructArray.from_arrays([names, values], fields=list(kind))
    added = pair.take(pa.array([0] * len(lacking), pa.int32()))
    # Sorting by row is stable, so that the header comes behind those that the row has.
    order = pc.array_sort_indices(pa.concat_arrays([owners, lacking]))
    all_pairs = pa.concat_arrays([pairs, added]).take(order)
    lengths = pc.add(pc.fill_null(pc.list_value_length(headers), 0), pc.cast(lacks, pa.int32()))
    ends = pc.cumulative_sum(lengths)
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cast(ends, pa.int32())])
    return pa.ListArray.from_arrays(offsets, all_pairs, type=headers.type)


class ProducerTracing:
    """The spans of one producer."""

    def __init__(self, tracer: Tracer, topic: str, batch_bytes_max: int) -> None:
        """batch_bytes_max: a batch that would be larger with the header of its own span is stored without it."""
        self._tracer, self._topic, self._batch_bytes_max = tracer, topic, batch_bytes_max

    @staticmethod
    def add_current(headers: list[tuple[str, bytes | None]] | None) -> list[tuple[str, bytes | None]] | None:
        """The headers of a message that is being sent, with the current span if they name none."""
        from opentelemetry.trace import get_current_span

        context = get_current_span().get_span_context()
        if not context.is_valid:
            return headers
        given = headers or []
        if any(name == HEADER for name, _ in given):
            return given
        return [*given, (HEADER, text_of(context))]

    def begin(self, partition: int, records: pa.RecordBatch) -> tuple[Span, pa.RecordBatch]:
        """A span for the append of a batch, and the batch in which every message names a span."""
        headers = records.column("headers")
        about = {"messaging.operation.type": "send", "messaging.destination.partition.id": str(partition)}
        span = _start(self._tracer, "send", "PRODUCER", self._topic, records.num_rows, named_in(headers), about)
        if records.nbytes + records.num_rows * PAIR_BYTES <= self._batch_bytes_max:
            column = with_header(headers, text_of(span.get_span_context()))
            records = records.set_column(
                records.schema.get_field_index("headers"), records.schema.field("headers"), column
            )
        return span, records

    @staticmethod
    def end(span: Span, error: BaseException | None) -> None:
        """The batch was stored, or could not be."""
        if error is not None:
            _fail(span, error)
        span.end()


class ConsumerTracing:
    """The spans of one consumer."""

    def __init__(self, tracer: Tracer, group: str) -> None:
        self._tracer, self._group = tracer, group

    def received(self, topic: str, partition: int, records: pa.RecordBatch) -> None:
        """Messages are handed out together."""
        texts = named_in(records.column("headers"))
        _start(
            self._tracer, "receive", "CONSUMER", topic, records.num_rows, texts, self._about("receive", partition)
        ).end()

    def process(
        self, topic: str, partition: int, headers: Iterable[tuple[str, bytes | None]]
    ) -> AbstractContextManager[Span]:
        """Entered around the handler: its span is the current one there, and gets what the handler raises."""
        from opentelemetry.trace import use_span

        texts = [value for name, value in headers if name == HEADER and value is not None]
        about = self._about("process", partition)
        span = _start(self._tracer, "process", "CONSUMER", topic, None, texts[:1], about)
        return use_span(span, end_on_exit=True)  # type: ignore[no-any-return]

    def _about(self, operation: str, partition: int) -> dict[str, str]:
        return {
            "messaging.operation.type": operation,
            "messaging.consumer.group.name": self._group,
            "messaging.destination.partition.id": str(partition),
        }


def producer_tracing(topic: str, batch_bytes_max: int) -> ProducerTracing | None:
    """None if tracing is off."""
    found = tracer()
    return None if found is None else ProducerTracing(found, topic, batch_bytes_max)


def consumer_tracing(group: str) -> ConsumerTracing | None:
    """None if tracing is off."""
    found = tracer()
    return None if found is None else ConsumerTracing(found, group)


def _start(
    tracer: Tracer, what: str, kind: str, topic: str, count: int | None, texts: Sequence[bytes], about: dict[str, str]
) -> Span:
    from opentelemetry.trace import Link, SpanKind

    links: list[Link] = [Link(context) for text in texts if (context := context_of(text)) is not None]
    attributes: dict[str, str | int] = {"messaging.system": "pxrs", "messaging.destination.name": topic, **about}
    if count is not None:
        attributes["messaging.batch.message_count"] = count
    return tracer.start_span(f"{what} {topic}", kind=SpanKind[kind], links=links, attributes=attributes)


def _fail(span: Span, error: BaseException) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", type(error).__name__)
    span.set_status(Status(StatusCode.ERROR, str(error)))
