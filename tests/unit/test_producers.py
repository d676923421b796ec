"""Which batches a partition knows (L4)."""

from __future__ import annotations

import json
import uuid

import pytest

from pxrs.errors import SequenceGap, UnknownProducer
from pxrs.log.batch import ANONYMOUS, Origin, gap_bytes, read_header
from pxrs.log.producers import BATCHES_KEPT, PRODUCERS_MAX, Incoming, Placement, Producers

A, B = uuid.UUID(int=1), uuid.UUID(int=2)
END = 1 << 61


def noted(*batches: tuple[uuid.UUID, int, int, int], now: float = 0.0) -> Producers:
    producers = Producers()
    for producer, epoch, sequence, offset in batches:
        producers.note(Origin(producer, epoch, sequence), offset, now)
    return producers


def check(producers: Producers, origin: Origin, since: int | None = None) -> int | None:
    """The offset of the batch if it is a duplicate, None if it is new."""
    (placed,) = producers.place([Incoming(origin, 1, since)], END)
    return None if placed.is_new else placed.offset


def test_l4_the_next_sequence_is_new_and_the_last_few_are_duplicates() -> None:
    producers = noted(*((A, 0, i, i * 10) for i in range(8)))
    assert check(producers, Origin(A, 0, 8)) is None
    assert [check(producers, Origin(A, 0, i)) for i in range(8 - BATCHES_KEPT, 8)] == [30, 40, 50, 60, 70]
    with pytest.raises(UnknownProducer):
        check(producers, Origin(A, 0, 2))
    with pytest.raises(SequenceGap):
        check(producers, Origin(A, 0, 9))


def test_l4_an_unknown_producer_begins_at_0() -> None:
    assert check(Producers(), Origin(A, 3, 0)) is None
    with pytest.raises(UnknownProducer):
        check(Producers(), Origin(A, 3, 1))


def test_l4_epochs() -> None:
    producers = noted((A, 1, 0, 0), (A, 1, 1, 5))
    assert check(producers, Origin(A, 2, 0)) is None
    with pytest.raises(SequenceGap):
        check(producers, Origin(A, 2, 2))
    with pytest.raises(UnknownProducer):
        check(producers, Origin(A, 0, 2))
    producers.note(Origin(A, 2, 0), 9, 0.0)
    assert check(producers, Origin(A, 2, 0)) == 9
    with pytest.raises(UnknownProducer):
        check(producers, Origin(A, 1, 1))


def test_l4_a_producer_whose_last_batches_lie_in_a_gap_counts_as_forgotten() -> None:
    """No sequence tells which batches were there. The next one may be stored again: it can be read nowhere."""
    producers = noted((A, 0, 0, 0), (A, 0, 1, 1))
    producers.note_all([read_header(gap_bytes(2, 3, place=7, stored_at=0), "file", 0)], 0.0)
    producers.note(Origin(B, 0, 0), 5, 0.0)
    kept = Producers()
    kept.load(json.loads(json.dumps(producers.dump())))
    for each in (producers, kept):
        assert check(each, Origin(A, 0, 1)) == 1
        assert check(each, Origin(A, 0, 2)) is None
        for refused in (Origin(A, 0, 3), Origin(A, 1, 2)):
            with pytest.raises(UnknownProducer) as forgotten:
                check(each, refused)
            assert forgotten.value.stored is None, "the Appender goes on under a new id"
        with pytest.raises(UnknownProducer):
            check(each, Origin(uuid.UUID(int=3), 0, 4))
        with pytest.raises(SequenceGap):
            check(each, Origin(B, 0, 2))


def test_l4_no_producer_is_never_remembered() -> None:
    producers = Producers()
    producers.note(ANONYMOUS, 3, 0.0)
    assert check(producers, ANONYMOUS) is None
    assert len(producers) == 0


def test_checking_changes_nothing() -> None:
    producers = noted((A, 0, 0, 0))
    before = producers.dump()
    check(producers, Origin(A, 0, 1))
    producers.place([Incoming(Origin(A, 0, 1), 3), Incoming(Origin(B, 0, 0), 3)], 1)
    assert producers.dump() == before


def test_a_recovery_may_note_twice() -> None:
    producers = noted((A, 1, 0, 0), (A, 1, 1, 5), (A, 1, 0, 0), (A, 1, 1, 5), (A, 0, 7, 1))
    assert producers.dump() == noted((A, 1, 0, 0), (A, 1, 1, 5)).dump()


