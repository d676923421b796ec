"""Batches that were crafted by hand: none that a reader could not decode is stored, and none costs much memory."""

from __future__ import annotations

import resource
import struct
from typing import Any

import grpc
import pyarrow as pa
import pytest

import pxrs
from pxrs.errors import InvalidArgument, InvalidRecord, PxrsError
from pxrs.log.batch import SCHEMA
from pxrs.log.contract import Append
from pxrs.model import CODECS
from pxrs.remote import flight
from pxrs.server.layout import _Table, read_layout
from tests.integration.server.conftest import Running
from tests.integration.server.peer import Put, act, batch_message, connect, error_of, get, method, records, rows


@pytest.fixture(autouse=True)
def topic(running: Running) -> None:
    running.hub.create_topic("t", partitions=2)


def compressed(batch: pa.RecordBatch, codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        start = batch.schema.serialize().size
        writer.write_batch(batch)
        end = sink.tell()
    return bytes(sink.getvalue()[start:end])


def refusal(channel: grpc.Channel, message: bytes, **about: Any) -> PxrsError:
    """The error that ends a stream with this batch."""
    with Put(channel, "t", **about) as put:
        put.sender.put(message)
        with pytest.raises(grpc.RpcError) as failed:
            put.outcome()
        return error_of(failed.value)


def batch_of(**columns: Any) -> pa.RecordBatch:
    whole = records(3)
    arrays = [columns.get(field.name, whole.column(field.name)) for field in SCHEMA]
    return pa.RecordBatch.from_arrays(
        arrays, schema=pa.schema([pa.field(f.name, a.type) for f, a in zip(SCHEMA, arrays, strict=True)])
    )


@pytest.mark.parametrize("codec", CODECS[1:])
def test_a_compressed_batch_is_stored_as_it_came(running: Running, channel: grpc.Channel, codec: str) -> None:
    data = compressed(records(1000, 100), codec)
    header, body = flight.ipc_message(data)
    layout = read_layout(header, body)
    assert layout.codec == CODECS.index(codec)
    assert layout.decoded_bytes > 100_000
    with Put(channel, "t") as put:
        put.send(data)
        assert put.outcome() == {"offset": 0}
    assert [row[1] for row in rows(channel, topic="t", positions=[[0, 0]])] == list(range(1000))


def test_a_part_of_a_compressed_batch_is_readable_though_it_is_longer_than_a_message(running: Running) -> None:
    """A batch of 105 MB, which has a few kB compressed. Two of its three rows have 70 MB."""
    topic = running.hub.topic("t").log
    topic.append([Append.encoded(0, records(3, 35 << 20), codec="zstd")])
    (whole,) = topic.read(0, 0)
    with pxrs.open(f"pxrs://{running.address}") as hub:
        (found,) = hub.topic("t").log.read(0, 1)
        assert found.records.equals(whole.within(1).records)
        (found,) = hub.topic("t").batches(0, 0, 2)
        assert found.records.equals(whole.within(0, 2).records)


def test_a_message_of_many_fields_is_refused_before_all_of_them_are_read(channel: grpc.Channel) -> None:
    """The event loop would stand still meanwhile: for 16 s with the longest message of gRPC."""
    error = refusal(channel, b"\x08\x00" * 2_000)
    assert isinstance(error, InvalidArgument)
    assert "fields" in str(error)


def test_a_schema_that_is_too_long_is_refused_before_it_is_read(channel: grpc.Channel) -> None:
    schema = pa.schema([pa.field(str(number), pa.int8()) for number in range(5_000)])
    header, _ = flight.ipc_message(schema.serialize())
    first = flight.flight_data(flight.FlightData(header, command=b'{"topic":"t"}'))
    call = channel.stream_stream(method("DoPut"))(iter([first]), timeout=30)
    with pytest.raises(grpc.RpcError) as failed:
        next(call)
    assert "65,536 bytes" in str(error_of(failed.value))


@pytest.mark.parametrize("codec", CODECS[1:])
def test_a_batch_that_says_to_be_gigabytes_is_refused_before_it_is_decompressed(
    running: Running, channel: grpc.Channel, codec: str
) -> None:
    """Arrow allocates what a buffer says it will have, before it decompresses it."""
    data = bytearray(compressed(records(50, 2_000), codec))
    _, body = flight.ipc_message(bytes(data))
    at = len(data) - len(body)
    offset = next(n for n in range(0, len(body) - 8, 8) if struct.unpack_from("<q", body, n)[0] == 100_000)
    for size in (40 << 30, (1 << 62), (512 << 20) + 1):
        struct.pack_into("<q", data, at + offset, size)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        error = refusal(channel, batch_message(bytes(data), partition=0))
        assert isinstance(error, InvalidRecord)
        assert "decompressed" in str(error)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (64 << 10)
    assert running.hub.topic("t").log.end(0) == 0


def mutations() -> list[tuple[str, bytes]]:
    """A batch whose offsets, lengths and counts are changed, by name."""
    whole = records(5, 100)
    data = bytes(whole.serialize())
    header, body = flight.ipc_message(data)
    start = len(data) - len(body)
    found = []

    def changed(name: str, at: int, kind: str, value: int) -> None:
        copy = bytearray(data)
        struct.pack_into(kind, copy, at, value)
        found.append((name, bytes(copy)))

    offsets = next(n for n in range(0, len(body), 4) if struct.unpack_from("<3i", body, n) == (0, 100, 200))
    changed("an offset behind the values", start + offsets + 20, "<i", 1 << 30)
    changed("a negative offset", start + offsets, "<i", -5)
    changed("falling offsets", start + offsets + 8, "<i", 5)
    for at in range(0, len(header) - 8, 4):
        (value,) = struct.unpack_from("<q", header, at)
        if value in (5, 500, len(body)):
            changed(f"the number {value} at {at} is huge", 8 + at, "<q", 1 << 40)
            changed(f"the number {value} at {at} is negative", 8 + at, "<q", -1)
    return found


@pytest.mark.parametrize(("name", "data"), mutations(), ids=[name for name, _ in mutations()])
def test_a_damaged_batch_is_refused_or_readable(
    running: Running, channel: grpc.Channel, name: str, data: bytes
) -> None:
    """Some numbers are redundant: a batch that has them wrong is stored if every reader can read it."""
    with Put(channel, "t") as put:
        put.send(data)
        try:
            answer: object = put.outcome()
        except grpc.RpcError as failed:
            answer = type(error_of(failed))
    stored = running.hub.topic("t").log.read(0, 0)
    assert answer == ({"offset": 0} if stored else InvalidRecord)
    for batch in stored:
        batch.records.validate(full=True)
        assert batch.records.to_pylist() == records(5, 100).to_pylist()


def header_array(valid: Any) -> pa.Array:
    return pa.array([valid, None, None], pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])))


