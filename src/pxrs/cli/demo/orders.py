"""The orders of the demo: what is sent, and what must come out of it. No I/O, no clock; a seed makes them.

They are of one day of a shop, and Spark waits a day of event time for late orders: so none is ever too late, however
far the readers of the partitions are apart. A last order, of two days later, ends every window of that day. It is sent
when the others are read.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Final

ACCOUNTS: Final = 30
WINDOW: Final = timedelta(minutes=30)
OPENING: Final = datetime(2026, 1, 5, 8, tzinfo=UTC)
LAST: Final = OPENING + timedelta(days=2)
STEP_S: Final = 10
JITTER_S: Final = 600
"""So much earlier than its place among them an order may be."""
COUNT_MAX: Final = 8_000
"""As many as a day has room for."""
BAD_EVERY: Final = 16
"""One of so many orders is bad."""

Totals = dict[tuple[str, datetime], Decimal]
"""By account, and by the begin of the window."""


@dataclass(frozen=True, slots=True)
class Order:
    account: str
    amount: Decimal
    at: datetime
    value: bytes
    """As it is sent."""
    flaw: str | None = None
    """Why it is no order, in the words of the dead letters."""

    @property
    def key(self) -> bytes:
        return self.account.encode()


def day(seed: int = 1) -> Iterator[Order]:
    """The orders of the day, their times rising but for some minutes."""
    chance = random.Random(seed)
    for number in range(COUNT_MAX):
        yield _order(chance, number, OPENING + timedelta(seconds=JITTER_S + STEP_S * number))


def last_order() -> Order:
    """A good one."""
    return _order(random.Random(0), 0, LAST + timedelta(seconds=JITTER_S))


def window_of(at: datetime) -> datetime:
    return at - (at - OPENING) % WINDOW


def totals(orders: Iterable[Order]) -> Totals:
    """What each account has ordered in each window."""
    found: Totals = defaultdict(Decimal)
    for order in orders:
        if order.flaw is None:
            found[order.account, window_of(order.at)] += order.amount
    return dict(found)


def _order(chance: random.Random, number: int, at: datetime) -> Order:
    account = f"account-{chance.randrange(ACCOUNTS)}"
    amount = Decimal(chance.randrange(100, 50_000)) / 100
    at -= timedelta(seconds=chance.randrange(JITTER_S))
    fields = {"account": account, "amount": float(amount), "at": at.isoformat()}
    if number % BAD_EVERY != BAD_EVERY // 2:
        return Order(account, amount, at, json.dumps(fields).encode())
    value, flaw = list(_bad(fields))[number // BAD_EVERY % 4]
    return Order(account, amount, at, value, flaw)


def _bad(fields: dict[str, object]) -> Iterator[tuple[bytes, str]]:
    """Ways to spoil an order."""
    yield json.dumps({**fields, "amount": "many"}).encode(), "amount is no decimal(12,2)"
    yield (
        json.dumps({name: value for name, value in fields.items() if name != "account"}).encode(),
        "account is missing",
    )
    yield json.dumps(fields).encode()[:-9], "it is not one JSON document"
    yield b"\xff\xfe" + json.dumps(fields).encode(), "it is not UTF-8"
