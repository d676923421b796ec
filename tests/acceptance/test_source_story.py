"""The story of docs/sources.md, by the command line alone: a PostgreSQL table with one consumer and one checkpoint gets
three workers. One of them is killed, rows arrive, two rows cannot be handled, and the lag is true at every step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from pxrs.cli.app import app
from pxrs.hashing import xxh64
from pxrs.testing.servers import PostgresServer
from pxrs.testing.waiting import eventually

PATIENCE_S = 90.0
PARTITIONS = 6
OLD, FIRST, MORE = 20, 40, 30
"""How many rows the old consumer has handled; how many wait when the workers start; how many come later."""
HANDLER = """
import os, time

def note(file, message):
    with open(file, "ab", 0) as out:
        out.write(b"%d %d %d\\n" % (os.getpid(), message.partition, message.offset))

def handle(message):
    if message.value == b"gate":
        note("waiting", message)
        while not os.path.exists("open"):
            time.sleep(0.01)
    if message.value == b"late" and not os.path.exists("mended"):
        raise ValueError("the partner's server is down")
    if message.value == b"bad":
        raise ValueError("no amount given")
    note("handled", message)
"""


class Shop:
    """The table, the folder of the workers' program, and commands as a person types them."""

    def __init__(self, folder: Path, server: PostgresServer) -> None:
        self.folder, self.server = folder, server
        self.url = server.create_database("shop")
        self.connection = psycopg.connect(self.url, autocommit=True)
        self.connection.execute(
            "CREATE TABLE events (id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, account TEXT, body TEXT)"
        )
        (folder / "shop.py").write_text(HANDLER)
        # Neither the registry nor a command line has the password: it is in the environment of each process.
        self.environment = {**os.environ, "PXRS_AT": str(folder / "data"), "COLUMNS": "200", "NO_COLOR": "1"}
        self.environment |= {"PGUSER": server.user, "PGPASSWORD": server.password}
        self.said: list[str] = []

    def insert(self, *rows: tuple[str, str]) -> None:
        with self.connection.cursor() as cursor:
            cursor.executemany("INSERT INTO events (account, body) VALUES (%s, %s)", rows)

    def ids(self, condition: str = "true") -> list[int]:
        rows = self.connection.execute(f"SELECT id FROM events WHERE {condition} ORDER BY id".encode()).fetchall()
        return [row[0] for row in rows]

    def run(self, *arguments: str) -> str:
        done = CliRunner(env=self.environment).invoke(app, arguments)
        self.said.append(done.output)
        assert done.exit_code == 0, f"{arguments}: {done.output} {done.exception}"
        return done.output

    def describe(self) -> dict[str, Any]:
        """`group describe`, once its lag was held against the table."""
        found: dict[str, Any] = json.loads(self.run("group", "describe", "billing", "--json"))
        # Read after the lag: meanwhile rows may be handled, and none is inserted. So these are no more than there were.
        left = set(self.ids(f"id > {OLD}")) - {number for _, _, number in self.notes("handled")} - self.left_out
        last = max(self.ids())
        assert found["lag"] >= len(left), "rows that are yet to be handled are in the lag"
        assert found["lag"] <= last - OLD, "and each is counted once"
        assert found["is_lag_exact"] == (found["lag"] == 0)
        assert {row["topic"] for row in found["partitions"]} == {"events"}, "a name, and no id"
        return found

    left_out: frozenset[int] = frozenset()

    def notes(self, file: str) -> list[tuple[int, int, int]]:
        """What the handler wrote: (pid, partition, id)."""
        path = self.folder / file
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(pid), int(partition), int(number)) for pid, partition, number in map(str.split, lines)]

    def paused(self) -> dict[int, dict[str, Any]]:
        """By id: the partitions that a row holds up."""
        return {row["paused"]["offset"]: row for row in self.describe()["partitions"] if row["paused"] is not None}


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with PostgresServer(settings={"fsync": "off"}) as server:
        shop = Shop(tmp_path, server)
        yield shop
        shop.connection.close()


