"""The checker: one run tells of all damage, of nothing else, and leaves everything as it is (F5, L2)."""

from __future__ import annotations

import fcntl
import json
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import pxrs
from pxrs.log.batch import SCHEMA, Origin
from pxrs.log.contract import Append
from pxrs.log.directory import check as check_module
from pxrs.log.directory import published as published_module
from pxrs.log.directory.check import Checked, Finding, check
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.directory.segments.files import segment_bases
from pxrs.log.directory.topic import DirectoryTopic
from pxrs.log.outcomes import offsets_of
from pxrs.model import Topic

ROWS = 40
SEGMENT_BYTES = 8192


def make(path: Path, name: str = "t", retention_bytes: int | None = None) -> Path:
    """A topic with a segment for every few messages, each an append of a producer; its partition's folder."""
    log = DirectoryLog(path)
    topic = Topic(name, uuid.uuid4().hex, 1, segment_bytes=SEGMENT_BYTES, retention_bytes=retention_bytes)
    opened = log.create_topic(topic)
    producer = uuid.uuid4()
    for number in range(ROWS):
        offsets_of(opened.append([Append.encoded(0, row(), Origin(producer, 0, number))]))
    log.close()
    return (path / "topics" / name).resolve() / "partitions" / "partition-0"


def row() -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"value": b"x" * 500, "timestamp": 0}], SCHEMA)


def run(path: Path) -> tuple[int, list[Finding]]:
    """The messages that were read, and what was found."""
    checked: list[Checked] = list(check(path))
    return sum(each.messages for each in checked), [finding for each in checked for finding in each.findings]


def files_of(findings: list[Finding]) -> list[str]:
    return [Path(finding.file).name for finding in findings]


def logs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.log"))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x20
    path.write_bytes(data)


def picture(path: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(file): (file.stat().st_mtime_ns, file.read_bytes() if file.is_file() else b"") for file in path.rglob("*")
    }


