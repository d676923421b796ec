"""A hub that a process may read and not write: everything that only looks works, everything else is refused whole (V5).

Root may write anywhere. So where the tests run as root, `reading_only` gives this process the ids of an unprivileged
user for a while: the hub is then another user's, with modes 644 and 755. Otherwise it takes the write permission away
from the owner.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import shutil
import stat
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

# The unprivileged user may not be allowed to read the interpreter's own library: what is imported late is loaded now.
import pxrs
import pxrs.consumer
import pxrs.group.admin
import pxrs.log.check
import pxrs.producer
import pxrs.queue.handle
import pxrs.queue.transaction
import pxrs.registry.file.store
import pxrs.registry.sql.sqlite
from pxrs import registry as registries
from pxrs.cli.app import app
from pxrs.errors import AccessDenied, DamagedFrame, LogError, NoWritePermission, RegistryError
from pxrs.group.records import Keys
from pxrs.log.published import NAME as PUBLISHED
from pxrs.registry.file import journal
from pxrs.testing.waiting import eventually

NOBODY = 65534
IS_ROOT = os.geteuid() == 0
LIBC = ctypes.CDLL(None, use_errno=True)
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, CLONE_NEWNS = 0x1, 0x20, 0x1000, 0x4000, 1 << 18, 0x20000

as_root = pytest.mark.skipif(not IS_ROOT, reason="one user has to write while another one reads")


@contextlib.contextmanager
def reading_only(folder: Path) -> Iterator[None]:
    """This process may read what is in the folder, and not write there."""
    if IS_ROOT:
        groups = os.getgroups()
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, 0)
        os.setresuid(NOBODY, NOBODY, 0)
        try:
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


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user may reach, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="pxrs-read-only-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def data(place: Path) -> Path:
    """A hub with 5 messages in each of two partitions of `orders`, none in the third, a group that has read 2 of each,
    and a queue with one item."""
    data = place / "data"
    with pxrs.open(data) as hub:
        hub.create_topic("orders", partitions=3)
        send(hub, "orders", 10)
        hub.group("billing").import_checkpoint({0: 2, 1: 2}, "orders")
        hub.create_queue("mail").put("hello")
    return data


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


def test_v5_who_may_only_read_a_hub_looks_at_all_of_it_and_changes_nothing(data: Path) -> None:
    before = picture(data)
    with reading_only(data):
        look(data)
    assert picture(data) == before


COMMANDS = {
    "topic list": ["topic", "list"],
    "topic describe": ["topic", "describe", "orders"],
    "tail": ["tail", "orders", "-n", "3"],
    "group list": ["group", "list"],
    "group describe": ["group", "describe", "billing"],
    "queue list": ["queue", "list"],
    "queue describe": ["queue", "describe", "mail"],
    "queue depth": ["queue", "depth", "mail"],
    "queue peek": ["queue", "take", "mail", "--peek"],
    "queue dead": ["queue", "dead", "list", "mail"],
}


def test_v5_every_command_that_only_looks_works_for_who_may_only_read(data: Path) -> None:
    commands = {name: [*command, "--at", str(data), "--json"] for name, command in COMMANDS.items()}
    url = str(data / "registry")
    commands["registry scan"] = ["registry", "scan", url, "groups/", "--json"]
    commands["registry get"] = ["registry", "get", url, "queues/mail", "--json"]
    commands["check"] = ["check", str(data), "--json"]
    runner = CliRunner()
    expected = {name: runner.invoke(app, command, catch_exceptions=False).output for name, command in commands.items()}
    before = picture(data)
    with reading_only(data):
        found = {name: runner.invoke(app, command, catch_exceptions=False) for name, command in commands.items()}
    assert {name: result.output for name, result in found.items()} == expected
    assert {result.exit_code for result in found.values()} == {0}
    assert picture(data) == before


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


@pytest.mark.parametrize("name", WRITES)
def test_v5_what_has_to_write_is_refused_before_anything_is_done(data: Path, name: str) -> None:
    with pxrs.open(data) as hub:
        hub.create_topic("short", retention=3600)
        send(hub, "short", 10)
        hub.group("billing").describe()
        hub.join_registry()
    before = picture(data)
    with reading_only(data), pxrs.open(data) as hub:
        with pytest.raises(NoWritePermission) as caught:
            WRITES[name](hub)
        assert isinstance(caught.value, LogError | AccessDenied)
        assert str(data) in str(caught.value), "where"
        assert f"uid {os.geteuid()}" in str(caught.value), "who"
        assert "run it as" in str(caught.value), "what to do"
    assert picture(data) == before
