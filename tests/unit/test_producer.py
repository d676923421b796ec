"""The producer on a log in memory, and on logs that fail on purpose."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from pxrs.errors import (
    AppendFailed,
    AppendUnknown,
    BufferFull,
    Closed,
    InvalidRecord,
    LogError,
    PartlySent,
    PxrsError,
    UnknownProducer,
    UsedAfterFork,
)
from pxrs.hashing import murmur2, xxh64
from pxrs.log.batch import SCHEMA, Origin, Payload
from pxrs.log.contract import Append
from pxrs.log.memory import MemoryLog, MemoryTopic
from pxrs.log.outcomes import MaybeStored, NotStored, Outcome, offsets_of
from pxrs.log.producers import PRODUCERS_MAX
from pxrs.model import Topic
from pxrs.producer import appender
from pxrs.producer import producer as producer_module
from pxrs.producer.chunks import Chunk
from pxrs.producer.producer import Producer
from pxrs.producer.receipts import WIDTH, Receipt


class Fickle(MemoryTopic):
    """A topic whose appends do what the test wants: `before` and `after` may raise for the whole call, or delay it."""

    def __init__(self, topic: Topic) -> None:
        super().__init__(topic, MemoryLog())
        self.calls: list[list[Append]] = []
        self.before: Callable[[Sequence[Append]], None] = lambda appends: None
        self.after: Callable[[Sequence[Append]], None] = lambda appends: None
        self.refusals: dict[int, Exception] = {}
        """Partitions that store nothing, and why."""
        self.lost_replies: dict[int, int] = {}
        """Partitions that store batches and then do not tell, each with how often."""

    def append(self, appends: Sequence[Append]) -> list[Outcome]:
        self.calls.append(list(appends))
        self.before(appends)
        stored = iter(super().append([each for each in appends if each.partition not in self.refusals]))
        self.after(appends)
        lost = {number for number in {each.partition for each in appends} if self.lost_replies.get(number)}
        for number in lost:
            self.lost_replies[number] -= 1
        return [self._outcome(each, stored, lost) for each in appends]

    def _outcome(self, append: Append, stored: Iterator[Outcome], lost: set[int]) -> Outcome:
        if append.partition in self.refusals:
            return NotStored(self.refusals[append.partition])
        outcome = next(stored)
        return MaybeStored(AppendUnknown("the reply was lost")) if append.partition in lost else outcome

    def values(self, partition: int) -> list[bytes | None]:
        return [v for batch in self.read(partition, 0, 1 << 30) for v in batch.records.column("value").to_pylist()]

    def column(self, name: str) -> list[Any]:
        return [v for batch in self.read(0, 0, 1 << 30) for v in batch.records.column(name).to_pylist()]


def decoded(append: Append) -> pa.RecordBatch:
    return pa.ipc.read_record_batch(append.payload.data, SCHEMA)


class Gate:
    """Holds appends up until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, appends: Sequence[Append]) -> None:
        self.reached.set()
        assert self.opened.wait(30)


class Failing:
    """Raises in the first so many calls."""

    def __init__(self, error: Exception, *, times: int = 1 << 30) -> None:
        self.error, self.times = error, times

    def __call__(self, appends: Sequence[Append]) -> None:
        if self.times:
            self.times -= 1
            raise self.error


def make(partitions: int = 4, **settings: Any) -> Fickle:
    return Fickle(Topic("orders", "id", partitions, **settings))


@pytest.fixture
def topic() -> Fickle:
    return make()


@pytest.fixture
def single() -> Iterator[tuple[Fickle, Producer]]:
    """One partition, and a producer that sends only when told."""
    topic = make(1)
    with Producer(topic, linger_s=60) as out:
        yield topic, out


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


