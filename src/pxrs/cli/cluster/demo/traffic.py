"""The producers and consumers of the demo: threads that use the cluster's address as any program would."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Final

import pxrs
from pxrs.cli.demo.sender import Place
from pxrs.errors import CommitUnknown, GroupUnavailable, PartitionLost, PxrsError

TOPIC: Final = "orders"
GROUP: Final = "billing"
INTERVAL_S: Final = 0.04
"""How often each producer sends a message, if the one before it is acknowledged."""
RESULT_S: Final = 60.0
POLL_S: Final = 0.2
END_S: Final = 70.0


class Producing:
    """One producer for each partition, which sends one message after the other."""

    def __init__(self, address: str, partitions: int) -> None:
        self.acknowledged: list[Place] = []
        self.moments: dict[int, list[float]] = {partition: [] for partition in range(partitions)}
        """When each message was acknowledged, by partition (monotonic)."""
        self.errors: list[str] = []
        self._address = address
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(partition,), daemon=True) for partition in range(partitions)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _run(self, partition: int) -> None:
        try:
            with pxrs.open(self._address) as hub, hub.producer(TOPIC) as producer:
                at = time.monotonic()
                number = 0
                while not self._stop.wait(max(0.0, at - time.monotonic())):
                    place = producer.send(b"%d/%d" % (partition, number), partition=partition).result(RESULT_S)
                    self.moments[partition].append(time.monotonic())
                    self.acknowledged.append(place)
                    number += 1
                    at = max(at + INTERVAL_S, time.monotonic())
        except (PxrsError, TimeoutError) as error:
            self.errors.append(f"a message to partition {partition} was not acknowledged: {error}")

    def stop(self) -> None:
        """No more messages; returns when those that are under way are acknowledged."""
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(END_S)


class Consuming:
    """Members of one group. What they do is told in the words of `pxrs demo`, whose account is made of them."""

    def __init__(self, address: str, members: int) -> None:
        self.told: list[str] = []
        self._done: set[Place] = set()
        self.moments: defaultdict[int, list[float]] = defaultdict(list)
        """When a message was handled, by partition (monotonic)."""
        self.errors: list[str] = []
        self._address = address
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(f"member {number}",), daemon=True)
            for number in range(1, members + 1)
        ]

    @property
    def handled(self) -> int:
        """The number of messages that were handled. One that was handled again by another member counts once."""
        return len(self._done)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _run(self, name: str) -> None:
        try:
            with (
                pxrs.open(self._address) as hub,
                hub.consumer(TOPIC, GROUP, name=name, start="earliest", ack="manual") as consumer,
            ):
                while not self._stop.is_set():
                    messages = consumer.poll(100, timeout=POLL_S)
                    self.handle(messages)
                    self._commit(consumer, messages)
        except PxrsError as error:
            self.errors.append(f"{name} ended with an error: {error}")

    def handle(self, messages: list[pxrs.Message]) -> None:
        now = time.monotonic()
        for message in messages:
            self.moments[message.partition].append(now)
            self.told.append(f"handled {message.partition} {message.epoch} {message.offset}")
            self._done.add((message.partition, message.offset))

    def _commit(self, consumer: pxrs.Consumer, messages: list[pxrs.Message]) -> None:
        try:
            for message in messages:
                consumer.ack(message)
            while True:
                try:
                    consumer.commit()
                    break
                except (CommitUnknown, GroupUnavailable):  # the broker that was asked has died: ask another one
                    if self._stop.wait(POLL_S):
                        return
        except PartitionLost:
            return  # another member has it, and reads on from the last checkpoint
        for message in messages:
            self.told.append(f"committed {message.partition} {message.epoch} {message.offset + 1}")

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(END_S)
