"""`reject`: lets a pipeline's function send rows to the dead letters, with a reason.

    def totals(orders):
        orders = reject(orders, F.col("amount") <= 0, "amount is not positive")
        return orders.groupBy("account").agg(F.sum("amount").alias("total"))

A query of Spark has one sink. So a pipeline with dead letters is two queries, and the function is called for each: in
the query of the rows, `reject` keeps the rows for which the condition does not hold; in the query of the dead letters,
it collects the others, and what the function returns is not used. No row is lost between the two queries, and none is
in both, as long as both decide in the same way. Therefore these are refused when the queries are planned:

- rows that depend on more than the message: after an operator that keeps state (an aggregation, deduplication, a join
  of streams), after a sample, a random number or the current time,
- rows that no longer have the message to send, because the function has selected other columns,
- a function that gives other conditions, or other columns for them, when it is called a second time,
- a function that does not use what `reject` returns: the rejected rows would go to the sink too.

A table with which the rows are joined before, and a UDF, are not checked: they must give the same results to both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final, Literal

from pxrs.errors import InvalidPipeline
from pxrs.spark.letters import MESSAGE, REASON, origin
from pxrs.spark.state import is_part_of, steps_between, undecidable_operators

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

NO_REASON: Final = "rejected by the pipeline's function"
"""The reason of a row whose column of reasons is null."""
_current: ContextVar[FunctionCall | None] = ContextVar("_current", default=None)


@dataclass(slots=True)
class FunctionCall:
    """One call of a pipeline's function, and what `reject` does during it."""

    does: Literal["leave out", "collect", "count", "fail"]
    """"leave out": drops rejected rows. "collect": keeps them in `collected`, as dead letters. "count": the same, only
    to be counted. "fail": the query fails on the first one, because the pipeline has no dead letters."""
    topic: str = ""
    """The source, for the error of "fail"."""
    taken: frozenset[str] = frozenset()
    """Columns, in lower case, that the fields of the JSON values have replaced: they do not name a message's origin."""
    collected: list[DataFrame] = field(default_factory=list)
    """For each call of `reject`, the rejected rows; to collect, with the columns `MESSAGE` and `REASON`."""
    given: DataFrame | None = None
    """What the function was called with."""
    returned: list[DataFrame] = field(default_factory=list)
    """Of a stream, what each call of `reject` has returned."""
    decisions: list[list[str]] = field(default_factory=list)
    """Of a stream, how each call of `reject` has chosen the rejected rows (`steps_between`)."""

    @contextmanager
    def running(self, rows: DataFrame) -> Iterator[None]:
        """While the function runs that is called with these rows."""
        self.given = rows
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def check_use(self, result: DataFrame) -> None:
        """Raise InvalidPipeline if the function has rejected rows of a stream, and what it returns may still have
        them."""
        if self.does in ("leave out", "fail") and not all(is_part_of(each, result) for each in self.returned):
            raise InvalidPipeline(
                "the function does not use what reject returns, so the rows that it rejects would go to the sink: "
                "write rows = reject(rows, ...), and continue with these rows"
            )

    def reject(self, rows: DataFrame, is_rejected: Column, reason: Column) -> DataFrame:
        kept = self._kept(rows, is_rejected, reason)
        if rows.isStreaming:
            self.returned.append(kept)
        return kept

    def _kept(self, rows: DataFrame, is_rejected: Column, reason: Column) -> DataFrame:
        from pyspark.sql import functions as F

        if self.does == "fail":
            where = [name for name in rows.columns if name.lower() not in self.taken]
            has_origin = {"partition", "offset"} <= set(where)
            text = F.concat(origin(where, self.topic), F.lit(": "), reason) if has_origin else reason
            failed = F.raise_error(text).cast("boolean")
            return rows.filter(F.when(is_rejected, failed).otherwise(F.lit(True)))
        rejected = rows.filter(is_rejected)
        if rows.isStreaming:
            _refuse_undecidable(rejected)
            if self.given is not None:
                self.decisions.append(steps_between(self.given, rejected))
        if self.does == "collect":
            if MESSAGE not in rows.columns:
                raise InvalidPipeline(
                    "reject is called on rows that no longer have the message they come from, so it cannot be sent to "
                    "the dead letters: call reject before select, groupBy and other steps that make new rows, or add "
                    "columns by withColumn"
                )
            self.collected.append(rejected.select(MESSAGE, reason.alias(REASON)))
        if self.does == "count":
            self.collected.append(rejected)
        return rows.filter(~is_rejected)


