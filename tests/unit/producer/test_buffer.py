"""The producer's bounded buffer, tables, threads, and how it is closed."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pyarrow as pa
import pytest

from pxrs.errors import (
    BufferFull,
    Closed,
    InvalidRecord,
    LogError,
    PartlySent,
    PxrsError,
    UsedAfterFork,
)
from pxrs.hashing import xxh64
from pxrs.producer import producer as producer_module
from pxrs.producer.chunks import Chunk
from pxrs.producer.producer import Producer
from pxrs.producer.receipts import WIDTH, Receipt
from tests.unit.producer.failing import Failing, Fickle, Gate, decoded, make


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
        out.flush()  # `send` waits for room no longer than 0.05 s
        out.send(b"now", partition=0)
        out.flush()
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
    receipt = out.send(b"a")
    with pytest.raises(LogError):
        out.flush()
    lengths = set()
    for _ in range(5):
        with pytest.raises(LogError) as raised:
            receipt.result()
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
