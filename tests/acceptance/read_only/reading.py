"""A process that may read a hub and not write it (V5).

Root may write anywhere. So where the tests run as root, `reading_only` gives this process the ids of an unprivileged
user for a while: the hub is then another user's, with modes 644 and 755. Otherwise it takes the write permission away
from the owner.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pxrs
import pxrs.registry.sql.registry
import pxrs.registry.sql.sqlite

NOBODY = 65534
IS_ROOT = os.geteuid() == 0
as_root = pytest.mark.skipif(not IS_ROOT, reason="one user has to write while another one reads")


@contextlib.contextmanager
def importing_as_root() -> Iterator[None]:
    """Within the block, this process takes the effective uid 0 for each import of a module that is not loaded yet.

    The unprivileged user may not be allowed to enter the checkout or the virtual environment, as after `git clone .
    "$(mktemp -d)"`: modules that are imported late, such as those of `rich`, could not be found then. `import` and
    `importlib.import_module` both look `_find_and_load` up in this module at each call."""
    bootstrap: Any = importlib._bootstrap  # type: ignore[attr-defined]
    find_and_load = bootstrap._find_and_load
    lock = threading.RLock()  # the uid is that of all threads

    def load(*arguments: Any) -> Any:
        with lock:
            before = os.geteuid()
            os.setresuid(-1, 0, -1)
            try:
                return find_and_load(*arguments)
            finally:
                os.setresuid(-1, before, -1)

    bootstrap._find_and_load = load
    try:
        yield
    finally:
        bootstrap._find_and_load = find_and_load


@contextlib.contextmanager
def reading_only(folder: Path) -> Iterator[None]:
    """This process may read what is in the folder, and not write there."""
    if IS_ROOT:
        groups = os.getgroups()
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, 0)
        os.setresuid(NOBODY, NOBODY, 0)
        try:
            with importing_as_root():
                yield
        finally:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
            os.setgroups(groups)
        return
    modes = {path: path.stat().st_mode for path in [folder, *folder.rglob("*")] if not path.is_symlink()}
    for path, mode in modes.items():
        path.chmod(mode & ~0o222)
    try:
        yield
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


def picture(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder, with its mode and content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found[str(path)] = status.st_mode, path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
    return found


def send(hub: pxrs.Hub, topic: str, count: int) -> None:
    with hub.producer(topic) as out:
        for number in range(count):
            out.send(f"{number}", partition=number % 2, timestamp=(1000 + number // 2) * 1_000_000)


def look(data: Path) -> None:
    """All that only looks."""
    with pxrs.open(data) as hub:
        assert [topic.name for topic in hub.topics()] == ["orders"]
        orders = hub.topic("orders")
        assert [(orders.start(p), orders.end(p)) for p in range(3)] == [(0, 5), (0, 5), (0, 0)]
        assert orders.log.ends() == orders.log.ends() == [5, 5, 0]
        assert [message.value for message in orders.messages(1, 3)] == [b"7", b"9"]
        assert orders.read(0, 0)[0].records.num_rows == 5
        assert orders.to_arrow().num_rows == 10
        assert orders.offset_at(0, 1002 * 1_000_000) == 2
        assert orders.wait({0: 5, 1: 2}, 0) == {1}
        assert orders.wait({2: 0}, 0.01) == set()
        assert orders.retention_problem() is None
        assert hub.damaged_topics() == []
        assert hub.groups() == ["billing"]
        assert hub.group("billing").describe().lag == 6
        assert [queue.depth().ready for queue in hub.queues()] == [1]
        mail = hub.queue("mail")
        assert [item.value for item in mail.peek(5)] == [b"hello"]
        assert mail.dead_letters().list() == []
        assert hub.registry.get("queues/mail") is not None
        with hub.registry.watch("groups/") as watch:
            assert hub.group("billing").describe().members == ()
            assert not watch.wait(0.01)


WRITES: dict[str, Callable[[pxrs.Hub], object]] = {
    "create_topic": lambda hub: hub.create_topic("more"),
    "delete_topic": lambda hub: hub.delete_topic("orders"),
    "producer": lambda hub: hub.producer("orders"),
    "append": lambda hub: hub.topic("orders").log.append([]) or hub.topic("orders").log.check_writable(),
    "retain": lambda hub: hub.topic("short").retain(),
    "consumer": lambda hub: hub.consumer("orders", "billing"),
    "reset": lambda hub: hub.group("billing").reset("earliest"),
    "import_checkpoint": lambda hub: hub.group("other").import_checkpoint({0: 1}, "orders"),
    "delete group": lambda hub: hub.group("billing").delete(),
    "create_queue": lambda hub: hub.create_queue("more"),
    "put": lambda hub: hub.queue("mail").put("more"),
    "take": lambda hub: hub.transaction().take("mail"),
    "delete_queue": lambda hub: hub.delete_queue("mail"),
    "commit": lambda hub: hub.registry.commit(put={"x": b""}),
    "lease": lambda hub: hub.registry.lease(5),
    "adopt": lambda hub: hub.adopt_registry(),
}
