"""Calls of a consumer while the store stalls: each ends within the store's time, and says what became of partitions.

The store here is a memory registry whose calls can be made to wait. A call that waits ends with the error that a real
store raises after its `timeout`: RegistryUnavailable if nothing was sent, OutcomeUnknown if a commit was.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TypeVar

import pytest

from pxrs.consumer.consumer import Consumer
from pxrs.errors import (
    CommitUnknown,
    GroupError,
    GroupUnavailable,
    LeaseExpired,
    OutcomeUnknown,
    PartitionLost,
    PxrsError,
    RegistryUnavailable,
)
from pxrs.group.records import Checkpoint, Keys
from pxrs.hub import Hub
from pxrs.registry.contract import Commit, Entry
from pxrs.registry.lease import Lease
from pxrs.registry.limit import seconds_left, time_limit
from pxrs.registry.memory import MemoryRegistry, MemoryStore
from pxrs.scheduler import ScheduledState
from pxrs.testing.hooked import SharedStore
from pxrs.testing.waiting import aside, eventually

PATIENCE_S = 30.0
TIMEOUT_S = 0.4
"""Of the store, for a call that it does not answer. Other calls have PATIENCE_S: they must succeed."""
SLACK_S = 20.0
"""What a busy machine may add to a call. A call that waits for one of the member's own, which waits too, takes longer:
`PATIENCE_S`."""
KEYS = Keys("g")
T = TypeVar("T")


class Stalling(MemoryRegistry):
    """A handle whose calls wait while it is stalled, for as long as its time and the caller's limit allow."""

    timeout_s = PATIENCE_S

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.replies = threading.Event()
        """Cleared: commits land, and their replies are lost."""
        self.replies.set()
        self.waiting = threading.Event()
        """Set once a call waits."""
        self.calls_left: int | None = None
        """So many calls are answered yet; then it is stalled."""
        self.slowness_s = 0.0

    def stall(self) -> None:
        self.waiting.clear()
        self.goes_on.clear()

    def _pass(self) -> None:
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                self.goes_on.clear()
        allowed_s = seconds_left(self.timeout_s)
        if self.slowness_s:
            time.sleep(min(self.slowness_s, allowed_s))
            if self.slowness_s >= allowed_s:
                raise RegistryUnavailable("stalling:: too slow")
        if not self.goes_on.is_set():
            self.waiting.set()
            if not self.goes_on.wait(allowed_s):
                raise RegistryUnavailable("stalling:: no answer")

    def _get(self, key: str) -> Entry | None:
        self._pass()
        return super()._get(key)

    def _scan(self, prefix: str, after: str | None, limit: int | None) -> list[Entry]:
        self._pass()
        return super()._scan(prefix, after, limit)

    def _commit(self, commit: Commit) -> dict[str, int]:
        self._pass()
        versions = super()._commit(commit)
        if not self.replies.wait(seconds_left(self.timeout_s)):
            raise OutcomeUnknown("stalling:: no reply")
        return versions

    def _lease(self, ttl: float, renewed: bool) -> Lease:
        self._pass()
        lease = super()._lease(ttl, renewed)
        end = lease.stored.end

        def end_in_time() -> None:
            self._pass()
            end()

        lease.stored.end = end_in_time  # type: ignore[method-assign]
        return lease


class Scene:
    def __init__(self, place: SharedStore) -> None:
        self.place = place
        self.registry = Stalling(place.store)
        self.hub: Hub = place.open(self.registry)
        self.hub.create_topic("t", partitions=2)
        self.send()
        self.observer: Hub = place.open(log=self.hub.log)  # type: ignore[arg-type]

    def send(self) -> None:
        for partition in range(2):
            with self.hub.producer("t") as out:
                for _ in range(3):
                    out.send(b"x", partition=partition)

    def consumer(self, **options: object) -> Consumer:
        # Nothing but the test makes the member write.
        given = {"commit_interval": 3_600.0, "lease_ttl": 3_600.0, **options}
        inbox = self.hub.consumer("t", "g", **given)  # type: ignore[arg-type]
        eventually(lambda: inbox.assignment == [0, 1], PATIENCE_S)
        # No round of the member's work runs or is due: after a stall, only what the test calls asks the store.
        eventually(lambda: inbox._member.session.scheduled.state is ScheduledState.WAITING, PATIENCE_S)
        return inbox

    def read_one_of_each(self, inbox: Consumer) -> None:
        seen: set[int] = set()
        while len(seen) < 2:
            seen.update(message.partition for message in inbox.poll(1, timeout=PATIENCE_S))

    def checkpoints(self) -> list[int]:
        found = self.observer.registry.scan(f"{KEYS.checkpoints}{self.hub.topic('t').id}/")
        return [Checkpoint.load(entry.key, entry.value).offset for entry in found]

    def members(self) -> int:
        return len(self.observer.registry.scan(KEYS.members))


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        scene = Scene(SharedStore(stack, MemoryStore()))
        yield scene
        scene.registry.slowness_s, scene.registry.calls_left = 0.0, None
        scene.registry.replies.set()
        scene.registry.goes_on.set()


