"""Messages that are booked into the user's tables, beside the registry's, in one transaction with the checkpoint.

Run as a program, a member that books in a process of its own: python bookings.py DATA REGISTRY ENGINE NAME LEASE_TTL
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, text

import pxrs
from pxrs.consumer.consumer import Consumer
from pxrs.consumer.transactions import Transactions
from pxrs.group.records import Checkpoint, Keys, Owner
from pxrs.hub import Hub
from pxrs.testing.servers import PostgresServer

PATIENCE_S = 60.0
PARTITIONS = 4
ACCOUNTS = 10


@dataclass
class Place:
    """A registry with the user's tables beside it."""

    folder: Path
    registry: str
    engine_url: str
    exits: ExitStack
    engine: Engine = field(init=False)
    hub: Hub = field(init=False)

    def __post_init__(self) -> None:
        self.engine = create_engine(self.engine_url)
        self.exits.callback(self.engine.dispose)
        self.hub = self.exits.enter_context(pxrs.open(self.folder / "data", registry=self.registry))
        self.hub.registry.get("x")  # open, so that its tables are there
        self.run("CREATE TABLE balance (account INTEGER PRIMARY KEY, balance INTEGER NOT NULL)")
        self.run("CREATE TABLE done (part INTEGER, place INTEGER, name TEXT)")
        for account in range(ACCOUNTS):
            self.run(f"INSERT INTO balance VALUES ({account}, 0)")

    def run(self, statement: str) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(statement))

    @property
    def sum(self) -> int:
        with self.engine.connect() as connection:
            return int(connection.execute(text("SELECT sum(balance) FROM balance")).scalar_one())

    def rows(self) -> list[tuple[int, int, str]]:
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text("SELECT part, place, name FROM done ORDER BY 1, 2"))]

    def send(self, count: int, partitions: int = 1) -> int:
        """Messages 1, 2, 3, ...; returns their sum."""
        if "t" not in [topic.name for topic in self.hub.topics()]:
            self.hub.create_topic("t", partitions=partitions)
        out = self.hub.producer("t")
        for number in range(1, count + 1):
            out.send(b"%d" % number, b"key-%d" % number)
        out.flush()
        return count * (count + 1) // 2

    def consumer(self, **options: Any) -> Consumer:
        options = {"until": "end", "lease_ttl": 5.0, **options}
        return self.exits.enter_context(self.hub.consumer("t", "g", **options))

    def checkpoints(self) -> list[Checkpoint]:
        entries = self.hub.registry.scan(f"{Keys('g').checkpoints}{self.hub.topic('t').id}/")
        return [Checkpoint.load(entry.key, entry.value) for entry in entries]

    def take_away(self, partition: int = 0) -> None:
        """As a leader does whose patience has ended."""
        key = Keys("g").owner(self.hub.topic("t").id, partition)
        entry = self.hub.registry.get(key)
        assert entry is not None
        epoch = Owner.load(key, entry.value).epoch
        self.hub.registry.commit({key: entry.version}, {key: Owner(None, epoch + 1).dump()})


def place_on(database: str, tmp_path: Path, server: PostgresServer, exits: ExitStack, **options: object) -> Place:
    if database == "sqlite":
        url = engine_url = f"sqlite:///{tmp_path}/registry.db"
    else:
        url = server.create_database(f"d{uuid.uuid4().hex[:12]}")
        engine_url = url.replace("postgresql:", "postgresql+psycopg:")
    options = {"namespace": "prod", **options}
    return Place(tmp_path, f"{url}?{'&'.join(f'{k}={v}' for k, v in options.items())}", engine_url, exits)


def book(messages: list[pxrs.Message], db: Connection, name: str = "") -> None:
    sums: dict[int, int] = {}
    for message in messages:
        assert message.value is not None
        number = int(message.value)
        sums[number % ACCOUNTS] = sums.get(number % ACCOUNTS, 0) + number
        row = {"part": message.partition, "place": message.offset, "name": name}
        db.execute(text("INSERT INTO done VALUES (:part, :place, :name)"), row)
    for account, number in sorted(sums.items()):  # in one order, so that members do not wait for each other in a circle
        values = {"n": number, "account": account}
        db.execute(text("UPDATE balance SET balance = balance + :n WHERE account = :account"), values)


def loop_on(loop: Iterator[Any]) -> Iterator[Any]:
    """Go on with a loop that is under way; `for` would begin it anew."""
    while (found := next(loop, None)) is not None:
        yield found


def transactions(inbox: Consumer, engine: Any, max_messages: Any = 500) -> Transactions:
    loop = inbox.transactions(engine, max_messages)
    assert isinstance(loop, Transactions)
    return loop


def work(data: str, registry: str, engine_url: str, name: str, ttl: str) -> None:
    engine = create_engine(engine_url)
    with pxrs.open(data, registry=registry) as hub:
        inbox = hub.consumer("t", "g", name=name, lease_ttl=float(ttl))
        for batch, db in transactions(inbox, engine, max_messages=50):
            book(batch, db, name)


if __name__ == "__main__":
    work(*sys.argv[1:])
