"""An exception as text: bounded, encodable, with the frames that matter."""

from __future__ import annotations

import random

import pytest

from pxrs.failures import (
    TEXT_CHARACTERS_MAX,
    TRACEBACK_CHARACTERS_MAX,
    Failure,
    failure_of,
    last_lines,
    place_of,
)
from pxrs.handler import check_result


def raised(what: BaseException, depth: int = 0) -> BaseException:
    def go(left: int) -> None:
        if left:
            go(left - 1)
        raise what

    with pytest.raises(type(what)) as caught:
        go(depth)
    return caught.value


class Nameless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x" * 1_000_000),
        ValueError("line\n" * 100_000),
        ValueError("caf\udce9 \U0001f600 \x00" * 1_000),
        ExceptionGroup("many", [ValueError("y" * 10_000)] * 1_000),
        Nameless(),
        type("N" * 10_000, (Exception,), {})(),
    ],
    ids=["long", "lines", "surrogates", "group", "nameless", "long name"],
)
def test_whatever_is_raised_fits_and_can_be_stored(error: Exception) -> None:
    try:
        raise KeyError("z" * 100_000) from raised(error, 200)
    except KeyError as second:
        failures = [failure_of(raised(error, 200)), failure_of(second)]
    for failure in failures:
        assert 0 < len(failure.text) <= TEXT_CHARACTERS_MAX
        assert 0 < len(failure.traceback) <= TRACEBACK_CHARACTERS_MAX
        assert 0 < len(failure.type) <= 200
        for text in (failure.text, failure.traceback, failure.type):
            text.encode()


def test_the_frames_that_raised_are_kept_and_those_of_pxrs_that_called_them_are_not() -> None:
    async def handler() -> None:
        pass

    with pytest.raises(TypeError) as caught:
        check_result(handler())
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # type: ignore[union-attr] # as the runner calls it
    assert "check_result" in failure_of(caught.value).traceback, "the last frame stays, whosever it is"
    failure = failure_of(raised(ValueError("no"), 100))
    assert failure.traceback.startswith("Traceback (most recent call last):")
    assert failure.traceback.endswith("ValueError: no")
    assert "in go\n" in failure.traceback
    assert (failure.text, failure.type) == ("ValueError: no", "ValueError")


def test_a_second_error_is_told_with_the_first() -> None:
    failure = failure_of(raised(ValueError("v" * 5_000))).followed_by("could not be sent", KeyError("k"))
    assert failure.text.startswith("ValueError: vvv")
    assert failure.text.endswith(" ...; could not be sent: KeyError: 'k'")
    assert len(failure.text) <= TEXT_CHARACTERS_MAX
    assert Failure("a").followed_by("b", KeyError("c")).text == "a; b: KeyError: 'c'"


def test_the_last_lines_are_kept_in_any_room() -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    for _ in range(2_000):
        text = "\n".join("x" * chance.randrange(60) for _ in range(chance.randrange(20)))
        room = chance.randrange(200)
        kept = last_lines(text, room)
        assert len(kept) <= room, f"SEED={seed}"
        if kept != text and kept:
            first, _, rest = kept.partition("\n")
            assert text.endswith(rest), f"SEED={seed}"
            left_out = len(text.split("\n")) - (len(rest.split("\n")) if "\n" in kept else 0)
            assert first == f"... {left_out} lines omitted", f"SEED={seed}"


def test_failures_are_the_same_if_class_and_line_are() -> None:
    one, two = raised(ValueError("1"), 3), raised(ValueError("2"))
    assert place_of(one) == place_of(two)
    assert place_of(one) != place_of(raised(KeyError("1")))
    assert place_of(ValueError("never raised")) == (ValueError, None)
