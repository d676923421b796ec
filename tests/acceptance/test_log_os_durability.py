"""Topics whose appends are left to the operating system to write (`durability="os"`, L1): what a power loss takes is
gone, what is left is right, and no offset that was ever given is given again."""

from __future__ import annotations

import os
import random
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import pxrs
from pxrs import disk
from pxrs.errors import DamagedFrame, InvalidTopic
from pxrs.log.batch import Origin, encode, header_bytes, padding, place_id, read_header, read_payload
from pxrs.log.contract import Append, TopicLog
from pxrs.log.directory.check import check
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.directory.reserved import RESERVED_OFFSETS
from pxrs.log.directory.segments.frames import frames, next_frame
from pxrs.log.outcomes import offsets_of
from pxrs.model import Topic
from pxrs.testing import power
from pxrs.testing.log_contract import records

LOSSES = 4_000 if os.environ.get("PXRS_SOAK") else 400
SEGMENT_BYTES = 8192


@pytest.fixture
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path_factory.mktemp("power")
    folder = place / f"pxrs-os-{uuid.uuid4().hex}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def tail(folder: Path) -> Path:
    return max(folder.glob("topics/t/partitions/partition-0/*.log"))


def lose_the_last_byte(folder: Path) -> None:
    os.truncate(tail(folder), tail(folder).stat().st_size - 1)


def findings(folder: Path) -> list[str]:
    return [finding.what for checked in check(folder) for finding in checked.findings]


def read(topic: TopicLog) -> tuple[dict[int, bytes], list[int]]:
    """What can be read, by offset, and the offsets at which damage was met."""
    found: dict[int, bytes] = {}
    damaged: list[int] = []
    offset = topic.start(0)
    while offset < topic.end(0):
        try:
            batches = topic.read(0, offset)
        except DamagedFrame:
            damaged.append(offset)
            offset += 1
            continue
        assert batches, "a reader that waits here waits for ever"
        for batch in batches:
            assert batch.base_offset == offset
            found |= enumerate(batch.records.column("value").to_pylist(), offset)
            offset = batch.next_offset
    return found, damaged


