"""Handlers over a queue: several threads, a transaction for each item.

    def handle(tx, item):
        tx.put("sent", send(item.value))

    with QueueListener(hub.queue("mail"), handle, threads=4) as listener:
        ...

A handler that returns commits what it took and put; one that raises gives the item back, with the reason. The item is
this process's for as long as its lease is renewed, however long the handler takes.

On failure: while the store cannot be reached the threads try again, ever less often. A commit whose reply was lost is
settled before the next item is taken. A handler that fails time and again slows its thread down, so that an item that
comes back at once does not keep the machine busy."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from pxrs.errors import Closed, InvalidQueue, OutcomeUnknown, PxrsError, TransactionLost, UnknownQueue
from pxrs.queue.handle import QueueHandle
from pxrs.queue.items import Item
from pxrs.queue.transaction import Outcome, Transaction

_logger = logging.getLogger(__name__)

Handler = Callable[[Transaction, Item], object]
THREADS_MAX: Final = 1_000
PAUSE_S: Final = (0.05, 5.0)
"""The first and the longest pause of a thread whose handler fails, or that cannot reach the store."""


class QueueListener:
    """`start` and `close`, or a `with` block; `run` stays until `stop` is called or the queue is deleted."""

    def __init__(self, queue: QueueHandle, handler: Handler, threads: int = 1) -> None:
        if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= THREADS_MAX:
            raise InvalidQueue(f"threads is {threads!r}: choose from 1 to {THREADS_MAX:,}")
        if not callable(handler):
            raise InvalidQueue(f"the handler is {handler!r}: give a function of a transaction and an item")
        self.queue = queue
        self._handler = handler
        self._count = threads
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._running = 0
        self._all_done = threading.Event()
        self._failure: BaseException | None = None
        self.committed = 0
        """How many items were handled and committed."""
        self.failed = 0
        """How many times a handler raised, or what it did could not be committed."""

    def start(self) -> Self:
        """Begin, once. Raises UnknownQueue."""
        with self._lock:
            if self._stopping.is_set():
                raise Closed(f"the listener of queue {self.queue.name} was stopped: make another one")
            if self._threads:
                return self
            self.queue.store.queue(self.queue.name)
            self._running = self._count
            name = f"pxrs-queue-{self.queue.name}"
            self._threads = [
                threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
                for number in range(self._count)
            ]
            for thread in self._threads:
                thread.start()
        return self

    def run(self) -> None:
        """Work until `stop` is called. Raises what ended it, such as the end of the queue or of the hub."""
        self.start()
        try:
            self._all_done.wait()
        finally:
            self.close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Take nothing more. What is in hand is finished; `close` waits for that."""
        self._stopping.set()
        self.queue.store.wake(self.queue.name)

    def close(self) -> None:
        """Stop, and wait until every handler has returned."""
        self.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        try:
            self._work()
        except Closed as error:
            if not self._stopping.is_set():
                self._failure = self._failure or error
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            _logger.error("queue %s: a worker thread has ended, and the others will: %r", self.queue.name, error)
            self._failure = self._failure or error
            self.stop()
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._all_done.set()

    def _work(self) -> None:
        pause_s = PAUSE_S[0]
        while not self._stopping.is_set():
            transaction = Transaction(self.queue.store)
            try:
                if self._handle_one(transaction):
                    pause_s = PAUSE_S[0]
                    continue
            except (UnknownQueue, Closed):
                raise
            except PxrsError as error:  # the store cannot be reached, or this process lost its lease
                _logger.warning("queue %s: %s; will try again", self.queue.name, error)
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S[1])

    def _handle_one(self, transaction: Transaction) -> bool:
        """Take, handle, commit. False if that failed: the item was given back."""
        with transaction:
            items = transaction._take(self.queue.name, 1, None, self._stopping.is_set)
            if not items:
                return True
            try:
                self._handler(transaction, items[0])
            except Exception as error:  # the queue's policy decides what becomes of the item
                transaction.rollback(error)
                with self._lock:
                    self.failed += 1
                _logger.warning(
                    "queue %s, item %s, delivery %d: the handler failed",
                    self.queue.name,
                    items[0].id,
                    items[0].deliveries,
                    exc_info=error,
                )
                return False
            return self._commit(transaction, items[0])

    def _commit(self, transaction: Transaction, item: Item) -> bool:
        outcome = transaction.outcome()
        try:
            if outcome == "open":
                transaction.commit()
                outcome = "committed"
        except OutcomeUnknown:
            outcome = self._settle(transaction)
        except TransactionLost as error:
            _logger.warning("queue %s, item %s: %s", self.queue.name, item.id, error)
            outcome = "rolled back"
        with self._lock:
            if outcome == "committed":
                self.committed += 1
            else:
                self.failed += 1
        return outcome == "committed"

    def _settle(self, transaction: Transaction) -> Outcome:
        """What became of a commit whose reply was lost; as long as the store cannot be reached, that takes."""
        pause_s = PAUSE_S[0]
        while True:
            try:
                return transaction.outcome()
            except Closed:
                raise
            except PxrsError as error:
                if self._stopping.wait(pause_s):
                    raise
                _logger.warning("queue %s: %s; will ask again", self.queue.name, error)
            pause_s = min(2 * pause_s, PAUSE_S[1])

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