def in_time(scene: Scene, call: Callable[[], object], kind: type[T], timeout_s: float = TIMEOUT_S) -> T:
    """The error that the call raises within the store's time.

    timeout_s: the store's time during this call; PATIENCE_S if the store answers."""
    scene.registry.timeout_s = timeout_s
    began = time.monotonic()
    with pytest.raises(kind) as raised:  # type: ignore[type-var]
        aside(call).result(PATIENCE_S)
    scene.registry.timeout_s = PATIENCE_S
    assert time.monotonic() - began < TIMEOUT_S + SLACK_S
    assert type(raised.value) is kind
    assert isinstance(raised.value, GroupError)
    return raised.value


def test_a_commit_that_the_store_does_not_take_in_time_names_what_was_not_written(scene: Scene) -> None:
    inbox = scene.consumer()
    scene.read_one_of_each(inbox)
    scene.registry.stall()
    error = in_time(scene, inbox.commit, GroupUnavailable)
    assert error.partitions == (0, 1)
    assert "was not written" in str(error)
    assert "lost" not in str(error)
    assert scene.checkpoints() == [0, 0]
    scene.registry.goes_on.set()
    inbox.commit()
    assert scene.checkpoints() == [1, 1]


def test_r5_a_commit_whose_reply_is_lost_says_that_it_may_have_been_written(scene: Scene) -> None:
    inbox = scene.consumer()
    scene.read_one_of_each(inbox)
    scene.registry.replies.clear()
    error = in_time(scene, inbox.commit, CommitUnknown)
    assert error.partitions == (0, 1)
    assert "may or may not have been written" in str(error)
    assert isinstance(error.__cause__, OutcomeUnknown)
    scene.registry.replies.set()
    inbox.commit()
    assert scene.checkpoints() == [1, 1]


def test_a_commit_does_not_wait_longer_because_the_member_waits_for_the_store_too(scene: Scene) -> None:
    inbox = scene.consumer()
    scene.read_one_of_each(inbox)
    scene.registry.stall()  # PATIENCE_S for the member's own call, which holds the mutex
    inbox._member.wake()
    assert scene.registry.waiting.wait(PATIENCE_S)
    error = in_time(scene, inbox.commit, CommitUnknown)
    assert error.partitions == (0, 1)
    scene.registry.goes_on.set()
    inbox.commit()
    assert scene.checkpoints() == [1, 1]


def test_a_commit_of_several_steps_has_one_time_for_all_of_them(scene: Scene) -> None:
    """After a lost reply both versions of each partition are read again. Each answer takes most of the store's time."""
    inbox = scene.consumer()
    scene.read_one_of_each(inbox)
    scene.registry.replies.clear()
    in_time(scene, inbox.commit, CommitUnknown)
    scene.registry.replies.set()
    scene.registry.timeout_s, scene.registry.slowness_s = 2.0, 1.5
    began = time.monotonic()
    with pytest.raises(CommitUnknown) as raised:  # still: the first try may have been written
        aside(inbox.commit).result(PATIENCE_S)
    assert time.monotonic() - began < 7.0, "five answers take 7.5 s"
    assert raised.value.partitions == (0, 1)
    assert isinstance(raised.value.__cause__, RegistryUnavailable)


