"""The run of the demo: a group with real processes, one of which is killed and one stopped past its lease, a Spark
pipeline, and an account of every message (X19).

Three workers share a topic of eight partitions. One of them is killed with a message in hand. One is stopped until its
lease has ended and continued then, so that its late commit must be refused. Spark reads the same topic meanwhile, with
groups of its own. Every wait has a bound, and all of them together have one: a demo that cannot go on says what it
waited for.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.markup import escape

import pxrs
from pxrs.cli.demo import orders
from pxrs.cli.demo.account import Line, Made, account, are_right, reasons, spark_lines
from pxrs.cli.demo.crew import Worker
from pxrs.cli.demo.samples import Mark, Sample, Span
from pxrs.cli.demo.sender import Sender
from pxrs.cli.demo.spark import DEAD_LETTERS, SOURCE, TOTALS, Spark
from pxrs.cli.demo.view import picture, spark_table
from pxrs.cli.demo.worker import TTL_S, WORK_S
from pxrs.errors import UnknownGroup
from pxrs.group.description import GroupDescription

WORKERS: Final = ("anna", "ben", "cleo")
PARTITIONS: Final = 8
RATE: Final = 60.0
"""Orders sent in each second: about what three workers can handle, and more than two can."""
SLOW_RATE: Final = 20.0
STORY_S: Final = 140.0
"""How long the run may take, up to the end of the processes."""
WAIT_S: Final = 60.0
SPARK_START_S: Final = 110.0
SPARK_STARTS_MAX: Final = 2
"""How often Spark is started. Spark gives its Python processes ten seconds to start, which may be too few on a busy
machine."""
LOOK_S: Final = 0.03
SAMPLE_S: Final = 0.1
SPARK_LOOK_S: Final = 0.25


class Stuck(Exception):
    """The demo cannot go on."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The result of the run."""

    lines: list[Line]
    redone: int
    messages: int
    """How many messages were sent."""
    dead_letters: dict[str, int]
    """How many dead letters have each reason."""
    has_zombie: bool

    @property
    def is_exact(self) -> bool:
        return are_right(self.lines)


