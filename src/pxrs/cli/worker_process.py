"""One process of `pxrs worker`: imports the handler, joins the group or takes from the queue, and handles messages or
items until it is stopped.

Its settings come as one line on standard input, so that no password is seen in a list of processes. The supervisor
keeps this pipe open: when the pipe ends, the worker knows that the supervisor has died, on every system and however it
died. However a worker is stopped, it finishes what is in hand, commits it, releases its partitions and leaves the
group.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

import pxrs
from pxrs.cli import logs
from pxrs.cli.restarts import is_final, is_wrong_argument
from pxrs.cli.terminal import error_text
from pxrs.cli.worker_settings import (
    EXIT_BAD_HANDLER,
    EXIT_CANNOT_WORK,
    EXIT_FAILED,
    EXIT_NO_QUEUE,
    EXIT_PAUSED,
    EXIT_UNREACHABLE,
    STOPS,
    Settings,
    tell,
)
from pxrs.consumer.consumer import Consumer, TopicsConsumer
from pxrs.consumer.dead_letters import check_other_topic
from pxrs.errors import (
    Closed,
    HandlerFailed,
    PartitionsPaused,
    PxrsError,
    QueueExists,
    TopicExists,
    UnknownQueue,
    UnknownTopic,
)
from pxrs.failures import failure_of
from pxrs.handler import OF_A_MESSAGE, OF_AN_ITEM, fault_of
from pxrs.log.joined import JoinedSource
from pxrs.metrics.reports import Reporter
from pxrs.registry.outage import SAY_S, UNREACHABLE
from pxrs.wording import command, existing

if TYPE_CHECKING:
    from pxrs.queue.handle import QueueHandle
    from pxrs.queue.listener import QueueListener

_LOOK_S: Final = 1.0
_STOP_AGAIN_S: Final = 0.05
_MISSING_S: Final = 0.5
"""How often the trial process looks whether a missing topic or queue exists."""


def load_handler(path: str, of: Sequence[str] = OF_A_MESSAGE) -> Any:
    """The function that MODULE:HANDLER names; it can be called with these arguments. Raises ImportError, which says
    what is wrong and where."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ImportError(f"{path!r} is not a handler: give MODULE:HANDLER, such as shop.billing:handle")
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        # Not if a module is missing that the handler's module imports.
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            advice = f"write {module_name[:-3]}:{name}, without .py" if module_name.endswith(".py") else "correct it"
            where = f"in {os.getcwd()} or among the installed packages"
            raise ImportError(f"{path}: there is no module {error.name} {where}: {advice}") from error
        reason = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        raise ImportError(f"{path}: importing {module_name} failed: {reason}{_place(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            where = getattr(found, "__file__", None) or module_name
            raise ImportError(f"{path}: there is no {part!r} in {where}")
        found = getattr(found, part)
    if fault := fault_of(path, found, of):
        raise ImportError(fault)
    return found


def _place(error: BaseException) -> str:
    """The last line of the traceback below the current directory, which is the user's own code; if there is none, the
    last line."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    frames = [each for each in traceback.extract_tb(error.__traceback__)[1:] if not each.filename.startswith("<")]
    own = [each for each in frames if each.filename.startswith(os.getcwd() + os.sep)]
    return "".join(f" ({each.filename}, line {each.lineno})" for each in (own or frames)[-1:])


class Process:
    def __init__(self, settings: Settings, lifeline: int) -> None:
        """lifeline: the pipe that ends when the supervisor dies."""
        self._settings, self._lifeline = settings, lifeline
        self._consumer: Consumer | TopicsConsumer | None = None
        self._listeners: Listeners | None = None
        self._missing = ""
        """The topic or queue that the trial process waits for; empty if it waits for none."""
        self._is_stopping = False
        self._finished = threading.Event()
        self._signals, self._signalled = socket.socketpair()
        self._signalled.setblocking(False)

    def run(self) -> None:
        settings = self._settings
        self._listen()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        threading.Thread(target=self._watch, name="pxrs-worker-watch", daemon=True).start()
        if settings.report_to is not None:
            os.set_inheritable(settings.report_to, False)
            Reporter(settings.report_to, self._state).start()
        handler = load_handler(settings.handler, OF_AN_ITEM if settings.queues else OF_A_MESSAGE)
        self._listen()  # the module of the handler may have set its own handlers of these signals
        if not logging.getLogger().handlers:
            level = logging.WARNING if logs.chosen() is None else logs.LEVEL
            logging.getLogger().addHandler(_Lines(settings, level))
            logging.getLogger("pxrs").setLevel(level)
        options = settings.options if settings.queues else {}
        with pxrs.open(settings.at, registry=settings.registry, **options) as hub:
            if settings.is_trial:
                self._try(hub)
                return
            if settings.queues:
                self._listeners = Listeners([hub.queue(name) for name in settings.queues], handler, settings.threads)
                if not self._is_stopping:
                    self._listeners.run()
            else:
                self._consume(hub, handler)
        self._finished.set()

    def _state(self) -> dict[str, str]:
        """The state that /readyz of the supervisor shows."""
        if self._is_stopping:
            return {"state": "stopping"}
        consumer, listeners = self._consumer, self._listeners
        if consumer is not None:
            return {"state": "away" if consumer.is_away else "ready" if consumer.problem is None else "disconnected"}
        if listeners is not None:
            return {"state": "ready" if listeners.has_lease else "disconnected"}
        return {"state": "starting", "missing": self._missing}

    def _consume(self, hub: pxrs.Hub, handler: Any) -> None:
        settings = self._settings
        assert settings.group is not None
        consumer: Consumer | TopicsConsumer
        if len(settings.topics) == 1:
            consumer = hub.consumer(settings.topics[0], settings.group, **settings.options)
        else:
            consumer = hub.consumer(settings.topics, settings.group, **settings.options)
        with consumer:
            self._consumer = consumer
            if not self._is_stopping:
                consumer.run(handler, settings.threads)

    def _try(self, hub: pxrs.Hub) -> None:
        settings = self._settings
        if settings.creates:
            self._create_missing(hub)
        if settings.waits:
            self._wait_for_missing(hub)
        if settings.queues:
            for name in settings.queues:
                hub.queue(name)
            return
        source = JoinedSource([hub.readable(topic) for topic in settings.topics])
        dead_letters = settings.options.get("dead_letters")
        if dead_letters is not None:
            check_other_topic(source.parts, hub.topic(dead_letters).id)
        hub.check_registry()
        # Checks that the registry answers, and makes its tables before several workers try to.
        hub.registry.get("groups")

    def _first_missing(self, hub: pxrs.Hub) -> UnknownTopic | UnknownQueue | None:
        """The error of the first topic or queue that the worker needs and that does not exist. Creates nothing."""
        try:
            for name in self._settings.queues:
                if hub.parts.registry.is_missing:  # `hub.queue` would create an empty registry
                    return UnknownQueue(name)
                hub.queue(name)
            for name in self._settings.topics:
                hub.readable(name)
            if "dead_letters" in self._settings.options:
                hub.topic(self._settings.options["dead_letters"])
        except (UnknownTopic, UnknownQueue) as error:
            return error
        return None

    def _create_missing(self, hub: pxrs.Hub) -> None:
        while (missing := self._first_missing(hub)) is not None:
            kind, name = _named(missing)
            try:
                if kind == "queue":
                    hub.create_queue(name)
                else:
                    hub.create_topic(name)
            except (QueueExists, TopicExists):  # another process has created it since, or it is the name of a source
                again = self._first_missing(hub)
                if again is not None and _named(again) == (kind, name):
                    raise
            else:
                text = f"created the {kind} {name} with default settings"
                tell(self._settings.as_json, "created", text, **_me(self._settings))

    def _wait_for_missing(self, hub: pxrs.Hub) -> None:
        """Return when everything exists that the worker needs. The wait has no limit: the supervisor ends this process
        if it is stopped. The wait goes on during an outage."""
        say_at = 0.0
        while True:
            try:
                missing = self._first_missing(hub)
                if missing is None:
                    break
                kind, name = _named(missing)
                self._missing = f"{kind} {name}"
                creation = command(kind, "create", name, *hub.parts.place)
                known = f"{existing(missing.choices)}; " if missing.choices else ""
                advice = (
                    f"{known}create it with `{creation}`, or start the worker with --create; --no-wait exits instead"
                )
            except UNREACHABLE as error:
                if not self._missing:
                    raise
                advice = str(error)
            if time.monotonic() >= say_at:
                say_at = time.monotonic() + SAY_S
                text = f"waiting until the {self._missing} exists: {advice}"
                tell(self._settings.as_json, "waiting", text, missing=self._missing, **_me(self._settings))
            time.sleep(_MISSING_S)
            if self._is_stopping:
                os._exit(EXIT_FAILED)
        self._missing = ""

    def _listen(self) -> None:
        """Have signals reach the watching thread through a socket, whatever code the main thread runs."""
        for number in STOPS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)

    def _watch(self) -> None:
        settings = self._settings
        is_orphan = self._wait_for_stop()
        if is_orphan:
            tell(
                settings.as_json,
                "orphaned",
                f"worker {settings.number}: the supervisor is gone; stopping",
                **_me(settings),
            )
        self._is_stopping = True
        left_s = settings.grace_s
        # Repeated: the consumer or the listener may not be made yet.
        while not self._finished.wait(_STOP_AGAIN_S):
            for at_work in (self._consumer, self._listeners):
                if at_work is not None:
                    at_work.stop()
            is_orphan = is_orphan or bool(select.select([self._lifeline], [], [], 0)[0])
            left_s -= _STOP_AGAIN_S
            if is_orphan and left_s <= 0:  # with a supervisor, that one ends a worker that takes too long
                os._exit(EXIT_FAILED)

    def _wait_for_stop(self) -> bool:
        """Wait until the worker is to stop. Returns whether that is because the supervisor has died."""
        away_at: float | None = None
        while True:
            ready, _, _ = select.select([self._lifeline, self._signals.fileno()], [], [], _LOOK_S)
            if self._lifeline in ready:
                return True
            # The module of the handler may handle other signals, which arrive here too.
            if ready and any(number in STOPS for number in self._signals.recv(4096)):
                return False
            consumer = self._consumer
            if consumer is None or not consumer.is_away:
                away_at = None
                continue
            away_at = time.monotonic() if away_at is None else away_at
            limit_s = consumer.timings.progress_timeout
            if limit_s is not None and time.monotonic() >= away_at + limit_s:
                self._end_hung(limit_s)

    def _end_hung(self, limit_s: float) -> NoReturn:
        """End this process, whose partitions other members own by now: a thread that hangs in a handler cannot be
        ended."""
        text = f"worker {self._settings.number}: handler still hangs {limit_s:g} s after others took over; exiting"
        tell(self._settings.as_json, "hung", text, **_me(self._settings))
        os._exit(EXIT_FAILED)


def _named(missing: UnknownTopic | UnknownQueue) -> tuple[str, str]:
    """What does not exist, `topic` or `queue`, and its name."""
    return ("queue", missing.queue) if isinstance(missing, UnknownQueue) else ("topic", missing.topic)


class Listeners:
    """The listeners of a worker, one for each of its queues, which share its threads. If one ends by itself, because
    its queue was deleted, the others are stopped."""

    def __init__(self, queues: Sequence[QueueHandle], handler: Any, threads: int) -> None:
        """threads: of all queues together; each queue has at least one."""
        least, more = divmod(threads, len(queues))
        shares = [max(1, least + (number < more)) for number in range(len(queues))]
        self._all = [pxrs.QueueListener(queue, handler, share) for queue, share in zip(queues, shares, strict=True)]
        self._failures: list[BaseException] = []
        """What has ended listeners, in the order in which they ended."""
        self._is_stopped = False

    @property
    def has_lease(self) -> bool:
        return self._all[0].queue.store.has_lease  # all queues of a hub are in one store

    def run(self) -> None:
        """Return when `stop` was called and all handlers have returned. Raises the first error that has ended a
        listener."""
        first, *others = self._all
        threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in others]
        for thread in threads:
            thread.start()
        self._run(first)
        for thread in threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _run(self, listener: QueueListener) -> None:
        try:
            listener.run()
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            if not (self._is_stopped and isinstance(error, Closed)):  # it was stopped before it was started
                self._failures.append(error)
        finally:
            self.stop()

    def stop(self) -> None:
        """Take no more items; running handlers go on. May be called again."""
        self._is_stopped = True
        for each in self._all:
            each.stop()


class _Lines(logging.Handler):
    """Prints log records as events; used only if the module of the handler has set up no logging."""

    def __init__(self, settings: Settings, level: int) -> None:
        super().__init__(level)
        self._settings = settings

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._tell(record)
        except Exception:  # noqa: BLE001 - a record that cannot be printed must not end the thread that logs it
            self.handleError(record)

    def _tell(self, record: logging.LogRecord) -> None:
        text = f"worker {self._settings.number}: {record.getMessage()}"
        added = {name: value for name, value in vars(record).items() if name not in _RECORD_FIELDS}
        # A caller may add fields of any name, also names that every event has.
        fields = {f"{name}_" if name in _EVENT_FIELDS else name: value for name, value in added.items()}
        traceback = ""
        if record.exc_info and record.exc_info[1] is not None:
            failure = failure_of(record.exc_info[1])
            traceback = failure.traceback
            fields["error_type"] = failure.type
            if failure.text not in text:
                text += f": {failure.text}"
        fields |= {**_me(self._settings), "level": record.levelname.lower(), "logger": record.name}
        event = str(fields.pop("event_", "log"))  # that of `pxrs.events`, if the record is one of these
        tell(self._settings.as_json, event, text, traceback=traceback, **fields)


_EVENT_FIELDS: Final = frozenset(["as_json", "event", "time", "text", "traceback"])
_RECORD_FIELDS: Final = frozenset([*vars(logging.makeLogRecord({})), "message", "asctime"])
"""The attributes that every log record has; its other attributes are those that the caller has added with `extra`."""


def _me(settings: Settings) -> dict[str, Any]:
    return {"worker": settings.number, "pid": os.getpid()}


def _read_settings() -> tuple[Settings, int]:
    """The settings, and the pipe from the supervisor under another descriptor: for the handler, standard input is
    empty."""
    lifeline = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(lifeline, 1 << 16)
        if not part:
            sys.exit(EXIT_FAILED)  # the supervisor has died already
        line += part
    return Settings(**json.loads(line)), lifeline


def main() -> None:
    settings, lifeline = _read_settings()
    sys.path.insert(0, os.getcwd())
    who = "" if settings.is_trial else f"worker {settings.number}: "
    try:
        Process(settings, lifeline).run()
    except PartitionsPaused as error:
        tell(settings.as_json, "paused", f"{who}{error}", partitions=error.partitions, **_me(settings))
        sys.exit(EXIT_PAUSED)
    except ImportError as error:
        if isinstance(error, PxrsError):
            _fail(settings, who, error)
        tell(settings.as_json, "bad-handler", f"{who}{error}", **_me(settings))
        sys.exit(EXIT_BAD_HANDLER if settings.is_trial else EXIT_CANNOT_WORK)
    except UnknownQueue as error:
        is_over = error.queue in settings.queues and not settings.is_trial
        _fail(settings, who, error, EXIT_NO_QUEUE if is_over else None)
    # Also if the handler calls `sys.exit`: that does not mean that the work is done.
    except (Exception, SystemExit) as error:  # noqa: BLE001 - shown, and the supervisor decides by the exit code
        _fail(settings, who, error)


def _fail(settings: Settings, who: str, error: BaseException, code: int | None = None) -> NoReturn:
    """Print what ended this process: with a traceback, unless it is an error of pxrs, whose message says what to do.
    The exit code says whether to start it again."""
    is_ours = isinstance(error, PxrsError)
    raised = error.__cause__ if isinstance(error, HandlerFailed) else None if is_ours else error
    traceback = "" if raised is None else failure_of(raised).traceback
    kind = type(error).__name__
    # The message of a Python exception alone may say nothing, as the key of a KeyError.
    text = f"{error_text(error)} ({kind})" if is_ours else f"failed with {kind}: {error_text(error)}{_place(error)}"
    fields = {"error_type": kind, **_me(settings)}
    tell(settings.as_json, "failed", f"{who}{text}", traceback=traceback, **fields)
    if settings.is_trial and isinstance(error, UNREACHABLE):
        sys.exit(EXIT_UNREACHABLE)
    if settings.is_trial and is_wrong_argument(error):
        sys.exit(EXIT_BAD_HANDLER)
    sys.exit(code or (EXIT_CANNOT_WORK if is_final(error) else EXIT_FAILED))