def test_a_commit_after_the_lease_has_ended_says_so_and_not_that_somebody_took_the_partition(scene: Scene) -> None:
    inbox = scene.consumer()
    scene.read_one_of_each(inbox)
    lease = inbox._member.lease
    assert lease is not None
    lease.expire()
    inbox._member.wake()
    eventually(lambda: len(inbox._settling._lost) == 2, PATIENCE_S)
    error = in_time(scene, inbox.commit, PartitionLost, PATIENCE_S)
    assert error.partitions == (0, 1)
    assert "the lease of this member ended" in str(error)
    assert "taken" not in str(error)


def test_a_commit_that_is_refused_says_that_the_partition_was_taken(scene: Scene) -> None:
    inbox = scene.consumer()
    scene.read_one_of_each(inbox)
    for entry in scene.observer.registry.scan(KEYS.owners):
        scene.observer.registry.commit(put={entry.key: entry.value})
    error = in_time(scene, inbox.commit, PartitionLost, PATIENCE_S)
    assert error.partitions == (0, 1)
    assert "has taken it" in str(error)


def test_a_commit_that_waits_for_a_member_that_has_lost_everything_says_lost(scene: Scene) -> None:
    inbox = scene.consumer()
    scene.read_one_of_each(inbox)
    lease = inbox._member.lease
    assert lease is not None
    with inbox._member.session.mutex:
        scene.registry.stall()
        lease.expire()
    inbox._member.wake()
    eventually(lambda: len(inbox._settling._lost) == 2, PATIENCE_S)
    error = in_time(scene, inbox.commit, PartitionLost)
    assert error.partitions == (0, 1)
    assert "the lease of this member ended" in str(error)


# The end.


def test_close_ends_in_time_and_names_what_it_could_not_write(scene: Scene) -> None:
    inbox = scene.consumer()
    scene.read_one_of_each(inbox)
    inbox.poll(1, timeout=PATIENCE_S)  # what came before is done
    scene.registry.stall()
    error = in_time(scene, inbox.close, GroupUnavailable)
    assert error.partitions == (0, 1)
    assert "could not write the last checkpoint of partitions 0, 1" in str(error)
    lease = inbox._member.lease
    assert lease is None
    inbox.close()  # nothing is left to be done


def test_close_whose_last_reply_is_lost_says_that_it_may_have_been_written(scene: Scene) -> None:
    inbox = scene.consumer()
    scene.read_one_of_each(inbox)
    inbox.poll(1, timeout=PATIENCE_S)
    scene.registry.replies.clear()
    error = in_time(scene, inbox.close, CommitUnknown)
    assert error.partitions == (0, 1)
    assert sorted(scene.checkpoints()) == [1, 1]


def test_close_does_not_wait_longer_because_the_member_waits_for_the_store_and_leaves_when_that_is_over(
    scene: Scene,
) -> None:
    inbox = scene.consumer()
    scene.read_one_of_each(inbox)
    inbox.poll(1, timeout=PATIENCE_S)
    scene.registry.stall()
    inbox._member.wake()
    assert scene.registry.waiting.wait(PATIENCE_S)
    error = in_time(scene, inbox.close, CommitUnknown)
    assert error.partitions == (0, 1)
    assert scene.members() == 1
    scene.registry.goes_on.set()
    eventually(lambda: scene.members() == 0, PATIENCE_S)
    eventually(lambda: scene.checkpoints() == [1, 1], PATIENCE_S)


def test_close_after_the_lease_has_ended_names_what_is_not_written(scene: Scene) -> None:
    inbox = scene.consumer()
    scene.read_one_of_each(inbox)
    inbox.poll(1, timeout=PATIENCE_S)
    with inbox._member.session.mutex:  # before the member's thread joins again
        lease = inbox._member.lease
        assert lease is not None
        lease.expire()
        inbox._member._lifecycle.closing.set()  # as `close` does: a round that starts later finds a closed watch
        with pytest.raises(PartitionLost) as raised:
            inbox._member._end()
    assert raised.value.partitions == (0, 1)
    assert "the lease of this member ended" in str(raised.value)
    inbox.close()


