"""What `pxrs group describe` and `pxrs queue dead list` show of what handlers raised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import pxrs
from pxrs import ConsumeOnce
from pxrs.cli.app import app
from pxrs.errors import PartitionsPaused
from pxrs.group.records import Keys, Paused
from pxrs.testing.waiting import eventually


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[pxrs.Hub]:
    with pxrs.open(tmp_path / "data") as hub:
        yield hub


def call(hub: pxrs.Hub, *arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments, "--at", hub.url])
    assert done.exit_code == 0, done.output
    return done.stdout


def reject(message: Any) -> None:
    raise ValueError(f"\x1b[31m partition {message.partition}" if message.partition == 2 else "no")


def test_x14_describe_shows_each_traceback_once_below_the_partitions_that_it_holds_up(hub: pxrs.Hub) -> None:
    topic = hub.create_topic("t", partitions=4)
    with hub.producer("t") as out:
        for partition in range(3):
            out.send(b"x", partition=partition)
    with hub.consumer("t", "g", until="end") as inbox, pytest.raises(PartitionsPaused):
        inbox.run(reject)
    of_0_1 = b'{"offset":0,"error":"ValueError: old","when":5.0,"by":"anna","skip":false}'
    hub.registry.commit(put={Keys("g").pause(topic.id, 3): of_0_1})
    shown = call(hub, "group", "describe", "g")
    assert "\x1b" not in shown
    lines = [line.rstrip() for line in shown.splitlines()]
    first = lines.index("t/0 is paused at offset 0: ValueError: no")
    assert lines[first + 1] == "t/1 is paused at offset 0: ValueError: no"
    assert lines[first + 2] == "    Traceback (most recent call last):"
    assert lines[first + 5] == "    ValueError: no"
    assert lines[first + 6] == "t/2 is paused at offset 0: ValueError: \\x1b[31m partition 2"
    assert lines[first + 11] == "t/3 is paused at offset 0: ValueError: old", "of version 0.1, without a traceback"
    commands = (f"`pxrs group {what} g t 0 --at {hub.url}`" for what in ("retry", "skip"))
    assert lines[first + 12] == f"continue t/0 with {' or '.join(commands)}"
    assert [line.split()[1] for line in lines[first + 12 :]] == ["t/0", "t/1", "t/2", "t/3"]
    plain = json.loads(call(hub, "group", "describe", "g", "--json"))
    paused = plain["partitions"][0]["paused"]
    assert (paused["error_type"], "in reject" in paused["traceback"]) == ("ValueError", True)
    assert Paused.load("k", of_0_1).traceback == ""


def test_dead_letters_are_listed_with_what_was_raised_and_on_demand_where(hub: pxrs.Hub) -> None:
    queue = hub.create_queue("q", ConsumeOnce())

    def handle(tx: Any, item: Any) -> None:
        raise KeyError("no \x1b[31m address")

    ids = [queue.put("x"), queue.put("y")]
    with pxrs.QueueListener(queue, handle) as listener:
        eventually(lambda: listener.failed == 2, 30.0)
    with hub.transaction() as tx:
        queue.put("z")
        tx.take("q", timeout=5)
        tx.rollback("not today")
    rows = [json.loads(line) for line in call(hub, "queue", "dead", "list", "q", "--json").splitlines()]
    assert [row["id"] for row in rows[:2]] == ids
    assert [row["error_type"] for row in rows] == ["KeyError", "KeyError", ""]
    assert ["in handle" in row["traceback"] for row in rows] == [True, True, False]
    assert "Traceback" not in call(hub, "queue", "dead", "list", "q")
    shown = call(hub, "queue", "dead", "list", "q", "--traceback")
    assert "\x1b" not in shown
    lines = [line.rstrip() for line in shown.splitlines()]
    first = lines.index(f"{ids[0]} KeyError: 'no \\x1b[31m address'")
    assert lines[first + 1] == "    Traceback (most recent call last):"
    assert shown.count("Traceback (most recent call last)") == 2
    assert lines[-1] == f"{rows[2]['id']} not today"
