"""The fenced checkpoint as a value: what it expects and writes, and what each outcome of its commit means (G4, G5)."""

from __future__ import annotations

import pytest

from pxrs import registry as registries
from pxrs.errors import Conflict, OutcomeUnknown
from pxrs.group.checkpoints import CheckpointWrite, FencedWrite, Holding, Outcome, Settled
from pxrs.group.lane import Lane
from pxrs.group.records import Checkpoint, Keys, Owner

KEYS = Keys("g")
OWNER, CHECKPOINT = KEYS.owner("t", 3), KEYS.checkpoint("t", 3)


SEVEN = Checkpoint(7)


def write(checkpoint: Checkpoint | None = SEVEN, owner: Owner | None = None) -> CheckpointWrite:
    return CheckpointWrite(KEYS, ("t", 3), 41, 12, checkpoint, owner)


def holding(done: int = 7, by: str = "w", checkpoint_version: int | None = 12) -> Holding:
    lane = Lane(3, 5, 4)
    lane.done = done
    return Holding(5, 41, Checkpoint(4, 1.0, by, 5), checkpoint_version, lane)


def test_g4_it_expects_the_owner_and_its_own_version() -> None:
    assert write().expect == {OWNER: 41, CHECKPOINT: 12}
    assert write().put == {CHECKPOINT: Checkpoint(7).dump()}
    assert write().delete == []


def test_g5_a_release_writes_checkpoint_and_owner_together() -> None:
    assert write(owner=Owner(None, 6)).put == {CHECKPOINT: Checkpoint(7).dump(), OWNER: Owner(None, 6).dump()}


def test_a_deletion_removes_the_checkpoint_and_keeps_the_owner_key() -> None:
    gone = write(None, Owner(None, 6))
    assert (gone.put, gone.delete) == ({OWNER: Owner(None, 6).dump()}, [CHECKPOINT])


@pytest.mark.parametrize(
    ("outcome", "settled"),
    [
        ({CHECKPOINT: 13}, Settled(Outcome.WRITTEN, 13)),
        (Conflict([OWNER]), Settled(Outcome.LOST, None)),
        (Conflict([CHECKPOINT, OWNER]), Settled(Outcome.LOST, None)),
        (Conflict([CHECKPOINT]), Settled(Outcome.STALE, None)),
        (Conflict(["queues/q/turn"]), Settled(Outcome.NOT_WRITTEN, 12)),
        (OutcomeUnknown("no answer"), Settled(Outcome.UNKNOWN, None)),
    ],
    ids=["written", "owner differs", "both differ", "checkpoint differs", "others differ", "unknown"],
)
def test_what_an_outcome_means(outcome: dict[str, int] | Conflict | OutcomeUnknown, settled: Settled) -> None:
    ((part, found),) = FencedWrite([write()]).settle(outcome)
    assert (part, found) == (write(), settled)


def test_several_are_written_together_or_not_at_all() -> None:
    with registries.open("memory:") as registry:
        versions = registry.commit(put={OWNER: b"", KEYS.owner("t", 4): b""})
        parts = [
            CheckpointWrite(KEYS, ("t", 3), versions[OWNER], 0, Checkpoint(7)),
            CheckpointWrite(KEYS, ("t", 4), versions[OWNER] + 1, 0, Checkpoint(8)),
        ]
        both = FencedWrite(parts)
        with pytest.raises(Conflict) as raised:
            registry.commit(both.expect, both.put)
        assert both.lost(raised.value) == [parts[1]]
        assert registry.get(CHECKPOINT) is None


def test_x10_a_holding_writes_what_is_done_and_never_goes_back() -> None:
    assert holding(done=7).write(KEYS, ("t", 3), 2.0, "w").checkpoint == Checkpoint(7, 2.0, "w", 5)
    assert holding(done=2).write(KEYS, ("t", 3), 2.0, "w").checkpoint == Checkpoint(4, 2.0, "w", 5)


def test_what_a_person_has_set_stays_as_it_is_until_the_owner_comes_further() -> None:
    assert holding(done=4, by="reset").write(KEYS, ("t", 3), 2.0, "w").checkpoint == Checkpoint(4, 1.0, "reset", 5)
    assert holding(done=5, by="reset").write(KEYS, ("t", 3), 2.0, "w").checkpoint == Checkpoint(5, 2.0, "w", 5)


def test_x9_a_release_has_the_next_epoch() -> None:
    assert holding().write(KEYS, ("t", 3), 2.0, "w", is_last=True).owner == Owner(None, 6)


def test_r5_a_checkpoint_of_unknown_version_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="not known"):
        holding(checkpoint_version=None).write(KEYS, ("t", 3), 2.0, "w")


def test_a_holding_notes_what_became_of_its_write() -> None:
    held = holding()
    release = held.write(KEYS, ("t", 3), 2.0, "w", is_last=True)
    held.settle(release, Settled(Outcome.UNKNOWN, None))
    assert (held.checkpoint_version, held.may_be_released) == (None, True)
    held.checkpoint_version = 12
    plain = held.write(KEYS, ("t", 3), 3.0, "w")
    held.settle(plain, Settled(Outcome.STALE, None))
    assert held.checkpoint_version is None
    held.settle(plain, Settled(Outcome.WRITTEN, 14))
    assert (held.checkpoint, held.checkpoint_version, held.may_be_released) == (plain.checkpoint, 14, False)
