"""V2: metrics through OpenTelemetry's API, and spans that are linked through headers of messages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import pxrs
from pxrs import tracing
from pxrs.errors import AppendFailed
from pxrs.hub import Hub
from pxrs.log.batch import HEADERS_TYPE
from pxrs.metrics import instruments, otel
from pxrs.metrics.table import TABLE
from pxrs.tracing import HEADER, context_of, named_in, text_of, with_header

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with pxrs.open("memory:") as hub:
        yield hub


class Traced:
    """A tracer provider that keeps its spans. The global one can be set only once in a process."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("pxrs")

    def spans(self, name: str) -> list[Any]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    traced = Traced()
    monkeypatch.setattr(tracing, "tracer", lambda: traced.tracer)
    return traced


def column(rows: list[list[tuple[str, bytes | None]] | None]) -> pa.Array:
    return pa.array([None if row is None else [{"key": k, "value": v} for k, v in row] for row in rows], HEADERS_TYPE)


def parents(hub: Hub, topic: str) -> list[bytes | None]:
    return [dict(message.headers or []).get(HEADER) for message in hub.topic(topic).messages(0)]


@pytest.mark.parametrize("start", [0, 1])
def test_a_header_is_added_to_the_rows_that_have_none(start: int) -> None:
    rows = [None, [("a", b"1")], [(HEADER, PARENT)], [], [("b", None), ("c", b"")]]
    found = with_header(column(rows).slice(start), b"new")
    assert found.type == HEADERS_TYPE
    plain = [[(pair["key"], pair["value"]) for pair in row] for row in found.to_pylist()]
    added = (HEADER, b"new")
    wanted = [[added], [("a", b"1"), added], [(HEADER, PARENT)], [added], [("b", None), ("c", b""), added]]
    assert plain == wanted[start:]
    assert named_in(column(rows).slice(start)) == [PARENT]
    assert named_in(column([None, None])) == []


@pytest.mark.parametrize(
    "text", [b"", b"00-0-0-0", b"ff" + PARENT[2:], PARENT[:-2], PARENT.upper(), b"00-" + b"0" * 32 + PARENT[35:]]
)
def test_what_is_no_traceparent_is_ignored(text: bytes) -> None:
    assert context_of(text) is None


def test_a_traceparent_is_read_as_it_was_written() -> None:
    context = context_of(PARENT)
    assert context is not None
    assert text_of(context) == PARENT
    assert context.is_remote


def test_v2_a_batch_is_a_span_that_its_messages_name_and_consumers_link_to(hub: Hub, traced: Traced) -> None:
    hub.create_topic("t", partitions=1)
    with hub.producer("t", linger_s=60) as out:
        out.send(b"1", b"k")
        out.send(b"2", b"k", headers=[("a", b"b")])
        out.send(b"3", b"k", headers=[(HEADER, PARENT)])
        with traced.tracer.start_as_current_span("request") as request:
            out.send(b"4", b"k")
            out.send(b"5", b"k", headers=[(HEADER, PARENT)])
    (sent,) = traced.spans("send t")
    own, caller = text_of(sent.context), text_of(request.get_span_context())
    assert parents(hub, "t") == [own, own, PARENT, caller, PARENT]
    assert [message.value for message in hub.topic("t").messages(0)] == [b"1", b"2", b"3", b"4", b"5"]
    assert [text_of(link.context) for link in sent.links] == [PARENT, caller]
    assert (sent.kind, sent.status.status_code) == (SpanKind.PRODUCER, StatusCode.UNSET)
    assert sent.attributes["messaging.batch.message_count"] == 5
    assert sent.attributes["messaging.destination.name"] == "t"
    with hub.consumer("t", "loop", until="end") as inbox:
        assert len(list(inbox)) == 5
    (received,) = traced.spans("receive t")
    assert [text_of(link.context) for link in received.links] == [own, PARENT, caller]
    assert received.attributes["messaging.consumer.group.name"] == "loop"


def test_v2_a_span_is_added_to_headers_that_are_a_mapping(hub: Hub, traced: Traced) -> None:
    hub.create_topic("t", partitions=1)
    with hub.producer("t") as out, traced.tracer.start_as_current_span("request") as request:
        out.send(b"1", b"k", headers={"a": b"b"})
    (message,) = hub.topic("t").messages(0)
    assert message.headers == [("a", b"b"), (HEADER, text_of(request.get_span_context()))]


