"""Every message has its result in time, whatever the log does, and partitions do not wait for each other."""

from __future__ import annotations

import contextlib
import fcntl
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

import pxrs
from pxrs.errors import AppendFailed, AppendUnknown, Closed, InvalidArgument, ReadFailed
from pxrs.log.batch import Payload
from pxrs.log.contract import Append
from pxrs.log.directory.log import DirectoryLog
from pxrs.log.memory import MemoryLog, MemoryTopic
from pxrs.log.outcomes import MaybeStored, NotStored, Outcome
from pxrs.log.producers import BATCHES_KEPT
from pxrs.model import Topic
from pxrs.producer.appender import Appender, Call, _Lane
from pxrs.producer.producer import Producer
from pxrs.producer.receipts import Receipt
from pxrs.waiting import seconds_left
from tests.unit.producer.failing import Fickle, Gate, expire, is_given, make, was_tried

SOON_S = 30.0
"""For what takes no time on an idle machine."""


class Holding(Fickle):
    """Appends with a batch of partition 1 wait at a gate."""

    def __init__(self, partitions: int = 2) -> None:
        super().__init__(Topic("orders", "id", partitions))
        self.gate = Gate()
        self.before = lambda appends: self.gate(appends) if any(each.partition == 1 for each in appends) else None


@pytest.fixture
def holding() -> Iterator[Holding]:
    topic = Holding()
    yield topic
    topic.gate.opened.set()


def failure(receipt: Receipt) -> AppendFailed:
    with pytest.raises(AppendFailed) as raised:
        receipt.result(SOON_S)
    return raised.value


def test_a_message_that_cannot_be_stored_fails_at_its_delivery_timeout_as_not_stored() -> None:
    topic = make(1)
    topic.refusals = {0: AppendFailed("the disk is full")}
    with Producer(topic, linger_s=0, tries_max=1_000, delivery_timeout=60) as out:
        receipt = out.send(b"a")
        expire(out, was_tried)
        error = failure(receipt)
        assert not isinstance(error, AppendUnknown)
        assert "not stored within the delivery_timeout of 60 s; tried" in str(error)
        assert "the disk is full" in str(error)
        with pytest.raises(AppendFailed):
            out.flush()


def test_a_message_whose_reply_was_lost_fails_at_its_delivery_timeout_as_unknown() -> None:
    topic = make(1)
    topic.lost_replies = {0: 1 << 30}
    with Producer(topic, linger_s=0, tries_max=1_000, delivery_timeout=60) as out:
        receipt = out.send(b"a")
        expire(out, was_tried)
        assert isinstance(failure(receipt), AppendUnknown)
        with pytest.raises(AppendUnknown, match="check the topic before you send them again"):
            out.flush()
    assert topic.values(0) == [b"a"]


def test_l4_a_message_whose_append_does_not_return_is_unknown_and_those_behind_it_are_not_stored(
    holding: Holding,
) -> None:
    out = Producer(holding, linger_s=0, delivery_timeout=60)
    stuck = out.send(b"stuck", partition=1)
    assert holding.gate.reached.wait(SOON_S)
    behind = out.send(b"behind", partition=1)
    expire(out, is_given)
    with pytest.raises(AppendUnknown, match="no answer within the delivery_timeout of 60 s"):
        out.flush()
    assert isinstance(failure(stuck), AppendUnknown)
    error = failure(behind)
    assert not isinstance(error, AppendUnknown)
    assert "not stored, because an earlier batch of the partition failed" in str(error)
    out.flush()  # the error was raised
    holding.gate.opened.set()  # the append returns, and lands: its late result changes nothing
    assert out.send(b"later", partition=1).result(SOON_S)[0] == 1
    out.close()
    assert isinstance(failure(stuck), AppendUnknown)
    assert sorted(value or b"" for value in holding.values(1)) == [b"later", b"stuck"]
    first, *_, last = holding.calls
    assert first[0].origin.producer != last[0].origin.producer
    assert out.sending.outbox.counted == 0


def test_w1_what_is_sent_after_a_failure_goes_under_another_producer_id(holding: Holding) -> None:
    holding.gate.opened.set()
    holding.lost_replies = {0: 2}
    with Producer(holding, linger_s=0, tries_max=2) as out:
        assert isinstance(failure(out.send(b"unknown", partition=0)), AppendUnknown)
        assert out.send(b"stored", partition=0).result(SOON_S) == (0, 1)
        with pytest.raises(AppendUnknown):
            out.flush()
    origins = [call[0].origin for call in holding.calls]
    assert origins[0] == origins[1]
    assert origins[2].producer != origins[0].producer
    assert origins[2].sequence == 0


