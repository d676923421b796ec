"""Queue workers in processes of their own, which a test may kill and stop at any moment, and the journals they write.

Until SIGTERM a worker runs one transaction after the other, chosen at random by its seed: it moves coins between two
queues, does jobs, or moves numbers from one FIFO queue to another. Some of its transactions raise an error, and some
pause. A job whose value ends in "poison" makes the worker kill itself.

Signals:
    SIGUSR1  begin no more transactions, but keep the lease until SIGTERM
    SIGHUP   stop (SIGSTOP) at the next take or commit, after the process has checked its lease and before it sends the
             request. If the test wakes the worker after the lease has expired, the request reaches the store late.
    SIGUSR2  print the stack of every thread

The worker writes each item into its journal before it does anything with the item, then that it is about to commit, and
then the outcome. Each line is one system call, so that a kill loses no line.

    python -m pxrs.testing.queue_worker URL REGISTRY JOURNAL LEASE_TTL SEED WORK...

WORK is any of coins, jobs, numbers.
"""

from __future__ import annotations

import faulthandler
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Self

import psutil

import pxrs
from pxrs.errors import OutcomeUnknown, RegistryUnavailable, TransactionLost
from pxrs.hub import Hub
from pxrs.queue.items import Item
from pxrs.queue.transaction import Outcome, Transaction
from pxrs.registry.contract import Commit, Registry
from pxrs.testing.forked import Forked

COINS: Final = ("a", "b")
JOBS: Final = ("jobs", "slow")
DONE: Final = "done"
NUMBERS: Final = "numbers"
LOG: Final = "log"
POISON: Final = "poison"
TAKE_S: Final = 0.03
REFUSED: Final = 0.15
"""The part of the transactions that raise an error."""
PAUSE_S: Final = (0.0, 0.0, 0.0, 0.0, 0.0, 0.01, 0.02, 0.03, 0.04, 0.3)
"""The longest pause of a transaction, chosen at random."""


class Delivery(NamedTuple):
    queue: str
    item: str
    deliveries: int
    value: str


@dataclass
class Attempt:
    """A transaction, as the journal of its worker shows it."""

    taker: str = ""
    """The id of the worker's taker when the transaction took its items."""
    taken: list[Delivery] = field(default_factory=list)
    is_sent: bool = False
    """The worker was about to commit."""
    outcome: str = ""
    """How the transaction ended: committed, rolled back, lost. Empty if the worker was killed before it knew."""

    @property
    def is_in_hand(self) -> bool:
        """Whether the transaction had taken items, and was neither committing nor ended, when the journal was read."""
        return bool(self.taken) and not self.is_sent and not self.outcome


@dataclass
class Journal:
    attempts: list[Attempt]
    left: set[str]
    """The ids of the takers whose leases the worker has ended itself."""
    is_calm: bool = False
    """Whether the worker begins no more transactions."""


