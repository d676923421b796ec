"""A copy of a hub's directory that was made while producers appended to it, file by file: it opens at what is whole,
says so, and can be written to, without an offset that is given twice (L2)."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import pxrs
from pxrs import disk
from pxrs.errors import DamagedFrame, LogError
from pxrs.log.arrivals import wait_for_messages
from pxrs.log.contract import Append
from pxrs.log.directory.check import check
from pxrs.log.directory.published import PublishedFile
from pxrs.log.directory.segments.frames import frames
from pxrs.log.directory.topic import DirectoryTopic
from pxrs.log.outcomes import offsets_of
from pxrs.testing import faults
from pxrs.testing.log_contract import records
from tests.acceptance import directory_topics
from tests.acceptance.directory_topics import log_in

BOUND_S = 30.0
LARGE = 30
"""Messages of 1 MiB in the hub that a tar copies."""


def value(number: int) -> bytes:
    return b"%05d" % number + b"x" * 300


def append(topic: DirectoryTopic, count: int = 1) -> None:
    for _ in range(count):
        end = topic.end(0)
        assert offsets_of(topic.append([Append.encoded(0, records([value(end)]))])) == [end]


def new_topic(path: Path, **options: Any) -> DirectoryTopic:
    return directory_topics.new_topic(log_in(path), **options)


def opened(path: Path) -> DirectoryTopic:
    return directory_topics.opened(log_in(path))


def copy(source: Path, target: Path, between: Callable[[], None]) -> None:
    """As `tar --sort=name` does it: the names of a folder are read first, then its files one after the other."""
    target.mkdir()
    for name in sorted(os.listdir(source)):
        path = source / name
        if path.is_symlink():
            os.symlink(os.readlink(path), target / name)
        elif path.is_dir():
            copy(path, target / name, between)
        else:
            shutil.copyfile(path, target / name)
            between()


def read(topic: DirectoryTopic) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    offset, end = topic.start(0), topic.end(0)
    while offset < end:
        batches = topic.read(0, offset)
        assert batches, "a reader that waits here waits for ever"
        for batch in batches:
            assert batch.base_offset == offset
            found |= enumerate(batch.records.column("value").to_pylist(), offset)
            offset = batch.next_offset
    return found


def partition(path: Path) -> Path:
    return path / "topics/t/partitions/partition-0"


def sizes(path: Path) -> dict[str, int]:
    return {each.name: each.stat().st_size for each in partition(path).glob("*.log")}


def published_end(path: Path, topic: DirectoryTopic) -> int:
    file = PublishedFile(str(partition(path) / "published"), topic._partition(0)._place_id)
    try:
        return file.last().end
    finally:
        file.close()


def findings(path: Path) -> list[str]:
    return [finding.what for checked in check(path) for finding in checked.findings]


@pytest.fixture
def fast() -> Iterator[Path]:
    """A place in memory, where a sync costs nothing."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="pxrs-copy-", dir=place) as folder:
        yield Path(folder)


@pytest.fixture(params=[False, True], ids=["same boot", "another boot"])
def maybe_boot(request: pytest.FixtureRequest, boot: Callable[[], None]) -> Callable[[], None]:
    return boot if request.param else lambda: None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("durability", ["disk", "os"])
