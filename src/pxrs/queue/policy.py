"""How often an item may be delivered (policy), and how long a returned item waits (backoff). Both belong to the queue
and are stored in its settings (Q3).

A delivery is counted, durably, before the program gets the item, so that an item whose handler kills the process is
counted as well."""

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
    """An item is delivered until a transaction that took it is committed. It never becomes a dead letter."""

    @property
    def deliveries_max(self) -> int | None:
        return None


@dataclass(frozen=True, slots=True)
class ConsumeTimes:
    """At most `times` deliveries. An item that is returned after the last one becomes a dead letter."""

    times: int

    def __post_init__(self) -> None:
        if isinstance(self.times, bool) or not isinstance(self.times, int) or not 1 <= self.times <= 1_000_000:
            raise InvalidQueue(
                f"ConsumeTimes: times must be a whole number from 1 to 1,000,000, not {arguments.shown(self.times)}"
            )

    @property
    def deliveries_max(self) -> int | None:
        return self.times


@dataclass(frozen=True, slots=True)
class ConsumeOnce:
    """At most one delivery, for work that must not be started twice. An item that is returned becomes a dead letter."""

    @property
    def deliveries_max(self) -> int | None:
        return 1


Policy = AtLeastOnce | ConsumeTimes | ConsumeOnce


@dataclass(frozen=True, slots=True)
class FixedBackoff:
    """A returned item waits for `pause` each time: seconds, or a timedelta."""

    pause: float | timedelta

    def __post_init__(self) -> None:
        object.__setattr__(self, "pause", seconds("pause", self.pause))

    def delay_s(self, deliveries: int, random: Callable[[], float]) -> float:
        """How long an item waits after so many deliveries. random: returns numbers from 0 to 1."""
        return seconds("pause", self.pause)


@dataclass(frozen=True, slots=True)
class ExponentialBackoff:
    """A returned item waits for `first`, and `factor` times as long after each further delivery, up to `cap`. Each wait
    is made shorter or longer by a random share of up to `jitter`, but never longer than `cap`: items that failed
    together are not all ready at the same moment."""

    first: float | timedelta = 1.0
    factor: float = 2.0
    cap: float | timedelta = 300.0
    jitter: float = 0.2

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", seconds("first", self.first))
        object.__setattr__(self, "cap", seconds("cap", self.cap))
        for name, value, least, most in (("factor", self.factor, 1, 100), ("jitter", self.jitter, 0, 1)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise InvalidQueue(f"backoff: {name} must be a number from {least} to {most}, not {value!r}")

    def delay_s(self, deliveries: int, random: Callable[[], float]) -> float:
        # The exponent is bounded: 2 ** 100 is longer than every cap, and a larger power might overflow a float.
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
    """The form in which a queue's settings store it."""
    kind = next(name for name, type_ in _KINDS.items() if isinstance(value, type_))
    return {"kind": kind, **asdict(value)}


def load(found: dict[str, Any]) -> Any:
    settings = dict(found)
    return _KINDS[settings.pop("kind")](**settings)


def seconds(name: str, value: float | timedelta) -> float:
    """A duration in seconds. Raises InvalidQueue."""
    return arguments.seconds(InvalidQueue, name, value, 0, DELAY_S_MAX)
