"""Durations and sizes as people give them to options: `90`, `5m`, `7d`; `1000000`, `512MiB`, `10GB`."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Final

import typer

DURATION_FORMS: Final = "seconds, or a number with s, m, h, d or w, such as 90, 90s, 5m, 12h, 7d or 2w"
SIZE_FORMS: Final = "bytes, or a number with kB, MB, GB or TB, or KiB, MiB, GiB or TiB, such as 1000000, 10GB or 512MiB"
UNITS_S: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 7 * 86_400}
_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhdw])")
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(?:([kmgt])(i?))?b", re.IGNORECASE)


def seconds_of(text: str) -> float:
    """The seconds of a duration. Raises ValueError, which lists the forms."""
    found = _DURATION.fullmatch(text.strip())
    try:
        return float(text) if found is None else float(Fraction(found[1]) * UNITS_S[found[2]])
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no duration: give {DURATION_FORMS}") from None


def bytes_of_size(text: str) -> int:
    """The bytes of a size. Raises ValueError, which lists the forms."""
    found = _SIZE.fullmatch(text.strip())
    try:
        if found is None:
            return int(text)
        power = 0 if found[2] is None else "kmgt".index(found[2].lower()) + 1
        size = Fraction(found[1]) * (1024 if found[3] else 1000) ** power
        return int(text) if size.denominator != 1 else int(size)
    except ValueError:
        raise ValueError(f"{text!r} is no size: give {SIZE_FORMS}") from None


def duration(least: float | None = None, most: float | None = None) -> Callable[[str | float], float]:
    """The parser of an option that takes a duration, from `least` to `most` seconds."""

    def parse(given: str | float) -> float:
        try:
            seconds = seconds_of(given) if isinstance(given, str) else given  # a number is the option's default
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        # NaN is refused too.
        if (least is not None and not seconds >= least) or (most is not None and not seconds <= most):
            span = f"at least {least:g}" if most is None else f"from {least or 0:g} to {most:g}"
            raise typer.BadParameter(f"{given} is not {span} seconds")
        return seconds

    return parse


def size(given: str | int) -> int:
    """The parser of an option that takes a size."""
    try:
        return bytes_of_size(given) if isinstance(given, str) else given
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
