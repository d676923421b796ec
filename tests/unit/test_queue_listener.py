"""Handlers that are wrong, fail at an awkward moment or wait, and what ends a listener."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import pxrs
from pxrs import ConsumeTimes, QueueListener
from pxrs.errors import Closed, InvalidQueue, OutcomeUnknown, UnknownQueue
from pxrs.hub import Hub
from pxrs.log.memory import MemoryLog
from pxrs.queue.records import OUTCOMES
from pxrs.registry.contract import Commit
from pxrs.registry.memory import MemoryRegistry
from pxrs.testing.waiting import aside, eventually

PATIENCE_S = 30.0


@pytest.fixture
def hub() -> Iterator[Hub]:
    with pxrs.open("memory:") as hub:
        yield hub


def waiters(hub: Hub) -> int:
    return sum(head._waiters for head in list(hub.parts.queue_store()._heads.values()))


async def coroutine(tx: Any, item: Any) -> None:
    pass


def generator(tx: Any, item: Any) -> Iterator[int]:
    yield 1


async def asynchronous_generator(tx: Any, item: Any) -> AsyncIterator[int]:
    yield 1


def of_a_message(message: Any) -> None:
    pass


class Later:
    async def __call__(self, tx: Any, item: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (coroutine, "neither async nor a generator"),
        (generator, "neither async nor a generator"),
        (asynchronous_generator, "neither async nor a generator"),
        (functools.partial(coroutine), "neither async nor a generator"),
        (Later(), "neither async nor a generator"),
        (of_a_message, "cannot be called with a transaction and an item"),
        ("handler", "must be a function of a transaction and an item"),
    ],
)
def test_z6_a_handler_that_could_not_handle_is_refused(hub: Hub, handler: Any, words: str) -> None:
    with pytest.raises(InvalidQueue, match=words):
        QueueListener(hub.create_queue("q"), handler)


@pytest.mark.parametrize("work", [coroutine, generator])
def test_z6_work_that_a_handler_only_returns_is_not_done(hub: Hub, work: Any) -> None:
    queue = hub.create_queue("q", ConsumeTimes(1))
    queue.put("x")
    with QueueListener(queue, lambda tx, item: work(tx, item)) as listener:
        eventually(lambda: listener.committed + listener.failed)
    assert (listener.committed, listener.failed) == (0, 1)
    assert "neither async nor a generator" in queue.dead_letters().list()[0].error


def test_z6_a_listener_takes_a_handle_and_no_name() -> None:
    with pytest.raises(InvalidQueue, match=r"hub\.queue\('q'\)"):
        QueueListener("q", print)  # type: ignore[arg-type]


def test_z6_a_deleted_output_queue_fails_the_item_and_not_the_listener(hub: Hub) -> None:
    queue = hub.create_queue("q", ConsumeTimes(1))
    hub.create_queue("out")

    def handle(tx: Any, item: Any) -> None:
        if item.value == b"delete":
            tx.put("out", "y")
            hub.delete_queue("out")

    with QueueListener(queue, handle) as listener:
        queue.put("delete")
        eventually(lambda: queue.depth().dead == 1)
        queue.put("next")
        eventually(lambda: listener.committed == 1)
    assert listener.failed == 1
    assert "no queue 'out'" in queue.dead_letters().list()[0].error


def test_z6_what_ended_a_listener_is_raised_at_the_end_of_its_block(hub: Hub) -> None:
    queue = hub.create_queue("q")
    listener = QueueListener(queue, print, threads=2)

    def work() -> None:
        with listener:
            hub.delete_queue("q")
            eventually(listener._all_done.is_set)

    with pytest.raises(UnknownQueue, match="no queue 'q'"):
        work()
    with pytest.raises(UnknownQueue):
        listener.close()


def test_z6_the_queue_of_a_listener_is_seen_to_be_gone_by_a_handler_that_puts_into_it(hub: Hub) -> None:
    queue = hub.create_queue("q")
    queue.put("x")

    def handle(tx: Any, item: Any) -> None:
        tx.put("q", "again")
        hub.delete_queue("q")

    with pytest.raises(UnknownQueue, match="no queue 'q'"):
        QueueListener(queue, handle).run()


def test_z6_an_error_of_the_block_is_not_hidden_by_what_ended_the_listener(hub: Hub) -> None:
    queue = hub.create_queue("q")

    def work() -> None:
        with QueueListener(queue, print) as listener:
            hub.delete_queue("q")
            eventually(listener._all_done.is_set)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()


def test_z6_an_error_after_the_handlers_own_commit_is_told_and_the_item_counted(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    queue = hub.create_queue("q")
    queue.put("x")

    def handle(tx: Any, item: Any) -> None:
        tx.commit()
        raise ValueError("after the commit")

    with caplog.at_level(logging.WARNING), QueueListener(queue, handle) as listener:
        eventually(lambda: listener.committed)
    assert (listener.committed, listener.failed) == (1, 0)
    ((error, text),) = [(each.exc_info, each.getMessage()) for each in caplog.records]
    assert error is not None
    assert str(error[1]) == "after the commit"
    assert "the handler failed" in text


@pytest.mark.parametrize("has_landed", [True, False])
def test_z6_a_commit_of_the_handlers_own_whose_reply_was_lost_is_settled(has_landed: bool) -> None:
    class Losing(MemoryRegistry):
        lost = 0

        def _commit(self, commit: Commit) -> dict[str, int]:
            if self.lost or not any(key.startswith(OUTCOMES) for key in commit.put):
                return super()._commit(commit)
            self.lost += 1
            if has_landed:
                super()._commit(commit)
            raise OutcomeUnknown("the reply was lost")

    with Hub(MemoryLog(), Losing()) as hub:
        queue, out = hub.create_queue("q", ConsumeTimes(1)), hub.create_queue("out")
        queue.put("x")

        def handle(tx: Any, item: Any) -> None:
            tx.put("out", "y")
            tx.commit()

        with QueueListener(queue, handle) as listener:
            eventually(lambda: listener.committed + listener.failed)
        assert (listener.committed, listener.failed) == (has_landed, not has_landed)
        assert (out.depth().ready, queue.depth().dead) == (has_landed, not has_landed)


def test_z6_closing_ends_a_handlers_wait_for_an_item_of_another_queue(hub: Hub) -> None:
    queue, other = hub.create_queue("q"), hub.create_queue("other")
    queue.put_many(["a", "b"])
    listener = QueueListener(queue, lambda tx, item: tx.take(other), threads=2).start()
    eventually(lambda: waiters(hub) == 2)
    aside(listener.close).result(PATIENCE_S)
    assert (listener.committed, listener.failed, queue.depth().ready) == (0, 2, 2)
    assert {item.error.split(":")[0] for item in queue.peek(2)} == {"pxrs.errors.Closed"}


def test_z6_closing_lets_a_handler_take_what_is_there_and_wait_as_long_as_it_said(hub: Hub) -> None:
    queue, other = hub.create_queue("q"), hub.create_queue("other")
    queue.put("x")
    other.put("y")
    began, taken = threading.Event(), []

    def handle(tx: Any, item: Any) -> None:
        began.set()
        listener._stopping.wait(PATIENCE_S)
        taken.extend([tx.take(other), tx.take(other, timeout=0.05)])

    listener = QueueListener(queue, handle)
    listener.start()
    assert began.wait(PATIENCE_S)
    listener.close()
    assert [item and item.value for item in taken] == [b"y", None]
    assert (listener.committed, listener.failed) == (1, 0)


def test_z6_a_listener_on_a_hub_that_was_closed_says_so(hub: Hub) -> None:
    queue = hub.create_queue("q")
    listener = QueueListener(queue, print).start()
    eventually(lambda: waiters(hub) == 1)
    hub.close()
    eventually(listener._all_done.is_set)
    with pytest.raises(Closed):
        listener.close()
