"""The suite of sources, over the logs and over a table."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pxrs.log.contract import Append, Log, TopicLog
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.joined import JoinedSource
from pxrs.log.memory import MemoryLog
from pxrs.log.outcomes import offsets_of
from pxrs.sources import SqlTable, sql_table
from pxrs.testing.log_contract import new_topic, records
from pxrs.testing.source_contract import Feed, SourceContract, message_offsets

pytestmark = pytest.mark.sampled(4, of="module")
PARTITIONS = 3


class LogFeed(Feed):
    """Every message a batch of its own, to the partitions in turn."""

    source: TopicLog

    def __init__(self, log: Log, reader: Log | None = None, name: str = "orders") -> None:
        """reader: another handle of the same log, as another process has it."""
        self._log = reader or log
        # Small segments, since retention removes whole ones.
        self._writer = log.create_topic(new_topic(name, PARTITIONS, segment_bytes=4096))
        self.source = self._log.topic(name)
        self._count = 0

    def put(self, values: Sequence[bytes]) -> list[tuple[int, int]]:
        stored = []
        for value in values:
            partition = self._count % PARTITIONS
            self._count += 1
            padded = records([value], headers=[[("padding", b"-" * 4096)]])
            stored.append((partition, offsets_of(self._writer.append([Append.encoded(partition, padded)]))[0]))
        return stored

    def trim(self, partition: int, offset: int) -> None:
        assert self._writer.trim({partition: offset}) == {partition: offset}

    def close(self) -> None:
        self._log.close()


class TestMemory(SourceContract):
    @pytest.fixture
    def feed(self) -> Iterator[Feed]:
        log = MemoryLog()
        yield LogFeed(log)
        log.close()


class TestDirectory(SourceContract):
    @pytest.fixture
    def feed(self, tmp_path: Path) -> Iterator[Feed]:
        log = DirectoryLog(tmp_path)
        yield LogFeed(log)
        log.close()


class TestDirectoryThroughAnotherHandle(SourceContract):
    @pytest.fixture
    def feed(self, tmp_path: Path) -> Iterator[Feed]:
        log, reader = DirectoryLog(tmp_path), DirectoryLog(tmp_path)
        yield LogFeed(log, reader)
        reader.close()
        log.close()


class TableFeed(Feed):
    source: SqlTable

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute(
            "CREATE TABLE orders "
            "(id INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB, at DATETIME DEFAULT CURRENT_TIMESTAMP)"
        )
        url = f"sqlite:///{path}"
        self.source = sql_table(
            url, "orders", value_column="body", timestamp_column="at", partitions=PARTITIONS, poll_s=0.02
        )

    def put(self, values: Sequence[bytes]) -> list[tuple[int, int]]:
        ids = [self._database.execute("INSERT INTO orders (body) VALUES (?)", (value,)).lastrowid for value in values]
        return [(self._partition_of(each), each) for each in ids if each is not None]

    def _partition_of(self, id: int) -> int:
        with sql_table(
            self.source.url.render_as_string(False), "orders", value_column="body", partitions=PARTITIONS
        ) as table:
            for partition in range(PARTITIONS):
                if any(id in message_offsets(batch) for batch in table.read(partition, id, 1)):
                    return partition
        raise AssertionError(f"row {id} is in no partition")

    def trim(self, partition: int, offset: int) -> None:
        stored = [(self._partition_of(each), each) for (each,) in self._database.execute("SELECT id FROM orders")]
        gone = [each for number, each in stored if number == partition and each < offset]
        self._database.executemany("DELETE FROM orders WHERE id = ?", [(each,) for each in gone])

    def close(self) -> None:
        self.source.close()

    def end(self) -> None:
        self.source.close()
        self._database.close()


class TestTable(SourceContract):
    @pytest.fixture
    def feed(self, tmp_path: Path) -> Iterator[Feed]:
        feed = TableFeed(tmp_path / "shop.db")
        yield feed
        feed.end()


class JoinedFeed(Feed):
    """Several sources as one: messages go to the parts in turn."""

    def __init__(self, *feeds: Feed) -> None:
        self._feeds = feeds
        self.source: JoinedSource = JoinedSource([feed.source for feed in feeds])
        self._count = 0

    def put(self, values: Sequence[bytes]) -> list[tuple[int, int]]:
        stored = []
        for value in values:
            feed = self._feeds[self._count % len(self._feeds)]
            self._count += 1
            ((partition, offset),) = feed.put([value])
            stored.append((self.source.number_of(feed.source.id, partition), offset))
        return stored

    def trim(self, partition: int, offset: int) -> None:
        part, number = self.source.place(partition)
        (feed,) = (feed for feed in self._feeds if feed.source is part)
        feed.trim(number, offset)

    def close(self) -> None:
        for feed in self._feeds:
            feed.close()


class TestTopicsOfAMemoryLogJoined(SourceContract):
    @pytest.fixture
    def feed(self) -> Iterator[Feed]:
        log = MemoryLog()
        yield JoinedFeed(LogFeed(log), LogFeed(log, name="returns"))
        log.close()


class TestTopicsOfADirectoryJoined(SourceContract):
    @pytest.fixture
    def feed(self, tmp_path: Path) -> Iterator[Feed]:
        log = DirectoryLog(tmp_path)
        yield JoinedFeed(LogFeed(log), LogFeed(log, name="returns"), LogFeed(log, name="refunds"))
        log.close()


class TestATopicAndATableJoined(SourceContract):
    @pytest.fixture
    def feed(self, tmp_path: Path) -> Iterator[Feed]:
        log, table = MemoryLog(), TableFeed(tmp_path / "shop.db")
        yield JoinedFeed(table, LogFeed(log, name="returns"))
        table.end()
        log.close()


def spool_feed() -> Any:
    """The class `SpoolFeed` as docs/writing-a-source.md prints it."""
    text = (Path(__file__).parents[2] / "docs" / "writing-a-source.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "spool"}
    exec(code[: code.index("\nfeed = SpoolFeed")], names)
    return names["SpoolFeed"]


class TestTheSourceOfTheGuide(SourceContract):
    @pytest.fixture
    def feed(self, tmp_path: Path) -> Iterator[Feed]:
        feed: Feed = spool_feed()(tmp_path / "faxes")
        yield feed
        feed.close()
