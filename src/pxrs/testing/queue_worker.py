"""Workers of queues in processes of their own, which may be killed and stopped at any moment, and what they wrote down.

Until SIGTERM a worker runs one transaction after the other, at random: it moves coins from one queue to the other, does
jobs, and carries numbers from one strict queue to another. Now and then it raises inside of one, or takes its time. At
a job that is poison it kills itself.

After SIGUSR1 it begins no more transactions, but stays, with its lease, until SIGTERM. After SIGHUP it stops itself at
its next take or commit, when all that its process can check is checked and the request is to be sent: if it is woken
after its lease has ended, the request comes late. SIGUSR2 has it tell what it is doing.

It writes into its journal what it was given before it does anything with it, that it is about to commit, and what
became of it; each line with one system call, so that a kill loses none.

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
"""How many of the transactions raise."""
PAUSE_S: Final = (0.0, 0.0, 0.0, 0.0, 0.0, 0.01, 0.02, 0.03, 0.04, 0.3)
"""How long they take, some of them."""


class Delivery(NamedTuple):
    queue: str
    item: str
    deliveries: int
    value: str


@dataclass
class Attempt:
    """A transaction as its worker wrote it down."""

    taker: str = ""
    """The taker of the worker, as far as the worker knew."""
    taken: list[Delivery] = field(default_factory=list)
    is_sent: bool = False
    """The worker was about to commit."""
    outcome: str = ""
    """What the worker learned of its end: committed, rolled back, lost. Empty if it did not live to."""

    @property
    def is_in_hand(self) -> bool:
        """Something was taken, and the commit not yet sent, when the journal was read."""
        return bool(self.taken) and not self.is_sent and not self.outcome


@dataclass
class Journal:
    attempts: list[Attempt]
    left: set[str]
    """The takers of this worker that it ended itself, their leases being alive."""
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
        """Whether the worker was started and has not ended; it may be stopped."""
        return self.process.poll() is None

    @property
    def is_ready(self) -> bool:
        """Whether the worker has begun to work: from then on it obeys signals."""
        return self.journal.exists()

    @property
    def is_halted(self) -> bool:
        """No thread of it runs any more: it is stopped, or has ended."""
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
    """What a worker raises in a transaction, so that it is rolled back."""


class Hands:
    """What a worker does, by seed."""

    def __init__(self, hub: Hub, name: str, note: Callable[[str], None], seed: int) -> None:
        self._hub, self._name, self._note = hub, name, note
        self._random = random.Random(seed)
        self._taker = ""

    def attempt(self, work: Sequence[str]) -> None:
        """One transaction, whatever becomes of it."""
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
            outcome = _settled(transaction)
        self._note(f"ended {outcome}")

    def _do_coins(self, transaction: Transaction) -> None:
        """From one queue to the other, and some at the same time the other way."""
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


def _settled(transaction: Transaction) -> Outcome:
    while True:
        try:
            return transaction.outcome()
        except (RegistryUnavailable, OutcomeUnknown):
            time.sleep(0.05)


def _stop_when_asked(registry: Registry) -> None:
    asked = threading.Event()
    commit = registry._commit

    def commit_late(request: Commit) -> dict[str, int]:
        if asked.is_set() and request.delete and threading.current_thread() is threading.main_thread():
            asked.clear()
            os.kill(os.getpid(), signal.SIGSTOP)
        return commit(request)

    setattr(registry, "_commit", commit_late)  # noqa: B010 - for this one, and not for its class
    signal.signal(signal.SIGHUP, lambda *_: asked.set())
    signal.signal(signal.SIGCONT, lambda *_: asked.clear())


def _work(url: str, registry: str, journal: str, ttl: str, seed: str, *work: str) -> None:
    parent, received = os.getppid(), set[int]()
    woken, wake = os.pipe()

    def receive(number: int, _: object) -> None:
        received.add(number)
        os.write(wake, b"!")

    signal.signal(signal.SIGTERM, receive)  # first: it may come while the store is slow to open
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
