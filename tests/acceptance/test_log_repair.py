"""`pxrs check --repair`: what the checker finds is mended, no byte is thrown away, and readers and writers go on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pxrs.log.contract import Append
from pxrs.log.directory.check import Finding, check
from pxrs.log.directory.repair import plan
from pxrs.log.directory.topic import DirectoryTopic
from pxrs.log.outcomes import offsets_of
from pxrs.testing.command import Call, run_here
from pxrs.testing.log_contract import records
from tests.acceptance.directory_topics import new_topic, opened
from tests.acceptance.test_log_damage import file, flip, positions, segment, send

COUNT = 12


def value(number: int) -> bytes:
    return b"%05d" % number + b"x" * 300


def a_topic(path: Path, **options: object) -> DirectoryTopic:
    """Twelve messages, about five in a segment, in frames of their own."""
    topic = new_topic(path, segment_bytes=4_096, **options)
    send(topic, *map(value, range(COUNT)))
    return topic


def findings(path: Path) -> list[Finding]:
    return [finding for checked in check(path) for finding in checked.findings]


def all_bytes(path: Path) -> set[bytes]:
    """The content of every file in the partition's folder."""
    return {each.read_bytes() for each in path.rglob("partition-0/*") if each.name not in ("lock", "published")}


def repaired(path: Path) -> list[str]:
    """Do all that can be done; what was done."""
    return [step.perform() for step in plan(path, findings(path)) if step.is_possible]


def read_on(topic: DirectoryTopic) -> dict[int, bytes]:
    """All messages by offset, as a consumer reads them: damage raises DamagedFrame."""
    found: dict[int, bytes] = {}
    offset, end = topic.start(0), topic.end(0)
    while offset < end:
        for batch in topic.read(0, offset):
            assert batch.base_offset == offset
            if batch.records.num_rows:
                found |= enumerate(batch.records.column("value").to_pylist(), offset)
            offset = batch.next_offset
    return found


def bases(topic: DirectoryTopic) -> list[int]:
    return sorted(int(name[:20]) for name in os.listdir(segment(topic).parent) if name.endswith(".log"))


def of_sealed(topic: DirectoryTopic) -> Path:
    return segment(topic, bases(topic)[1])


def of_last(topic: DirectoryTopic) -> Path:
    return segment(topic, bases(topic)[-1])


@pytest.mark.parametrize("choose", [of_sealed, of_last], ids=["sealed", "last"])
@pytest.mark.parametrize("frame", [0, 1, -1], ids=["first frame", "second frame", "last frame"])
def test_a_damaged_frame_becomes_a_gap_and_all_others_stay(
    choose: Callable[[DirectoryTopic], Path], frame: int, tmp_path: Path
) -> None:
    topic = a_topic(tmp_path)
    reader = opened(tmp_path)
    assert len(read_on(reader)) == COUNT
    path = choose(topic)
    lost = int(path.name[:20]) + range(len(positions(path)))[frame]
    flip(path, positions(path)[frame] + 300)
    before = all_bytes(tmp_path)
    assert len(findings(tmp_path)) == 1
    assert findings(tmp_path)[0].file == str(path.resolve())
    (step,) = plan(tmp_path, findings(tmp_path))
    assert (step.lost, step.is_possible) == (1, True)
    assert all_bytes(tmp_path) == before, "a plan changes nothing"
    step.perform()
    assert findings(tmp_path) == []
    assert before <= all_bytes(tmp_path), "bytes were thrown away"
    expected = {number: value(number) for number in range(COUNT) if number != lost}
    for each in (opened(tmp_path), topic, reader):  # also those that were open before
        assert read_on(each) == expected
    for each in (topic, opened(tmp_path)):
        end = each.end(0)
        assert offsets_of(each.append([Append.encoded(0, records([b"more"]))])) == [end]
    assert findings(tmp_path) == []
    assert read_on(reader)[COUNT] == b"more"


def test_two_damaged_stretches_of_a_segment_become_two_gaps(tmp_path: Path) -> None:
    topic = a_topic(tmp_path)
    path = of_sealed(topic)
    base, places = int(path.name[:20]), positions(path)
    for at in (1, 3):
        flip(path, places[at] + 300)
    repaired(tmp_path)
    assert findings(tmp_path) == []
    assert read_on(opened(tmp_path)).keys() == set(range(COUNT)) - {base + 1, base + 3}


