"""A consumer that reads several topics: one member, one lease, and partitions that are named by topic and number."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import pxrs
from pxrs import Message, TopicPartition
from pxrs.consumer.dead_letters import ORIGIN_HEADER
from pxrs.errors import (
    CommitUnknown,
    GroupActive,
    GroupUnavailable,
    HandlerFailed,
    InvalidGroup,
    InvalidTopic,
    OffsetOutOfRange,
    OutcomeUnknown,
    PartitionLost,
    PartitionNotAssigned,
    PartitionsPaused,
    PxrsError,
    RegistryUnavailable,
    SourceChanged,
    TopicDeleted,
    UnknownTopic,
)
from pxrs.testing.waiting import eventually

BOTH = ["orders", "returns"]
ORDERS = [TopicPartition("orders", number) for number in range(2)]
RETURNS = [TopicPartition("returns", number) for number in range(3)]


@pytest.fixture
def hub() -> Iterator[pxrs.Hub]:
    with pxrs.open("memory:") as hub:
        hub.create_topic("orders", partitions=2)
        hub.create_topic("returns", partitions=3)
        yield hub


def fill(hub: pxrs.Hub, count: int = 30, topics: Sequence[str] = BOTH) -> list[tuple[str, int, int]]:
    """Send messages to each topic, with keys. Returns the topic, partition and offset of each."""
    stored = []
    for topic in topics:
        with hub.producer(topic) as out:
            receipts = [out.send(f"{topic} {n}", key=f"key-{n % 7}") for n in range(count)]
            out.flush()
        stored += [(topic, *receipt.result()) for receipt in receipts]
    return stored


def places(messages: Sequence[Message]) -> list[tuple[str, int, int]]:
    return [message[:3] for message in messages]


def read_all(hub: pxrs.Hub, group: str = "g", **options: object) -> list[Message]:
    with hub.consumer(BOTH, group, until="end", **options) as inbox:  # type: ignore[misc]
        return list(inbox)


class TestReading:
    def test_every_message_of_all_topics_comes_once_and_in_order(self, hub: pxrs.Hub) -> None:
        stored = fill(hub)
        found = read_all(hub)
        assert sorted(places(found)) == sorted(stored)
        for topic, partition in {(message.topic, message.partition) for message in found}:
            offsets = [each.offset for each in found if each[:2] == (topic, partition)]
            assert offsets == sorted(offsets)
        assert {message.topic: (message.value or b"").split()[0].decode() for message in found} == {t: t for t in BOTH}
        assert read_all(hub) == [], "the group has read them all"

    def test_one_member_and_one_lease_read_all_topics(self, hub: pxrs.Hub) -> None:
        with hub.consumer(BOTH, "g") as inbox:
            assert isinstance(inbox, pxrs.TopicsConsumer)
            assert inbox.topics == ("orders", "returns")
            eventually(lambda: len(inbox.assignment) == 5)
            described = hub.group("g").describe()
            (member,) = described.members
            assert (member.topics, member.partitions) == (("orders", "returns"), 5)
            assert member.topic == "orders, returns"
            assert len(hub.registry.scan("groups/g/members/")) == 1

    def test_a_sequence_of_one_topic_names_partitions_by_topic_too(self, hub: pxrs.Hub) -> None:
        fill(hub)
        with hub.consumer(("orders",), "g", until="end") as inbox:
            assert len(list(inbox)) == 30
            assert inbox.assignment == ORDERS
        with hub.consumer("orders", "h", until="end") as plain:
            assert len(list(plain)) == 30
            assert plain.assignment == [0, 1]

    def test_members_of_one_and_of_several_topics_share_a_group(self, hub: pxrs.Hub) -> None:
        with hub.consumer(BOTH, "g") as both, hub.consumer("orders", "g") as one:
            eventually(lambda: len(one.assignment) == 1 and len(both.assignment) == 4)
            assert both.assignment == [TopicPartition("orders", 1 - one.assignment[0]), *RETURNS]

    def test_x4_two_members_share_all_partitions_of_all_topics(self, hub: pxrs.Hub) -> None:
        with hub.consumer(BOTH, "g") as a, hub.consumer(BOTH, "g") as b:
            eventually(lambda: {len(a.assignment), len(b.assignment)} == {2, 3})
            assert sorted([*a.assignment, *b.assignment]) == [*ORDERS, *RETURNS]

    def test_batches_say_which_topic_they_are_of(self, hub: pxrs.Hub) -> None:
        fill(hub)
        rows: Counter[str] = Counter()
        with hub.consumer(BOTH, "g", until="end") as inbox:
            for batch in inbox.batches():
                rows[batch.topic] += batch.records.num_rows
                values = batch.records.column("value").to_pylist()
                assert all(value.split()[0].decode() == batch.topic for value in values)
        assert rows == {"orders": 30, "returns": 30}

    def test_poll_gives_messages_of_one_partition_of_one_topic(self, hub: pxrs.Hub) -> None:
        stored = fill(hub)
        found: list[Message] = []
        with hub.consumer(BOTH, "g", until="end") as inbox:
            while some := inbox.poll(7, timeout=30):
                assert len({message[:2] for message in some}) == 1
                found += some
        assert sorted(places(found)) == sorted(stored)

    def test_waiting_ends_with_a_message_of_any_topic(self, hub: pxrs.Hub) -> None:
        with hub.consumer(BOTH, "g") as inbox:
            eventually(lambda: len(inbox.assignment) == 5)
            for topic in (*BOTH, *BOTH):
                sender = threading.Thread(target=fill, args=(hub, 1, [topic]))
                sender.start()
                assert inbox.poll(timeout=30)[0].topic == topic
                sender.join()

    def test_x7_what_stays_is_handed_out_while_the_rest_moves(self, hub: pxrs.Hub) -> None:
        """A message in hand of a partition that is to move holds up that partition alone."""
        fill(hub)
        revoked: list[TopicPartition] = []
        with hub.consumer(BOTH, "g", ack="manual", on_revoked=revoked.extend, handover_timeout=600) as a:
            held = {message[:2]: message for message in (a.poll(1, timeout=30)[0] for _ in range(5))}
            assert len(held) == 5, "one message in hand of each partition"
            with hub.consumer(BOTH, "g") as b:
                # The callback is called after the assignment has changed.
                eventually(lambda: revoked and {*a.assignment, *revoked} == {*ORDERS, *RETURNS})
                stays = a.assignment
                assert not set(stays) & set(revoked)
                got = {a.poll(1, timeout=30)[0][:2] for _ in range(2 * len(stays))}
                assert got == set(stays)
                assert b.assignment == []
                for place in revoked:
                    a.ack(held[place])
                eventually(lambda: sorted(b.assignment) == sorted(revoked))


class TestPartitions:
    def test_positions_and_checkpoints_are_by_topic_and_partition(self, hub: pxrs.Hub) -> None:
        stored = fill(hub)
        with hub.consumer(BOTH, "g", until="end") as inbox:
            list(inbox)
            ends = Counter(TopicPartition(*place[:2]) for place in stored)
            assert inbox.position == {place: ends[place] for place in (*ORDERS, *RETURNS)}
            inbox.commit()
            assert inbox.committed == inbox.position
            assert inbox.lag == dict.fromkeys((*ORDERS, *RETURNS), 0)
        found = {(row.topic, row.partition): row.checkpoint for row in hub.group("g").describe().partitions}
        assert found == {place: ends[place] for place in (*ORDERS, *RETURNS)}

    def test_seek_pause_and_resume_take_a_topic_and_a_partition(self, hub: pxrs.Hub) -> None:
        fill(hub)
        with hub.consumer(BOTH, "g", until="end") as inbox:
            list(inbox)
            inbox.pause(*ORDERS)
            for place in (*ORDERS, *RETURNS):
                inbox.seek(place, 0)
            assert {message.topic for message in inbox.poll(timeout=30) for _ in range(1)} == {"returns"}
            assert inbox.position[ORDERS[0]] == 0
            inbox.resume()
            inbox.pause(*RETURNS)
            assert inbox.poll(timeout=30)[0].topic == "orders"
            inbox.seek(("returns", 2), 1)  # type: ignore[arg-type]  # a plain tuple is as good
            assert inbox.position[RETURNS[2]] == 1

    def test_a_partition_that_is_none_is_refused(self, hub: pxrs.Hub) -> None:
        with hub.consumer(BOTH, "g") as inbox:
            eventually(lambda: len(inbox.assignment) == 5)
            for wrong, told in (
                (0, "give a TopicPartition"),
                (("orders", 2), "orders has no partition 2"),
                (("refunds", 0), "does not read 'refunds'; it reads orders, returns"),
                (("orders", "0"), "orders has no partition '0'"),
            ):
                with pytest.raises(InvalidGroup, match=told):
                    inbox.seek(wrong, 0)  # type: ignore[arg-type]
                with pytest.raises(InvalidGroup, match=told):
                    inbox.pause(wrong)  # type: ignore[arg-type]
            with pytest.raises(OffsetOutOfRange, match=r"returns/1: .*5"):
                inbox.seek(RETURNS[1], 5)

    def test_callbacks_and_errors_name_topics(self, hub: pxrs.Hub) -> None:
        fill(hub)
        came: dict[TopicPartition, int] = {}
        went: list[TopicPartition] = []
        lost: list[TopicPartition] = []
        with hub.consumer(
            BOTH, "g", on_assigned=came.update, on_revoked=went.extend, on_lost=lost.extend, handover_timeout=0.1
        ) as a:
            message = a.poll(1, timeout=30)[0]
            assert came == dict.fromkeys((*ORDERS, *RETURNS), 0)
            with hub.consumer(BOTH, "g") as b:
                eventually(lambda: len(b.assignment) == 2)
                with pytest.raises(PartitionNotAssigned) as refused:
                    a.seek(b.assignment[0], 0)
                assert refused.value.partitions == (b.assignment[0],)
                assert f"{b.assignment[0].topic}/{b.assignment[0].partition} is not" in str(refused.value)
                assert refused.value.assigned == tuple(a.assignment)
            assert set(went) >= set(refused.value.partitions)
            eventually(lambda: len(a.assignment) == 5)
            hub.group("g").reset("earliest", message.topic, force=True)
            eventually(lambda: any(place.topic == message.topic for place in lost))
            with pytest.raises(PartitionLost) as gone:
                a.commit()
            assert TopicPartition(*message[:2]) in gone.value.partitions
            assert f"lost partition {message.topic}/" in str(gone.value) or "lost partitions" in str(gone.value)

    @pytest.mark.parametrize(
        ("failure", "kind"),
        [(OutcomeUnknown("no answer"), CommitUnknown), (RegistryUnavailable("gone"), GroupUnavailable)],
    )
    def test_a_commit_that_is_not_confirmed_names_topics(
        self, hub: pxrs.Hub, monkeypatch: pytest.MonkeyPatch, failure: PxrsError, kind: type[CommitUnknown]
    ) -> None:
        fill(hub, 30, ["returns"])

        def refuse(*given: object, **named: object) -> None:
            raise failure

        with hub.consumer(BOTH, "g", commit_interval=600) as inbox:
            place = TopicPartition(*inbox.poll(timeout=30)[0][:2])
            with monkeypatch.context() as patch:
                patch.setattr(hub.registry, "commit", refuse)
                with pytest.raises(kind) as told:
                    inbox.commit()
            assert told.value.partitions == (place,)
            assert f"returns/{place.partition} " in str(told.value)

    def test_ack_finds_the_partition_of_the_right_topic(self, hub: pxrs.Hub) -> None:
        """Partition 0 of both topics have messages with the same offset and epoch."""
        fill(hub)
        with hub.consumer(BOTH, "g", ack="manual", until="end") as inbox:
            found = list(inbox)
            for message in found:
                if message.topic == "returns":
                    inbox.ack(message)
            inbox.commit()
            assert {place.topic for place, offset in inbox.committed.items() if offset} == {"returns"}
            with pytest.raises(PartitionLost, match="refunds/"):
                inbox.ack(found[0]._replace(topic="refunds"))
        assert {message.topic for message in read_all(hub)} == {"orders"}


class TestHandlers:
    def test_run_handles_all_topics_and_keeps_the_order_of_each_partition(self, hub: pxrs.Hub) -> None:
        stored = fill(hub, 200)
        seen: dict[tuple[str, int], list[int]] = {}
        with hub.consumer(BOTH, "g", until="end") as inbox:
            inbox.run(lambda message: seen.setdefault(message[:2], []).append(message.offset), threads=4)
        assert all(offsets == sorted(offsets) for offsets in seen.values())
        assert Counter((*place, n) for place, some in seen.items() for n in some) == Counter(stored)

    def test_x14_a_failing_message_pauses_its_partition_of_its_topic_alone(self, hub: pxrs.Hub) -> None:
        fill(hub)
        bad: list[Message] = []

        def handle(message: Message) -> None:
            if message.topic == "returns" and (not bad or message[:3] == bad[0][:3]):
                bad[:] = [message]
                raise ValueError("no")

        with hub.consumer(BOTH, "g", until="end") as inbox, pytest.raises(PartitionsPaused) as paused:
            inbox.run(handle)
        place = TopicPartition(*bad[0][:2])
        assert paused.value.partitions == (place,)
        assert f"partition returns/{place.partition} is paused" in str(paused.value)
        rows = {(row.topic, row.partition): row for row in hub.group("g").describe().partitions}
        assert [place for place, row in rows.items() if row.paused is not None] == [place]
        assert {row.lag for key, row in rows.items() if key != place} == {0}
        hub.group("g").skip("returns", place.partition)
        assert bad[0][:3] not in places(read_all(hub))
        assert hub.group("g").describe().lag == 0

    def test_dead_letters_name_the_topic_of_each_message(self, hub: pxrs.Hub) -> None:
        hub.create_topic("dead", partitions=1)
        stored = fill(hub, 5)

        def fail(message: Message) -> None:
            raise ValueError("no")

        with hub.consumer(BOTH, "g", until="end", on_error="dead-letter", dead_letters="dead") as inbox:
            inbox.run(fail)
        origins = [dict(each.headers or [])[ORIGIN_HEADER].decode() for each in hub.topic("dead").messages(0)]
        assert sorted(origins) == sorted(f"{topic}/{number} offset {offset}" for topic, number, offset in stored)

    def test_what_a_handler_raises_names_the_topic(self, hub: pxrs.Hub) -> None:
        fill(hub, 1, ["returns"])
        with (
            hub.consumer(BOTH, "g", on_error="raise", until="end") as inbox,
            pytest.raises(HandlerFailed, match="returns/"),
        ):
            inbox.run(lambda message: 1 / 0)


class TestWhatCanBeRead:
    def test_names_that_cannot_be_read_together_are_refused(self, hub: pxrs.Hub) -> None:
        for wrong, kind, told in (
            ([], InvalidTopic, "0 topics"),
            (["orders", "orders"], InvalidTopic, "'orders' is named twice"),
            (["orders", "nothing"], UnknownTopic, "nothing"),
            (["orders", 7], InvalidTopic, "topic is 7"),
            (b"orders", InvalidTopic, "topic is b'orders'"),
            ({"orders"}, InvalidTopic, "topic is {'orders'}"),
        ):
            with pytest.raises(kind, match=told):
                hub.consumer(wrong, "g")  # type: ignore[call-overload]
        assert hub.groups() == []

    def test_dead_letters_are_none_of_the_topics(self, hub: pxrs.Hub) -> None:
        with pytest.raises(InvalidGroup, match="dead_letters is the topic returns itself"):
            hub.consumer(BOTH, "g", on_error="dead-letter", dead_letters="returns")
        assert hub.groups() == []

    def test_the_two_classes_are_for_their_own_sources(self, hub: pxrs.Hub) -> None:
        from pxrs.log.joined import JoinedSource

        joined = JoinedSource([hub.topic(name).log for name in BOTH])
        with pytest.raises(InvalidGroup, match="TopicsConsumer"):
            pxrs.Consumer(joined, hub.registry, "g")
        with pytest.raises(InvalidGroup, match="a Consumer"):
            pxrs.TopicsConsumer(hub.topic("orders").log, hub.registry, "g")

    def test_a_topic_that_is_deleted_ends_the_consumer(self, hub: pxrs.Hub) -> None:
        with hub.consumer(BOTH, "g") as inbox:
            eventually(lambda: len(inbox.assignment) == 5)
            hub.delete_topic("returns")
            with pytest.raises(TopicDeleted, match="returns"):
                inbox.poll(timeout=30)

    def test_a_topic_and_a_registered_table_are_read_together(self, tmp_path: Path) -> None:
        import sqlite3

        database = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE faxes (id INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB)")
        database.executemany("INSERT INTO faxes (body) VALUES (?)", [(b"faxes %d" % n,) for n in range(9)])
        with pxrs.open(tmp_path / "data") as hub:
            hub.create_topic("orders", partitions=2)
            fill(hub, 10, ["orders"])
            hub.add_source("faxes", f"sqlite:///{tmp_path}/shop.db", table="faxes", value_column="body", partitions=3)
            for expected in ({"orders": 10, "faxes": 9}, {}):
                with hub.consumer(["orders", "faxes"], "g", until="end") as inbox:
                    assert Counter(message.topic for message in inbox) == expected
            described = hub.group("g").describe()
            assert {each.topic: (each.lag, each.is_source) for each in described.topics} == {
                "faxes": (0, True),
                "orders": (0, False),
            }
            hub.remove_source("faxes")
            hub.add_source("faxes", f"sqlite:///{tmp_path}/shop.db", table="faxes", value_column="body", partitions=4)
            with pytest.raises(SourceChanged, match="faxes with 3 partitions"):
                hub.consumer(["orders", "faxes"], "g")
        database.close()


class TestAdministration:
    def test_a_reset_of_one_topic_leaves_the_others_as_they_are(self, hub: pxrs.Hub) -> None:
        fill(hub)
        with hub.consumer(BOTH, "g", until="end") as inbox:
            assert len(list(inbox)) == 60
        assert hub.group("g").reset("earliest", "returns").keys() == {"returns"}
        assert Counter(message.topic for message in read_all(hub)) == {"returns": 30}
        assert hub.group("g").reset("earliest").keys() == {"orders", "returns"}
        assert len(read_all(hub)) == 60

    def test_a_group_that_forgets_one_topic_keeps_the_checkpoints_of_the_others(self, hub: pxrs.Hub) -> None:
        """Its members join again: they read the forgotten topic anew, and go on with the others."""
        fill(hub)
        found: list[str] = []
        with hub.consumer(BOTH, "g") as inbox:
            while len(found) < 60:
                found += [message.topic for message in inbox.poll(timeout=30)]
            inbox.commit()
            hub.group("g").delete(force=True, topic="returns")
            while len(found) < 90:
                found += [message.topic for message in inbox.poll(timeout=30)]
            assert Counter(found) == {"orders": 30, "returns": 60}
            assert inbox.poll(timeout=0) == []

    def test_a_registered_table_that_a_member_reads_beside_topics_cannot_be_removed(self, tmp_path: Path) -> None:
        import sqlite3

        with sqlite3.connect(tmp_path / "shop.db") as database:
            database.execute("CREATE TABLE faxes (id INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB)")
        database.close()
        with pxrs.open(tmp_path / "data") as hub:
            hub.create_topic("orders", partitions=2)
            hub.add_source("faxes", f"sqlite:///{tmp_path}/shop.db", table="faxes", value_column="body", partitions=1)
            with hub.consumer(["orders", "faxes"], "g"), pytest.raises(GroupActive, match="faxes is read by"):
                hub.remove_source("faxes")
            hub.remove_source("faxes")


class TestTransactions:
    def test_a_queue_transaction_writes_the_checkpoint_of_the_right_topic(self, hub: pxrs.Hub) -> None:
        fill(hub)
        hub.create_queue("mail")
        seen: set[TopicPartition] = set()
        with hub.consumer(BOTH, "g", until="end") as inbox:
            for _ in range(5):
                with hub.transaction() as tx:
                    some = inbox.poll(timeout=30)
                    place = TopicPartition(*some[0][:2])
                    tx.put("mail", f"{place.topic} {len(some)}")
                    tx.checkpoint(inbox)
                seen.add(place)
                assert {each: offset for each, offset in inbox.committed.items() if offset} == {
                    each: inbox.position[each] for each in seen
                }
        assert seen == {*ORDERS, *RETURNS}
        assert hub.group("g").describe().lag == 0

    def test_x20_rows_and_the_checkpoint_of_the_right_topic_are_one_transaction(self, tmp_path: Path) -> None:
        sqlalchemy = pytest.importorskip("sqlalchemy")
        url = f"sqlite:///{tmp_path}/registry.db"
        with pxrs.open(tmp_path / "data", registry=url) as hub:
            hub.create_topic("orders", partitions=2)
            hub.create_topic("returns", partitions=3)
            stored = fill(hub)
            engine = sqlalchemy.create_engine(url)
            with engine.begin() as db:
                db.execute(sqlalchemy.text("CREATE TABLE booked (topic TEXT, partition_number INT, at INT)"))
            insert = sqlalchemy.text("INSERT INTO booked VALUES (:t, :p, :o)")
            with hub.consumer(BOTH, "g", until="end") as inbox:
                for number, (batch, db) in enumerate(inbox.transactions(engine, 4)):
                    assert number < 10 * len(stored), "the same messages come again and again"
                    for message in batch:
                        db.execute(insert, {"t": message.topic, "p": message.partition, "o": message.offset})
            with engine.connect() as db:
                rows = [tuple(row) for row in db.execute(sqlalchemy.text("SELECT * FROM booked"))]
            assert sorted(rows) == sorted(stored)
            assert hub.group("g").describe().lag == 0
            engine.dispose()


class TestFairness:
    """A topic that is always behind does not keep back the messages of another one."""

    def test_x16_batches_larger_than_what_may_be_read_ahead_come_from_every_topic_in_turn(self, hub: pxrs.Hub) -> None:
        topics = ["left", "right"]
        for topic in topics:
            hub.create_topic(topic, partitions=1)
            with hub.producer(topic, linger_s=0) as out:
                for _ in range(4):
                    out.send(b"x" * 100).result()
        with hub.consumer(topics, "g", prefetch_bytes=1) as inbox:
            eventually(lambda: len(inbox.assignment) == 2)
            found = [message.topic for message, _ in zip(inbox, range(4), strict=False)]
        assert Counter(found) == {"left": 2, "right": 2}

    @pytest.mark.parametrize("has_latency", [False, True])
    def test_a_message_of_a_quiet_topic_comes_while_another_topic_is_read_ahead(
        self, hub: pxrs.Hub, monkeypatch: pytest.MonkeyPatch, has_latency: bool
    ) -> None:
        """has_latency: whether the busy topic is read ahead in a background thread, as a table is."""
        monkeypatch.setattr("pxrs.consumer.read_ahead.LOOK_S", 0.0)
        busy, quiet = hub.log.topic("orders"), hub.log.topic("returns")
        monkeypatch.setattr(busy, "has_latency", has_latency, raising=False)
        limit = 3_000 if has_latency else 40
        with hub.producer("orders", linger_s=0) as out, hub.producer("returns", linger_s=0) as other:
            for _ in range(60):
                out.send(b"x" * 20_000, partition=0).result()
            with hub.consumer([busy, quiet], "g", prefetch_bytes=4 << 20) as inbox:
                eventually(lambda: len(inbox.assignment) == 5)
                for count, message in enumerate(inbox):
                    if message.topic == "returns" or count == limit:
                        break
                    if count == 1:
                        other.send(b"new", partition=2).result()
                    if has_latency:  # so that the busy topic always has more to read
                        out.send(b"x" * 20_000, partition=0).result()
                assert message.topic == "returns", f"{count} messages of the busy topic came first"