def test_x21_v6_a_table_with_one_consumer_becomes_a_topic_of_three_workers(shop: Shop) -> None:
    # Twenty rows that the old consumer has handled, and forty that wait; the last six of these take their time.
    shop.insert(*((f"account-{i % 10}", "paid") for i in range(OLD + FIRST - 6)))
    shop.insert(*((f"account-{i}", "gate") for i in range(6)))
    shop.run(
        *("source", "add", "events", "--sql-table", shop.url, "--table", "events"),
        *("--key-column", "account", "--value-column", "body", "--partitions", str(PARTITIONS)),
    )
    assert json.loads(shop.run("source", "describe", "events", "--json"))["end"] == OLD + FIRST + 1
    shop.run("group", "import-checkpoint", "billing", str(OLD + 1), "--topic", "events")
    assert shop.describe()["lag"] == FIRST
    assert f"<= {FIRST}" in shop.run("group", "list")
    assert len(shop.run("tail", "events", "-n", "3").splitlines()) == 3

    command = [sys.executable, "-m", "pxrs.cli", "worker", "shop:handle", "--topic", "events", "--group", "billing"]
    command += ["--processes", "3", "--commit-interval", "0.2", "--json"]
    # On a busy machine nobody is to lose a partition for being slow: a row would rightly be handled twice.
    command += ["--lease-ttl", "60", "--handover-timeout", "300", "--grace", "80"]
    errors = shop.folder / "errors"
    with errors.open("wb") as log:
        worker = subprocess.Popen(command, cwd=shop.folder, env=shop.environment, stderr=log)
    try:
        # A worker dies with a row in hand, when the others are there too.
        eventually(lambda: len(shop.describe()["members"]) == 3, PATIENCE_S, what=errors.read_text)
        eventually(lambda: bool(shop.notes("waiting")), PATIENCE_S, what=errors.read_text)
        before = {row["partition"]: row["checkpoint"] for row in shop.describe()["partitions"]}
        victim = shop.notes("waiting")[0][0]
        os.kill(victim, signal.SIGKILL)
        assert shop.describe()["lag"] > 0
        (shop.folder / "open").touch()

        # New rows; two of them cannot be handled.
        late, bad = (f"account-{next(i for i in range(99) if partition_of(f'account-{i}') == p)}" for p in (0, 1))
        shop.insert(*((f"account-{i % 10}", "paid") for i in range(MORE)), (late, "late"), (bad, "bad"))
        (late_id,), (bad_id,) = shop.ids("body = 'late'"), shop.ids("body = 'bad'")
        shop.insert((late, "paid"), (bad, "paid"))
        eventually(lambda: shop.paused().keys() == {late_id, bad_id}, PATIENCE_S, what=shop.describe)
        shown = shop.run("group", "describe", "billing")
        assert f"events/0 is paused at offset {late_id}: ValueError: the partner's server is down" in shown
        assert f"events/1 is paused at offset {bad_id}: ValueError: no amount given" in shown
        assert "shop.py" in shown, "and where it was raised"

        # One is tried again once its cause is gone, the other is left out.
        (shop.folder / "mended").touch()
        shop.run("group", "retry", "billing", "events", "0")
        eventually(lambda: shop.paused().keys() == {bad_id}, PATIENCE_S, what=shop.describe)
        shop.left_out = frozenset({bad_id})
        shop.run("group", "skip", "billing", "events", "1", "--yes")
        eventually(lambda: shop.describe()["lag"] == 0, PATIENCE_S, what=shop.describe)
    finally:
        worker.terminate()
        code = worker.wait(PATIENCE_S)
    assert code == 0, errors.read_text()

    # Each row above the old checkpoint was handled; again only where no checkpoint told of it when the worker died.
    handled = shop.notes("handled")
    times = Counter(number for _, _, number in handled)
    assert sorted(times) == [number for number in shop.ids(f"id > {OLD}") if number != bad_id]
    again = [(partition, number) for _, partition, number in handled if times[number] > 1]
    assert all(number >= before[partition] for partition, number in again)
    assert all(victim in [pid for pid, _, each in handled if each == number] for _, number in again)

    # Without a worker the name and the lag are known too; the next row is behind.
    shop.insert(("account-1", "paid"))
    assert shop.describe()["lag"] == 1
    moved = shop.run("group", "reset", "billing", "--to", "latest", "--yes", "--json")
    assert {json.loads(line)["topic"] for line in moved.splitlines()} == {"events"}
    found = json.loads(shop.run("group", "describe", "billing", "--json"))
    assert (found["lag"], found["is_lag_exact"], found["members"]) == (0, True, [])
    # What cannot be asked has no lag of 0, and no password is in what anybody was told or in what is stored.
    shop.environment["PGPASSWORD"] = "hunter2hunter2"
    found = json.loads(shop.run("group", "describe", "billing", "--json"))
    assert (found["lag"], "authentication" in found["lag_problem"]) == (None, True)
    assert "unknown" in shop.run("group", "list")
    told = "".join(shop.said) + errors.read_text()
    stored = b"".join(path.read_bytes() for path in (shop.folder / "data").rglob("*") if path.is_file())
    assert shop.server.password not in told
    assert "hunter2" not in told
    assert b"sources/events" in stored
    assert shop.server.password.encode() not in stored


def partition_of(key: str) -> int:
    return xxh64(key.encode()) % PARTITIONS
