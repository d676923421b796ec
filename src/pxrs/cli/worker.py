"""`pxrs worker`: a handler in several processes that a supervisor keeps running.

The supervisor starts each worker process afresh and never forks: the clients of etcd and SQLite cannot be used after a
fork. The supervisor itself opens neither the log nor the registry, so that little can fail in it.

What happens on failure:

| what fails                                 | what the supervisor does, and with which exit code it ends             |
|--------------------------------------------|------------------------------------------------------------------------|
| the handler cannot be imported, or an      | a trial process reports it before any worker is started; 2             |
| option is refused                          |                                                                        |
| a topic or queue does not exist at the     | nothing: the trial process waits until it exists, or creates it with   |
| start                                      | `--create`; with `--no-wait` it reports it; 3                          |
| a topic, a queue or the registry can never | shows the reason and stops the other workers as by SIGTERM; 3.         |
| work as it is given                        | `restarts.py` decides by the class of the error                        |
| the registry cannot be reached at the      | starts the trial process again; after `--registry-wait`: 1             |
| start                                      |                                                                        |
| the registry cannot be reached, a worker   | starts it again, after pauses that double until the worker has run for |
| or the trial process dies or cannot be     | `STABLE_S`. Meanwhile its partitions go to other members, and its      |
| started                                    | queue items to other workers                                           |
| the handler raises                         | nothing: `--on-error`, or the queue's policy, decides in the worker,   |
|                                            | which shows the error with its traceback                               |
| a handler hangs                            | nothing: after `--progress-timeout` other members get the partitions;  |
|                                            | after as long again the worker ends itself, and is started again. A    |
|                                            | queue item stays with its worker for as long as that runs              |
| with `--until-end`, a failed message has   | the worker ends when the other partitions are read, and says so; 3     |
| paused its partition                       |                                                                        |
| the queue is deleted                       | the workers end, and say so; 3                                         |
| SIGTERM or SIGINT arrives                  | passes it on; 0. A worker finishes the messages in hand, writes        |
|                                            | checkpoints, releases its partitions and takes nothing more. One that  |
|                                            | is not done after `--grace` is killed, and its messages in hand are    |
|                                            | handled again by another member; then 1                                |
| the supervisor is killed                   | each worker sees the end of its pipe, and stops as by SIGTERM          |
"""

from __future__ import annotations

import functools
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from pxrs.cli import logs
from pxrs.cli.amounts import duration
from pxrs.cli.exits import EXIT_FAILED, EXIT_FINAL, exit_codes
from pxrs.cli.monitoring import MetricsListen, monitored
from pxrs.cli.options import RegistryWait, check_places, open_hub
from pxrs.cli.supervised import RESTART_S, Monitor, Slot, ending, kill, spawn
from pxrs.cli.worker_settings import (
    EXIT_BAD_HANDLER,
    EXIT_CANNOT_WORK,
    EXIT_UNREACHABLE,
    FINAL,
    STOPS,
    TRIAL,
    Settings,
    tell,
)
from pxrs.group.assign import assignor_named
from pxrs.group.records import Keys
from pxrs.group.timings import Timings
from pxrs.metrics.instruments import WORKER_RESTARTS
from pxrs.metrics.reports import Reports
from pxrs.queue.records import check_name
from pxrs.registry.address import parse
from pxrs.registry.outage import START_WAIT_S, WAITING
from pxrs.wording import counted

PROCESSES_MAX: Final = 1_000
STABLE_S: Final = 10.0
"""A worker that has run for so many seconds is started again after the first pause."""
GRACE_S_DEFAULT: Final = 30.0
GRACE_S_MAX: Final = 86_400.0
GROUP_OPTIONS: Final = (
    *("topic", "group", "on_error", "retries", "dead_letters", "start", "until_end", "assignor"),
    *("handover_timeout", "progress_timeout", "commit_interval"),
)
"""The options that only groups have: they are refused with `--queue`."""