@pytest.mark.parametrize("first", ["read", "append"])
@pytest.mark.parametrize("between", [1, 9, 40], ids=lambda count: f"{count} appends for each file")
@pytest.mark.parametrize("start", [3, 25])
def test_a_copy_in_the_order_of_names_opens_at_what_is_whole_and_is_written_to(
    start: int,
    between: int,
    first: str,
    durability: str,
    fast: Path,
    maybe_boot: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A segment holds about ten messages, so the copy lacks the end of the last one, or later ones altogether."""
    topic, target = new_topic(fast / "hub", segment_bytes=8192, durability=durability), fast / "copy"
    append(topic, start)
    copy(fast / "hub", target, lambda: append(topic, between))
    promised, before = published_end(target, topic), sizes(target)
    assert promised > start
    assert read(topic) == {at: value(at) for at in range(topic.end(0))}
    maybe_boot()
    told = findings(target)
    late = opened(target)
    if first == "append":
        offset = offsets_of(late.append([Append.encoded(0, records([b"after"]))]))[0]
        assert offset >= promised, "an offset that the copy says was given is given again"
    found = read(late)
    kept = {at: each for at, each in found.items() if each != b"after"}
    assert kept == {at: value(at) for at in range(len(kept))}
    assert len(kept) >= start, "only what was appended meanwhile may be missing"
    if len(kept) < promised and durability == "disk":
        assert told, "the checker tells"
        assert f"messages up to {promised} were published" in caplog.text
    end = late.end(0)
    assert end >= promised
    assert offsets_of(late.append([Append.encoded(0, records([b"next"]))])) == [end]
    assert read(opened(target)) == {**found, end: b"next"}
    assert findings(target) == []
    assert all(size >= before[name] for name, size in sizes(target).items() if name in before), "nothing was cut"


@pytest.mark.parametrize("missing", [1, 100, 400, 470, 500, 5000])
def test_a_copy_that_ends_within_a_frame_keeps_the_frames_before_it(
    missing: int, tmp_path: Path, maybe_boot: Callable[[], None]
) -> None:
    topic = new_topic(tmp_path)
    append(topic, 10)
    (tail,) = partition(tmp_path).glob("*.log")
    size = tail.stat().st_size
    whole = (size - missing) // (size // 10)
    os.truncate(tail, size - missing)
    maybe_boot()
    late = opened(tmp_path)
    assert read(late) == {at: value(at) for at in range(max(0, whole))}
    assert offsets_of(late.append([Append.encoded(0, records([b"next"]))])) == [10]
    assert findings(tmp_path) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("segment_bytes", [1 << 20, 4096], ids=["bytes are missing", "segments are missing"])
def test_who_is_killed_at_any_step_of_the_recovery_leaves_a_copy_that_opens(segment_bytes: int, fast: Path) -> None:
    topic = new_topic(fast / "hub", segment_bytes=segment_bytes)
    append(topic, 14)
    end, whole = topic.end(0), 2
    first, *others = sorted(partition(fast / "hub").glob("*.log"))
    assert bool(others) == (segment_bytes == 4096)
    for other in others:
        other.unlink()
        other.with_suffix(".producers").unlink()
    for index in partition(fast / "hub").glob("*.index"):
        index.unlink()
    data = pa.py_buffer(first.read_bytes())
    os.truncate(first, [at for at, _ in frames(data, "", 0, data.size)][whole] + 100)
    step, code = 0, -1
    while code != 0:
        step += 1
        path = fast / str(step)
        shutil.copytree(fast / "hub", path, symlinks=True)

        def work(path: Path = path, step: int = step) -> None:
            with faults.counted(faults.Steps(step, faults.kill)):
                offsets_of(opened(path).append([Append.encoded(0, records([b"first"]))]))

        with faults.child(work) as pid:
            code = faults.wait_exit(pid)
        late = opened(path)
        kept = {at: value(at) for at in range(whole)}
        assert read(late) in (kept, {**kept, end: b"first"})
        next_offset = late.end(0)
        assert offsets_of(late.append([Append.encoded(0, records([b"next"]))])) == [next_offset]
        assert read(opened(path)) in ({**kept, end: b"next"}, {**kept, end: b"first", end + 1: b"next"})
        assert findings(path) == []
        shutil.rmtree(path)
    assert next_offset == end + 1
    assert step > 20


def test_a_copy_of_a_segment_whose_first_append_could_not_be_synced_lacks_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The segment is begun again in its own place, and is not sealed by that: else the copy looks as if somebody had
    removed the segment behind it."""
    topic = new_topic(tmp_path / "hub", segment_bytes=4096)
    assert topic.end(0) == 0

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(disk, "sync_data", fail)
        with pytest.raises(LogError, match="when the batch was synced"):
            offsets_of(topic.append([Append.encoded(0, records([b"lost"]))]))
    append(topic, 3)
    is_rolled = False

    def between() -> None:
        nonlocal is_rolled
        if not is_rolled and any((tmp_path / "copy").rglob("*.log")):
            append(topic, 40)
            is_rolled = True

    copy(tmp_path / "hub", tmp_path / "copy", between)
    late = opened(tmp_path / "copy")
    assert read(late) == {at: value(at) for at in range(3)}
    assert offsets_of(late.append([Append.encoded(0, records([b"new"]))])) == [topic.end(0)]


@pytest.mark.parametrize("durability", ["disk", "os"])
@pytest.mark.parametrize("first", ["read", "append"])
@pytest.mark.parametrize("whole", [0, 3])
def test_a_copy_that_ends_before_the_start_that_retention_left_goes_on_at_the_start(
    durability: str, first: str, whole: int, tmp_path: Path, maybe_boot: Callable[[], None]
) -> None:
    """Else new messages get offsets before the start: a group that begins at the earliest offset never reads them."""
    topic = new_topic(tmp_path / "hub", segment_bytes=4096, retention_bytes=1, durability=durability)
    append(topic, 20)
    topic.retain(0)
    append(topic, whole)
    shutil.copytree(tmp_path / "hub", tmp_path / "copy", symlinks=True)
    kept, end = read(topic), topic.end(0)
    append(topic, 20)
    start = topic.retain(0)[0]
    assert start > end
    shutil.copy(partition(tmp_path / "hub") / "start", partition(tmp_path / "copy"))
    (finding,) = findings(tmp_path / "copy")
    assert f"ends at offset {end}" in finding
    assert f"the next append gets offset {start}" in finding
    maybe_boot()
    late = opened(tmp_path / "copy")
    if first == "read":
        assert late.end(0) >= start == late.start(0)
        assert read(late) == {}
        assert kept == {} or read_from(late, min(kept)) == kept
    next_offset = late.end(0)
    assert offsets_of(late.append([Append.encoded(0, records([b"new"]))])) == [max(start, next_offset)]
    assert list(read(late).values()) == list(read(opened(tmp_path / "copy")).values()) == [b"new"]
    assert findings(tmp_path / "copy") == []
    with pxrs.open(tmp_path / "copy") as hub, hub.consumer("t", "g", until="end") as inbox:
        assert [message.value for message in inbox] == [b"new"]


def read_from(topic: DirectoryTopic, offset: int) -> dict[int, bytes]:
    """What can still be read from an offset on that lies before the start."""
    batches = topic.read(0, offset)
    return {
        batch.base_offset + row: value
        for batch in batches
        for row, value in enumerate(batch.records.column("value").to_pylist())
    }


def test_reading_changes_nothing_so_that_missing_bytes_can_be_put_back(tmp_path: Path) -> None:
    topic = new_topic(tmp_path)
    append(topic, 10)
    (tail,) = partition(tmp_path).glob("*.log")
    whole = tail.read_bytes()
    os.truncate(tail, len(whole) - 1000)
    late = opened(tmp_path)
    assert (len(read(late)), late.end(0)) == (8, 10)
    assert wait_for_messages(late, {0: 10}, 0) == set()
    assert late.offset_at(0, 1 << 60) == 10
    assert findings(tmp_path) != [], "the checker tells as long as nobody has appended"
    tail.write_bytes(whole)
    assert read(opened(tmp_path)) == {at: value(at) for at in range(10)}
    assert findings(tmp_path) == []


def test_real_damage_in_a_short_file_is_an_error_and_nothing_is_cut(
    tmp_path: Path, maybe_boot: Callable[[], None]
) -> None:
    topic = new_topic(tmp_path)
    append(topic, 10)
    (tail,) = partition(tmp_path).glob("*.log")
    data = bytearray(tail.read_bytes())
    data[len(data) // 10 * 4 + 20] ^= 1
    tail.write_bytes(data[:-1000])
    before = sizes(tmp_path)
    maybe_boot()
    with pytest.raises(DamagedFrame, match="checksum"):
        offsets_of(opened(tmp_path).append([Append.encoded(0, records([b"next"]))]))
    with pytest.raises(DamagedFrame):
        read(opened(tmp_path))
    assert sizes(tmp_path) == before


def test_damage_in_the_last_published_frame_is_no_copy(tmp_path: Path, boot: Callable[[], None]) -> None:
    """No byte is missing, so it is an error, and not a gap."""
    topic = new_topic(tmp_path)
    append(topic, 10)
    (tail,) = partition(tmp_path).glob("*.log")
    data = bytearray(tail.read_bytes())
    data[-100] ^= 1
    tail.write_bytes(data)
    boot()
    with pytest.raises(DamagedFrame, match="payload"):
        offsets_of(opened(tmp_path).append([Append.encoded(0, records([b"next"]))]))
    assert tail.read_bytes() == data


@pytest.mark.parametrize("removed", [1, 2])
def test_segments_that_somebody_removed_are_an_error_and_no_copy(
    removed: int, tmp_path: Path, maybe_boot: Callable[[], None]
) -> None:
    topic = new_topic(tmp_path, segment_bytes=8192)
    append(topic, 60)
    for path in sorted(partition(tmp_path).glob("*.log"))[-removed:]:
        path.unlink()
    before = sizes(tmp_path)
    maybe_boot()
    late = opened(tmp_path)
    with pytest.raises(DamagedFrame, match="is missing, but messages up to offset 60"):
        offsets_of(late.append([Append.encoded(0, records([b"next"]))]))
    assert late.read(0, 0)[0].records.column("value")[0].as_py() == value(0), "the rest stays readable"
    with pytest.raises(LogError):
        late.read(0, 59)
    assert sizes(tmp_path) == before


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[Path]:
    """A hub to which a producer sends and flushes all the time."""
    failures: list[BaseException] = []
    is_enough, has_begun = threading.Event(), threading.Event()

    def write() -> None:
        try:
            with pxrs.open(tmp_path / "hub") as hub, hub.producer("t", linger_s=0) as out:
                number = 0
                while not is_enough.is_set():
                    for _ in range(20):
                        out.send(b"%07d" % number, partition=0)
                        number += 1
                    out.flush()
                    has_begun.set()
        except BaseException as error:
            failures.append(error)
            raise

    with pxrs.open(tmp_path / "hub") as hub:
        hub.create_topic("t", partitions=1)
        with hub.producer("t") as out:  # so much that the producer flushes while a tar reads the segment
            for _ in range(LARGE):
                out.send(bytes(1 << 20), partition=0)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert has_begun.wait(BOUND_S)
        yield tmp_path / "hub"
    finally:
        is_enough.set()
        writer.join(BOUND_S)
    assert not writer.is_alive()
    assert failures == []


def test_a_tar_of_a_hub_under_load_is_read_by_a_group_and_written_to(writing: Path, tmp_path: Path) -> None:
    for number in range(3):
        target = tmp_path / f"copy-{number}"
        target.mkdir()
        packed = subprocess.run(
            [
                "tar",
                "--sort=name",
                "--warning=no-file-changed",
                "-cf",
                str(target / "hub.tar"),
                "-C",
                str(writing),
                ".",
            ],
            capture_output=True,
            text=True,
            timeout=BOUND_S,
            check=False,
        )
        if "unrecognized option" in packed.stderr or "not supported" in packed.stderr:
            pytest.skip("this tar cannot sort")
        assert packed.returncode in (0, 1), packed.stderr  # 1: a file changed as it was read
        subprocess.run(["tar", "-xf", target / "hub.tar", "-C", target], check=True, timeout=BOUND_S)
        with pxrs.open(target) as hub:
            end = hub.topic("t").end(0)
            with hub.producer("t") as out:
                assert out.send(b"after").result(BOUND_S) == (0, end)
            with hub.consumer("t", "g", until="end") as inbox:
                found = [message.value for message in inbox]
        assert found[:LARGE] == [bytes(1 << 20)] * LARGE
        assert found[LARGE:] == [*(b"%07d" % at for at in range(len(found) - LARGE - 1)), b"after"]
        assert findings(target) == []