def test_large_messages_without_a_key_are_spread_by_their_bytes(topic: Fickle) -> None:
    gate = topic.before = Gate()
    with Producer(topic, linger_s=0, batch_bytes=1 << 16) as out:
        out.send(b"first", partition=0)
        assert gate.reached.wait(30)
        for _ in range(16):  # all stored together when the gate opens
            out.send(bytes(1 << 15))
        gate.opened.set()
        out.flush()
    assert [topic.end(partition) - (partition == 0) for partition in range(4)] == [4, 4, 4, 4]


def test_l4_a_failed_append_is_tried_again_and_stored_once(topic: Fickle) -> None:
    topic.before = Failing(AppendFailed("no"), times=2)
    with Producer(topic, linger_s=60) as out:
        receipts = [out.send(b"%d" % i, key=b"k%d" % i) for i in range(8)]
        out.flush()
        assert len({receipt.result() for receipt in receipts}) == 8
    assert len(topic.calls) == 3
    assert len({tuple(append.origin for append in call) for call in topic.calls}) == 1
    assert sum(topic.end(p) for p in range(4)) == 8


def test_l4_an_append_whose_reply_was_lost_is_stored_once() -> None:
    topic = make(2)
    topic.after = Failing(AppendUnknown("stored, but who knows"), times=3)
    gate = Gate()
    topic.before = gate
    with Producer(topic, linger_s=60, batch_rows=1) as out:
        # Many batches wait when the first append is through: the log remembers only the last few of each partition.
        for i in range(40):
            out.send(b"%d" % i, partition=i % 2)
        gate.opened.set()
        out.flush()
    assert topic.values(0) == [b"%d" % i for i in range(0, 40, 2)]
    assert topic.values(1) == [b"%d" % i for i in range(1, 40, 2)]
    assert max(sum(append.partition == 0 for append in call) for call in topic.calls) <= 5


def crowd(partition: int) -> list[Append]:
    """A batch of each of so many producers that all others are forgotten."""
    one = pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in SCHEMA], schema=SCHEMA)
    one = one.set_column(2, SCHEMA.field(2), pa.array([0], SCHEMA.field(2).type))
    return [Append.encoded(partition, one, Origin(uuid.uuid4(), 0, 0), 0) for _ in range(PRODUCERS_MAX)]


def test_l4_a_producer_that_was_forgotten_goes_on_under_another_name(topic: Fickle) -> None:
    with Producer(topic, linger_s=60) as out:
        for number in range(3):
            receipts = [out.send(b"%d" % number, partition=partition) for partition in range(4)]
            out.flush()
            assert [receipt.result()[0] for receipt in receipts] == [0, 1, 2, 3]
            offsets_of(MemoryTopic.append(topic, [*crowd(0), *crowd(2)]))
    for partition in range(4):
        assert [value for value in topic.values(partition) if value is not None] == [b"0", b"1", b"2"]


@pytest.mark.parametrize("number", [0, 1])
def test_l4_a_batch_that_may_be_stored_gets_no_other_name(single: tuple[Fickle, Producer], number: int) -> None:
    topic, out = single

    def forget(appends: Sequence[Append]) -> None:
        topic.after = lambda appends: None
        offsets_of(MemoryTopic.append(topic, crowd(0)))
        raise AppendUnknown("stored, but who knows")

    for each in range(number):
        out.send(b"%d" % each)
        out.flush()
    topic.after = forget
    receipt = out.send(b"%d" % number)
    if number:
        with pytest.raises(AppendUnknown, match="producers were forgotten"):
            out.flush()
        with pytest.raises(AppendUnknown):  # not UnknownProducer, which says that nothing was stored
            receipt.result()
        with pytest.raises(UnknownProducer):  # nothing of this message was tried
            out.send(b"more")
    else:  # of a first batch it is known from where on to look for it
        out.flush()
        assert receipt.result() == (0, 0)
    assert [value for value in topic.values(0) if value is not None] == [b"%d" % each for each in range(number + 1)]


