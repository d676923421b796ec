"""A hub that was opened with a registry and no directory: queues and groups of foreign sources, but no topics."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.cli import worker
from pxrs.cli.exits import EXIT_USAGE
from pxrs.errors import Closed, InvalidUrl, NoDirectory, UnknownGroup
from pxrs.group.records import Keys, Paused
from pxrs.hub import Hub
from pxrs.log.memory import MemoryLog
from pxrs.model import Topic
from pxrs.producer.producer import Producer
from pxrs.testing.command import Call, Result, run_here


@pytest.fixture
def registry(tmp_path: Path) -> str:
    """For tests that open it more than once. The other stores: tests/integration/test_queue_stores.py."""
    return str(tmp_path / "reg")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with pxrs.open(registry="memory:") as hub:
        yield hub


def foreign_table(messages: int = 5) -> Any:
    """Something that is a Source and no topic of a hub."""
    log = MemoryLog().create_topic(Topic("table", "table-id", 2))
    with Producer(log) as out:
        for number in range(messages):
            out.send(str(number), partition=number % 2)
    return log


def test_queues_need_a_registry_and_nothing_else(
    registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pxrs.open(registry=registry) as hub:
        hub.create_queue("mail").put("to: anna")
        hub.create_queue("sent")
        with hub.transaction() as tx:
            item = tx.take("mail", timeout=10)
            assert item is not None
            tx.put("sent", item.value)
    with pxrs.open(registry=registry) as other:
        assert [each.name for each in other.queues()] == ["mail", "sent"]
        assert other.queue("sent").depth().ready == 1
    assert list(Path().iterdir()) == [], "nothing is made beside the registry"
    assert not list(tmp_path.rglob("hub.record"))
    assert not list(tmp_path.rglob("topics"))


def test_queues_are_those_of_a_hub_with_the_same_registry(registry: str, tmp_path: Path) -> None:
    with pxrs.open(tmp_path / "data", registry) as whole, pxrs.open(registry=registry) as hub:
        whole.create_queue("mail").put("x")
        assert hub.queue("mail").depth().ready == 1
        hub.delete_queue("mail")
        assert whole.queues() == []


@pytest.mark.parametrize(
    "call",
    [
        lambda hub: hub.create_topic("t"),
        lambda hub: hub.topics(),
        lambda hub: hub.damaged_topics(),
        lambda hub: hub.topic("t"),
        lambda hub: hub.delete_topic("t"),
        lambda hub: hub.producer("t"),
        lambda hub: hub.consumer("t", "g"),
        lambda hub: hub.consumer(foreign_table(), "g", on_error="dead-letter", dead_letters="t"),
        lambda hub: hub.adopt_registry(),
    ],
)
def test_what_needs_topics_says_to_give_a_directory(hub: Hub, call: Callable[[Hub], Any]) -> None:
    with pytest.raises(NoDirectory, match=r"pxrs\.open\(DIRECTORY, registry=...\)") as refused:
        call(hub)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
    assert hub.groups() == [], "nothing was begun"


def test_groups_of_foreign_sources_are_read_shown_and_changed(hub: Hub) -> None:
    table = foreign_table()
    with hub.consumer(table, "g", until="end") as inbox:
        assert sorted(message.value for message in inbox) == [b"0", b"1", b"2", b"3", b"4"]
    assert hub.groups() == ["g"]
    group = hub.group("g", table)
    assert [(row.topic, row.checkpoint, row.lag) for row in group.describe().partitions] == [
        ("table", 3, 0),
        ("table", 2, 0),
    ]
    assert group.reset("earliest") == {"table": {0: 0, 1: 0}}
    assert hub.group("g", table).describe().lag == 5
    group.delete()
    with pytest.raises(UnknownGroup):
        hub.group("g").describe()


def test_groups_of_a_hubs_topics_are_shown_and_not_changed(registry: str, tmp_path: Path) -> None:
    """Which registry those topics belong to stands in their directory, which is not there to be asked."""
    with pxrs.open(tmp_path / "data", registry) as whole, pxrs.open(registry=registry) as hub:
        topic = whole.create_topic("t", partitions=1)
        whole.consumer("t", "g").close()
        key = Keys("g").pause(topic.id, 0)
        whole.registry.commit(put={key: Paused(0, "ValueError: no", 5.0, "anna").dump()})
        before = whole.registry.scan("groups/")
        (row,) = hub.group("g").describe().partitions
        assert (row.topic, row.checkpoint, row.lag) == (topic.id, 0, None)
        for sources in ((), (foreign_table(),)):
            group = hub.group("g", *sources)
            for change in (
                lambda group: group.delete(),
                lambda group: group.import_checkpoint(0, "t", force=True),
                lambda group: group.retry(topic.id, 0),
                lambda group: group.skip(topic.id, 0),
            ):
                with pytest.raises(NoDirectory):
                    change(group)
        with pytest.raises(NoDirectory):
            hub.group("g").reset("earliest")
        assert whole.registry.scan("groups/") == before


def test_an_unknown_group_is_unknown(hub: Hub) -> None:
    with pytest.raises(UnknownGroup):
        hub.group("nobody").describe()


def test_neither_a_directory_nor_a_registry_is_an_error() -> None:
    with pytest.raises(InvalidUrl, match="a directory, memory:, or registry="):
        pxrs.open()
    with pytest.raises(InvalidUrl, match="unknown scheme"):
        pxrs.open(registry="kafka://h")
    with pytest.raises(InvalidUrl, match=r"pxrs\.open\(registry="):
        pxrs.open("postgresql://u@h/d")


def test_a_password_is_not_shown() -> None:
    hub = pxrs.open(registry="postgresql+psycopg://me:secret@h/d?namespace=prod")
    hub.close()
    assert hub.url == "postgresql://me:***@h/d?namespace=prod"
    for call in (lambda: hub.queues(), lambda: hub.topics()):
        with pytest.raises(Closed) as refused:
            call()
        assert "secret" not in str(refused.value) + repr(hub)
    with pxrs.open(registry="postgresql://me:secret@h/d") as again, pytest.raises(NoDirectory) as missing:
        again.topics()
    assert "secret" not in str(missing.value)


# From the command line.


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """A command in this process, in an empty directory."""
    for name in ("PXRS_AT", "PXRS_REGISTRY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def call(*arguments: str) -> Result:
        return run_here(monkeypatch, capsys, arguments).unwrapped()

    return call


def test_queue_commands_need_no_directory(registry: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    at = ("--registry", registry)
    assert call("queue", "create", "mail", "--policy", "consume-once", *at).out == "created queue mail\n"
    assert call("queue", "put", "mail", "a", "b", *at).out == "put 2 items into mail\n"
    monkeypatch.setenv("PXRS_REGISTRY", registry)
    assert call("queue", "take", "mail").out.endswith(" a\n")
    assert call("queue", "list").out.split()[-4:] == ["1", "0", "0", "0"]
    for arguments in (("depth", "mail"), ("describe", "mail"), ("dead", "list", "mail"), ("dead", "retry", "mail")):
        assert call("queue", *arguments).code == 0, arguments
    assert call("queue", "dead", "purge", "mail", "--yes").code == 0
    assert call("queue", "delete", "mail", "--yes").code == 0
    assert os.listdir() == []


def test_a_queue_command_with_neither_says_what_to_give(call: Call) -> None:
    for arguments in (("queue", "list"), ("queue", "create", "q"), ("worker", "m:h", "--queue", "q")):
        result = call(*arguments)
        assert result.code == 2, arguments
        assert "Give --at data or PXRS_AT=data" in result.errors
    assert os.listdir() == []


def test_a_wrong_path_of_a_registry_is_an_error_and_leaves_nothing_behind(call: Call) -> None:
    shown = {"typo": "file:typo", "file:typo": "file:typo", "sqlite:///typo.db": "sqlite:///typo.db"}
    shown["sqlite://me:secret@h/typo"] = "sqlite://me:***@h/typo"
    for wrong, text in shown.items():
        worker = ("worker", "m:h", "--queue", "q", *(() if "secret" in wrong else ("--no-wait",)))
        for arguments in (("queue", "list"), ("queue", "put", "q", "x"), worker):
            result = call(*arguments, "--registry", wrong)
            assert (result.code, result.errors) == (
                EXIT_USAGE,
                f"there is no registry at {text}: correct --registry or PXRS_REGISTRY, or create it with "
                "`pxrs queue create` (InvalidUrl)",
            )
    assert os.listdir() == []


def test_a_wrong_path_of_a_registry_is_an_error_also_where_the_directory_is_given(call: Call) -> None:
    with pxrs.open("hub") as hub:
        hub.create_topic("orders")
    before = sorted(os.listdir()), sorted(os.listdir("hub"))
    commands = (
        ("group", "list"),
        ("group", "describe", "g"),
        ("queue", "list"),
        ("source", "list"),
        ("tail", "orders"),
        ("topic", "list"),
        ("topic", "describe", "orders"),
    )
    for wrong in ("file:typo", "sqlite:///typo.db"):
        looks = [(*command, "--at", "hub", "--registry", wrong) for command in commands]
        looks += [("registry", "scan", wrong), ("registry", "get", wrong, "groups/g")]
        for arguments in looks:
            result = call(*arguments)
            assert result.code == EXIT_USAGE, arguments
            assert result.errors.startswith(f"there is no registry at {wrong}: correct "), arguments
    assert (sorted(os.listdir()), sorted(os.listdir("hub"))) == before


def test_commands_that_begin_in_a_new_registry_make_it(call: Call) -> None:
    imports = ("group", "import-checkpoint", "g", "0", "--topic", "orders")
    for number, command in enumerate((("registry", "adopt"), imports)):
        with pxrs.open(f"hub{number}") as hub:
            hub.create_topic("orders", partitions=1)
        result = call(*command, "--at", f"hub{number}", "--registry", f"sqlite:///new{number}.db")
        assert (result.code, result.errors) == (0, ""), command
        assert os.path.isfile(f"new{number}.db")


def test_a_worker_of_a_queue_or_a_registered_source_needs_no_directory(
    registry: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    class Supervisor:
        def __init__(self, settings: Any, processes: int, start_s: float) -> None:
            started.append(settings)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(worker, "Supervisor", Supervisor)
    call("queue", "create", "q", "--registry", registry)
    assert call("worker", "m:h", "--queue", "q", "--registry", registry).code == 0
    assert [(settings.at, settings.registry, settings.queues) for settings in started] == [(None, registry, ["q"])]
    assert call("worker", "m:h", "--topic", "t", "--group", "g", "--registry", registry).code == 0
    assert (started[1].at, started[1].registry, started[1].topics) == (None, registry, ["t"])
    result = call("worker", "m:h", "--topic", "t", "--group", "g")
    assert result.code == 2
    assert "Give --at data or PXRS_AT=data" in result.errors
