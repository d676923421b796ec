"""Files of a log in the wrong place, as a mistake in a restore leaves them: an error before anything is cut, or made
anew where the segments tell the truth (L2). Each test mixes up the files of two partitions, or of two moments."""

from __future__ import annotations

import logging
import os
import shutil
import struct
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from pxrs.errors import DamagedFrame, MisplacedFile
from pxrs.log.batch import Origin
from pxrs.log.contract import Append
from pxrs.log.directory.check import check
from pxrs.log.directory.topic import DirectoryTopic
from pxrs.log.outcomes import offsets_of
from pxrs.model import Topic
from pxrs.testing.log_contract import records
from tests.acceptance import directory_topics
from tests.acceptance.directory_topics import log_in

GOLDEN = Path(__file__).parents[1] / "golden" / "log-format-1" / "log"
COUNTS = {0: 100, 1: 50}


def new_topic(path: Path, name: str = "t", **options: Any) -> DirectoryTopic:
    """Partition 0 has 100 messages, partition 1 has 50, all of the same size, each an append of a producer."""
    topic = directory_topics.new_topic(log_in(path), name, 3, **options)
    for partition, count in COUNTS.items():
        for number in range(count):
            offsets_of(topic.append([append(partition, number)]))
    return topic


def append(partition: int, number: int) -> Append:
    value = b"%d-%03d" % (partition, number) + b"x" * 300
    return Append.encoded(partition, records([value], [number]), Origin(uuid.UUID(int=partition + 1), 0, number))


def opened(path: Path, name: str = "t") -> DirectoryTopic:
    return directory_topics.opened(log_in(path), name=name)


def read(topic: DirectoryTopic, partition: int) -> list[bytes]:
    found: list[bytes] = []
    offset = topic.start(partition)
    while batches := topic.read(partition, offset):
        for batch in batches:
            assert batch.base_offset == offset
            found += [value.rstrip(b"x") for value in batch.records.column("value").to_pylist()]
            offset = batch.next_offset
    return found


def sent(partition: int, count: int | None = None) -> list[bytes]:
    return [b"%d-%03d" % (partition, number) for number in range(COUNTS[partition] if count is None else count)]


def folder(topic: DirectoryTopic, partition: int) -> Path:
    return Path(topic.partition_folder(partition))


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def logs(where: Path) -> list[Path]:
    return sorted(where.glob("*.log"))


def sizes(topic: DirectoryTopic) -> dict[str, int]:
    """Of the segments that are not empty."""
    found = {str(path): path.stat().st_size for number in (0, 1, 2) for path in logs(folder(topic, number))}
    return {path: size for path, size in found.items() if size}


def findings(path: Path) -> list[tuple[str, str]]:
    return [(Path(each.file).name, each.what) for checked in check(path) for each in checked.findings]


def is_refused(act: Callable[[], object]) -> None:
    with pytest.raises(MisplacedFile, match="another topic or partition"):
        act()


@pytest.fixture(params=[False, True], ids=["same boot", "another boot"])
def maybe_boot(request: pytest.FixtureRequest, boot: Callable[[], None]) -> Callable[[], None]:
    return boot if request.param else lambda: None


def test_l2_a_published_end_of_another_partition_cuts_nothing(tmp_path: Path, maybe_boot: Callable[[], None]) -> None:
    topic = new_topic(tmp_path)
    before = sizes(topic)
    swap(folder(topic, 0) / "published", folder(topic, 1) / "published")
    maybe_boot()
    late = opened(tmp_path)
    for number in (0, 1):
        is_refused(lambda number=number: offsets_of(late.append([append(number, COUNTS[number])])))  # type: ignore[misc]
        is_refused(lambda number=number: late.end(number))  # type: ignore[misc]
    assert sizes(topic) == before
    assert [name for name, what in findings(tmp_path) if "another topic or partition" in what] == ["published"] * 2
    swap(folder(topic, 0) / "published", folder(topic, 1) / "published")
    late = opened(tmp_path)
    for number in (0, 1):
        assert read(late, number) == sent(number)
        assert offsets_of(late.append([append(number, COUNTS[number])])) == [COUNTS[number]]


