"""The record of a message that could not be handled is written once, whatever becomes of the replies.

An administrator's `retry` removes the record and `skip` marks it. A member that has lost the reply to its write must
not write it again after that: the partition would stand still although somebody has decided that it goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from pxrs.errors import Conflict, GroupError, OutcomeUnknown
from pxrs.group.records import Checkpoint, Keys, Owner, Paused
from pxrs.hub import Hub
from pxrs.model import Message
from pxrs.registry.contract import Commit
from pxrs.registry.memory import MemoryStore
from pxrs.testing.hooked import Place
from pxrs.testing.waiting import aside, eventually

PATIENCE_S = 30.0
KEYS = Keys("g")
COUNT = 5


class Scene:
    """A worker whose handler cannot handle offset 2 the first time, and an administrator on another handle."""

    def __init__(self, place: Place) -> None:
        self.hub, self.registry = place.hooked()
        self.hub.create_topic("t", partitions=1)
        with self.hub.producer("t") as out:
            for number in range(COUNT):
                out.send(str(number).encode())
        self.admin: Hub = place.open(log=self.hub.log)  # type: ignore[arg-type]
        self.pauses: list[Commit] = []
        """Every commit that puts the pause, in the order of their sending."""
        self.handled: list[int] = []
        self.fails: set[int] = {2}
        self.failed = threading.Event()

    def handle(self, message: Message) -> None:
        self.handled.append(message.offset)
        if message.offset in self.fails:
            self.fails.discard(message.offset)
            raise ZeroDivisionError

    def on_first_pause(self, act: Callable[[Commit], None], *, lands: bool) -> None:
        """Let the first commit of a pause land or not, then call `act`, and lose the reply."""

        def note(commit: Commit) -> None:
            if any(key.startswith(KEYS.paused) for key in commit.put):
                self.pauses.append(commit)
                if len(self.pauses) == 1 and not lands:
                    lose(commit)

        def after(commit: Commit) -> None:
            if lands and len(self.pauses) == 1 and commit is self.pauses[0]:
                lose(commit)

        def lose(commit: Commit) -> None:
            act(commit)
            self.failed.set()
            raise OutcomeUnknown("the reply was lost")

        self.registry.before, self.registry.after = note, after

    def paused(self) -> Paused | None:
        entry = self.admin.registry.get(KEYS.pause(self.hub.topic("t").id, 0))
        return None if entry is None else Paused.load(entry.key, entry.value)

    def checkpoint(self) -> int:
        entry = self.admin.registry.get(KEYS.checkpoint(self.hub.topic("t").id, 0))
        assert entry is not None
        return Checkpoint.load(entry.key, entry.value).offset


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(Place(stack, MemoryStore()))


def retry(scene: Scene) -> None:
    scene.admin.group("g").retry("t", 0)


def skip(scene: Scene) -> None:
    scene.admin.group("g").skip("t", 0)


@pytest.mark.parametrize(
    ("decide", "handled"), [(retry, [0, 1, 2, 2, 3, 4]), (skip, [0, 1, 2, 3, 4])], ids=["retry", "skip"]
)
def test_a_decision_that_comes_before_the_lost_reply_is_noticed_is_kept(
    scene: Scene, decide: Callable[[Scene], None], handled: list[int]
) -> None:
    scene.on_first_pause(lambda commit: decide(scene), lands=True)
    with scene.hub.consumer("t", "g", commit_interval=0.02) as inbox:
        running = aside(lambda: inbox.run(scene.handle))
        eventually(lambda: scene.checkpoint() == COUNT, PATIENCE_S)
        inbox.stop()
        running.result(PATIENCE_S)
    assert scene.handled == handled
    assert scene.paused() is None
    assert len(scene.pauses) == 1, "written again"


@pytest.mark.parametrize("lands", [True, False])
def test_the_partition_stands_until_somebody_decides_though_the_reply_was_lost(scene: Scene, lands: bool) -> None:
    scene.on_first_pause(lambda commit: None, lands=lands)
    with scene.hub.consumer("t", "g", commit_interval=0.02) as inbox:
        running = aside(lambda: inbox.run(scene.handle))
        assert scene.failed.wait(PATIENCE_S)
        eventually(lambda: not inbox._member._pauses.unwritten, PATIENCE_S)
        found = scene.paused()
        assert found is not None
        assert found.offset == 2
        assert scene.checkpoint() == 2
        assert len(scene.pauses) == (1 if lands else 2)
        retry(scene)
        eventually(lambda: scene.handled == [0, 1, 2, 2, 3, 4], PATIENCE_S)
        inbox.stop()
        running.result(PATIENCE_S)
    assert scene.paused() is None


def test_r5_a_write_that_lands_late_does_not_undo_a_decision(scene: Scene) -> None:
    """The first write is still on its way when the second one is answered, and lands after an administrator's retry."""
    scene.on_first_pause(lambda commit: None, lands=False)
    with scene.hub.consumer("t", "g", commit_interval=0.02) as inbox:
        running = aside(lambda: inbox.run(scene.handle))
        eventually(lambda: len(scene.pauses) == 2 and not inbox._member._pauses.unwritten, PATIENCE_S)
        retry(scene)
        eventually(lambda: scene.paused() is None, PATIENCE_S)
        with pytest.raises(Conflict):
            scene.admin.registry.commit(scene.pauses[0].expect, scene.pauses[0].put)
        eventually(lambda: scene.handled == [0, 1, 2, 2, 3, 4], PATIENCE_S)
        inbox.stop()
        running.result(PATIENCE_S)
    assert scene.paused() is None


