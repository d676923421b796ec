"""Messages that tests of different parts send."""

from __future__ import annotations

import pyarrow as pa

from pxrs.hub import Hub


def send_numbers(hub: Hub, topic: str, count: int, partitions: int = 1) -> None:
    """Send the values b"0", b"1" and so on, to each partition in turn. All of one partition are one batch of the log,
    which `poll` may hand out at once; messages that are sent one by one become as many batches as the threads of the
    producer are fast."""
    values = pa.array([b"%d" % number for number in range(count)], pa.binary())
    turns = pa.array([number % partitions for number in range(count)], pa.int32())
    with hub.producer(topic) as out:
        out.send_batch(pa.table({"value": values, "partition": turns}))