def test_other_partitions_are_acknowledged_in_every_round_while_the_append_of_one_blocks(holding: Holding) -> None:
    with Producer(holding, linger_s=0) as out:
        stuck = out.send(b"stuck", partition=1)
        assert holding.gate.reached.wait(SOON_S)
        for number in range(5):
            assert out.send(b"%d" % number, partition=0).result(SOON_S) == (0, number)
            assert out.send(b"without a key").result(SOON_S)[0] == 0 if number == 4 else True
        assert not stuck.is_done
        holding.gate.opened.set()
        assert stuck.result(SOON_S) == (1, 0)


def test_other_partitions_do_not_wait_for_the_look_up_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    topic, gate = make(2), threading.Event()
    end = topic.end

    def held(partition: int) -> int:
        if partition == 1 and not gate.wait(seconds_left(SOON_S)):
            raise ReadFailed("no answer")
        return end(partition)

    monkeypatch.setattr(topic, "end", held)
    with Producer(topic, linger_s=0) as out:
        stuck = out.send(b"stuck", partition=1)
        for number in range(3):
            assert out.send(b"%d" % number, partition=0).result(SOON_S) == (0, number)
        assert not stuck.is_done
        gate.set()
        assert stuck.result(SOON_S) == (1, 0)


@contextlib.contextmanager
def held_lock(folder: Path, partition: int) -> Iterator[None]:
    """Hold the append lock of a partition, as a process does that was stopped in the middle of an append."""
    (path,) = folder.glob(f"**/partition-{partition}/lock")
    with path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[tuple[Path, DirectoryLog]]:
    log = DirectoryLog(tmp_path, timeout=0.5)
    topic = log.create_topic(Topic("t", "id", 3))
    with Producer(topic, linger_s=0) as out:
        for partition in range(3):
            out.send(b"first", partition=partition).result(SOON_S)
    yield tmp_path, log
    log.close()


def test_other_partitions_are_acknowledged_while_the_append_lock_of_one_is_held(
    directory: tuple[Path, DirectoryLog],
) -> None:
    folder, log = directory
    with Producer(log.topic("t"), linger_s=0, tries_max=1_000) as out:
        with held_lock(folder, 1):
            table = pa.table({"value": [b"a", b"b", b"c"], "partition": [0, 1, 2]})
            receipts = [out.send(b"one append", partition=partition) for partition in range(3)]
            out.send_batch(table)
            assert [receipts[partition].result(SOON_S)[1] for partition in (0, 2)] == [1, 1]
            for number in range(5):
                assert out.send(b"later", partition=0).result(SOON_S) == (0, 3 + number)
            assert not receipts[1].is_done
        assert receipts[1].result(SOON_S) == (1, 1)