def test_a_lost_reply_stays_an_unknown_outcome_whatever_later_tries_answer(single: tuple[Fickle, Producer]) -> None:
    topic, out = single

    def refuse_what_is_resent(appends: Sequence[Append]) -> None:
        if len(topic.calls) == 2:
            topic.refusals = {0: AppendFailed("the disk is full; nothing of it is in the log")}

    topic.lost_replies, topic.before = {0: 1}, refuse_what_is_resent
    receipt = out.send(b"stored")
    with pytest.raises(AppendUnknown, match=r"may have stored the batch.*the disk is full"):
        out.flush()
    with pytest.raises(AppendUnknown):
        receipt.result()
    assert topic.values(0) == [b"stored"], "so that to send it again would double it"
    with pytest.raises(AppendFailed) as refused:
        out.send(b"not sent")
    assert not isinstance(refused.value, AppendUnknown)


def test_l4_a_batch_gets_one_other_name_and_no_third(single: tuple[Fickle, Producer]) -> None:
    """A log that forgets every producer at once must not be asked again without end."""
    topic, out = single

    def forget(appends: Sequence[Append]) -> None:
        if len(topic.calls) > 20:
            topic.refusals = {}

    topic.refusals, topic.before = {0: UnknownProducer("nothing is known of it")}, forget
    out.send(b"0")
    with pytest.raises(UnknownProducer):
        out.flush()
    assert len({append.origin.producer for call in topic.calls for append in call}) == len(topic.calls) == 2


def test_w1_only_a_partition_whose_reply_was_lost_is_resent_and_under_the_same_origin(topic: Fickle) -> None:
    topic.lost_replies = {1: 2}
    with Producer(topic, linger_s=60, batch_rows=1) as out:
        receipts = [out.send(b"%d" % number, partition=number % 2) for number in range(4)]
        out.flush()
        assert [receipt.result(0) for receipt in receipts] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    first, *resent = topic.calls
    assert [append.partition for append in first] == [0, 0, 1, 1]
    assert [[append.origin for append in call] for call in resent] == [[a.origin for a in first[2:]]] * 2
    assert (topic.values(0), topic.values(1)) == ([b"0", b"2"], [b"1", b"3"])


def test_a_partition_is_acknowledged_while_another_one_is_still_resent(topic: Fickle) -> None:
    topic.refusals = {1: AppendFailed("for a moment")}
    with Producer(topic, linger_s=0, tries_max=1_000) as out:
        slow, fast = out.send(b"slow", partition=1), out.send(b"fast", partition=0)
        try:
            assert fast.result(30) == (0, 0)
            assert not slow.is_done
        finally:
            topic.refusals = {}
        assert slow.result(30) == (1, 0)


def test_l4_a_batch_that_was_refused_before_gets_another_name_if_its_producer_was_forgotten(
    single: tuple[Fickle, Producer],
) -> None:
    """A refusal says that nothing is stored, so a batch that was only refused cannot be stored twice."""
    topic, out = single
    out.send(b"0")
    out.flush()
    topic.refusals = {0: AppendFailed("for a moment")}
    calls = len(topic.calls)

    def forget_before_the_second_try(appends: Sequence[Append]) -> None:
        if len(topic.calls) == calls + 2:
            topic.refusals = {}
            offsets_of(MemoryTopic.append(topic, crowd(0)))

    topic.before = forget_before_the_second_try
    out.send(b"1")
    out.flush()
    assert [value for value in topic.values(0) if value is not None] == [b"0", b"1"]


