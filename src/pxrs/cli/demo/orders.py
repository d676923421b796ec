"""The orders of the demo, and the totals that must follow from them. No I/O, no clock; a seed determines the orders.

The orders are of one day, and Spark accepts orders up to one day of event time late. So no order is too late, however
far apart the readers of the partitions are. One last order, dated two days later, closes every window of that day. It
is sent when all others are read.
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
"""How many seconds an order may be dated earlier than its place in the sequence."""
COUNT_MAX: Final = 8_000
"""How many orders fit into the day."""
BAD_EVERY: Final = 16
"""Every how many orders one is bad."""

Totals = dict[tuple[str, datetime], Decimal]
"""The total of each account in each window, by the account and the begin of the window."""


@dataclass(frozen=True, slots=True)
class Order:
    account: str
    amount: Decimal
    at: datetime
    value: bytes
    """The value of the message."""
    flaw: str | None = None
    """Why the order is bad, as the dead letter will say; None if it is good."""

    @property
    def key(self) -> bytes:
        return self.account.encode()


def day(seed: int = 1) -> Iterator[Order]:
    """The orders of the day. Their times rise, except for up to `JITTER_S`."""
    chance = random.Random(seed)
    for number in range(COUNT_MAX):
        yield _order(chance, number, OPENING + timedelta(seconds=JITTER_S + STEP_S * number))


def last_order() -> Order:
    """The last order, which closes all windows."""
    return _order(random.Random(0), 0, LAST + timedelta(seconds=JITTER_S))


def window_of(at: datetime) -> datetime:
    return at - (at - OPENING) % WINDOW


def totals(orders: Iterable[Order]) -> Totals:
    """The total of each account in each window."""
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
    """Bad orders of several kinds, each with its reason."""
    yield json.dumps({**fields, "amount": "many"}).encode(), "amount is not of type decimal(12,2)"
    yield (
        json.dumps({name: value for name, value in fields.items() if name != "account"}).encode(),
        "account is missing",
    )
    yield json.dumps(fields).encode()[:-9], "it is not one JSON document"
    yield b"\xff\xfe" + json.dumps(fields).encode(), "it is not UTF-8"
