"""The hub: topics, producers and reading, by address."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import pxrs
from pxrs.errors import (
    AppendFailed,
    Closed,
    InvalidTopic,
    InvalidUrl,
    OffsetOutOfRange,
    OffsetTrimmed,
    TopicExists,
    UnknownTopic,
    UsedAfterFork,
)
from pxrs.hub import Hub
from pxrs.testing.waiting import eventually


@pytest.fixture(params=["memory:", "directory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory:" else str(tmp_path / "data")


@pytest.fixture
def hub(url: str) -> Any:
    with pxrs.open(url) as hub:
        yield hub


def test_what_was_sent_is_read(hub: Hub) -> None:
    hub.create_topic("orders", partitions=2)
    with hub.producer("orders") as out:
        out.send("paid", key="account-7", headers=[("trace", b"1")], timestamp=5)
        partition, offset = out.send(b"shipped", key=b"account-7", timestamp=9).result(10)
    topic = hub.topic("orders")
    messages = list(topic.messages(partition))
    assert messages == [
        ("orders", partition, 0, b"account-7", b"paid", 5, [("trace", b"1")], 0),
        ("orders", partition, 1, b"account-7", b"shipped", 9, None, 0),
    ]
    assert offset == 1
    assert list(topic.messages(partition, 1)) == messages[1:]
    assert [batch.base_offset for batch in topic.read(partition, 1, 1 << 20)] == [1]
    assert (topic.start(partition), topic.end(partition), topic.offset_at(partition, 6)) == (0, 2, 1)
    with pytest.raises(OffsetOutOfRange):
        list(topic.messages(partition, 3))


def test_a_topic_is_a_table(hub: Hub) -> None:
    topic = hub.create_topic("orders", partitions=3)
    assert topic.to_arrow().num_rows == 0
    sent = pa.table({"key": [f"k{i % 5}" for i in range(30)], "value": [str(i) for i in range(30)]})
    with hub.producer("orders", batch_rows=4) as out:
        out.send_batch(sent)
    table = topic.to_arrow()
    assert table.column_names == ["partition", "offset", "key", "value", "timestamp", "headers"]
    assert sorted(table.column("value").to_pylist()) == sorted(b"%d" % i for i in range(30))
    assert len(set(zip(*(table.column(name).to_pylist() for name in ("partition", "offset")), strict=True))) == 30
    part = max(range(3), key=topic.end)
    assert topic.end(part) >= 10
    alone = topic.to_arrow(part)
    assert alone.column("offset").to_pylist() == list(range(topic.end(part)))
    some = topic.to_arrow(part, start=3, end=6)
    assert some.column("value").to_pylist() == alone.column("value").to_pylist()[3:6]
    assert topic.to_arrow(part, start=5, end=5).num_rows == 0
    assert topic.to_arrow(end=1).num_rows == sum(topic.end(p) > 0 for p in range(3))


def test_nothing_is_made_by_asking(hub: Hub, url: str) -> None:
    for ask in (hub.topic, hub.producer, hub.delete_topic):
        with pytest.raises(UnknownTopic):
            ask("orders")
    assert hub.topics() == []
    assert not Path(url).exists()


def test_topics_are_made_with_their_settings_and_deleted(hub: Hub) -> None:
    hub.create_topic(
        "orders",
        partitions=2,
        partitioner="murmur2",
        codec="zstd",
        retention=timedelta(days=1),
        retention_bytes=1 << 30,
        segment_bytes=1 << 20,
    )
    hub.create_topic("a", retention=5)
    first, second = hub.topics()
    assert (first.name, first.partitions, first.retention_s) == ("a", 8, 5)
    assert (second.partitioner, second.codec, second.retention_s) == ("murmur2", "zstd", 86_400.0)
    assert (second.retention_bytes, second.segment_bytes) == (1 << 30, 1 << 20)
    with pytest.raises(TopicExists):
        hub.create_topic("orders")
    hub.delete_topic("orders")
    assert hub.create_topic("orders").id != second.id


@pytest.mark.parametrize(
    "bad",
    [
        {"partitions": 0},
        {"partitions": 2.5},
        {"partitioner": "crc"},
        {"codec": "rar"},
        {"retention": 0},
        {"name": "../x"},
    ],
)
def test_a_bad_setting_makes_nothing(hub: Hub, bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidTopic):
        hub.create_topic(**{"name": "orders", **bad})
    assert hub.topics() == []


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "redis://h",
        "localhost:9092",
        "kafka:1234",
        "etcd://h:2379",
        "postgresql://u@h/d",
        "memory:x",
        "data?a=1",
        "file://h/d",
    ],
)
def test_a_bad_address_is_an_error_at_once(bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidUrl):
        pxrs.open(bad)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_registry_address_is_an_error_at_once() -> None:
    for bad in ("redis://h", "localhost:2379", ""):
        with pytest.raises(InvalidUrl):
            pxrs.open("memory:", registry=bad)


def test_a_password_is_not_shown() -> None:
    with pytest.raises(InvalidUrl) as refused:
        pxrs.open("postgresql://u:secret@h/d")
    assert "secret" not in str(refused.value)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(InvalidUrl):
        pxrs.open(tmp_path / "f")


def test_a_directory_is_found_again(tmp_path: Path) -> None:
    with pxrs.open(tmp_path / "data") as hub:
        hub.create_topic("orders", partitions=1)
        hub.producer("orders", linger_s=60).send(b"a")  # sent by the hub's close
    with pxrs.open(f"file:{tmp_path}/data") as hub:
        assert [message.value for message in hub.topic("orders").messages(0)] == [b"a"]


def test_the_registry_is_opened_when_it_is_needed(tmp_path: Path) -> None:
    with pxrs.open(tmp_path / "data") as hub:
        assert not (tmp_path / "data").exists()
        hub.registry.commit(put={"a": b"1"})
        assert hub.registry is hub.registry
        assert (tmp_path / "data" / "registry").is_dir()
        hub.create_topic("registry")
    with pxrs.open(tmp_path / "other", registry=tmp_path / "data" / "registry") as hub:
        entry = hub.registry.get("a")
        assert entry is not None
        assert entry.value == b"1"
    with pxrs.open("memory:") as hub:
        assert hub.registry.get("a") is None


def test_a_closed_hub_refuses_and_has_closed_all_it_gave(hub: Hub) -> None:
    hub.create_topic("orders", partitions=1)
    out, topic, registry = hub.producer("orders"), hub.topic("orders"), hub.registry
    receipt = out.send(b"a")
    hub.close()
    hub.close()
    assert receipt.result(0) == (0, 0)
    for use in (
        hub.topics,
        lambda: hub.topic("orders"),
        lambda: hub.producer("orders"),
        lambda: hub.create_topic("x"),
        lambda: hub.registry,
        lambda: out.send(b"a"),
        lambda: topic.end(0),
        lambda: registry.get("a"),
    ):
        with pytest.raises(Closed):
            use()


def test_consumers_of_a_hub_are_closed_at_the_same_time(hub: Hub) -> None:
    """Each of them may wait for the registry's whole `timeout`."""
    hub.create_topic("orders", partitions=1)
    together = threading.Barrier(3, timeout=30)
    consumers = [hub.consumer("orders", f"g{i}", on_revoked=lambda partitions: together.wait() and None) for i in "abc"]
    for each in consumers:
        eventually(lambda each=each: each.assignment)
    hub.close()  # an error of a callback is raised
    assert not together.broken


