"""`create_topic` and `create_queue` with `exist_ok=True`: what is there is used if its settings agree."""

from __future__ import annotations

import errno
import inspect
import pickle
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import pxrs
from pxrs import disk
from pxrs.cli.app import app
from pxrs.errors import (
    AppendFailed,
    DamagedFrame,
    InvalidQueue,
    InvalidTopic,
    LogError,
    QueueDiffers,
    QueueExists,
    TopicDiffers,
    TopicExists,
)
from pxrs.hub import Hub
from pxrs.model import QUORUMS, Topic

TOPIC: dict[str, tuple[Any, Any]] = {
    "partitions": (4, 8),
    "partitioner": ("murmur2", "xxh64"),
    "codec": ("zstd", "none"),
    "retention": (60.0, None),
    "retention_bytes": (1 << 20, None),
    "segment_bytes": (1 << 20, 64 << 20),
    "durability": ("os", "disk"),
    "keep_unread": (True, False),
    "segment_s": (30.0, None),
}
"""For each setting of a topic, a value and the default."""
QUEUE: dict[str, tuple[Any, Any]] = {
    "policy": (pxrs.ConsumeTimes(5), pxrs.AtLeastOnce()),
    "fifo": (True, False),
    "backoff": (pxrs.FixedBackoff(3), None),
}


@pytest.fixture(params=["memory:", "directory"])
def hub(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hub]:
    with pxrs.open("memory:" if request.param == "memory:" else tmp_path / "data") as hub:
        yield hub


@pytest.fixture
def hubs(tmp_path: Path) -> Iterator[tuple[Hub, Hub]]:
    """Two handles of one directory, as two processes have them."""
    with pxrs.open(tmp_path / "data") as one, pxrs.open(tmp_path / "data") as other:
        yield one, other


def arguments_of(method: Callable[..., Any]) -> set[str]:
    return inspect.signature(method).parameters.keys() - {"self", "name", "exist_ok"}


def test_every_argument_that_is_a_setting_is_tried_below() -> None:
    assert arguments_of(Hub.create_topic) == {*TOPIC, *QUORUMS}, "tests of clusters try the quorums"
    assert arguments_of(Hub.create_queue) == QUEUE.keys()


# Topics.


def test_a_topic_that_is_there_is_returned_with_its_messages(hub: Hub) -> None:
    made = hub.create_topic("orders", partitions=2, retention=60, exist_ok=True)
    with hub.producer("orders") as out:
        out.send(b"paid")
    found = hub.create_topic("orders", partitions=2, retention=timedelta(minutes=1), exist_ok=True)
    assert found.topic == made.topic
    assert found.to_arrow().num_rows == 1
    with pytest.raises(TopicExists, match="topic 'orders' already exists") as refused:
        hub.create_topic("orders", partitions=2, retention=60)
    assert not isinstance(refused.value, TopicDiffers)


@pytest.mark.parametrize("setting", TOPIC)
@pytest.mark.parametrize("is_given", [True, False])
def test_a_topic_whose_setting_differs_is_refused(hub: Hub, setting: str, is_given: bool) -> None:
    value, default = TOPIC[setting]
    there, asked = (default, value) if is_given else (value, default)
    made = hub.create_topic("orders", **{} if is_given else {setting: value})
    with pytest.raises(TopicDiffers) as refused:
        hub.create_topic("orders", **{setting: value} if is_given else {}, exist_ok=True)
    assert refused.value.differences == {setting: (there, asked)}
    assert f"{setting} is {there!r}, but {asked!r} was requested" in str(refused.value)
    assert hub.topics() == [made.topic]


def test_all_settings_that_differ_are_named_and_the_error_can_be_pickled(hub: Hub) -> None:
    hub.create_topic("orders", **{name: value for name, (value, _) in TOPIC.items()})
    with pytest.raises(TopicDiffers) as refused:
        hub.create_topic("orders", exist_ok=True)
    assert refused.value.differences == TOPIC
    copy = pickle.loads(pickle.dumps(refused.value))
    assert (copy.topic, copy.differences, str(copy)) == ("orders", TOPIC, str(refused.value))


