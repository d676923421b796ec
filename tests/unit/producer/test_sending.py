"""The producer on a log in memory: receipts, partitions, batches and their limits."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from pxrs.errors import (
    InvalidRecord,
)
from pxrs.hashing import murmur2, xxh64
from pxrs.producer.producer import Producer
from tests.unit.producer.failing import Fickle, Gate, decoded, make


def test_a_receipt_tells_partition_and_offset(topic: Fickle) -> None:
    with Producer(topic) as out:
        receipts = [out.send(b"%d" % i, key=b"k%d" % i) for i in range(20)]
        places = [receipt.result(10) for receipt in receipts]
        assert all(receipt.is_done for receipt in receipts)
    for i, (partition, offset) in enumerate(places):
        assert partition == xxh64(b"k%d" % i) % 4
        assert topic.values(partition)[offset] == b"%d" % i


def test_receipts_find_their_places_among_chunks_that_are_sorted_together(topic: Fickle) -> None:
    gate = topic.before = Gate()
    with Producer(topic, linger_s=0, batch_rows=10) as out:
        receipts = [out.send(b"first", partition=0)]
        assert gate.reached.wait(10)
        # Several chunks wait now, with all kinds of rows, and a table between them.
        table = pa.table({"key": [b"k1", b"k2"], "value": [b"table", b"table"]})
        for i in range(45):
            receipts.append(out.send(b"%d fast" % i, b"k%d" % (i % 7)))
            receipts.append(out.send(b"%d keyless" % i))
            receipts.append(out.send(b"%d chosen" % i, b"k1", partition=i % 4))
            receipts.append(out.send(b"%d headed" % i, b"k2", headers=[("h", b"1")]))
            if i == 22:
                out.send_batch(table)
        gate.opened.set()
        out.flush()
        places = [receipt.result(10) for receipt in receipts]
    assert len(set(places)) == len(places) == sum(topic.end(p) for p in range(4)) - 2
    found = [topic.values(partition)[offset] for partition, offset in places]
    kinds = ("fast", "keyless", "chosen", "headed")
    assert found == [b"first"] + [b"%d %s" % (i, kind.encode()) for i in range(45) for kind in kinds]
    for i in range(45):
        assert places[1 + 4 * i][0] == xxh64(b"k%d" % (i % 7)) % 4
        assert places[3 + 4 * i][0] == i % 4
    assert max(append.payload.rows for call in topic.calls for append in call) <= 10
    for partition in range(4):
        mine = [offset for number, offset in places if number == partition]
        assert mine == sorted(mine)


def test_x2_the_topics_partitioner_decides() -> None:
    topic = make(partitioner="murmur2")
    with Producer(topic) as out:
        assert [out.send(b"", key=k).result(10)[0] for k in (b"21", b"abc")] == [
            murmur2(b"21") % 4,
            murmur2(b"abc") % 4,
        ]


def test_x2_order_holds_within_a_key(topic: Fickle) -> None:
    with Producer(topic, batch_rows=7) as out:
        for i in range(500):
            out.send(b"%d" % i, key=b"k%d" % (i % 3))
        out.flush()
        for key in range(3):
            mine = [int(v or b"") for v in topic.values(xxh64(b"k%d" % key) % 4) if int(v or b"") % 3 == key]
            assert mine == list(range(key, 500, 3))


def test_text_headers_times_and_nulls(single: tuple[Fickle, Producer]) -> None:
    topic, out = single
    before = time.time_ns() // 1000
    out.send("wért", key="schlüssel", headers=[("a", b"1"), ("a", None)], timestamp=5)
    out.send(None, timestamp=datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC))
    out.send(bytearray(b"x"), key=memoryview(b"y"), partition=0, headers=[])  # type: ignore[arg-type]
    out.flush()
    assert topic.column("value") == ["wért".encode(), None, b"x"]
    assert topic.column("key") == ["schlüssel".encode(), None, b"y"]
    assert topic.column("headers") == [[{"key": "a", "value": b"1"}, {"key": "a", "value": None}], None, []]
    times = [round(each.timestamp() * 1e6) for each in topic.column("timestamp")]
    assert times[:2] == [5, 1_000_000]
    assert before <= times[2] <= time.time_ns() // 1000


def test_headers_may_be_a_mapping(single: tuple[Fickle, Producer]) -> None:
    topic, out = single
    given: dict[str, bytes | None] = {"a": b"b", "n": None}
    out.send(b"1", headers=given)
    out.send(b"2", headers={"text": b"x"})
    out.send(b"3", headers={})
    out.send(b"4", headers=iter([("pair", b"y")]))
    out.flush()
    assert topic.column("headers") == [
        [{"key": "a", "value": b"b"}, {"key": "n", "value": None}],
        [{"key": "text", "value": b"x"}],
        [],
        [{"key": "pair", "value": b"y"}],
    ]


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"a": 1}, "the header 'a' must be bytes, str or None, not int"),
        ({5: b"x"}, "the header name 5 must be str, not int"),
        ([("a", b"x", b"y")], r"the header ('a', b'x', b'y') is not a pair"),
        (["ab"], "the header 'ab' is not a pair"),
        (["trace"], "the header 'trace' is not a pair"),
        ("trace", "headers is 'trace': give a mapping"),
        (3, "headers is 3: give a mapping"),
    ],
    ids=str,
)
def test_headers_of_another_kind_are_refused_with_the_value_that_is_wrong(
    single: tuple[Fickle, Producer], headers: Any, named: str
) -> None:
    _, out = single
    with pytest.raises(InvalidRecord) as caught:
        out.send(b"x", headers=headers)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "message",
    [
        {"value": 5},
        {"value": b"", "key": 1.5},
        {"value": b"", "partition": 1},
        {"value": b"", "partition": -1},
        {"value": b"", "partition": "0"},
        {"value": b"", "headers": [(b"a", b"1")]},
        {"value": b"", "headers": [("a", 1)]},
        {"value": b"", "headers": 3},
        {"value": b"", "timestamp": datetime(2020, 1, 1)},
        {"value": b"", "timestamp": 1.5},
        {"value": b"", "timestamp": 1 << 63},
        {"value": bytes(65 << 20)},
    ],
)
def test_an_unfit_message_is_refused_and_harms_no_other(
    single: tuple[Fickle, Producer], message: dict[str, Any]
) -> None:
    topic, out = single
    out.send(b"before")
    with pytest.raises(InvalidRecord):
        out.send(**message)
    out.send(b"after")
    out.flush()
    assert topic.values(0) == [b"before", b"after"]


@pytest.mark.parametrize(
    "options",
    [
        {"linger_s": -1},
        {"batch_rows": 0},
        {"batch_bytes": 0},
        {"buffer_bytes": 5},
        {"tries_max": 0},
        {"batch_rows": "x"},
    ],
)
def test_a_bad_option_is_an_error_at_once(topic: Fickle, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Producer(topic, **options)


def test_batches_keep_their_limits(topic: Fickle) -> None:
    with Producer(topic, linger_s=60, batch_rows=10, batch_bytes=3000) as out:
        for i in range(500):
            out.send(b"." * (i % 100 * 10), key=b"k%d" % (i % 5))
        out.send(b"." * 10_000, key=b"large")
        out.flush()
    batches = [decoded(append) for call in topic.calls for append in call]
    assert sum(batch.num_rows for batch in batches) == 501
    assert max(batch.num_rows for batch in batches) == 10
    assert all(batch.num_rows == 1 or batch.nbytes <= 3000 for batch in batches)


def test_a_lingering_batch_goes_by_itself_and_a_full_one_at_once(topic: Fickle) -> None:
    with Producer(topic, linger_s=0.01) as out:
        assert out.send(b"a").result(10)[1] == 0
    with Producer(topic, linger_s=60, batch_rows=2) as out:
        receipts = [out.send(b"a", partition=0) for _ in range(5)]
        receipts[3].result(10)
        assert not receipts[4].is_done
        with pytest.raises(TimeoutError):
            receipts[4].result(0.01)


def test_messages_without_a_key_go_around_in_runs(topic: Fickle) -> None:
    with Producer(topic, linger_s=60, batch_rows=10) as out:
        receipts = [out.send(b"a") for _ in range(80)]
        out.flush()
        places = [receipt.result()[0] for receipt in receipts]
    assert all(10 <= places.count(p) <= 30 for p in range(4))
    appends = [append for call in topic.calls for append in call]
    assert len(appends) <= 4 * 8, "no more than one run for each partition each time that something is stored"


def test_few_messages_without_a_key_that_are_stored_together_go_to_one_partition(topic: Fickle) -> None:
    with Producer(topic, linger_s=60) as out:
        places = []
        for _ in range(8):
            receipts = [out.send(b"a") for _ in range(100)]
            out.flush()
            (place,) = {receipt.result()[0] for receipt in receipts}
            places.append(place)
    assert sorted(places) == [0, 0, 1, 1, 2, 2, 3, 3], "another one each time"


@pytest.mark.parametrize("way", ["send", "send_batch", "tables"])
def test_20000_messages_without_a_key_in_one_flush_reach_all_8_partitions(way: str) -> None:
    topic, count = make(8), 20_000
    values = [b"%d" % number for number in range(count)]
    with Producer(topic) as out:
        receipts = []
        if way == "send":
            receipts = [out.send(value) for value in values]
        else:
            size = count if way == "send_batch" else 4_000
            for start in range(0, count, size):
                out.send_batch(pa.table({"value": values[start : start + size]}))
        out.flush()
    found = [topic.values(partition) for partition in range(8)]
    assert sorted(value or b"" for each in found for value in each) == sorted(values), "each once"
    assert all(len(each) > 0 for each in found)
    assert max(len(each) for each in found) <= 2 * count / 8
    for receipt, value in zip(receipts, values, strict=False):
        partition, offset = receipt.result(30)
        assert found[partition][offset] == value
    for each in found:
        numbers = [int(value or b"") for value in each]
        assert numbers == sorted(numbers), "within a partition in the order in which they were sent"


def test_large_messages_without_a_key_are_spread_by_their_bytes(topic: Fickle, monkeypatch: pytest.MonkeyPatch) -> None:
    # No other thread takes the lead, and some of the messages, while the first append waits at the gate.
    monkeypatch.setattr("pxrs.producer.sending.SLOW_S", 3600.0)
    gate = topic.before = Gate()
    with Producer(topic, linger_s=0, batch_bytes=1 << 16) as out:
        out.send(b"first", partition=0)
        assert gate.reached.wait(30)
        for _ in range(16):  # all stored together when the gate opens
            out.send(bytes(1 << 15))
        gate.opened.set()
        out.flush()
    assert [topic.end(partition) - (partition == 0) for partition in range(4)] == [4, 4, 4, 4]