def _duration(what: str, *limits: float) -> Any:
    return typer.Option(metavar="DURATION", parser=duration(*limits), help=what)


class OnError(StrEnum):
    PAUSE = "pause"
    RETRY = "retry"
    DEAD_LETTER = "dead-letter"
    RAISE = "raise"


class Start(StrEnum):
    EARLIEST = "earliest"
    LATEST = "latest"


# Over the limit: Typer makes the options and their help from the signature, which is most of the function.
@exit_codes()
def worker(
    context: typer.Context,
    handler: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:HANDLER",
            help="A function that takes a message, or, with --queue, a transaction and an item. The current directory "
            "is searched first.",
        ),
    ],
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            envvar="PXRS_AT",
            metavar="URL",
            help="The hub: its directory, or pxrs://HOST:PORT. Not needed for queues and registered sources if "
            "--registry is given.",
        ),
    ] = None,
    topic: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOPIC",
            help="The topic or registered source that the group reads. May be repeated: each worker reads them all.",
        ),
    ] = None,
    group: Annotated[str | None, typer.Option(metavar="GROUP", help="The group to join.")] = None,
    queue: Annotated[
        list[str] | None,
        typer.Option(
            metavar="QUEUE",
            help="Take items from a queue, in place of --topic and --group. Repeat it to take from several: the "
            "threads are shared out among them.",
        ),
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option("--registry", envvar="PXRS_REGISTRY", metavar="URL", help="The registry, if not in the hub."),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, max=PROCESSES_MAX, help="How many worker processes.")] = 1,
    threads: Annotated[int, typer.Option(min=1, max=1_000, help="In each process; each partition uses one.")] = 1,
    on_error: Annotated[OnError, typer.Option(help="What to do when the handler raises.")] = OnError.PAUSE,
    retries: Annotated[int, typer.Option(min=1, help="With --on-error retry: retries until a pause.")] = 5,
    dead_letters: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="With --on-error dead-letter: the topic of dead letters.")
    ] = None,
    start: Annotated[Start, typer.Option(help="Where a new group begins.")] = Start.EARLIEST,
    until_end: Annotated[bool, typer.Option("--until-end", help="Exit at the current end of the topics.")] = False,
    assignor: Annotated[
        str, typer.Option(help="sticky, range, round-robin or an entry point pxrs.assignors; the same for all members.")
    ] = "sticky",
    lease_ttl: Annotated[
        float | None, _duration("After how long without lease renewal a worker counts as dead.")
    ] = None,
    handover_timeout: Annotated[float | None, _duration("How long a hand-over may take.")] = None,
    progress_timeout: Annotated[float | None, _duration("How long one message may take.")] = None,
    commit_interval: Annotated[float | None, _duration("The time between checkpoints.")] = None,
    grace: Annotated[
        float, _duration("How long workers may finish messages in hand when stopped.", 0, GRACE_S_MAX)
    ] = GRACE_S_DEFAULT,
    wait: Annotated[
        bool | None,
        typer.Option(
            "--wait/--no-wait",
            help="At the start, wait until the topics or queues exist, or exit with code 3. By default wait, unless "
            "--until-end is given.",
        ),
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Create topics and queues that do not exist, with default settings.")
    ] = False,
    metrics_listen: MetricsListen = None,
    registry_wait: RegistryWait = START_WAIT_S,
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON, one object per line.")] = False,
) -> None:
    """Run a handler for a group's messages, or for the items of a queue, in several processes, until SIGTERM or Ctrl-C;
    a second Ctrl-C stops at once.

    A process that dies is restarted. Events are printed on standard error with their time in UTC, and errors of the
    handler with their traceback. Exit code: 0 after a graceful stop; 1 if a worker had to be killed; 2 if an option is
    refused or the handler cannot be imported; 3 after a permanent error, do not restart: a wrong setting, a partition
    left paused at the end, or a deleted queue.
    """
    seconds = {
        "lease_ttl": lease_ttl,
        "handover_timeout": handover_timeout,
        "progress_timeout": progress_timeout,
        "commit_interval": commit_interval,
    }
    given = {name: value for name, value in seconds.items() if value is not None}
    # What can be seen to be wrong here is reported once, and not by every worker.
    as_json = as_json or logs.chosen() == "json"
    for url in (at, registry):
        if url is not None and parse(url).scheme == "memory":
            raise typer.BadParameter("memory: exists in one process only, and the workers are several processes")
    waits = not until_end if wait is None else wait
    settings = Settings(handler, [], None, at, registry, threads, grace, given, as_json, waits=waits, creates=create)
    if queue:
        _refuse_with_queue(context)
        _refuse_again("--queue", queue)
        for name in queue:
            check_name(name)
        with open_hub(at, registry, may_be_missing=waits or create):
            pass  # a wrong path is reported here; neither the log nor the registry is called
        _supervise(replace(settings, queues=queue), processes, metrics_listen, registry_wait)
        return
    if not topic or group is None:
        raise typer.BadParameter("give --topic and --group, or --queue")
    _refuse_again("--topic", topic)
    # --registry alone is enough for a registered source; for a topic, the worker process reports that --at is missing.
    may_be_missing = at is not None and (waits or create)
    check_places(at, registry, makes_registry=at is not None, may_be_missing=may_be_missing)
    Timings(**given)
    Keys(group)
    assignor_named(assignor)
    if (on_error is OnError.DEAD_LETTER) != (dead_letters is not None):
        raise typer.BadParameter("--on-error dead-letter and --dead-letters TOPIC must be given together")
    options: dict[str, Any] = {
        **given,
        "on_error": on_error.value,
        "retries_max": retries,
        "start": start.value,
        "assignor": assignor,
    }
    if dead_letters is not None:
        options["dead_letters"] = dead_letters
    if until_end:
        options["until"] = "end"
    settings = replace(settings, topics=topic, group=group, options=options)
    _supervise(settings, processes, metrics_listen, registry_wait)


