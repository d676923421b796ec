"""The journal of a storage node: what was synced is there after any end of the process, nothing else is trusted."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from pxrs.cluster.storage.format import record_bytes, seed_of
from pxrs.cluster.storage.opening import open_journal
from pxrs.errors import LedgerFenced, NodeFull, NodeUnreachable
from pxrs.testing import power
from tests.unit.cluster.stored import LEDGER, add, entry, opened, stored

SOAK = bool(os.environ.get("PXRS_SOAK"))
OTHER = LEDGER.replace("/0/0", "/1/0")


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.log"))


def test_entries_of_several_ledgers_are_there_again_after_a_restart(folder: Path) -> None:
    with opened(folder) as node:
        assert add(node, *(entry(number, ledger) for number in range(5) for ledger in (LEDGER, OTHER))) == [None] * 10
        assert add(node, entry(7)) == [None]
        before = node.page(LEDGER, -1, 100)
    for _ in range(2):
        with opened(folder) as node:
            assert stored(node) == [0, 1, 2, 3, 4, 7]
            assert stored(node, OTHER) == [0, 1, 2, 3, 4]
            now = node.page(LEDGER, -1, 100)
            assert (now.lac, now.fence, [each.head for each in now.places]) == (
                before.lac,
                before.fence,
                [each.head for each in before.places],
            )


def test_an_entry_that_is_there_is_answered_and_not_stored_again(folder: Path) -> None:
    with opened(folder) as node:
        assert add(node, entry(0), entry(0)) == [None, None]
        end = node.journal.end
        assert add(node, entry(0)) == [None]
        assert node.journal.end == end == record_bytes(LEDGER, 20)


def test_l3_a_torn_tail_is_cut_at_every_byte_of_the_last_batch(folder: Path) -> None:
    with opened(folder / "run") as node:
        assert add(node, entry(0), entry(1)) == [None, None]
        synced = node.journal.end
        assert add(node, entry(2, size=8), entry(3, size=8)) == [None, None]
        end = node.journal.end
    (last,) = segments(folder / "run")
    whole = last.read_bytes()
    for cut in range(synced, end + 1):
        for tail in (b"", bytes(end - cut)):  # the file ends there, or the rest of it was never written
            torn = folder / "torn"
            torn.mkdir()
            (torn / last.name).write_bytes(whole[:cut] + tail)
            with opened(torn, proof=synced) as node:
                assert node.is_proven
                half = synced + record_bytes(LEDGER, 8)
                expected = [0, 1, *([2] if cut >= half else []), *([3] if cut >= end else [])]
                assert stored(node) == expected, cut
                assert node.refuses is None
                assert add(node, entry(9)) == [None]
                left = node.journal.end
            with opened(torn, proof=left) as node:
                assert node.is_proven
                assert stored(node) == [*expected, 9], cut
            shutil.rmtree(torn)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("is_sealed", [False, True], ids=["last segment", "sealed segment"])
def test_c7_a_damaged_header_is_never_cut_and_what_it_held_is_unknown(folder: Path, is_sealed: bool) -> None:
    with opened(folder, segment_bytes=1 if is_sealed else 1 << 20) as node:
        for number in range(4):
            assert add(node, entry(number)) == [None]
        end = node.journal.end
    before = {path.name: path.stat().st_size for path in segments(folder)}
    damaged = segments(folder)[1 if is_sealed else 0]
    flip(damaged, 10 + (0 if is_sealed else record_bytes(LEDGER, 20)))
    with opened(folder, proof=end) as node:
        assert not node.is_proven
        node.begin_doubt([LEDGER], [LEDGER])
    for _ in range(2):
        with opened(folder, proof=end) as node:
            assert node.is_proven, "the damage is known, and so is what it leaves unknown"
            assert "damaged on the disk" in str(node.refuses)
            found = list(node.read(LEDGER, 0, 4, 1 << 20, None, heads=False))
            assert [each.head is not None for each in found] == [True, False, True, True, False]
            assert [each.is_unknown for each in found] == [False, True, False, False, True]
            assert isinstance(add(node, entry(9, OTHER))[0], NodeFull), "the disk may be failing"
            assert node.fence(LEDGER, 3).last == 3
            end = node.journal.end
    with opened(folder, proof=end) as node:
        assert add(node, entry(1, recovery=3)) == [None], "a recovery gives it what it has lost"
        assert stored(node) == [0, 1, 2, 3]
    left = {path.name: path.stat().st_size for path in segments(folder)}
    assert left[damaged.name] == before[damaged.name] if is_sealed else sum(left.values()) >= sum(before.values())


def test_a_damaged_body_is_unreachable_and_the_others_are_served(folder: Path) -> None:
    with opened(folder) as node:
        for number in range(3):
            assert add(node, entry(number)) == [None]
        end = node.journal.end
    flip(segments(folder)[0], 2 * record_bytes(LEDGER, 20) - 8)
    with opened(folder, proof=end) as node:
        assert node.is_proven, "it is known that the node had the entry"
        found = list(node.read(LEDGER, 0, 3, 1 << 20, None, heads=False))
        assert [each.head is not None for each in found] == [True, False, True, False]
        assert isinstance(found[1].error, NodeUnreachable)
        assert found[3].error is None
        assert node.refuses is None
        # Added again, as by whoever repairs copies, it is not answered as one that is there, but written again.
        assert add(node, entry(1)) == [None]
        assert stored(node) == [0, 1, 2]
        end = node.journal.end
        assert add(node, entry(1)) == [None]
        assert node.journal.end == end


def test_a_lost_segment_is_damage(folder: Path) -> None:
    with opened(folder, segment_bytes=1) as node:
        for number in range(4):
            assert add(node, entry(number)) == [None]
        end = node.journal.end
    for lost in (0, 1):
        copy = folder.with_name(f"{folder.name}-{lost}")
        shutil.copytree(folder, copy)
        segments(copy)[lost].unlink()
        with opened(copy, proof=end) as node:
            assert not node.is_proven
            assert node.refuses is not None
            node.begin_doubt([LEDGER], [LEDGER])
            left = node.journal.end
        with opened(copy, proof=left) as node:
            assert node.is_proven
            assert [each.head is None for each in node.read(LEDGER, 0, 3, 1 << 20, None, heads=False)] == [
                number == lost for number in range(4)
            ]
        shutil.rmtree(copy)


def test_a_record_inside_of_a_message_is_not_taken_for_one(folder: Path) -> None:
    with opened(folder / "a") as node:
        assert add(node, entry(0)) == [None]
        inner = segments(folder / "a")[0].read_bytes()
    with opened(folder / "b") as node:
        assert add(node, entry(0)) == [None]
    (last,) = segments(folder / "b")
    whole = last.read_bytes()
    last.write_bytes(whole + bytes(64) + inner * 3)  # a torn record whose body holds whole records
    with opened(folder / "b") as node:
        assert stored(node) == [0]
        assert node.refuses is None


def test_a_journal_of_another_node_is_not_read(folder: Path) -> None:
    with opened(folder) as node:
        for number in range(3):
            assert add(node, entry(number)) == [None]
    records: list[Any] = []
    open_journal(str(folder), seed_of("another"), records.append, []).active.close()
    assert records == []


# A disk that fails.


class Disk:
    """Makes writes or syncs of this process fail while `number` is set."""

    def __init__(self, patch: pytest.MonkeyPatch, call: str) -> None:
        self.number: int | None = None
        original = getattr(os, call)

        def failing(*arguments: Any) -> Any:
            if self.number is not None:
                raise OSError(self.number, os.strerror(self.number))
            return original(*arguments)

        patch.setattr(os, call, failing)


@pytest.mark.parametrize(
    ("call", "number"), [("pwritev", errno.ENOSPC), ("fdatasync", errno.EIO)], ids=["disk full", "failed sync"]
)
def test_l3_nothing_of_a_failed_batch_counts_and_the_node_goes_on_in_a_new_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    disk = Disk(monkeypatch, call)
    with opened(folder) as node:
        assert add(node, entry(0)) == [None]
        end = node.journal.end
        disk.number = number
        assert all(isinstance(answer, NodeFull) for answer in add(node, entry(1), entry(2)))
        with pytest.raises(NodeFull):
            node.fence(LEDGER, 3)
        assert node.refuses is not None
        assert os.strerror(number) in node.refuses
        assert stored(node) == [0]  # what was synced is served
        assert isinstance(add(node, entry(1))[0], NodeFull)
        disk.number = None
        if number == errno.EIO:
            assert node.fence(LEDGER, 1).last == 0  # a fence is tried, also while adds are refused
        assert node.refuses is not None
        node.look_at_room()
        node.page(LEDGER, -1, 1)  # answered behind the look
        assert node.refuses is None
        # The entry is not taken for one that is there: it is stored now, by a recovery, since the ledger may be fenced.
        assert add(node, entry(1, recovery=1)) == [None]
        assert node.journal.end > end
        assert len(segments(folder)) == 2
        assert segments(folder)[0].stat().st_size == end
    with opened(folder) as node:
        assert stored(node) == [0, 1]


def test_a_fence_that_was_not_synced_does_not_fence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, "fdatasync")
    with opened(folder) as node:
        assert add(node, entry(0)) == [None]
        assert node.fence(OTHER, 2).last == -1
        disk.number = errno.EIO
        for number in (3, 5):
            with pytest.raises(NodeFull):
                node.fence(OTHER, number)
        disk.number = None
        # Asked again, it is written again, and not answered because it seems to be there.
        end = node.journal.end
        assert node.fence(OTHER, 3).last == -1
        assert node.journal.end > end
        assert isinstance(add(node, entry(0, OTHER, recovery=2))[0], NodeFull | LedgerFenced)
    with opened(folder) as node:
        assert node.page(OTHER, -1, 1).fence == 3
        assert isinstance(add(node, entry(0, OTHER, recovery=2))[0], LedgerFenced)


def test_with_little_room_adds_are_refused_and_fences_are_not(folder: Path) -> None:
    with opened(folder, free_bytes_min=1 << 62) as node:
        assert "is full" in str(node.refuses)
        assert isinstance(add(node, entry(0))[0], NodeFull)
        assert node.fence(LEDGER, 1).last == -1


def test_c2_after_a_power_loss_at_any_moment_everything_that_was_answered_is_there(folder: Path) -> None:
    run = folder / "run"
    run.mkdir()
    dice = random.Random(18)
    with power.recorded(run) as tape, opened(run, segment_bytes=4_000) as node:
        for number in range(12):
            ledger = dice.choice((LEDGER, OTHER))
            some = [
                entry(10 * number + i, ledger, size=dice.choice((5, 700, 5_000))) for i in range(dice.randint(1, 3))
            ]
            assert add(node, *some) == [None] * len(some)
            tape.mark((ledger, [each.entry for each in some]))
        assert node.fence(OTHER, 2)
        tape.mark("fenced")
    moments = [dice.randrange(len(tape.events) + 1) for _ in range(1_500 if SOAK else 120)]
    for number, at in enumerate([len(tape.events), *moments]):
        after = folder / f"after-{number}"
        tape.restore(at, lambda count: dice.choice((0, count - 1, dice.randrange(count))), after)
        with opened(after) as node:
            assert node.refuses is None
            for mark in tape.marks(at):
                if mark == "fenced":
                    assert node.page(OTHER, -1, 1).fence == 2
                else:
                    ledger, entries = mark
                    assert set(entries) <= set(stored(node, ledger, last=200))
        shutil.rmtree(after)
