"""The topics that a pipeline reads: one, several, or all whose names match a pattern."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pxrs.errors import InvalidPipeline


@dataclass(frozen=True, slots=True)
class Topics:
    """The source of a pipeline. Made from a topic's name, from several names, or by `topics_matching`."""

    names: tuple[str, ...] = ()
    pattern: str | None = None
    """A regular expression that matches the whole of a topic's name; then there are no `names`."""

    def __str__(self) -> str:
        return ", ".join(self.names) if self.pattern is None else f"topics like {self.pattern}"

    def options(self) -> dict[str, str]:
        """As options of Spark's reader."""
        if self.pattern is not None:
            return {"subscribePattern": self.pattern}
        return {"topic": self.names[0]} if len(self.names) == 1 else {"subscribe": ",".join(self.names)}

    def includes(self, topic: str) -> bool:
        return topic in self.names if self.pattern is None else re.fullmatch(self.pattern, topic) is not None

    def among(self, there: Iterable[str]) -> list[str]:
        """The names; for a pattern, those of these topics that match it, in order of their names."""
        return list(self.names) if self.pattern is None else sorted(filter(self.includes, there))


def topics_matching(pattern: str) -> Topics:
    """For `@pipeline(source=topics_matching("orders-.*"))`: all topics whose whole names match this regular expression,
    also those that are created while the pipeline runs. Raises InvalidPipeline."""
    if not isinstance(pattern, str) or not pattern:
        raise InvalidPipeline(f"topics_matching: pattern is {pattern!r}; give a regular expression such as 'orders-.*'")
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidPipeline(f"topics_matching: {pattern!r} is no regular expression: {error}") from error
    return Topics(pattern=pattern)


def topics_of(source: object) -> Topics:
    """What is given to `@pipeline(source=...)`. Raises InvalidPipeline."""
    if isinstance(source, Topics):
        return source
    names = (source,) if isinstance(source, str) else tuple(source) if isinstance(source, list | tuple) else ()
    if not names or not all(isinstance(name, str) and name and "," not in name for name in names):
        raise InvalidPipeline(f"source is {source!r}; give a topic's name, a list of names, or topics_matching(...)")
    if len(set(names)) != len(names):
        raise InvalidPipeline(f"source is {source!r}, which names a topic twice")
    return Topics(names)
