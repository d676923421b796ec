"""A group's readable files in a real directory: while it consumes, in two processes, when it is deleted (F1, R9)."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.group import projection as projections
from pxrs.group.records import Keys, Member
from pxrs.testing.waiting import eventually

WORKER = """
import sys, pxrs
folder, name = sys.argv[1:]
with pxrs.open(folder) as hub, hub.consumer("orders", group="billing", name=name) as inbox:
    while not inbox.assignment or any(inbox.lag.values()):
        inbox.poll(timeout=0.2)
    inbox.commit()
    print("read", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[pxrs.Hub]:
    with pxrs.open(tmp_path / "data") as hub:
        hub.create_topic("orders", partitions=4)
        send(hub, 100)
        yield hub


def send(hub: pxrs.Hub, count: int) -> None:
    with hub.producer("orders") as out:
        for number in range(count):
            out.send(b"paid", key=b"account-%d" % number)


def folder_of(hub: pxrs.Hub) -> Path:
    return Path(hub.url) / "registry/pxrs/consumer-groups/billing"


def read(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None


def offsets(hub: pxrs.Hub, topic: str = "orders") -> dict[int, int]:
    found = (folder_of(hub) / "offsets" / topic).glob("partition-*.offset")
    return {int(path.stem.removeprefix("partition-")): read(path)["offset"] for path in found}


def owners(hub: pxrs.Hub) -> dict[int, str | None]:
    found = read(folder_of(hub) / "owners.json") or {}
    return {int(number): each["owner"] for number, each in found.get("orders", {}).items()}


def ends(hub: pxrs.Hub) -> dict[int, int]:
    topic = hub.topic("orders")
    return {number: topic.end(number) for number in range(topic.partitions)}


def read_all(inbox: pxrs.Consumer) -> None:
    """Read to the ends of all partitions."""
    while len(inbox.assignment) < 4 or any(inbox.lag.values()):
        inbox.poll(timeout=0.2)


@contextmanager
def worker(hub: pxrs.Hub, name: str) -> Iterator[Callable[[], None]]:
    """A consumer in a process of its own, which has read all that there was; and how to end it."""
    command = [sys.executable, "-c", WORKER, hub.url, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def end() -> None:
            process.communicate("\n", timeout=30)
            assert process.returncode == 0

        try:
            assert process.stdout.readline() == "read\n"
            yield end
        finally:
            process.kill()


def test_f1_what_a_group_does_can_be_read_while_it_does_it(hub: pxrs.Hub) -> None:
    with hub.consumer("orders", group="billing", name="w1") as inbox:
        read_all(inbox)
        inbox.commit()
        eventually(lambda: offsets(hub) == ends(hub))
        assert owners(hub) == dict.fromkeys(range(4), "w1")
        assert read(folder_of(hub) / "members.json")["leader"] == "w1"
        send(hub, 50)
        read_all(inbox)
        inbox.commit()
        eventually(lambda: offsets(hub) == ends(hub))
        send(hub, 1)
        assert inbox.poll(timeout=5)
        inbox.commit()
    # What was done last, and that nobody is there, is written when it closes.
    assert offsets(hub) == ends(hub)
    assert owners(hub) == dict.fromkeys(range(4), None)
    assert read(folder_of(hub) / "members.json")["members"] == []


def test_f1_two_processes_are_shown_with_what_each_has(hub: pxrs.Hub) -> None:
    with worker(hub, "w1") as end_1, worker(hub, "w2") as end_2:
        eventually(lambda: sorted(str(owner) for owner in owners(hub).values()) == ["w1", "w1", "w2", "w2"])
        described = hub.group("billing").describe()
        assert owners(hub) == {row.partition: row.owner_name for row in described.partitions}
        assert [each["name"] for each in read(folder_of(hub) / "members.json")["members"]] == ["w1", "w2"]
        end_1()  # the one that leads
        eventually(lambda: set(owners(hub).values()) == {"w2"})
        end_2()
    assert set(owners(hub).values()) == {None}
    assert offsets(hub) == ends(hub)


def test_f1_they_are_removed_with_the_group_and_follow_an_administrator(hub: pxrs.Hub) -> None:
    with worker(hub, "w1") as end:
        end()
    assert offsets(hub) == ends(hub)
    hub.group("billing").reset("earliest")
    assert offsets(hub) == dict.fromkeys(range(4), 0)
    hub.group("billing").delete()
    assert not folder_of(hub).exists()
    with hub.consumer("orders", group="billing", name="w2") as inbox:
        assert inbox.poll(timeout=5)
        eventually(lambda: set(owners(hub).values()) == {"w2"})
        hub.group("billing").delete(force=True)
        eventually(lambda: set(owners(hub).values()) == {"w2"})
    assert offsets(hub)
    dead = Member("w3", hub.topic("orders").id, "orders", 4)  # its lease has not expired yet
    hub.registry.commit(put={Keys("billing").member("dead"): dead.dump()})
    hub.group("billing").delete(force=True)
    assert not folder_of(hub).exists()


def test_f1_a_topic_that_was_made_again_is_not_mixed_with_the_old_one(hub: pxrs.Hub) -> None:
    old = hub.topic("orders").id
    with hub.consumer("orders", group="billing", until="end") as inbox:
        for _ in inbox:
            pass
    before = offsets(hub)
    hub.delete_topic("orders")
    hub.create_topic("orders", partitions=2)
    send(hub, 10)
    with hub.consumer("orders", group="billing", until="end") as inbox:
        for _ in inbox:
            pass
    assert offsets(hub) == ends(hub)
    assert offsets(hub, old) == before


def checkpoints(hub: pxrs.Hub) -> dict[int, int | None]:
    return {row.partition: row.checkpoint for row in hub.group("billing").describe().partitions}


def test_r9_no_commit_waits_for_them(hub: pxrs.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    is_writing, may_go_on = threading.Event(), threading.Event()
    render, was_let_go = projections.render, []

    def hang(*arguments: Any) -> dict[str, str]:
        is_writing.set()
        was_let_go.append(may_go_on.wait(10))
        return render(*arguments)

    monkeypatch.setattr(projections, "render", hang)
    with hub.consumer("orders", group="billing") as inbox:
        assert is_writing.wait(30)
        read_all(inbox)
        inbox.commit()
        assert checkpoints(hub) == ends(hub)
        assert not folder_of(hub).exists()
        may_go_on.set()
    assert all(was_let_go)
    assert offsets(hub) == ends(hub)


def test_r9_no_commit_fails_with_them(hub: pxrs.Hub, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(hub)
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    with hub.consumer("orders", group="billing", until="end") as inbox:
        for _ in inbox:
            inbox.commit()
    assert checkpoints(hub) == ends(hub)
    assert [record.name for record in caplog.records] == [projections.__name__]
