"""`QueryWatch`: what the streaming queries of a Spark session do, as Spark reports it to a listener.

    with QueryWatch(spark) as watch:
        query = rows.writeStream.format("pxrs")...start()
        query.awaitTermination()
        for batch in watch.ended(query.runId).batches:
            print(batch.number, batch.rows, batch.lag, batch.duration_ms)

Spark reports asynchronously, on a thread of its own: when `awaitTermination` returns, the end may not be reported yet,
and `ended` waits for it. Spark drops reports if its listeners are too slow. To be sure whether a query runs or has
failed, use `query.isActive` and `query.exception()`.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from pxrs.metrics import instruments
from pxrs.spark.progress import BatchReport, batch_of, short_reason

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCHES_MAX: Final = 100
QUERIES_MAX: Final = 1_000
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class QueryReport:
    """What Spark has reported of one run of a query."""

    run_id: str
    name: str | None
    """The query's name, if the program has given it one."""
    batches: deque[BatchReport] = field(default_factory=deque)
    """The last batches, in order."""
    rows: int = 0
    """How many rows all batches have read."""
    is_ended: bool = False
    error: str | None = None
    """The cause of the error with which the query ended; None while it runs, and if it was stopped."""

    @property
    def last(self) -> BatchReport | None:
        return self.batches[-1] if self.batches else None


