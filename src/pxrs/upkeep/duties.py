"""What a round of upkeep does. Duties are independent: one that fails does not prevent the others.

A round is made of steps, and each step may run late, twice, or at the same time as that of another process: the table
in the package's docstring says why. `Round.run` asks `should_stop` between steps, so that closing a hub does not wait
for a whole round.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pxrs.errors import Closed, HubMoved, PxrsError, UnknownTopic
from pxrs.hub_parts import HubParts
from pxrs.model import Topic
from pxrs.upkeep import deleted_topics, retention
from pxrs.upkeep.records import RoundReport

if TYPE_CHECKING:
    from pxrs.belonging import Belonging
    from pxrs.registry.contract import Registry
    from pxrs.upkeep.observing import OwnerObserver


class Stopped(Exception):
    """The hub is being closed: the rest of the round is left to the next janitor. Caught by `Round.run`."""


class Round:
    """One round over one hub. Collects what was done and what failed."""

    def __init__(
        self,
        parts: HubParts,
        should_stop: Callable[[], bool],
        *,
        with_registry: bool,
        refusal: PxrsError | None = None,
        observer: OwnerObserver | None = None,
    ) -> None:
        """observer: records owners that no event tells of; without it, that is not done.
        with_registry: also do the duties that need the registry.
        refusal: why the registry cannot be asked; then that is the error of each topic with `keep_unread`."""
        self._parts, self._should_stop = parts, should_stop
        self._with_registry, self._refusal, self._observer = with_registry, refusal, observer
        self.removed: dict[str, dict[str, int]] = {}
        self.errors: dict[str, Exception] = {}
        """The error of each duty that failed, by subject."""
        self.done: list[str] = []
        """The subjects of the duties that were done."""

    def run(self, topics: Sequence[Topic], *, with_others: bool, by: str = "") -> RoundReport:
        """Apply the retention of these topics; with_others: do the other duties too. Raises Closed and HubMoved, after
        which the hub cannot be used. by: the incarnation that does the round, for the report."""
        begun = time.monotonic()
        try:
            for topic in topics:
                self._step(_retention_of(topic), functools.partial(self._retain, topic))
            if with_others:
                self._step("removing deleted topics", self._parts.log.finish_deletions)
                if self._with_registry:
                    self._step("removing keys of deleted topics", self._finish_deleted_topics)
                    self._step("sweeping staged files", self._sweep_staging)
                    self._step("writing the readable files of groups", self._project_groups)
                    self._step("recording owners", self._observe_owners)
        except Stopped:
            pass  # the next janitor does what was not done
        return self._report(time.monotonic() - begun, by)

    def has_tried(self, topic: Topic) -> bool:
        """Whether `run` has applied the retention of the topic, or failed to."""
        subject = _retention_of(topic)
        return subject in self.errors or subject in self.done

    def _step(self, subject: str, act: Callable[[], None]) -> None:
        if self._should_stop():
            raise Stopped
        try:
            act()
        except (Closed, HubMoved, Stopped):
            raise
        except Exception as error:  # noqa: BLE001 - reported, logged by the janitor, and tried again in the next round
            self.errors[subject] = error
        else:
            self.done.append(subject)

    def _report(self, took_s: float, by: str) -> RoundReport:
        errors = {subject: str(error) for subject, error in self.errors.items()}
        return RoundReport(self._parts.log.clock.wall_time_us() / 1e6, round(took_s, 3), self.removed, errors, by)

    def _retain(self, topic: Topic) -> None:
        if topic.keeps_unread and self._refusal is not None:
            raise self._refusal
        try:
            log = self._parts.log.topic(topic.name)
            if log.id != topic.id:
                return  # it was deleted and created again since it was listed; the new topic has its own turn
            moved = retention.retain(self._parts, log)
        except UnknownTopic:
            return  # it was deleted meanwhile
        if moved:
            self.removed[topic.name] = {str(number): start for number, start in sorted(moved.items())}

    def _finish_deleted_topics(self) -> None:
        if self._parts.log.folder is not None and (self._parts.log.folder / deleted_topics.FOLDER).is_dir():
            deleted_topics.finish(self._parts, self._topic_ids())

    def _sweep_staging(self) -> None:
        """Remove staged files that no manifest names, and what was staged and committed for topics that were deleted.

        Only if the registry of this process is recorded as the hub's: another registry has no manifests of this hub,
        and the files of a batch that is committed would be removed. Raises WrongRegistry if the hub was given to
        another registry since this round began."""
        folder, belonging = self._parts.log.folder, self._parts.belonging
        if folder is not None and not (folder / "staging").is_dir():
            return
        if belonging is not None and (belonging.check() is None or not belonging.is_recorded()):
            return
        from pxrs.publishing.forgetting import forget_deleted_topics, needed_batches
        from pxrs.publishing.staging.places import staging_of

        registry, staging = self._parts.registry.get(), staging_of(self._parts.log)
        if staging is None:
            return
        topics = self._topic_ids()
        for topic in staging.topics():
            if self._should_stop():
                raise Stopped
            now = time.time()  # before the manifests are read: see `Staging.sweep`
            if topic in topics:
                staging.sweep(topic, needed_batches(registry, topic), now)
        forget_deleted_topics(registry, staging, topics)

    def _topic_ids(self) -> set[str]:
        """The ids of all topics that are there. Raises PxrsError if one is not known: it must not count as deleted."""
        log = self._parts.log
        damaged = log.damaged_topics()
        if nameless := [topic.name for topic in damaged if topic.id is None]:
            raise PxrsError(
                f"files staged for deleted topics are not removed: the id of topic {nameless[0]} is not known"
            )
        return {topic.id for topic in log.topics()} | {topic.id for topic in damaged if topic.id is not None}

    def _observe_owners(self) -> None:
        """Record the owners of partitions that no event tells of. Only in the registry of the hub: the groups of
        another one are not this hub's."""
        belonging = self._parts.belonging
        if self._observer is not None and (belonging is None or belonging.check() is not None):
            self._observer.observe(self._should_stop)

    def _project_groups(self) -> None:
        """Write the readable files of groups that nobody leads: a leader writes those of its own group."""
        registry, belonging = self._parts.registry.get(), self._parts.belonging
        if registry.folder is None or belonging is None:
            # The registry is not kept in files; or the topics are in the memory of this process, and other processes
            # know other names.
            return
        from pxrs.group.listing import groups
        from pxrs.group.projection import FOLDER, projection_of
        from pxrs.group.records import GROUP_NAME, Keys

        folder = registry.folder / FOLDER
        written = {path.name for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set()
        log = self._parts.log
        names = {topic.id: topic.name for topic in log.topics()}
        for name in sorted({*groups(registry), *(each for each in written if GROUP_NAME.fullmatch(each))}):
            if self._should_stop():
                raise Stopped
            keys = Keys(name)
            projection = projection_of(registry, keys, lambda: names)
            if projection is not None and _is_ours(registry, keys.home, belonging):
                projection.refresh(only_if_nobody_leads=True)


def _is_ours(registry: Registry, home_key: str, belonging: Belonging) -> bool:
    """Whether a group reads topics of this hub, or no topics. The names of another hub's topics are not known here; its
    own janitor writes the files of its groups."""
    from pxrs.group.records import Home

    entry, ours = registry.get(home_key), belonging.check()
    return entry is None or (ours is not None and Home.load(entry.key, entry.value).hub in ("", ours.hub))


def _retention_of(topic: Topic) -> str:
    return f"retention of {topic.name}"
