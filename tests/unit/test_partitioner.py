"""X2: a key lands in the same partition everywhere."""

from __future__ import annotations

import os
import subprocess
import sys

import pyarrow as pa
import pytest

from pxrs.errors import InvalidRecord, InvalidTopic
from pxrs.log.batch import SCHEMA
from pxrs.model import PARTITIONERS
from pxrs.partitioner import HASHES, hash_named, murmur2, murmur2_signed, partitions_of, read_table, split_table, xxh64


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_l6_murmur2_is_that_of_kafka(key: bytes, expected: int) -> None:
    assert murmur2_signed(key) == expected
    assert murmur2(key) == expected & 0x7FFFFFFF


def test_x2_xxh64_is_fixed_for_good() -> None:
    assert xxh64(b"") == 0xEF46DB3751D8E999
    assert xxh64(b"a") == 0xD24EC4F1A98C6E5B
    assert [xxh64(b"account-%d" % i) % 8 for i in range(8)] == [4, 3, 3, 4, 6, 5, 6, 7]


def test_x2_another_process_agrees() -> None:
    keys = [b"k%d" % i for i in range(50)]
    program = (
        "from pxrs.partitioner import HASHES; print([[h(b'k%d' % i) % 8 for i in range(50)] for h in HASHES.values()])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, env={**os.environ, "PYTHONHASHSEED": "7"}
    )
    assert found.stdout.decode().strip() == str([[h(key) % 8 for key in keys] for h in HASHES.values()])


def test_l6_every_partitioner_a_topic_may_name_is_here() -> None:
    assert set(HASHES) == set(PARTITIONERS)
    with pytest.raises(InvalidTopic, match="xxh64"):
        hash_named("crc32")


def test_many_keys_at_once_go_where_each_alone_goes() -> None:
    keys = [b"a", None, b"b", b"a", b"", None]
    for hash_of in HASHES.values():
        found = partitions_of(pa.array(keys, pa.binary()), hash_of, 5, keyless=4).to_pylist()
        assert found == [4 if key is None else hash_of(key) % 5 for key in keys]


def split(table: pa.Table, partitions: int = 4, keyless: int = 0) -> dict[int, list[bytes | None]]:
    pieces = split_table(read_table(table, partitions, 1 << 20), xxh64, partitions, keyless)
    assert all(piece.schema.equals(SCHEMA) for _, piece in pieces)
    return {partition: piece.column("value").to_pylist() for partition, piece in pieces}


def test_a_table_is_split_in_order() -> None:
    keys = [b"k%d" % (i % 7) for i in range(1000)]
    values = [b"%d" % i for i in range(1000)]
    expected: dict[int, list[bytes]] = {}
    for key, value in zip(keys, values, strict=True):
        expected.setdefault(xxh64(key) % 4, []).append(value)
    assert split(pa.table({"key": keys, "value": values})) == expected
    chunked = pa.concat_tables(
        [pa.table({"key": keys[i : i + 9], "value": values[i : i + 9]}) for i in range(0, 1000, 9)]
    )
    assert split(chunked) == expected


def test_a_partition_that_is_named_goes_before_the_key() -> None:
    table = pa.table({"key": [b"a", b"a", None], "value": [b"1", b"2", b"3"], "partition": [3, None, None]})
    found = split(table, keyless=2)
    assert found[3][0] == b"1"
    assert b"2" in found[xxh64(b"a") % 4]
    assert b"3" in found[2]


def test_text_is_taken_as_utf_8() -> None:
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())):
        column = pa.array(["ä", None, "ä"], pa.string()).cast(kind)
        assert split(pa.table({"key": column, "value": column}), 1) == {0: ["ä".encode(), None, "ä".encode()]}


def test_headers_and_times_are_kept() -> None:
    table = pa.table(
        {
            "value": [b"a", b"b"],
            "timestamp": pa.array([1_500, None], pa.timestamp("ns", "Europe/Berlin")),
            "headers": [[{"key": "h", "value": b"1"}], None],
        }
    )
    ((_, piece),) = split_table(read_table(table, 1, 100), xxh64, 1, 0)
    assert piece.column("headers").to_pylist() == [[{"key": "h", "value": b"1"}], None]
    times = piece.column("timestamp").cast(pa.int64()).to_pylist()
    assert times[0] == 1
    assert times[1] > 1_700_000_000_000_000


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"key": [b"a"]}, "value"),
        ({"value": [b"a"], "colour": [1]}, "colour"),
        ({"value": [1]}, "value"),
        ({"value": [b"a"], "partition": [4]}, "partition"),
        ({"value": [b"a"], "partition": [-1]}, "partition"),
        ({"value": [b"a"], "partition": ["x"]}, "partition"),
        ({"value": [b"a"], "timestamp": pa.array([1], pa.timestamp("us"))}, "timestamp"),
        ({"value": [b"a"], "headers": [b"h"]}, "headers"),
        ({"value": [b"a"], "headers": [[{"key": None, "value": b"1"}]]}, "headers"),
        ({"value": [b"a" * 101]}, "101"),
    ],
)
def test_an_unfit_table_is_refused_with_the_reason(columns: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRecord, match=named):
        read_table(pa.table(columns), 4, 100)


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(InvalidRecord):
        read_table([1], 4, 100)