@pytest.fixture
def reboot(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    another = str(uuid.uuid4())
    return lambda: monkeypatch.setattr(published_module, "boot_id", lambda: another)


def test_a_whole_log_has_no_findings(tmp_path: Path) -> None:
    assert len(logs(make(tmp_path))) > 3, "or else the tests below test little"
    assert run(tmp_path) == (ROWS, [])


def test_missing_segments_are_found(tmp_path: Path) -> None:
    folder = make(tmp_path)
    tail = logs(folder)[-1]
    tail.unlink()
    messages, (finding,) = run(tmp_path)
    assert (finding.file, finding.topic, finding.partition) == (str(tail), "t", 0)
    assert f"up to offset {ROWS}" in finding.what
    assert 0 < messages < ROWS
    for path in logs(folder):
        path.unlink()
    messages, findings = run(tmp_path)
    assert (messages, files_of(findings)) == (0, ["00000000000000000000.log", tail.name])


def test_a_missing_segment_in_the_middle_is_found(tmp_path: Path) -> None:
    first, second, *_ = logs(make(tmp_path))
    second.unlink()
    assert files_of(run(tmp_path)[1]) == [first.name]


def break_topic(path: Path, how: str) -> None:
    if how == "removed":
        path.unlink()
        return
    whole = json.loads(path.read_bytes())
    contents = {
        "empty": "",
        "cut": path.read_text()[:30],
        "no object": "[]",
        "no fields": "{}",
        "no text": "\0",
        "another name": json.dumps({**whole, "name": "other"}),
        "another id": json.dumps({**whole, "id": "0" * 32}),
        "bad count": json.dumps({**whole, "partitions": "1"}),
    }
    path.write_text(contents[how])


@pytest.mark.parametrize(
    "how", ["removed", "empty", "cut", "no object", "no fields", "no text", "another name", "another id", "bad count"]
)
def test_a_topic_without_its_description_is_found_and_all_messages_are_still_checked(tmp_path: Path, how: str) -> None:
    make(tmp_path, "a")
    broken = make(tmp_path, "b")
    make(tmp_path, "c")
    break_topic(tmp_path / "topics/b/topic.json", how)
    messages, (finding,) = run(tmp_path)
    assert messages == 3 * ROWS
    assert (finding.topic, finding.partition, Path(finding.file).name) == ("b", None, "topic.json")
    flip(logs(broken)[0], 300)
    assert files_of(run(tmp_path)[1]) == ["topic.json", logs(broken)[0].name]


def test_a_topic_that_lost_its_folder_or_its_name_is_found(tmp_path: Path) -> None:
    make(tmp_path, "a")
    folder = make(tmp_path, "b").parents[1]
    log = DirectoryLog(tmp_path)
    unused = Topic("unused", uuid.uuid4().hex, 1)
    log.create_topic(unused)
    (tmp_path / "topics/unused").unlink()  # as if its creation had not come to its end
    folder.rename(folder.with_name(".moved"))
    messages, (finding,) = run(tmp_path)
    assert (messages, finding.topic, Path(finding.file).name) == (ROWS, "b", "b")
    folder.with_name(".moved").rename(folder)
    (tmp_path / "topics/b").unlink()
    messages, (finding,) = run(tmp_path)
    assert (messages, finding.file) == (ROWS, str(folder))


def test_partitions_that_are_missing_or_too_many_are_found(tmp_path: Path) -> None:
    folder = make(tmp_path)
    folder.rename(folder.with_name("partition-1"))
    findings = run(tmp_path)[1]
    assert files_of(findings[:2]) == ["topic.json", "partition-0"]
    assert "missing" in findings[1].what
    assert {finding.partition for finding in findings[2:]} == {1}
    assert all("written for another topic" in finding.what for finding in findings[2:])


@pytest.mark.parametrize("how", ["cut", "flipped", "empty", "no text"])
def test_a_damaged_producers_state_is_found(tmp_path: Path, how: str) -> None:
    path = logs(make(tmp_path))[-1].with_suffix(".producers")
    data = path.read_bytes()
    if how == "flipped":
        flip(path, len(data) // 2)
    else:
        path.write_bytes({"cut": data[:-20], "empty": b"", "no text": b"\xff" * 40}[how])
    messages, findings = run(tmp_path)
    assert (messages, files_of(findings)) == (ROWS, [path.name])
    path.unlink()  # that is no damage: it is found again
    assert run(tmp_path) == (ROWS, [])


@pytest.mark.parametrize("suffix", [".log", ".index", ".producers"])
def test_a_file_that_cannot_be_read_is_a_finding_and_not_the_end(tmp_path: Path, suffix: str) -> None:
    path = logs(make(tmp_path))[1].with_suffix(suffix)
    path.unlink()
    path.mkdir()
    assert files_of(run(tmp_path)[1]) == [path.name]


def test_what_retention_removes_meanwhile_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path)
    read = Path.read_bytes
    removed = []

    def read_late(self: Path) -> bytes:
        if self.suffix == ".index" or self == logs(folder)[1]:
            removed.append(self.name)
            self.unlink()
        return read(self)

    monkeypatch.setattr(check_module.Path, "read_bytes", read_late)
    second = logs(folder)[1]
    messages, findings = run(tmp_path)
    assert findings == []
    assert second.name in removed
    assert len(removed) > 2
    assert 0 < messages < ROWS


def test_a_tail_that_is_rolled_and_retained_meanwhile_is_no_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, retention_bytes=1)
    topic = DirectoryLog(tmp_path).topic("t")
    before = topic.end(0)
    looked = 0

    def list_late(folder: str) -> list[int]:
        nonlocal looked
        looked += 1
        if looked == 1:
            for _ in range(ROWS):
                offsets_of(topic.append([Append.encoded(0, row())]))
            assert topic.retain(now=0)[0] > before
        return segment_bases(folder)

    monkeypatch.setattr(check_module, "segment_bases", list_late)
    messages, findings = run(tmp_path)
    assert findings == []
    assert messages > 0
    assert looked > 1


def test_a_topic_that_is_deleted_meanwhile_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "a")
    second = make(tmp_path, "b").parents[1]
    seen = check(tmp_path)
    assert next(seen).findings == []
    DirectoryLog(tmp_path).delete_topic("a")
    delete = DirectoryLog(tmp_path).delete_topic

    def list_late(folder: str) -> list[int]:
        if Path(folder).parents[1] == second:
            delete("b")
        return segment_bases(folder)

    monkeypatch.setattr(check_module, "segment_bases", list_late)
    assert [finding for checked in seen for finding in checked.findings] == []
    make(tmp_path, "c")
    look_up = check_module.look_up
    monkeypatch.setattr(check_module, "look_up", lambda *_: monkeypatch.undo() or (delete("c") and None))
    assert run(tmp_path) == (0, [])
    assert look_up is check_module.look_up, "the deletion took place"


