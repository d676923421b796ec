"""The topics that a pipeline reads: one, several, or all whose names match a pattern."""

from __future__ import annotations

import re

from pxrs.errors import InvalidPipeline
from pxrs.publishing.selection import Topics


def topics_matching(pattern: str) -> Topics:
    """For `@pipeline(source=topics_matching("orders-.*"))`: all topics whose whole names match this regular expression,
    also those that are created while the pipeline runs. Raises InvalidPipeline."""
    if not isinstance(pattern, str) or not pattern.strip():
        raise InvalidPipeline(f"topics_matching: pattern is {pattern!r}; give a regular expression such as 'orders-.*'")
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidPipeline(f"topics_matching: {pattern!r} is not a regular expression: {error}") from error
    return Topics(pattern=pattern.strip())  # as the option `subscribePattern` is read


def topics_of(source: object) -> Topics:
    """The argument of `@pipeline(source=...)` as `Topics`. Raises InvalidPipeline."""
    if isinstance(source, Topics):
        if source.assigned is not None:
            raise InvalidPipeline("source names partitions, but a pipeline reads whole topics")
        return source
    names = (source,) if isinstance(source, str) else tuple(source) if isinstance(source, list | tuple) else ()
    if not names or not all(isinstance(name, str) and name and "," not in name for name in names):
        raise InvalidPipeline(f"source is {source!r}; give a topic's name, a list of names, or topics_matching(...)")
    if len(set(names)) != len(names):
        raise InvalidPipeline(f"source is {source!r}, which names a topic twice")
    return Topics(names)


def reader_options(topics: Topics) -> dict[str, str]:
    """The options of Spark's reader that name these topics."""
    if topics.pattern is not None:
        return {"subscribePattern": topics.pattern}
    return {"topic": topics.names[0]} if len(topics.names) == 1 else {"subscribe": ",".join(topics.names)}


def reads(topics: Topics, name: str) -> bool:
    """Whether a topic of this name is read; for a pattern, also a topic that does not exist yet."""
    return name in topics.among([name]) if topics.pattern is not None else name in topics.names
