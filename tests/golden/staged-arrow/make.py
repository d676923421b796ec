"""Made `old.tar.xz`, with the last version that staged rows as Arrow IPC files (`.arrow`): hubs whose last batch is
committed, with a manifest that names such files, and whose driver died before the batch was appended (`committed`), or
after a part of it was appended (`in-part`).

    python tests/golden/staged-arrow/make.py FOLDER

Each hub has the topic `out` with 2 partitions. Query `query` has published batch 0 (values 0 to 9) and has committed
batch 1 (values 10 to 59, in two files)."""

from __future__ import annotations

import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import pxrs
from pxrs.publishing.manifest import Publisher
from pxrs.publishing.staging.directory import DirectoryStaging


class Died(BaseException):
    """Ends the driver."""


class Dying:
    """A topic's log that stores the first `count` appends, and raises Died at the next one."""

    def __init__(self, inner: Any, count: int) -> None:
        self._inner, self._count = inner, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def append(self, appends: Sequence[Any]) -> Any:
        for append in appends:
            if not self._count:
                raise Died
            self._count -= 1
            self._inner.append([append])
        raise Died


def rows(first: int, end: int) -> pa.RecordBatch:
    numbers = range(first, end)
    return pa.record_batch({"key": [b"key-%d" % (n % 7) for n in numbers], "value": [b"%d" % n for n in numbers]})


def make(folder: Path, appends: int) -> None:
    with pxrs.open(folder) as hub:
        topic = hub.create_topic("out", partitions=2)
        hub.join_registry()
        staging = DirectoryStaging(str(folder))
        name = staging.stage(topic.topic, "query", 0, 0, [rows(0, 10)]).name
        Publisher(hub.registry, topic.log, staging).publish("query", 0, [name or ""])
        names = [staging.stage(topic.topic, "query", 1, n, [rows(10 + 25 * n, 35 + 25 * n)]).name for n in (0, 1)]
        dying: Any = Dying(topic.log, appends)
        try:
            Publisher(hub.registry, dying, staging).publish("query", 1, [name or "" for name in names])
        except Died:
            return
        raise AssertionError("it was published")


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        for name, appends in (("committed", 0), ("in-part", 1)):
            make(Path(root, name), appends)
        with tarfile.open(Path(sys.argv[1], "old.tar.xz"), "w:xz") as packed:
            for name in ("committed", "in-part"):
                packed.add(Path(root, name), name)


if __name__ == "__main__":
    main()
