"""How often an item may be delivered, and how long one that came back waits. Values only; a queue keeps its own (Q3).

A delivery is counted, durably, before it happens, so that an item that kills its process each time is counted too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Final

from pxrs import arguments
from pxrs.errors import InvalidQueue

DELAY_S_MAX: Final = arguments.WAIT_S_MAX


@dataclass(frozen=True, slots=True)
class AtLeastOnce:
    """Again and again until it is done. Never a dead letter."""

    @property
    def deliveries_max(self) -> int | None:
        return None


@dataclass(frozen=True, slots=True)
class ConsumeTimes:
    """At most so many deliveries; an item that came back from the last one is a dead letter."""

    times: int

    def __post_init__(self) -> None:
        if isinstance(self.times, bool) or not isinstance(self.times, int) or not 1 <= self.times <= 1_000_000:
            raise InvalidQueue(
                f"ConsumeTimes: times is {arguments.shown(self.times)}; give a whole number from 1 to 1,000,000"
            )

    @property
    def deliveries_max(self) -> int | None:
        return self.times


@dataclass(frozen=True, slots=True)
class ConsumeOnce:
    """At most one delivery. For work that must not be begun twice; what fails is a dead letter."""

    @property
    def deliveries_max(self) -> int | None:
        return 1


Policy = AtLeastOnce | ConsumeTimes | ConsumeOnce


@dataclass(frozen=True, slots=True)
class FixedBackoff:
    """The same wait each time, in seconds or as a timedelta."""

    pause: float | timedelta

    def __post_init__(self) -> None:
        object.__setattr__(self, "pause", seconds("pause", self.pause))

    def delay_s(self, deliveries: int, random: Callable[[], float]) -> float:
        """How long an item waits that has been delivered so often; `random` gives numbers from 0 to 1."""
        return seconds("pause", self.pause)


@dataclass(frozen=True, slots=True)
class ExponentialBackoff:
    """`first`, then `factor` times as long each time, up to `cap`; each made up to `jitter` (a part of it) shorter or
    longer, but never longer than `cap`, so that what failed together does not come back together."""

    first: float | timedelta = 1.0
    factor: float = 2.0
    cap: float | timedelta = 300.0
    jitter: float = 0.2

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", seconds("first", self.first))
        object.__setattr__(self, "cap", seconds("cap", self.cap))
        for name, value, least, most in (("factor", self.factor, 1, 100), ("jitter", self.jitter, 0, 1)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise InvalidQueue(f"backoff: {name} is {value!r}; choose a number from {least} to {most}")

    def delay_s(self, deliveries: int, random: Callable[[], float]) -> float:
        # A hundred doublings are beyond every cap, and a power beyond that beyond every float.
        grown = seconds("first", self.first) * self.factor ** min(max(deliveries - 1, 0), 100)
        cap = seconds("cap", self.cap)
        middle = min(grown, cap)
        shortest, longest = middle * (1 - self.jitter), min(middle * (1 + self.jitter), cap)
        return longest - (longest - shortest) * (1 - random())


Backoff = FixedBackoff | ExponentialBackoff

_KINDS: Final[dict[str, type[Any]]] = {
    "at-least-once": AtLeastOnce,
    "consume-times": ConsumeTimes,
    "consume-once": ConsumeOnce,
    "fixed": FixedBackoff,
    "exponential": ExponentialBackoff,
}


def dump(value: Policy | Backoff) -> dict[str, Any]:
    """As a queue's settings keep it."""
    kind = next(name for name, type_ in _KINDS.items() if isinstance(value, type_))
    return {"kind": kind, **asdict(value)}


def load(found: dict[str, Any]) -> Any:
    settings = dict(found)
    return _KINDS[settings.pop("kind")](**settings)


def seconds(name: str, value: float | timedelta) -> float:
    """A duration as it was given, checked."""
    return arguments.seconds(InvalidQueue, name, value, 0, DELAY_S_MAX)
