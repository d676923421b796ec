"""A staged file as a task writes it: part of the contract of a staging place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import pyarrow as pa

from pxrs.model import Topic
from pxrs.publishing.staging.frames import Piece

_ROUTED: Final = "routed-"


def routed_writer(query: str) -> str:
    """The name under which a query stages and appends rows that name their topics. Rows that the same query writes to
    one topic of the option `topic` have the query's own id: a batch may write in both ways to one topic, also at the
    same time, and the files and origins of the two must not be taken for each other."""
    return _ROUTED + query


def query_of_writer(writer: str) -> str:
    """The query that stages and appends under this name."""
    return writer.removeprefix(_ROUTED)


class Staged(NamedTuple):
    """What one attempt of a task has staged."""

    name: str | None
    """The name of the file; None if the task had no rows."""
    rows: int


class NewFile(ABC):
    """A staged file that a task is writing. Nobody else knows its name before `finish` has returned."""

    @abstractmethod
    def add(self, piece: Piece) -> None:
        """Write one piece. The driver gets the pieces of a file in this order."""

    @abstractmethod
    def finish(self) -> Staged:
        """Make the content of the file survive a power loss. `Staging.make_durable` does the same for its name."""

    @abstractmethod
    def discard(self) -> None:
        """Close and remove the file, finished or not."""


Route = Callable[[pa.RecordBatch], Iterable[tuple[Topic, pa.RecordBatch]]]
"""Splits rows by topic: see `pxrs.publishing.staging.routing`."""