def test_close_that_finds_a_partition_taken_says_which_of_its_work_was_not_written(scene: Scene) -> None:
    inbox = scene.consumer()
    scene.read_one_of_each(inbox)
    inbox.poll(1, timeout=PATIENCE_S)
    key = KEYS.owner(scene.hub.topic("t").id, 1)
    entry = scene.observer.registry.get(key)
    assert entry is not None
    scene.observer.registry.commit(put={key: entry.value})
    error = in_time(scene, inbox.close, PartitionLost, PATIENCE_S)
    assert error.partitions == (1,)
    assert scene.checkpoints() == [1, 0]


# The beginning.


@pytest.mark.parametrize("answered", range(5))
def test_a_join_during_which_the_store_stalls_is_an_error_of_the_group(scene: Scene, answered: int) -> None:
    """The list of members, the lease, the member's key, the pins: whichever is not answered."""
    scene.registry.calls_left = answered
    error = in_time(scene, lambda: scene.hub.consumer("t", "g", lease_ttl=1.0), GroupUnavailable)
    assert error.partitions == ()
    assert "could not join and owns no partitions" in str(error)
    scene.registry.calls_left = None
    scene.registry.goes_on.set()
    eventually(lambda: scene.members() == 0, PATIENCE_S)
    with scene.consumer() as inbox:
        assert inbox.assignment == [0, 1]


def test_a_join_whose_reply_is_lost_is_an_error_of_the_group(scene: Scene) -> None:
    scene.registry.replies.clear()
    in_time(scene, lambda: scene.hub.consumer("t", "g"), GroupUnavailable)
    eventually(lambda: scene.members() == 0, PATIENCE_S)


def test_a_lease_that_ends_during_the_join_is_an_error_of_the_group(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = scene.registry._lease

    def ended(ttl: float, renewed: bool) -> Lease:
        lease = begin(ttl, renewed)
        lease.expire()
        return lease

    monkeypatch.setattr(scene.registry, "_lease", ended)
    error = in_time(scene, lambda: scene.hub.consumer("t", "g"), GroupUnavailable, PATIENCE_S)
    assert isinstance(error.__cause__, LeaseExpired)


# With a work queue.


def test_a_transactions_checkpoint_that_cannot_be_had_in_time_leaves_everything_undone(scene: Scene) -> None:
    scene.hub.create_queue("q")
    inbox = scene.consumer()
    scene.read_one_of_each(inbox)
    transaction = scene.hub.transaction()
    transaction.put("q", b"of both")
    transaction.checkpoint(inbox)
    held, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with inbox._member.session.mutex:
            held.set()
            leave.wait(PATIENCE_S)

    holding = aside(hold)
    assert held.wait(PATIENCE_S)
    in_time(scene, transaction.commit, GroupUnavailable)
    leave.set()
    holding.result(PATIENCE_S)
    assert scene.checkpoints() == [0, 0]
    transaction.commit()
    assert sum(scene.checkpoints()) == 1, "the message of the last poll; the one before it was done by that poll"
    assert scene.hub.queue("q").depth().ready == 1


# The limit itself, and the errors.


def test_a_limit_counts_for_its_thread_and_for_what_is_inside_alone() -> None:
    registry = MemoryRegistry()
    with time_limit(0.0):
        with pytest.raises(RegistryUnavailable, match="was over before the call was sent"):
            registry.get("a")
        with time_limit(100.0), pytest.raises(RegistryUnavailable):
            registry.commit({}, {"a": b"1"})
        assert aside(lambda: registry.get("a")).result(PATIENCE_S) is None
        assert seconds_left(5.0) == 0.0
    assert seconds_left(5.0) == 5.0
    with time_limit(100.0):
        assert seconds_left(5.0) == 5.0
        assert 99.0 < seconds_left(200.0) <= 100.0
    assert registry.get("a") is None
    registry.close()


@pytest.mark.parametrize(
    "error",
    [
        PartitionLost("g", [1, 2], "because"),
        CommitUnknown("g", [1], "no reply"),
        GroupUnavailable("g", [], "could not join", "away"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_the_group_can_be_sent_to_another_process(error: PxrsError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert copy.partitions == error.partitions  # type: ignore[attr-defined]


def test_code_that_catches_what_the_registry_raises_catches_these_too() -> None:
    assert issubclass(CommitUnknown, OutcomeUnknown)
    assert issubclass(GroupUnavailable, RegistryUnavailable)
