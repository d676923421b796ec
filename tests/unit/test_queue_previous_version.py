"""Queues whose transactions were open when a process of version 0.1 or 0.2.dev1 died: the records are written here as
those versions wrote them, byte for byte. The archives of tests/golden hold queues without open transactions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pxrs import ConsumeTimes
from pxrs.clock import ManualClock
from pxrs.errors import TransactionLost
from pxrs.hub import Hub
from pxrs.queue.handle import Depth
from pxrs.registry.contract import ABSENT
from pxrs.testing.fixtures import memory_hub
from pxrs.testing.waiting import eventually

OLD_TAKER = "0123456789abcdef0123456789abcdef"
TRANSACTION = "fedcba9876543210fedcba9876543210"
ITEM = "0006140a8c1b2f3e4d5c6b7a"
TAKEN = b'{"put_at":1700000000.5,"deliveries":1}\nfirst'
OPTIONAL = b'{"put_at":1700000000.5,"deliveries":2,"key":"azE=","error":"ValueError: bad"}\nfirst'
PATIENCE_S = 30.0


@pytest.fixture
def hub() -> Iterator[Hub]:
    with memory_hub(ManualClock(10_000)) as opened:
        yield opened


def write_old_take(hub: Hub, queue: str, order: str, value: bytes, suffix: str = "") -> str:
    """What a take of the old version leaves: the item in flight, the turn of a FIFO queue, and an earlier outcome."""
    settings = hub.queue(queue).settings
    key = f"items/{settings.id}/inflight/{order}.{ITEM}.0~{TRANSACTION[:12]}{suffix}~{OLD_TAKER}"
    put = {
        key: value,
        f"outcomes/{OLD_TAKER}-1": b'{"transaction": "ab", "outcome": "committed", "at": 1700000000.25}',
    }
    if settings.is_fifo:
        put[f"items/{settings.id}/turn"] = b'{"holder":"%s","not_before":0.0}' % OLD_TAKER.encode()
        put[f"items/{settings.id}/sequence"] = b"1"
    hub.registry.commit(dict.fromkeys(put, ABSENT), put)
    return key


@pytest.mark.parametrize("suffix", ["", ".1"])
@pytest.mark.parametrize("value", [TAKEN, OPTIONAL], ids=["first delivery", "with a key and an error"])
@pytest.mark.parametrize("is_fifo", [False, True])
def test_an_item_that_a_dead_process_of_an_earlier_version_had_taken_is_delivered_again(
    hub: Hub, is_fifo: bool, value: bytes, suffix: str
) -> None:
    hub.create_queue("q", fifo=is_fifo)
    write_old_take(hub, "q", f"{1:016x}" if is_fifo else "5000", value, suffix)
    with hub.transaction() as tx:
        item = tx.take("q", timeout=PATIENCE_S)
    assert item is not None
    assert (item.id, item.value, item.put_at) == (ITEM, b"first", 1_700_000_000.5)
    assert item.deliveries == (2 if value is TAKEN else 3)
    assert item.key == (None if value is TAKEN else b"k1")
    assert hub.queue("q").depth() == Depth(0, 0, 0, 0)


def test_its_deliveries_count_for_the_policy(hub: Hub) -> None:
    queue = hub.create_queue("q", policy=ConsumeTimes(1))
    write_old_take(hub, "q", "5000", TAKEN)
    with hub.transaction() as tx:
        assert tx.take(queue, timeout=0) is None  # this process is now the queue's sweeper
    eventually(lambda: queue.depth() == Depth(0, 0, 0, 1))
    assert [(letter.id, letter.deliveries) for letter in queue.dead_letters()] == [(ITEM, 1)]


def test_an_item_of_a_living_process_of_an_earlier_version_stays_with_it(hub: Hub) -> None:
    queue = hub.create_queue("q", fifo=True)
    key = write_old_take(hub, "q", f"{1:016x}", TAKEN)
    with hub.registry.lease(10) as lease:
        about = b'{"host": "h", "pid": 1, "since": 1700000000.0}'
        hub.registry.commit(ephemeral={f"takers/{OLD_TAKER}": about}, lease=lease)
        queue.put("second")
        with hub.transaction() as tx:
            assert tx.take(queue, timeout=0) is None
        hub.parts.queue_store().return_items_of_dead(queue.settings)
        assert hub.registry.get(key) is not None
        assert queue.depth() == Depth(ready=1, delayed=0, in_flight=1, dead=0)
    with hub.transaction() as tx:  # the lease has ended
        assert [item.value for item in tx.take_many(queue, 2, timeout=PATIENCE_S)] == [b"first", b"second"]


def test_an_open_transaction_is_lost_if_its_queue_is_deleted_by_an_earlier_version(hub: Hub) -> None:
    """An earlier version deletes a queue by the same keys: its settings and its existence key, then its items."""
    queue = hub.create_queue("q")
    queue.put("x")
    tx = hub.transaction()
    assert tx.take(queue, timeout=0) is not None
    for entry in hub.registry.scan(queue.settings.root):
        hub.registry.commit({entry.key: entry.version}, delete=[entry.key])
    hub.registry.commit(delete=[queue.settings.key, f"standing/{queue.settings.id}"])
    with pytest.raises(TransactionLost):
        tx.commit()
