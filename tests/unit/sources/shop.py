"""A table in SQLite, and a hub that registers it as a source."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import pxrs
from pxrs.cli.app import app
from pxrs.sources import SqlTable, sql_table

PARTITIONS = 6
SETTINGS: dict[str, Any] = {"key_column": "account", "value_column": "body", "partitions": PARTITIONS}


class Shop:
    """A table `events` in a file, a hub, and the hub's command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder}/shop.db"
        self.at = str(folder / "data")
        self.do("CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, account TEXT, body TEXT)")

    def do(self, statement: str, *rows: tuple[Any, ...]) -> None:
        with sqlite3.connect(self.folder / "shop.db") as connection:
            if rows:
                connection.executemany(statement, rows)
            else:
                connection.execute(statement)
        connection.close()

    def insert(self, *accounts: str) -> None:
        self.do("INSERT INTO events (account, body) VALUES (?, ?)", *((account, account) for account in accounts))

    def add(self, hub: pxrs.Hub, name: str = "events", **settings: Any) -> Any:
        return hub.add_source(name, self.url, table="events", **{**SETTINGS, **settings})

    def table(self, **settings: Any) -> SqlTable:
        return sql_table(self.url, "events", **{**SETTINGS, **settings})

    def run(self, *arguments: str, code: int = 0) -> str:
        """What a command prints."""
        done = CliRunner().invoke(app, [*arguments, "--at", self.at])
        if code == 0 and done.exception is not None:
            raise done.exception
        assert done.exit_code == code, done.output
        return done.output


def handle_all(hub: pxrs.Hub, topic: str | SqlTable, group: str = "g") -> list[int]:
    with hub.consumer(topic, group, until="end") as inbox:
        return sorted(message.offset for message in inbox)
