"""Handlers over a queue: several threads, a transaction for each item.

    def handle(tx, item):
        tx.put("sent", send(item.value))

    with QueueListener(hub.queue("mail"), handle, threads=4) as listener:
        ...

`handle_next` does the same for one item on the calling thread, without waiting: for tests, and for programs that empty
a queue and end.

If the handler returns, the listener commits the transaction: the item is removed, and what the handler put is written.
If the handler raises, the listener rolls the transaction back with the error as the reason. The error is logged with
its traceback, a few times a minute for each exception class and line of code; further ones are counted. A handler may
take as long as it needs: the item stays in flight while the lease of this process is renewed.

On failure:
- While the store cannot be reached, each thread tries again after a pause that doubles, up to `PAUSE_S`.
- A commit whose reply was lost is resolved before the thread takes its next item.
- A thread whose handler fails pauses in the same way, so that an item that is returned to ready at once does not keep
  the processor busy.
- The error that ends the listener, such as UnknownQueue for its own queue, is raised by `run`, by `close` and at the
  end of a `with` block. UnknownQueue for another queue, which a handler puts into, fails that delivery alone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, NamedTuple, Self

from pxrs import arguments
from pxrs.errors import Closed, InvalidQueue, OutcomeLost, OutcomeUnknown, PxrsError, UnknownQueue
from pxrs.failures import failure_of, place_of
from pxrs.handler import OF_AN_ITEM, check_result, fault_of
from pxrs.limited_log import LimitedLog
from pxrs.queue.handle import QueueHandle
from pxrs.queue.items import Item
from pxrs.queue.transaction import Outcome, Transaction
from pxrs.waiting import wait_for_signal

_logger = logging.getLogger(__name__)

Handler = Callable[[Transaction, Item], object]
THREADS_MAX: Final = 1_000
PAUSE_S: Final = (0.05, 5.0)
"""The first and the longest pause of a thread whose handler failed, or that cannot reach the store."""


class Handled(NamedTuple):
    """One delivery of an item to a handler, and what came of it."""

    item: Item
    outcome: Outcome
    """Either "committed", or "rolled back": the item was given back, and became what the queue's policy says."""
    error: Exception | None
    """What the handler raised, or what kept the transaction from being committed."""


