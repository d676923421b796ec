"""Arrow tables for the log: checked, converted to the log's columns, split by partition, and cut into batches.

Columns are converted without a copy where Arrow can do that. A column of the log counts its bytes with 31 bits, so
tables are worked on in parts of PART_BYTES_MAX.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from pxrs.errors import InvalidRecord
from pxrs.hashing import Hash, partitions_of
from pxrs.log.batch import FRAME_BYTES_MAX, HEADERS_TYPE, SCHEMA

MESSAGE_BYTES_MAX: Final = FRAME_BYTES_MAX - (1 << 16)
"""The most bytes of key, value and headers of one message, so that a frame can hold it alone."""
PART_BYTES_MAX: Final = 1 << 30
PAIR_BYTES: Final = 16
"""How many bytes a header counts for besides its name and value, which bounds the number of empty headers of a row."""
_OFFSET_MAX: Final = (1 << 31) - 1
_PROBE_ROWS: Final = 64
"""How many partitions `_is_rising` compares before it compares all of them."""


def cut(records: pa.RecordBatch, rows_max: int, bytes_max: int) -> Iterator[pa.RecordBatch]:
    """Cut into parts of at most this number of rows and about this number of bytes, in order, without a copy. A larger
    row is a part by itself."""
    for start in range(0, records.num_rows, rows_max):
        yield from _halve(records.slice(start, rows_max), bytes_max)


def _halve(records: pa.RecordBatch, bytes_max: int) -> Iterator[pa.RecordBatch]:
    if records.num_rows > 1 and records.nbytes > bytes_max:
        half = records.num_rows // 2
        yield from _halve(records.slice(0, half), bytes_max)
        yield from _halve(records.slice(half), bytes_max)
    else:
        yield records


def no_headers(count: int) -> pa.Array:
    """A column of `count` nulls whose slices are small when they are stored. A slice of `pa.nulls` would be stored with
    buffers as long as those of the whole column."""
    zeros = pa.py_buffer(bytes(4 * (count + 1)))
    nothing = pa.array([], HEADERS_TYPE.value_type)
    return pa.Array.from_buffers(HEADERS_TYPE, count, [zeros, zeros], null_count=count, children=[nothing])


def read_table(table: pa.Table | pa.RecordBatch, partitions: int, row_bytes_max: int) -> pa.Table:
    """The table with the log's columns, and `partition` if it has that. Raises InvalidRecord, naming the column."""
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    if not isinstance(table, pa.Table):
        raise InvalidRecord(f"the table must be an Arrow table or record batch, not {type(table).__name__}")
    names = table.column_names
    unknown = [name for name in names if name not in (*SCHEMA.names, "partition")]
    if unknown or "value" not in names or len(set(names)) != len(names):
        raise InvalidRecord(
            f"the table has the columns {', '.join(names)}; it must have value, and may have key, timestamp, headers "
            "and partition, each once"
        )
    columns = {field.name: _read_column(table, field.name, field.type) for field in SCHEMA}
    if "partition" in names:
        columns["partition"] = _read_column(table, "partition", pa.int32())
        least, most = pc.min_max(columns["partition"]).values()
        if least.is_valid and not 0 <= least.as_py() <= most.as_py() < partitions:
            raise InvalidRecord(
                f"the column partition has {least} to {most}, but the topic has partitions 0 to {partitions - 1}"
            )
    _check_headers(columns["headers"])
    longest = pc.max(_row_bytes(columns)).as_py() or 0
    if longest > row_bytes_max:
        raise InvalidRecord(f"a row has {longest:,} bytes of key, value and headers; the limit is {row_bytes_max:,}")
    columns["timestamp"] = columns["timestamp"].fill_null(
        pa.scalar(time.time_ns() // 1000, pa.int64()).cast(SCHEMA.field("timestamp").type)
    )
    return pa.table(columns)


def slices(rows: pa.Table, rows_max: int, bytes_max: int) -> Iterator[pa.Table]:
    """Cut the rows of `read_table`, in order and without a copy, into parts of at most this number of rows and of bytes
    of keys, values and headers. A larger row is a part by itself."""
    sizes = pc.cumulative_sum(_row_bytes({name: rows.column(name) for name in SCHEMA.names}))
    sums = _int64_view(_combined(sizes)) if rows.num_rows else memoryview(b"")
    start = before = 0
    while start < rows.num_rows:
        most = min(start + rows_max, rows.num_rows)
        end = max(start + 1, bisect_right(sums, before + bytes_max, start, most))
        yield rows.slice(start, end - start)
        start, before = end, sums[end - 1]


Fill = Callable[[pa.Array, int], pa.Array]
"""Given the partitions of some messages and how many bytes these are, fills the nulls: see `KeylessSpread.fill`."""


def split_table(rows: pa.Table, hash_of: Hash, partitions: int, fill: Fill) -> list[tuple[int, pa.RecordBatch]]:
    """The rows of each partition as a batch of the log, in the rows' order; as several if they are very many bytes.

    fill: chooses the partitions of rows that have neither a key nor a partition."""
    if rows.num_rows == 0:
        return []
    parts = [rows] if rows.nbytes <= PART_BYTES_MAX else slices(rows, rows.num_rows, PART_BYTES_MAX)
    return [piece for part in parts for piece in _split_part(part, hash_of, partitions, fill)]


def _split_part(rows: pa.Table, hash_of: Hash, partitions: int, fill: Fill) -> Iterator[tuple[int, pa.RecordBatch]]:
    columns = [_combined(rows.column(name)) for name in SCHEMA.names]
    if "partition" not in rows.column_names:
        chosen = partitions_of(columns[0], hash_of, partitions)
    else:
        chosen = _combined(rows.column("partition"))
        if chosen.null_count:
            chosen = pc.coalesce(chosen, partitions_of(columns[0], hash_of, partitions))
    records = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    if chosen.null_count:  # otherwise `nbytes` is not asked for, which costs as much as the hashing of a few keys
        chosen = fill(chosen, records.nbytes)
    yield from sort_by_partition(records, chosen)[1]


def sort_by_partition(
    records: pa.RecordBatch, chosen: pa.Array
) -> tuple[pa.Array | None, list[tuple[int, pa.RecordBatch]]]:
    """Sort rows by partition. Returns the order, None if no row moved; and the rows of each partition, in their order,
    the partitions in rising order."""
    # The sort is stable, and by a small number; then each partition's rows lie together and are cut out without a copy.
    counts = sorted((each["values"], each["counts"]) for each in pc.value_counts(chosen).to_pylist())
    if len(counts) <= 1:
        return None, [(number, records) for number, _ in counts]
    # Rows without a key are given partitions in rising order, so that often there is nothing to sort.
    order = None if _is_rising(chosen) else pc.array_sort_indices(chosen)
    *columns, headers = records.columns
    has_headers = headers.null_count < len(headers)
    if order is not None:
        columns = [pc.take(column, order, boundscheck=False) for column in columns]
        headers = headers.take(order) if has_headers else headers
    records = pa.RecordBatch.from_arrays(
        [*columns, headers if has_headers else no_headers(len(headers))], schema=SCHEMA
    )
    starts = accumulate((count for _, count in counts), initial=0)
    return order, [
        (number, records.slice(start, count)) for (number, count), start in zip(counts, starts, strict=False)
    ]


def _is_rising(numbers: pa.Array) -> bool:
    """Whether the partitions are in rising order. The first few are compared first: in a table with keys, they almost
    always show that it is not so."""
    return (len(numbers) <= _PROBE_ROWS or _rises(numbers.slice(0, _PROBE_ROWS))) and _rises(numbers)


def _rises(numbers: pa.Array) -> bool:
    return bool(pc.all(pc.less_equal(numbers.slice(0, len(numbers) - 1), numbers.slice(1))).as_py())


def _combined(column: pa.ChunkedArray) -> pa.Array:
    """One array; a single chunk is taken as it is, because combining would copy it."""
    chunks = [chunk for chunk in column.chunks if len(chunk)]
    return chunks[0] if len(chunks) == 1 else column.combine_chunks()


def _row_bytes(columns: Mapping[str, pa.ChunkedArray]) -> pa.ChunkedArray:
    """How many bytes of key, value and headers each row has, as int64."""
    sizes = _lengths(columns["value"])
    if columns["key"].null_count < len(columns["key"]):
        sizes = pc.add(sizes, _lengths(columns["key"]))
    headers = columns["headers"]
    if headers.null_count < len(headers):
        sizes = pc.add(sizes, pa.chunked_array([_header_bytes(chunk) for chunk in headers.chunks], pa.int64()))
    return sizes


def _lengths(column: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    return pc.binary_length(column).fill_null(0).cast(pa.int64())


def _header_bytes(headers: pa.ListArray) -> pa.Array:
    """The bytes of the headers of each row: the difference of the running sum at the two ends of the row."""
    bounds = headers.offsets
    first, last = bounds[0].as_py(), bounds[-1].as_py()
    items = headers.values.slice(first, last - first)  # only the items of this slice
    names, values = (_lengths(pc.struct_field(items, name)) for name in ("key", "value"))
    sums = pc.cumulative_sum(pc.add(pc.add(names, values), PAIR_BYTES))
    sums = pa.concat_arrays([pa.array([0], pa.int64()), sums])
    bounds = pc.subtract(bounds, first)
    sizes = pc.subtract(sums.take(bounds.slice(1)), sums.take(bounds.slice(0, len(headers))))
    # A row without headers may still span items, which belong to no row.
    return pc.if_else(headers.is_valid(), sizes, 0)


def _read_column(table: pa.Table, name: str, wanted: pa.DataType) -> pa.ChunkedArray:
    if name not in table.column_names:
        nulls = no_headers(table.num_rows) if wanted == HEADERS_TYPE else pa.nulls(table.num_rows, wanted)
        return pa.chunked_array([nulls])
    column = table.column(name)
    given = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    _check_type(name, given, wanted)
    try:
        if wanted == pa.binary():
            return pa.chunked_array([part for chunk in column.chunks for part in _narrowed(chunk)], wanted)
        if given != column.type:
            column = column.cast(given)
        # Times are cut to microseconds; no other conversion may lose anything.
        return column.cast(options=pc.CastOptions(wanted, allow_time_truncate=True))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InvalidRecord(f"the column {name} is {given} and cannot be converted to {wanted}: {error}") from error


def _check_type(name: str, given: pa.DataType, wanted: pa.DataType) -> None:
    """Raise InvalidRecord for types that a cast would accept but change, or lose a part of."""
    if wanted == pa.binary() and not _is_text(given):
        raise InvalidRecord(f"the column {name} is {given}; it must be binary or string")
    if name == "partition" and not (pa.types.is_integer(given) or pa.types.is_null(given)):
        raise InvalidRecord(f"the column partition is {given}; it must have whole numbers")
    if name == "timestamp" and pa.types.is_timestamp(given) and given.tz is None:
        raise InvalidRecord("the column timestamp has no time zone; give one, such as UTC")
    if name == "headers":
        _check_header_type(given)


def _check_header_type(given: pa.DataType) -> None:
    if pa.types.is_map(given):
        kinds = [given.key_type, given.item_type]
    else:
        item = getattr(given, "value_type", given)
        if not pa.types.is_struct(item):
            return  # nothing but nulls and empty lists can be cast
        if sorted(field.name for field in item) != ["key", "value"]:
            raise InvalidRecord(
                f"the column headers is {given}; its items must have the fields key and value, and no others"
            )
        kinds = [field.type for field in item]
    if not all(_is_text(kind.value_type if pa.types.is_dictionary(kind) else kind) for kind in kinds):
        raise InvalidRecord(f"the column headers is {given}; its keys must be string, its values binary or string")


def _narrowed(chunk: pa.Array) -> Iterator[pa.Array]:
    """Text of any type as binary arrays, each with no more bytes than such an array may have; without a copy."""
    if pa.types.is_null(chunk.type) or pa.types.is_string(chunk.type) or pa.types.is_binary(chunk.type):
        yield chunk.cast(pa.binary())
        return
    wide = chunk.cast(pa.large_binary())
    if not len(wide):
        return
    _, bounds, data = wide.buffers()
    offsets = pa.Array.from_buffers(pa.int64(), len(wide) + 1, [None, bounds], offset=wide.offset)
    if offsets[-1].as_py() <= _OFFSET_MAX:
        yield wide.cast(pa.binary())
        return
    # A cast refuses also a small slice that lies behind the first 2 GiB, so offsets are counted anew in each part.
    view = _int64_view(offsets)
    start = 0
    while start < len(wide):
        end = max(start + 1, bisect_right(view, view[start] + PART_BYTES_MAX, start + 1) - 1)
        begin = view[start]
        valid = wide.slice(start, end - start).is_valid()
        # The bits of the nulls are shared, and may begin within a byte: so the offsets begin as much later.
        shifted = pc.subtract(offsets.slice(start, end - start + 1), begin).cast(pa.int32())
        shifted = pa.concat_arrays([pa.array([0] * valid.offset, pa.int32()), shifted])
        buffers = [valid.buffers()[1], shifted.buffers()[1], data.slice(begin, view[end] - begin)]
        yield pa.Array.from_buffers(pa.binary(), end - start, buffers, offset=valid.offset)
        start = end


def _int64_view(numbers: pa.Array) -> memoryview:
    """A view of the numbers, to read single ones without making an Arrow scalar for each."""
    return memoryview(numbers.buffers()[1]).cast("q")[numbers.offset : numbers.offset + len(numbers)]


def _is_text(given: pa.DataType) -> bool:
    kinds = pa.types
    return bool(
        kinds.is_null(given)
        or kinds.is_string(given)
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
