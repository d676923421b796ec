"""The processes of `pxrs worker`, as their supervisor sees them: how one is started and killed, and what they report.

With `--metrics-listen`, each worker has a pipe of its own to the supervisor, which exports the counts of all of them
(`pxrs.metrics.reports`) and answers for their health.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from pxrs.cli.worker_settings import STOPS, TRIAL, Settings
from pxrs.metrics import instruments, table
from pxrs.metrics.health import SILENT_S, Verdict
from pxrs.metrics.reports import Report, Reports
from pxrs.registry.outage import WAITING

if TYPE_CHECKING:
    from pxrs.metrics.prometheus import Part

RESTART_S: Final = (0.2, 30.0)
"""The first pause before a restart, and the longest. Each pause is twice the one before."""
LATE_S: Final = 10.0
"""A worker that has not reported for so long is not ready."""


@dataclass(slots=True)
class Slot:
    """One of the N workers: its process, or when the next process is to be started."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    """None while no process of this worker runs."""
    started_at: float = 0.0
    pause_s: float = RESTART_S[0]
    """The pause before the next restart."""
    restart_at: float | None = 0.0
    """When to start a process; None while one runs, and when none is to be started any more."""


def spawn(settings: Settings, reports: Reports | None = None) -> subprocess.Popen[bytes]:
    """Start a worker process. reports: where what it reports goes."""
    command = [sys.executable, "-P", "-c", "from pxrs.cli.worker_process import main; main()"]
    pipe = None if reports is None else os.pipe()
    if pipe is not None:
        settings = replace(settings, report_to=pipe[1])
    # Ctrl-C in a terminal reaches the worker too, which can act on it only once its signal handlers are set: it is
    # started with these signals blocked, and unblocks them then.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        if pipe is None:
            process = subprocess.Popen(command, stdin=subprocess.PIPE)
        else:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=pipe[1:])
    except BaseException:
        if pipe is not None:
            os.close(pipe[0])
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if pipe is not None:
            os.close(pipe[1])
    if reports is not None and pipe is not None:
        reports.add(settings.number, pipe[0])
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has died already; the supervisor finds that
        process.stdin.write(settings.dump())
        process.stdin.flush()
    return process


def kill(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None and process.poll() is None:
        process.kill()
        process.wait()


def ending(code: int) -> str:
    """How a process ended, for people."""
    return f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Monitor:
    """Metrics and health of all workers, for the thread that answers over HTTP."""

    def __init__(self, slots: Sequence[Slot], reports: Reports) -> None:
        self._slots, self._reports = slots, reports
        self.waiting: str | None = WAITING
        """Why no worker is started yet; None once the trial process has succeeded."""

    def live(self) -> Verdict:
        """The supervisor starts a worker that dies again, but does not notice one that hangs as a whole."""
        latest, now = self._reports.latest(), time.monotonic()
        for slot in self._slots:
            report = latest.get(slot.number)
            silent_s = now - (slot.started_at if report is None else report.at)
            if slot.process is not None and silent_s >= SILENT_S:
                return Verdict(False, f"worker {slot.number} has reported nothing for {silent_s:.0f} s")
        return Verdict(True)

    def ready(self) -> Verdict:
        states = self._states()
        if self.waiting is not None:
            trial = self._reports.latest().get(TRIAL)
            missing = None if trial is None else trial.state.get("missing")
            reason = f"waiting until the {missing} exists" if missing else self.waiting
            return Verdict(False, reason, {"workers": {str(number): state for number, state in states.items()}})
        waiting = [number for number, state in states.items() if state != "ready"]
        fields = {"workers": {str(number): state for number, state in states.items()}}
        if not waiting:
            return Verdict(True, fields=fields)
        return Verdict(False, f"worker {waiting[0]} is {states[waiting[0]]}", fields)

    def parts(self) -> list[Part]:
        """The counts of all workers, each with its number as a label, and what the supervisor knows itself."""
        from pxrs.metrics.prometheus import Part

        states = list(self._states().values())
        own: instruments.Snapshot = {
            table.WORKER_PROCESSES.name: [((state,), states.count(state)) for state in sorted(set(states))]
        }
        if restarts := instruments.WORKER_RESTARTS.read():
            own[table.WORKER_RESTARTS.name] = restarts
        latest = sorted(self._reports.latest().items())
        workers = [Part({"worker": str(number)}, each.counts) for number, each in latest if number != TRIAL]
        return [Part({}, own), *workers]

    def _states(self) -> dict[int, str]:
        latest, now = self._reports.latest(), time.monotonic()
        return {slot.number: _state(slot, latest.get(slot.number), now) for slot in self._slots}


def _state(slot: Slot, report: Report | None, now: float) -> str:
    if slot.process is None:
        return "stopped" if slot.restart_at is None else "starting"
    if report is None:
        return "starting"
    state: Any = report.state.get("state")
    return "silent" if now - report.at >= LATE_S else str(state)
