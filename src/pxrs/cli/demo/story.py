"""The run of the demo: a group with real processes, one of which is killed and one stopped past its lease, a Spark
pipeline, and an account of every message (X19).

Three workers share a topic of eight partitions. One of them is killed with a message in hand. One is stopped until its
lease has ended and continued then, so that its late commit must be refused. Spark reads the same topic meanwhile, with
groups of its own.

A busy machine makes the run slower and changes nothing else. A process that lives and makes progress is waited for, and
a line says every few seconds for what and for how long so far. A wait ends if nothing has changed for `STALLED_S_MAX`,
or if the run has taken `RUN_S_MAX`; then the demo says what was not finished. A process that has died is reported at
once. No step counts on how many messages a worker can handle in some time: where a step needs messages and all are
done, more are sent.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.markup import escape

import pxrs
from pxrs.cli.demo import orders
from pxrs.cli.demo.account import Line, Made, account, are_right, reasons, spark_lines
from pxrs.cli.demo.child import cpu_s
from pxrs.cli.demo.crew import Worker
from pxrs.cli.demo.samples import Mark, Sample, Span
from pxrs.cli.demo.sender import Sender
from pxrs.cli.demo.spark import DEAD_LETTERS, SOURCE, TOTALS, Spark
from pxrs.cli.demo.view import picture, spark_table
from pxrs.cli.demo.worker import TTL_S
from pxrs.errors import UnknownGroup
from pxrs.group.description import GroupDescription

WORKERS: Final = ("anna", "ben", "cleo")
PARTITIONS: Final = 8
RATE: Final = 60.0
"""Orders sent in each second: about what three workers can handle, and more than two can."""
SLOW_RATE: Final = 20.0
SLOW_MAX: Final = 1200
"""How many messages are sent at most while Spark starts. Beyond that the demo waits without sending: the workers would
have to handle them all, and there are `orders.COUNT_MAX`."""
MORE: Final = 60
"""How many messages are sent more when a step needs some and all are done."""
RUN_S_MAX: Final = 600.0
"""How long the run may take, with the end of the processes."""
END_S_MAX: Final = 30.0
"""The last part of `RUN_S_MAX`, which is left for the end of the processes."""
CUT_SHORT_S_MAX: Final = 20.0
"""How long each process may take to end when the run was cut short, by an error or by Ctrl-C. It is killed then."""
STALLED_S_MAX: Final = 120.0
"""How long a wait goes on in which nothing changes: see `Demo._progress`."""
TELL_S: Final = 5.0
"""How often a wait is told of where the screen is not redrawn."""
SPARK_STARTS_MAX: Final = 4
"""How often Spark is started. Spark gives its Python processes ten seconds to start, which may be too few on a busy
machine."""
LOOK_S: Final = 0.03
DRAW_S: Final = 0.1
SAMPLE_S: Final = 0.1
SPARK_LOOK_S: Final = 0.25
CPU_LOOK_S: Final = 2.0


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


@dataclass(slots=True)
class Wait:
    """What the demo waits for."""

    who: str
    what: str
    since: float
    told_at: float = field(init=False)
    """When the user was last told of it."""

    def __post_init__(self) -> None:
        self.told_at = self.since


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
        self._drawn_at = 0.0
        self._cpu: dict[str, float] = {}
        """Seconds of CPU time that each process has used, by its name; those that are not known are left out."""
        self._cpu_at = 0.0
        self._wait = Wait("the demo", "begin", self._began)
        self._found: GroupDescription | None = None
        self._read = dict.fromkeys(self._spark.groups, 0) if self._spark is not None else {}
        self._read_at = 0.0
        self.samples: list[Sample] = []
        self.marks: list[Mark] = []
        self.spans: list[Span] = []

    def run(self) -> Ending:
        """Run the demo to its end. Raises Stuck."""
        is_told = False
        try:
            with self._live:
                self._story()
                self._draw("")
            is_told = True
        finally:
            self._sender.close()
            have_left = self._end(is_told)
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
            self._say("the zombie is skipped: a process that is stopped in a commit to SQLite blocks all other writers")
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
            self._say(f"Spark is starting; meanwhile {SLOW_RATE:g} messages per second are sent")
            self._sender.start(islice(self._orders, SLOW_MAX), SLOW_RATE)
            self._until_spark(self._first, "start and read the first messages")
            self._sender.stop()
            self._until(lambda: self._sender.is_done, "be sent all messages")
        self._say(f"Spark is running and has read {min(self._read.values()):,} messages")

    def _kill(self) -> None:
        anna = self._workers[0]
        self._until_at_work(lambda: anna.handled >= self._first // 15 and anna.in_hand is not None, "anna")
        began = time.monotonic()
        anna.signal(signal.SIGKILL, "killed -9")
        self._mark("anna: kill -9")
        self._until(lambda: self._owners() == {"ben", "cleo"}, "take over")
        self._say(f"anna was [red]killed[/]; the others own her partitions after {time.monotonic() - began:.2f} s")

    def _wake_a_zombie(self) -> None:
        _, ben, cleo = self._workers
        enough = ben.handled + self._more // 15
        self._until_at_work(lambda: ben.handled >= enough, "ben")
        began = self._stop_with_a_message_in_hand(ben)
        self._mark("ben: stopped")
        self._until(lambda: self._owners() == {"cleo"}, "take over")
        cleo.state = "owns everything"
        self._say(
            f"ben was [yellow]stopped[/] with a message in hand, and his lease of {self._ttl():g} s expired; cleo took "
            f"over after {time.monotonic() - began:.2f} s"
        )
        alone = cleo.handled + self._more // 15
        self._until_at_work(lambda: cleo.handled >= alone, "cleo")
        ben.refused = None
        ben.signal(signal.SIGCONT, "resumed: a zombie")
        self._mark("resumed: refused")
        self.spans.append(Span(self.marks[-2].at_s, self.marks[-1].at_s, "ben is stopped"))
        self._until(lambda: ben.refused is not None, "refuse the zombie")
        self._say(f"ben resumed, finished it and tried to commit: [green]refused[/] ({escape(str(ben.refused))})")
        ben.state, cleo.state = "a new member", "running"

    def _stop_with_a_message_in_hand(self, worker: Worker) -> float:
        """Stop a worker while it has a message in hand. Returns the moment at which it was stopped."""
        while True:
            self._until_at_work(lambda: worker.in_hand is not None, worker.name)
            stopped_at = time.monotonic()
            worker.signal(signal.SIGSTOP, "stopped")
            self._until(worker.is_stopped, "stop", worker.name)
            worker.catch_up()
            if worker.in_hand is not None:
                return stopped_at
            worker.signal(signal.SIGCONT, "running")  # the signal came too late: the message was handled by then

    def _ttl(self) -> float:
        with self._hub.registry.lease(TTL_S) as lease:
            return lease.ttl  # some stores grant a longer ttl than was asked for

    def _send(self, count: int) -> None:
        some = list(islice(self._orders, count))
        bad = sum(order.flaw is not None for order in some)
        what = "more messages" if self._sender.count else "messages"
        self._say(f"sending {count:,} {what}, {RATE:g} per second; {bad} of them are invalid orders")
        self._sender.start(iter(some), RATE)

    # The end.

    def _end(self, is_told: bool) -> list[bool]:
        """End all processes. Returns whether each worker that was not killed, and Spark, ended gracefully.

        is_told: whether the run has come to its end; else the processes get little time."""
        everybody: list[Worker | Spark] = [worker for worker in self._workers if not worker.is_killed]
        if self._spark is not None:
            everybody.append(self._spark)
        for each in everybody:
            each.ask_to_stop()  # ask all of them first, then wait for each
        if not is_told:
            until = time.monotonic() + CUT_SHORT_S_MAX
            return [each.end(until) for each in everybody]
        until = max(self._began + RUN_S_MAX, time.monotonic() + END_S_MAX)
        have_left = []
        for each in everybody:
            self._wait = Wait(each.name, "end", time.monotonic())
            have_left.append(each.end(until, self._tell_of_wait))
        return have_left

    def _ending(self, have_left: list[bool]) -> Ending:
        sent = self._sender.acknowledged
        found = account([place for place, _ in sent], [line for worker in self._workers for line in worker.told])
        lines = found.lines(self._sender.count)
        has_zombie = not self._is_sqlite
        if has_zombie:
            lines.append(
                Line("late commit of the zombie", "refused", "refused" if self._workers[1].refused else "accepted")
            )
        lines.append(Line("workers: lag", "0", self._group.describe().lag_text))
        dead: dict[str, int] = {}
        if self._spark is not None:
            spark = self._spark
            made = Made(spark.totals(), spark.archived(), spark.dead_letters(), spark.lag())
            lines += spark_lines(sent, SOURCE, orders.LAST, made)
            dead = dict(reasons(made.dead_letters))
        lines.append(Line("processes that exited gracefully", f"{len(have_left)}", f"{sum(have_left)}"))
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

    def _until_spark(self, count: int, what: str) -> None:
        """Wait until each query of Spark has read this number of messages."""
        self._until(lambda: min(self._read.values()) >= count, what, "Spark")

    def _until_at_work(self, condition: Callable[[], bool], who: str) -> None:
        """Wait until this worker has handled enough, or has a message in hand. More messages are sent when all are
        done: on a busy machine other workers may have handled those that were meant for this one."""

        def is_met() -> bool:
            if condition():
                return True
            if self._sender.is_done and self._is_done():
                self._sender.start(islice(self._orders, MORE), RATE)
            return False

        self._until(is_met, "handle messages", who)

    def _until(self, condition: Callable[[], bool], what: str, who: str = "the workers") -> None:
        """Redraw the screen until the condition holds. Raises Stuck if a process has died, if nothing changes any more,
        or if the time of the run is over."""
        self._wait = wait = Wait(who, what, time.monotonic())
        progress, progress_at = self._progress(), wait.since
        while True:
            began = time.monotonic()
            self._look()
            if condition():
                return
            self._check()
            now = time.monotonic()
            if (changed := self._progress()) != progress:
                progress, progress_at = changed, now
            if now > self._began + RUN_S_MAX - END_S_MAX:
                raise Stuck(self._unfinished(wait, now, f"the time limit of the demo is {RUN_S_MAX / 60:g} minutes"))
            if now > progress_at + STALLED_S_MAX:
                raise Stuck(self._unfinished(wait, now, f"nothing has changed for {STALLED_S_MAX:g} s"))
            self._tell_of_wait()
            # On a busy machine a look takes long, and would take the time of those that it waits for.
            time.sleep(max(LOOK_S, now - began))

    def _unfinished(self, wait: Wait, now: float, why: str) -> str:
        advice = " pxrs demo --no-spark needs less CPU time." if self._spark is not None else ""
        return f"{wait.who} did not {wait.what} in {now - wait.since:.0f} s: {why}. Is the machine very busy?{advice}"

    def _progress(self) -> object:
        """A value that changes when something goes on: messages that were sent, handled and read, owners, what
        processes print; and the CPU time of processes that are starting, which print nothing. Where CPU time is not
        known, a process that starts and lives counts as progress."""
        spark = self._spark
        starting = [each.name for each in (*self._workers, *([spark] if spark else ())) if each.state == "starting"]
        used = [self._cpu.get(name) for name in starting]
        return (
            len(self._sender.acknowledged),
            sum(len(worker.told) for worker in self._workers),
            self._checkpointed(),
            self._owners(),
            [time.monotonic() if seconds is None else int(seconds) for seconds in used],
            None if spark is None else (spark.starts, spark.events, *self._read.values()),
        )

    def _measure_cpu(self) -> None:
        if (now := time.monotonic()) - self._cpu_at >= CPU_LOOK_S:
            self._cpu_at = now
            everybody = [*self._workers, *([self._spark] if self._spark is not None else ())]
            used = cpu_s(each.process.pid for each in everybody)
            self._cpu = {each.name: used[each.process.pid] for each in everybody if each.process.pid in used}

    def _waiting(self) -> str:
        """What the demo waits for, and for how long so far."""
        wait = self._wait
        text = f"waiting for {wait.who} to {wait.what}: {time.monotonic() - wait.since:.0f} s so far"
        names = WORKERS if wait.who == "the workers" else (wait.who,)
        used = [seconds for name, seconds in self._cpu.items() if name in names]
        return f"{text}, {sum(used):.0f} s of CPU time used" if used else text

    def _tell_of_wait(self) -> None:
        """Print what is waited for, every few seconds. On a terminal the last line of the screen has it."""
        now = time.monotonic()
        if now - self._wait.told_at >= TELL_S and not (self._live.is_started and self._console.is_terminal):
            self._wait.told_at = now
            self._measure_cpu()
            self._say(f"[dim]{escape(self._waiting())}[/]")

    def _check(self) -> None:
        for failure in [*(worker.failure() for worker in self._workers), self._sender.error]:
            if failure is not None:
                raise Stuck(failure)
        if self._spark is not None and (failure := self._spark.failure()) is not None:
            if self._spark.starts == SPARK_STARTS_MAX:
                raise Stuck(failure)
            self._say(f"[yellow]{escape(failure)}[/]; restarting it, it continues where it was")
            self._spark.start()

    def _look(self) -> None:
        self._found = self._describe()
        self._measure_cpu()
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
        if now - self._drawn_at >= DRAW_S:
            self._drawn_at = now
            self._draw(self._waiting())

    def _draw(self, waiting: str) -> None:
        rows = self._found.partitions if self._found is not None else ()
        sent = sum(row.end or 0 for row in rows)
        spark = None if self._spark is None else spark_table(self._spark.state, self._read, sent)
        self._live.update(picture(self._workers, rows, spark, waiting, self._console.width))

    def _mark(self, text: str) -> None:
        self.marks.append(Mark(time.monotonic() - self._began, text))

    def _say(self, text: str) -> None:
        self._live.console.print(f"  {time.monotonic() - self._began:5.1f} s  {text}", highlight=False, soft_wrap=True)
