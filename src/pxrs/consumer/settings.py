"""Checks the arguments of `Consumer`, and converts them to what its parts take."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final, Literal

from pxrs import arguments
from pxrs.consumer.runner import ON_ERROR, ErrorPolicy
from pxrs.errors import InvalidGroup
from pxrs.group.positions import check_start
from pxrs.group.timings import Timings
from pxrs.log.contract import Source
from pxrs.model import microseconds_of
from pxrs.producer.producer import Producer

RETRIES_MAX: Final = 1_000_000
Start = Literal["earliest", "latest"] | datetime
"""Where a group without a checkpoint begins."""


def start_of(source: Source, start: Start, partition: int, first: int) -> int:
    """The offset at which a group without a checkpoint begins. Not before `first`: retention may be about to remove
    what lies before it. A function and no method, because the member refers to it and must not refer to the
    consumer."""
    check_start(source, partition, first)
    if start == "earliest":
        return max(first, source.start(partition))
    if start == "latest":
        return source.end(partition)
    assert isinstance(start, datetime)
    return max(first, source.offset_at(partition, microseconds_of(start)))


def check_choices(ack: object, until: object, on_trimmed: object, name: object, start: object) -> None:
    """Raise InvalidGroup if one of these arguments of the constructor is none of its choices."""
    arguments.choice(InvalidGroup, "ack", ack, ("auto", "manual"))
    arguments.choice(InvalidGroup, "until", until, ("end", None))
    arguments.choice(InvalidGroup, "on_trimmed", on_trimmed, ("error", "skip"))
    if name is not None:
        arguments.text(InvalidGroup, "name", name, "the member's name")
    if not isinstance(start, datetime):
        arguments.choice(InvalidGroup, "start", start, ("earliest", "latest"))
    elif start.tzinfo is None:
        raise InvalidGroup(f"start: the time {start} has no time zone; give one, such as UTC")


def error_policy(
    on_error: str, retries_max: int, retry_pause: float | timedelta, dead_letters: Callable[[], Producer] | None
) -> ErrorPolicy:
    """What `run` does when a handler raises. Raises InvalidGroup if an argument is out of its bounds."""
    arguments.functions(InvalidGroup, dead_letters=dead_letters)
    arguments.choice(InvalidGroup, "on_error", on_error, ON_ERROR)
    retries_max = arguments.whole(InvalidGroup, "retries_max", retries_max, 1, RETRIES_MAX)
    pause_s = arguments.seconds(InvalidGroup, "retry_pause", retry_pause, 0, arguments.DAY_S)
    return ErrorPolicy(on_error, retries_max, pause_s, dead_letters)


def check_loop(policy: ErrorPolicy, name: str) -> None:
    """Raise InvalidGroup if the policy needs to see what the handling of a message raises. A loop sees nothing of what
    its body raises. "raise" is what a loop does anyway, and "pause" is the default.

    name: of the method that returns the loop."""
    if policy.on_error in ("retry", "dead-letter"):
        raise InvalidGroup(
            f"on_error={policy.on_error!r} is for `run`, and has no effect in a loop over `{name}`, which does not see "
            "what its body raises: leave on_error out, and catch the error in the body, around a savepoint "
            "(db.begin_nested())"
        )


def timings_of(**given: float | timedelta | None) -> Timings:
    """The member's timings; those that are None have their defaults. `Timings` checks how short each may be."""
    return Timings(
        **{
            name: arguments.seconds(InvalidGroup, name, value, most=arguments.DAY_S)
            for name, value in given.items()
            if value is not None
        }
    )