@pytest.mark.parametrize("is_sealed", [False, True], ids=["tail", "sealed"])
def test_a_segment_of_another_partition_is_neither_read_nor_cut_nor_removed(
    is_sealed: bool, tmp_path: Path, maybe_boot: Callable[[], None]
) -> None:
    topic = new_topic(tmp_path, retention_bytes=1, segment_bytes=4096 if is_sealed else 1 << 20)
    swap(logs(folder(topic, 0))[0], logs(folder(topic, 1))[0])
    before = sizes(topic)
    maybe_boot()
    late = opened(tmp_path)
    for number in (0, 1):
        is_refused(lambda number=number: late.read(number, 0))  # type: ignore[misc]
        if not is_sealed:
            is_refused(lambda number=number: offsets_of(late.append([append(number, COUNTS[number])])))  # type: ignore[misc]
    if is_sealed:
        is_refused(lambda: late.retain(0))
    assert sizes(topic) == before
    misplaced = [name for name, what in findings(tmp_path) if "another topic or partition" in what]
    assert misplaced == [f"{0:020d}.log"] * 2


@pytest.mark.parametrize("is_opened", [False, True], ids=["never opened", "opened"])
def test_a_segment_that_was_put_into_an_empty_partition_is_not_cut(is_opened: bool, tmp_path: Path) -> None:
    topic = new_topic(tmp_path)
    if is_opened:
        assert topic.end(2) == 0
    segment = folder(topic, 2) / f"{0:020d}.log"
    shutil.copy(logs(folder(topic, 1))[0], segment)
    before = sizes(topic)
    is_refused(lambda: offsets_of(opened(tmp_path).append([append(2, 0)])))
    assert sizes(topic) == before


def test_a_segment_of_the_same_partition_under_another_name_is_not_cut(
    tmp_path: Path, maybe_boot: Callable[[], None]
) -> None:
    topic = new_topic(tmp_path, segment_bytes=4096)
    tail = logs(folder(topic, 0))[-1]
    os.replace(logs(folder(topic, 0))[0], tail)
    before = sizes(topic)
    maybe_boot()
    with pytest.raises(DamagedFrame, match=r"where|its name says"):
        offsets_of(opened(tmp_path).append([append(0, 100)]))
    assert sizes(topic) == before


def as_format_before(index: Path) -> None:
    data = index.read_bytes()
    magic, count, covered, last_time, _, _ = struct.unpack_from("<4sIQqqQ", data)
    assert magic == b"PXI3"
    older = struct.pack("<4sIQq", b"PXI2", count, covered, last_time) + data[40:-8]
    index.write_bytes(older + struct.pack("<Q", xxhash.xxh3_64_intdigest(older)))


