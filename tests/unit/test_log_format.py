"""The frame format is for ever: golden files of each released version are read, and are as docs/format.md says (L5)."""

from __future__ import annotations

import pickle
import shutil
import struct
import uuid
from pathlib import Path

import pyarrow as pa
import pytest
import xxhash

from pxrs.errors import DamagedFrame, InvalidRecord, MisplacedFile, UnknownProducer
from pxrs.log.batch import (
    SCHEMA,
    Origin,
    Payload,
    check_encoded,
    encode,
    header_bytes,
    padding,
    place_id,
    read_header,
    read_payload,
)
from pxrs.log.contract import Append
from pxrs.log.directory.check import check
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.outcomes import offsets_of
from pxrs.model import CODECS
from pxrs.testing.log_contract import records, values_from

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS = [1, 2]
PRODUCER = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")
PLACE = place_id("0123456789abcdef0123456789abcdef", 1)
STORED_AT = 1_700_000_001_000_000
ROWS = [
    {"key": b"account-7", "value": b"paid", "timestamp": 1_700_000_000_000_001, "headers": None},
    {"key": None, "value": b"", "timestamp": 1_700_000_000_000_000, "headers": []},
    {"key": b"", "value": None, "timestamp": -1, "headers": [{"key": "trace", "value": b"\x00\xff"}]},
]


def batch() -> pa.RecordBatch:
    columns = [pa.array([row[field.name] for row in ROWS], field.type) for field in SCHEMA]
    return pa.record_batch(columns, schema=SCHEMA)


def frame(codec: str) -> bytes:
    payload = encode(batch(), codec)
    header = header_bytes(payload, 42, Origin(PRODUCER, 3, 9), place=PLACE, stored_at=STORED_AT, follows=1)
    return header + payload.data.to_pybytes() + padding(payload)


def golden(version: int, name: str) -> Path:
    return GOLDEN / f"log-format-{version}" / name


@pytest.mark.parametrize("version", FORMATS)
@pytest.mark.parametrize("codec", CODECS)
def test_golden_frames_are_read(codec: str, version: int) -> None:
    data = golden(version, f"{codec}.frame").read_bytes()
    header = read_header(data, "golden", 0, PLACE)
    expected = (None, 1_700_000_000_000_001) if version == 1 else (PLACE, STORED_AT)
    assert (header.place_id, header.stored_at) == expected
    assert header.base_offset == 42
    assert header.origin == Origin(PRODUCER, 3, 9)
    assert (header.first_timestamp, header.last_timestamp) == (-1, 1_700_000_000_000_001)
    assert (header.follows, header.schema_id, header.frame_bytes) == (1, 0, len(data))
    records = read_payload(header, pa.py_buffer(data), "golden", 0)
    assert records.equals(batch())


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_written_now_is_read(codec: str) -> None:
    data = frame(codec)
    header = read_header(data, "new", 0)
    assert read_payload(header, pa.py_buffer(data), "new", 0).equals(batch())


@pytest.mark.parametrize("version", FORMATS)
def test_the_header_is_as_the_document_says(version: int) -> None:
    data = golden(version, "none.frame").read_bytes()
    length = {1: 96, 2: 128}[version]
    assert data[:8] == b"PXRS" + struct.pack("<BBH", version, 0, length)
    assert struct.unpack_from("<IIQqq", data, 8) == (len(data), 3, 42, -1, 1_700_000_000_000_001)
    assert data[40:56] == PRODUCER.bytes
    epoch, schema, sequence, checksum, size, follows = struct.unpack_from("<IIQQII", data, 56)
    assert (epoch, schema, sequence, follows) == (3, 0, 9, 1)
    assert checksum == xxhash.xxh3_64_intdigest(data[length : length + size])
    assert struct.unpack_from("<Q", data, length - 8) == (xxhash.xxh3_64_intdigest(data[: length - 8]),)
    assert len(data) % 32 == 0
    assert not any(data[length + size :])
    if version == 2:
        place = xxhash.xxh3_64_intdigest(b"0123456789abcdef0123456789abcdef/1")
        assert struct.unpack_from("<Qq16s", data, 88) == (place, STORED_AT, bytes(16))