def test_the_longest_silent_producer_is_forgotten_first() -> None:
    producers = noted(*((uuid.UUID(int=i + 1), 0, 0, i) for i in range(PRODUCERS_MAX)))
    producers.note(Origin(A, 0, 1), 5000, 0.0)
    producers.note(Origin(uuid.UUID(int=PRODUCERS_MAX + 1), 0, 0), 5001, 0.0)
    assert len(producers) == PRODUCERS_MAX
    assert check(producers, Origin(A, 0, 1)) == 5000
    with pytest.raises(UnknownProducer):
        check(producers, Origin(B, 0, 1))


def test_several_batches_are_placed_together() -> None:
    producers = noted((A, 0, 0, 0))
    origins = [Origin(A, 0, 0), Origin(A, 0, 1), ANONYMOUS, Origin(A, 0, 1), Origin(B, 0, 0)]
    assert producers.place([*map(Incoming, origins, (9, 2, 3, 2, 1))], 9) == [
        Placement(0, False),
        Placement(9, True),
        Placement(11, True),
        Placement(9, False),
        Placement(14, True),
    ]
    with pytest.raises(SequenceGap):
        producers.place([Incoming(Origin(A, 0, 1), 1), Incoming(Origin(A, 0, 3), 1)], 9)


def test_the_state_goes_through_json() -> None:
    producers = noted((A, 0, 0, 0), (B, 4, 0, 7), (A, 0, 1, 1 << 60))
    loaded = Producers()
    loaded.load(json.loads(json.dumps(producers.dump())))
    assert loaded.dump() == producers.dump()
    assert check(loaded, Origin(A, 0, 1)) == 1 << 60
    few = Producers(producers_max=1)
    few.load(producers.dump())
    assert check(few, Origin(A, 0, 1)) == 1 << 60
    assert len(few) == 1


def test_l4_who_was_forgotten_is_not_taken_for_one_who_begins() -> None:
    few = Producers(producers_max=1)
    few.note(Origin(A, 0, 0), 40, 0.0)
    few.note(Origin(B, 0, 0), 50, 0.0)
    assert few.forgotten == 40
    for since in (None, 0, 40):
        with pytest.raises(UnknownProducer):
            check(few, Origin(A, 0, 0), since)
    assert check(few, Origin(A, 0, 0), 41) is None, "nothing of those who were forgotten lies behind that"
    assert check(few, Origin(B, 0, 1)) is None, "one that is known needs to say nothing"
    assert check(few, ANONYMOUS) is None


def test_l4_the_silent_are_forgotten_and_a_later_state_still_knows_that() -> None:
    producers = noted((A, 0, 0, 7), now=100.0)
    producers.note(Origin(B, 0, 0), 8, 200.0)
    producers.forget_silent(100.0)
    assert len(producers) == 2
    producers.forget_silent(150.0)
    assert len(producers) == 1
    loaded = Producers()
    loaded.load(json.loads(json.dumps(producers.dump())))
    with pytest.raises(UnknownProducer):
        check(loaded, Origin(A, 0, 0), 7)
    assert check(loaded, Origin(A, 0, 0), 8) is None


def test_l4_what_was_forgotten_is_recalled_from_where_the_sender_began() -> None:
    few = Producers(producers_max=1)
    stored = [(Origin(A, 3, 0), 40), (Origin(A, 3, 1), 41), (Origin(B, 0, 0), 50)]
    for origin, offset in stored:
        few.note(origin, offset, 0.0)
    looks: list[int] = []

    def since(offset: int) -> list[tuple[Origin, int]] | None:
        looks.append(offset)
        return None if offset < 20 else [each for each in stored if each[1] >= offset]

    asked = [Incoming(Origin(A, 3, sequence), 1, 30) for sequence in range(3)]
    recalled = few.recall(asked, 51, since, 0.0)
    assert few.place(recalled, 51) == [Placement(40, False), Placement(41, False), Placement(51, True)]
    assert looks == [30], "once for all of them"
    stranger = [Incoming(Origin(uuid.UUID(int=9), 0, 0), 1, 30)]
    assert few.place(few.recall(stranger, 51, since, 0.0), 51) == [Placement(51, True)]
    too_old = [Incoming(Origin(uuid.UUID(int=9), 0, 0), 1, 10)]
    with pytest.raises(UnknownProducer):
        few.place(few.recall(too_old, 51, since, 0.0), 51)


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"producers": [["x", 0, [], 0]], "forgotten": 0},
        {"producers": [[A.hex, 0, [], 0]], "forgotten": 0},
        {"producers": [], "forgotten": None},
        {"producers": 3, "forgotten": 0},
    ],
)
def test_a_state_that_is_none_is_refused_and_leaves_the_old_one(bad: dict[str, object]) -> None:
    producers = noted((A, 0, 0, 0))
    with pytest.raises((KeyError, TypeError, ValueError)):
        producers.load(bad)
    assert check(producers, Origin(A, 0, 0)) == 0
