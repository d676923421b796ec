"""What the collections that pyspark makes after every task of a Python worker have to visit."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("pyspark")

TASKS = """
import gc, json, pickle
from pyspark.serializers import CloudPickleSerializer
import pxrs
from pxrs.spark.reader import BatchReader
from pxrs.spark.options import read_options
from pxrs.spark.tasks import TaskReader

class Cycle:
    def __init__(self):
        self.itself = self

hub = pxrs.open("hub")
hub.create_topic("in", partitions=1)
with hub.producer("in") as out:
    out.send("v").result()
(part,) = BatchReader(read_options({"url": "hub", "topic": "in"})).partitions()
serializer = CloudPickleSerializer()

def command():
    reader = TaskReader()
    def read(part):
        kept = read, Cycle()  # a task's own code may have cycles
        return reader.read(part)
    return serializer.dumps(read)

sent = command()
seen = []
for _ in range(40):  # as pyspark/daemon.py does it
    rows = sum(batch.num_rows for batch in serializer.loads(sent)(pickle.loads(pickle.dumps(part))))
    assert rows == 1
    gc.collect()
    seen.append((gc.get_freeze_count(), len(gc.get_objects())))
hub.close()
print(json.dumps(seen))
"""


def run_tasks(folder: object, reuse: str) -> list[tuple[int, int]]:
    environment = {**os.environ, "SPARK_REUSE_WORKER": reuse}
    done = subprocess.run(
        [sys.executable, "-c", TASKS], cwd=str(folder), env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [(frozen, visited) for frozen, visited in json.loads(done.stdout)]


def test_a_worker_that_is_reused_visits_its_imports_once_and_keeps_nothing_of_its_tasks(tmp_path: object) -> None:
    seen = run_tasks(tmp_path, "1")
    frozen, visited = seen[0]
    assert frozen > 20_000 > 10 * visited, "nearly everything belongs to imported modules"
    assert max(each for each, _ in seen) == frozen, "frozen once: later tasks add nothing that is never freed"
    assert seen[-1][1] - seen[5][1] < 20, "what a task has left is collected as before"


def test_a_worker_that_ends_after_one_task_freezes_nothing(tmp_path: object) -> None:
    assert {frozen for frozen, _ in run_tasks(tmp_path, "")} == {0}
