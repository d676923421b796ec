"""What the supervisor of `pxrs worker` and its worker processes share: the settings that a process is given, the exit
codes by which it says whether to start it again, and how both print events.

The supervisor handles no messages and imports no pyarrow, so that it starts soon and stays small."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from pxrs.cli.terminal import indented, time_field
from pxrs.clock import wall_time_us
from pxrs.wording import printable, time_text

EXIT_FAILED: Final = 1
EXIT_BAD_HANDLER: Final = 2
"""Exit code of the trial process: the handler cannot be imported, or an option is refused. So does the command end."""
EXIT_PAUSED: Final = 75
"""Exit code: every partition was read up to its end, except those that are paused. A restart would not help."""
EXIT_NO_QUEUE: Final = 76
"""Exit code: the queue of this worker was deleted. A restart would not help."""
EXIT_CANNOT_WORK: Final = 77
"""Exit code: a new process would fail in the same way (`restarts.py`), so the command ends."""
EXIT_UNREACHABLE: Final = 78
"""Exit code of the trial process: the registry, or the server, could not be reached. It is started again."""
TRIAL: Final = 0
"""The number of the trial process; workers are counted from 1."""
FINAL: Final = (EXIT_PAUSED, EXIT_NO_QUEUE, EXIT_CANNOT_WORK)
"""The exit codes after which a worker is not started again."""
STOPS: Final = (signal.SIGTERM, signal.SIGINT)
"""Signals that the supervisor blocks when it starts a worker; the worker unblocks them once its handlers are set."""


@dataclass(frozen=True, slots=True)
class Settings:
    handler: str
    """MODULE:HANDLER."""
    topics: list[str]
    """The topics or sources that each member of the group reads. Empty if the worker handles a queue."""
    group: str | None
    at: str | None
    """The hub's directory; None if a queue or a registered source needs none, and then `registry` is given."""
    registry: str | None
    threads: int
    grace_s: float
    """How long a worker whose supervisor has died may take to finish the messages that it has begun."""
    options: dict[str, Any]
    """Keyword arguments of `Hub.consumer`; with a queue, of `pxrs.open`."""
    as_json: bool = False
    number: int = 0
    is_trial: bool = False
    """Only check that the handler can be imported, and that the registry and the topic or queue can be opened."""
    queues: list[str] = field(default_factory=list)
    """The queues that the worker takes from, in place of topics and group. Empty if it is a member of a group."""
    waits: bool = False
    """The trial process waits until the topics or queues exist, instead of ending with the error that one does not."""
    creates: bool = False
    """The trial process creates the topics or queues that do not exist, with the default settings."""
    report_to: int | None = None
    """The descriptor of a pipe for reports of metrics and health; None if the supervisor exports none."""

    def dump(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def tell(as_json: bool, event: str, text: str, *, traceback: str = "", **fields: Any) -> None:
    """Print one event with its time on standard error, in one write, because several processes share it. As JSON it is
    one line; for people, the lines of a traceback follow, indented."""
    now_us = wall_time_us()
    if as_json:
        more = {"traceback": traceback} if traceback else {}
        about = {"event": event, **time_field("time", now_us), **fields, **more, "text": text}
        lines = [json.dumps(about, default=str)]
    else:
        lines = [f"{time_text(now_us / 1e6)} {printable(text.replace(chr(10), ' '))}"]
        lines += [indented(traceback)] if traceback else []
    with suppress(OSError):  # nobody reads standard error any more; the worker must still finish its work
        os.write(2, "\n".join([*lines, ""]).encode(errors="backslashreplace"))
