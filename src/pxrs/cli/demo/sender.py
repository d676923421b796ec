"""Two producers that send orders at an even rate, on a thread of their own, while the demo goes on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

import pxrs
from pxrs.cli.demo.orders import Order
from pxrs.cli.demo.spark import SOURCE
from pxrs.errors import PxrsError
from pxrs.producer.receipts import Receipt

Place = tuple[int, int]
"""(partition, offset)."""
UNDER_WAY_MAX: Final = 60
"""How many orders may be sent and not acknowledged. Beyond that the sender waits for the disk."""
WAIT_S: Final = 60.0
"""How long to wait for one acknowledgement, or for the thread to end."""


class Sender:
    def __init__(self, hub: pxrs.Hub) -> None:
        self.acknowledged: list[tuple[Place, Order]] = []
        self.count = 0
        """How many orders were sent."""
        self.error: str | None = None
        self._producers = [hub.producer(SOURCE) for _ in range(2)]
        self._thread: threading.Thread | None = None
        self._is_enough = threading.Event()

    def start(self, orders: Iterator[Order], rate: float) -> None:
        """Begin to send these orders, at this rate per second."""
        assert self.is_done
        self._is_enough.clear()
        self._thread = threading.Thread(target=self._send, args=(orders, rate), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sending the orders that `start` was given."""
        self._is_enough.set()

    @property
    def is_done(self) -> bool:
        """Whether all orders are acknowledged."""
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join(WAIT_S)
        for producer in self._producers:
            producer.close()

    def _send(self, orders: Iterator[Order], rate: float) -> None:
        under_way: deque[tuple[Receipt, Order]] = deque()
        at = time.monotonic()
        try:
            while not self._is_enough.wait(max(0.0, at - time.monotonic())):
                if (order := next(orders, None)) is None:
                    break
                # An account always has the same producer, so that its orders stay in order.
                producer = self._producers[order.key[-1] % 2]
                under_way.append((producer.send(order.value, key=order.key), order))
                self.count += 1
                self._collect(under_way, UNDER_WAY_MAX)
                at += 1 / rate
            self._collect(under_way, 0)
        except (PxrsError, TimeoutError) as error:
            self.error = f"orders could not be sent: {error}"

    def _collect(self, under_way: deque[tuple[Receipt, Order]], count_max: int) -> None:
        while under_way and (under_way[0][0].is_done or len(under_way) > count_max):
            receipt, order = under_way.popleft()
            self.acknowledged.append((receipt.result(WAIT_S), order))
