"""The producer on logs that fail on purpose: retries, lost replies, partitions that fail alone."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence

import pyarrow as pa
import pytest

from pxrs.errors import (
    AppendFailed,
    AppendUnknown,
    InvalidRecord,
    LogError,
    TopicDeleted,
    UnknownProducer,
)
from pxrs.log.batch import SCHEMA, Origin, Payload
from pxrs.log.contract import Append
from pxrs.log.memory import MemoryTopic
from pxrs.log.outcomes import offsets_of
from pxrs.log.producers import PRODUCERS_MAX
from pxrs.producer import appender
from pxrs.producer.outbox import Outbox
from pxrs.producer.producer import Producer
from tests.unit.producer.failing import Failing, Fickle, Gate, make


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
        with pytest.raises(AppendUnknown, match="the state of some producers was discarded"):
            out.flush()
        with pytest.raises(AppendUnknown):  # not UnknownProducer, which says that nothing was stored
            receipt.result()
        out.send(b"more")  # under another name
        out.flush()
    else:  # of a first batch it is known from where on to look for it
        out.flush()
        assert receipt.result() == (0, 0)
    stored = [b"%d" % each for each in range(number + 1)] + [b"more"] * number
    assert [value for value in topic.values(0) if value is not None] == stored


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
    not_stored = out.send(b"not stored")
    with pytest.raises(AppendFailed, match="the disk is full") as refused:
        out.flush()
    assert not isinstance(refused.value, AppendUnknown), "nothing of it was tried with the one that may be stored"
    with pytest.raises(AppendFailed):
        not_stored.result(0)
    topic.refusals = {}
    later = out.send(b"later")
    out.flush()
    assert later.result(0) == (0, 1)
    assert topic.values(0) == [b"stored", b"later"]


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


def test_w1_only_a_partition_whose_reply_was_lost_is_resent_and_under_the_same_origin(
    topic: Fickle, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, are_sent = Outbox.take, threading.Event()

    def take_all(self: Outbox) -> bool:
        assert are_sent.wait(30)
        return take(self)

    monkeypatch.setattr(Outbox, "take", take_all)
    topic.lost_replies = {1: 2}
    with Producer(topic, linger_s=60, batch_rows=1) as out:
        receipts = [out.send(b"%d" % number, partition=number % 2) for number in range(4)]
        are_sent.set()
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
        with pytest.raises(InvalidRecord, match="too large"):
            bad[0].result(0)
        with pytest.raises(AppendFailed, match=r"not stored, because an earlier batch .* failed: .*too large"):
            bad[1].result(0)
        later = out.send(b"good", partition=1)
        out.flush()
        assert later.result(0) == (1, 1)


def test_a_partition_whose_tries_are_over_fails_alone_and_in_order_and_can_be_used_again(topic: Fickle) -> None:
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
        out.flush()  # the error was raised
        later = out.send(b"later", partition=1)
        table = out.send_batch(pa.table({"value": [b"later"], "partition": [1]}))
        out.flush()
        assert (later.result(0), table.result(0)) == ((1, 0), [(1, 1, 1)])
    assert [topic.end(p) for p in range(4)] == [1, 2, 1, 0]


def test_a_partition_that_can_never_work_again_takes_no_more_messages(topic: Fickle) -> None:
    topic.refusals = {1: TopicDeleted("orders", "id", is_made_again=False)}
    with Producer(topic, linger_s=60) as out:
        out.send(b"lost", partition=1)
        with pytest.raises(TopicDeleted):
            out.flush()
        with pytest.raises(TopicDeleted):
            out.send(b"later", partition=1)
        with pytest.raises(TopicDeleted):
            out.send_batch(pa.table({"value": [b"later"], "partition": [1]}))
        kept = out.send(b"kept", partition=0)
        out.flush()
        assert kept.result(0) == (0, 0)


def test_messages_without_a_key_avoid_a_partition_that_failed(topic: Fickle) -> None:
    topic.refusals = {2: LogError("broken")}
    with Producer(topic, linger_s=60, batch_rows=2) as out:
        out.send(b"lost", partition=2)
        with pytest.raises(LogError):
            out.flush()
        receipts = [out.send(b"a") for _ in range(20)]
        stored = out.send_batch(pa.table({"value": [b"a"] * 20}))
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