def test_settings_that_only_a_later_version_knows_are_not_compared() -> None:
    later = Topic("orders", "1", extra={"compaction": "keys"})
    assert later.differences(Topic("orders", "2")) == {}


def test_a_topic_that_another_process_creates_meanwhile_is_compared_too(
    hubs: tuple[Hub, Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, other = hubs
    create = hub.log.create_topic

    def overtaken(topic: Topic) -> Any:
        if not any(each.name == topic.name for each in other.topics()):
            other.create_topic(topic.name, partitions=2)
        return create(topic)

    monkeypatch.setattr(hub.log, "create_topic", overtaken)
    assert hub.create_topic("same", partitions=2, exist_ok=True).id == other.topic("same").id
    with pytest.raises(TopicDiffers) as refused:
        hub.create_topic("different", partitions=4, exist_ok=True)
    assert refused.value.differences == {"partitions": (2, 4)}


def test_a_topic_that_is_deleted_meanwhile_is_created(hubs: tuple[Hub, Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    hub, other = hubs
    former = other.create_topic("orders", partitions=2).id
    look_up = hub.log.topic

    def too_late(name: str) -> Any:
        if any(topic.id == former for topic in other.topics()):
            other.delete_topic(name)
        return look_up(name)

    monkeypatch.setattr(hub.log, "topic", too_late)
    made = hub.create_topic("orders", partitions=4, exist_ok=True)
    assert made.id != former
    assert other.topic("orders").topic == made.topic


def test_a_name_that_can_neither_be_opened_nor_created_ends_the_attempts(hubs: tuple[Hub, Hub]) -> None:
    hub, _ = hubs
    hub.create_topic("other")
    Path(hub.url, "topics", "orders").write_text("a file that is no topic")
    with pytest.raises(TopicExists):
        hub.create_topic("orders", exist_ok=True)


def test_a_damaged_topic_is_not_taken_for_the_one_asked_for(hubs: tuple[Hub, Hub]) -> None:
    hub, _ = hubs
    made = hub.create_topic("orders")
    Path(hub.url, "logs", made.id, "topic.json").write_text("{}")
    with pytest.raises(DamagedFrame):
        hub.create_topic("orders", exist_ok=True)


def test_who_appends_first_makes_the_name_durable_if_the_creator_could_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tmp_path / "data" / "topics"
    sync, synced = disk.sync_folder, []

    def fails(folder: Any) -> None:
        if folder == names and (names / "orders").is_symlink():
            raise OSError(errno.EIO, "Input/output error")
        sync(folder)

    monkeypatch.setattr(disk, "sync_folder", fails)
    with pxrs.open(tmp_path / "data") as hub, pytest.raises(LogError, match="Input/output error"):
        hub.create_topic("orders", exist_ok=True)  # as if it had died here: the link is made, a power loss may take it
    with pxrs.open(tmp_path / "data") as hub:
        hub.create_topic("orders", exist_ok=True)
        with hub.producer("orders", tries_max=1) as out:
            sent = out.send(b"paid")
            with pytest.raises(AppendFailed, match="Input/output error"):
                sent.result(30)
            with pytest.raises(AppendFailed):
                out.flush()
        assert hub.topic("orders").to_arrow().num_rows == 0
        monkeypatch.setattr(disk, "sync_folder", lambda folder: (synced.append(folder), sync(folder)))
        with hub.producer("orders") as out:
            for _ in range(2):
                out.send(b"paid", partition=0)
                out.flush()
    assert synced.count(names) == 1, "by the first append, and by no other"
    assert synced[0] == names, "before anything is stored"


@pytest.mark.parametrize("acts", ["append", "create_topic"])
def test_folders_whose_maker_has_not_synced_them_are_durable_before_a_message_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, acts: str
) -> None:
    """Another process has made the hub's directory and `topics`, and has yet to sync the folders that hold them."""
    data, sync, synced = tmp_path / "data", disk.sync_folder, list[Any]()
    with monkeypatch.context() as patched:
        patched.setattr(disk, "sync_folder", lambda folder: None)
        if acts == "append":
            with pxrs.open(data) as maker:
                maker.create_topic("orders")
        else:
            (data / "topics").mkdir(parents=True)
    monkeypatch.setattr(disk, "sync_folder", lambda folder: (synced.append(folder), sync(folder))[1])
    with pxrs.open(data) as hub:
        topic = hub.create_topic("orders", exist_ok=True)
        with hub.producer("orders") as out:
            out.send(b"paid", partition=0)
            out.flush()
        assert topic.end(0) == 1
    assert {data / "topics", data, tmp_path} <= set(synced)


def test_a_hub_below_a_folder_that_may_not_be_read_takes_appends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = disk.sync_folder

    def refused(folder: Any) -> None:
        if folder == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        sync(folder)

    (tmp_path / "data").mkdir()
    monkeypatch.setattr(disk, "sync_folder", refused)
    with pxrs.open(tmp_path / "data") as hub:
        hub.create_topic("orders")
        with hub.producer("orders") as out:
            assert out.send(b"paid", partition=0).result(30) == (0, 0)


def test_threads_that_create_at_once_get_one_topic_and_one_queue(tmp_path: Path) -> None:
    count = 6
    barrier, found, errors = threading.Barrier(count), set(), []

    def create() -> None:
        try:
            with pxrs.open(tmp_path / "data") as hub:
                barrier.wait(30)
                topic = hub.create_topic("orders", partitions=2, exist_ok=True)
                queue = hub.create_queue("mail", pxrs.ConsumeOnce(), exist_ok=True)
                found.add((topic.id, queue.settings.id))
        except Exception as error:  # noqa: BLE001 - raised in the test's own thread below
            errors.append(error)

    threads = [threading.Thread(target=create) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert len(found) == 1


# Queues.


def test_a_queue_that_is_there_is_returned_with_its_items(hub: Hub) -> None:
    settings: dict[str, Any] = {"policy": pxrs.ConsumeTimes(3), "backoff": pxrs.ExponentialBackoff(first=1)}
    hub.create_queue("mail", **settings, exist_ok=True).put("to: anna")
    found = hub.create_queue("mail", **settings, exist_ok=True)
    assert found.depth().ready == 1
    with pytest.raises(QueueExists) as refused:
        hub.create_queue("mail", **settings)
    assert not isinstance(refused.value, QueueDiffers)


@pytest.mark.parametrize("setting", QUEUE)
@pytest.mark.parametrize("is_given", [True, False])
def test_a_queue_whose_setting_differs_is_refused(hub: Hub, setting: str, is_given: bool) -> None:
    value, default = QUEUE[setting]
    there, asked = (default, value) if is_given else (value, default)
    made = hub.create_queue("mail", **{} if is_given else {setting: value})
    with pytest.raises(QueueDiffers) as refused:
        hub.create_queue("mail", **{setting: value} if is_given else {}, exist_ok=True)
    assert refused.value.differences == {setting: (there, asked)}
    assert f"{setting} is {there!r}, but {asked!r} was requested" in str(refused.value)
    assert [queue.settings for queue in hub.queues()] == [made.settings]
    copy = pickle.loads(pickle.dumps(refused.value))
    assert (copy.queue, copy.differences, str(copy)) == ("mail", refused.value.differences, str(refused.value))


@pytest.mark.parametrize(
    ("there", "asked"),
    [
        ({"policy": pxrs.ConsumeTimes(1)}, {"policy": pxrs.ConsumeOnce()}),
        ({"policy": pxrs.ConsumeTimes(4)}, {"policy": pxrs.ConsumeTimes(5)}),
        ({"backoff": pxrs.FixedBackoff(1)}, {"backoff": pxrs.FixedBackoff(2)}),
        ({"backoff": pxrs.ExponentialBackoff(first=2)}, {"backoff": pxrs.ExponentialBackoff()}),
        ({"backoff": pxrs.ExponentialBackoff(factor=3)}, {"backoff": pxrs.ExponentialBackoff()}),
        ({"backoff": pxrs.ExponentialBackoff(cap=30)}, {"backoff": pxrs.ExponentialBackoff()}),
        ({"backoff": pxrs.ExponentialBackoff(jitter=0)}, {"backoff": pxrs.ExponentialBackoff()}),
    ],
)
def test_a_part_of_a_policy_or_backoff_that_differs_is_refused(there: Any, asked: Any) -> None:
    with pxrs.open("memory:") as hub:
        hub.create_queue("mail", **there)
        with pytest.raises(QueueDiffers):
            hub.create_queue("mail", **asked, exist_ok=True)
        assert hub.create_queue("mail", **there, exist_ok=True).name == "mail"


def test_a_queue_that_another_process_creates_meanwhile_is_compared_too(
    hubs: tuple[Hub, Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, other = hubs
    registry = hub.registry
    commit = registry.commit

    def overtaken(expect: Any = None, put: Any = None, **more: Any) -> Any:
        (name,) = (key.removeprefix("queues/") for key in put if key.startswith("queues/"))
        if not any(queue.name == name for queue in other.queues()):
            other.create_queue(name, fifo=True)
        return commit(expect, put, **more)

    monkeypatch.setattr(registry, "commit", overtaken)
    assert hub.create_queue("same", fifo=True, exist_ok=True).settings == other.queue("same").settings
    with pytest.raises(QueueDiffers) as refused:
        hub.create_queue("different", exist_ok=True)
    assert refused.value.differences == {"fifo": (True, False)}


def test_a_queue_that_another_process_has_deleted_is_created_although_it_is_remembered(hubs: tuple[Hub, Hub]) -> None:
    hub, other = hubs
    former = hub.create_queue("mail").settings
    assert hub.queue("mail").settings == former  # remembered from now on
    other.delete_queue("mail")
    made = hub.create_queue("mail", exist_ok=True)
    assert made.settings.id != former.id
    made.put("to: anna")
    assert other.queue("mail").depth().ready == 1


def test_exist_ok_is_true_or_false(hub: Hub) -> None:
    with pytest.raises(InvalidTopic, match="exist_ok is 'no'; it must be True or False"):
        hub.create_topic("orders", exist_ok="no")  # type: ignore[arg-type]
    with pytest.raises(InvalidQueue, match="exist_ok is 'no'; it must be True or False"):
        hub.create_queue("mail", exist_ok="no")  # type: ignore[arg-type]


# The command line.


def pxrs_says(*command: str) -> str:
    result = CliRunner().invoke(app, [*command], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_line_creates_a_topic_once(tmp_path: Path) -> None:
    create = ("topic", "create", "orders", "--at", str(tmp_path / "data"), "--partitions", "4")
    assert pxrs_says(*create, "--exist-ok") == "created orders with 4 partitions\n"
    there = "orders exists already, with 4 partitions and the same settings\n"
    assert pxrs_says(*create, "--exist-ok") == there
    with pytest.raises(TopicExists):
        pxrs_says(*create)
    with pytest.raises(TopicDiffers, match="codec is 'none', but 'lz4' was requested"):
        pxrs_says(*create, "--exist-ok", "--codec", "lz4")


def test_the_command_line_creates_a_queue_once(tmp_path: Path) -> None:
    create = ("queue", "create", "mail", "--at", str(tmp_path / "data"), "--policy", "consume-times", "--times", "5")
    assert pxrs_says(*create, "--exist-ok") == "created queue mail\n"
    assert pxrs_says(*create, "--exist-ok") == "queue mail exists already with the same settings\n"
    with pytest.raises(QueueExists):
        pxrs_says(*create)
    with pytest.raises(QueueDiffers, match="fifo is False, but True was requested"):
        pxrs_says(*create, "--exist-ok", "--fifo")
