"""A log on a file system that is really full: a clear error, nothing broken, and work again when there is room (F9).

Each scenario runs in a process of its own, which a mount namespace gives a small file system: this file is its script.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import pxrs
from pxrs.errors import AppendFailed, LogError
from pxrs.log.batch import SCHEMA, Origin
from pxrs.log.contract import Append
from pxrs.log.directory.check import check
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.outcomes import offsets_of
from pxrs.model import Topic
from pxrs.producer.producer import Producer

pytestmark = pytest.mark.sampled(2, of="module")

PAGE = 4096
DONE = "whole"
Sent = dict[tuple[int, int], bytes]
"""Values by their partition and offset."""


def records(*values: bytes) -> pa.RecordBatch:
    rows = len(values)
    columns = [pa.nulls(rows, pa.binary()), pa.array(values, pa.binary())]
    columns += [pa.array([1] * rows, SCHEMA.field(2).type), pa.nulls(rows, SCHEMA.field(3).type)]
    return pa.record_batch(columns, schema=SCHEMA)


def free_pages(path: Path) -> int:
    return os.statvfs(path).f_bavail


def fill(path: Path, leave_pages: int = 0) -> Path:
    """Use the room up, but for some pages; the file that does."""
    ballast = path / "ballast"
    with ballast.open("ab", buffering=0) as file:
        while (free := free_pages(path) - leave_pages) > 0:
            file.write(bytes(free * PAGE))
    return ballast


def in_another_process(*arguments: object) -> str:
    """Run a scenario of this file in a new process on the same file system; what it prints."""
    command = [sys.executable, __file__, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def check_whole(path: Path, acknowledged: Sent, refused: set[bytes]) -> None:
    """All that was acknowledged is at its place, nothing that was refused is there, no gap, no finding."""
    assert [finding for checked in check(path) for finding in checked.findings] == []
    with pxrs.open(path) as hub:
        topic = hub.topic("t")
        stored: Sent = {}
        for partition in range(topic.partitions):
            for expected, message in enumerate(topic.messages(partition)):
                assert message.offset == expected
                assert message.value is not None
                stored[partition, message.offset] = message.value
            assert topic.end(partition) == sum(place[0] == partition for place in stored)
    assert {place: stored.get(place) for place in acknowledged} == acknowledged
    assert len(set(stored.values())) == len(stored), "stored twice"
    assert not refused & set(stored.values()), "refused, and yet there"


def a_producer_meets_a_full_disk(path: Path) -> None:
    ballast = fill(path, leave_pages=250)
    hub = pxrs.open(path)
    topic = hub.create_topic("t", partitions=2, segment_bytes=100_000)
    acknowledged: Sent = {}
    refused: set[bytes] = set()
    names = (f"message {number} ".encode() for number in range(1_000_000))

    def send(producer: Producer, partition: int, size: int = 3_000) -> BaseException | None:
        """Send a few, of which each is in or out; the error, if there is one."""
        sent = [next(names) + bytes(size) for _ in range(4)]
        error: BaseException | None = None
        try:
            receipts = [producer.send(value, partition=partition) for value in sent]
        except AppendFailed as refusal:
            return refusal
        for value, receipt in zip(sent, receipts, strict=True):
            try:
                acknowledged[receipt.result(20)] = value
            except AppendFailed as refusal:
                refused.add(value)
                error = refusal
        return error

    first = hub.producer("t", tries_max=2)
    error = None
    while error is None:
        error = send(first, len(acknowledged) // 4 % 2)
    assert len(acknowledged) > 40, "several segments fit"
    broken = next(partition for partition in (0, 1) if send(first, partition) is not None)
    for _ in range(3):  # a producer whose message was refused says so each time, and so does each new one
        assert send(first, broken, size=40_000) is not None
        with pytest.raises(AppendFailed, match=r"No space left on device.*free disk space"):
            first.flush()
        late = hub.producer("t", tries_max=1)
        late_error = send(late, broken, size=40_000)
        assert isinstance(late_error, AppendFailed)
        assert "free disk space" in str(late_error)
        with pytest.raises(AppendFailed):
            late.flush()
        late.close()
    # Those who read need no room.
    check_whole(path, acknowledged, refused)
    assert in_another_process("count", path) == str(sum(topic.end(p) for p in (0, 1)))
    findings = subprocess.run(
        [sys.executable, "-m", "pxrs.cli", "check", str(path)], capture_output=True, text=True, timeout=60
    )
    assert findings.returncode == 0, findings.stdout
    ballast.unlink()
    assert send(first, broken) is None, "the producer whose messages were refused goes on"
    with hub.producer("t") as again:
        assert [send(again, partition) for partition in (0, 1)] == [None, None]
        end = topic.end(broken)
        assert in_another_process("send", path, broken) == str(end), "another process goes on where this one ended"
        assert topic.wait({broken: end}, 20) == {broken}
        assert [send(again, partition) for partition in (0, 1)] == [None, None]
        again.flush()
    first.close()
    hub.close()
    check_whole(path, acknowledged, refused)


def the_room_ends_at_any_page_of_a_roll(path: Path) -> None:
    """A roll writes an index, the producers' state and a new segment: each may find no room, or too little."""
    refusals = 0
    for pages in range(14):
        log = DirectoryLog(path)
        topic = log.create_topic(Topic("t", uuid.uuid4().hex, 1, segment_bytes=120_000))
        producers = [uuid.uuid4() for _ in range(150)]  # their state takes several pages
        values = [b"%d-%d" % (pages, number) for number in range(len(producers))]
        offsets_of(
            topic.append(
                [Append.encoded(0, records(v), Origin(p, 0, 0)) for v, p in zip(values, producers, strict=True)]
            )
        )
        acknowledged: Sent = {(0, offset): value for offset, value in enumerate(values)}
        refused: set[bytes] = set()
        ballast = fill(path, leave_pages=pages)
        for attempt in range(3):
            new = b"large-%d-%d" % (pages, attempt) + bytes(20_000)
            try:
                (offset,) = offsets_of(topic.append([Append.encoded(0, records(new))]))
                acknowledged[0, offset] = new
            except AppendFailed:
                refused.add(new)
                refusals += 1
        check_whole(path, acknowledged, refused)
        ballast.unlink()
        # A process that opens it now knows what is on disk and nothing else: also who has sent what.
        other = DirectoryLog(path)
        retried = offsets_of(
            other.topic("t").append([Append.encoded(0, records(values[7]), Origin(producers[7], 0, 0))])
        )
        assert retried == [7], f"{pages} pages: a retry is stored once"
        for handle, name in ((other.topic("t"), b"other"), (topic, b"same")):
            for sequence in (1, 2):
                value = b"%d %s %d" % (pages, name, sequence) + bytes(60_000)
                origin = Origin(producers[0 if name == b"other" else 1], 0, sequence)
                acknowledged[0, offsets_of(handle.append([Append.encoded(0, records(value), origin)]))[0]] = value
        check_whole(path, acknowledged, refused)
        log.delete_topic("t")
        log.close()
        other.close()
        assert [name for name in os.listdir(path / "topics") if name.startswith(".")] == []
    assert 3 < refusals < 3 * 14, "some met the end of the room, and some did not"


