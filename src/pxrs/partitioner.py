"""Which partition a key belongs to: the same in every process and on every machine (X2).

A partitioner is a hash of bytes to a number that is not negative; the partition is the remainder. Its name is part of
the topic (L6), so that all producers of a topic agree. Messages without a key have no place of their own: a producer
puts them into one partition after the other, a batch at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from pxrs.errors import InvalidRecord, InvalidTopic
from pxrs.log.batch import SCHEMA

Hash = Callable[[bytes], int]

xxh64: Final[Hash] = xxhash.xxh64_intdigest
"""The default: XXH64 with seed 0."""

_MULTIPLIER: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF


def murmur2_signed(key: bytes) -> int:
    """Murmur2 as `org.apache.kafka.common.utils.Utils.murmur2` computes it: a signed number of 32 bits."""
    length = len(key)
    h = 0x9747B28C ^ length
    whole = length & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(key[i : i + 4], "little") * _MULTIPLIER & _MASK
        k = (k ^ k >> 24) * _MULTIPLIER & _MASK
        h = (h * _MULTIPLIER & _MASK) ^ k
    if whole < length:
        h = (h ^ int.from_bytes(key[whole:], "little")) * _MULTIPLIER & _MASK
    h = (h ^ h >> 13) * _MULTIPLIER & _MASK
    h ^= h >> 15
    return h - (1 << 32) if h >> 31 else h


def murmur2(key: bytes) -> int:
    """As Kafka's Java clients hash a key: the sign bit is dropped, not negated."""
    return murmur2_signed(key) & 0x7FFFFFFF


HASHES: Final[dict[str, Hash]] = {"xxh64": xxh64, "murmur2": murmur2}


def hash_named(name: str) -> Hash:
    """The hash of a topic's partitioner. Raises InvalidTopic if this version does not know it."""
    if name not in HASHES:
        raise InvalidTopic(f"partitioner {name!r}; choose from {', '.join(HASHES)}")
    return HASHES[name]


def partitions_of(keys: pa.Array, hash_of: Hash, partitions: int, keyless: int) -> pa.Array:
    """The partition of each key, as int32; null keys go to `keyless`. Each distinct key is hashed once."""
    encoded = keys.dictionary_encode()
    distinct = pa.array([hash_of(key) % partitions for key in encoded.dictionary.to_pylist()], pa.int32())
    return distinct.take(encoded.indices).fill_null(keyless)


def read_table(table: pa.Table | pa.RecordBatch, partitions: int, row_bytes_max: int) -> pa.Table:
    """The table with the log's columns, and `partition` if it has that. Raises InvalidRecord, naming the column."""
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    if not isinstance(table, pa.Table):
        raise InvalidRecord(f"a {type(table).__name__} is no Arrow table or record batch")
    names = table.column_names
    unknown = [name for name in names if name not in (*SCHEMA.names, "partition")]
    if unknown or "value" not in names or len(set(names)) != len(names):
        raise InvalidRecord(
            f"the table has the columns {', '.join(names)}; there must be value, and there may be key, timestamp, "
            "headers and partition, each once"
        )
    columns = {field.name: _read_column(table, field.name, field.type) for field in SCHEMA}
    if "partition" in names:
        columns["partition"] = _read_column(table, "partition", pa.int32())
        least, most = pc.min_max(columns["partition"]).values()
        if least.is_valid and not 0 <= least.as_py() <= most.as_py() < partitions:
            raise InvalidRecord(f"partitions from {least} to {most}, and there are 0 to {partitions - 1}")
    _check_headers(columns["headers"])
    longest = sum(pc.max(pc.binary_length(columns[name])).as_py() or 0 for name in ("key", "value"))
    if longest > row_bytes_max:
        raise InvalidRecord(f"a key and a value with up to {longest:,} bytes, and {row_bytes_max:,} is the most")
    columns["timestamp"] = columns["timestamp"].fill_null(
        pa.scalar(time.time_ns() // 1000, pa.int64()).cast(SCHEMA.field("timestamp").type)
    )
    return pa.table(columns)


def split_table(rows: pa.Table, hash_of: Hash, partitions: int, keyless: int) -> list[tuple[int, pa.RecordBatch]]:
    """The rows of each partition as one batch of the log, in the rows' order."""
    if rows.num_rows == 0:
        return []
    columns = [rows.column(name).combine_chunks() for name in SCHEMA.names]
    if "partition" not in rows.column_names:
        chosen = partitions_of(columns[0], hash_of, partitions, keyless)
    else:
        chosen = rows.column("partition").combine_chunks()
        if chosen.null_count:
            chosen = pc.coalesce(chosen, partitions_of(columns[0], hash_of, partitions, keyless))
    records = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    # The sort is stable, and by a small number; then each partition's rows lie together and are cut out without a copy.
    counts = pc.value_counts(chosen).to_pylist()
    if len(counts) > 1:
        records = records.take(pc.array_sort_indices(chosen))
    pieces = []
    start = 0
    for each in sorted(counts, key=lambda each: each["values"]):
        pieces.append((each["values"], records.slice(start, each["counts"])))
        start += each["counts"]
    return pieces


def _read_column(table: pa.Table, name: str, wanted: pa.DataType) -> pa.ChunkedArray:
    if name not in table.column_names:
        return pa.chunked_array([pa.nulls(table.num_rows, wanted)])
    column = table.column(name)
    given = column.type
    if pa.types.is_dictionary(given):
        column = column.cast(given.value_type)
        given = given.value_type
    if wanted == pa.binary() and not (_is_text(given) or pa.types.is_null(given)):
        raise InvalidRecord(f"the column {name} is {given}; give binary or string")
    if name == "timestamp" and pa.types.is_timestamp(given) and given.tz is None:
        raise InvalidRecord("the column timestamp has no time zone; give one, such as UTC")
    try:
        # A time finer than microseconds is cut; nothing else may lose anything.
        return column.cast(options=pc.CastOptions(wanted, allow_time_truncate=True))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InvalidRecord(f"the column {name} is {given} and cannot be taken as {wanted}: {error}") from error


def _is_text(given: pa.DataType) -> bool:
    kinds = pa.types
    return bool(
        kinds.is_string(given)
        or kinds.is_large_string(given)
        or kinds.is_string_view(given)
        or kinds.is_binary(given)
        or kinds.is_large_binary(given)
        or kinds.is_binary_view(given)
        or kinds.is_fixed_size_binary(given)
    )


def _check_headers(headers: pa.ChunkedArray) -> None:
    if headers.null_count == len(headers):
        return
    for chunk in headers.chunks:
        items = chunk.flatten()
        if items.null_count or pc.struct_field(items, "key").null_count:
            raise InvalidRecord("the column headers has a null among its items or their keys")