def whole_frames(folder: Path) -> set[int]:
    """The offsets of all messages whose frames are whole, found without regard to what lies between them."""
    found: set[int] = set()
    for path in folder.glob("topics/t/partitions/partition-0/*.log"):
        data, position = pa.py_buffer(path.read_bytes()), 0
        while (position := next_frame(memoryview(data), "", position, data.size)) < data.size:
            header = read_header(memoryview(data)[position:][:128], "", position)
            try:
                read_payload(header, data.slice(position), "", position)
            except DamagedFrame:
                position += 32
                continue
            found |= set() if header.is_gap else set(range(header.base_offset, header.next_offset))
            position += header.frame_bytes
    return found


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("within", [20, 300], ids=["header", "payload"])
@pytest.mark.parametrize("is_torn", [False, True], ids=["whole end", "torn end"])
def test_after_a_boot_a_flipped_bit_costs_one_message_and_is_told(
    within: int, is_torn: bool, tmp_path: Path, boot: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    log = DirectoryLog(tmp_path)
    topic = log.create_topic(Topic("t", uuid.uuid4().hex, 1, durability="os"))
    producer = uuid.uuid4()
    for number in range(50):
        offsets_of(
            topic.append([Append.encoded(0, records([b"%d" % number + b"x" * 300]), Origin(producer, 0, number))])
        )
    log.close()
    frame_bytes = tail(tmp_path).stat().st_size // 50
    flip(tail(tmp_path), 7 * frame_bytes + within)
    if is_torn:
        lose_the_last_byte(tmp_path)
    boot()
    before = tail(tmp_path)
    whole = set(range(50)) - {7} - ({49} if is_torn else set())
    (told,) = [each for checked in check(tmp_path) for each in checked.findings]
    assert (told.file, told.position) == (str(before.resolve()), 7 * frame_bytes)
    for _ in range(2):
        topic = DirectoryLog(tmp_path).topic("t")
        found, damaged = read(topic)
        assert (found.keys(), damaged) == (whole, [7])
        boot()  # and nothing changes with another one
    assert "offset 7 up to 8 cannot be read" in caplog.text
    topic = DirectoryLog(tmp_path).topic("t")
    end = topic.end(0)
    assert end == 1 + RESERVED_OFFSETS
    assert offsets_of(topic.append([Append.encoded(0, records([b"retry"]), Origin(producer, 0, 48))])) == [48], (
        "stored once"
    )
    assert offsets_of(topic.append([Append.encoded(0, records([b"after"]))])) == [end]
    found, damaged = read(DirectoryLog(tmp_path).topic("t"))
    assert (found.keys(), damaged) == (whole | {end}, [7])
    (told,) = [each for checked in check(tmp_path) for each in checked.findings]
    assert (told.file, told.position) == (str(before.resolve()), 7 * frame_bytes)


def test_after_a_boot_whole_messages_between_two_damaged_ones_are_kept(
    tmp_path: Path, boot: Callable[[], None]
) -> None:
    topic = DirectoryLog(tmp_path).create_topic(Topic("t", uuid.uuid4().hex, 1, durability="os"))
    for number in range(50):
        offsets_of(topic.append([Append.encoded(0, records([b"%d" % number + b"x" * 300]))]))
    frame_bytes = tail(tmp_path).stat().st_size // 50
    for number in (7, 30, 31, 48):
        flip(tail(tmp_path), number * frame_bytes + 20)
    boot()
    found, damaged = read(DirectoryLog(tmp_path).topic("t"))
    assert (found.keys(), damaged) == (set(range(50)) - {7, 30, 31, 48}, [7, 30, 31, 48])


def test_after_a_boot_a_frame_that_somebody_sent_as_a_message_is_not_taken_for_one(
    tmp_path: Path, boot: Callable[[], None]
) -> None:
    forged = encode(records([b"forged"]))
    topic = DirectoryLog(tmp_path).create_topic(Topic("t", uuid.uuid4().hex, 1, durability="os"))
    header = header_bytes(forged, 2, place=place_id(topic.id, 0), stored_at=0)
    frame = header + forged.data.to_pybytes() + padding(forged)
    copies = b"".join(bytes(shift) + frame + bytes(32 - shift) for shift in range(0, 32, 8))  # one will be aligned
    for sent in (b"0", copies, b"2", b"3"):
        offsets_of(topic.append([Append.encoded(0, records([sent]))]))
    data = pa.py_buffer(tail(tmp_path).read_bytes())
    second, third = [at for at, _ in frames(data, "", 0, data.size)][1:3]
    assert second < next_frame(memoryview(data), "", second + 32, data.size) < third, "a copy is aligned"
    flip(tail(tmp_path), second + 200)
    boot()
    assert read(DirectoryLog(tmp_path).topic("t")) == ({0: b"0", 2: b"2", 3: b"3"}, [1])


def test_an_older_reservation_gives_no_published_offset_again(tmp_path: Path, boot: Callable[[], None]) -> None:
    """As in a copy of which `reserved` was made before `published`."""
    topic = DirectoryLog(tmp_path).create_topic(Topic("t", uuid.uuid4().hex, 1, durability="os"))
    offsets_of(topic.append([Append.encoded(0, records([b"first"]))]))
    reserved = tail(tmp_path).parent / "reserved"
    older = reserved.read_bytes()
    offsets_of(topic.append([Append.encoded(0, records([b"x"] * (RESERVED_OFFSETS + 5)))]))
    assert reserved.read_bytes() != older
    reserved.write_bytes(older)
    end = topic.end(0)
    lose_the_last_byte(tmp_path)
    boot()
    assert offsets_of(DirectoryLog(tmp_path).topic("t").append([Append.encoded(0, records([b"next"]))]))[0] >= end


def test_no_append_is_synced_and_offsets_are_reserved_many_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs: list[str] = []
    sync = disk.sync_data

    def noted(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.startswith(str((tmp_path / "topics/t").resolve())):  # and not in a topic of events
            syncs.append(path)
        sync(descriptor)

    monkeypatch.setattr(disk, "sync_data", noted)
    with pxrs.open(tmp_path) as hub:
        hub.create_topic("t", partitions=1, durability="os")
        with hub.producer("t", linger_s=0) as out:
            out.send(b"first").result()
            syncs.clear()
            for _ in range(100):
                out.send(b"x").result()
            assert not syncs
            out.send_batch(pa.table({"value": [b"x"] * RESERVED_OFFSETS})).result()
            assert len(syncs) == 1


def test_l1_a_group_that_has_read_what_a_power_loss_took_misses_nothing_that_comes_after(
    tmp_path: Path, boot: Callable[[], None]
) -> None:
    with pxrs.open(tmp_path) as hub:
        topic = hub.create_topic("t", partitions=1, durability="os")
        with hub.producer("t", linger_s=0) as out:
            for number in range(10):
                out.send(b"%d" % number).result()
        with hub.consumer("t", "g", until="end") as inbox:
            assert len(list(inbox)) == 10
    lose_the_last_byte(tmp_path)
    boot()
    assert findings(tmp_path) == []
    for _ in range(2):  # another boot, without an append in between, makes no other gap
        boot()
        with pxrs.open(tmp_path) as hub:
            topic = hub.topic("t")
            reserved = 1 + RESERVED_OFFSETS  # by the first append
            assert topic.end(0) == reserved
            assert topic.to_arrow()["value"].to_pylist() == [b"%d" % number for number in range(9)]
            assert [message.offset for message in topic.messages(0)] == list(range(9))
            assert topic.to_arrow(start=20).num_rows == topic.to_arrow(start=3, end=20).num_rows - 6 == 0
            assert topic.offset_at(0, -(1 << 63)) == 0
    with pxrs.open(tmp_path) as hub:
        with hub.producer("t") as out:
            assert out.send(b"after").result() == (0, reserved)
        with hub.consumer("t", "g", until="end") as inbox:
            assert [(message.offset, message.value) for message in inbox] == [(reserved, b"after")]
        with hub.consumer("t", "new", until="end") as inbox:
            assert [message.value for message in inbox] == [*(b"%d" % number for number in range(9)), b"after"]
        assert hub.group("g").describe().lag == 0
    assert findings(tmp_path) == []


@pytest.fixture
def tape(fast: Path) -> power.Tape:
    """A run of appends through rolls. Its marks: the offset of each append with its values, and what was sealed."""
    root = fast / "run"
    root.mkdir()
    topic = DirectoryLog(root).create_topic(
        Topic("t", uuid.uuid4().hex, 1, segment_bytes=SEGMENT_BYTES, durability="os")
    )
    dice = random.Random(4)
    with power.recorded(root) as tape:
        for number in range(16):
            sizes = [dice.choice((1, 10, 2000)) for _ in range(dice.randint(1, 3))]
            values = [b"%d-%d-" % (number, i) + b"x" * size for i, size in enumerate(sizes)]
            (offset,) = offsets_of(topic.append([Append.encoded(0, records(values))]))
            tape.mark((offset, values))
            tape.mark((int(tail(root).stem), []))
    assert int(tail(root).stem) > 0
    return tape


def test_l1_whatever_a_power_loss_takes_the_rest_is_right_and_no_offset_is_given_again(
    tape: power.Tape, fast: Path, boot: Callable[[], None]
) -> None:
    shortest = longest = damaged = 0
    for seed in range(LOSSES):
        dice = random.Random(seed)
        at = dice.randrange(len(tape.events) + 1)
        target = fast / "state"
        tape.restore(at, dice.randrange, target)
        boot()
        log = DirectoryLog(target)
        topic = log.topic("t")
        sent: list[bytes] = []
        sealed = 0
        for offset, values in tape.marks(at):
            sealed = sealed if values else max(sealed, offset)
            sent += values
        found, lost = read(topic)
        # The append that was under way may be there too, though nobody was told.
        assert all(value == sent[at] for at, value in found.items() if at < len(sent)), f"seed {seed}"
        assert found.keys() >= set(range(sealed)), f"seed {seed}: what was sealed is lost"
        assert found.keys() >= whole_frames(target), f"seed {seed}: what is whole is lost"
        assert offsets_of(topic.append([Append.encoded(0, records([b"after"]))]))[0] >= len(sent), (
            f"seed {seed}: an offset was given again"
        )
        assert bool(findings(target)) == bool(lost), f"seed {seed}: damage, and nothing else, is told"
        kept = sum(at < len(sent) for at in found)
        shortest, longest = shortest + (kept < len(sent)), longest + (kept == len(sent) > 0)
        damaged += bool(lost)
        log.close()
        shutil.rmtree(target)
    assert shortest > LOSSES // 10, "losses were met"
    assert longest > LOSSES // 10
    assert damaged > LOSSES // 50, "whole messages behind a hole were met"


def order_of(tape: power.Tape, *steps: tuple[str, str]) -> list[int]:
    """At which event each of these steps happened last: what was done, and how the name of the file ends."""
    return [
        max(at for at, event in enumerate(tape.events) if event.kind == kind and event.path.endswith(name))
        for kind, name in steps
    ]


def test_l1_a_gap_is_synced_before_offsets_behind_it_can_be_seen(tmp_path: Path, boot: Callable[[], None]) -> None:
    """A second power loss could else take the gap and leave messages behind it: readers would meet damage, where no
    message has ever been."""
    topic = DirectoryLog(tmp_path).create_topic(Topic("t", uuid.uuid4().hex, 1, durability="os"))
    offsets_of(topic.append([Append.encoded(0, records([b"first"]))]))
    boot()
    with power.recorded(tmp_path) as tape:
        assert DirectoryLog(tmp_path).topic("t").end(0) > 1
    steps = order_of(tape, ("write", ".log"), ("sync", ".log"), ("write", "published"))
    assert steps == sorted(steps)


def test_l1_a_gap_behind_an_older_published_end_is_synced_before_that_moves(tmp_path: Path) -> None:
    """As in a copy of which `published` and the last segment were made before `start`, in the same run of the
    machine."""
    settings = {"segment_bytes": 4096, "retention_s": 3600.0}
    log = DirectoryLog(tmp_path / "data")
    topic = log.create_topic(Topic("t", uuid.uuid4().hex, 1, **settings))  # type: ignore[arg-type]
    offsets_of(topic.append([Append.encoded(0, records([b"x" * 4096]))]))
    shutil.copytree(tmp_path / "data", tmp_path / "copy", symlinks=True)
    for _ in range(3):
        offsets_of(topic.append([Append.encoded(0, records([b"x" * 4096]))]))
    topic.trim({0: 3})
    start = tail(tmp_path / "data").parent / "start"
    log.close()
    copy = tmp_path / "copy"
    shutil.copy(start, tail(copy).parent / "start")
    with power.recorded(copy) as tape:
        opened = DirectoryLog(copy)
        appended = opened.topic("t").append([Append.encoded(0, records([b"next"]))])
        opened.close()
    assert offsets_of(appended)[0] >= 3
    writes = [at for at, event in enumerate(tape.events) if event.kind == "write" and event.path.endswith(".log")]
    syncs = [at for at, event in enumerate(tape.events) if event.kind == "sync" and event.path.endswith(".log")]
    ends = [at for at, event in enumerate(tape.events) if event.kind == "write" and event.path.endswith("published")]
    for end in ends:
        before = [at for at in writes if at < end]
        assert not before or any(before[-1] < at < end for at in syncs), "an end was published that was not synced"


def test_a_damaged_reservation_is_told_and_never_guessed(tmp_path: Path, boot: Callable[[], None]) -> None:
    log = DirectoryLog(tmp_path)
    topic = log.create_topic(Topic("t", uuid.uuid4().hex, 1, durability="os"))
    offsets_of(topic.append([Append.encoded(0, records([b"a"]))]))
    log.close()
    (tail(tmp_path).parent / "reserved").write_text("12x")
    boot()
    with pytest.raises(DamagedFrame, match="reserved"):
        DirectoryLog(tmp_path).topic("t").end(0)
    assert findings(tmp_path) == ["the checksum does not match"]


def test_an_unknown_durability_is_refused(tmp_path: Path) -> None:
    with pxrs.open(tmp_path) as hub, pytest.raises(InvalidTopic, match="choose from disk, os"):
        hub.create_topic("t", durability="none")