@pytest.mark.parametrize("is_named", [True, False], ids=["this format", "the format before"])
def test_an_index_of_another_partition_is_made_again(
    is_named: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topic = log_in(tmp_path).create_topic(Topic("t", uuid.uuid4().hex, 2))
    assert isinstance(topic, DirectoryTopic)
    rows = 700
    for partition in (0, 1):  # several entries, of which only the first agree
        for number in range(rows):
            value = b"%d-%d-" % (partition, number) + b"x" * (300 + 50 * partition)
            offsets_of(topic.append([Append.encoded(partition, records([value], [number]))]))
        topic._partition(partition).seal(1 << 62)
    indexes = [folder(topic, number) / f"{0:020d}.index" for number in (0, 1)]
    if not is_named:
        for index in indexes:
            as_format_before(index)
    assert findings(tmp_path) == []
    before = [index.read_bytes() for index in indexes]
    swap(*indexes)
    assert [name for name, _ in findings(tmp_path)] == [indexes[0].name] * 2
    with caplog.at_level(logging.WARNING):
        late = opened(tmp_path)
        for partition in (0, 1):
            for offset in (0, rows // 2, rows - 1):
                batch = late.read(partition, offset)[0]
                assert batch.base_offset == offset
                assert batch.records.column("value")[0].as_py().startswith(b"%d-%d-" % (partition, offset))
                assert opened(tmp_path).offset_at(partition, offset) == offset
    assert "is rebuilt" in caplog.text
    assert findings(tmp_path) == []
    if is_named:
        assert [index.read_bytes() for index in indexes] == before


def test_l4_a_state_of_producers_of_another_partition_is_found_again_in_the_segments(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic(tmp_path, segment_bytes=4096)
    last = [logs(folder(topic, number))[-1].with_suffix(".producers") for number in (0, 1)]
    swap(*last)
    assert [name for name, _ in findings(tmp_path)] == [path.name for path in last]
    late = opened(tmp_path)
    for number, count in COUNTS.items():
        assert offsets_of(late.append([append(number, count - 1)])) == [count - 1], "a retry is stored once"
        assert offsets_of(late.append([append(number, count)])) == [count]
    assert "rebuilt from the segments" in caplog.text


def test_os_a_reservation_of_another_partition_is_refused_before_anything_is_cut(
    tmp_path: Path, boot: Callable[[], None]
) -> None:
    topic = new_topic(tmp_path, durability="os")
    swap(folder(topic, 0) / "reserved", folder(topic, 1) / "reserved")
    for number in (0, 1):
        with logs(folder(topic, number))[-1].open("ab") as tail:
            tail.write(b"torn")
    before = sizes(topic)
    assert [name for name, what in findings(tmp_path) if "another" in what] == ["reserved"] * 2
    boot()
    for number in (0, 1):
        is_refused(lambda number=number: opened(tmp_path).end(number))  # type: ignore[misc]
    assert sizes(topic) == before


@pytest.mark.parametrize("segment_bytes", [1 << 20, 4096], ids=["one segment", "many segments"])
@pytest.mark.parametrize("at", range(20, 28))
def test_l2_an_older_published_end_of_the_same_partition_cuts_nothing(
    at: int, segment_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that was copied right before or behind a roll: a segment holds seven messages."""
    topic = log_in(tmp_path).create_topic(Topic("t", uuid.uuid4().hex, 1, segment_bytes=segment_bytes))
    assert isinstance(topic, DirectoryTopic)
    published = folder(topic, 0) / "published"
    for number in range(60):
        offsets_of(topic.append([append(0, number)]))
        if number == at:
            older = published.read_bytes()
    published.unlink()
    published.write_bytes(older)
    late = opened(tmp_path)
    assert offsets_of(late.append([append(0, 60)])) == [60]
    assert read(late, 0) == sent(0, 61)
    assert f"offset {at + 1}" in caplog.text
    assert findings(tmp_path) == []


def test_a_description_of_another_topic_is_refused(tmp_path: Path) -> None:
    first, second = new_topic(tmp_path, "a"), new_topic(tmp_path, "b")
    swap(first._folder.path / "topic.json", second._folder.path / "topic.json")
    for name in ("a", "b"):
        with pytest.raises(MisplacedFile, match="describes topic"):
            log_in(tmp_path).topic(name)


def test_l2_format_1_names_no_partition_and_still_nothing_is_cut_by_a_published_end_of_another(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "log", symlinks=True)
    partitions = tmp_path / "log/topics/orders/partitions"
    topic = opened(tmp_path / "log", "orders")
    found = [read(topic, number) for number in (0, 1)]
    for number in (0, 1):  # as version 0.1 wrote it: without the partition
        data = bytearray((partitions / f"partition-{number}/published").read_bytes())
        for at in (0, 64):
            data[at + 33 : at + 40] = bytes(7)
            data[at + 56 : at + 64] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[at : at + 56])))
        (partitions / f"partition-{number}/published").write_bytes(data)
    swap(partitions / "partition-0/published", partitions / "partition-1/published")
    for number in (0, 1):
        try:
            offsets_of(opened(tmp_path / "log", "orders").append([Append.encoded(number, records([b"next"]))]))
        except DamagedFrame:
            pass
        else:
            found[number].append(b"next")
    for number in (0, 1):
        (partitions / f"partition-{number}/published").unlink()
        assert read(opened(tmp_path / "log", "orders"), number) == found[number]
