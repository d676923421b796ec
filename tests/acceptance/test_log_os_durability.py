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
from pxrs.log.check import check
from pxrs.log.contract import Append
from pxrs.log.directory import DirectoryLog
from pxrs.log.partition import RESERVED_OFFSETS
from pxrs.model import Topic
from pxrs.testing import power
from pxrs.testing.log_contract import records

LOSSES = 20_000 if os.environ.get("PXRS_SOAK") else 400
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


def test_no_append_is_synced_and_offsets_are_reserved_many_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs: list[int] = []
    sync = disk.sync_data
    monkeypatch.setattr(disk, "sync_data", lambda descriptor: (syncs.append(descriptor), sync(descriptor)))
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
            (offset,) = topic.append([Append(0, records(values))])
            tape.mark((offset, values))
            tape.mark((int(tail(root).stem), []))
    assert int(tail(root).stem) > 0
    return tape


def test_l1_whatever_a_power_loss_takes_the_rest_is_right_and_no_offset_is_given_again(
    tape: power.Tape, fast: Path, boot: Callable[[], None]
) -> None:
    shortest = longest = 0
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
        batches = topic.read(0, 0, 1 << 30) if topic.end(0) else []
        found = [value for batch in batches for value in batch.records.column("value").to_pylist()]
        # The append that was under way may be there too, though nobody was told.
        assert found[: len(sent)] == sent[: len(found)], f"seed {seed}"
        assert len(found) >= sealed, f"seed {seed}: what was sealed is lost"
        assert topic.append([Append(0, records([b"after"]))])[0] >= len(sent), f"seed {seed}: an offset was given again"
        assert not findings(target), f"seed {seed}"
        shortest, longest = shortest + (len(found) < len(sent)), longest + (len(found) >= len(sent) > 0)
        log.close()
        shutil.rmtree(target)
    assert shortest > LOSSES // 10, "losses were met"
    assert longest > LOSSES // 10


def test_a_damaged_reservation_is_told_and_never_guessed(tmp_path: Path, boot: Callable[[], None]) -> None:
    log = DirectoryLog(tmp_path)
    topic = log.create_topic(Topic("t", uuid.uuid4().hex, 1, durability="os"))
    topic.append([Append(0, records([b"a"]))])
    log.close()
    (tail(tmp_path).parent / "reserved").write_text("12x")
    boot()
    with pytest.raises(DamagedFrame, match="reserved"):
        DirectoryLog(tmp_path).topic("t").end(0)
    assert findings(tmp_path) == ["the checksum does not match"]


def test_an_unknown_durability_is_refused(tmp_path: Path) -> None:
    with pxrs.open(tmp_path) as hub, pytest.raises(InvalidTopic, match="choose from disk, os"):
        hub.create_topic("t", durability="none")
