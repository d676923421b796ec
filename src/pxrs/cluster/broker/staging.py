"""Staging in a cluster: stores rows of Spark's tasks in ledgers on storage nodes (K1, K5).

All state is in the registry and on storage nodes (`pxrs.cluster.staged`), none in a broker. So any broker can read,
publish or remove what was staged through another one. If a broker fails while it receives a file, the file is never
finished and no manifest names it; `sweep` removes it.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Final

from pxrs.cluster import records, staged
from pxrs.cluster.broker.context import Broker
from pxrs.cluster.broker.staged_files import LedgerFile, closed_ledger, read_file
from pxrs.cluster.records import TopicRecord
from pxrs.cluster.staged import KeptTopic, StagedFile, StagedName, StoredFeed
from pxrs.errors import AppendUnknown, Conflict, PxrsError, TopicDeleted
from pxrs.log.contract import TopicLog
from pxrs.model import Topic
from pxrs.publishing.feed import Feed
from pxrs.publishing.staging.appends import append_pieces
from pxrs.publishing.staging.contract import StagingStore
from pxrs.publishing.staging.files import query_of_writer
from pxrs.publishing.staging.frames import Piece
from pxrs.registry.contract import ABSENT, Entry

_logger = logging.getLogger(__name__)

ORPHAN_S: Final = 86_400.0
"""The age at which `sweep` removes a batch of staged files that no manifest needs."""
OLD_FEED_S: Final = 30 * 86_400.0
"""The age at which `sweep` removes a feed; see `publishing/staging/directory.py`."""
APPEND_BYTES_MAX: Final = 32 << 20
"""How many bytes of pieces are in memory while a batch is published."""
PUBLISH_S: Final = 60.0
"""For how long `publish` repeats an append whose outcome is unknown."""
PAUSE_S: Final = 0.1
"""How long `publish` waits before it repeats an append."""
DELETED_AT_ONCE: Final = 50
"""Maximum number of keys that one commit removes. It is even, so that a file and its ledger are removed together."""


class ClusterStaging(StagingStore):
    """Threads share it."""

    # Over the limit: the whole contract, which tasks, drivers, servers and upkeep use in part.

    def __init__(self, broker: Broker) -> None:
        self._broker, self._registry = broker, broker.registry

    def check_writable(self) -> None:
        """A broker can always stage. Too few storage nodes are reported when a file is begun, because nodes may come
        back."""

    # Feeds.

    def announce(self, query: str, batch: int, run: str, feed: Feed) -> None:
        key = staged.feed_key(query, batch, run, feed)
        if self._registry.get(key) is None:
            self._registry.commit(put={key: StoredFeed(run, feed.dump(), time.time()).dump()})
            self._clear_feeds(query, batch)

    def feeds(self, query: str, batch: int, run: str) -> list[Feed]:
        found = [
            StoredFeed.parse(entry.key, entry.value)
            for entry in self._registry.scan(f"{staged.FEEDS}{query}/")
            if staged.batch_of_feed(entry.key) == batch
        ]
        return [Feed.load(each.feed) for each in found if each.run == run]

    def _clear_feeds(self, query: str, before: int) -> None:
        entries = self._registry.scan(f"{staged.FEEDS}{query}/")
        self._delete(entry.key for entry in entries if staged.batch_of_feed(entry.key) < before)

    # Staged rows.

    def create(self, topic: Topic, query: str, batch: int, task: int) -> LedgerFile:
        name = StagedName(topic.id, query, batch, f"{task:05d}-{uuid.uuid4().hex}")
        return LedgerFile(self._broker, self._record(topic), name, time.time())

    def _record(self, topic: Topic) -> TopicRecord:
        entry = self._registry.get(records.topic_key(topic.name))
        record = None if entry is None else TopicRecord.parse(entry.key, entry.value)
        if record is None or record.topic.id != topic.id:
            raise TopicDeleted(topic.name, topic.id, is_made_again=record is not None)
        return record

    def pieces(self, topic: Topic, query: str, batch: int, files: Iterable[str]) -> Iterator[Piece]:
        for file in files:
            yield from read_file(self._broker, StagedName(topic.id, query, batch, file))

    def publish(self, topic: TopicLog, query: str, batch: int, files: Sequence[str], ends: Sequence[int]) -> None:
        """Append all pieces of the files to the topic. If the owner of a partition fails in between, it is not known
        which pieces are stored, and all of them are appended again; those that are stored are recognised as
        duplicates."""
        until = time.monotonic() + PUBLISH_S
        while True:
            pieces = self.pieces(topic.topic, query, batch, files)
            try:
                append_pieces(topic, query, batch, pieces, ends, APPEND_BYTES_MAX)
                return
            except AppendUnknown as error:
                if time.monotonic() > until:
                    raise
                _logger.info("retrying the append of batch %d of query %s to %s: %s", batch, query, topic.name, error)
                time.sleep(PAUSE_S)

    def make_durable(self, topic: str, query: str, batch: int, files: Sequence[str]) -> bool:
        """Whether all files are finished: the entries of a closed ledger are synced on at least `ack_quorum` nodes."""
        return all(closed_ledger(self._broker, StagedName(topic, query, batch, file)) is not None for file in files)

    # Removing.

    def remove(self, topic: str, query: str, batch: int, file: str) -> None:
        entry = self._registry.get(StagedName(topic, query, batch, file).key)
        self._remove([] if entry is None else [entry])

    def clear(self, topic: str, query: str, batch: int) -> None:
        entries = self._registry.scan(staged.query_prefix(topic, query))
        self._remove(entry for entry in entries if StagedName.of_key(entry.key).batch <= batch)
        self._clear_feeds(query_of_writer(query), batch + 1)

    def forget_query(self, topic: str, query: str) -> None:
        """Nothing to do: no state is kept between the batches of a query."""

    def sweep(self, topic: str, needed: Mapping[str, int | None], now: float | None = None) -> None:
        now = time.time() if now is None else now
        entries = self._registry.scan(staged.topic_prefix(topic))
        for (query, batch), group in groupby(entries, _batch_of):
            files = list(group)
            is_needed = query in needed and needed[query] in (None, batch)
            if not is_needed and max(_begun_at(entry) for entry in files) < now - ORPHAN_S:
                self._remove(files)
        for _, feeds in groupby(self._registry.scan(staged.FEEDS), lambda entry: entry.key.rpartition("/")[0]):
            found = [(entry.key, StoredFeed.parse(entry.key, entry.value).at) for entry in feeds]
            if max(at for _, at in found) < now - OLD_FEED_S:
                self._delete(key for key, _ in found)

    def _remove(self, files: Iterable[Entry]) -> None:
        """Remove the records of files, each in one commit with the record of its ledger."""
        pairs = ((entry.key, StagedFile.parse(entry.key, entry.value).ledger_key) for entry in files)
        self._delete(key for pair in pairs for key in pair)

    def _delete(self, keys: Iterable[str]) -> None:
        # DELETED_AT_ONCE is even, so that a file and its ledger are removed in the same commit.
        left = iter(keys)
        while some := list(islice(left, DELETED_AT_ONCE)):
            self._registry.commit(delete=some)

    # Topics.

    def keep_topic(self, topic: str) -> None:
        key = staged.kept_key(topic)
        try:
            with contextlib.suppress(Conflict):  # the key exists
                self._registry.commit({key: ABSENT}, {key: KeptTopic(time.time()).dump()})
        except PxrsError as error:
            _logger.warning("files staged for topic %s may be left behind when the topic is deleted: %s", topic, error)

    def topics(self) -> list[str]:
        kept = {entry.key.removeprefix(staged.KEPT) for entry in self._registry.scan(staged.KEPT)}
        # A file may have been begun while `forget_topic` ran, which then removed only the key of the topic.
        return sorted(kept | {StagedName.of_key(entry.key).topic for entry in self._registry.scan(staged.STAGED)})

    def changed_at(self, topic: str) -> float:
        times = [_begun_at(entry) for entry in self._registry.scan(staged.topic_prefix(topic))]
        entry = self._registry.get(staged.kept_key(topic))
        if entry is not None:
            times.append(KeptTopic.parse(entry.key, entry.value).at)
        return max(times, default=0.0)

    def forget_topic(self, topic: str) -> None:
        self._remove(self._registry.scan(staged.topic_prefix(topic)))
        self._registry.commit(delete=[staged.kept_key(topic)])


def _batch_of(entry: Entry) -> tuple[str, int]:
    name = StagedName.of_key(entry.key)
    return name.query, name.batch


def _begun_at(entry: Entry) -> float:
    return StagedFile.parse(entry.key, entry.value).begun_at
