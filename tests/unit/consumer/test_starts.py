"""Where a group begins, what retention took before that, and how much a consumer reads ahead."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
import sqlalchemy

from pxrs.errors import (
    CheckpointOutOfRange,
    InvalidGroup,
)
from pxrs.group.records import Checkpoint, Keys
from pxrs.hub import Hub
from pxrs.sources import sql_table
from tests.unit.consumer.reading import (
    BOUND_S,
    SOON_S,
    checkpoint,
    count_reads,
    create,
    in_time,
    members,
    offsets,
    polled,
    send,
    settle,
    take,
)


@pytest.mark.parametrize("leaves", [True, False])
def test_g6_latest_is_pinned_when_the_group_begins(hub: Hub, leaves: bool) -> None:
    create(hub, count=5)
    first = hub.consumer("t", "g", start="latest")
    if leaves:
        first.close()
    send(hub, {0: 3})
    if leaves:
        first = hub.consumer("t", "g", start="latest")
    assert offsets(polled(first, 3)) == [5, 6, 7]


def test_g6_a_group_that_has_begun_keeps_its_start(hub: Hub) -> None:
    create(hub, count=5)
    hub.consumer("t", "g", start="latest").close()
    assert checkpoint(hub) == 5
    with hub.consumer("t", "g", start="earliest", until="end") as inbox:
        assert in_time(lambda: list(inbox)) == []


def test_g6_a_group_can_start_at_a_time(hub: Hub) -> None:
    create(hub)
    with hub.producer("t") as out:
        for second in range(10):
            out.send(b"%d" % second, None, None, second * 1_000_000)
    with hub.consumer("t", "g", start=datetime(1970, 1, 1, 0, 0, 6, tzinfo=UTC)) as inbox:
        assert offsets(polled(inbox, 4)) == [6, 7, 8, 9]


def test_a_start_without_a_time_zone_is_refused_and_leaves_no_member_behind(hub: Hub) -> None:
    create(hub, partitions=2, count=1)
    with pytest.raises(InvalidGroup, match="time zone"):
        hub.consumer("t", "g", start=datetime(2020, 1, 1))
    assert members(hub) == []
    with hub.consumer("t", "g") as inbox:
        settle(inbox, partitions=2)


def test_a_member_that_cannot_begin_leaves_nothing_behind(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    create(hub, partitions=2, count=1)
    monkeypatch.setattr(hub.log.topic("t"), "start", lambda partition: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        hub.consumer("t", "g")
    assert members(hub) == []


def trimmed(hub: Hub) -> None:
    """A group with its checkpoint at 2 of a topic that begins at 10."""
    hub.create_topic("t", partitions=1, retention_bytes=15_000)
    send(hub, {0: 10}, size=1_000)
    with hub.consumer("t", "g") as inbox:
        inbox.poll(2, timeout=BOUND_S)
        inbox.commit()
    send(hub, {0: 10}, size=1_000)
    hub.topic("t").retain()
    assert (checkpoint(hub), hub.topic("t").start(0)) == (2, 10)


def test_what_retention_took_is_an_error_by_default(hub: Hub) -> None:
    trimmed(hub)
    with hub.consumer("t", "g") as inbox, pytest.raises(CheckpointOutOfRange, match="on_trimmed='skip'"):
        in_time(lambda: next(iter(inbox)))
    assert checkpoint(hub) == 2


def test_what_retention_took_can_be_skipped_and_is_counted(hub: Hub) -> None:
    trimmed(hub)
    with hub.consumer("t", "g", on_trimmed="skip", until="end") as inbox:
        assert offsets(in_time(lambda: list(inbox))) == list(range(10, 20))
        assert inbox.skipped == 8
    assert checkpoint(hub) == 20


def test_x22_skipping_what_retention_took_acknowledges_nothing_before_it(hub: Hub) -> None:
    hub.create_topic("t", partitions=1, retention_bytes=15_000)
    send(hub, {0: 4}, size=1_000)
    with hub.consumer("t", "g", ack="manual", on_trimmed="skip") as inbox:
        first = in_time(lambda: inbox.poll(4))
        send(hub, {0: 6}, size=1_000)
        send(hub, {0: 10}, size=1_000)
        hub.topic("t").retain()
        assert hub.topic("t").start(0) == 10
        second = in_time(lambda: inbox.poll(1))
        assert (offsets(second), inbox.skipped) == ([10], 6)
        inbox.commit()
        assert checkpoint(hub) == 0, "nothing is acknowledged yet"
        for message in first:
            inbox.ack(message)
        inbox.commit()
        assert checkpoint(hub) == 10


@pytest.mark.parametrize("until", [None, "end"])
def test_g7_a_checkpoint_beyond_the_end_is_an_error(hub: Hub, until: str | None) -> None:
    create(hub, count=5)
    key = Keys("g").checkpoint(hub.topic("t").id, 0)
    hub.registry.commit(put={key: Checkpoint(50).dump()})
    with hub.consumer("t", "g", until=until) as inbox, pytest.raises(CheckpointOutOfRange, match="50"):
        in_time(lambda: list(inbox))
    assert checkpoint(hub) == 50


def test_g7_until_end_accepts_a_checkpoint_whose_rows_were_removed_from_the_table(hub: Hub, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/orders.db"
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as db:
        db.execute(sqlalchemy.text("CREATE TABLE orders (id INTEGER PRIMARY KEY AUTOINCREMENT, body TEXT)"))
        db.execute(sqlalchemy.text("INSERT INTO orders (body) VALUES ('a'), ('b'), ('c')"))
    with sql_table(url, "orders", value_column="body", partitions=1, poll_s=SOON_S) as orders:
        with hub.consumer(orders, "g", until="end") as inbox:
            assert offsets(in_time(lambda: list(inbox))) == [1, 2, 3]
        with engine.begin() as db:
            db.execute(sqlalchemy.text("DELETE FROM orders WHERE id > 1"))
    with sql_table(url, "orders", value_column="body", partitions=1, poll_s=SOON_S) as orders:
        with hub.consumer(orders, "g", until="end") as inbox:
            assert in_time(lambda: list(inbox)) == []
        hub.registry.commit(put={Keys("g").checkpoint(orders.id, 0): Checkpoint(50).dump()})
        with hub.consumer(orders, "g", until="end") as inbox, pytest.raises(CheckpointOutOfRange, match="50"):
            in_time(lambda: list(inbox))
    engine.dispose()


# Bounds and independence.


def test_x16_reading_ahead_is_bounded_for_all_partitions_together(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.create_topic("t", partitions=4)
    large, bound, rows = 10_000, 100_000, 40
    for partition in range(4):
        for _ in range(rows):  # a batch for each
            with hub.producer("t") as out:
                out.send_batch(pa.table({"value": [b"x" * large], "partition": pa.array([partition], pa.int32())}))
    with hub.consumer("t", "g", prefetch_bytes=bound) as inbox:
        settle(inbox, partitions=4)
        reads = count_reads(inbox, monkeypatch, inbox._read_ahead.bytes_ahead)
        most = 0
        messages = iter(inbox)
        for _ in range(4 * rows):
            take(messages, 1)
            most = max(most, inbox._read_ahead.bytes_ahead())
    assert 0 < most <= bound
    assert max(reads) <= bound + 2 * large


def test_x16_a_consumer_that_does_not_ask_reads_nothing(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    create(hub, count=5)
    with hub.consumer("t", "g", commit_interval=SOON_S) as inbox:
        reads = count_reads(inbox, monkeypatch)
        settle(inbox, partitions=1)
        assert reads == []


def test_x3_groups_are_independent(hub: Hub) -> None:
    create(hub, partitions=2, count=5)
    with hub.consumer("t", "one") as one, hub.consumer("t", "two") as two:
        assert len(polled(one, 10)) == len(polled(two, 10)) == 10
        assert one.assignment == two.assignment == [0, 1]
        one.commit()
        assert [checkpoint(hub, p, "one") for p in range(2)] == [5, 5]
        assert [checkpoint(hub, p, "two") for p in range(2)] != [5, 5]