@pytest.mark.parametrize(
    "batch",
    [
        records(0),
        batch_of(timestamp=pa.array([None, 1, 2], SCHEMA.field("timestamp").type)),
        batch_of(headers=header_array([None])),
        batch_of(headers=header_array([{"key": None, "value": b""}])),
        batch_of(value=pa.array([1, 2, 3], pa.int64())),
        batch_of(value=pa.array(["a", "b", "a"]).dictionary_encode()),
        batch_of(value=pa.array([b"a", b"b", b"c"], pa.large_binary())),
    ],
    ids=["empty", "no time", "null header", "header without key", "numbers", "dictionary", "large_binary"],
)
def test_a_batch_of_other_rows_or_columns_is_refused(channel: grpc.Channel, batch: pa.RecordBatch) -> None:
    assert isinstance(refusal(channel, batch_message(batch.serialize(), partition=0)), InvalidRecord)


@pytest.mark.parametrize(
    "about",
    [
        {"partition": -1},
        {"partition": 2},
        {"partition": 10**30},
        {"partition": True},
        {"partition": 0, "producer": "x"},
        {"partition": 0, "producer": "0" * 32, "sequence": -1},
        {"partition": 0, "producer": "1" * 32, "sequence": 1 << 63},
        {"partition": 0, "producer": "1" * 32, "epoch": 1 << 32, "sequence": 0},
        {"partition": 0, "since": -1},
        {"partition": 0, "padding": "x" * 5_000},
        {},
    ],
)
def test_what_comes_with_a_batch_is_checked(running: Running, channel: grpc.Channel, about: dict[str, Any]) -> None:
    error = refusal(channel, batch_message(records().serialize(), **about))
    assert isinstance(error, InvalidRecord | InvalidArgument), error
    assert [running.hub.topic("t").log.end(number) for number in (0, 1)] == [0, 0]


