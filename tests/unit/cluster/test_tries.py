"""When a partition that could not be opened is tried again."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("grpc")

from pxrs.cluster.broker.tries import QUICK_S, RETRY_S, RETRY_S_MAX, UNHEARD_S_MAX, Tries


def failing(tries: Tries, seconds: float, *, took_s: float = 0.0, pause_s_max: float = RETRY_S_MAX) -> list[float]:
    """Tries that fail, from now on for so long: when each began."""
    now, begun = 0.0, []
    while now < seconds:
        assert tries.may_begin(now, "nodes")
        tries.begin(now, "nodes")
        begun.append(now)
        now += took_s + tries.failed(now + took_s, pause_s_max)
    return begun


def test_tries_are_quick_at_first_and_then_back_off_to_a_bound() -> None:
    begun = failing(Tries(), 60)
    pauses = [after - before for before, after in itertools.pairwise(begun)]
    assert pauses[:6] == [RETRY_S] * 6, "a fail-over is not slower"
    assert begun[6] == QUICK_S
    assert pauses[6:11] == [1.0, 2.0, 4.0, 8.0, 10.0]
    assert pauses[-1] == RETRY_S_MAX


def test_tries_that_hear_nothing_from_nodes_are_repeated_soon_for_as_long_as_it_takes() -> None:
    begun = failing(Tries(), 60, pause_s_max=UNHEARD_S_MAX)
    assert max(after - before for before, after in itertools.pairwise(begun)) == UNHEARD_S_MAX


def test_nothing_begins_during_a_try_or_before_its_time() -> None:
    tries = Tries()
    assert tries.may_begin(0.0, "nodes")
    tries.begin(0.0, "nodes")
    assert not tries.may_begin(100.0, "other nodes"), "a thread is opening it"
    tries.failed(100.0)
    assert not tries.may_begin(100.4, "nodes")
    assert tries.may_begin(100.5, "nodes")


def test_a_change_causes_a_try_at_once_and_the_pauses_begin_anew() -> None:
    tries = Tries()
    begun = failing(tries, 60)
    now = begun[-1] + 0.1
    assert not tries.may_begin(now, "nodes")
    assert tries.may_begin(now, "other nodes")
    tries.begin(now, "other nodes")
    assert tries.failed(now) == pytest.approx(RETRY_S)
    assert not tries.may_begin(now + 0.1, "other nodes"), "the same change causes one try"


def test_a_change_during_a_try_causes_another_one_after_it() -> None:
    tries = Tries()
    failing(tries, 60)
    tries.begin(100.0, "nodes")
    tries.failed(100.1)
    assert tries.may_begin(100.1, "nodes as they have been since the try began")


def test_a_long_try_is_repeated_soon() -> None:
    tries = Tries()
    begun = failing(tries, 300, took_s=30.0)
    assert begun[-1] - begun[-2] == pytest.approx(30.0 + RETRY_S), "it has waited for storage nodes itself"


def test_errors_of_the_registry_are_tried_again_soon() -> None:
    tries = Tries()
    failing(tries, 60)
    for now in (100.0, 110.0, 120.0):
        tries.begin(now, "nodes")
        assert tries.failed(now, starts_anew=True) == RETRY_S