class QueueWorker:
    """A worker in a process of its own."""

    def __init__(
        self, url: str, registry: str, name: str, folder: Path, ttl: float, seed: int, work: Sequence[str]
    ) -> None:
        self.name = name
        self.journal = folder / f"{name}.journal"
        self.errors = folder / f"{name}.stderr"
        arguments = [url, registry, str(self.journal), str(ttl), str(seed), *work]
        with self.errors.open("wb") as errors:
            self.process = Forked("pxrs.testing.queue_worker", arguments, stderr=errors.fileno())

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended; it may be stopped."""
        return self.process.poll() is None

    @property
    def is_ready(self) -> bool:
        """Whether the worker handles signals: it opens its journal after it has set the handlers."""
        return self.journal.exists()

    @property
    def is_halted(self) -> bool:
        """Whether no thread of the process runs: it is stopped, or has ended."""
        try:
            return not self.is_running or psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return True

    def signal(self, number: int) -> None:
        if self.is_running:
            self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(10)

    def read(self) -> Journal:
        return read_journal(self.journal.read_text() if self.is_ready else "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def read_journal(text: str) -> Journal:
    found = Journal([], set())
    taker = ""
    for line in text.splitlines():
        kind, *words = line.split(" ", 4)
        match kind:
            case "began":
                found.attempts.append(Attempt(taker))
            case "taker":
                taker = words[0]
                if found.attempts and not found.attempts[-1].taken:  # otherwise it is bound to the former one
                    found.attempts[-1].taker = taker
            case "took":
                queue, item, deliveries, value = words
                found.attempts[-1].taken.append(Delivery(queue, item, int(deliveries), value))
            case "committing":
                found.attempts[-1].is_sent = True
            case "ended":
                found.attempts[-1].outcome = " ".join(words)
            case "calm":
                found.is_calm = True
            case "left":
                found.left.add(words[0])
    return found


class Refused(Exception):
    """Raised by a worker in its transaction, so that the transaction is rolled back."""


class Hands:
    """The transactions of a worker, chosen by its seed."""

    def __init__(self, hub: Hub, name: str, note: Callable[[str], None], seed: int) -> None:
        self._hub, self._name, self._note = hub, name, note
        self._random = random.Random(seed)
        self._taker = ""

    def attempt(self, work: Sequence[str]) -> None:
        """Run one transaction, and write its outcome into the journal."""
        do = getattr(self, f"_do_{self._random.choice(work)}")
        self._note("began")
        outcome: Outcome | str = "committed"
        try:
            with self._hub.transaction() as transaction:
                do(transaction)
                self._note("committing")
        except (Refused, RegistryUnavailable):
            outcome = "rolled back"
        except TransactionLost:
            outcome = "lost"
        except OutcomeUnknown:
            outcome = _resolved(transaction)
        self._note(f"ended {outcome}")

    def _do_coins(self, transaction: Transaction) -> None:
        """Move coins from one queue to the other, and in some transactions also one the other way."""
        source, target = self._random.sample(COINS, 2)
        for coin in self._take(transaction, source, 3):
            transaction.put(target, coin.value)
        if self._random.random() < 0.2:
            for coin in self._take(transaction, target, 1):
                transaction.put(source, coin.value, delay=self._random.choice([None, 0.02]))
        self._hesitate()

    def _do_jobs(self, transaction: Transaction) -> None:
        for job in self._take(transaction, self._random.choice(JOBS), 3):
            if job.value.decode().endswith(POISON):
                os.kill(os.getpid(), signal.SIGKILL)
            transaction.put(DONE, job.value)
        self._hesitate()

    def _do_numbers(self, transaction: Transaction) -> None:
        for number in self._take(transaction, NUMBERS, 2):
            transaction.put(LOG, f"{number.value.decode()} {self._name}")
        self._hesitate()

    def _take(self, transaction: Transaction, queue: str, most: int) -> list[Item]:
        self._note_taker()
        items = transaction.take_many(queue, self._random.randint(1, most), timeout=TAKE_S)
        if items:
            lines = [f"took {queue} {item.id} {item.deliveries} {item.value.decode()}" for item in items]
            self._note("\n".join(lines))
        return items

    def _note_taker(self) -> None:
        taker = self._hub.parts.queue_store().taker().id
        if taker != self._taker:
            self._taker = taker
            self._note(f"taker {taker}")

    def _hesitate(self) -> None:
        time.sleep(self._random.random() * self._random.choice(PAUSE_S))
        if self._random.random() < REFUSED:
            raise Refused

    def leave(self) -> None:
        with suppress(RegistryUnavailable):
            self._note_taker()
            self._note(f"left {self._taker}")
        self._hub.close()


def _resolved(transaction: Transaction) -> Outcome:
    while True:
        try:
            return transaction.outcome()
        except (RegistryUnavailable, OutcomeUnknown):
            time.sleep(0.05)  # without a bound: whoever started this worker kills it


def _stop_when_asked(registry: Registry) -> None:
    """After SIGHUP, stop this process when it next takes or commits: after the checks of `Registry.commit`, and before
    the request is sent. Only takes and commits of transactions delete keys in the main thread."""
    asked = set[int]()  # no Event: a second signal may come while the handler of the first one holds its lock

    class StoppingRegistry(type(registry)):  # type: ignore[misc]
        def _commit(self, commit: Commit) -> dict[str, int]:
            if asked and commit.delete and threading.current_thread() is threading.main_thread():
                asked.clear()
                os.kill(os.getpid(), signal.SIGSTOP)
            return super()._commit(commit)  # type: ignore[no-any-return]

    registry.__class__ = StoppingRegistry
    signal.signal(signal.SIGHUP, lambda number, _: asked.add(number))
    signal.signal(signal.SIGCONT, lambda *_: asked.clear())


def _work(url: str, registry: str, journal: str, ttl: str, seed: str, *work: str) -> None:
    parent, received = os.getppid(), set[int]()
    woken, wake = os.pipe()

    def receive(number: int, _: object) -> None:
        received.add(number)
        os.write(wake, b"!")

    signal.signal(signal.SIGTERM, receive)  # first: the signal may come while the registry is being opened
    signal.signal(signal.SIGUSR1, receive)
    faulthandler.register(signal.SIGUSR2)
    hub = pxrs.open(url, registry=None if registry == "-" else registry, lease_ttl=float(ttl))
    _stop_when_asked(hub.registry)
    descriptor = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(lines: str) -> None:
        os.write(descriptor, f"{lines}\n".encode())

    hands = Hands(hub, Path(journal).stem, note, int(seed))
    while not received and os.getppid() == parent:
        hands.attempt(work)
    note("calm")
    while signal.SIGTERM not in received and os.getppid() == parent:
        if select.select([woken], [], [], 1.0)[0]:
            os.read(woken, 1)
    hands.leave()


if __name__ == "__main__":
    _work(*sys.argv[1:])