def reject(rows: DataFrame, condition: Column | str, reason: Column | str) -> DataFrame:
    """The rows for which the condition does not hold; the others become dead letters of the pipeline.

    condition: a column, or an expression of SQL such as "amount <= 0". A row for which it is null is not rejected.
    reason:    the text of the header `pxrs-reason`: a text, or a column for a reason that depends on the row, such as
               F.concat(F.lit("unknown account "), F.col("account")).

    For use in the function of a pipeline, before it selects columns, aggregates or joins streams. The dead letter is
    the message as it was stored. Without `dead_letters`, a rejected row ends the pipeline, unless its parse step has
    on_bad="drop". With a batch outside of `pxrs pipeline run` and `Pipeline.over`, as in a test, rejected rows are left
    out; `Pipeline.rejected` returns them. Raises InvalidPipeline.
    """
    from pyspark.sql import Column
    from pyspark.sql import functions as F

    if not isinstance(condition, Column | str):
        raise InvalidPipeline(f"reject: condition is {condition!r}; give a column, or SQL such as 'amount <= 0'")
    if not isinstance(reason, Column | str) or (isinstance(reason, str) and not reason):
        raise InvalidPipeline(f"reject: reason is {reason!r}; give a string, or a column of strings")
    given = F.expr(condition) if isinstance(condition, str) else condition
    if (kind := rows.select(given).dtypes[0][1]) != "boolean":
        raise InvalidPipeline(f"reject: the condition {condition!r} is a {kind}, not a boolean")
    # Null counts as false in both queries: `filter` alone would leave the row out of both.
    is_rejected = F.coalesce(given, F.lit(False))
    text = F.lit(reason) if isinstance(reason, str) else F.coalesce(reason.cast("string"), F.lit(NO_REASON))
    call = _current.get()
    if call is not None:
        return call.reject(rows, is_rejected, text)
    if rows.isStreaming:
        raise InvalidPipeline(
            "reject is called on a stream outside of a pipeline's function, or in a thread that the function has "
            "started: nothing would keep the rejected rows. Use filter in queries of your own"
        )
    return rows.filter(~is_rejected)


def _refuse_undecidable(rejected: DataFrame) -> None:
    """Raise InvalidPipeline if these rows could differ between the two queries of a pipeline."""
    if found := undecidable_operators(rejected):
        raise InvalidPipeline(
            f"reject is called on rows that depend on {', '.join(found)}: the query of the rows and the query of the "
            "dead letters could decide differently, and lose or duplicate a row. Call reject before that step"
        )


def same_decisions(one: FunctionCall, other: FunctionCall) -> None:
    """Raise InvalidPipeline if the function chose the rejected rows in another way in another call."""
    if MESSAGE in chain(*other.decisions):
        raise InvalidPipeline(
            f"reject depends on all columns, but the query of the dead letters has one more column, {MESSAGE}: the two "
            "queries would decide differently. Name the columns, instead of using * or na.drop() without subset"
        )
    if one.decisions != other.decisions:
        terms = zip(chain(*one.decisions), chain(*other.decisions), strict=False)
        what = next(
            (f"{before} and then {after}" for before, after in terms if before != after), "a different number of them"
        )
        raise InvalidPipeline(
            f"the conditions of reject differ between two calls of the function ({what}): a row could be lost or "
            "duplicated. A condition, and the columns that it uses, must depend on the row alone, and not on the time "
            "at which the function is called"
        )
