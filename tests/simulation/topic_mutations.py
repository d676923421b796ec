"""Defects of groups whose members read several topics: each does for one topic what is to be done for all, or takes one
topic for another. `test_mutations.py` runs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import pytest

from pxrs.errors import RegistryError
from pxrs.group import assign, reconcile
from pxrs.group.checkpoints import FencedWrite
from pxrs.group.protocol import MemberProtocol
from pxrs.group.reconcile import Claim
from pxrs.group.records import Member, ReadTopic
from pxrs.group.snapshot import GroupState
from pxrs.log.numbering import TopicPartition
from pxrs.registry.steps import Steps, Write

T = TypeVar("T")


class TakesTheFirstTopic(MemberProtocol):
    """While `is_mistaken`, a partition of any topic is replaced by the partition of the same number of the first
    topic."""

    is_mistaken = False

    def place(self, number: int) -> TopicPartition:
        topic, partition = super().place(number)
        return (self.member.topic if self.is_mistaken else topic), partition

    @contextmanager
    def mistake(self) -> Iterator[None]:
        self.is_mistaken = True
        try:
            yield
        finally:
            self.is_mistaken = False


class ClaimsOfTheFirstTopic(TakesTheFirstTopic):
    """A claim writes the owner key of another topic."""

    def _claim(self, claims: Sequence[Claim]) -> Steps[None]:
        with self.mistake():
            yield from super()._claim(claims)


class CommitsToTheFirstTopic(TakesTheFirstTopic):
    """A checkpoint is written for another topic."""

    def checkpoint_write(self, *given: object, **named: object) -> FencedWrite:
        with self.mistake():
            return super().checkpoint_write(*given, **named)  # type: ignore[arg-type]


class WatchesTheFirstTopic(TakesTheFirstTopic):
    """A member that waits for a partition of a further topic watches the owner key of the first one."""

    def watched_keys(self) -> frozenset[str]:
        with self.mistake():
            return super().watched_keys()


class PinsTheFirstTopic(MemberProtocol):
    """A member has joined when the starts of its first topic are written (G6)."""

    def pin(self, *, waits: bool = True) -> Steps[bool]:
        self.pinned |= self.member.topics - {self.member.topic}
        return (yield from super().pin(waits=waits))


class GatesTheFirstTopic(MemberProtocol):
    """The start of a further topic is written without regard to its retention (O10)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Without effect by itself: a topic may be given `keep_unread` after a member has read its settings.
        self.keeps_unread = {self.member.topic}

    def _pin(self, topic: ReadTopic) -> Steps[None]:
        steps = super()._pin(topic)
        if topic.id == self.member.topic:
            yield from steps
            return
        operation = next(steps)
        while True:
            if isinstance(operation, Write):
                operation = operation._replace(expect=_ungated(operation.expect), put=_ungated(operation.put))
            try:
                try:
                    result = yield operation
                except RegistryError as error:
                    operation = steps.throw(error)
                else:
                    operation = steps.send(result)
            except StopIteration:
                return


def _ungated(keys: Mapping[str, T]) -> dict[str, T]:
    return {key: value for key, value in keys.items() if not key.startswith("topics/")}


class ReadsOwnersOfTheFirstTopic(MemberProtocol):
    """The owner keys of further topics are taken for keys that were never written."""

    def _read_owners(self, state: GroupState) -> Steps[None]:
        yield from super()._read_owners(state)
        state.owners = {place: owner for place, owner in state.owners.items() if place[0] == self.member.topic}


Together = list[tuple[tuple[str, ...], dict[str, int]]]


def forget_a_topic(patch: pytest.MonkeyPatch) -> None:
    """Of topics with the same readers, the last one is assigned to nobody."""
    sound = reconcile._read_together

    def forgetful(there: Mapping[str, Member]) -> Together:
        return [(members, dict(list(topics.items())[: max(1, len(topics) - 1)])) for members, topics in sound(there)]

    patch.setattr(reconcile, "_read_together", forgetful)


def assign_to_all(patch: pytest.MonkeyPatch) -> None:
    """All topics are shared out among all members, whatever they read."""
    sound = reconcile._read_together

    def mixed(there: Mapping[str, Member]) -> Together:
        found = sound(there)
        members = sorted({member for some, _ in found for member in some})
        return [(tuple(members), {topic: count for _, topics in found for topic, count in topics.items()})]

    patch.setattr(reconcile, "_read_together", mixed)


def assign_each_topic(patch: pytest.MonkeyPatch) -> None:
    """Each topic is shared out by itself, so that the first members get more of all topics together."""
    sound = assign._lists_of
    patch.setattr(assign, "_lists_of", lambda name, topics: sound("range", topics))


def forget_what_was_before(patch: pytest.MonkeyPatch) -> None:
    """Topics that are shared out together are assigned without regard to the present owners."""
    sound = assign.targets_of
    patch.setattr(
        assign, "targets_of", lambda name, members, count, before: sound(name, members, count, [None] * len(before))
    )
