"""What the plan says that Spark has made of a DataFrame: which queries keep state, and what was done with some rows.

A query that keeps state must be alone in its group: partitions move to other members, state does not (K4). The
source of a query does not know what is done with its rows. So a program that builds a query with `shareGroup` calls
`refuse_shared_state` before it starts the query.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from pxrs.errors import SharedState
from pxrs.spark.letters import MESSAGE

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
    return sorted(set(_found(_plan(rows), _OPERATORS)))


def undecidable_operators(rows: DataFrame) -> list[str]:
    """The operators and expressions because of which two streaming queries that read the same messages, in batches of
    different sizes, may have different rows: operators that keep state or take a sample, and expressions that depend on
    more than a row."""
    plan = _plan(rows)
    found = set(_found(plan, {**_OPERATORS, **_SAMPLES}))
    patterns = rows.sparkSession._jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    if plan.containsPattern(patterns.CURRENT_LIKE()):
        found.add("the current time")
    if not plan.deterministic():
        found.add("a function that is not deterministic")
    return sorted(found)


def steps_between(given: DataFrame, rows: DataFrame) -> list[str]:
    """What was done with the given rows to make these, as a list of operators, functions, columns and values. Two lists
    are equal if the same was done. Left out are the numbers that Spark gives to operators and columns, which are others
    each time, and what is in functions and tables of the user's own."""
    return list(_steps(_plan(rows), _plan(given)))


def is_part_of(part: DataFrame, rows: DataFrame) -> bool:
    """Whether these rows are made of the rows of `part`."""
    wanted = _plan(part)
    kind = wanted.getClass().getSimpleName()

    def is_in(plan: Any) -> bool:
        # In a join of rows with themselves, Spark gives new numbers to the columns of one side.
        is_like = plan.getClass().getSimpleName() == kind
        return (is_like and (plan.fastEquals(wanted) or plan.sameResult(wanted))) or any(map(is_in, _children(plan)))

    return is_in(_plan(rows))


def refuse_shared_state(rows: DataFrame) -> None:
    """Raise SharedState if a streaming query of these rows would keep state. For queries with `shareGroup`."""
    if found := stateful_operators(rows):
        raise SharedState(
            f"it keeps state ({', '.join(found)}) and cannot share its group: when partitions move to other members, "
            "their state would not move with them. Give it a group of its own"
        )


def _found(plan: Any, operators: Mapping[str, str]) -> Iterator[str]:
    if not plan.isStreaming():
        return
    children = _children(plan)
    name = plan.getClass().getSimpleName()
    if name in operators and (name != "Join" or all(child.isStreaming() for child in children)):
        yield operators[name]
    for child in children:
        yield from _found(child, operators)


def _steps(plan: Any, given: Any) -> Iterator[str]:
    if plan.fastEquals(given):
        return
    yield plan.getClass().getSimpleName()
    for expression in _listed(plan.expressions()):
        if not _is_message(expression):
            yield from _terms(expression)
    for child in _children(plan):
        yield from _steps(child, given)


def _is_message(expression: Any) -> bool:
    """Whether an operator passes the column `MESSAGE` on, which only the query of the dead letters has."""
    kind = expression.getClass().getSimpleName()
    return kind in ("Alias", "AttributeReference") and list(_terms(expression)) in ([MESSAGE], ["Alias", MESSAGE])


def _terms(expression: Any) -> Iterator[str]:
    kind = expression.getClass().getSimpleName()
    if kind == "AttributeReference":
        yield expression.name()
        return
    yield expression.toString() if kind == "Literal" else kind
    for child in _children(expression):
        yield from _terms(child)


def _plan(rows: DataFrame) -> Any:
    return rows._jdf.queryExecution().analyzed()


def _children(node: Any) -> list[Any]:
    return _listed(node.children())


def _listed(found: Any) -> list[Any]:
    return [found.apply(number) for number in range(found.size())]
