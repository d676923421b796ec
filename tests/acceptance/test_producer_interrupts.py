"""A KeyboardInterrupt at any moment of sending, flushing, waiting and closing (X16, L4).

A message whose `send` returned is stored once when `flush` returns; one whose `send` was interrupted is in or out, but
whole; and nobody waits for ever. The rounds run in a child process, because only a main thread is interrupted.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import pytest

import pxrs
from pxrs.hub import Hub
from pxrs.log.contract import Append, Tell
from pxrs.producer.producer import Producer, Receipt
from pxrs.testing import faults

pytestmark = pytest.mark.sampled(2, of="module")

SOAK = bool(os.environ.get("PXRS_SOAK"))
ROUNDS = 800 if SOAK else 100
BOUND_S = 240 if SOAK else 30
INSIDE = "/pxrs/producer/"
"""The package whose code is interrupted."""


class Timer:
    """Interrupts the main thread once, at a random moment at which it is inside the producer."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self.is_armed = False
        self.count = 0
        signal.signal(signal.SIGALRM, self._ring)

    @contextlib.contextmanager
    def armed(self, most_s: float) -> Iterator[None]:
        """The interrupt, if it comes within the block, does not leave it."""
        try:
            self.is_armed = True
            signal.setitimer(signal.ITIMER_REAL, self._dice.uniform(0.000_01, most_s))
            yield
            self.is_armed = False
        except KeyboardInterrupt:
            pass
        finally:
            self.is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if not self.is_armed:
            return
        if frame is None or INSIDE not in frame.f_code.co_filename:
            signal.setitimer(signal.ITIMER_REAL, self._dice.uniform(0.000_005, 0.000_05))  # not now, but soon
            return
        self.is_armed = False
        self.count += 1
        raise KeyboardInterrupt


class Sender:
    """Messages that say themselves what belongs to them: a number, and with it key, time and headers."""

    def __init__(self) -> None:
        self.tried = 0
        self.receipts: dict[int, Receipt] = {}

    def send(self, producer: Producer, count: int) -> None:
        for _ in range(count):
            number = self.tried
            self.tried += 1
            kind, key, value = number % 3, b"key %d" % (number % 17), b"%d" % number
            if kind == 0:
                receipt = producer.send(value, key)
            elif kind == 1:
                receipt = producer.send(value.decode(), key.decode())
            else:
                receipt = producer.send(value, key, headers=[("n", value)], timestamp=number)
            self.receipts[number] = receipt


def check_stored(hub: Hub, sender: Sender) -> None:
    """After a flush or close that succeeded."""
    topic = hub.topic("t")
    places: dict[int, tuple[int, int]] = {}
    for partition in range(topic.partitions):
        for message in topic.messages(partition):
            assert message.value is not None
            number = int(message.value)
            assert number not in places, f"message {number} is stored twice"
            assert message.key == b"key %d" % (number % 17), f"message {number} has the key {message.key!r}"
            assert message.headers == ([("n", message.value)] if number % 3 == 2 else None), f"headers of {number}"
            assert (message.timestamp == number) == (number % 3 == 2), f"the time of {number}: {message.timestamp}"
            places[number] = (partition, message.offset)
    lost = sender.receipts.keys() - places.keys()
    assert not lost, f"sent and flushed, and not there: {sorted(lost)[:10]}"
    assert places.keys() <= set(range(sender.tried))
    for number, receipt in sender.receipts.items():
        assert receipt.result(0) == places[number], f"the receipt of {number}"


def in_a_child(work: Callable[[], None]) -> None:
    def bounded() -> None:
        faulthandler.dump_traceback_later(BOUND_S, exit=True)  # who waits for ever is shown, and ends with 1
        work()

    with faults.child(bounded) as pid:
        assert faults.wait_exit(pid) == 0, "see the child's stderr"


def play(path: Path, seed: int, act: Callable[[Producer, Sender, Timer, random.Random], None]) -> None:
    dice = random.Random(seed)
    timer, sender = Timer(dice), Sender()
    with pxrs.open(path) as hub:
        hub.create_topic("t", partitions=3, segment_bytes=1 << 20)
        for number in range(ROUNDS):
            # A small buffer, so that `send` also waits; a linger that is sometimes longer than the test.
            producer = hub.producer("t", linger_s=dice.choice([0, 0.001, 60]), buffer_bytes=8_192, batch_rows=20)
            act(producer, sender, timer, dice)
            producer.close()
            if number % 50 == 0 or number == ROUNDS - 1:
                check_stored(hub, sender)
    assert timer.count > ROUNDS // 4, timer.count


def interrupt_sends(producer: Producer, sender: Sender, timer: Timer, dice: random.Random) -> None:
    for _ in range(6):
        with timer.armed(0.000_3):
            sender.send(producer, 200)
    sender.send(producer, 5)
    producer.flush()


def interrupt_flushes(producer: Producer, sender: Sender, timer: Timer, dice: random.Random) -> None:
    for _ in range(3):
        sender.send(producer, dice.randint(1, 30))
        with timer.armed(0.000_6):
            producer.flush()
    sender.send(producer, 5)
    producer.flush()


def interrupt_waits_for_receipts(producer: Producer, sender: Sender, timer: Timer, dice: random.Random) -> None:
    for _ in range(3):
        sender.send(producer, 25)
        with timer.armed(0.000_6):
            for step in range(1_000):  # until it is interrupted
                with contextlib.suppress(TimeoutError):
                    sender.receipts[sender.tried - 1 - step % 25].result(0.002)
    sender.send(producer, 5)
    producer.flush()


def interrupt_closes(producer: Producer, sender: Sender, timer: Timer, dice: random.Random) -> None:
    sender.send(producer, dice.randint(1, 60))
    for _ in range(2):
        with timer.armed(0.000_5):
            producer.close()


ACTS = [interrupt_sends, interrupt_flushes, interrupt_waits_for_receipts, interrupt_closes]


@pytest.mark.parametrize("act", ACTS)
def test_x16_an_interrupt_leaves_messages_whole_and_nobody_waiting(
    act: Callable[[Producer, Sender, Timer, random.Random], None], tmp_path: Path
) -> None:
    in_a_child(lambda: play(tmp_path, 16, act))


def test_x16_a_close_after_an_interrupted_one_still_waits_for_all(tmp_path: Path) -> None:
    """Ctrl-C while a slow disk stores the last messages; then the program ends in good order, and closes again."""

    def work() -> None:
        entered, may_store, has_returned = threading.Event(), threading.Event(), threading.Event()
        with pxrs.open(tmp_path) as hub:
            hub.create_topic("t", partitions=1)
            log = hub.log.topic("t")
            store = log.append_each

            def slow(appends: Sequence[Append], tell: Tell) -> None:
                entered.set()
                may_store.wait(BOUND_S)
                store(appends, tell)

            log.append_each = slow  # type: ignore[method-assign]
            producer = hub.producer("t", linger_s=0)
            receipt = producer.send(b"last", b"key")
            assert entered.wait(BOUND_S)
            # However long it takes to ring, `close` cannot return before: nothing is stored yet.
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                producer.close()

            def close_again() -> None:
                producer.close()
                has_returned.set()

            closing = threading.Thread(target=close_again)
            closing.start()
            assert not has_returned.wait(0.2), "closed, and the message is not stored"
            may_store.set()
            assert has_returned.wait(BOUND_S)
            closing.join(BOUND_S)
            assert receipt.is_done
            assert receipt.result(0) == (0, 0)

    in_a_child(work)
