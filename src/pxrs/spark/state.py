"""Which queries keep state. Such a query must be alone in its group: partitions move to other members, state does not
(K4).

The source of a query does not know what is done with its rows. So a program that builds a query with `shareGroup` calls
`refuse_shared_state` before it starts the query. The answer is read from the plan that Spark has made of the DataFrame.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


_SAMPLES: Final = {"Sample": "a sample"}


def stateful_operators(rows: DataFrame) -> list[str]:
    """The operators that keep state in a streaming query of these rows, as users call them; none for a batch."""
    return sorted(set(_found(rows._jdf.queryExecution().analyzed(), _OPERATORS)))


def undecidable_operators(rows: DataFrame) -> list[str]:
    """The operators and expressions because of which two streaming queries that read the same messages, in batches of
    different sizes, may have different rows: operators that keep state or take a sample, and expressions that depend on
    more than a row."""
    plan = rows._jdf.queryExecution().analyzed()
    found = set(_found(plan, {**_OPERATORS, **_SAMPLES}))
    patterns = rows.sparkSession._jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    if plan.containsPattern(patterns.CURRENT_LIKE()):
        found.add("the current time")
    if not plan.deterministic():
        found.add("a function that is not deterministic")
    return sorted(found)


def refuse_shared_state(rows: DataFrame) -> None:
    """Raise SharedState if a streaming query of these rows would keep state. For queries with `shareGroup`."""
    if found := stateful_operators(rows):
        raise SharedState(
            f"it keeps state ({', '.join(found)}) and was to share its group: partitions move to other members, and "
            "their state would stay. Give it a group of its own"
        )


def _found(plan: Any, operators: Mapping[str, str]) -> Iterator[str]:
    if not plan.isStreaming():
        return
    below = plan.children()
    children = [below.apply(number) for number in range(below.size())]
    name = plan.getClass().getSimpleName()
    if name in operators and (name != "Join" or all(child.isStreaming() for child in children)):
        yield operators[name]
    for child in children:
        yield from _found(child, operators)