def _refuse_again(option: str, names: list[str]) -> None:
    if again := [name for number, name in enumerate(names) if name in names[:number]]:
        raise typer.BadParameter(f"{option} {again[0]} is given twice")


def _refuse_with_queue(context: typer.Context) -> None:
    for name in GROUP_OPTIONS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(f"{option} cannot be used with --queue: it applies to topics and their groups")


def _supervise(settings: Settings, processes: int, metrics_listen: str | None, start_s: float) -> None:
    if metrics_listen is None:
        code = Supervisor(settings, processes, start_s=start_s).run()
    else:
        with closing(Reports()) as reports:
            supervisor = Supervisor(settings, processes, reports, start_s=start_s)
            monitor = supervisor.monitor(reports)
            told = functools.partial(tell, settings.as_json, "metrics")
            with monitored(metrics_listen, live=monitor.live, ready=monitor.ready, tell=told, read=monitor.parts):
                code = supervisor.run()
    if code:
        raise typer.Exit(code)


class Supervisor:
    """Starts the workers, restarts those that die, and ends when all have ended. Times are of the monotonic clock."""

    def __init__(
        self,
        settings: Settings,
        processes: int,
        reports: Reports | None = None,
        *,
        start_s: float = START_WAIT_S,
    ) -> None:
        """reports: where what the workers report for `--metrics-listen` goes. start_s: for how long the trial process
        is started again after an error that may pass, before the command ends."""
        self._settings, self._reports, self._start_s = settings, reports, start_s
        self._monitor: Monitor | None = None
        """Answers for the health of the workers; None without `--metrics-listen`."""
        self._slots = [Slot(number) for number in range(1, processes + 1)]
        self._kill_at: float | None = None
        """When the workers that still run are killed; set when the supervisor begins to stop."""
        self._code = 0
        """The exit code: raised when a worker was killed, or has ended for good with another exit code than 0."""
        self._received: list[int] = []
        """Signals that the signal handler has noted, and `_wait` has not acted upon yet."""

    def monitor(self, reports: Reports) -> Monitor:
        """Metrics and health of these workers, which report there."""
        self._monitor = Monitor(self._slots, reports)
        return self._monitor

    def run(self) -> int:
        """Run until all workers have ended; the exit code."""
        with self._signals() as woken:
            try:
                code = self._try(woken)
                if code or self._kill_at is not None:
                    return code
                self._say_waiting(None)
                while self._start_due() or self._running():
                    self._wait(woken, self._next_moment())
                    self._reap()
            finally:
                for slot in self._running():
                    kill(slot.process)  # reached only if the supervisor itself has failed
        code = self._code
        self._tell("stopped", f"all workers have ended{', not all of them gracefully' if code else ''}", code=code)
        return code

    def _try(self, woken: socket.socket) -> int:
        """Have a trial process import the handler and open topic, queue and registry; start it again after an error
        that may pass. Returns the exit code of the command, 0 if the workers can be started or the command was stopped.

        The loop ends with an exit code, with a signal, or after `start_s`; its pauses double up to `RESTART_S[1]`."""
        pause_s, give_up_at = RESTART_S[0], time.monotonic() + self._start_s
        while True:
            try:
                process = spawn(replace(self._settings, number=TRIAL, is_trial=True), self._reports)
            except OSError as error:  # the system has too many processes, or too little memory
                how = f"cannot be started: {error}"
            else:
                while process.poll() is None:
                    self._wait(woken, None)
                    if self._kill_at is not None:
                        kill(process)
                        return 0
                if process.returncode in (0, EXIT_BAD_HANDLER):
                    return process.returncode
                if process.returncode in FINAL:
                    return EXIT_FINAL
                how = ending(process.returncode)
                if process.returncode == EXIT_UNREACHABLE:
                    how = "cannot reach the registry"
            self._say_waiting(f"{WAITING}: the startup check {how}")
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                advice = "check that the registry runs and is reachable from here, or give a longer --registry-wait"
                self._tell("gave-up", f"the startup check {how}; giving up after {self._start_s:g} s: {advice}")
                return EXIT_FAILED
            pause_s = min(pause_s, left_s)
            text = f"the startup check {how}; retrying in {pause_s:.3g} s"
            self._tell("not-started", text, restart_s=pause_s)
            until = time.monotonic() + pause_s
            while time.monotonic() < until:
                self._wait(woken, until)
                if self._kill_at is not None:
                    return 0
            pause_s = min(2 * pause_s, RESTART_S[1])

    def _say_waiting(self, reason: str | None) -> None:
        if self._monitor is not None:
            self._monitor.waiting = reason

    def _start_due(self) -> bool:
        """Start the workers whose `restart_at` has passed; whether any is still to be started."""
        for slot in self._slots:
            if slot.restart_at is None:
                continue
            if self._kill_at is not None:
                slot.restart_at = None
            elif time.monotonic() >= slot.restart_at:
                self._start(slot)
        return any(slot.restart_at is not None for slot in self._slots)

    def _start(self, slot: Slot) -> None:
        try:
            slot.process = spawn(replace(self._settings, number=slot.number), self._reports)
        except OSError as error:  # too many processes, or too little memory: the other workers are not affected
            pause_s = self._put_off(slot, slot.pause_s)
            text = f"worker {slot.number} cannot be started: {error}; retrying in {pause_s:g} s"
            self._tell("not-started", text, worker=slot.number, restart_s=pause_s)
            return
        slot.started_at, slot.restart_at = time.monotonic(), None
        self._tell_of(slot, "started", "started")

    def _put_off(self, slot: Slot, pause_s: float) -> float:
        """Have the worker started after this pause, and double the next one. Returns the pause."""
        slot.pause_s = min(2 * pause_s, RESTART_S[1])
        slot.restart_at = time.monotonic() + pause_s
        return pause_s

    def _running(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.process is not None]

    def _next_moment(self) -> float | None:
        times = [slot.restart_at for slot in self._slots if slot.restart_at is not None]
        if self._kill_at is not None:
            times.append(self._kill_at)
        return min(times, default=None)

    def _wait(self, woken: socket.socket, until: float | None) -> None:
        """Wait for a signal (SIGCHLD of a worker included) or for this time; then act on the signals received, and kill
        the workers if their grace is over."""
        timeout = None if until is None else max(0.0, until - time.monotonic())
        if select.select([woken], [], [], timeout)[0]:
            with suppress(BlockingIOError):
                woken.recv(4096)
        while self._received:
            self._act_on(self._received.pop(0))
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            for slot in self._running():
                self._code = max(self._code, EXIT_FAILED)
                self._tell_of(slot, "killed", "did not finish in time; killing it")
                kill(slot.process)

    def _act_on(self, number: int) -> None:
        """Pass a signal on to the workers; the first one begins the stop, a second SIGINT ends the grace."""
        if self._kill_at is None:
            name = signal.Signals(number).name
            self._begin_stopping(name, signal=name)
        elif number == signal.SIGINT:  # the user has pressed Ctrl-C twice
            self._kill_at = time.monotonic()
        for slot in self._running():
            assert slot.process is not None
            slot.process.send_signal(number)

    def _begin_stopping(self, why: str, **fields: Any) -> None:
        self._kill_at = time.monotonic() + self._settings.grace_s
        text = f"{why}: stopping {counted(len(self._running()), 'worker')} within {self._settings.grace_s:g} s"
        self._tell("stopping", text, **fields)

    def _reap(self) -> None:
        """Note which workers have ended, and put off their restart or begin to stop the others."""
        for slot in self._running():
            assert slot.process is not None
            code = slot.process.poll()
            if code is None:
                continue
            process = slot.process
            if process.stdin is not None:
                with suppress(BrokenPipeError):  # it has died before it read its settings
                    process.stdin.close()
            how = ending(code)
            ran_s = time.monotonic() - slot.started_at
            is_over = code == 0 or code in FINAL or self._kill_at is not None
            if is_over:
                self._code = max(self._code, EXIT_FINAL if code in FINAL else EXIT_FAILED if code else 0)
                self._tell_of(slot, "ended", "has finished" if code == 0 else how, code=code)
            else:
                pause_s = self._put_off(slot, RESTART_S[0] if ran_s >= STABLE_S else slot.pause_s)
                WORKER_RESTARTS.of(str(slot.number)).add()
                self._tell_of(slot, "died", f"{how}; restarting it in {pause_s:g} s", code=code, restart_s=pause_s)
            slot.process = None
            if code == EXIT_CANNOT_WORK and self._kill_at is None:
                self._begin_stopping(f"worker {slot.number} has a permanent error")
                for other in self._running():
                    assert other.process is not None
                    other.process.send_signal(signal.SIGTERM)

    def _tell(self, event: str, text: str, **fields: Any) -> None:
        tell(self._settings.as_json, event, text, **fields)

    def _tell_of(self, slot: Slot, event: str, what: str, **fields: Any) -> None:
        assert slot.process is not None
        pid = slot.process.pid
        self._tell(event, f"worker {slot.number} (pid {pid}) {what}", worker=slot.number, pid=pid, **fields)

    @contextmanager
    def _signals(self) -> Iterator[socket.socket]:
        """A socket that becomes readable when a signal arrives, SIGCHLD of a worker included."""
        woken, waker = socket.socketpair()
        woken.setblocking(False)
        waker.setblocking(False)
        handlers = {number: signal.signal(number, self._note) for number in STOPS}
        handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        old = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        try:
            yield woken
        finally:
            signal.set_wakeup_fd(old)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            woken.close()
            waker.close()

    def _note(self, number: int, frame: object) -> None:
        self._received.append(number)
