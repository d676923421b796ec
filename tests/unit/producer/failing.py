"""Topics in memory whose appends fail, lose their reply or wait, as a test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from pxrs.errors import (
    AppendUnknown,
)
from pxrs.log.batch import SCHEMA
from pxrs.log.contract import Append
from pxrs.log.memory import MemoryLog, MemoryTopic
from pxrs.log.outcomes import MaybeStored, NotStored, Outcome
from pxrs.model import Topic
from pxrs.producer.appender import _Lane
from pxrs.producer.producer import Producer
from pxrs.testing.waiting import eventually


class Fickle(MemoryTopic):
    """A topic whose appends do what the test wants: `before` and `after` may raise for the whole call, or delay it."""

    def __init__(self, topic: Topic) -> None:
        super().__init__(topic, MemoryLog())
        self.calls: list[list[Append]] = []
        self.before: Callable[[Sequence[Append]], None] = lambda appends: None
        self.after: Callable[[Sequence[Append]], None] = lambda appends: None
        self.refusals: dict[int, Exception] = {}
        """Partitions that store nothing, and why."""
        self.lost_replies: dict[int, int] = {}
        """Partitions that store batches and then do not tell, each with how often."""

    def append(self, appends: Sequence[Append]) -> list[Outcome]:
        self.calls.append(list(appends))
        self.before(appends)
        stored = iter(super().append([each for each in appends if each.partition not in self.refusals]))
        self.after(appends)
        lost = {number for number in {each.partition for each in appends} if self.lost_replies.get(number)}
        for number in lost:
            self.lost_replies[number] -= 1
        return [self._outcome(each, stored, lost) for each in appends]

    def _outcome(self, append: Append, stored: Iterator[Outcome], lost: set[int]) -> Outcome:
        if append.partition in self.refusals:
            return NotStored(self.refusals[append.partition])
        outcome = next(stored)
        return MaybeStored(AppendUnknown("the reply was lost")) if append.partition in lost else outcome

    def values(self, partition: int) -> list[bytes | None]:
        return [v for batch in self.read(partition, 0, 1 << 30) for v in batch.records.column("value").to_pylist()]

    def column(self, name: str) -> list[Any]:
        return [v for batch in self.read(0, 0, 1 << 30) for v in batch.records.column(name).to_pylist()]


def decoded(append: Append) -> pa.RecordBatch:
    return pa.ipc.read_record_batch(append.payload.data, SCHEMA)


class Gate:
    """Holds appends up until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, appends: Sequence[Append]) -> None:
        self.reached.set()
        assert self.opened.wait(30)


class Failing:
    """Raises in the first so many calls."""

    def __init__(self, error: Exception, *, times: int = 1 << 30) -> None:
        self.error, self.times = error, times

    def __call__(self, appends: Sequence[Append]) -> None:
        if self.times:
            self.times -= 1
            raise self.error


def make(partitions: int = 4, **settings: Any) -> Fickle:
    return Fickle(Topic("orders", "id", partitions, **settings))


def was_tried(lane: _Lane) -> bool:
    """The log has answered a try, and the next one has not begun."""
    return lane.tries > 0 and not lane.is_trying


def is_given(lane: _Lane) -> bool:
    """The log was given the batches and has not answered."""
    return lane.is_given


def expire(out: Producer, when: Callable[[_Lane], bool], left_s: float = 0.0) -> None:
    """Wait until all partitions that have a batch are such ones. Then let the `delivery_timeout` of these batches be
    over in `left_s` seconds, with no grace for an answer of the log. A short `delivery_timeout` instead may be over
    before the log was given anything."""
    appender = out.sending._appender

    def shorten() -> bool:
        with appender.lock:
            lanes = list(appender._active.values())
            if not lanes or not all(map(when, lanes)):
                return False
            appender.grace_s = 0.0
            expires_at = time.monotonic() + left_s
            for lane in lanes:
                for batch in [each for part in lane.parts for each in part] + list(lane.queue):
                    batch.expires_at = expires_at
            return True

    eventually(shorten)
    appender._changed()
