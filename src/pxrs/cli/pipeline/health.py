"""Whether `pxrs pipeline run` is alive and ready, for `--metrics-listen`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final

from pxrs.cli.monitoring import monitored
from pxrs.cli.pipeline.progress import tell_event
from pxrs.metrics.health import Beat, Readiness, Verdict
from pxrs.registry.outage import WAITING, StartWait
from pxrs.spark.run import Run

SILENT_S: Final = 180.0
"""Spark takes some seconds to start, and as long again for the first query; more than this means that a call of Spark
hangs."""


class Health:
    def __init__(self, as_json: bool, wait: StartWait) -> None:
        self._as_json, self._wait = as_json, wait
        self._beat = Beat("the loop that polls the queries", SILENT_S)
        self._ready = Readiness("Spark is starting")
        self._is_waiting = True

    def answered(self, listen: str | None) -> AbstractContextManager[None]:
        """Answer over HTTP for the block."""
        return monitored(listen, live=self._live, ready=self._verdict, tell=self._tell)

    def begin(self) -> None:
        """The registry has answered, and Spark is being started."""
        self._beat.beat()
        self._is_waiting = False

    def _live(self) -> Verdict:
        return Verdict(True) if self._is_waiting else self._beat.verdict()

    def _verdict(self) -> Verdict:
        return Verdict(False, self._wait.reason or WAITING) if self._is_waiting else self._ready.verdict()

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
