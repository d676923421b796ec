"""How much memory a task that stages rows keeps."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from pxrs.model import Topic
from pxrs.publishing.staging import routing, rows
from pxrs.publishing.staging.files import NewFile, Staged
from pxrs.publishing.staging.frames import Piece

KIB = 1 << 10


class Nowhere(NewFile):
    def __init__(self) -> None:
        self.rows = 0

    def add(self, piece: Piece) -> None:
        self.rows += piece.payload.rows

    def finish(self) -> Staged:
        return Staged("nowhere", self.rows)

    def discard(self) -> None: ...


@pytest.mark.parametrize("is_sorted", [True, False])
def test_few_rows_that_wait_for_their_piece_do_not_keep_the_tables_that_they_came_in(
    monkeypatch: pytest.MonkeyPatch, is_sorted: bool
) -> None:
    """Of each table nearly all rows are for one partition, which is staged at once. The few others are slices of the
    same memory."""
    monkeypatch.setattr(routing, "BUFFER_BYTES_MAX", 1024 * KIB)
    monkeypatch.setattr(rows, "PIECE_BYTES_MAX", 256 * KIB)
    topic = Topic("t", "0" * 32, 2)
    most, before = 0, pa.total_allocated_bytes()

    def tables() -> Iterator[pa.RecordBatch]:
        nonlocal most
        for _ in range(50):
            values = pa.array([b"v" * KIB] * 250)
            numbers = [0] * 249 + [1] if is_sorted else [1] + [0] * 249
            yield pa.record_batch({"value": values, "partition": pa.array(numbers, pa.int32())})
            del values
            most = max(most, pa.total_allocated_bytes() - before)

    ((_, staged),) = routing.stage_rows(lambda topic: Nowhere(), lambda table: [(topic, table)], 0, tables())
    assert staged.rows == 12_500
    assert most < 4 * 1024 * KIB