def test_flush_and_close_against_a_held_append_lock_end_and_the_error_says_how_long_was_tried(
    directory: tuple[Path, DirectoryLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log waits for the lock for longer than the messages have. Their time begins when the log is given them:
    otherwise it may be over before that."""
    encoded = Appender._encoded

    def given(self: Appender, call: Call, lanes: list[_Lane]) -> list[_Lane]:
        ready = encoded(self, call, lanes)
        with self.lock:
            for batch in [each for lane in ready for part in lane.parts for each in part]:
                batch.expires_at = min(batch.expires_at, time.monotonic() + 0.3)
        return ready

    monkeypatch.setattr(Appender, "_encoded", given)
    folder, _ = directory
    log = DirectoryLog(folder, timeout=SOON_S)
    out = Producer(log.topic("t"), linger_s=0, delivery_timeout=60)
    out.sending._appender.grace_s = SOON_S / 3
    with contextlib.closing(log), held_lock(folder, 1):
        began = time.monotonic()
        receipt = out.send(b"a", partition=1)
        with pytest.raises(
            AppendFailed, match=r"not stored within the delivery_timeout of 60 s; tried . times? within"
        ):
            out.flush()
        assert time.monotonic() - began < SOON_S / 2
        assert not isinstance(failure(receipt), AppendUnknown), "the wait for the lock ends with the time"
        out.send(b"b", partition=1)
        with pytest.raises(AppendFailed, match="delivery_timeout"):
            out.close()
        assert log.topic("t").end(1) == 1


def test_a_hub_that_is_closed_waits_no_longer_than_the_delivery_timeout_of_its_producers(tmp_path: Path) -> None:
    hub = pxrs.open(tmp_path / "hub")
    hub.create_topic("t", 1)
    with hub.producer("t", linger_s=0) as other:
        other.send(b"first").result(SOON_S)
    out = hub.producer("t", linger_s=0, delivery_timeout=0.3)
    with held_lock(tmp_path / "hub" / "logs" / out.topic_id, 0):  # the hub has topics of its own, too
        out.send(b"a")
        with pytest.raises(AppendFailed, match="delivery_timeout"):
            hub.close()


def test_flush_with_a_timeout_leaves_under_way_what_waits(holding: Holding) -> None:
    with Producer(holding, linger_s=0) as out:
        receipt = out.send(b"a", partition=1)
        with pytest.raises(TimeoutError, match=r"not everything was stored within 0\.01 s"):
            out.flush(timeout=0.01)
        holding.gate.opened.set()
        out.flush(timeout=SOON_S)
        assert receipt.result(0) == (1, 0)


def test_close_with_a_timeout_fails_what_waits_and_closes_the_producer(holding: Holding) -> None:
    out = Producer(holding, linger_s=0)
    given = out.send(b"given to the log", partition=1)
    assert holding.gate.reached.wait(SOON_S)
    queued = out.send(b"queued", partition=1)
    with pytest.raises(TimeoutError, match=r"closed, but not everything was stored within 0\.05 s"):
        out.close(timeout=0.05)
    assert isinstance(failure(given), AppendUnknown)
    assert not isinstance(failure(queued), AppendUnknown)
    with pytest.raises(Closed):
        out.send(b"more", partition=0)
    out.close()
    holding.gate.opened.set()
    out.sending.thread.join(SOON_S)
    assert holding.values(1) == [b"given to the log"], "what was reported as not stored does not appear"


def test_flush_raises_the_first_error_since_it_has_last_raised_one() -> None:
    topic = make(2)
    with Producer(topic, linger_s=0, tries_max=1) as out:
        topic.refusals = {0: AppendFailed("first"), 1: AppendFailed("second")}
        for partition in (0, 1):
            failure(out.send(b"a", partition=partition))
        with pytest.raises(AppendFailed, match="first"):
            out.flush()
        out.flush()
        topic.refusals = {1: AppendFailed("third")}
        failure(out.send(b"a", partition=1))
        stored = out.send(b"a", partition=0)
        with pytest.raises(AppendFailed, match="third"):
            out.flush()
        assert stored.result(0) == (0, 0)


def test_messages_that_were_sent_before_a_failure_could_be_seen_fail_with_it(holding: Holding) -> None:
    """They wait in chunks and tables that the background thread has not looked at."""
    with Producer(holding, linger_s=0, tries_max=1, batch_rows=2) as out:
        first = out.send(b"first", partition=1)
        assert holding.gate.reached.wait(SOON_S)
        holding.refusals = {1: AppendFailed("the disk is full")}
        with out.sending.outbox.lock:
            outbox = out.sending.outbox  # the thread that leads now can take nothing
            chunk = outbox.chunk
            receipts = [outbox.add(chunk, b"k", b"others", time.time(), 0)]
            holding.gate.opened.set()
        rest = [out.send(b"%d" % number, partition=1) for number in range(5)]
        failure(first)
        assert len(receipts) == 1
        after = out.send(b"after", partition=0).result(SOON_S)
        assert after[0] == 0
        for each in rest:
            failure(each)
        with pytest.raises(AppendFailed):
            out.flush()
        holding.refusals = {}
        assert out.send(b"after", partition=1).result(SOON_S) == (1, 0)


def test_a_delivery_timeout_that_is_no_longer_than_the_linger_is_refused() -> None:
    for given in (0, -1, 0.005, "1"):
        with pytest.raises(InvalidArgument, match="delivery_timeout"):
            Producer(make(1), delivery_timeout=given)  # type: ignore[arg-type]


class Chaotic(MemoryTopic):
    """Each partition of an append is stored, refused, or answered as unknown; what is unknown may be stored, or land
    later, or never."""

    def __init__(self, seed: int) -> None:
        super().__init__(Topic("orders", "id", 3), MemoryLog())
        self._random = random.Random(seed)
        self._late: list[list[Append]] = []
        self.unanswered: dict[tuple[object, int], set[int]] = {}
        """By producer id and partition: the sequences that were given and have no answer that says where they are."""

    def append(self, appends: Sequence[Append]) -> list[Outcome]:
        self.land(self._random.randrange(3))
        found: dict[int, Iterator[Outcome]] = {}
        for partition in {each.partition: None for each in appends}:
            found[partition] = iter(self._some([each for each in appends if each.partition == partition]))
        return [next(found[each.partition]) for each in appends]

    def _some(self, appends: list[Append]) -> list[Outcome]:
        who = appends[0].origin.producer, appends[0].partition
        mine = self.unanswered.setdefault(who, set())
        mine |= {each.origin.sequence for each in appends}
        assert len(mine) <= BATCHES_KEPT
        fate = self._random.random()
        if fate < 0.5:
            stored = super().append(appends)
            if not any(isinstance(each, NotStored) for each in stored):
                mine.clear()
            return stored
        if fate < 0.7:
            return [NotStored(AppendFailed("refused"))] * len(appends)
        if fate < 0.8:
            super().append(appends)
        elif fate < 0.95:
            self._late.append(appends)
        return [MaybeStored(AppendUnknown("no answer"))] * len(appends)

    def land(self, count: int) -> None:
        """Store some of what was answered as unknown."""
        for _ in range(min(count, len(self._late))):
            super().append(self._late.pop(self._random.randrange(len(self._late))))

    def values(self, partition: int) -> list[bytes]:
        return [v for batch in self.read(partition, 0, 1 << 30) for v in batch.records.column("value").to_pylist()]


def test_l4_w1_nothing_is_doubled_or_appears_that_was_not_stored_whatever_lands_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What happens in a run also depends on how many messages are in each batch, so on the threads: what must have
    happened is counted over all runs."""
    monkeypatch.setattr("pxrs.producer.appender._BACKOFF_S", (0.0001, 0.001))
    happened: Counter[str] = Counter()
    for seed in range(8):
        happened += one_chaotic_run(seed)
    assert min(happened[each] for each in ("stored", "unknown", "absent")) > 20, happened


def one_chaotic_run(seed: int) -> Counter[str]:
    """How many messages were stored, unknown, and absent: not stored."""
    topic, choice = Chaotic(seed), random.Random(seed)
    sent: list[tuple[int, bytes, Receipt]] = []
    with contextlib.suppress(AppendFailed), Producer(topic, linger_s=0, tries_max=2, batch_rows=3) as out:
        for number in range(300):
            partition, value = choice.randrange(3), b"%d" % number
            sent.append((partition, value, out.send(value, partition=partition)))
            if choice.random() < 0.05:
                with contextlib.suppress(AppendFailed):
                    out.flush()
    topic.land(1 << 30)
    stored, absent = [list[bytes]() for _ in range(3)], list[tuple[int, bytes]]()
    unknown, all_there = 0, [topic.values(partition) for partition in range(3)]
    for partition, value, receipt in sent:
        try:
            _, offset = receipt.result(0)
        except AppendUnknown:
            unknown += 1
        except AppendFailed:
            absent.append((partition, value))
        else:
            assert all_there[partition][offset] == value, seed
            stored[partition].append(value)
    for partition, there in enumerate(all_there):
        assert len(there) == len(set(there)), f"seed {seed}: something is stored twice"
        known = set(stored[partition])
        assert [value for value in there if value in known] == stored[partition], f"seed {seed}: out of order"
    assert not [value for partition, value in absent if value in all_there[partition]], seed
    return Counter(stored=sum(map(len, stored)), unknown=unknown, absent=len(absent))


def test_what_is_sent_while_a_partition_is_busy_is_stored_as_one_batch(holding: Holding) -> None:
    """Else a log that takes long for each append would get a few messages with each."""
    with Producer(holding, linger_s=0) as out:
        receipts = [out.send(b"0", partition=1)]
        assert holding.gate.reached.wait(SOON_S)
        for number in range(1, 20):
            receipts.append(out.send(b"%d" % number, partition=1))
            assert out.send(b"other", partition=0).result(SOON_S) == (0, number - 1)  # in a round of its own
        holding.gate.opened.set()
        assert [receipt.result(SOON_S) for receipt in receipts] == [(1, number) for number in range(20)]
    batches = [each for call in holding.calls for each in call if each.partition == 1]
    assert [each.payload.rows for each in batches] == [1, 19]
    assert holding.values(1) == [b"%d" % number for number in range(20)]


def test_payloads_of_a_batch_that_is_tried_again_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from pxrs.producer import appender

    encode, encoded = appender.encode, list[int]()

    def counting(records: pa.RecordBatch, codec: str) -> Payload:
        encoded.append(records.num_rows)
        return encode(records, codec)

    monkeypatch.setattr(appender, "encode", counting)
    topic = make(1)
    topic.lost_replies = {0: 3}
    with Producer(topic, linger_s=0) as out:
        out.send(b"a").result(SOON_S)
    assert (encoded, len(topic.calls)) == ([1], 4)