class Demo:
    def __init__(
        self, hub: pxrs.Hub, registry: str, group: str, folder: Path, console: Console, messages: int, has_spark: bool
    ) -> None:
        self._hub, self._console = hub, console
        self._first, self._more = messages * 2 // 3, messages - messages * 2 // 3
        self._topic = hub.create_topic(SOURCE, partitions=PARTITIONS)
        for name in (TOTALS, DEAD_LETTERS) if has_spark else ():
            hub.create_topic(name, partitions=2)
        self._group = hub.group(group)
        self._is_sqlite = hub.registry.url.startswith("sqlite:")
        self._began = time.monotonic()
        # Started first, because it takes longest to start.
        self._spark = Spark(hub, registry, group, folder) if has_spark else None
        self._workers = [Worker(hub.url, registry, group, name, folder) for name in WORKERS]
        self._sender = Sender(hub)
        self._orders = orders.day()
        self._live = Live(console=console, refresh_per_second=8)
        self._found: GroupDescription | None = None
        self._read = dict.fromkeys(self._spark.groups, 0) if self._spark is not None else {}
        self._read_at = 0.0
        self.samples: list[Sample] = []
        self.marks: list[Mark] = []
        self.spans: list[Span] = []

    def run(self) -> Ending:
        """Run the demo to its end. Raises Stuck."""
        try:
            with self._live:
                self._story()
        finally:
            self._sender.close()
            have_left = self._end()
        return self._ending(have_left)

    # The steps of the run.

    def _story(self) -> None:
        self._until(lambda: self._owners() == set(WORKERS), "share the partitions")
        for worker in self._workers:
            worker.state = "running"
        self._send(self._first)
        self._kill()
        self._until(lambda: self._sender.is_done, "be sent all messages")
        if self._spark is not None:
            self._wait_for_spark()
        self._until(self._is_done, "handle the rest")
        self._say(f"all {self._sender.count:,} messages are done")
        self._send(self._more - 1)
        if self._is_sqlite:
            self._say("no zombie here: SQLite has one writer, and one that is stopped in a commit stops the others")
        else:
            self._wake_a_zombie()
        self._until(lambda: self._sender.is_done, "be sent all messages")
        if self._spark is not None:
            self._until_spark(self._sender.count, "read what was sent")
        self._sender.start(iter([orders.last_order()]), RATE)
        self._until(lambda: self._sender.is_done and self._is_done(), "handle the rest")
        self._say(f"all {self._sender.count:,} messages are done")
        if self._spark is not None:
            self._until_spark(self._sender.count, "read the last message")
            self._until(self._is_archived, "write the totals of all windows", "Spark")
            self._say("Spark has read them too, and written the totals of all windows that have ended")

    def _wait_for_spark(self) -> None:
        """Wait until Spark has started. Some messages are sent meanwhile, so that there is something to see."""
        if min(self._read.values()) < self._first:
            self._say(f"Spark is starting; {SLOW_RATE:g} messages in a second meanwhile")
            self._sender.start(self._orders, SLOW_RATE)
            self._until_spark(self._first, "start and read the first messages", SPARK_START_S)
            self._sender.stop()
            self._until(lambda: self._sender.is_done, "be sent all messages")
        self._say(f"Spark runs too, and has read {min(self._read.values()):,} messages")

    def _kill(self) -> None:
        anna = self._workers[0]
        self._until(lambda: anna.handled >= self._first // 15 and anna.in_hand is not None, "handle messages")
        began = time.monotonic()
        anna.signal(signal.SIGKILL, "killed -9")
        self._mark("anna: kill -9")
        self._until(lambda: self._owners() == {"ben", "cleo"}, "take over")
        self._say(f"anna was [red]killed[/]; the others own her partitions after {time.monotonic() - began:.2f} s")

    def _wake_a_zombie(self) -> None:
        _, ben, cleo = self._workers
        enough = ben.handled + self._more // 15
        self._until(lambda: ben.handled >= enough, "handle messages")
        began = self._stop_with_a_message_in_hand(ben)
        self._mark("ben: stopped")
        self._until(lambda: self._owners() == {"cleo"}, "take over")
        cleo.state = "owns everything"
        self._say(
            f"ben was [yellow]stopped[/] with a message in hand, and his lease of {self._ttl():g} s ran out; cleo took "
            f"over after {time.monotonic() - began:.2f} s"
        )
        alone = cleo.handled + self._more // 15
        self._until(lambda: cleo.handled >= alone or self._is_done(), "handle messages")
        ben.refused = None
        ben.signal(signal.SIGCONT, "woken: a zombie")
        self._mark("woken: refused")
        self.spans.append(Span(self.marks[-2].at_s, self.marks[-1].at_s, "ben is stopped"))
        self._until(lambda: ben.refused is not None, "refuse the zombie")
        self._say(f"ben woke up, finished it and tried to commit: [green]refused[/] ({escape(str(ben.refused))})")
        ben.state, cleo.state = "a new member", "running"

    def _stop_with_a_message_in_hand(self, worker: Worker) -> float:
        """Stop a worker while it has a message in hand. Returns the moment at which it was stopped."""
        while True:
            self._until(lambda: worker.in_hand is not None, "handle messages")
            stopped_at = time.monotonic()
            worker.signal(signal.SIGSTOP, "stopped")
            time.sleep(2 * WORK_S)  # if the signal came too late, the worker has printed the end of the message by then
            if worker.in_hand is not None:
                return stopped_at
            worker.signal(signal.SIGCONT, "running")

    def _ttl(self) -> float:
        with self._hub.registry.lease(TTL_S) as lease:
            return lease.ttl  # some stores grant a longer ttl than was asked for

    def _send(self, count: int) -> None:
        some = list(islice(self._orders, count))
        bad = sum(order.flaw is not None for order in some)
        what = "more messages" if self._sender.count else "messages"
        self._say(f"{count:,} {what} are being sent, {RATE:g} in a second; {bad} of them are bad orders")
        self._sender.start(iter(some), RATE)

    # The end.

    def _end(self) -> list[bool]:
        """End all processes. Returns whether each worker that was not killed, and Spark, ended gracefully."""
        everybody: list[Worker | Spark] = [worker for worker in self._workers if not worker.is_killed]
        if self._spark is not None:
            everybody.append(self._spark)
        for each in everybody:
            each.ask_to_stop()  # ask all of them first, then wait for each
        return [each.end() for each in everybody]

    def _ending(self, have_left: list[bool]) -> Ending:
        sent = self._sender.acknowledged
        found = account([place for place, _ in sent], [line for worker in self._workers for line in worker.told])
        lines = found.lines(self._sender.count)
        has_zombie = not self._is_sqlite
        if has_zombie:
            lines.append(
                Line("late commit of the zombie", "refused", "refused" if self._workers[1].refused else "taken")
            )
        lines.append(Line("workers: lag", "0", self._group.describe().lag_text))
        dead: dict[str, int] = {}
        if self._spark is not None:
            spark = self._spark
            made = Made(spark.totals(), spark.archived(), spark.dead_letters(), spark.lag())
            lines += spark_lines(sent, SOURCE, orders.LAST, made)
            dead = dict(reasons(made.dead_letters))
        lines.append(Line("processes that ended in good order", f"{len(have_left)}", f"{sum(have_left)}"))
        return Ending(lines, found.redone, len(sent), dead, has_zombie)

    # What the registry and the log show.

    def _describe(self) -> GroupDescription | None:
        try:
            return self._group.describe()
        except UnknownGroup:  # nobody has joined yet
            return None

    def _owners(self) -> set[str | None]:
        """The owner of each partition; None if it is free, or if its owner is gone."""
        rows = self._found.partitions if self._found is not None else ()
        owners = {row.owner_name if row.is_owner_there else None for row in rows}
        return owners if len(rows) == PARTITIONS else {None}

    def _is_done(self) -> bool:
        return self._checkpointed() == len(self._sender.acknowledged)

    def _checkpointed(self) -> int:
        rows = self._found.partitions if self._found is not None else ()
        return sum(row.checkpoint or 0 for row in rows)

    def _is_archived(self) -> bool:
        """Whether the Parquet files have all totals; the account checks whether they are right."""
        assert self._spark is not None
        closed = [order for _, order in self._sender.acknowledged if order.at < orders.LAST]
        return len(self._spark.archived()) >= len(orders.totals(closed))

    def _until_spark(self, count: int, what: str, wait_s: float = WAIT_S) -> None:
        """Wait until each query of Spark has read this number of messages."""
        self._until(lambda: min(self._read.values()) >= count, what, "Spark", wait_s)

    def _until(
        self, condition: Callable[[], bool], what: str, who: str = "the workers", wait_s: float = WAIT_S
    ) -> None:
        """Redraw the screen until the condition holds."""
        until = min(time.monotonic() + wait_s, self._began + STORY_S)
        while True:
            self._look()
            if condition():
                return
            self._check()
            if time.monotonic() > until:
                took = time.monotonic() - self._began
                advice = " pxrs demo --no-spark asks less of it." if self._spark is not None else ""
                raise Stuck(f"after {took:.0f} s, {who} did not {what} in time. Is the machine very busy?{advice}")
            time.sleep(LOOK_S)

    def _check(self) -> None:
        for failure in [*(worker.failure() for worker in self._workers), self._sender.error]:
            if failure is not None:
                raise Stuck(failure)
        if self._spark is not None and (failure := self._spark.failure()) is not None:
            if self._spark.starts == SPARK_STARTS_MAX:
                raise Stuck(failure)
            self._say(f"[yellow]{escape(failure)}[/]; it is started again, and goes on where it was")
            self._spark.start()

    def _look(self) -> None:
        self._found = self._describe()
        now = time.monotonic()
        if self._spark is not None and now - self._read_at >= SPARK_LOOK_S:
            self._read, self._read_at = self._spark.read(), now
        rows = self._found.partitions if self._found is not None else ()
        sent = sum(found.end for found in self._topic.bounds(range(PARTITIONS)).values())
        if not self.samples or now - self._began - self.samples[-1].at_s >= SAMPLE_S:
            there = {row.partition: row.owner_name for row in rows if row.is_owner_there}
            owners = tuple(there.get(number) for number in range(PARTITIONS))
            read = min(self._read.values()) if self._spark is not None else None
            self.samples.append(Sample(now - self._began, sent, self._checkpointed(), read, owners))
        spark = None if self._spark is None else spark_table(self._spark.state, self._read, sent)
        self._live.update(picture(self._workers, rows, spark, self._console.width))

    def _mark(self, text: str) -> None:
        self.marks.append(Mark(time.monotonic() - self._began, text))

    def _say(self, text: str) -> None:
        self._live.console.print(f"  {time.monotonic() - self._began:5.1f} s  {text}", highlight=False, soft_wrap=True)
