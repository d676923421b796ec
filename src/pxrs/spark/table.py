"""Reading a registered source, a table in a SQL database, as a batch of Spark.

The driver plans one range of ids for each task, up to the end of what is final at that moment: no row with a smaller id
can be committed any more, so rows that are inserted later are not read. The table is read once for all its virtual
partitions: a task reads its range of ids, a page at a time, and computes the partition of each row from its key.

A task opens the database itself. It is given the registered settings, which hold no credentials. It takes the address
from the option `sourceUrl` if the user gave that, which is sent to the tasks of this table and nowhere else; otherwise
from the environment of its own process, as every process does (`pxrs.sources.catalog`).

Rows that are updated or deleted while the job runs are read as they are when their page is read. If the table was
emptied since the planning and its ids begin again, the task raises OffsetOutOfRange, as long as the new ids are below
the planned end.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from pxrs.clock import boot_id
from pxrs.errors import CheckpointOutOfRange, ReadFailed
from pxrs.group.foreign import changed, check_meaning, foreign_of, former_reads
from pxrs.group.records import Checkpoint, Keys, SourceRead, partition_of
from pxrs.hub import Hub
from pxrs.publishing.planning import IdRange, Range, split_ids
from pxrs.publishing.selection import resolve
from pxrs.spark.columns import BATCH_ROWS, arrow_schema
from pxrs.spark.given import TOPIC
from pxrs.spark.options import ReadOptions

if TYPE_CHECKING:
    from pxrs.sources.catalog import RegisteredSource
    from pxrs.sources.sql_table import SqlTable
    from pxrs.sources.sql_table.pages import Stretch


@dataclass(frozen=True)
class TableSlice(InputPartition):  # type: ignore[misc]
    """The input of one task: a range of ids, and all that is needed to read it."""

    record: RegisteredSource
    machine: str
    ids: IdRange
    starts: tuple[int, ...]
    """By partition, the first id of the range: rows with smaller ids are left out."""
    ends: tuple[int, ...]
    """By partition, the end of the range: rows with this id or a larger one are left out."""
    columns: tuple[str, ...]
    address: str | None = field(default=None, repr=False)
    """The option `sourceUrl`, which may hold a password: neither shown nor logged."""


def table_slices(hub: Hub, record: RegisteredSource, options: ReadOptions) -> list[TableSlice]:
    """The tasks of a batch. Raises InvalidOption, what opening the table raises, and ReadFailed if a transaction that
    writes to the table stays open, because it is then not known which rows are final."""
    with _open(record, options.source_url) as table:
        # Read once for all partitions: a second call could return another end.
        first, end = table.bounds((0,))[0]
        extents = dict.fromkeys(range(table.partitions), (first, end))

        @functools.cache
        def id_since(time_us: int) -> int:
            return min(end, table.offset_at(0, time_us))

        def id_at(number: int, time_us: int) -> int:
            return id_since(time_us)  # the same for all partitions, because they share their ids

        if options.starting.word == "committed":
            starts = _committed(hub, table, options.group or "", first)
        else:
            # A start beyond the end is allowed if the table has given out that id and the rows were deleted since: a
            # job that goes on where its last run ended then reads nothing.
            starts = resolve(
                options.starting, table.name, extents, id_at, lambda offset: table.was_given_out(0, offset)
            )
        ends = resolve(options.ending, table.name, extents, id_at)
    # A start may be smaller than the first id: unlike in a topic, ids without a row do not mean that rows were lost.
    ranges = [Range(number, max(starts[number], first), ends[number]) for number in sorted(starts)]
    lows, highs = tuple(each.start for each in ranges), tuple(each.end for each in ranges)
    machine = boot_id()
    return [
        TableSlice(record, machine, ids, lows, highs, options.columns, options.source_url)
        for ids in split_ids(ranges, options.partitions_min)
    ]


def read_table(part: TableSlice) -> Iterator[pa.RecordBatch]:
    """The rows of a task, in the order of their ids."""
    schema = arrow_schema(part.columns)
    with _open(part.record, part.address) as table:
        for page in table.scan(*part.ids, final_end=max(part.ends)):
            page = _within(page, part)
            for at in range(0, len(page.offsets), BATCH_ROWS):
                arrays = [_column(page, name, part.record.name).slice(at, BATCH_ROWS) for name in part.columns]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _open(record: RegisteredSource, address: str | None) -> SqlTable:
    from pxrs.sources.catalog import open_record

    try:
        return open_record(record, address, "the option sourceUrl")
    except ReadFailed as error:
        if address is not None or os.environ.get(record.variable):
            raise
        raise ReadFailed(
            f"{error}. Spark's processes see the environment variables that were set when Spark was started; the whole "
            "address can also be given as the option sourceUrl"
        ) from None


def _committed(hub: Hub, table: SqlTable, group: str, first: int) -> dict[int, int]:
    """The checkpoint of the group, by partition; the first id if it has none. Raises CheckpointOutOfRange, and, as for
    a member of the group, IdentityChanged or SourceChanged, because rows would otherwise be read twice or left out."""
    keys, registry = Keys(group), hub.registry
    found = {
        partition_of(entry.key)[1]: Checkpoint.load(entry.key, entry.value)
        for entry in registry.scan(f"{keys.checkpoints}{table.id}/")
    }
    known = {entry.key: SourceRead.load(entry.key, entry.value) for entry in registry.scan(keys.sources)}
    ours = foreign_of(keys, table)
    assert ours is not None
    check_meaning(group, ours, known.values(), found)
    for former in former_reads(ours, known, bool(found)):
        if registry.scan(f"{keys.checkpoints}{former.id}/", limit=1):
            raise changed(group, ours, former)
    for number, checkpoint in sorted(found.items()):
        if not table.was_given_out(number, checkpoint.offset):
            raise CheckpointOutOfRange(
                f"group {group} is at offset {checkpoint.offset} of {table.name}/{number}, an id that the table has "
                "not assigned yet: its ids restarted, or it is an older copy than the checkpoint. If it is the right "
                "table, reset the group"
            )
    return {number: found[number].offset if number in found else first for number in range(table.partitions)}


def _within(page: Stretch, part: TableSlice) -> Stretch:
    """The rows of a page that are within the bounds of their partitions."""
    if max(part.starts) <= part.ids.start and min(part.ends) >= part.ids.end:
        return page
    # Imported here because the process that plans a stream loads this module and does not need `pyarrow.compute`.
    import pyarrow.compute as pc

    starts = pc.take(pa.array(part.starts, pa.int64()), page.partitions)
    ends = pc.take(pa.array(part.ends, pa.int64()), page.partitions)
    is_within = pc.and_(pc.greater_equal(page.offsets, starts), pc.less(page.offsets, ends))
    return page._replace(
        partitions=page.partitions.filter(is_within),
        offsets=page.offsets.filter(is_within),
        records=page.records.filter(is_within),
    )


def _column(page: Stretch, name: str, topic: str) -> pa.Array:
    if name == TOPIC:
        return pa.repeat(pa.scalar(topic, pa.string()), len(page.offsets))
    if name == "partition":
        return page.partitions
    return page.offsets if name == "offset" else page.records.column(name)