def a_missing_index_keeps_nobody_from_reading(path: Path) -> None:
    """It is made again when it is needed; to write it down is a convenience, for which there is no room."""
    log = DirectoryLog(path)
    topic = log.create_topic(Topic("t", uuid.uuid4().hex, 1, segment_bytes=8_192))
    values = [b"%d" % number for number in range(60)]
    acknowledged: Sent = {
        (0, offsets_of(topic.append([Append.encoded(0, records(value))]))[0]): value for value in values
    }
    indexes = list(path.glob("topics/t/partitions/partition-0/*.index"))
    assert len(indexes) > 3
    for index in indexes:
        index.unlink()
    fill(path)
    check_whole(path, acknowledged, set())
    assert topic.offset_at(0, 0) == 0


def a_topic_is_made_whole_or_not_at_all(path: Path) -> None:
    hub = pxrs.open(path)
    hub.create_topic("old", partitions=1)
    assert hub.parts.events.flush(20)  # `_audit` is there before the disk is full
    ballast = fill(path)
    for _ in range(3):
        with pytest.raises(LogError, match="No space left on device"):
            hub.create_topic("t", partitions=3)
        assert [topic.name for topic in hub.topics()] == ["old"]
    assert sorted(os.listdir(path / "topics")) == ["_audit", "old"], "what was begun is taken away again"
    ballast.unlink()
    hub.create_topic("t", partitions=3)
    with hub.producer("t") as producer:
        assert producer.send("x", partition=2).result(20) == (2, 0)
    hub.close()


def count(path: Path) -> None:
    with pxrs.open(path) as hub:
        topic = hub.topic("t")
        sys.stdout.write(str(sum(1 for partition in range(topic.partitions) for _ in topic.messages(partition))))


def send(path: Path, partition: str) -> None:
    with pxrs.open(path) as hub, hub.producer("t") as producer:
        place = producer.send("from another process", partition=int(partition)).result(20)
    sys.stdout.write(str(place[1]))


SCENARIOS: list[Callable[[Path], None]] = [
    a_producer_meets_a_full_disk,
    the_room_ends_at_any_page_of_a_roll,
    a_missing_index_keeps_nobody_from_reading,
    a_topic_is_made_whole_or_not_at_all,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_f9_on_a_full_disk(scenario: Callable[[Path], None], tmp_path: Path) -> None:
    rights = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    if sys.platform != "linux" or subprocess.run([*rights, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    shell = f'mount -t tmpfs -o size=4m none "{tmp_path}" && exec "$@"'
    command = [*rights, "sh", "-c", shell, "sh", sys.executable, __file__, scenario.__name__, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == DONE, result.stderr


def main(name: str, path: str, *more: str) -> None:
    scenarios = {scenario.__name__: scenario for scenario in SCENARIOS}
    if name in scenarios:
        scenarios[name](Path(path))
        sys.stdout.write(DONE)
    elif name == "count":
        count(Path(path))
    else:
        send(Path(path), *more)


if __name__ == "__main__":
    main(*sys.argv[1:])
