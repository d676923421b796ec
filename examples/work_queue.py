"""A work queue: orders go from a topic into a queue, workers charge them, one of them dies, and each is charged once.

    python examples/work_queue.py [FOLDER]

One commit writes the topic's checkpoints and puts the items. One commit removes an item from the queue and puts its
result into the next one. Some orders cannot be charged: they are delivered three times, and then are dead letters with
the reason. One order kills the process that handles it; the item is delivered to another process. Without FOLDER the
example uses a temporary folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pxrs

ORDERS = 300
BROKEN = {17, 170}
DEADLY = 42


def main(folder: str | Path, spark: object = None) -> None:
    """Nothing here needs Spark."""
    log = Path(folder, "worker.log")
    with pxrs.open(Path(folder, "data")) as hub:
        hub.create_topic("orders", partitions=4)
        backoff = pxrs.ExponentialBackoff(first=0.05, cap=1)
        orders = hub.create_queue("to-charge", policy=pxrs.ConsumeTimes(3), backoff=backoff)
        charged = hub.create_queue("charged")
        with hub.producer("orders") as out:
            for number in range(ORDERS):
                out.send(json.dumps({"order": number}), key=f"account-{number % 10}")

        worker = start_worker(hub.url, log)
        try:
            into_queue(hub)
            while charged.depth().ready < ORDERS - len(BROKEN) or len(orders.dead_letters()) < len(BROKEN):
                assert worker.poll() is None, log.read_text()
                time.sleep(0.1)
        finally:
            worker.terminate()
        assert worker.wait() == 0, log.read_text()

        done = [json.loads(item.value)["order"] for item in charged.peek(ORDERS)]
        assert sorted(done) == sorted(set(range(ORDERS)) - BROKEN), "each order exactly once"
        assert log.read_text().count("exited with code 1; restarting it") == 1
        given_up = list(orders.dead_letters())
        assert {json.loads(item.value)["order"] for item in given_up} == BROKEN
        assert all(item.deliveries == 3 for item in given_up)
        assert hub.group("charging").describe().lag == 0
        print(f"{len(done)} orders were charged once each, although a worker died; {len(given_up)} are dead letters:")
        for item in given_up:
            print(f"  {item.value.decode()}: {item.error}")


def start_worker(url: str, log: Path) -> subprocess.Popen[bytes]:
    """Does what `pxrs worker work_queue:charge --queue to-charge --processes 2 --threads 4` does."""
    command = [sys.executable, "-m", "pxrs.cli", "worker", "work_queue:charge", "--at", str(Path(url).absolute())]
    options = ["--queue", "to-charge", "--processes", "2", "--threads", "4"]
    with log.open("wb") as told:
        return subprocess.Popen([*command, *options], cwd=Path(__file__).parent, stderr=told)


def into_queue(hub: pxrs.Hub) -> None:
    """From the topic into the queue, up to 50 at a time; the checkpoint is part of the transaction."""
    with hub.consumer("orders", group="charging", until="end") as inbox:
        while messages := inbox.poll(50, timeout=5):
            with hub.transaction() as tx:
                for message in messages:
                    tx.put("to-charge", message.value or b"", key=message.key)
                tx.checkpoint(inbox)


def charge(tx: pxrs.Transaction, item: pxrs.Item) -> None:
    """The handler of the workers. One commit removes the item and puts what the handler has put."""
    number = json.loads(item.value)["order"]
    if number in BROKEN:
        raise ValueError("the card was declined")
    if number == DEADLY and item.deliveries == 1:
        os._exit(1)  # as if it had been killed
    tx.put("charged", item.value)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="pxrs-", ignore_cleanup_errors=True) as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else temporary)
