"""One worker of `pxrs demo`: a member of the group that prints an event for each step on stdout, before the next step.

    began PARTITION EPOCH OFFSET        a message is in hand
    handled PARTITION EPOCH OFFSET      the message is handled, and no checkpoint covers it yet
    committed PARTITION EPOCH OFFSET    the store has accepted the checkpoint: the next one to read
    refused WHY                         the store has refused the checkpoint: another member owns the partition

It ends when its standard input ends, which also happens if the demo dies.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

import pxrs
from pxrs.consumer.consumer import Consumer
from pxrs.errors import PartitionLost
from pxrs.model import Message

TTL_S = 2.0
WORK_S = 0.04
"""How long the handling of one message takes."""
POLL_S = 0.1


def tell(*words: object) -> None:
    """Print an event in one write, so that a line is there as a whole or not at all even if this process is killed."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Worker:
    def __init__(self, hub: pxrs.Hub, topic: str, group: str, name: str) -> None:
        self._inbox: Consumer = hub.consumer(topic, group, name=name, ack="manual", lease_ttl=TTL_S)

    def run(self) -> None:
        with self._inbox as inbox:
            while not select.select([0], [], [], 0)[0]:
                for message in inbox.poll(1, timeout=POLL_S):
                    self._handle(message)

    def _handle(self, message: Message) -> None:
        place = message.partition, message.epoch
        tell("began", *place, message.offset)
        time.sleep(WORK_S)  # here the demo stops or kills the worker
        tell("handled", *place, message.offset)
        try:
            self._inbox.ack(message)
            self._inbox.commit()
        except PartitionLost as refusal:
            tell("refused", f"{refusal} ({type(refusal).__name__})")
        else:
            tell("committed", *place, message.offset + 1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the demo gets SIGINT too, and ends its workers
    url, registry, topic, group, name = sys.argv[1:]
    with pxrs.open(url, registry=registry or None) as hub:
        Worker(hub, topic, group, name).run()