def test_a_second_failure_of_the_same_message_is_written_again(scene: Scene) -> None:
    """After a retry, the message fails anew: that is another failure."""
    scene.on_first_pause(lambda commit: retry(scene), lands=True)

    def handle(message: Message) -> None:
        scene.handled.append(message.offset)
        if message.offset == 2:
            raise ZeroDivisionError

    with scene.hub.consumer("t", "g", commit_interval=0.02) as inbox:
        running = aside(lambda: inbox.run(handle))
        eventually(lambda: scene.handled == [0, 1, 2, 2] and scene.paused() is not None, PATIENCE_S)
        assert len({Paused.load("k", next(iter(pauses_of(commit)))).failure for commit in scene.pauses}) == 2
        inbox.stop()
        running.result(PATIENCE_S)


def pauses_of(commit: Commit) -> list[bytes]:
    return [value for key, value in commit.put.items() if key.startswith(KEYS.paused)]


def test_a_pause_of_a_partition_that_was_taken_is_left_to_the_next_owner(scene: Scene) -> None:
    def steal(commit: Commit) -> None:
        key = KEYS.owner(scene.hub.topic("t").id, 0)
        entry = scene.admin.registry.get(key)
        assert entry is not None
        epoch = Owner.load(key, entry.value).epoch
        scene.admin.registry.commit(put={key: Owner(None, epoch + 1).dump()})

    scene.on_first_pause(steal, lands=False)
    with scene.hub.consumer("t", "g", commit_interval=0.02) as inbox:
        running = aside(lambda: inbox.run(scene.handle))
        eventually(lambda: scene.checkpoint() == COUNT, PATIENCE_S)
        inbox.stop()
        running.result(PATIENCE_S)
    assert scene.handled[-3:] == [2, 3, 4]
    assert scene.paused() is None
    with suppress(Conflict):
        scene.admin.registry.commit(scene.pauses[0].expect, scene.pauses[0].put)
    assert scene.paused() is None, "the late write landed"
    with pytest.raises(GroupError):
        retry(scene)


def test_the_checkpoint_of_a_partition_without_failures_is_stored_as_before() -> None:
    assert b"failure" not in Checkpoint(5, 1.0, "w", 2).dump()
    found = Checkpoint.load("k", Checkpoint(5, 1.0, "w", 2, failure="f").dump())
    assert found.failure == "f"
    assert Checkpoint.load("k", b'{"offset":5,"when":1.0,"by":"w","epoch":2}') == Checkpoint(5, 1.0, "w", 2)
