"""Whether `pxrs pipeline run` is alive and ready, for `--metrics-listen`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final

from pxrs.cli.monitoring import monitored
from pxrs.cli.pipeline.progress import tell_event
from pxrs.metrics.health import Beat, Readiness, Verdict
from pxrs.spark.run import Run

SILENT_S: Final = 180.0
"""Spark takes some seconds to start, and as long again for the first query; more than this means that a call of Spark
hangs."""


class Health:
    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._beat = Beat("the loop that looks at the queries", SILENT_S)
        self._ready = Readiness("Spark is starting")

    def answered(self, listen: str | None) -> AbstractContextManager[None]:
        """Answer over HTTP for the block."""
        return monitored(listen, live=self._beat.verdict, ready=self._ready.verdict, tell=self._tell)

    def update(self, running: Run) -> None:
        """Called each time the command has looked at the queries."""
        self._beat.beat()
        states = {each.name: each.state for each in running.queries}
        waiting = [name for name, state in states.items() if state != "running"]
        reason = ""
        if running.is_stopping:
            reason = "the queries are being stopped"
        elif waiting:
            reason = f"the query {waiting[0]} is {states[waiting[0]]}"
        self._ready.set(Verdict(not reason, reason, {"queries": states}))

    def _tell(self, text: str) -> None:
        tell_event(self._as_json, "metrics", text, what=text)