def test_v2_a_handler_runs_in_a_span_of_its_message(hub: Hub, traced: Traced) -> None:
    hub.create_topic("t", partitions=1)
    with hub.producer("t") as out:
        out.send(b"1", b"k", headers=[(HEADER, PARENT)])
        out.send(b"2", b"k")

    def handle(message: pxrs.Message) -> None:
        with traced.tracer.start_as_current_span("inside"):
            if message.value == b"2":
                raise ValueError("no")

    with hub.consumer("t", "g", until="end") as inbox, pytest.raises(pxrs.errors.PartitionsPaused):
        inbox.run(handle)
    first, second = traced.spans("process t")
    assert [text_of(link.context) for link in first.links] == [PARENT]
    assert [span.parent.span_id for span in traced.spans("inside")] == [first.context.span_id, second.context.span_id]
    assert (first.status.status_code, second.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)


def test_v2_an_append_that_fails_is_a_span_with_an_error(
    hub: Hub, traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = hub.create_topic("t", partitions=1).log

    def fail(self: object, appends: object) -> None:
        raise AppendFailed("the disk is full")

    monkeypatch.setattr(type(log), "append", fail)
    out = hub.producer("t", tries_max=1)
    out.send(b"x", b"k")
    with pytest.raises(AppendFailed):
        out.close()
    (span,) = traced.spans("send t")
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "AppendFailed"


def test_without_a_tracer_nothing_is_added_and_the_fast_path_is_taken(hub: Hub) -> None:
    hub.create_topic("t", partitions=1)
    with hub.producer("t") as out:
        assert out.sending.outbox.chunk_end > 0
        out.send(b"1", b"k")
    assert [message.headers for message in hub.topic("t").messages(0)] == [None]


PROGRAM = """
import sys
import pxrs
from pxrs import tracing
imported = [name for name in sys.modules if name.startswith(("opentelemetry", "prometheus_client"))]
assert not imported, "pxrs imports it by itself"
assert tracing.tracer() is None
from opentelemetry import trace, metrics
assert tracing.tracer() is None, "not configured"
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
trace.set_tracer_provider(TracerProvider())
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))
with pxrs.open("memory:") as hub:
    hub.create_topic("t", partitions=1)
    with hub.producer("t") as out:
        out.send(b"x", b"k")
    (message,) = hub.topic("t").messages(0)
    assert dict(message.headers)["traceparent"].startswith(b"00-"), message
    names = {m.name for r in reader.get_metrics_data().resource_metrics for s in r.scope_metrics for m in s.metrics}
    assert "pxrs.producer.messages" in names, names
"""


def test_v2_opentelemetry_is_used_where_a_program_has_configured_it_and_not_imported_otherwise() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_v2_metrics_have_the_names_units_and_attributes_of_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = InMemoryMetricReader()
    for each in instruments.INSTRUMENTS.values():
        if isinstance(each, instruments.Histogram):
            monkeypatch.setattr(each, "passed_to", None)  # restored afterwards
    assert otel.attach(MeterProvider([reader]))
    instruments.PRODUCER_ERRORS.of("orders", "AppendFailed").add(2)
    instruments.CONSUMER_COMMIT.of("otel-group").observe(0.2)
    instruments.SERVER_CALL.of("otel-call").observe(0.3)
    found = {
        metric.name: metric
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert all(metric.unit == TABLE[name].unit for name, metric in found.items())
    errors = {tuple(sorted(p.attributes.items())): p.value for p in found["pxrs.producer.errors"].data.data_points}
    assert errors[("error.type", "AppendFailed"), ("messaging.destination.name", "orders")] >= 2
    (commit,) = found["pxrs.consumer.commit"].data.data_points
    assert dict(commit.attributes) == {"messaging.consumer.group.name": "otel-group"}
    assert (commit.count, commit.sum) == (1, pytest.approx(0.2))
    (call,) = found["pxrs.server.call"].data.data_points
    assert dict(call.attributes) == {"pxrs.call": "otel-call"}