def test_a_frame_of_another_partition_or_of_a_later_format_is_refused() -> None:
    data = golden(2, "none.frame").read_bytes()
    with pytest.raises(MisplacedFile):
        read_header(data, "golden", 0, place_id("0123456789abcdef0123456789abcdef", 0))
    later = data[:4] + b"\3" + data[5:120]
    with pytest.raises(DamagedFrame, match="format 3, which this version cannot read"):
        read_header(later + struct.pack("<Q", xxhash.xxh3_64_intdigest(later)), "golden", 0)


@pytest.mark.parametrize("version", FORMATS)
def test_every_damaged_bit_is_noticed(version: int) -> None:
    data = golden(version, "none.frame").read_bytes()
    header = read_header(data, "golden", 0)
    for bit in range(0, (header.header_bytes + header.payload_bytes) * 8, 3):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedFrame, match="golden at byte 0"):
            read_payload(read_header(damaged, "golden", 0), pa.py_buffer(bytes(damaged)), "golden", 0)


def test_a_batch_that_does_not_fit_the_log_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="columns"):
        encode(pa.record_batch({"value": [b"x"]}))
    timeless = pa.record_batch([pa.nulls(1, field.type) for field in SCHEMA], schema=SCHEMA)
    with pytest.raises(InvalidRecord, match="timestamp"):
        encode(timeless)
    with pytest.raises(InvalidRecord, match="empty"):
        encode(batch().slice(0, 0))


def test_only_what_this_process_has_encoded_is_not_decoded_again() -> None:
    payload = encode(batch())
    check_encoded(payload)
    foreign = pickle.loads(pickle.dumps(payload))
    check_encoded(foreign)
    assert foreign == payload
    noise = b"no Arrow batch"
    for each in (payload, foreign):
        bad = each._replace(data=pa.py_buffer(noise), checksum=xxhash.xxh3_64_intdigest(noise))
        with pytest.raises(InvalidRecord, match="Arrow"):
            check_encoded(bad)
    assert type(foreign) is Payload


def test_a_payload_has_the_earliest_and_the_latest_time_of_its_records() -> None:
    times = pa.array([5, 3, 9], SCHEMA.field("timestamp").type)
    columns = [pa.nulls(3, SCHEMA.field(name).type) for name in ("key", "value")]
    several = pa.record_batch([*columns, times, pa.nulls(3, SCHEMA.field("headers").type)], schema=SCHEMA)
    assert encode(several)[3:5] == (3, 9)
    assert encode(several.slice(2))[3:5] == (9, 9)


@pytest.mark.parametrize("version", FORMATS)
def test_a_golden_directory_is_read_and_gone_on_with(version: int, tmp_path: Path) -> None:
    shutil.copytree(golden(version, "log"), tmp_path / "log", symlinks=True)
    assert [finding for checked in check(tmp_path / "log") for finding in checked.findings] == []
    topic = DirectoryLog(tmp_path / "log").topic("orders")
    messages = [b"message %d" % number + b"x" * 500 for number in range(12)]
    found = [values_from(topic, number) for number in (0, 1)]
    assert found == [messages[::2], [*messages[1::2], b"behind a gap"]]
    assert topic.offset_at(1, 1_700_000_000_000_050) == 65_537, "behind what the first append had reserved"
    assert offsets_of(topic.append([Append.encoded(0, records([messages[10]]), Origin(PRODUCER, 0, 5))])) == [5], (
        "a retry is stored once"
    )
    for partition in (0, 1):  # what was reserved may have been given out before the golden machine went down
        with pytest.raises(UnknownProducer, match="a gap up to offset"):
            offsets_of(topic.append([Append.encoded(partition, records([b"x"]), Origin(PRODUCER, 0, 9))]))
    end = topic.end(0)
    assert offsets_of(topic.append([Append.encoded(0, records([b"next"]), Origin(PRODUCER, 0, 6))])) == [end]
    assert values_from(topic, 0) == [*messages[::2], b"next"], "a frame of format 2 behind those of the golden format"
    assert [finding for checked in check(tmp_path / "log") for finding in checked.findings] == []
