"""Staging the rows of one task: for one topic, or for the topics that the rows name.

A task has one staged file for each topic that it has rows for, and makes it at the first such row. Rows wait
in memory until they make a whole piece; BUFFER_BYTES_MAX bounds them, for all topics together. They are slices of the
tables that they came in, and keep these tables in memory. When the tables exceed three times BUFFER_BYTES_MAX, rows
that wait are copied, so that the tables can be freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import pyarrow as pa

from pxrs.errors import InvalidRecord
from pxrs.model import Topic
from pxrs.publishing.staging.files import NewFile, Route, Staged
from pxrs.publishing.staging.rows import Cutter

TOPIC: Final = "topic"
"""The column that names the topic of a row."""
BUFFER_BYTES_MAX: Final = 64 << 20
"""How many bytes of incomplete pieces a task keeps in memory."""
TOPICS_MAX: Final = 256
"""How many topics the rows of one task may name: each has an open file."""

Create = Callable[[Topic], NewFile]


def stage_rows(create: Create, route: Route, turn: int, tables: Iterable[pa.RecordBatch]) -> list[tuple[Topic, Staged]]:
    """Stage the rows of a task. Returns each topic that has rows, and what was staged for it. After an error, all files
    of the task are removed.

    create: makes a new staged file for a topic.
    turn:   as for `Cutter`."""
    files: dict[str, tuple[Cutter, NewFile]] = {}
    try:
        for table in tables:
            for topic, rows in route(table) if table.num_rows else ():
                if topic.id not in files:
                    if len(files) == TOPICS_MAX:
                        raise InvalidRecord(
                            f"the rows of one task name more than {TOPICS_MAX} topics, and each topic needs an open "
                            "file. Use repartition('topic'), so that each task has rows of fewer topics"
                        )
                    files[topic.id] = Cutter(topic, turn), create(topic)
                cutter, file = files[topic.id]
                for piece in cutter.add(rows):
                    file.add(piece)
            while sum(cutter.size for cutter, _ in files.values()) > BUFFER_BYTES_MAX:
                cutter, file = max(files.values(), key=lambda each: each[0].size)
                file.add(cutter.largest())
            while sum(cutter.held for cutter, _ in files.values()) > 3 * BUFFER_BYTES_MAX:
                max((cutter for cutter, _ in files.values()), key=lambda each: each.held - each.size).copy_waiting()
        for cutter, file in files.values():
            for piece in cutter.rest():
                file.add(piece)
        return [(cutter.topic, file.finish()) for cutter, file in files.values()]
    except BaseException:
        for _, file in files.values():
            file.discard()
        raise


def by_column(find: Callable[[str], Topic]) -> Route:
    """Routes each row to the topic that its column `topic` names.

    find: the topic of a name. It raises UnknownTopic."""
    known: dict[str, Topic] = {}

    def route(table: pa.RecordBatch) -> Iterator[tuple[Topic, pa.RecordBatch]]:
        import pyarrow.compute as pc

        names = table.column(TOPIC)
        if names.null_count:
            raise InvalidRecord("a row has null in the column topic: give each row the name of a topic")
        encoded = names if pa.types.is_dictionary(names.type) else names.dictionary_encode()
        distinct = encoded.dictionary.to_pylist()
        for name in distinct:  # all topics of the table are found before one of its rows is staged
            if name not in known:
                known[name] = find(name)
        rows = table.select([column for column in table.schema.names if column != TOPIC])
        if len(distinct) == 1:
            yield known[distinct[0]], rows
            return
        for number, name in enumerate(distinct):
            yield known[name], rows.filter(pc.equal(encoded.indices, number))

    return route