def test_a_batch_that_cannot_be_encoded_fails_its_partition_alone(
    topic: Fickle, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = appender.encode

    def refuse(records: pa.RecordBatch, codec: str) -> Payload:
        if b"bad" in records.column("value").to_pylist():
            raise InvalidRecord("too large")
        return encode(records, codec)

    monkeypatch.setattr(appender, "encode", refuse)
    with Producer(topic, linger_s=60, batch_rows=1) as out:
        good = [out.send(b"good", partition=number) for number in (0, 1)]
        bad = [out.send(value, partition=1) for value in (b"bad", b"good")]
        with pytest.raises(InvalidRecord, match="too large"):
            out.flush()
        assert [receipt.result(0) for receipt in good] == [(0, 0), (1, 0)]
        for receipt in bad:
            with pytest.raises(InvalidRecord, match="too large"):
                receipt.result(0)


def test_a_partition_that_fails_for_good_fails_alone_and_in_order(topic: Fickle) -> None:
    failure = AppendFailed("disk full")
    topic.refusals = {1: failure}
    with Producer(topic, linger_s=60, batch_rows=1, tries_max=2) as out:
        lost = [out.send(b"lost", partition=1) for _ in range(3)]
        kept = [out.send(b"kept", partition=p) for p in (0, 2)]
        with pytest.raises(AppendFailed, match="disk full"):
            out.flush()
        for receipt in lost:
            with pytest.raises(AppendFailed, match="disk full"):
                receipt.result(10)
        assert [receipt.result(10) for receipt in kept] == [(0, 0), (2, 0)]
        topic.refusals = {}
        with pytest.raises(AppendFailed, match="disk full"):
            out.send(b"later", partition=1)
        with pytest.raises(AppendFailed, match="disk full"):
            out.send_batch(pa.table({"value": [b"later"], "partition": [1]}))
        assert out.send(b"kept", partition=0).is_done in (False, True)
        with pytest.raises(AppendFailed, match="disk full"):
            out.flush()
    assert [topic.end(p) for p in range(4)] == [2, 0, 1, 0]


def test_messages_without_a_key_avoid_a_partition_that_failed(topic: Fickle) -> None:
    topic.refusals = {2: LogError("broken")}
    with Producer(topic, linger_s=60, batch_rows=2) as out:
        out.send(b"lost", partition=2)
        with pytest.raises(LogError):
            out.flush()
        receipts = [out.send(b"a") for _ in range(20)]
        stored = out.send_batch(pa.table({"value": [b"a"] * 20}))
        with pytest.raises(LogError):
            out.flush()
        assert {receipt.result()[0] for receipt in receipts} == {0, 1, 3}
        assert 2 not in {each.partition for each in stored.result()}


def test_an_error_that_no_retry_helps_is_not_retried(single: tuple[Fickle, Producer]) -> None:
    topic, out = single
    topic.before = Failing(LogError("what is this"))
    receipt = out.send(b"a")
    with pytest.raises(LogError, match="what is this"):
        out.flush()
    with pytest.raises(LogError, match="what is this"):
        receipt.result()
    assert len(topic.calls) == 1


def test_an_error_is_raised_by_close_if_nobody_heard_of_it(topic: Fickle) -> None:
    topic.before = Failing(LogError("broken"))
    out = Producer(topic, linger_s=60)
    out.send(b"a")
    with pytest.raises(LogError, match="broken"):
        out.close()
    out.close()


def test_an_error_of_the_block_keeps_its_place(topic: Fickle) -> None:
    topic.before = Failing(LogError("broken"))

    def use() -> None:
        with Producer(topic, linger_s=60) as out:
            out.send(b"a")
            raise KeyError("mine")

    with pytest.raises(KeyError) as raised:
        use()
    assert "broken" in raised.value.__notes__[0]


def test_even_an_error_of_the_interpreter_reaches_those_who_wait(topic: Fickle) -> None:
    def broken(appends: Sequence[Append]) -> None:
        raise SystemExit("out")

    topic.before = broken
    out = Producer(topic, linger_s=60)
    receipt = out.send(b"a")
    with pytest.raises(SystemExit):
        out.flush()
    with pytest.raises(SystemExit):
        receipt.result(10)
    with pytest.raises(SystemExit):
        out.send(b"b")
    out.close()


def test_x16_a_full_buffer_blocks_and_then_raises() -> None:
    topic = make(1)
    gate = topic.before = Gate()
    with Producer(topic, linger_s=0, buffer_bytes=10_240, buffer_timeout=0.05) as out:
        sent = 0
        with contextlib.suppress(BufferFull):
            while sent < 1000:
                out.send(b"." * 400, b"k")
                sent += 1
        assert 7 <= sent <= 20  # each counts for 512 bytes
        with pytest.raises(BufferFull, match="buffer_bytes"):
            out.send(b"." * 400, b"k")
        with pytest.raises(BufferFull, match="buffer_bytes"):
            out.send(b"." * 5000, partition=0)
        with pytest.raises(BufferFull, match="buffer_bytes"):
            out.send_batch(pa.table({"value": [b"." * 5000]}))
        gate.opened.set()
        out.send(b"now", partition=0)
        out.send(b"." * 20_000, partition=0)  # larger than the buffer: alone
        out.flush()
    assert topic.end(0) == sent + 2


def test_a_table_that_was_sent_in_part_says_so() -> None:
    topic = make(1)
    gate = topic.before = Gate()
    with Producer(topic, linger_s=0, batch_rows=20, buffer_bytes=4096, buffer_timeout=0.05) as out:
        with pytest.raises(PartlySent) as raised:
            out.send_batch(pa.table({"value": [b"%03d" % i for i in range(200)]}))
        gate.opened.set()
        stored = raised.value.receipt.result(10)
        out.flush()
        count = sum(each.rows for each in stored)
        assert 0 < count < 200
        assert topic.values(0) == [b"%03d" % i for i in range(count)]


def test_x16_senders_go_on_when_there_is_room() -> None:
    topic = make(8)
    with Producer(topic, linger_s=60, buffer_bytes=4096) as out:
        # Nothing is ever due: only those who wait for the buffer make it move.
        for i in range(500):
            out.send(b"." * 100, key=b"k%d" % i)
        out.send_batch(pa.table({"value": [b"." * 1000] * 50}))
        out.flush()
        assert out.sending.outbox.counted == 0
    assert sum(topic.end(p) for p in range(8)) == 550


def test_the_buffer_is_given_back_after_failures(topic: Fickle) -> None:
    topic.refusals = {0: LogError("broken")}
    with Producer(topic, linger_s=60, batch_rows=3) as out:
        for i in range(100):
            with contextlib.suppress(LogError):  # sooner or later
                out.send(b"a", partition=i % 4)
        with pytest.raises(LogError):
            out.flush()
        assert out.sending.outbox.counted == 0


def test_tables_and_messages_keep_their_order(single: tuple[Fickle, Producer]) -> None:
    topic, out = single
    out.send(b"1", key=b"a")
    receipt = out.send_batch(pa.table({"value": ["2", "3"]}))
    out.send(b"4")
    assert out.send_batch(pa.record_batch({"value": [b"5"]})).result(10) == [(0, 4, 1)]
    out.flush()
    assert receipt.is_done
    assert receipt.result() == [(0, 1, 2)]
    assert topic.values(0) == [b"1", b"2", b"3", b"4", b"5"]


def test_a_large_table_is_cut_into_batches(topic: Fickle) -> None:
    keys = [b"k%d" % (i % 50) for i in range(5000)]
    table = pa.table({"key": keys, "value": [b"%d" % i for i in range(5000)]})
    with Producer(topic, linger_s=60, batch_rows=100, batch_bytes=4000, buffer_bytes=20_000) as out:
        stored = out.send_batch(table).result(30)
    assert sum(each.rows for each in stored) == 5000
    assert max(each.rows for each in stored) <= 100
    for partition in range(4):
        assert topic.values(partition) == [b"%d" % i for i in range(5000) if xxh64(keys[i]) % 4 == partition]


def test_an_empty_table_is_nothing_and_a_bad_one_is_refused(single: tuple[Fickle, Producer]) -> None:
    topic, out = single
    assert out.send_batch(pa.table({"value": pa.array([], pa.binary())})).result() == []
    with pytest.raises(InvalidRecord):
        out.send_batch(pa.table({"value": [b"good", b"." * (65 << 20)]}))
    with pytest.raises(InvalidRecord):
        out.send_batch(pa.table({"values": [b"a"]}))
    out.flush()
    assert topic.end(0) == 0


def test_threads_share_a_producer(topic: Fickle) -> None:
    with Producer(topic, batch_rows=13, buffer_bytes=8192) as out:

        def run(number: int) -> list[tuple[int, int]]:
            receipts = [out.send(b"%d" % i, key=b"t%d" % number) for i in range(300)]
            out.flush()
            return [receipt.result(10) for receipt in receipts]

        with ThreadPoolExecutor(4) as pool:
            places = list(pool.map(run, range(4)))
    assert len({place for mine in places for place in mine}) == 1200
    for mine in places:
        assert mine == sorted(mine)
        assert [topic.values(p)[offset] for p, offset in mine] == [b"%d" % i for i in range(300)]


def test_what_waits_is_sent_by_close_and_a_closed_one_refuses(topic: Fickle) -> None:
    out = Producer(topic, linger_s=timedelta(seconds=60))
    receipt = out.send(b"a", partition=0)
    out.close()
    out.close()
    assert receipt.result() == (0, 0)
    for use in (lambda: out.send(b"a", b"k"), out.flush, lambda: out.send_batch(pa.table({"value": [b"a"]}))):
        with pytest.raises(Closed):
            use()
    out.sending.thread.join(30)  # `close` returns when the thread has nothing left to do, a moment before it ends
    assert not out.sending.thread.is_alive()


def test_close_wakes_a_sender_that_waits_for_the_buffer() -> None:
    topic = make(1)
    gate = topic.before = Gate()
    out = Producer(topic, linger_s=0, buffer_bytes=1024)
    out.send(b"." * 900, partition=0)
    assert gate.reached.wait(10)
    with ThreadPoolExecutor(2) as pool:
        sender = pool.submit(out.send, b"." * 900)
        closer = pool.submit(out.close)
        with pytest.raises(Closed):
            sender.result(30)
        gate.opened.set()
        closer.result(30)


def test_r11_a_child_is_refused_and_the_parent_goes_on() -> None:
    topic = make(1)
    gate = topic.before = Gate()
    with Producer(topic, linger_s=0) as out:
        under_way = out.send(b"a")
        assert gate.reached.wait(10)
        waiting = out.send(b"b", b"k")
        uses: list[Callable[[], object]] = [
            lambda: out.send(b"a", b"k"),
            lambda: out.send(b"a"),
            out.flush,
            lambda: out.send_batch(pa.table({"value": [b"a"]})),
            under_way.result,
            waiting.result,
        ]
        with out.sending.outbox.lock:  # as another thread may hold it
            child = os.fork()
            if child == 0:
                refused = 0
                for use in uses:
                    try:
                        use()
                    except UsedAfterFork:
                        refused += 1
                    except PxrsError:
                        pass
                out.sending.thread.join = None  # type: ignore[assignment,method-assign]
                out.close()
                os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(uses)
        gate.opened.set()
        assert waiting.result(10) == (0, 1)


def test_a_receipt_keeps_no_messages(single: tuple[Fickle, Producer]) -> None:
    _, out = single
    receipt = out.send(b"a", b"k", headers=[("h", b"secret")])
    fast = out.send(b"b", b"k")
    out.flush()
    assert all(batch.records is None for batch in receipt.places.batches)
    for each in (receipt, fast):
        assert not any(isinstance(found, Chunk) for found in gc.get_referents(each.places))


def test_an_error_raised_again_and_again_gathers_nothing(single: tuple[Fickle, Producer]) -> None:
    topic, out = single
    topic.before = Failing(LogError("broken"))
    out.send(b"a")
    lengths = set()
    for _ in range(5):
        with pytest.raises(LogError) as raised:
            out.flush()
        lengths.add(len(traceback.extract_tb(raised.value.__traceback__)))
    assert len(lengths) == 1


def test_rows_that_meet_in_a_chunk_are_told_apart(
    single: tuple[Fickle, Producer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedules that `send` looks out for: another sender, or a seal, after it has read the chunk's length and
    before it adds its row. `send` asks for the time between the two."""
    topic, out = single
    outbox = out.sending.outbox
    chunk = outbox.chunk

    def another_sender() -> float:
        chunk.rows.extend((b"k", b"other", time.time()))
        return time.time()

    def a_seal() -> float:
        monkeypatch.undo()
        with outbox.lock:
            outbox.seal()
        return time.time()

    monkeypatch.setattr(producer_module, "_time", another_sender)
    met = out.send(b"mine", b"k")
    monkeypatch.setattr(producer_module, "_time", a_seal)
    sent_again = out.send(b"late", b"k")
    assert len(chunk.rows) == 3 * WIDTH, "it was added to the sealed chunk, where it does not count"
    out.flush()
    assert met.result(10) == (0, 1)
    assert sent_again.result(10) == (0, 2)
    assert topic.values(0) == [b"other", b"mine", b"late"]


@pytest.mark.parametrize("headers", [None, [("a", b"b")]])
def test_the_time_of_a_message_is_when_it_was_sent(
    single: tuple[Fickle, Producer], headers: list[tuple[str, bytes | None]] | None
) -> None:
    topic, out = single
    moments = [time.time_ns() // 1000]
    for i in range(100):
        out.send(b"v", b"k", headers if i == 50 else None)  # one with headers, and all of its chunk take another way
        moments.append(time.time_ns() // 1000)
    out.flush()
    times = [int(moment.timestamp() * 1e6 + 0.5) for moment in topic.column("timestamp")]
    # To the microsecond, in which the float's rounding may be felt.
    assert all(a - 1 <= t <= b + 1 for a, t, b in zip(moments, times, moments[1:], strict=False))
    assert len(times) == 100


@pytest.mark.parametrize("partitions", [1, 4])
def test_a_batch_is_stored_without_the_nulls_of_its_neighbours(partitions: int) -> None:
    topic = make(partitions)
    with Producer(topic, linger_s=60, batch_rows=100) as out:
        for i in range(5_000):
            out.send(b"v" * 10, b"%d" % i)
        out.send_batch(pa.table({"value": [b"v" * 10] * 5_000, "key": [b"%d" % i for i in range(5_000)]}))
        out.flush()
    batches = [decoded(append) for call in topic.calls for append in call]
    assert sum(batch.num_rows for batch in batches) == 10_000
    assert sum(batch.serialize().size - 1_000 for batch in batches) < 40 * 10_000


def test_a_first_row_wakes_the_thread_that_sleeps(topic: Fickle) -> None:
    with Producer(topic, linger_s=0) as out:
        for i in range(300):
            assert out.send(b"%d" % i, b"k").result(10)[1] == i
            if i % 3 == 0:
                out.flush()


def test_threads_that_race_with_seals_and_close_lose_nothing() -> None:
    topic = make(1)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        out = Producer(topic, linger_s=0, batch_rows=3)
        kept: list[tuple[bytes, Receipt]] = []

        def run(number: int) -> None:
            for i in range(3000):
                value = b"%d-%d" % (number, i)
                try:
                    kept.append((value, out.send(value, b"k")))
                except Closed:
                    return

        with ThreadPoolExecutor(4) as pool:
            runs = [pool.submit(run, number) for number in range(4)]
            while len(kept) < 4000 and not all(each.done() for each in runs):
                out.flush()
            out.close()
            for each in runs:
                each.result(60)
    finally:
        sys.setswitchinterval(switch)
    values = topic.values(0)
    assert sorted(value or b"" for value in values) == sorted(value for value, _ in kept)
    assert all(values[receipt.result(10)[1]] == value for value, receipt in kept)
    for number in range(4):
        mine = [int(value.split(b"-")[1]) for value in values if value and value.startswith(b"%d-" % number)]
        assert mine == sorted(mine)
