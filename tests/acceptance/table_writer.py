"""One of those who write to somebody's table: a process of its own, which knows nothing of pxrs.

Transactions of several rows that take their time between the rows and before they end, so that rows of others with
larger ids are there first; some are rolled back, and some take back a row of their own. Until SIGTERM.

    python table_writer.py sqlite:///PATH|postgresql://... SEED
"""

from __future__ import annotations

import random
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from typing import Any

ACCOUNTS = 40


def connect(url: str) -> tuple[Any, str, str, float]:
    """A connection on which every statement is by itself unless one says BEGIN; how to say it, how to mark a
    parameter, and how long to pause between rows at most."""
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"), timeout=60, isolation_level=None)
        return connection, "BEGIN IMMEDIATE", "?", 0.001  # short: nobody else can write meanwhile
    import psycopg

    return psycopg.connect(url, autocommit=True), "BEGIN", "%s", 0.01


def write(url: str, seed: int, is_over: Callable[[], bool]) -> None:
    chance = random.Random(seed)
    connection, begin, mark, pause_s = connect(url)
    insert = f"INSERT INTO orders (account, body) VALUES ({mark}, {mark}) RETURNING id"
    while not is_over():
        connection.execute(begin)
        ids = []
        for _ in range(chance.randint(1, 20)):
            row = (f"account-{chance.randrange(ACCOUNTS)}", f"by {seed}")
            ids.append(connection.execute(insert, row).fetchone()[0])
            time.sleep(chance.uniform(0, pause_s))
        if chance.random() < 0.2:
            connection.execute(f"DELETE FROM orders WHERE id = {mark}", (chance.choice(ids),))
        if chance.random() < 0.05:
            time.sleep(chance.uniform(0, 50 * pause_s))
        connection.execute("ROLLBACK" if chance.random() < 0.2 else "COMMIT")
        time.sleep(chance.uniform(0, 10 * pause_s))
    connection.close()


def main() -> None:
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    write(sys.argv[1], int(sys.argv[2]), lambda: bool(signals))


if __name__ == "__main__":
    main()
