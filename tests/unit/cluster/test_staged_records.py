"""Which broker keeps the copies of staged rows."""

from __future__ import annotations

from collections import Counter

from pxrs.cluster.staged import keeper

BROKERS = [f"{number:032x}" for number in range(4)]
LEDGERS = [f"staged-t1-{number:05d}/0/0" for number in range(400)]


def test_p6_every_ledger_has_one_keeper_whatever_the_order_in_which_brokers_are_seen() -> None:
    assert [keeper(ledger, BROKERS) for ledger in LEDGERS] == [keeper(ledger, BROKERS[::-1]) for ledger in LEDGERS]
    assert keeper(LEDGERS[0], []) is None


def test_p6_the_work_is_spread_over_the_brokers() -> None:
    counts = Counter(keeper(ledger, BROKERS) for ledger in LEDGERS)
    assert min(counts[broker] for broker in BROKERS) > 60


def test_p6_a_broker_that_goes_leaves_only_its_own_ledgers_to_others() -> None:
    for ledger in LEDGERS:
        before, after = keeper(ledger, BROKERS), keeper(ledger, BROKERS[1:])
        assert after == before or before == BROKERS[0]
