"""Which batches a partition knows (L4)."""

from __future__ import annotations

import json
import uuid

import pytest

from pxrs.errors import SequenceGap, UnknownProducer
from pxrs.log.batch import ANONYMOUS, Origin
from pxrs.log.producers import BATCHES_KEPT, PRODUCERS_MAX, Placed, Producers

A, B = uuid.UUID(int=1), uuid.UUID(int=2)


def noted(*batches: tuple[uuid.UUID, int, int, int]) -> Producers:
    producers = Producers()
    for producer, epoch, sequence, offset in batches:
        producers.note(Origin(producer, epoch, sequence), offset)
    return producers


def test_l4_the_next_sequence_is_new_and_the_last_few_are_duplicates() -> None:
    producers = noted(*((A, 0, i, i * 10) for i in range(8)))
    assert producers.check(Origin(A, 0, 8)) is None
    assert [producers.check(Origin(A, 0, i)) for i in range(8 - BATCHES_KEPT, 8)] == [30, 40, 50, 60, 70]
    with pytest.raises(UnknownProducer):
        producers.check(Origin(A, 0, 2))
    with pytest.raises(SequenceGap):
        producers.check(Origin(A, 0, 9))


def test_l4_an_unknown_producer_begins_at_0() -> None:
    assert Producers().check(Origin(A, 3, 0)) is None
    with pytest.raises(UnknownProducer):
        Producers().check(Origin(A, 3, 1))


def test_l4_epochs() -> None:
    producers = noted((A, 1, 0, 0), (A, 1, 1, 5))
    assert producers.check(Origin(A, 2, 0)) is None
    with pytest.raises(SequenceGap):
        producers.check(Origin(A, 2, 2))
    with pytest.raises(UnknownProducer):
        producers.check(Origin(A, 0, 2))
    producers.note(Origin(A, 2, 0), 9)
    assert producers.check(Origin(A, 2, 0)) == 9
    with pytest.raises(UnknownProducer):
        producers.check(Origin(A, 1, 1))


def test_l4_no_producer_is_never_remembered() -> None:
    producers = Producers()
    producers.note(ANONYMOUS, 3)
    assert producers.check(ANONYMOUS) is None
    assert len(producers) == 0


def test_checking_changes_nothing() -> None:
    producers = noted((A, 0, 0, 0))
    before = producers.dump()
    producers.check(Origin(A, 0, 1))
    producers.place([(Origin(A, 0, 1), 3), (Origin(B, 0, 0), 3)], 1)
    assert producers.dump() == before


def test_a_recovery_may_note_twice() -> None:
    producers = noted((A, 1, 0, 0), (A, 1, 1, 5), (A, 1, 0, 0), (A, 1, 1, 5), (A, 0, 7, 1))
    assert producers.dump() == noted((A, 1, 0, 0), (A, 1, 1, 5)).dump()


def test_the_longest_silent_producer_is_forgotten_first() -> None:
    producers = noted(*((uuid.UUID(int=i + 1), 0, 0, i) for i in range(PRODUCERS_MAX)))
    producers.note(Origin(A, 0, 1), 5000)
    producers.note(Origin(uuid.UUID(int=PRODUCERS_MAX + 1), 0, 0), 5001)
    assert len(producers) == PRODUCERS_MAX
    assert producers.check(Origin(A, 0, 1)) == 5000
    with pytest.raises(UnknownProducer):
        producers.check(Origin(B, 0, 1))


def test_several_batches_are_placed_together() -> None:
    producers = noted((A, 0, 0, 0))
    batches = [(Origin(A, 0, 0), 9), (Origin(A, 0, 1), 2), (ANONYMOUS, 3), (Origin(A, 0, 1), 2), (Origin(B, 0, 0), 1)]
    assert producers.place(batches, 9) == [
        Placed(0, False),
        Placed(9, True),
        Placed(11, True),
        Placed(9, False),
        Placed(14, True),
    ]
    with pytest.raises(SequenceGap):
        producers.place([(Origin(A, 0, 1), 1), (Origin(A, 0, 3), 1)], 9)


def test_the_state_goes_through_json() -> None:
    producers = noted((A, 0, 0, 0), (B, 4, 0, 7), (A, 0, 1, 1 << 60))
    loaded = Producers()
    loaded.load(json.loads(json.dumps(producers.dump())))
    assert loaded.dump() == producers.dump()
    assert loaded.check(Origin(A, 0, 1)) == 1 << 60
    few = Producers(producers_max=1)
    few.load(producers.dump())
    assert few.check(Origin(A, 0, 1)) == 1 << 60
    assert len(few) == 1


@pytest.mark.parametrize("bad", [{}, {"producers": [["x", 0, []]]}, {"producers": [[A.hex, 0, []]]}, {"producers": 3}])
def test_a_state_that_is_none_is_refused_and_leaves_the_old_one(bad: dict[str, object]) -> None:
    producers = noted((A, 0, 0, 0))
    with pytest.raises((KeyError, TypeError, ValueError)):
        producers.load(bad)
    assert producers.check(Origin(A, 0, 0)) == 0