class QueueListener:
    """Use `start` and `close`, or a `with` block; or `run`, which returns when `stop` was called.

    A started listener works until it is stopped, its hub is closed or its queue is deleted, also if the program drops
    its last reference to this object. Its threads keep the hub open."""

    def __init__(self, queue: QueueHandle, handler: Handler, threads: int = 1) -> None:
        threads = arguments.whole(InvalidQueue, "threads", threads, 1, THREADS_MAX)
        if not isinstance(queue, QueueHandle):
            raise InvalidQueue(f"the queue must be one that a hub has opened, such as hub.queue('q'), not {queue!r}")
        if fault := fault_of("the handler", handler, OF_AN_ITEM):
            raise InvalidQueue(fault)
        self.queue = queue
        self._handler = handler
        self._count = threads
        self._stopping = threading.Event()
        self._awaited = {queue.name}
        """The names of the queues that handlers may wait for without a timeout. `stop` wakes the waiting threads."""
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._running = 0
        self._all_done = threading.Event()
        self._failure: BaseException | None = None
        self._log = LimitedLog(_logger)
        self.committed = 0
        """How many items were handled and committed."""
        self.failed = 0
        """How many deliveries were rolled back: the handler raised, or the commit failed."""

    def start(self) -> Self:
        """Start the threads; a second call has no effect. Raises UnknownQueue, and Closed after `stop`."""
        with self._lock:
            if self._stopping.is_set():
                raise Closed(f"the listener of queue {self.queue.name} was stopped: create another one")
            if self._threads:
                return self
            self.queue.store.catalog.queue(self.queue.name)
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
        """Start, and return when `stop` was called and all handlers have returned. Raises the error that ended the
        listener, such as UnknownQueue if the queue was deleted, or Closed if the hub was closed."""
        self.start()
        try:
            wait_for_signal(self._all_done)
        finally:
            self._stop_and_wait()
        self._raise_failure()

    def handle_next(self) -> Handled | None:
        """Handle one item that can be taken now, on the calling thread; None if there is none. It does not wait, and
        does not pause after failures.

        Delayed items that are due are made ready first. If no item is ready, the items of takers whose lease has ended
        are returned, as the queue's policy says. An exception of the handler is returned and logged, not raised.
        Raises UnknownQueue; RegistryUnavailable, also if the reply to the commit was lost and the outcome cannot be
        resolved now; Closed if this listener was stopped; and InvalidQueue if it was started."""
        with self._lock:
            if self._stopping.is_set():
                raise Closed(f"the listener of queue {self.queue.name} was stopped: create another one")
            if self._threads:
                raise InvalidQueue(
                    f"the listener of queue {self.queue.name} was started, so its threads handle the "
                    "items: use a listener that is not started"
                )
        store = self.queue.store
        queue = store.catalog.queue(self.queue.name)
        store.end_delays(queue)
        handled = self._handle_one(_Delivery(self, waits=False))
        if handled is None:
            store.return_items_of_dead(queue)
            store.end_delays(queue)
            # Also if nothing was returned here: another thread or process may have returned items just before.
            handled = self._handle_one(_Delivery(self, waits=False))
        return handled

    def stop(self) -> None:
        """Take no more items. Running handlers continue; `close` waits for them. A handler that waits for another item
        without a timeout gets Closed from its `take`."""
        self._stopping.set()
        for name in self._awaited.copy():
            self.queue.store.wake(name)

    def close(self) -> None:
        """Stop, and wait until every handler has returned. Raises the error that has ended the listener, if one has."""
        self._stop_and_wait()
        self._raise_failure()

    def _stop_and_wait(self) -> None:
        self.stop()
        with self._lock:  # held by `start` until all threads are started
            threads = self._threads
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
        if not threads:
            self._log.flush()  # what `handle_next` has logged; the last thread flushes for the threads

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._work()
        except Closed as error:
            if not self._stopping.is_set():
                self._failure = self._failure or error
        except BaseException as error:  # raised by `run` and `close`
            _logger.error(
                "queue %s: a worker thread failed, so the listener stops: %s",
                self.queue.name,
                failure_of(error).text,
                exc_info=error,
                extra={"queue": self.queue.name},
            )
            self._failure = self._failure or error
            self.stop()
        finally:
            with self._lock:
                self._running -= 1
                is_last = not self._running
            if is_last:
                self._log.flush()
                self._all_done.set()

    def _work(self) -> None:
        pause_s = PAUSE_S[0]
        while not self._stopping.is_set():
            try:
                handled = self._handle_one(_Delivery(self, waits=True))
                if handled is None or (handled.outcome == "committed" and handled.error is None):
                    pause_s = PAUSE_S[0]
                    continue
            except (UnknownQueue, Closed):
                raise
            except PxrsError as error:  # the store cannot be reached, or this process lost its lease
                self._warn(error, "will try again")
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S[1])

    def _handle_one(self, transaction: _Delivery) -> Handled | None:
        """Take an item, call the handler, and commit or roll back. None if no item was taken."""
        with transaction:
            item = transaction.next_item()
            if item is None:
                return None
            try:
                check_result(self._handler(transaction, item))
            except Exception as error:  # noqa: BLE001 - the queue's policy decides what becomes of the item
                self._tell(item, "the handler failed", error)
                outcome = self._resolve(transaction)  # the handler may have committed before it failed
                if outcome == "open":
                    transaction.rollback(error)
                    outcome = "rolled back"
                self._count_item(outcome)
                return Handled(item, outcome, error)
            handled = self._commit(transaction, item)
            self._count_item(handled.outcome)
            return handled

    def _commit(self, transaction: _Delivery, item: Item) -> Handled:
        outcome = self._resolve(transaction)  # the handler may have ended the transaction itself
        try:
            if outcome == "open":
                transaction.commit()
                outcome = "committed"
        except OutcomeUnknown:
            outcome = self._resolve(transaction)
        except Closed:
            raise
        except PxrsError as error:
            if isinstance(error, UnknownQueue) and error.queue == self.queue.name:
                raise
            self._tell(item, "not committed", error)
            transaction.rollback(error)
            return Handled(item, "rolled back", error)
        return Handled(item, outcome, None)

    def _count_item(self, outcome: Outcome) -> None:
        with self._lock:
            if outcome == "committed":
                self.committed += 1
            else:
                self.failed += 1

    def _tell(self, item: Item, what: str, error: Exception) -> None:
        failure = failure_of(error)
        self._log.log(
            (what, place_of(error)),
            logging.WARNING,
            "queue %s, item %s, delivery %d: %s: %s",
            self.queue.name,
            item.id,
            item.deliveries,
            what,
            failure.text,
            exc_info=error,
            extra={
                "queue": self.queue.name,
                "item": item.id,
                "deliveries": item.deliveries,
                "error_type": failure.type,
            },
        )

    def _warn(self, error: PxrsError, what: str) -> None:
        """Log an error that is not the handler's, such as an outage of the store, without a traceback."""
        fields = {"queue": self.queue.name, "error_type": type(error).__name__}
        kind = (what, place_of(error))
        self._log.log(kind, logging.WARNING, "queue %s: %s; %s", self.queue.name, error, what, extra=fields)

    def _resolve(self, transaction: _Delivery) -> Outcome:
        """The outcome of the transaction, resolved if the reply to its commit was lost. While the store cannot be
        reached, a thread of the listener asks again until the listener is stopped; `handle_next` raises at once."""
        pause_s = PAUSE_S[0]
        while True:
            try:
                return transaction.outcome()
            except Closed:
                raise
            except OutcomeLost as error:  # the lease has ended too, so a sweeper has returned the item
                _logger.error("queue %s: %s", self.queue.name, error)
                return "rolled back"
            except PxrsError as error:
                if not transaction.waits or self._stopping.wait(pause_s):
                    raise
                self._warn(error, "will ask again")
            pause_s = min(2 * pause_s, PAUSE_S[1])

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_and_wait()
        if error is None:
            self._raise_failure()


