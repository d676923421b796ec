"""Several threads and one consumer: no thread counts another one's messages as done, and no two read at once.

Memory hub. "Main" is the test's own thread; `Worker` is another one that stays alive between its calls.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import create_engine, text

import pxrs
from pxrs.consumer.consumer import Consumer
from pxrs.errors import ConsumerBusy, GroupError, InvalidGroup
from pxrs.hub import Hub
from pxrs.testing.waiting import eventually
from tests.unit.numbered import send_numbers

BOUND_S = 30.0
T = TypeVar("T")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with pxrs.open("memory:") as hub:
        yield hub


class Worker:
    """A thread that makes one call after the other."""

    def __init__(self, name: str = "worker") -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (given := self._calls.get()) is not None:
            call, future = given
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                future.set_exception(error)
            del given, call, future

    def begin(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def do(self, call: Callable[[], T]) -> T:
        return self.begin(call).result(BOUND_S)

    def end(self) -> None:
        self._calls.put(None)
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.end()


def topic_with(hub: Hub, count: int, partitions: int = 1) -> None:
    hub.create_topic("t", partitions=partitions)
    send_numbers(hub, "t", count, partitions)


def offsets(messages: list[Any]) -> list[int]:
    return [message.offset for message in messages]


def poll(inbox: Consumer, count: int = 500) -> list[int]:
    return offsets(inbox.poll(count, timeout=BOUND_S))


def checkpoint(hub: Hub) -> int | None:
    return hub.group("g").describe().partitions[0].checkpoint


# Messages in hand.


def test_a_poll_is_refused_while_another_thread_has_messages_in_hand(hub: Hub, worker: Worker) -> None:
    topic_with(hub, 6)
    with hub.consumer("t", "g") as inbox:
        assert worker.do(lambda: poll(inbox, 2)) == [0, 1]
        with pytest.raises(ConsumerBusy, match=r"'worker'.*commit.*ack='manual'") as refused:
            inbox.poll(2, timeout=BOUND_S)
        assert isinstance(refused.value, GroupError)
        assert refused.value.thread == "worker"
    assert checkpoint(hub) == 0, "what the worker had in hand was not done"


def test_a_poll_that_was_refused_costs_the_other_thread_nothing(hub: Hub, worker: Worker) -> None:
    topic_with(hub, 6)
    with hub.consumer("t", "g") as inbox:
        assert worker.do(lambda: poll(inbox, 2)) == [0, 1]
        with pytest.raises(ConsumerBusy):
            inbox.poll(2, timeout=BOUND_S)
        assert worker.do(lambda: poll(inbox, 2)) == [2, 3]
        assert worker.do(lambda: poll(inbox, 2)) == [4, 5]
    assert checkpoint(hub) == 4


@pytest.mark.parametrize("way", ["loop", "batches", "run"])
def test_other_ways_to_read_are_refused_too_while_another_thread_has_messages_in_hand(
    hub: Hub, worker: Worker, way: str
) -> None:
    topic_with(hub, 6)
    with hub.consumer("t", "g") as inbox:
        assert worker.do(lambda: poll(inbox, 2)) == [0, 1]
        calls: dict[str, Callable[[], object]] = {
            "loop": lambda: next(iter(inbox)),
            "batches": lambda: next(inbox.batches()),
            "run": lambda: inbox.run(lambda message: None),
        }
        with pytest.raises(ConsumerBusy):
            calls[way]()
        assert worker.do(lambda: poll(inbox, 2)) == [2, 3], "it was not handed out again"


@pytest.mark.parametrize("commits", ["worker", "main"])
def test_after_a_commit_any_thread_may_poll(hub: Hub, worker: Worker, commits: str) -> None:
    topic_with(hub, 6)
    with hub.consumer("t", "g") as inbox:
        assert worker.do(lambda: poll(inbox, 2)) == [0, 1]
        if commits == "worker":
            worker.do(inbox.commit)
        else:
            inbox.commit()
        assert checkpoint(hub) == 2
        assert poll(inbox, 2) == [2, 3]
        with pytest.raises(ConsumerBusy):
            worker.do(lambda: poll(inbox, 2))


def test_a_poll_that_returns_nothing_leaves_nothing_in_hand(hub: Hub, worker: Worker) -> None:
    topic_with(hub, 2)
    with hub.consumer("t", "g") as inbox:
        assert worker.do(lambda: poll(inbox)) == [0, 1]
        assert worker.do(lambda: inbox.poll(timeout=0)) == []
        with hub.producer("t") as out:
            out.send(b"2")
        assert poll(inbox) == [2]


def test_what_a_thread_had_that_has_ended_is_neither_done_nor_handed_out_again(hub: Hub) -> None:
    """Nobody can say whether it was through with them. `commit` says so, or closing gives them to others."""
    topic_with(hub, 6)
    inbox = hub.consumer("t", "g")
    gone = Worker("gone")
    assert gone.do(lambda: poll(inbox, 2)) == [0, 1]
    gone.end()
    with pytest.raises(ConsumerBusy, match=r"'gone' .which has ended. has"):
        inbox.poll(2, timeout=BOUND_S)
    inbox.close()
    with hub.consumer("t", "g") as inbox:
        gone = Worker("gone")
        assert gone.do(lambda: poll(inbox, 2)) == [0, 1]
        gone.end()
        inbox.commit()
        assert poll(inbox, 2) == [2, 3]


def test_a_seek_leaves_nothing_in_hand(hub: Hub, worker: Worker) -> None:
    topic_with(hub, 6)
    with hub.consumer("t", "g") as inbox:
        assert worker.do(lambda: poll(inbox, 2)) == [0, 1]
        inbox.seek(0, 0)
        assert poll(inbox, 2) == [0, 1]


def test_a_transaction_of_queues_that_has_the_checkpoint_decides_whether_another_thread_may_poll(
    hub: Hub, worker: Worker
) -> None:
    topic_with(hub, 6)
    hub.create_queue("q")
    with hub.consumer("t", "g") as inbox:
        assert worker.do(lambda: poll(inbox, 2)) == [0, 1]
        with hub.transaction() as transaction:
            transaction.put("q", b"x")
            transaction.checkpoint(inbox)
            with pytest.raises(ConsumerBusy):
                inbox.poll(2, timeout=BOUND_S)
        assert poll(inbox, 2) == [2, 3]
        assert checkpoint(hub) == 2


def test_with_manual_acknowledgement_threads_may_take_turns(hub: Hub, worker: Worker) -> None:
    topic_with(hub, 6)
    with hub.consumer("t", "g", ack="manual") as inbox:
        mine = inbox.poll(2, timeout=BOUND_S)
        theirs = worker.do(lambda: inbox.poll(2, timeout=BOUND_S))
        assert (offsets(mine), offsets(theirs)) == ([0, 1], [2, 3])
        for message in theirs:
            worker.do(lambda message=message: inbox.ack(message))  # type: ignore[misc]
        inbox.commit()
        assert checkpoint(hub) == 0, "what is not acknowledged is not done"
        for message in mine:
            inbox.ack(message)
        inbox.commit()
        assert checkpoint(hub) == 4


# Two at once.


@pytest.mark.parametrize("ack", ["auto", "manual"])
def test_a_poll_is_refused_while_another_thread_waits_in_one(hub: Hub, worker: Worker, ack: Any) -> None:
    topic_with(hub, 0)
    with hub.consumer("t", "g", ack=ack) as inbox:
        waiting = worker.begin(lambda: poll(inbox))
        eventually(lambda: inbox._settling._readings._open, BOUND_S)
        with pytest.raises(ConsumerBusy, match=r"'worker' is in `poll`"):
            inbox.poll(timeout=0)
        with hub.producer("t") as out:
            out.send(b"0")
        assert waiting.result(BOUND_S) == [0]


@pytest.mark.parametrize("ack", ["auto", "manual"])
@pytest.mark.parametrize("way", ["loop", "batches"])
def test_a_loop_of_another_thread_keeps_everybody_else_from_reading_until_it_is_left(
    hub: Hub, worker: Worker, ack: Any, way: str
) -> None:
    topic_with(hub, 6)
    with hub.consumer("t", "g", ack=ack) as inbox:
        loop: Any = iter(inbox) if way == "loop" else inbox.batches()
        worker.do(lambda: next(loop))
        for read in (lambda: inbox.poll(timeout=0), lambda: next(iter(inbox)), lambda: next(inbox.batches())):
            with pytest.raises(ConsumerBusy, match=r"'worker' is in a loop"):
                read()
        worker.do(loop.close)
        assert inbox.poll(1, timeout=BOUND_S if ack == "auto" else 0) is not None
    assert checkpoint(hub) == 0, "a loop that is left leaves its message undone"


def test_what_a_loop_was_left_with_comes_again_to_any_thread(hub: Hub, worker: Worker) -> None:
    topic_with(hub, 6)
    with hub.consumer("t", "g") as inbox:

        def fail() -> None:
            for _ in inbox:
                raise RuntimeError("the body failed")

        with pytest.raises(RuntimeError):
            worker.do(fail)
        assert poll(inbox, 2) == [0, 1]


def test_nothing_else_reads_while_handlers_run(hub: Hub, worker: Worker) -> None:
    topic_with(hub, 1)
    with hub.consumer("t", "g") as inbox:
        refused: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

        def handle(message: Any) -> None:
            try:
                inbox.poll(timeout=0)
            except ConsumerBusy as error:
                refused.put(error)

        running = worker.begin(lambda: inbox.run(handle))
        assert "`run`" in str(refused.get(timeout=BOUND_S))
        with pytest.raises(ConsumerBusy, match="`run`"):
            inbox.poll(timeout=0)
        inbox.stop()
        running.result(BOUND_S)
        assert inbox.poll(timeout=0) == []


def test_a_second_run_is_refused_and_does_not_end_the_first(hub: Hub, worker: Worker) -> None:
    topic_with(hub, 1)
    with hub.consumer("t", "g") as inbox:
        seen: queue.SimpleQueue[int] = queue.SimpleQueue()
        running = worker.begin(lambda: inbox.run(lambda message: seen.put(message.offset)))
        assert seen.get(timeout=BOUND_S) == 0
        with pytest.raises(ConsumerBusy):
            inbox.run(lambda message: None)
        with hub.producer("t") as out:
            out.send(b"1")
        assert seen.get(timeout=BOUND_S) == 1
        inbox.stop()
        running.result(BOUND_S)


# One iterator in the hands of two threads.


def test_the_iterator_of_batches_is_for_one_thread(hub: Hub, worker: Worker) -> None:
    topic_with(hub, 6, partitions=2)
    with hub.consumer("t", "g", prefetch_bytes=1) as inbox:
        loop = inbox.batches()
        first = worker.do(lambda: next(loop))
        with pytest.raises(ConsumerBusy, match="only that thread may use"):
            next(loop)
        assert sum(row.checkpoint or 0 for row in hub.group("g").describe().partitions) == 0
        second = worker.do(lambda: next(loop))
        assert (first.partition, first.offset) != (second.partition, second.offset), "it goes on for its own thread"


def test_the_iterator_of_messages_notices_another_thread_at_the_end_of_a_batch(hub: Hub, worker: Worker) -> None:
    """Not before: a check for each message would cost too much."""
    topic_with(hub, 1)
    with hub.consumer("t", "g") as inbox:
        loop = iter(inbox)
        worker.do(lambda: next(loop))
        with hub.producer("t") as out:
            out.send(b"1")
        with pytest.raises(ConsumerBusy):
            next(loop)


@pytest.mark.parametrize("way", ["loop", "batches"])
def test_with_manual_acknowledgement_threads_may_take_turns_with_one_iterator(
    hub: Hub, worker: Worker, way: str
) -> None:
    topic_with(hub, 6, partitions=3)
    with hub.consumer("t", "g", ack="manual") as inbox:
        loop: Any = iter(inbox) if way == "loop" else inbox.batches()
        got = [(worker.do(lambda: next(loop)) if turn % 2 else next(loop)) for turn in range(3)]
        assert len({(each.partition, each.offset) for each in got}) == 3


# `commit` from another thread.


def test_a_commit_of_another_thread_leaves_what_a_loop_has_in_hand_undone(hub: Hub, worker: Worker) -> None:
    topic_with(hub, 6)
    with hub.consumer("t", "g") as inbox:
        loop = iter(inbox)
        assert worker.do(lambda: [next(loop).offset for _ in range(3)]) == [0, 1, 2]
        inbox.commit()
        assert checkpoint(hub) == 2, "the third is still in the worker's hands"
        worker.do(inbox.commit)
        assert checkpoint(hub) == 3


def test_a_commit_of_another_thread_leaves_what_a_poll_is_about_to_return_undone(
    hub: Hub, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic_with(hub, 6)
    with hub.consumer("t", "g") as inbox:
        take_in_hand = inbox._hand_out.take_in_hand

        def commit_behind(*given: Any) -> bool:
            is_out = take_in_hand(*given)
            worker.do(inbox.commit)
            return is_out

        monkeypatch.setattr(inbox._hand_out, "take_in_hand", commit_behind)
        assert poll(inbox, 2) == [0, 1]
        assert checkpoint(hub) == 0


def test_a_checkpoint_in_a_transaction_is_refused_while_another_thread_reads(hub: Hub, worker: Worker) -> None:
    topic_with(hub, 6)
    hub.create_queue("q")
    with hub.consumer("t", "g") as inbox:
        loop = iter(inbox)
        worker.do(lambda: next(loop))
        with pytest.raises(ConsumerBusy), hub.transaction() as transaction:
            transaction.checkpoint(inbox)
        worker.do(loop.close)
    assert checkpoint(hub) == 0


@pytest.mark.parametrize("way", ["run", "transactions"])
def test_what_waits_for_a_transaction_of_queues_is_not_handed_out_again(tmp_path: Path, way: str) -> None:
    database = f"sqlite:///{tmp_path / 'registry.db'}"
    engine = create_engine(database)
    handled: list[int] = []

    def read_otherwise(inbox: Consumer) -> None:
        if way == "run":
            inbox.run(lambda message: handled.append(message.offset))
        else:
            handled.extend(at for messages, _ in inbox.transactions(engine) for at in offsets(messages))

    with pxrs.open(tmp_path / "log", registry=database) as hub:
        topic_with(hub, 3)
        hub.create_queue("q")
        with hub.consumer("t", "g", until="end") as inbox:
            with hub.transaction() as transaction:
                assert poll(inbox, 2) == [0, 1]
                transaction.put("q", b"what was made of them")
                transaction.checkpoint(inbox)
                with pytest.raises(InvalidGroup, match="an open transaction has the checkpoint"):
                    read_otherwise(inbox)
            assert handled == []
            read_otherwise(inbox)
        assert (handled, checkpoint(hub)) == ([2], 3)
    engine.dispose()


# Transactions of a database.


def test_transactions_are_for_one_thread(tmp_path: Path, worker: Worker) -> None:
    database = f"sqlite:///{tmp_path / 'registry.db'}"
    engine = create_engine(database)
    with pxrs.open(tmp_path / "log", registry=database) as hub:
        topic_with(hub, 4)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE seen (at INTEGER)"))
        with hub.consumer("t", "g", until="end") as inbox:
            loop = inbox.transactions(engine, 2)

            def step() -> list[int]:
                messages, connection = next(loop)
                for message in messages:
                    connection.execute(text("INSERT INTO seen VALUES (:at)"), {"at": message.offset})
                return offsets(messages)

            assert worker.do(step) == [0, 1]
            with pytest.raises(ConsumerBusy):
                step()  # it would commit the worker's transaction in the middle of its work
            with pytest.raises(ConsumerBusy):
                inbox.poll(timeout=0)
            assert checkpoint(hub) == 0
            assert worker.do(step) == [2, 3]
            assert checkpoint(hub) == 2
            worker.do(loop.close)  # type: ignore[attr-defined]
            assert poll(inbox) == [2, 3]
    engine.dispose()