def test_a_hub_that_a_callback_closes_does_not_wait_for_that_callback(hub: Hub) -> None:
    hub.create_topic("orders", partitions=1)
    made, closed = threading.Event(), threading.Event()

    def close(partitions: object) -> None:
        assert made.wait(30)
        hub.close()
        closed.set()

    consumers = [hub.consumer("orders", name, on_assigned=close if name == "a" else None) for name in "abc"]
    made.set()
    assert closed.wait(30)
    for each in consumers:
        with pytest.raises(Closed):
            each.poll(timeout=0)


def test_an_error_of_a_producer_is_raised_when_all_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pxrs.open("memory:")
    hub.create_topic("orders")
    out, registry = hub.producer("orders", linger_s=60, tries_max=1), hub.registry

    def fail(appends: object) -> list[int]:
        raise AppendFailed("disk full")

    monkeypatch.setattr(out._log, "append", fail)
    out.send(b"a")
    with pytest.raises(AppendFailed, match="disk full"):
        hub.close()
    with pytest.raises(Closed):
        registry.get("a")


def test_r11_a_child_is_refused(hub: Hub) -> None:
    child = os.fork()
    if child == 0:
        try:
            hub.topics()
        except UsedAfterFork:
            hub.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize(
    "options",
    [
        {"partitions": True},
        {"partitions": 2.0},
        {"retention": float("inf")},
        {"retention": float("nan")},
        {"retention": "7d"},
        {"retention_bytes": "x"},
        {"retention_bytes": 1.5},
        {"segment_bytes": "64M"},
    ],
)
def test_a_setting_of_a_topic_that_is_none_is_refused(options: dict[str, Any]) -> None:
    with pxrs.open("memory:") as hub, pytest.raises(InvalidTopic):
        hub.create_topic("t", **options)


def test_durations_may_be_timedeltas() -> None:
    with pxrs.open("memory:") as hub:
        topic = hub.create_topic("t", partitions=1, retention=timedelta(days=1))
        with hub.producer("t", linger_s=timedelta(seconds=60)) as out:
            receipt = out.send(b"a")
            with pytest.raises(TimeoutError):
                receipt.result(timedelta(milliseconds=1))
            assert topic.wait({0: 0}, timedelta(milliseconds=1)) == set()
            out.flush()
            assert receipt.result(timedelta(seconds=9)) == (0, 0)
            table = out.send_batch(pa.table({"value": [b"b"]}))
            assert [stored.offset for stored in table.result(timedelta(seconds=9))] == [1]


def test_a_table_of_all_there_is_goes_on_where_retention_has_been(monkeypatch: pytest.MonkeyPatch) -> None:
    with pxrs.open("memory:") as hub:
        topic = hub.create_topic("t", partitions=1)
        with hub.producer("t", linger_s=0) as out:
            for number in range(4):
                out.send(b"%d" % number).result()
        start = topic.log.start(0)
        topic.log._stored[0].drop(2)  # type: ignore[attr-defined]
        monkeypatch.setattr(topic.log, "start", lambda partition: start)  # as it was a moment before
        assert topic.to_arrow()["value"].to_pylist() == [b"2", b"3"]
        with pytest.raises(OffsetTrimmed):
            topic.to_arrow(start=1)


def test_a_hub_knows_the_options_that_name_it_on_the_command_line(tmp_path: Path) -> None:
    data, other = str(tmp_path / "data"), f"sqlite:///{tmp_path}/other.db"
    hidden = "postgresql://me:secret@db/d?namespace=shop"
    for url, registry, place in (
        ("memory:", None, ()),
        (data, None, ("--at", data)),
        (data, f"{data}/registry", ("--at", data)),
        (data, other, ("--at", data, "--registry", other)),
        (data, hidden, ("--at", data, "--registry", "postgresql://me:***@db/d?namespace=shop")),
        (None, other, ("--registry", other)),
    ):
        with pxrs.open(url, registry) as hub:
            assert hub.parts.place == place, (url, registry)
