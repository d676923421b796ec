"""Every way to change a hub as an administrator leaves a line in `_audit`: all commands, methods, calls of the server
and actions of the page are listed here, with the line that each leaves. A new one has to be added."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from typer.main import get_command

import pxrs
from pxrs import ConsumeTimes, FixedBackoff, Message
from pxrs.cli.app import app
from pxrs.errors import GroupError, OutcomeUnknown, PartitionsPaused, RegistryUnavailable
from pxrs.events.names import KINDS
from pxrs.group.admin import GroupHandle
from pxrs.hub import Hub
from pxrs.queue.handle import DeadLetters, QueueHandle
from pxrs.server.calls import CALLS, WATCHING
from pxrs.topics import TopicHandle
from pxrs.web.actions import ACTIONS

METHODS: Final = {
    **{
        f"Hub.{name}": name
        for name in (
            *("create_topic", "alter_topic", "copy_topic", "delete_topic", "create_queue", "alter_queue"),
            *("delete_queue", "add_source", "remove_source", "adopt_registry"),
        )
    },
    "Hub.create_described": "create_topic",
    "Hub.alter_described": "alter_topic",
    "TopicHandle.retain": "retain",
    "GroupHandle.delete": "delete_group",
    "GroupHandle.import_checkpoint": "import_checkpoint",
    "GroupHandle.reset": "reset",
    "GroupHandle.retry": "retry",
    "GroupHandle.skip": "skip",
    "DeadLetters.purge": "purge",
    "DeadLetters.retry": "requeue",
}
"""The methods that administrators change a hub with, and the action that each records."""
OTHER_METHODS: Final = {
    "Hub": "audit check_registry consumer damaged_topics events group groups join_registry producer queue queues "
    "readable record_audit run_upkeep source sources start_upkeep topic topics transaction upkeep",
    "TopicHandle": "batches bounds end messages offset_at read retention_problem start to_arrow wait",
    "GroupHandle": "describe described paused preview_reset",
    "QueueHandle": "dead_letters depth peek put put_many",
    "DeadLetters": "list",
}
"""Those that read, send or take. `run_upkeep` records `upkeep.round`."""
COMMANDS: Final = {
    "backup": "backup",
    "check": "repair",
    "cluster abandon": "abandon_nodes",
    "cluster forget": "forget_node",
    "cluster reinstate": "reinstate_node",
    "cluster retire": "retire_node",
    "group delete": "delete_group",
    "group import-checkpoint": "import_checkpoint",
    "group reset": "reset",
    "group retry": "retry",
    "group skip": "skip",
    "queue alter": "alter_queue",
    "queue create": "create_queue",
    "queue dead purge": "purge",
    "queue dead retry": "requeue",
    "queue delete": "delete_queue",
    "registry adopt": "adopt_registry",
    "restore": "restore",
    "source add": "add_source",
    "source remove": "remove_source",
    "topic alter": "alter_topic",
    "topic copy": "copy_topic",
    "topic create": "create_topic",
    "topic delete": "delete_topic",
}
OTHER_COMMANDS: Final = {
    *("cluster up", "cluster status", "cluster demo"),
    *(
        "broker",
        "storage",
        "audit",
        "demo",
        "events",
        "group describe",
        "group list",
        "metrics",
        "new",
        "ping",
        "pipeline run",
        "queue dead list",
    ),
    *("queue depth", "queue describe", "queue list", "queue put", "queue take", "registry ddl", "registry get"),
    *("registry scan", "send", "serve", "source describe", "source list", "tail", "top", "topic describe"),
    *("topic list", "upkeep status", "web", "worker"),
    *(
        "token create",
        "token list",
        "token revoke",
    ),  # they change a file of the server, and open no hub: docs/events.md
}
SERVER: Final = {
    "log.alter_topic": "alter_topic",
    "log.create_topic": "create_topic",
    "log.delete_topic": "delete_topic",
    "topic.trim": "retain",
}
OTHER_CALLS: Final = {
    *("events.record", "hub.identity", "log.damaged_topics", "log.topic", "log.topics", "server.ping"),
    *("capability.create", "capability.end"),  # for the executors of one query
    *("registry.attach", "registry.end", "registry.get", "registry.lease", "registry.renew", "registry.scan"),
    *("registry.commit", "registry.sql"),  # the client's hub records what it does by them
    *("staging.announce", "staging.changed_at", "staging.check_writable", "staging.clear", "staging.feeds"),
    *("staging.forget_query", "staging.forget_topic", "staging.keep_topic", "staging.make_durable", "staging.publish"),
    *("staging.remove", "staging.sweep", "staging.topics"),
    *("topic.bounds", "topic.check_writable", "topic.offset_at", "topic.owners"),
    *("topic.plan_retention",),
    *("topic.retention_problem", *WATCHING),
}
PAGE: Final = {
    "retry": "retry",
    "skip": "skip",
    "reset": "reset",
    "delete-group": "delete_group",
    "requeue": "requeue",
    "purge": "purge",
    "delete-queue": "delete_queue",
    "delete-topic": "delete_topic",
}
ELSEWHERE: Final = {"backup", "restore", "repair", "act_on_page", "cut_short"}
"""Recorded by the commands and the page alone, or after an error."""


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """The names of all commands. Typer has a copy of Click, so that no class of Click can be asked for."""
    if not hasattr(command, "list_commands"):
        yield " ".join(path)
        return
    context = command.make_context(" ".join(path), [], resilient_parsing=True)
    for name in command.list_commands(context):
        yield from commands(command.get_command(context, name), (*path, name))


def test_every_command_method_call_and_action_that_changes_a_hub_is_listed_with_what_it_records() -> None:
    classes = (Hub, TopicHandle, GroupHandle, QueueHandle, DeadLetters)
    public = {
        f"{each.__name__}.{name}"
        for each in classes
        for name, value in vars(each).items()
        if callable(value) and not name.startswith("_")
    }
    others = {f"{each}.{name}" for each, names in OTHER_METHODS.items() for name in names.split()}
    assert public == METHODS.keys() | others
    assert {*commands(get_command(app))} == COMMANDS.keys() | OTHER_COMMANDS
    assert {*CALLS, *WATCHING} == SERVER.keys() | OTHER_CALLS
    assert ACTIONS.keys() == PAGE.keys()
    recorded = {*METHODS.values(), *COMMANDS.values(), *SERVER.values(), *PAGE.values()} | ELSEWHERE
    assert recorded == {name.removeprefix("audit.") for name in KINDS if name.startswith("audit.")}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with pxrs.open(tmp_path / "hub", upkeep=False) as hub:
        hub.create_topic("t", partitions=1, retention_bytes=1, segment_bytes=4096)
        with hub.producer("t") as out:
            out.send("x")
        yield hub


def fail(message: Message) -> None:
    raise ValueError("no")


def pause(hub: Hub) -> None:
    with hub.consumer("t", "g", until="end") as inbox, pytest.raises(PartitionsPaused):
        inbox.run(fail)


def add_dead_letter(hub: Hub) -> DeadLetters:
    queue = hub.queue("q")
    queue.put("a")
    with hub.transaction() as tx:
        tx.take(queue)
        tx.rollback(ValueError("no"))
    return queue.dead_letters()


def test_v8_every_method_that_changes_a_hub_leaves_one_line_with_who_and_those_that_change_nothing_none(
    hub: Hub, tmp_path: Path
) -> None:
    with sqlite3.connect(tmp_path / "shop.db") as shop:
        shop.execute("CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, account TEXT)")
    shop.close()
    url = f"sqlite:///{tmp_path}/shop.db"
    source: dict[str, Any] = {"url": url, "table": "events", "value_column": "account"}
    group, last = hub.group("g"), list(hub.audit())
    assert [each.name for each in last] == ["audit.create_topic"]

    def check(method: str, act: Callable[[], object], *, is_recorded: bool = True) -> None:
        before = len(list(hub.audit()))
        act()
        new = list(hub.audit())[before:]
        assert [each.name for each in new] == ([f"audit.{METHODS[method]}"] if is_recorded else []), method
        assert all("@" in str(each.fields["who"]) for each in new)

    check("Hub.create_topic", lambda: hub.create_topic("u", partitions=1))
    check("Hub.create_topic", lambda: hub.create_topic("u", partitions=1, exist_ok=True), is_recorded=False)
    check("Hub.alter_topic", lambda: hub.alter_topic("u", retention=60))
    check("Hub.alter_topic", lambda: hub.alter_topic("u", retention=60), is_recorded=False)
    check("Hub.copy_topic", lambda: hub.copy_topic("t", "u"))
    check("Hub.delete_topic", lambda: hub.delete_topic("u"))
    check("Hub.create_queue", lambda: hub.create_queue("q", ConsumeTimes(1)))
    check("Hub.create_queue", lambda: hub.create_queue("q", ConsumeTimes(1), exist_ok=True), is_recorded=False)
    check("Hub.alter_queue", lambda: hub.alter_queue("q", backoff=FixedBackoff(1)))
    check("Hub.alter_queue", lambda: hub.alter_queue("q", backoff=FixedBackoff(1)), is_recorded=False)
    letters = add_dead_letter(hub)
    check("DeadLetters.retry", letters.retry)
    check("DeadLetters.purge", add_dead_letter(hub).purge)
    check("Hub.delete_queue", lambda: hub.delete_queue("q"))
    check("Hub.add_source", lambda: hub.add_source("events", **source))
    check("Hub.add_source", lambda: hub.add_source("events", **source, exist_ok=True), is_recorded=False)
    check("Hub.remove_source", lambda: hub.remove_source("events"))
    check("GroupHandle.import_checkpoint", lambda: group.import_checkpoint(0, "t"))
    check("GroupHandle.reset", lambda: group.reset("earliest"))
    pause(hub)
    check("GroupHandle.retry", lambda: group.retry("t", 0))
    pause(hub)
    check("GroupHandle.skip", lambda: group.skip("t", 0))
    check("GroupHandle.delete", group.delete)
    check("TopicHandle.retain", hub.topic("t").retain, is_recorded=False)
    with hub.producer("t") as out:
        for _ in range(5):
            out.send(b"x" * 5_000)
            out.flush()
    check("TopicHandle.retain", hub.topic("t").retain)
    check("Hub.adopt_registry", hub.adopt_registry)


def cut_short(hub: Hub, act: Callable[[], object]) -> tuple[object, ...]:
    """What the last line of the audit says after this has failed."""
    with pytest.raises((OutcomeUnknown, RegistryUnavailable, GroupError)):
        act()
    last = list(hub.audit())[-1]
    assert last.name == "audit.cut_short"
    return last.fields["action"], last.fields["error_type"]


def test_v8_an_action_that_may_have_been_done_in_part_leaves_a_line_too(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply to a commit is lost, or a later commit of several fails."""
    group, registry = hub.group("g"), hub.parts.registry.get()
    hub.create_queue("q", ConsumeTimes(1))
    group.import_checkpoint(0, "t")
    letters = add_dead_letter(hub)
    commit = registry.commit

    def lost(*arguments: Any, **options: Any) -> dict[str, int]:
        commit(*arguments, **options)
        raise OutcomeUnknown("the reply was lost")

    acts: dict[str, Callable[[], object]] = {
        "reset": lambda: group.reset("latest"),
        "purge": letters.purge,
        "create_queue": lambda: hub.create_queue("r"),
        "alter_queue": lambda: hub.alter_queue("q", backoff=FixedBackoff(1)),
        "delete_group": group.delete,
        "delete_queue": lambda: hub.delete_queue("q"),
    }
    for name, act in acts.items():
        with monkeypatch.context() as patched:
            patched.setattr(registry, "commit", lost)
            assert cut_short(hub, act) == (name, "OutcomeUnknown")
    assert [each.name for each in hub.queues()] == ["r"]  # all of it was done
