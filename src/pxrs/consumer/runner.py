"""Calling a handler with every message: on several threads, one at a time for each partition, so that order holds.

One thread reads and gives out batches; the others call the handler. A handler that raises never stalls its partition in
silence (X14): `on_error` decides what becomes of the message.

    pause        the partition is paused, visible in `describe`, until `pxrs group retry` or `skip`; the others go on
    retry        the handler is called again, with pauses that double, up to `retries_max` times; then as with pause
    dead-letter  the message goes to another topic with the reason, and the partition goes on; if it cannot be stored
                 there, as with pause, and the pause names both errors
    raise        `run` raises HandlerFailed, and the member leaves

What was raised is logged, unless `run` raises it. Each try of a retry is a failure: the first one is logged with its
traceback, the following ones in a line, unless they raise something else. For each exception class and line of code, a
few records a minute are logged and the rest is counted (`LimitedLog`).

Invariants: a message is done when its handler has returned, and `Lane.done` is moved by the handler's thread alone. A
lane is in `_busy` from the moment a batch of it is given to the pool until its handler's thread is through with it; a
busy lane is not given out. `_lock` guards `_busy` and `_failure`.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from pxrs import arguments
from pxrs.consumer import dead_letters
from pxrs.consumer.dead_letters import place_of_message
from pxrs.consumer.hand_out import HandOut
from pxrs.errors import Closed, HandlerFailed, InvalidGroup
from pxrs.failures import Failure, failure_of, place_of
from pxrs.group.lane import Lane
from pxrs.handler import OF_A_MESSAGE, check_result, fault_of
from pxrs.limited_log import LimitedLog
from pxrs.log.batch import Batch
from pxrs.model import Message
from pxrs.producer.producer import Producer
from pxrs.tracing import ConsumerTracing
from pxrs.wording import decisions

_logger = logging.getLogger(__name__)

ON_ERROR: Final = ("pause", "retry", "dead-letter", "raise")
THREADS_MAX: Final = 1_000
LOOK_S: Final = 0.05
"""How often a thread that waits before a retry checks whether the partition is to be released."""
Handler = Callable[[Message], object]


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    on_error: str = "pause"
    retries_max: int = 5
    retry_pause_s: float = 0.1
    """The pause before the first retry; doubled for each one after it, up to 30 s."""
    dead_letters: Callable[[], Producer] | None = None
    """Opens a producer of the topic for dead letters."""

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            raise InvalidGroup(f"on_error is {self.on_error!r}; choose from {', '.join(ON_ERROR)}")
        if self.on_error == "dead-letter" and self.dead_letters is None:
            raise InvalidGroup("on_error='dead-letter' needs dead_letters=TOPIC, the topic that they are sent to")
        if self.retries_max < 1 or self.retry_pause_s < 0:
            raise InvalidGroup("retries_max is at least 1, and retry_pause_s not negative")


class Runner:
    """One call of `Consumer.run`."""

    def __init__(self, hand_out: HandOut, handler: Handler, threads: int, policy: ErrorPolicy) -> None:
        threads = arguments.whole(InvalidGroup, "threads", threads, 1, THREADS_MAX)
        if fault := fault_of("the handler", handler, OF_A_MESSAGE):
            raise InvalidGroup(fault)
        self._hand_out, self._handler, self._threads, self._policy = hand_out, handler, threads, policy
        self._lock = threading.Lock()
        self._busy: set[Lane] = set()
        self._failure: BaseException | None = None
        """What `run` raises: the first error that ended a handler's thread."""
        self._log = LimitedLog(_logger)
        self._ended = threading.Event()
        """Set when `run` gives out no more batches, for whatever reason."""

    @property
    def _is_ending(self) -> bool:
        """Whether no further message may be given to the handler; `run` returns when the running handlers have."""
        return self._ended.is_set() or self._hand_out.lifetime.is_stopped or self._hand_out.lifetime.is_closed

    def run(self) -> None:
        try:
            self._give_out()
        except BaseException:
            if self._failure is not None:  # `run` raises another error, and this one would not be reported
                self._log_unraised(self._failure)
            raise
        finally:
            self._log.flush()
            if isinstance(self._policy.dead_letters, dead_letters.DeadLetterTopic):
                self._policy.dead_letters.close()
        if self._failure is not None:
            raise self._failure

    def _give_out(self) -> None:
        hand_out = self._hand_out
        with ThreadPoolExecutor(self._threads, thread_name_prefix=f"pxrs-handler-{hand_out.group}") as pool:
            try:
                while True:
                    change = hand_out.changes.next_change  # read before `busy`: see `next_for`
                    if self._is_ending or self._failure is not None:
                        break
                    with self._lock:
                        busy = set(self._busy)
                    given = hand_out.next_for(busy, self._threads - len(busy), change)
                    if given is None:
                        break
                    for lane, batch in given:
                        with self._lock:
                            self._busy.add(lane)
                        pool.submit(self._handle_batch, lane, batch).add_done_callback(self._note)
            except Closed:
                if not hand_out.lifetime.is_closed:
                    raise
            finally:
                self._ended.set()  # threads that wait before a retry give up; the pool finishes what is in hand

    def _note(self, done: Future[None]) -> None:
        error = done.exception()
        if error is not None:
            with self._lock:
                is_first, self._failure = self._failure is None, self._failure or error
            if not is_first:  # `run` raises the first alone
                self._log_unraised(error)
        self._hand_out.changes.announce()

    def _log_unraised(self, error: BaseException) -> None:
        fields = {"group": self._hand_out.group}
        text = failure_of(error).text
        _logger.error("group %s: %s", self._hand_out.group, text, exc_info=error, extra=fields)

    def _handle_batch(self, lane: Lane, batch: Batch) -> None:
        hand_out = self._hand_out
        position = batch.base_offset
        began = time.monotonic()
        try:
            for message in hand_out.messages_of(lane, batch):
                if self._is_ending or not hand_out.take_in_hand(lane, position, message.offset + 1):
                    break
                position = message.offset + 1
                if not self._handle(lane, message):
                    if not lane.is_drained:
                        lane.put_back()
                    break
                lane.done = lane.position
            else:
                hand_out.settling.pass_gap(lane, position, batch)
        except BaseException:
            lane.put_back()  # the next owner gets the message
            raise
        finally:
            hand_out.counts.handled(lane, batch, position, began)
            with self._lock:
                self._busy.discard(lane)
            hand_out.settling.wake_if_drained((lane,))

    def _handle(self, lane: Lane, message: Message) -> bool:
        """Call the handler, as often as the policy says. Returns whether the message is done."""
        policy, counts = self._policy, self._hand_out.counts
        pause_s = policy.retry_pause_s
        tries = policy.retries_max + 1 if policy.on_error == "retry" else 1
        place: Hashable = None
        for number in range(1, tries + 1):
            try:
                if counts.tracing is not None:
                    self._call_traced(counts.tracing, message)
                    return True
                result: object = self._handler(message)
                if result is not None:
                    check_result(result)
                return True
            except Exception as error:  # noqa: BLE001 - the policy decides
                failure = failure_of(error)
                if number == tries:
                    return self._decide(lane, message, error, failure)
                counts.failed(message.topic, "retried")
                last_place, place = place, place_of(error)
                self._report("message.retried", lane, message, failure, tries=number)
                what = f"try {number} of {tries}, trying again in {pause_s:g} s"
                self._log_failure(logging.WARNING, message, error, failure, what, has_traceback=place != last_place)
                if not self._may_try_again(lane, pause_s):
                    return False  # the next owner of the partition tries
                pause_s = min(2 * pause_s, 30.0)
        return False

    def _call_traced(self, tracing: ConsumerTracing, message: Message) -> None:
        with tracing.process(message.topic, message.partition, message.headers or ()):
            check_result(self._handler(message))

    def _may_try_again(self, lane: Lane, pause_s: float) -> bool:
        """Wait before a retry, by the registry's clock. False if the partition is to be released, or another member may
        own it: a retry is a hand-out, and must not happen past the lease's deadline (G8)."""
        clock = self._hand_out.clock
        until = clock.now() + pause_s
        while True:
            lane.handed_at = now = clock.now()  # `progress_timeout` counts from here: the message is being retried
            if lane.is_stopping or self._is_ending or not self._is_owned(lane):
                return False
            if now >= until:
                return True
            if clock.wait(self._ended, until, timeout=LOOK_S):
                return False

    def _is_owned(self, lane: Lane) -> bool:
        """Whether this member owns the partition, and its lease's deadline has not passed."""
        return not lane.is_lost and self._hand_out.clock.now() < self._hand_out.member.deadline

    def _decide(self, lane: Lane, message: Message, error: Exception, failure: Failure) -> bool:
        """Do what `on_error` says with a message whose last try failed. Returns whether the message is done."""
        failed = functools.partial(self._hand_out.counts.failed, message.topic)
        match self._policy.on_error:
            case "raise":
                failed("raised")
                raise HandlerFailed(f"the handler failed on {place_of_message(message)}: {failure.text}") from error
            case "dead-letter":
                if not self._is_owned(lane):  # the next owner handles the message, or sends it to the dead letters
                    self._log_failure(
                        logging.WARNING, message, error, failure, "the partition is another member's by now"
                    )
                    failed("released")
                    return False
                self._log_failure(logging.WARNING, message, error, failure, "the message goes to the dead letters")
                second = self._send_dead_letter(message, failure)
                if second is None:
                    self._report("message.dead_lettered", lane, message, failure)
                    failed("dead-letter")
                    return True
                if self._hand_out.lifetime.is_closed:
                    failed("released")
                    return False  # the next owner handles the message
                failure = failure.followed_by("the dead letter could not be sent", second)
            case _:
                self._log_failure(logging.ERROR, message, error, failure, self._pausing(message))
        failed("paused")
        self._hand_out.member.pause(lane, message.offset, failure)
        return False

    def _report(self, name: str, lane: Lane, message: Message, failure: Failure, **more: object) -> None:
        """Record the failure as the event of this name."""
        self._hand_out.member.reporter.failure(name, lane, message.offset, failure, **more)

    def _send_dead_letter(self, message: Message, failure: Failure) -> Exception | None:
        """Send a dead letter. Returns why it could not be sent, or None if it was."""
        assert self._policy.dead_letters is not None
        try:
            dead_letters.send(self._policy.dead_letters, self._hand_out.source.parts, message, failure)
        except Exception as error:  # noqa: BLE001 - stored with the pause, and logged
            second = failure_of(error)
            pausing = self._pausing(message)
            self._log_failure(logging.ERROR, message, error, second, pausing, "its dead letter could not be sent")
            return error
        return None

    def _pausing(self, message: Message) -> str:
        hand_out = self._hand_out
        commands = decisions(hand_out.group, message.topic, message.partition, hand_out.place)
        return f"pausing the partition until {commands}"

    def _log_failure(
        self,
        level: int,
        message: Message,
        error: Exception,
        failure: Failure,
        what: str,
        step: str = "the handler failed",
        *,
        has_traceback: bool = True,
    ) -> None:
        """Log that a step failed on a message.

        failure:       the error as text.
        what:          what follows from it.
        step:          what failed.
        has_traceback: whether the traceback is logged too."""
        fields = {
            "group": self._hand_out.group,
            "topic": message.topic,
            "partition": message.partition,
            "offset": message.offset,
            "error_type": failure.type,
        }
        self._log.log(
            (step, level, has_traceback, place_of(error)),
            level,
            "group %s, %s: %s, %s: %s",
            self._hand_out.group,
            place_of_message(message),
            step,
            what,
            failure.text,
            exc_info=error if has_traceback else None,
            extra=fields,
        )
