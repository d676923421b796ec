"""Which queries keep state. Such a query must be alone in its group: partitions move to other members, state does not
(K4).

The source of a query does not know what is done with its rows. So a program that builds a query with `shareGroup` calls
`refuse_shared_state` before it starts the query. The answer is read from the plan that Spark has made of the DataFrame.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from pxrs.errors import SharedState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_OPERATORS: Final = {
    "Aggregate": "an aggregation",
    "Deduplicate": "dropDuplicates",
    "DeduplicateWithinWatermark": "dropDuplicatesWithinWatermark",
    "Distinct": "distinct",
    "Except": "subtract",
    "FlatMapGroupsInPandasWithState": "applyInPandasWithState",
    "FlatMapGroupsWithState": "flatMapGroupsWithState",
    "GlobalLimit": "limit",
    "Intersect": "intersect",
    "Join": "a join of two streams",
    "TransformWithState": "transformWithState",
    "TransformWithStateInPandas": "transformWithStateInPandas",
    "TransformWithStateInPySpark": "transformWithState",
}


def stateful_operators(rows: DataFrame) -> list[str]:
    """The operators that keep state in a streaming query of these rows, as users call them; none for a batch."""
    return sorted(set(_stateful(rows._jdf.queryExecution().analyzed())))


def refuse_shared_state(rows: DataFrame) -> None:
    """Raise SharedState if a streaming query of these rows would keep state. For queries with `shareGroup`."""
    if found := stateful_operators(rows):
        raise SharedState(
            f"it keeps state ({', '.join(found)}) and was to share its group: partitions move to other members, and "
            "their state would stay. Give it a group of its own"
        )


def _stateful(plan: Any) -> Iterator[str]:
    if not plan.isStreaming():
        return
    below = plan.children()
    children = [below.apply(number) for number in range(below.size())]
    name = plan.getClass().getSimpleName()
    if name in _OPERATORS and (name != "Join" or all(child.isStreaming() for child in children)):
        yield _OPERATORS[name]
    for child in children:
        yield from _stateful(child)