class _Delivery(Transaction):
    """The transaction of one item."""

    def __init__(self, listener: QueueListener, *, waits: bool) -> None:
        """waits: whether to wait for an item, and for a store that cannot be reached, until the listener is stopped."""
        super().__init__(listener.queue.store)
        self._listener = listener
        self.waits = waits

    def next_item(self) -> Item | None:
        """Take the item that the handler is called with; None if there is none, or the listener was stopped."""
        listener = self._listener
        is_over = listener._stopping.is_set if self.waits else _is_over
        items = super()._take(listener.queue.name, 1, None, is_over)
        return items[0] if items else None

    def _take(self, name: str, count: int, until: float | None, is_over: Callable[[], bool]) -> list[Item]:
        """Called by a handler's `take`. Without a timeout the wait ends when the listener is stopped: else `close`,
        which waits for the handler, could wait for ever."""
        if until is not None:
            return super()._take(name, count, until, is_over)
        listener = self._listener
        if not self.waits:
            items = super()._take(name, count, None, _is_over)
            if not items:
                raise Closed(f"queue {name} has no item now, and `handle_next` does not wait for one")
            return items
        listener._awaited.add(name)
        items = super()._take(name, count, None, listener._stopping.is_set)
        if not items:
            raise Closed(
                f"the listener of queue {listener.queue.name} was stopped while a handler waited for queue {name}"
            )
        return items


def _is_over() -> bool:
    """For a take that must not wait."""
    return True
