"""The contract of staging as tests: one suite for every staging place, ours and yours.

    class TestMine(StagingContract):
        @pytest.fixture
        def staging(self):
            return MyStaging()

        def make_older(self, staging, seconds): ...

Nothing here is optional. `make_older` makes everything that is staged look older, because a sweep spares what is young.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import replace

import pyarrow as pa
import pytest

from pxrs.errors import InvalidRecord
from pxrs.log.batch import SCHEMA, Payload, check_encoded
from pxrs.model import CODECS, Topic
from pxrs.publishing.feed import Feed
from pxrs.publishing.planning import Span
from pxrs.publishing.staging.contract import Staging
from pxrs.publishing.staging.files import NewFile

TOPIC = Topic("orders", "0123456789abcdef0123456789abcdef", 3)
OTHER = "fedcba9876543210fedcba9876543210"
DAY_S = 86_400.0


def rows(*values: bytes, partition: int = 0) -> pa.RecordBatch:
    return pa.record_batch({"value": pa.array(values, pa.binary()), "partition": pa.array([partition] * len(values))})


def feed(incarnation: str = "member", start: int = 0, topic: str = OTHER) -> Feed:
    return Feed("g", topic, incarnation, "registry", {0: Span(7, start, start + 5)}, {0: 42}, False, 10.0)


def staged(staging: Staging, query: str, batch: int, *names: str) -> list[tuple[int, list[bytes]]]:
    """What the driver reads from these files."""
    found = staging.pieces(TOPIC, query, batch, names)
    return [(partition, _records(payload).column("value").to_pylist()) for partition, payload in found]


def _records(payload: Payload) -> pa.RecordBatch:
    """The records of an encoded batch, which the log would accept."""
    check_encoded(payload)
    return pa.ipc.read_record_batch(payload.data, SCHEMA)


class StagingContract:
    """What every staging place does."""

    def make_older(self, staging: Staging, seconds: float) -> None:
        raise NotImplementedError

    def put(self, staging: Staging, query: str, batch: int, *values: bytes) -> str:
        """Stage a file with these rows for partition 0, and return its name."""
        name = staging.stage(TOPIC, query, batch, 0, [rows(*values)]).name
        assert name is not None
        return name

    def test_staged_rows_come_back_by_partition_and_in_their_order(self, staging: Staging) -> None:
        tables = [rows(b"a", b"b", partition=2), rows(b"c", partition=1), rows(b"d", partition=2)]
        found = staging.stage(TOPIC, "q", 0, 0, tables)
        assert found.name is not None
        assert found.rows == 4
        assert staging.make_durable(TOPIC.id, "q", 0, [found.name])
        pieces = staged(staging, "q", 0, found.name)
        assert [value for number, values in pieces if number == 2 for value in values] == [b"a", b"b", b"d"]
        assert [value for number, values in pieces if number == 1 for value in values] == [b"c"]
        assert staged(staging, "q", 0, found.name) == pieces, "whoever finishes a manifest must see the same pieces"

    def test_files_are_read_in_the_order_in_which_they_are_named(self, staging: Staging) -> None:
        one, other = self.put(staging, "q", 0, b"one"), self.put(staging, "q", 0, b"other")
        assert staged(staging, "q", 0, other, one) == [(0, [b"other"]), (0, [b"one"])]

    def test_two_attempts_of_a_task_have_files_of_their_own(self, staging: Staging) -> None:
        first, second = self.put(staging, "q", 0, b"first"), self.put(staging, "q", 0, b"second")
        assert first != second
        assert staged(staging, "q", 0, first) == [(0, [b"first"])]

    def test_a_task_without_rows_has_no_file(self, staging: Staging) -> None:
        assert staging.stage(TOPIC, "q", 0, 0, [rows()]) == (None, 0)

    def test_rows_that_the_log_would_refuse_are_refused_when_they_are_staged(self, staging: Staging) -> None:
        with pytest.raises(InvalidRecord):
            staging.stage(TOPIC, "q", 0, 0, [rows(b"v", partition=3)])

    def test_pieces_are_what_the_log_stores_and_carry_the_codec_of_the_topic(self, staging: Staging) -> None:
        topic = replace(TOPIC, codec="zstd")
        name = staging.stage(topic, "q", 0, 0, [rows(b"a" * 1000, b"b" * 1000)]).name
        assert name is not None
        ((partition, payload),) = staging.pieces(topic, "q", 0, [name])
        check_encoded(payload)
        assert (partition, payload.rows, CODECS[payload.codec]) == (0, 2, "zstd")
        assert payload.data.size < 1000

    def test_rows_may_be_staged_for_several_topics_at_once(self, staging: Staging) -> None:
        other = replace(TOPIC, name="returns", id=OTHER)
        topics = {b"a": TOPIC, b"b": other}

        def route(table: pa.RecordBatch) -> list[tuple[Topic, pa.RecordBatch]]:
            return [(topics[value], table.slice(at, 1)) for at, value in enumerate(table.column("value").to_pylist())]

        found = staging.stage_routed(route, "q", 0, 0, [rows(b"a", b"b"), rows(b"b")])
        assert {topic.id: staged.rows for topic, staged in found} == {TOPIC.id: 1, OTHER: 2}
        for topic, each in found:
            assert each.name is not None
            assert staging.make_durable(topic.id, "q", 0, [each.name])
            assert sum(piece.payload.rows for piece in staging.pieces(topic, "q", 0, [each.name])) == each.rows
        assert staging.stage_routed(route, "q", 0, 1, [rows()]) == []

    def test_a_task_that_fails_leaves_nothing_for_any_topic(self, staging: Staging) -> None:
        other = replace(TOPIC, name="returns", id=OTHER)
        files: list[NewFile] = []
        create = staging.create

        def made(topic: Topic, query: str, batch: int, task: int) -> NewFile:
            files.append(create(topic, query, batch, task))
            return files[-1]

        staging.create = made  # type: ignore[method-assign]
        many = rows(*[b"v"] * 6000)
        with pytest.raises(InvalidRecord):
            staging.stage_routed(
                lambda table: [(TOPIC, many), (other, many), (TOPIC, table)], "q", 0, 0, [rows(b"v", partition=3)]
            )
        assert len(files) == 2
        assert all(self.is_discarded(file) for file in files)

    def is_discarded(self, file: NewFile) -> bool:
        """Whether a file was discarded: it cannot be finished any more."""
        try:
            file.finish()
        except (ValueError, OSError):
            return True
        return False

    def test_the_place_of_a_query_may_be_removed_and_is_made_again(self, staging: Staging) -> None:
        for batch in range(3):
            name = self.put(staging, "q", batch, b"v")
            assert staging.make_durable(TOPIC.id, "q", batch, [name])
            staging.clear(TOPIC.id, "q", batch)
            if batch:
                staging.forget_query(TOPIC.id, "q")
        staging.forget_query(TOPIC.id, "nobody")

    def test_a_task_has_a_copy_of_it_in_another_process(self, staging: Staging) -> None:
        copy = pickle.loads(pickle.dumps(staging))
        name = self.put(copy, "q", 0, b"v")
        copy.announce("q", 0, "run", feed())
        assert staged(staging, "q", 0, name) == [(0, [b"v"])]
        assert staging.feeds("q", 0, "run") == [feed()]

    def test_a_place_that_can_be_written_says_so(self, staging: Staging) -> None:
        staging.check_writable()
        self.put(staging, "q", 0, b"v")
        staging.check_writable()

    def test_a_missing_file_is_told_and_is_not_durable(self, staging: Staging) -> None:
        name = self.put(staging, "q", 0, b"v")
        assert not staging.make_durable(TOPIC.id, "q", 0, [name, "missing"])
        assert not staging.make_durable(TOPIC.id, "nobody", 0, ["missing"])
        assert staging.make_durable(TOPIC.id, "nobody", 0, [])
        with pytest.raises(FileNotFoundError):
            staged(staging, "q", 0, name, "missing")

    def test_clearing_a_batch_removes_it_and_earlier_ones_of_its_query_alone(self, staging: Staging) -> None:
        names = {(query, batch): self.put(staging, query, batch, b"v") for query in ("q", "p") for batch in (0, 1, 2)}
        staging.clear(TOPIC.id, "q", 1)
        staging.clear(TOPIC.id, "q", 1)  # a second time, as by another driver
        staging.clear(OTHER, "q", 5)
        kept = {key for key, name in names.items() if staging.make_durable(TOPIC.id, *key, [name])}
        assert kept == {("q", 2), ("p", 0), ("p", 1), ("p", 2)}

    def test_feeds_are_those_of_one_batch_in_one_run(self, staging: Staging) -> None:
        one, other = feed("one"), feed("other", 5)
        for each in (one, other, one):  # every task announces, with the same feed
            staging.announce("q", 3, "run", each)
        for run in ("later", "daily [12]/*"):
            staging.announce("q", 3, run, one)
        staging.announce("p", 3, "run", other)
        assert sorted(staging.feeds("q", 3, "run"), key=lambda each: each.incarnation) == [one, other]
        assert staging.feeds("q", 3, "later") == staging.feeds("q", 3, "daily [12]/*") == [one]
        assert staging.feeds("q", 4, "run") == staging.feeds("nobody", 3, "run") == []

    def test_a_batch_of_several_topics_has_a_feed_for_each(self, staging: Staging) -> None:
        both = [feed(), feed(topic=TOPIC.id, start=7)]
        for each in (*both, *both):
            staging.announce("q", 0, "run", each)
        assert sorted(staging.feeds("q", 0, "run"), key=lambda each: each.topic, reverse=True) == both

    def test_feeds_go_with_the_next_batch_and_with_their_own(self, staging: Staging) -> None:
        staging.announce("q", 1, "run", feed())
        staging.announce("q", 2, "run", feed())
        assert staging.feeds("q", 1, "run") == []
        staging.clear(TOPIC.id, "q", 1)
        assert staging.feeds("q", 2, "run") == [feed()]
        staging.clear(TOPIC.id, "q", 2)
        assert staging.feeds("q", 2, "run") == []

    def test_a_sweep_removes_what_is_old_and_not_needed(self, staging: Staging) -> None:
        queries = ("needed", "damaged", "done")
        names = {(query, batch): self.put(staging, query, batch, b"v") for query in queries for batch in (0, 1)}
        needed = {"needed": 1, "damaged": None}

        def kept() -> set[tuple[str, int]]:
            return {key for key, name in names.items() if staging.make_durable(TOPIC.id, *key, [name])}

        staging.sweep(TOPIC.id, needed)
        assert kept() == set(names), "tasks of a batch may still be running"
        self.make_older(staging, 1.1 * DAY_S)
        young = self.put(staging, "late", 0, b"v")
        staging.sweep(TOPIC.id, needed)
        assert kept() == {("needed", 1), ("damaged", 0), ("damaged", 1)}
        assert staging.make_durable(TOPIC.id, "late", 0, [young])
        staging.sweep(OTHER, {})  # a topic for which nothing was staged

    def test_a_sweep_removes_feeds_only_after_a_month(self, staging: Staging) -> None:
        staging.announce("q", 0, "run", feed())
        self.make_older(staging, 20 * DAY_S)
        staging.sweep(TOPIC.id, {})
        assert staging.feeds("q", 0, "run") == [feed()], "a batch without its feed moves no checkpoints"
        self.make_older(staging, 20 * DAY_S)
        staging.sweep(TOPIC.id, {})
        assert staging.feeds("q", 0, "run") == []

    def test_topics_are_known_until_they_are_forgotten(self, staging: Staging) -> None:
        assert staging.topics() == []
        staging.keep_topic(OTHER)
        staging.keep_topic(OTHER)
        staging.announce("q", 0, "run", feed())
        name = self.put(staging, "q", 0, b"v")
        assert sorted(staging.topics()) == sorted([TOPIC.id, OTHER])
        staging.clear(TOPIC.id, "q", 0)
        assert sorted(staging.topics()) == sorted([TOPIC.id, OTHER]), "even if nothing is staged now"
        staging.forget_topic(TOPIC.id)
        staging.forget_topic(TOPIC.id)
        assert staging.topics() == [OTHER]
        assert not staging.make_durable(TOPIC.id, "q", 0, [name])

    def test_a_topic_has_the_time_at_which_something_was_last_staged(self, staging: Staging) -> None:
        assert staging.changed_at(TOPIC.id) == 0
        self.put(staging, "q", 0, b"v")
        assert abs(staging.changed_at(TOPIC.id) - time.time()) < 60
        self.make_older(staging, DAY_S)
        assert staging.changed_at(TOPIC.id) < time.time() - DAY_S / 2
        self.put(staging, "q", 1, b"v")
        assert abs(staging.changed_at(TOPIC.id) - time.time()) < 60