def test_times_at_the_ends_of_their_range_can_be_stored_and_read(running: Running, channel: grpc.Channel) -> None:
    times = pa.array([-(1 << 63), (1 << 63) - 1, 0], SCHEMA.field("timestamp").type)
    batch = pa.RecordBatch.from_arrays(
        [times if f.name == "timestamp" else records(3).column(f.name) for f in SCHEMA], schema=SCHEMA
    )
    with Put(channel, "t") as put:
        put.send(batch.serialize())
        assert put.outcome() == {"offset": 0}
    assert len(rows(channel, topic="t", partition=0, start=0, end=3)) == 3
    for time in (-(1 << 70), 1 << 70, 0):
        assert 0 <= act(channel, "topic.offset_at", topic="t", partition=0, timestamp=time)["offset"] <= 3


@pytest.mark.parametrize(
    "ticket",
    [
        {"partition": 0, "start": -1, "end": 3},
        {"partition": 0, "start": 3, "end": 1},
        {"partition": -1, "start": 0, "end": 1},
        {"partition": 9, "start": 0, "end": 0},
        {"partition": 0, "start": 0, "end": 1},
        {"partition": 0, "start": 10**40, "end": 10**41},
        {"positions": [[9, 0]]},
        {"positions": [[0, 0, 0]]},
        {"positions": {"0": 0}},
        {"topic": "\ud800", "positions": []},
        {"topic": "../t", "positions": []},
        {"topic_id": "x", "positions": [[0, 0]]},
    ],
)
def test_a_ticket_for_what_is_not_there_is_an_error(channel: grpc.Channel, ticket: dict[str, Any]) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        list(get(channel, **{"topic": "t", **ticket}))
    assert isinstance(error_of(failed.value), PxrsError)


@pytest.mark.parametrize("identity", ["../../evil", "x", "A" * 32, 7, None, "0" * 31 + "/"])
def test_the_id_of_a_new_topic_is_a_uuid(channel: grpc.Channel, identity: object) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        act(channel, "log.create_topic", settings={"name": "n", "id": identity})
    assert isinstance(error_of(failed.value), InvalidArgument)


def test_a_cut_stream_keeps_the_order_of_its_appends(running: Running) -> None:
    """W1: what is stored of a stream that is cut at any moment is a beginning of what was sent."""
    log = running.hub.topic("t").log
    for cut in range(0, 40, 4):
        before = log.end(0)
        with connect(running.address) as channel:
            put = Put(channel, "t")
            for number in range(20):
                put.send(records(2, 50, 2 * number).serialize())
            for _ in range(cut // 2):
                put.outcome()
            put.cancel()
        with connect(running.address) as channel:
            with Put(channel, "t") as put:  # behind all that the cut stream may still store: it appends last
                put.send(records(1, 50, 999).serialize())
                put.outcome()
            values = [int(row[2].strip(b".")) for row in rows(channel, topic="t", positions=[[0, before]])]
        stored = [value for value in values if value != 999]
        assert stored == list(range(len(stored)))
        assert len(stored) >= cut // 2 * 2


def test_a_batch_that_names_its_codec_in_custom_metadata_is_refused(channel: grpc.Channel) -> None:
    """Arrow's reader decompresses it too, and nothing in the batch itself says how large it is then."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4, compression="zstd")
    whole = batch_of(value=pa.array([bytes(10_000_000), b"", b""], SCHEMA.field("value").type))
    with pa.ipc.new_stream(sink, whole.schema, options=options) as writer:
        writer.write_batch(whole, custom_metadata={"ARROW:experimental_compression": "zstd"})
    messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(sink.getvalue()))
    messages.read_next_message()  # the schema
    message = messages.read_next_message()
    header, body = bytearray(message.metadata.to_pybytes()), message.body.to_pybytes()
    # Remove the field `compression` of the record batch: see `pxrs.server.layout`.
    batch_at = _Table(bytes(header), struct.unpack_from("<I", header)[0]).table(2)
    assert batch_at is not None
    place = batch_at._fields + 4 + 2 * 3
    header[place : place + 2] = bytes(2)
    assert pa.ipc.read_record_batch(flight.encapsulated(header, body), SCHEMA).nbytes > 100 * len(body)
    about = flight.flight_data(flight.FlightData(bytes(header), body, b'{"partition": 0}'))
    error = refusal(channel, about)
    assert isinstance(error, InvalidRecord)
    assert "V5" in str(error)
