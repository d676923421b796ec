"""Retention of a simulated topic: the procedure `pxrs.group.retention.move_start`, one operation at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pxrs.errors import RegistryError, RetentionPostponed
from pxrs.group.records import ReadTopic
from pxrs.group.retention import move_start
from pxrs.registry.steps import Operation, Steps, Write
from pxrs.testing.simulator.environment import Environment
from pxrs.testing.simulator.ghost import RETENTION
from pxrs.testing.simulator.store import Request


class SimulatedRetention:
    """At most one retention is under way."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._procedure: Steps[Any] | None = None
        self.operation: Operation | None = None
        """What the retention that is under way sends next; None if none is under way."""

    @property
    def is_under_way(self) -> bool:
        return self.operation is not None

    def begin(self, topic: ReadTopic) -> None:
        """Begin a retention of this topic that may remove everything but what the group has yet to read; how much of
        it, is drawn at random. One that is under way ends here, as if its process had died."""
        rng, end = self._environment.rng, self._environment.ghost.end

        def plan(unread: Mapping[int, int]) -> dict[int, int]:
            places = {n: (topic.id, n) for n in range(topic.partitions)}
            ends = {n: min(unread.get(n, end[place]), end[place]) for n, place in places.items()}
            return {n: rng.randint(0, last) for n, last in ends.items() if rng.random() < 0.7}

        self._procedure = move_start(topic.id, plan)
        self.operation = next(self._procedure)

    def step(self) -> None:
        """Send the next operation and continue with its result, or stop waiting for it."""
        procedure, operation = self._procedure, self.operation
        assert procedure is not None
        assert operation is not None
        environment, request = self._environment, Request(operation, RETENTION, None)
        self._procedure = self.operation = None
        if isinstance(operation, Write) and environment.strikes(environment.rates.timeout):
            environment.late.append(request)
            return
        while not request.is_applied:
            environment.apply(request)
        try:
            following = procedure.send(request.result) if request.error is None else procedure.throw(request.error)
        except (StopIteration, RetentionPostponed, RegistryError):
            return
        self._procedure, self.operation = procedure, following

    def run_up_to_its_write(self, topic: ReadTopic) -> None:
        """Begin, and take the steps before the write: the next step moves the topic's start."""
        self.begin(topic)
        while self.operation is not None and not isinstance(self.operation, Write):
            self.step()