@pytest.mark.parametrize("at", [0, 1, -1], ids=["first", "middle", "last"])
def test_a_missing_segment_becomes_a_gap(at: int, tmp_path: Path) -> None:
    topic = a_topic(tmp_path)
    there = bases(topic)
    base = there[at]
    lost = range(base, COUNT if at == -1 else there[there.index(base) + 1])
    os.unlink(segment(topic, base))
    assert findings(tmp_path)
    repaired(tmp_path)
    assert findings(tmp_path) == []
    assert read_on(opened(tmp_path)).keys() == set(range(COUNT)) - set(lost)
    send(opened(tmp_path), b"more")
    assert opened(tmp_path).end(0) == COUNT + 1
    assert findings(tmp_path) == []


def test_published_bytes_that_are_missing_become_a_gap(tmp_path: Path) -> None:
    topic = a_topic(tmp_path)
    path = of_last(topic)
    os.truncate(path, positions(path)[-1] + 50)
    repaired(tmp_path)
    assert findings(tmp_path) == []
    assert read_on(opened(tmp_path)).keys() == set(range(COUNT - 1))
    send(opened(tmp_path), b"more")
    assert opened(tmp_path).end(0) == COUNT + 1


def test_after_a_boot_damage_in_the_last_segment_is_repaired(tmp_path: Path, boot: Callable[[], None]) -> None:
    topic = a_topic(tmp_path)
    path = of_last(topic)
    base = int(path.name[:20])
    flip(path, positions(path)[0] + 300)
    boot()
    assert len(findings(tmp_path)) == 1
    repaired(tmp_path)
    assert findings(tmp_path) == []
    assert read_on(opened(tmp_path)).keys() == set(range(COUNT)) - {base}


@pytest.mark.parametrize("suffix", [".index", ".producers"])
def test_files_that_can_be_made_again_are_renamed(suffix: str, tmp_path: Path) -> None:
    topic = a_topic(tmp_path)
    read_on(topic)
    path = next(each for each in sorted(segment(topic).parent.iterdir()) if each.name.endswith(suffix))
    flip(path, 20)
    damaged = path.read_bytes()
    (done,) = repaired(tmp_path)
    assert Path(done.removeprefix("renamed to ")).read_bytes() == damaged
    assert findings(tmp_path) == []
    assert len(read_on(opened(tmp_path))) == COUNT


def test_a_published_end_of_another_partition_is_renamed_and_found_again(tmp_path: Path) -> None:
    topic = a_topic(tmp_path)
    other = new_topic(tmp_path, "u")
    send(other, b"x")
    file(topic, "published").write_bytes(file(other, "published").read_bytes())
    repaired(tmp_path)
    assert findings(tmp_path) == []
    assert len(read_on(opened(tmp_path))) == COUNT


def test_what_cannot_be_repaired_is_said_and_left_alone(tmp_path: Path) -> None:
    topic = a_topic(tmp_path)
    flip(topic._folder.path / "topic.json", 30)
    before = all_bytes(tmp_path)
    (step,) = plan(tmp_path, findings(tmp_path))
    assert not step.is_possible
    assert step.action.startswith("cannot be repaired")
    assert all_bytes(tmp_path) == before


@pytest.fixture
def pxrs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    return lambda *arguments: run_here(monkeypatch, capsys, tuple(map(str, arguments)))


def test_the_command_shows_the_plan_first_and_does_it_only_if_told_to(pxrs: Call, tmp_path: Path) -> None:
    topic = a_topic(tmp_path)
    path = of_sealed(topic)
    flip(path, positions(path)[1] + 300)
    before = all_bytes(tmp_path)
    asked = pxrs("check", tmp_path, "--repair").unwrapped()
    assert (asked.code, "plan: continue in" in asked.out, "--yes" in asked.errors) == (2, True, True)
    assert all_bytes(tmp_path) == before
    planned, performed, summary = pxrs("check", tmp_path, "--repair", "--yes", "--json").rows()
    assert (planned["lost_offsets"], planned["done"], summary["findings"]) == (1, None, 0)
    assert "was written" in performed["done"]
    assert pxrs("check", tmp_path).code == 0
    (repaired,) = pxrs("audit", "--at", tmp_path, "--json").rows()
    assert (repaired["name"], repaired["fields"]["what"]) == ("audit.repair", performed["done"])