class QueryWatch:
    """Listens to all streaming queries of a session from `start` to `close`, and keeps what is reported.

    on_report: called with the report of the query after each batch, and once more after its end. It runs on a thread of
              Spark, which reports nothing else meanwhile; what it raises is logged.
    batches_max: how many batches of each query are kept. Of more than 1,000 queries, those that ended are forgotten
              first, in the order of their starts.

    Each batch and each end is logged under `pxrs.spark.watch`, with fields.
    """

    def __init__(
        self,
        spark: SparkSession,
        on_report: Callable[[QueryReport], None] | None = None,
        batches_max: int = BATCHES_MAX,
    ) -> None:
        if batches_max < 1:
            raise ValueError(f"batches_max is {batches_max}; give a number of at least 1")
        self._spark, self._on_report, self._batches_max = spark, on_report, batches_max
        self._listener: Any = None
        self._changed = threading.Condition()
        instruments.SPARK_LAG.watch(self, QueryWatch._lags)
        instruments.SPARK_STATE.watch(self, QueryWatch._states)
        self._reports: dict[str, QueryReport] = {}
        """By run id, in the order of their starts. Guarded by `_changed`."""

    def start(self) -> QueryWatch:
        if self._listener is None:
            self._listener = _listener_of(self)
            self._spark.streams.addListener(self._listener)
        return self

    def close(self) -> None:
        """Stop listening. What was reported stays readable."""
        listener, self._listener = self._listener, None
        if listener is not None:
            try:
                self._spark.streams.removeListener(listener)
            except Exception as error:  # noqa: BLE001 - Spark's process may have ended before, and the listener with it
                _logger.info("the listener was not removed from Spark: %s", error)

    def __enter__(self) -> QueryWatch:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def report(self, run_id: object) -> QueryReport | None:
        """A copy of what was reported of a run so far; None if nothing was. run_id: `query.runId`."""
        with self._changed:
            found = self._reports.get(str(run_id))
            return None if found is None else _copied(found)

    def ended(self, run_id: object, timeout_s: float = 30.0) -> QueryReport:
        """Wait until the end of a run is reported and `on_report` has been called for it, and return a copy of its
        report. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_ended(str(run_id)), timeout_s):
                raise TimeoutError(f"Spark has not reported the end of the run {run_id} within {timeout_s:g} s")
            return _copied(self._reports[str(run_id)])

    # For the metrics.

    def _last_batches(self) -> list[tuple[str, BatchReport]]:
        """The last batch of each query that runs."""
        with self._changed:
            running = [each for each in self._reports.values() if not each.is_ended]
            return [(_label(each), each.last) for each in running if each.last is not None]

    def _lags(self) -> list[instruments.Read]:
        return [((query,), batch.lag) for query, batch in self._last_batches() if batch.lag is not None]

    def _states(self) -> list[instruments.Read]:
        return [((query,), batch.state_rows) for query, batch in self._last_batches()]

    def _is_ended(self, run_id: str) -> bool:
        return (found := self._reports.get(run_id)) is not None and found.is_ended

    # Called on threads of Spark.

    def on_started(self, run_id: str, name: str | None) -> None:
        with self._changed:
            self._reports[run_id] = QueryReport(run_id, name, deque(maxlen=self._batches_max))
            while len(self._reports) > QUERIES_MAX:
                ended = (run for run, found in self._reports.items() if found.is_ended)
                del self._reports[next(ended, next(iter(self._reports)))]

    def on_progress(self, progress: str) -> None:
        plain = json.loads(progress)
        if (batch := batch_of(plain)) is None:
            return
        with self._changed:
            found = self._found(plain["runId"], plain.get("name"))
            found.batches.append(batch)
            found.rows += batch.rows
            told = _copied(found)
            self._changed.notify_all()
        fields = {"query": told.name or told.run_id, "batch": batch.number, "rows": batch.rows, "lag": batch.lag}
        instruments.SPARK_BATCHES.of(_label(told)).add()
        instruments.SPARK_ROWS.of(_label(told)).add(batch.rows)
        instruments.SPARK_BATCH.of(_label(told)).observe(batch.duration_ms / 1000)
        _logger.info(
            "query %(query)s: batch %(batch)s, %(rows)s rows, lag %(lag)s",
            fields,
            extra={**fields, "duration_ms": batch.duration_ms, "state_rows": batch.state_rows},
        )
        self._tell(told)

    def on_terminated(self, run_id: str, error: str | None) -> None:
        with self._changed:
            found = self._found(run_id, None)
            told = replace(_copied(found), is_ended=True, error=error)
        fields = {"query": told.name or run_id, "rows": told.rows, "error": error}
        if error is None:
            _logger.info("query %(query)s: ended after %(rows)s rows", fields, extra=fields)
        else:
            instruments.SPARK_FAILURES.of(_label(told)).add()
            _logger.error("query %(query)s: failed after %(rows)s rows: %(error)s", fields, extra=fields)
        self._tell(told)
        # After the callback, so that `on_report` has been called for the end when `ended` returns.
        with self._changed:
            found.is_ended, found.error = True, error
            self._changed.notify_all()

    def _found(self, run_id: str, name: str | None) -> QueryReport:
        """The report of a run; a new one if the query was started before this watch."""
        return self._reports.setdefault(run_id, QueryReport(run_id, name, deque(maxlen=self._batches_max)))

    def _tell(self, report: QueryReport) -> None:
        if self._on_report is None:
            return
        try:
            self._on_report(report)
        except Exception:
            _logger.exception("on_report failed for the query %s", report.name or report.run_id)


def _label(report: QueryReport) -> str:
    """The label of the metrics: the query's name, or the id of the run."""
    return report.name or report.run_id


def _copied(report: QueryReport) -> QueryReport:
    return QueryReport(report.run_id, report.name, report.batches.copy(), report.rows, report.is_ended, report.error)


def _listener_of(watch: QueryWatch) -> Any:
    """Spark's listener: a class of pyspark, which is imported only now."""
    from pyspark.sql.streaming import StreamingQueryListener

    class Listener(StreamingQueryListener):  # type: ignore[misc]
        def onQueryStarted(self, event: Any) -> None:
            watch.on_started(str(event.runId), event.name)

        def onQueryProgress(self, event: Any) -> None:
            watch.on_progress(event.progress.json)

        def onQueryIdle(self, event: Any) -> None:
            """Nothing was read: there is nothing to report."""

        def onQueryTerminated(self, event: Any) -> None:
            watch.on_terminated(str(event.runId), None if event.exception is None else short_reason(event.exception))

    return Listener()