def test_beside_a_writer_and_retention_nothing_is_found(tmp_path: Path) -> None:
    make(tmp_path, retention_bytes=2 * SEGMENT_BYTES)
    is_enough = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        try:
            topic = DirectoryLog(tmp_path).topic("t")
            while not is_enough.is_set():
                for _ in range(10):
                    offsets_of(topic.append([Append.encoded(0, row())]))
                topic.retain(now=0)
        except BaseException as error:
            failures.append(error)
            raise

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(50):
            assert run(tmp_path)[1] == []
    finally:
        is_enough.set()
        writer.join()
    assert failures == []


def test_after_a_boot_a_held_lock_is_not_waited_for_and_no_damage(tmp_path: Path, reboot: Callable[[], None]) -> None:
    folder = make(tmp_path)
    reboot()
    with open(folder / "lock", "rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run(tmp_path) == (ROWS, [])


def test_nothing_is_changed(tmp_path: Path, reboot: Callable[[], None]) -> None:
    folder = make(tmp_path)
    DirectoryLog(tmp_path).create_topic(Topic("unused", uuid.uuid4().hex, 2))
    next(iter(sorted(folder.glob("*.index")))).unlink()
    with open(logs(folder)[-1], "ab") as tail:
        tail.write(b"torn" * 20)
    before = picture(tmp_path)
    assert run(tmp_path) == (ROWS, [])
    reboot()
    assert run(tmp_path) == (ROWS, []), "a torn append at the end, which a recovery cuts off, is no damage"
    assert picture(tmp_path) == before
    with pxrs.open(tmp_path) as hub:
        assert hub.topic("t").end(0) == ROWS


def test_after_a_boot_a_damaged_tail_does_not_hide_other_damage(tmp_path: Path, reboot: Callable[[], None]) -> None:
    first, second, *_, tail = logs(make(tmp_path))
    with pxrs.open(tmp_path) as hub:
        topic = hub.topic("t").log
        assert isinstance(topic, DirectoryTopic)
        while tail.stat().st_size < SEGMENT_BYTES * 3 // 4:
            offsets_of(topic.append([Append.encoded(0, row())]))
    for path, position in ((first, 300), (second, 50), (tail, 300)):
        flip(path, position)
    with open(tail, "ab") as file:
        file.write(b"torn" * 20)
    reboot()
    findings = run(tmp_path)[1]
    # The first frame of each; what is torn at the end is not among them.
    expected = [(first.name, 0), (second.name, 0), (tail.name, 0)]
    assert [(Path(finding.file).name, finding.position) for finding in findings] == expected


def test_after_a_boot_what_was_published_before_must_be_there(tmp_path: Path, reboot: Callable[[], None]) -> None:
    folder = make(tmp_path)
    tail = logs(folder)[-1]
    whole = tail.read_bytes()
    reboot()
    # To a recovery these look like an append that was torn, were it not for the end that was published.
    for data in (whole[:-40], b""):
        tail.write_bytes(data)
        (finding,) = run(tmp_path)[1]
        assert (finding.file, f"up to {ROWS}" in finding.what) == (str(tail), True)
    for path in logs(folder):
        path.unlink()
    assert files_of(run(tmp_path)[1]) == ["published"]


def test_a_partition_that_is_opened_while_it_is_checked_after_a_boot_is_looked_at_again(
    tmp_path: Path, reboot: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    reboot()
    read = Path.read_bytes
    is_first = True

    def read_late(self: Path) -> bytes:
        """A read that met an append half written, and the next one whole."""
        nonlocal is_first
        if not is_first or self.suffix != ".log":
            return read(self)
        is_first = False
        begin = self.stat().st_size
        topic = DirectoryLog(tmp_path).topic("t")
        for _ in range(2):
            offsets_of(topic.append([Append.encoded(0, row())]))
        data = bytearray(read(self))
        assert begin < self.stat().st_size, "both are in this segment"
        data[begin + 200] ^= 0x20
        return bytes(data)

    monkeypatch.setattr(check_module.Path, "read_bytes", read_late)
    assert run(tmp_path) == (ROWS + 2, [])
    assert not is_first
