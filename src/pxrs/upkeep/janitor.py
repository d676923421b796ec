"""The thread of an open hub that does upkeep when it is due (`schedule.py`), if the hub is elected (`election.py`).

    wait until the next look, or until `close`
    -> stand for election: which role does this hub have now?
    -> do what the role allows and is due
    -> log what failed, write the report

The thread starts with the first producer or consumer of a topic with a retention, and holds the hub's parts, never the
hub: a hub that nobody uses any more closes itself, and with it this thread. The first round comes one interval after
the start, or LOOK_S if that is shorter: a process that ends earlier leaves it to `close`.

`close` ends the thread first, waiting for the step that it is in, but no longer than CLOSE_S. If this hub has made
producers, has done no round, and there is no janitor, it applies the retention of the topics that it sent to.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pxrs.errors import (
    Closed,
    HubMoved,
    OutcomeUnknown,
    PxrsError,
    RegistryUnavailable,
    UsedAfterFork,
    WrongRegistry,
)
from pxrs.hub_parts import HubParts
from pxrs.limited_log import Outage
from pxrs.metrics.instruments import UPKEEP_ERRORS, UPKEEP_ROUND, UPKEEP_ROUNDS
from pxrs.model import Topic
from pxrs.upkeep.duties import Round
from pxrs.upkeep.election import Election, Known, Role, Standing
from pxrs.upkeep.observing import OwnerObserver
from pxrs.upkeep.records import RoundReport
from pxrs.upkeep.schedule import LOOK_S, ROUND_S_MIN, Schedule, retention_interval_s

_logger = logging.getLogger(__name__)

CLOSE_S: Final = 10.0
"""How long `close` waits for the step that the thread is in. The step then ends with the error Closed."""
REPORT_S: Final = 15.0
"""How often the janitor writes a report, unless the errors have changed: rounds may follow each other fast."""
AGAIN_S: Final = 0.5
"""How long after a look that could not reach the registry the next one begins."""
_ELECTION: Final = "electing a janitor"
"""The subject under which failures of the election are logged."""


@dataclass(frozen=True, slots=True)
class UpkeepStatus:
    """What `Hub.upkeep` returns: the janitor of a hub, since when, and the result of its last round."""

    role: str
    """The role of this open hub: "elected", "candidate", "apart", "sole", "barred" (see `pxrs.upkeep.election`), or
    "idle" if it takes no part, because it has made no producer or consumer of a topic with a retention."""
    reason: str = ""
    """Why the role is "apart" or "barred", or why the registry could not be asked."""
    janitor: str = ""
    """The host and process id of the janitor; empty if there is none now."""
    since: float | None = None
    """When the janitor was elected, in seconds since 1970."""
    last_round: RoundReport | None = None
    """The last round that was reported: by a janitor, also one that is gone, or by this process."""
    is_held_up: bool = False
    """Whether `reason` is an error, such as an outage of the registry: duties that need the registry wait."""

    @property
    def errors(self) -> dict[str, str]:
        """What failed in the last round, by subject."""
        return {} if self.last_round is None else dict(self.last_round.errors)


class Janitor:
    """Upkeep of one open hub. Any thread may call it."""

    def __init__(self, parts: HubParts, *, takes_part: bool) -> None:
        """takes_part: whether producers and consumers start the thread."""
        self._parts, self._clock, self._takes_part = parts, parts.log.clock, takes_part
        self._guard = threading.Lock()
        """Guards the fields below, never held during a round."""
        self._thread: threading.Thread | None = None
        self._standing: Standing | None = None
        """What the last look found; None before it."""
        self._last: RoundReport | None = None
        """The last round of this process."""
        self._sent: dict[str, Topic] = {}
        """By id, the topics with a retention for which this hub has made producers, and whose retention no round of
        this process has applied since."""
        self._round = threading.Lock()
        """Held during a look: by the thread, by `run_round`, and by the round of `close`."""
        self._election = Election(parts)
        self._observer = OwnerObserver(parts)
        """Used under `_round`."""
        self._outages: dict[str, Outage] = {}
        """Limits the log of each failure to one record a minute, by subject. Those of topics that are gone are
        removed."""
        self._reported_at = float("-inf")
        self._look_by = float("inf")
        """The moment by which the thread must look, as `take_part` has asked for since its last look."""
        self._is_closing = False
        self._wake = threading.Event()
        """Ends the wait of the thread: `_look_by` or `_is_closing` has changed."""

    def take_part(self, topic: Topic, *, sends: bool) -> None:
        """This hub has made a producer (`sends`) or a consumer of the topic. If the topic has a retention, start the
        thread, and make it look within one interval of that retention."""
        if not self._takes_part or not topic.is_retained or self._parts.log.is_kept_by_server:
            return
        with self._guard:
            if sends:
                self._sent[topic.id] = topic
            self._look_by = min(self._look_by, self._clock.now() + min(LOOK_S, retention_interval_s(topic)))
            self._start()
        self._wake.set()

    def start(self) -> None:
        """Start the thread, which looks at once. A client of a server, which does the upkeep, has none."""
        if self._parts.log.is_kept_by_server:
            return
        with self._guard:
            self._look_by = self._clock.now()
            self._start()
        self._wake.set()

    def _start(self) -> None:
        """Under `_guard`: start the thread, unless it runs or the hub is being closed."""
        if self._thread is not None or self._is_closing:
            return
        thread = threading.Thread(target=self._serve, name=f"pxrs-upkeep-{self._parts.url}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the limit of threads is reached, or the process is ending
            _logger.warning(
                "the upkeep thread of %s could not be started; the next producer tries again: %s",
                self._parts.url,
                error,
            )
            return
        self._thread = thread

    def run_round(self) -> RoundReport:
        """Do all duties that this process may do, now, even if another process is the janitor. Returns when they are
        done."""
        with self._round:
            try:
                standing = self._look()
                if standing.role is Role.BARRED and standing.error is not None:
                    raise standing.error
                topics = [topic for topic in self._parts.log.topics() if topic.is_retained]
                return self._run(topics, standing, with_others=True)
            finally:
                self._resign_unless_served()

    def _resign_unless_served(self) -> None:
        """Under `_round`: a hub whose thread does not run must not keep the claim, for it would do no further round."""
        with self._guard:
            if self._thread is not None:
                return
            if self._standing is not None and self._standing.role is Role.ELECTED:
                self._standing = None
        self._election.resign()

    def status(self) -> UpkeepStatus:
        """The status. The registry is asked, if there is one; if it cannot be reached, `reason` says so."""
        with self._guard:
            standing, last = self._standing, self._last
        role, reason = ("idle", "") if standing is None else (standing.role.value, standing.reason)
        is_held_up = standing is not None and standing.error is not None
        known = Known()
        try:
            known = self._election.look()
        except (Closed, UsedAfterFork):
            raise
        except PxrsError as error:
            reason, is_held_up = reason or str(error), True
        # A janitor writes a report only every REPORT_S, so `last` is newer than what the registry has. The rounds of a
        # candidate are older than those of the janitor.
        is_at_work = standing is not None and standing.role is not Role.CANDIDATE
        report = last if is_at_work and last is not None else known.report or last
        if known.claim is None or not known.is_alive:
            return UpkeepStatus(role, reason, last_round=report, is_held_up=is_held_up)
        janitor = f"{known.claim.host}:{known.claim.pid}"
        return UpkeepStatus(role, reason, janitor, known.claim.since, report, is_held_up)

    def close(self) -> None:
        """End the thread and give up the claim. Before that, if there is no janitor, apply the retention of the topics
        to which this hub has sent and whose retention its thread has not applied. Errors of that round are logged. May
        be called again."""
        with self._guard:
            self._is_closing = True
            thread = self._thread
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S)
        if not self._round.acquire(timeout=CLOSE_S):
            _logger.warning("the upkeep of %s is still running while the hub is closed", self._parts.url)
            return
        try:
            with contextlib.suppress(Closed, HubMoved):  # the hub cannot be used any more
                self._run_last()
            self._election.resign()
        finally:
            self._round.release()

    def _run_last(self) -> None:
        """One round when the hub is closed, for a process that ends before its thread has done one."""
        with self._guard:
            topics, self._sent = list(self._sent.values()), {}
        if not topics or self._parts.log.folder is None:
            return
        standing = Standing(Role.APART)
        # A process that has not used the registry so far does not open it now, because the server may not answer;
        # unless a topic has a retention that must ask the registry.
        if self._parts.registry.is_open or any(topic.keeps_unread for topic in topics):
            try:
                if self._election.look().is_alive:
                    return
            except (Closed, HubMoved):
                raise
            except PxrsError as error:
                standing = Standing(Role.APART, str(error), error)
        self._run(topics, standing, with_others=False, is_last=True)

    def _serve(self) -> None:
        """The function of the thread. When it ends, for whatever reason, the claim is given up, so that another hub can
        be elected."""
        try:
            self._look_when_due()
        finally:
            with self._round:
                with self._guard:
                    self._thread = None
                self._resign_unless_served()

    def _look_when_due(self) -> None:
        schedule, until = Schedule(self._clock.now()), float("inf")
        while True:
            with self._guard:
                self._wake.clear()
                until, self._look_by = min(until, self._look_by), float("inf")
                if self._is_closing:
                    return
            if self._clock.wait(self._wake, until):
                continue
            try:
                with self._round:
                    until = self._turn(schedule)
            except (Closed, HubMoved, UsedAfterFork):
                return  # the hub is closed, or its directory is gone: whoever uses the hub gets the error
            except Exception as error:  # noqa: BLE001 - logged; the next look tries again
                self._note("finding duties that are due", error)
                until = self._clock.now() + LOOK_S

    def _turn(self, schedule: Schedule) -> float:
        """Under `_round`: look, and do what is due. Returns the moment of the next look."""
        standing = self._look()
        now = self._clock.now()
        if standing.role.duties == "none":
            return now + LOOK_S
        is_held_up = isinstance(standing.error, RegistryUnavailable | OutcomeUnknown)
        topics = self._parts.log.topics()
        due, with_others = schedule.due_topics(topics, now), schedule.others_are_due(now)
        if due or with_others:
            self._forget_outages(topics)
            self._run(due, standing, with_others=with_others)
        # Wait at least ROUND_S_MIN, even if this round took longer than the shortest interval.
        # While the registry cannot be reached, look often, so that the janitor is back soon after the registry is.
        until = min(schedule.next_look_at(now), now + AGAIN_S) if is_held_up else schedule.next_look_at(now)
        return max(until, self._clock.now() + ROUND_S_MIN)

    def _look(self) -> Standing:
        """Under `_round`: which role this hub has now."""
        standing = self._election.stand()
        with self._guard:
            self._standing = standing
        # A process with another registry than the hub's may send to it; only retention with `keep_unread` is refused,
        # and reports that itself.
        if standing.role is Role.APART and standing.error is not None and not isinstance(standing.error, WrongRegistry):
            self._note(_ELECTION, standing.error)
        elif _ELECTION in self._outages:
            self._outages[_ELECTION].worked()
        return standing

    def _run(
        self, topics: Sequence[Topic], standing: Standing, *, with_others: bool, is_last: bool = False
    ) -> RoundReport:
        """Under `_round`: do what the role allows, log what failed, report it. is_last: although the hub is closing."""
        work = Round(
            self._parts,
            (lambda: False) if is_last else (lambda: self._is_closing),
            with_registry=standing.role is not Role.APART,
            refusal=standing.error,
            observer=self._observer,
        )
        report = work.run(topics, with_others=with_others, by=self._election.incarnation)
        UPKEEP_ROUNDS.of().add()
        UPKEEP_ROUND.of().observe(report.took_s)
        UPKEEP_ERRORS.of().add(len(work.errors))
        for subject, error in work.errors.items():
            self._note(subject, error)
        for subject in work.done:
            if subject in self._outages:
                self._outages[subject].worked()
        with self._guard:
            has_changed = self._last is None or self._last.errors != report.errors
            self._last = report
        if report.removed or (report.errors and has_changed):
            self._record(report)
        with self._guard:
            # Not all of `topics`: a round that `close` cuts short leaves some of them to the round of `close`.
            for topic in topics:
                if work.has_tried(topic):
                    self._sent.pop(topic.id, None)
        now = self._clock.now()
        if self._election.incarnation and (has_changed or now >= self._reported_at + REPORT_S):
            try:
                self._election.report(report)
                self._reported_at = now
            except Closed:
                raise
            except PxrsError as error:
                self._note("reporting the round", error)
        return report

    def _record(self, report: RoundReport) -> None:
        """Record a round that has done something, or in which something else failed than before."""
        counts = {"topics": len(report.removed), "failures": len(report.errors)}
        told = {"removed": report.bounded().removed, "errors": report.bounded().errors}
        self._parts.events.record("upkeep.round", by=report.by, took_s=report.took_s, **counts, **told)

    def _note(self, subject: str, error: BaseException) -> None:
        outage = self._outages.get(subject)
        if outage is None:
            fields = {"hub": self._parts.url, "subject": subject}
            outage = self._outages[subject] = Outage(_logger, f"{subject} is blocked", extra=fields)
        outage.failed(error)

    def _forget_outages(self, topics: Iterable[Topic]) -> None:
        """Remove the limits of topics that do not exist any more."""
        there = {f"retention of {topic.name}" for topic in topics}
        for subject in [each for each in list(self._outages) if each.startswith("retention of ") and each not in there]:
            del self._outages[subject]
