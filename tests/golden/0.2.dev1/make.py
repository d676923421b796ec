"""Makes what version 0.2.dev1 leaves on disk: hubs, registries and a Spark checkpoint location, packed as one archive.

    python make.py FOLDER ARCHIVE

Version 0.2.dev1 is the last state before a group's assignment had a key for each member. The script was run once, with
that version, and is kept to show what the archive holds. `test_previous_version.py` opens the archive with every later
version.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pxrs
from pxrs import failures


def fill(hub: pxrs.Hub, registry: str | None = None) -> None:
    """Topics of every kind of setting, a group in the middle of its work, a queue with items in every state."""
    hub.create_topic("orders", partitions=3, segment_bytes=4096, codec="lz4")
    hub.create_topic("metrics", partitions=2, durability="os")
    hub.create_topic("kept", partitions=1, retention=86_400, keep_unread=True, segment_bytes=4096)
    hub.create_topic("dead", partitions=1)
    for topic in ("orders", "metrics", "kept"):
        with hub.producer(topic) as out:
            for number in range(300):
                out.send(f"{topic}-{number}", key=f"key-{number % 20}", headers=[("n", str(number).encode())])
                if number % 50 == 49:
                    out.flush()

    with hub.consumer("orders", group="billing", ack="manual") as inbox:
        done = 0
        while done < 120:
            for message in inbox.poll(20, timeout=10):
                inbox.ack(message)
                done += 1
        inbox.commit()

    # The handler is compiled under a name of its own, and only its frame is kept: no path of the machine is stored.
    code = "def fail(message):\n    raise ValueError('a message that cannot be handled')\n"
    names: dict[str, Callable[[pxrs.Message], None]] = {}
    exec(compile(code, "handler.py", "exec"), names)
    failures._FRAMES_MAX = 1
    fail = names["fail"]

    paused = contextlib.suppress(pxrs.errors.PartitionsPaused)
    with hub.consumer("kept", group="careful", until="end", on_error="pause") as inbox, paused:
        inbox.run(fail)

    # A member that dies without leaving: its owner keys and the group's assignment stay as they were.
    script = (
        "import os, sys, pxrs\n"
        "hub = pxrs.open(sys.argv[1], sys.argv[2] or None)\n"
        "inbox = hub.consumer('metrics', group='interrupted', ack='manual', lease_ttl=2)\n"
        "for message in inbox.poll(50, timeout=10):\n"
        "    inbox.ack(message)\n"
        "inbox.commit()\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", script, hub.url, registry or ""], check=True)

    hub.create_queue("mail", policy=pxrs.ConsumeTimes(1))
    queue = hub.queue("mail")
    for number in range(10):
        queue.put(f"letter-{number}")
    queue.put("late", delay=86_400)
    for _ in range(2):
        with contextlib.suppress(ValueError), hub.transaction() as tx:
            assert tx.take("mail", timeout=5) is not None
            raise ValueError("cannot be sent")
    hub.create_queue("strict", fifo=True)
    for number in range(5):
        hub.queue("strict").put(f"step-{number}")


def stream(spark: object, url: str, checkpoint: str, folder: Path) -> None:
    """A query from topic to topic that has finished two batches."""
    with pxrs.open(folder / url) as hub:
        hub.create_topic("in", partitions=2)
        hub.create_topic("out", partitions=2)
        with hub.producer("in") as out:
            for number in range(100):
                out.send(str(number), key=f"key-{number % 10}")
    source = {"url": str(folder / url), "topic": "in", "group": "copier", "maxRowsPerTrigger": "60"}
    rows = spark.readStream.format("pxrs").options(**source).load().select("key", "value")
    sink = {"url": str(folder / url), "topic": "out", "checkpointLocation": str(folder / checkpoint)}
    query = rows.writeStream.format("pxrs").options(**sink).trigger(availableNow=True).start()
    query.awaitTermination()
    assert query.exception() is None


def main(folder: Path, archive: Path) -> None:
    folder.mkdir()
    with pxrs.open(folder / "hub") as hub:
        fill(hub)
    with pxrs.open(folder / "hub-sql", registry=f"sqlite:///{folder}/registry.db") as hub:
        fill(hub, f"sqlite:///{folder}/registry.db")
    from pxrs.spark import session

    spark = session("golden", "local[2]")
    stream(spark, "hub-spark", "checkpoint", folder)
    spark.stop()
    with tarfile.open(archive, "w:xz") as packed:
        for name in sorted(os.listdir(folder)):
            packed.add(folder / name, name)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]))
