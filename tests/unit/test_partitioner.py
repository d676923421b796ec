"""X2: a key lands in the same partition everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import pxrs
from pxrs.errors import InvalidRecord, InvalidTopic
from pxrs.hashing import HASHES, hash_named, murmur2, murmur2_signed, partitions_of, xxh64
from pxrs.log.batch import SCHEMA
from pxrs.model import PARTITIONERS
from pxrs.producer import tables
from pxrs.producer.keyless import KeylessSpread
from pxrs.producer.tables import PAIR_BYTES, read_table, slices, split_table


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
        "from pxrs.hashing import HASHES\nprint([[h(b'k%d' % i) % 8 for i in range(50)] for h in HASHES.values()])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, env={**os.environ, "PYTHONHASHSEED": "7"}
    )
    assert found.stdout.decode().strip() == str([[h(key) % 8 for key in keys] for h in HASHES.values()])


def test_l6_every_partitioner_a_topic_may_name_is_here() -> None:
    assert tuple(HASHES) == PARTITIONERS
    with pytest.raises(InvalidTopic, match="xxh64"):
        hash_named("crc32")


def test_many_keys_at_once_go_where_each_alone_goes() -> None:
    keys = [b"a", None, b"b", b"a", b"", None]
    for hash_of in HASHES.values():
        found = partitions_of(pa.array(keys, pa.binary()), hash_of, 5).to_pylist()
        assert found == [None if key is None else hash_of(key) % 5 for key in keys]


def split(table: pa.Table, partitions: int = 4, keyless: int = 0) -> dict[int, list[bytes | None]]:
    fill = KeylessSpread(partitions, keyless).fill
    pieces = split_table(read_table(table, partitions, 1 << 20), xxh64, partitions, fill)
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
    ((_, piece),) = split_table(read_table(table, 1, 100), xxh64, 1, KeylessSpread(1, 0).fill)
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
        ({"value": [b"a"], "partition": ["1"]}, "partition is string"),
        ({"value": [b"a"], "partition": pa.array(["1"]).dictionary_encode()}, "partition is string"),
        ({"value": [b"a"], "partition": [True]}, "partition is bool"),
        ({"value": [b"a"], "partition": [1.0]}, "partition is double"),
        ({"value": [b"a"], "timestamp": pa.array([1], pa.timestamp("us"))}, "timestamp"),
        ({"value": [b"a"], "headers": [b"h"]}, "headers"),
        ({"value": [b"a"], "headers": [[{"key": None, "value": b"1"}]]}, "headers"),
        ({"value": [b"a"], "headers": [[{"key": "h", "val": b"1"}]]}, "fields key and value"),
        ({"value": [b"a"], "headers": [[{"key": "h"}]]}, "fields key and value"),
        ({"value": [b"a"], "headers": [[{"key": "h", "value": b"1", "more": 1}]]}, "fields key and value"),
        ({"value": [b"a"], "headers": [[{"key": 1, "value": b"1"}]]}, "headers"),
        ({"value": [b"a" * 101]}, "101"),
        ({"key": [None, b"a"], "value": [b"", b"a" * 100]}, "101"),
    ],
)
def test_an_unfit_table_is_refused_with_the_reason(columns: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRecord, match=named):
        read_table(pa.table(columns), 4, 100)


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(InvalidRecord):
        read_table([1], 4, 100)


def headers_of(*lengths: int) -> list[dict[str, object]]:
    return [{"key": "h", "value": b"x" * length} for length in lengths]


def test_the_headers_of_a_row_count_towards_its_bytes() -> None:
    rows = [None, headers_of(), headers_of(10, 20), None, headers_of(0)]
    most = 1 + 2 * (PAIR_BYTES + 1) + 30
    kind = SCHEMA.field("headers").type
    for headers in (
        pa.chunked_array([rows[:2], rows[2:]], kind),
        pa.chunked_array([pa.array([headers_of(1000), *rows, headers_of(1000)], kind).slice(1, 5)]),
        pa.chunked_array(
            [[None if row is None else [("h", each["value"]) for each in row] for row in rows[:3]]],
            pa.map_(pa.string(), pa.binary()),
        ),
    ):
        table = pa.table({"value": [b"a"] * len(headers), "headers": headers})
        assert read_table(table, 1, most).column("headers").to_pylist() == rows[: len(headers)]
        with pytest.raises(InvalidRecord, match=f"{most} bytes of key, value and headers"):
            read_table(table, 1, most - 1)


def test_a_row_without_headers_counts_for_none_though_it_spans_some() -> None:
    items = pa.array([headers_of(1000, 1)], SCHEMA.field("headers").type).values
    headers = pa.ListArray.from_arrays(
        pa.array([0, 1, 2], pa.int32()), items, type=SCHEMA.field("headers").type, mask=pa.array([True, False])
    )
    assert read_table(pa.table({"value": [b"a", b"b"], "headers": headers}), 1, 100).num_rows == 2


def test_a_row_may_have_no_number_of_empty_headers() -> None:
    with pytest.raises(InvalidRecord, match="headers"):
        read_table(pa.table({"value": [b""], "headers": [headers_of(*[0] * 100)]}), 1, 1000)


def test_the_most_is_that_of_one_row_and_not_of_a_key_and_another_rows_value() -> None:
    table = pa.table({"key": [b"k" * 60, b"k"], "value": [b"v", b"v" * 60]})
    assert read_table(table, 1, 61).num_rows == 2


def test_slices_are_bounded_by_rows_and_by_bytes_and_lose_nothing() -> None:
    sizes = [3, 0, 7, 50, 1, 1, 1, 1, 9, 4]
    table = pa.table(
        {
            "key": pa.chunked_array([[b"k"] * 4, [None] * 6], pa.binary()),
            "value": pa.chunked_array([[b"v" * size for size in sizes[:7]], [b"v" * size for size in sizes[7:]]]),
            "headers": pa.chunked_array([[None] * 9, [headers_of(2)]], SCHEMA.field("headers").type),
        }
    )
    for rows in (read_table(table, 1, 100), read_table(pa.concat_tables([table, table]), 1, 100).slice(10)):
        parts = list(slices(rows, 3, 12))
        assert pa.concat_tables(parts).equals(rows)
        # A row of 51 bytes goes alone, and so does the last one, whose header counts.
        assert [part.num_rows for part in parts] == [2, 1, 1, 3, 2, 1]
    assert list(slices(read_table(table, 1, 100).slice(0, 0), 3, 12)) == []


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.large_binary(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_a_column_of_more_bytes_than_the_logs_type_can_hold_is_taken_in_parts(
    kind: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "PART_BYTES_MAX", 50)
    monkeypatch.setattr(tables, "_OFFSET_MAX", 99)
    texts = [None if i % 5 == 3 else f"{i % 20:04d}" * (i % 4) for i in range(100)]
    column = pa.array(texts, pa.string()).cast(kind)
    for begin, end in ((0, 100), (3, 90), (90, 97)):
        table = pa.table({"key": column, "value": column}).slice(begin, end - begin)
        rows = read_table(table, 4, 1 << 20)
        assert rows.num_rows == end - begin
        expected: dict[int, list[bytes | None]] = {}
        for text in texts[begin:end]:
            value = None if text is None else text.encode()
            expected.setdefault(0 if value is None else xxh64(value) % 4, []).append(value)
        found: dict[int, list[bytes | None]] = {}
        for partition, piece in split_table(rows, xxh64, 4, lambda chosen, size: chosen.fill_null(0)):
            piece.validate(full=True)
            found.setdefault(partition, []).extend(piece.column("value").to_pylist())
        assert found == expected


def test_a_table_of_three_gib_is_split(tmp_path: Path) -> None:
    # The values are a hole in a file, and nothing here reads them.
    with open(tmp_path / "hole", "wb") as file:
        file.truncate(3 << 30)
    data = pa.memory_map(str(tmp_path / "hole")).read_buffer()
    offsets = pa.array(range(0, (3 << 30) + 1, 1 << 20), pa.int64())
    value = pa.Array.from_buffers(pa.large_binary(), 3072, [None, offsets.buffers()[1], data])
    narrow = pa.Array.from_buffers(
        pa.binary(), 1024, [None, offsets.slice(0, 1025).cast(pa.int32()).buffers()[1], data]
    )
    many = pa.chunked_array([narrow] * 3)
    for table, rows in ((value, 3072), (value.slice(3000, 10), 10), (many, 3072)):
        pieces = split_table(read_table(pa.table({"value": table}), 1, 1 << 20), xxh64, 1, KeylessSpread(1, 0).fill)
        assert sum(piece.num_rows for _, piece in pieces) == rows


def test_x2_an_installed_package_brings_a_partitioner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop.py").write_text("def by_region(key):\n    return key[0] - 48\n")
    info = tmp_path / "shop-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shop\nVersion: 1\n")
    points = "[pxrs.partitioners]\nby-region = shop:by_region\nbroken = shop:nothing\n"
    (info / "entry_points.txt").write_text(points)
    with pxrs.open(tmp_path / "data") as hub:
        with pytest.raises(InvalidTopic, match="install the package"):
            hub.create_topic("t", partitioner="by-region")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(InvalidTopic, match="loading shop:nothing failed"):
            hub.create_topic("t", partitioner="broken")
        hub.create_topic("t", partitions=4, partitioner="by-region")
        with hub.producer("t") as out:
            places = [out.send(b"x", key=key).result()[0] for key in (b"2-a", b"3-b", b"6-c")]
        assert places == [2, 3, 2]
    monkeypatch.undo()
    with pxrs.open(tmp_path / "data") as hub:
        assert hub.topic("t").to_arrow().num_rows == 3, "whoever reads does not need it"
        with pytest.raises(InvalidTopic, match="by-region"):
            hub.producer("t")
