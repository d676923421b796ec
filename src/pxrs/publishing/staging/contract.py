"""The contract of a staging place, where the rows of unpublished batches are kept.

A staged file is written once, by one attempt of one task, under a name of its own. It counts only if a manifest names
it: attempts that failed, or that lost a race against another attempt, leave files that `clear` or `sweep` removes.

Every method may be called by several processes at once. A file can be removed at any moment once its batch is
published, even while a task that repeats the batch still writes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

from pxrs.log.contract import TopicLog
from pxrs.model import Topic
from pxrs.publishing.feed import Feed
from pxrs.publishing.staging.appends import append_pieces
from pxrs.publishing.staging.files import NewFile, Route, Staged
from pxrs.publishing.staging.frames import Piece


class TaskStaging(ABC):
    """The part that a task uses. An implementation can be pickled, and contains nothing that an executor must not have,
    such as the address of the registry."""

    @abstractmethod
    def announce(self, query: str, batch: int, run: str, feed: Feed) -> None:
        """Store what this batch reads, for `feeds`, and remove what earlier batches of the query have announced.

        run: the id of this start of the query. Every task of the batch calls this, each with the same feed."""

    @abstractmethod
    def create(self, topic: Topic, query: str, batch: int, task: int) -> NewFile:
        """A new file for rows that this attempt of a task stages for the topic."""

    def stage(self, topic: Topic, query: str, batch: int, task: int, tables: Iterable[pa.RecordBatch]) -> Staged:
        """Write a task's rows for one topic. Raises InvalidRecord for rows that the topic's log would refuse.

        If the batch is published meanwhile, the file may be gone when this returns. The name is returned all the same:
        the driver that tries to publish the file then finds that the batch is published, or that the file is gone."""
        found = self.stage_routed(lambda table: [(topic, table)], query, batch, task, tables)
        return found[0][1] if found else Staged(None, 0)

    def stage_routed(
        self, route: Route, query: str, batch: int, task: int, tables: Iterable[pa.RecordBatch]
    ) -> list[tuple[Topic, Staged]]:
        """Write a task's rows into one file for each topic to which `route` sends rows. Returns these topics with their
        files. If this raises, the files are removed.

        query: the id of the query; if the rows name their topics, what `routed_writer` returns for it."""
        from pxrs.publishing.staging.routing import stage_rows  # imported here because only tasks that write need it

        return stage_rows(lambda topic: self.create(topic, query, batch, task), route, task + batch, tables)


class Staging(TaskStaging):
    """Adds what the driver uses. A `topic` of type `str` is a topic's id. For rows that name their topics, `query` is
    what `routed_writer` returns; in the methods for feeds it is always the query's id."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raise LogNotWritable if this process may not stage anything here."""

    @abstractmethod
    def feeds(self, query: str, batch: int, run: str) -> list[Feed]:
        """The feeds that the tasks of this batch have announced in this run, one for each source of the query."""

    @abstractmethod
    def pieces(self, topic: Topic, query: str, batch: int, files: Iterable[str]) -> Iterator[Piece]:
        """The encoded batches of these files, in the order in which they are to be appended. The driver appends them as
        they are. The payloads may be slices of mapped files.

        Raises FileNotFoundError if a file is gone, BatchRefused if a file cannot be read."""

    def publish(self, topic: TopicLog, query: str, batch: int, files: Sequence[str], ends: Sequence[int]) -> None:
        """Append the pieces of these files to the topic, each once, however often this is called (`append_pieces`). All
        of them are durable when this returns. A staging place that is not on this machine appends them where it is.

        ends: the ends of the topic's partitions before anything of the batch was appended; empty if not known.
        Raises what `pieces` raises, and the first error of a piece that is not stored."""
        append_pieces(topic, query, batch, self.pieces(topic.topic, query, batch, files), ends)

    @abstractmethod
    def make_durable(self, topic: str, query: str, batch: int, files: Sequence[str]) -> bool:
        """Make sure that these files survive a power loss. False if one of them is gone.

        Called before a manifest names the files: a manifest whose files are gone could never be finished."""

    @abstractmethod
    def clear(self, topic: str, query: str, batch: int) -> None:
        """Remove what was staged and announced for this batch and for earlier batches of the query. Files of
        rows that name their topics are removed only if `query` is what `routed_writer` returns."""

    @abstractmethod
    def forget_query(self, topic: str, query: str) -> None:
        """Remove what is kept for the next batch of the query. Called for a query that has no next batch and is
        published; without this call, `sweep` removes it later."""

    @abstractmethod
    def sweep(self, topic: str, needed: Mapping[str, int | None], now: float | None = None) -> None:
        """Remove what was staged for the topic a day ago or earlier and is not needed, and feeds that are a month old.

        needed: by query, the batch that its manifest names and that is not published yet. None stands for a manifest
                that cannot be read: nothing of that query is removed.
        now:    when the caller began to read the manifests, in seconds since 1970; by default now. Ages count up to
                that moment, so that what was staged later stays, however long the caller has been stopped since."""

    @abstractmethod
    def keep_topic(self, topic: str) -> None:
        """Make `topics` return this topic from now on, even if nothing is staged for it. A failure is only logged,
        because the batch is published; what remains of the topic after its deletion may then never be removed."""

    @abstractmethod
    def topics(self) -> list[str]:
        """The ids of all topics that something was staged for, whether these topics still exist or not."""

    @abstractmethod
    def changed_at(self, topic: str) -> float:
        """When something was last staged for the topic, in seconds since 1970; 0 if nothing is there."""

    @abstractmethod
    def forget_topic(self, topic: str) -> None:
        """Remove everything that was staged for the topic, and its name from `topics`."""


class StagingStore(Staging):
    """A staging place of this process's own, not one behind a server. A server offers it to its clients."""

    @abstractmethod
    def remove(self, topic: str, query: str, batch: int, file: str) -> None:
        """Remove one staged file, which no manifest names; no error if it is gone."""


class HasStaging(ABC):
    """A log that is in no directory, and has a staging place all the same."""

    @property
    @abstractmethod
    def staging(self) -> StagingStore:
        """The staging place of the log."""
