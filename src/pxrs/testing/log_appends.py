"""The appending half of the log's contract: outcomes of each batch, and producers whose retries are stored once (L4).

Part of `pxrs.testing.log_contract.LogContract`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
import xxhash

from pxrs.errors import (
    AppendFailed,
    InvalidRecord,
    SequenceGap,
    UnknownProducer,
    UnknownTopic,
)
from pxrs.log.arrivals import wait_for_messages
from pxrs.log.batch import ANONYMOUS
from pxrs.log.contract import Append, Log, TopicLog
from pxrs.log.outcomes import NotStored, Outcome, StoredAt, offsets_of
from pxrs.log.producers import PRODUCERS_MAX
from pxrs.model import CODECS
from pxrs.testing.log_fixtures import LogFixtures, new_topic, origin, records, values_from
from pxrs.waiting import time_limit


class Appends(LogFixtures):
    def test_offsets_count_from_0_without_gaps(self, topic: TopicLog) -> None:
        assert offsets_of(topic.append([Append.encoded(0, records([b"a", b"b"]))])) == [0]
        assert offsets_of(
            topic.append([Append.encoded(0, records([b"c"])), Append.encoded(0, records([b"d", b"e"]))])
        ) == [2, 3]
        assert (topic.start(0), topic.end(0)) == (0, 5)
        assert values_from(topic, 0) == [b"a", b"b", b"c", b"d", b"e"]

    def test_partitions_are_independent(self, topic: TopicLog) -> None:
        appends = [
            Append.encoded(1, records([b"x"])),
            Append.encoded(0, records([b"a"])),
            Append.encoded(1, records([b"y", b"z"])),
        ]
        assert offsets_of(topic.append(appends)) == [0, 0, 1]
        assert (values_from(topic, 0), values_from(topic, 1)) == ([b"a"], [b"x", b"y", b"z"])
        assert (topic.end(0), topic.end(1)) == (1, 3)

    def test_append_each_tells_the_outcomes_of_each_partition_once(self, topic: TopicLog) -> None:
        told: list[Mapping[int, Sequence[Outcome]]] = []
        batches = [Append.encoded(number, records([b"%d" % at])) for at, number in enumerate((1, 0, 1))]
        topic.append_each(batches, told.append)
        assert sorted(number for each in told for number in each) == [0, 1]
        found = {number: offsets_of(outcomes) for each in told for number, outcomes in each.items()}
        assert found == {0: [0], 1: [0, 1]}
        assert (values_from(topic, 0), values_from(topic, 1)) == ([b"1"], [b"0", b"2"])

    def test_a_time_limit_that_is_over_ends_an_append_with_a_known_outcome(self, topic: TopicLog) -> None:
        topic.end(0)
        with time_limit(0):
            (outcome,) = topic.append([Append.encoded(0, records([b"a"]))])
        if isinstance(outcome, StoredAt):  # it did not have to wait for anything
            assert values_from(topic, 0) == [b"a"]
        else:
            assert isinstance(outcome.error, AppendFailed)
        if isinstance(outcome, NotStored):
            assert values_from(topic, 0) == []

    def test_the_ends_of_all_partitions_are_told_together(self, log: Log, topic: TopicLog) -> None:
        assert topic.ends() == [0, 0]
        for number, values in enumerate(([b"a"], [b"b", b"c"], [b"d"])):
            offsets_of(log.topic("orders").append([Append.encoded(number % 2, records(values))]))
            assert topic.ends() == [topic.end(0), topic.end(1)]
        assert topic.ends() == [2, 2]
        log.delete_topic("orders")
        with pytest.raises(UnknownTopic):
            topic.ends()

    def test_appending_nothing_is_nothing(self, topic: TopicLog) -> None:
        assert offsets_of(topic.append([])) == []
        assert topic.end(0) == 0

    def test_what_one_handle_appends_another_reads(self, log: Log, topic: TopicLog) -> None:
        offsets_of(topic.append([Append.encoded(0, records([b"a"]))]))
        assert values_from(log.topic("orders"), 0) == [b"a"]

    def test_nulls_headers_and_times_come_back(self, topic: TopicLog) -> None:
        sent = records(
            [None, b"", b"\x00\xff"],
            [-1, 0, 1_700_000_000_123_456],
            key=[b"", None, "schlüssel".encode()],
            headers=[None, [], [("trace", b"1"), ("trace", b""), ("ü", None)]],
        )
        offsets_of(topic.append([Append.encoded(0, sent)]))
        (batch,) = topic.read(0, 0)
        assert batch.records.to_pylist() == sent.to_pylist()

    def test_a_slice_of_a_batch_is_stored_as_that_slice(self, topic: TopicLog) -> None:
        offsets_of(topic.append([Append.encoded(0, records([b"%d" % i for i in range(10)]).slice(3, 4))]))
        assert values_from(topic, 0) == [b"3", b"4", b"5", b"6"]

    @pytest.mark.parametrize("codec", CODECS)
    def test_every_codec_gives_back_what_was_stored(self, log: Log, codec: str) -> None:
        topic = log.create_topic(new_topic("coded", codec=codec))
        values = [b"repeat" * 50 + b"%d" % i for i in range(500)]
        offsets_of(topic.append([Append.encoded(0, records(values), codec=codec)]))
        offsets_of(topic.append([Append.encoded(0, records([b"x"]), codec=codec)]))
        assert values_from(topic, 0, 7) == [*values[7:], b"x"]

    def test_a_large_message_comes_back(self, topic: TopicLog) -> None:
        value = bytes(range(256)) * 20_000
        offsets_of(
            topic.append(
                [
                    Append.encoded(0, records([b"small"])),
                    Append.encoded(0, records([value])),
                    Append.encoded(0, records([b"small"])),
                ]
            )
        )
        assert values_from(topic, 0) == [b"small", value, b"small"]

    def test_an_unfit_batch_is_refused_and_nothing_stored(self, topic: TopicLog) -> None:
        other = pa.RecordBatch.from_pydict({"value": [b"a"]})
        for bad in (records([]), other):
            with pytest.raises(InvalidRecord):
                offsets_of(topic.append([Append.encoded(0, bad)]))
        assert topic.end(0) == 0

    @pytest.mark.parametrize("codec", CODECS)
    def test_a_batch_that_was_damaged_after_it_was_encoded_is_refused(self, topic: TopicLog, codec: str) -> None:
        payload = Append.encoded(0, records([b"a", b"b"]), codec=codec).payload
        noise = b"no Arrow record batch"
        bad = {
            "checksum": payload._replace(checksum=payload.checksum ^ 1),
            "bytes": payload._replace(data=pa.py_buffer(payload.data.to_pybytes()[:-8])),
            "no bytes": payload._replace(data=pa.py_buffer(b"")),
            "no batch": payload._replace(data=pa.py_buffer(noise), checksum=xxhash.xxh3_64_intdigest(noise)),
            "codec": payload._replace(codec=len(CODECS)),
            "no rows": payload._replace(rows=0),
        }
        if codec == "none":
            bad["rows"] = payload._replace(rows=3)
        for what, each in bad.items():
            with pytest.raises(InvalidRecord):
                topic.append([Append(1, payload), Append(0, each)])
            assert topic.ends() == [0, 0], what

    @pytest.mark.parametrize("partition", [-1, 2])
    def test_a_partition_that_is_not_there_is_refused(self, topic: TopicLog, partition: int) -> None:
        with pytest.raises(InvalidRecord):
            offsets_of(topic.append([Append.encoded(partition, records([b"a"]))]))
        for ask in (topic.start, topic.end, lambda p: topic.read(p, 0), lambda p: topic.offset_at(p, 0)):
            with pytest.raises(InvalidRecord):
                ask(partition)
        with pytest.raises(InvalidRecord):
            wait_for_messages(topic, {partition: 0}, 0)

    def test_a_partition_that_refuses_its_batches_hides_nothing_about_the_others(
        self, topic: TopicLog, producer: uuid.UUID
    ) -> None:
        first = Append.encoded(1, records([b"a", b"b"]), origin(0, producer))
        assert topic.append([first]) == [StoredAt(0)]
        appends = [
            Append.encoded(0, records([b"gap"]), origin(5, producer)),
            first,
            Append.encoded(1, records([b"c"]), origin(1, producer)),
            Append.encoded(0, records([b"new"])),
        ]
        refused, *stored, together = topic.append(appends)
        assert stored == [StoredAt(0, is_duplicate=True), StoredAt(2)]
        for outcome in (refused, together):
            assert isinstance(outcome, NotStored), "all batches of a partition are stored, or none"
            assert isinstance(outcome.error, UnknownProducer)
        assert (topic.end(0), values_from(topic, 1)) == (0, [b"a", b"b", b"c"])

    def test_partitions_that_fail_in_different_ways_have_their_own_errors(
        self, topic: TopicLog, producer: uuid.UUID
    ) -> None:
        assert topic.append([Append.encoded(0, records([b"a"]), origin(0, producer))]) == [StoredAt(0)]
        appends = [Append.encoded(number, records([b"x"]), origin(4, producer)) for number in (0, 1)]
        kinds = [SequenceGap, UnknownProducer]
        for outcome, kind in zip(topic.append(appends), kinds, strict=True):
            assert isinstance(outcome, NotStored)
            assert isinstance(outcome.error, kind)
        assert topic.ends() == [1, 0]

    def test_appends_of_many_threads_keep_offsets_dense_and_each_batch_whole(self, topic: TopicLog) -> None:
        threads, each = 4, 25

        def run(number: int) -> list[tuple[int, bytes]]:
            mine = []
            for i in range(each):
                value = b"%d-%d" % (number, i)
                offsets = offsets_of(topic.append([Append.encoded(p, records([value] * (1 + i % 3))) for p in (0, 1)]))
                mine.append((offsets[0], value))
            return mine

        with ThreadPoolExecutor(threads) as pool:
            answers = list(pool.map(run, range(threads)))
        for partition in (0, 1):
            stored = values_from(topic, partition)
            assert len(stored) == threads * sum(1 + i % 3 for i in range(each))
            for mine in answers:
                order = [value for value in dict.fromkeys(stored) if value in {v for _, v in mine}]
                assert order == [value for _, value in mine]
        stored = values_from(topic, 0)
        for number, mine in enumerate(answers):
            for i, (offset, value) in enumerate(mine):
                assert stored[offset : offset + 1 + i % 3] == [value] * (1 + i % 3), (number, i)


class Origins(LogFixtures):
    """L4: a retry is stored once, and a batch that may be a retry or not is refused."""

    def test_l4_a_retry_is_answered_and_not_stored_again(self, topic: TopicLog, producer: uuid.UUID) -> None:
        for sequence in range(7):
            offsets_of(topic.append([Append.encoded(0, records([b"%d" % sequence] * 2), origin(sequence, producer))]))
        for sequence in range(2, 7):
            again = [Append.encoded(0, records([b"%d" % sequence] * 2), origin(sequence, producer))]
            assert offsets_of(topic.append(again)) == [sequence * 2]
        assert topic.end(0) == 14
        assert offsets_of(topic.append([Append.encoded(0, records([b"7"]), origin(7, producer))])) == [14]

    def test_l4_a_retry_too_old_to_be_known_is_refused(self, topic: TopicLog, producer: uuid.UUID) -> None:
        for sequence in range(6):
            offsets_of(topic.append([Append.encoded(0, records([b"a"]), origin(sequence, producer))]))
        with pytest.raises(UnknownProducer):
            offsets_of(topic.append([Append.encoded(0, records([b"a"]), origin(0, producer))]))
        assert topic.end(0) == 6

    def test_l4_a_gap_is_refused(self, topic: TopicLog, producer: uuid.UUID) -> None:
        offsets_of(topic.append([Append.encoded(0, records([b"a"]), origin(0, producer))]))
        with pytest.raises(SequenceGap):
            offsets_of(topic.append([Append.encoded(0, records([b"c"]), origin(2, producer))]))
        assert topic.end(0) == 1
        offsets_of(topic.append([Append.encoded(0, records([b"b"]), origin(1, producer))]))

    def test_l4_an_unknown_producer_begins_at_0(self, topic: TopicLog, producer: uuid.UUID) -> None:
        with pytest.raises(UnknownProducer):
            offsets_of(topic.append([Append.encoded(0, records([b"a"]), origin(3, producer))]))
        assert topic.end(0) == 0

    def test_l4_a_new_epoch_begins_at_0_and_ends_the_old_one(self, topic: TopicLog, producer: uuid.UUID) -> None:
        offsets_of(topic.append([Append.encoded(0, records([b"a"]), origin(0, producer, 1))]))
        with pytest.raises(SequenceGap):
            offsets_of(topic.append([Append.encoded(0, records([b"b"]), origin(1, producer, 2))]))
        assert offsets_of(topic.append([Append.encoded(0, records([b"b"]), origin(0, producer, 2))])) == [1]
        for sequence in (0, 1):
            with pytest.raises(UnknownProducer):
                offsets_of(topic.append([Append.encoded(0, records([b"zombie"]), origin(sequence, producer, 1))]))
        assert values_from(topic, 0) == [b"a", b"b"]

    def test_l4_who_was_forgotten_is_found_again_or_refused(self, topic: TopicLog, producer: uuid.UUID) -> None:
        since = topic.end(0)
        batches = [Append.encoded(0, records([b"%d" % i]), origin(i, producer), since) for i in range(2)]
        assert offsets_of(topic.append(batches[:1])) == [0]
        crowd = [Append.encoded(0, records([b"x"]), origin(0, uuid.uuid4()), since) for _ in range(PRODUCERS_MAX)]
        offsets_of(topic.append(crowd))
        end = topic.end(0)
        with pytest.raises(UnknownProducer) as refused:
            offsets_of(topic.append([batches[0]._replace(since=None)]))
        assert refused.value.stored is None
        assert offsets_of(topic.append(batches)) == [0, end], "the search must begin at the offset of the first attempt"
        assert offsets_of(topic.append([Append.encoded(0, records([b"a"]), origin(0, uuid.uuid4()), end)])) == [end + 1]

    def test_l4_sequences_count_in_each_partition(self, topic: TopicLog, producer: uuid.UUID) -> None:
        for partition in (0, 1):
            assert offsets_of(topic.append([Append.encoded(partition, records([b"a"]), origin(0, producer))])) == [0]
        with pytest.raises(SequenceGap):
            offsets_of(topic.append([Append.encoded(1, records([b"c"]), origin(2, producer))]))

    def test_l4_producers_are_independent(self, topic: TopicLog) -> None:
        first, second = uuid.uuid4(), uuid.uuid4()
        assert offsets_of(topic.append([Append.encoded(0, records([b"a"]), origin(0, first))])) == [0]
        assert offsets_of(topic.append([Append.encoded(0, records([b"b"]), origin(0, second))])) == [1]
        assert offsets_of(topic.append([Append.encoded(0, records([b"a"]), origin(0, first))])) == [0]

    def test_l4_batches_without_a_producer_are_never_taken_for_the_same(self, topic: TopicLog) -> None:
        for expected in (0, 1):
            assert offsets_of(topic.append([Append.encoded(0, records([b"a"]), ANONYMOUS)])) == [expected]

    def test_l4_one_append_with_several_batches_and_its_retry(self, topic: TopicLog, producer: uuid.UUID) -> None:
        appends = [Append.encoded(p, records([b"%d" % i]), origin(i, producer)) for p in (0, 1) for i in range(3)]
        assert offsets_of(topic.append(appends)) == [0, 1, 2, 0, 1, 2]
        assert offsets_of(topic.append(appends)) == [0, 1, 2, 0, 1, 2]
        half_new = [Append.encoded(0, records([b"%d" % i]), origin(i, producer)) for i in (2, 3)]
        assert offsets_of(topic.append(half_new)) == [2, 3]
        assert values_from(topic, 0) == [b"0", b"1", b"2", b"3"]

    def test_l4_one_batch_twice_in_one_append_is_stored_once(self, topic: TopicLog, producer: uuid.UUID) -> None:
        twice = [Append.encoded(0, records([b"a"]), origin(0, producer))] * 2
        assert offsets_of(topic.append(twice)) == [0, 0]
        assert topic.end(0) == 1

    def test_a_partition_takes_all_of_an_append_or_nothing(self, topic: TopicLog, producer: uuid.UUID) -> None:
        with pytest.raises(SequenceGap):
            offsets_of(topic.append([Append.encoded(0, records([b"a"]), origin(i, producer)) for i in (0, 1, 3)]))
        assert topic.end(0) == 0
        assert offsets_of(topic.append([Append.encoded(0, records([b"a"]), origin(0, producer))])) == [0]
