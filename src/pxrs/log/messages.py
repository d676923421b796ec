"""The records of a batch as messages, one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import repeat
from typing import Any, Final

import pyarrow as pa

from pxrs.log.batch import Batch
from pxrs.model import Message

# What `Message._make` does, without a call of Python code for each.
_new_message: Final[Callable[[Any], Message]] = partial(tuple.__new__, Message)


def messages_of(batch: Batch, topic: str, partition: int, epoch: int = 0) -> Iterator[Message]:
    """The messages of a batch, made as they are asked for."""
    records = batch.records
    keys, values = records.column("key").to_pylist(), records.column("value").to_pylist()
    times = records.column("timestamp").cast(pa.int64()).to_pylist()
    headers: list[list[tuple[str, bytes]] | None] = [None] * len(times)
    column = records.column("headers")
    if column.null_count != len(times):
        headers = [
            None if each is None else [(pair["key"], pair["value"]) for pair in each] for each in column.to_pylist()
        ]
    offsets: Iterable[int] = range(batch.base_offset, batch.next_offset)
    if batch.offsets is not None:
        offsets = batch.offsets.to_pylist()
    rows = zip(repeat(topic), repeat(partition), offsets, keys, values, times, headers, repeat(epoch), strict=False)
    return map(_new_message, rows)
