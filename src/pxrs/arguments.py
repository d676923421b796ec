"""Checks of the arguments of public functions. Each raises an error that names the argument, shows the value and says
what is allowed, so that an invalid value does not cause an unrelated error later, or none.

Each takes the class of the error to raise, the argument's name and its value, and returns the value in its plain form
(an int, a float)."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Final

from pxrs.errors import InvalidArgument

Kind = type[InvalidArgument]
DAY_S: Final = 86_400.0
WAIT_S_MAX: Final = 366 * DAY_S
"""The longest wait that can be asked for; None, where it is allowed, waits for ever."""
_SHOWN_MAX: Final = 100


def shown(given: object) -> str:
    """The `repr` of the value, cut if it is long."""
    try:
        text = repr(given)
    except ValueError:  # an int with thousands of digits, which Python does not print
        text = f"a very large {type(given).__name__}"
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."


def whole(kind: Kind, name: str, given: Any, least: int, most: int | None = None) -> int:
    """A whole number in this range. True and False are refused, although Python has them as numbers."""
    try:
        number = operator.index(given)
    except TypeError:
        number = None
    if number is None or isinstance(given, bool) or number < least or (most is not None and number > most):
        span = f"of at least {least:,}" if most is None else f"from {least:,} to {most:,}"
        raise kind(f"{name} is {shown(given)}; it must be a whole number {span}")
    return number


def seconds(
    kind: Kind, name: str, given: Any, least: float = 0.0, most: float = WAIT_S_MAX, *, above: bool = False
) -> float:
    """A duration in seconds, or as a timedelta, in this range; above: it must be more than `least`."""
    number = given.total_seconds() if isinstance(given, timedelta) else given
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not least <= number <= most or (above and number == least):
        span = f"more than {least:g} s and at most" if above else f"from {least:g} s to"
        raise kind(f"{name} is {shown(given)}; it must be seconds or a timedelta, {span} {_span(most)}")
    return float(number)


def flag(kind: Kind, name: str, given: Any) -> bool:
    """True or False. Other values are refused: the text "false" would count as true."""
    if not isinstance(given, bool):
        raise kind(f"{name} is {shown(given)}; it must be True or False")
    return given


def text(kind: Kind, name: str, given: Any, what: str) -> str:
    if not isinstance(given, str):
        raise kind(f"{name} is {shown(given)}; it must be a str: {what}")
    return given


def choice(kind: Kind, name: str, given: Any, choices: Sequence[Any]) -> None:
    if not any(given is each or (type(given) is type(each) and given == each) for each in choices):
        raise kind(f"{name} is {shown(given)}; choose from {', '.join(map(repr, choices))}")


def functions(kind: Kind, **given: Any) -> None:
    """Check that each value is callable or None."""
    for name, each in given.items():
        if each is not None and not callable(each):
            raise kind(f"{name} is {shown(each)}; it must be a function or None")


def partition(kind: Kind, topic: str, given: Any, partitions: int) -> int:
    """The number of a partition that the topic has."""
    try:
        return whole(kind, "partition", given, 0, partitions - 1)
    except kind:
        raise kind(f"{topic} has no partition {shown(given)}; it has 0 to {partitions - 1}") from None


def ids(kind: Kind, name: str, given: Any) -> set[str] | None:
    """A set of ids from several texts or a single one. None means all ids, and stays None."""
    if given is None:
        return None
    found = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    for each in found:
        if not isinstance(each, str):
            raise kind(f"{name} has {shown(each)}; it must be ids, each a str, or None for all")
    return set(found)


def _span(most: float) -> str:
    if most == DAY_S:
        return "1 day"
    return "1 year" if most == WAIT_S_MAX else f"{most:g} s"
