"""Between the look and the confirmation the hub goes on: an action does what was shown, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import pxrs
from pxrs.errors import InvalidArgument
from pxrs.group.records import Checkpoint, Keys, Owner, Paused
from pxrs.testing.many_groups import add_group
from pxrs.web.actions import Plan
from pxrs.web.plans import KEPT_S, PLANS_MAX, Plans
from pxrs.web.serving import WebServer
from tests.unit.web.asking import Answer, confirm, post, server


@pytest.fixture
def hub() -> Iterator[pxrs.Hub]:
    with pxrs.open("memory:", upkeep=False) as made:
        made.create_topic("orders", 2)
        send(made, 5)
        checkpoint(made, 3)
        pause(made, 3)
        made.create_queue("mails", pxrs.ConsumeOnce())
        die(made, b"a")
        yield made


@pytest.fixture
def page(hub: pxrs.Hub, tmp_path: Path) -> Iterator[WebServer]:
    with server(hub, tmp_path) as made:
        yield made


def send(hub: pxrs.Hub, count: int) -> None:
    with hub.producer("orders") as out:
        for _ in range(count):
            out.send(b"x", partition=0)


def checkpoint(hub: pxrs.Hub, offset: int) -> None:
    """Of a group without members, at this offset of partition 0."""
    keys, id = Keys("billing"), hub.topic("orders").id
    owner, at = Owner(None, 1), Checkpoint(offset, 1.0, "m", 1)
    hub.registry.commit(put={keys.owner(id, 0): owner.dump(), keys.checkpoint(id, 0): at.dump()})


def pause(hub: pxrs.Hub, offset: int, failure: str = "f") -> None:
    paused = Paused(offset, "ValueError: no", 1.0, "m", failure=failure)
    hub.registry.commit(put={Keys("billing").pause(hub.topic("orders").id, 0): paused.dump()})


def die(hub: pxrs.Hub, value: bytes) -> None:
    hub.queue("mails").put(value)
    with suppress(RuntimeError), hub.transaction() as taken:
        assert taken.take("mails") is not None
        raise RuntimeError("no")


def again(hub: pxrs.Hub) -> None:
    """A topic and a queue of the same names as those that were shown."""
    hub.delete_topic("orders")
    hub.create_topic("orders", 2)
    send(hub, 5)
    hub.delete_queue("mails")
    hub.create_queue("mails", pxrs.ConsumeOnce())
    die(hub, b"other")


def show(page: WebServer, action: str, **given: object) -> Answer:
    shown = post(page, f"/api/actions/{action}/preview", given)
    assert shown.status == 200, shown
    return shown


def refused(page: WebServer, action: str, shown: Answer) -> str:
    answer = confirm(page, action, shown)
    assert answer.status in (400, 404, 409), answer
    return str(answer.json["error"])


def checkpoints(hub: pxrs.Hub) -> list[int | None]:
    return [row.checkpoint for row in hub.group("billing").describe().partitions]


def test_a_plan_is_done_once(hub: pxrs.Hub, page: WebServer) -> None:
    """A second click changes nothing, though there are dead letters again."""
    shown = show(page, "purge", queue="mails")
    assert confirm(page, "purge", shown).json["text"] == "removed 1 dead letter of mails"
    die(hub, b"b")
    assert "done already" in refused(page, "purge", shown)
    assert hub.queue("mails").depth().dead == 1


def test_a_plan_is_not_done_as_another_action(hub: pxrs.Hub, page: WebServer) -> None:
    assert "nothing was changed" in refused(page, "purge", show(page, "requeue", queue="mails"))
    assert hub.queue("mails").depth().dead == 1


@pytest.mark.parametrize("action", ["requeue", "purge"])
def test_dead_letters_that_came_later_are_left_alone(hub: pxrs.Hub, page: WebServer, action: str) -> None:
    shown = show(page, action, queue="mails")
    assert "1 dead letter of mails" in shown.json["text"]
    die(hub, b"later")
    assert confirm(page, action, shown).status == 200
    (left,) = hub.queue("mails").dead_letters()
    assert left.value == b"later"


@pytest.mark.parametrize(
    ("action", "given"),
    [
        ("retry", {"group": "billing", "topic": "orders", "partition": 0}),
        ("skip", {"group": "billing", "topic": "orders", "partition": 0}),
    ],
)
def test_a_decision_is_about_the_failure_that_was_shown(
    hub: pxrs.Hub, page: WebServer, action: str, given: dict[str, object]
) -> None:
    for offset, failure in ((4, "f"), (3, "another")):
        pause(hub, 3)
        shown = show(page, action, **given)
        pause(hub, offset, failure)
        assert "paused again" in refused(page, action, shown)
        assert hub.group("billing").paused("orders", 0) == Paused(offset, "ValueError: no", 1.0, "m", failure=failure)


def test_nothing_is_done_to_another_topic_or_queue_of_the_same_name(hub: pxrs.Hub, page: WebServer) -> None:
    wanted: dict[str, dict[str, object]] = {
        "delete-topic": {"topic": "orders"},
        "reset": {"group": "billing", "to": "earliest", "topic": "orders"},
        "delete-queue": {"queue": "mails"},
        "purge": {"queue": "mails"},
        "requeue": {"queue": "mails"},
    }
    shown = {action: show(page, action, **given) for action, given in wanted.items()}
    again(hub)
    before = (hub.topics(), hub.registry.scan("groups/"), hub.queue("mails").depth())
    for action, each in shown.items():
        assert "was deleted and created again" in refused(page, action, each)
    assert (hub.topics(), hub.registry.scan("groups/"), hub.queue("mails").depth()) == before


def test_a_reset_sets_the_offsets_that_were_shown(hub: pxrs.Hub, page: WebServer) -> None:
    shown = show(page, "reset", group="billing", to="latest")
    assert [row["offset"] for row in shown.json["rows"]] == [5, 0]
    send(hub, 7)  # nobody has said that these may be skipped
    assert confirm(page, "reset", shown).status == 200
    assert checkpoints(hub) == [5, 0]


def test_a_reset_leaves_out_a_deleted_topic_whose_name_is_used_again(hub: pxrs.Hub, page: WebServer) -> None:
    """The group reads the deleted one. `payments` alone is left to be reset."""
    hub.create_topic("payments", 1)
    add_group(hub.registry, "billing", [hub.topic("payments").topic])
    again(hub)
    assert {row["topic"] for row in show(page, "reset", group="billing", to="earliest").json["rows"]} == {"payments"}


@pytest.mark.parametrize(
    ("action", "given"), [("reset", {"group": "billing", "to": "earliest"}), ("delete-group", {"group": "billing"})]
)
def test_a_group_that_has_members_by_now_is_left_alone(
    hub: pxrs.Hub, page: WebServer, action: str, given: dict[str, object]
) -> None:
    shown = show(page, action, **given)
    assert "member" not in shown.json["text"]
    add_group(hub.registry, "billing", hub.topics())
    before = hub.registry.scan("groups/")
    assert "has members" in refused(page, action, shown)
    assert hub.registry.scan("groups/") == before
    assert confirm(page, action, show(page, action, **given)).status == 200, "the members are shown now"


def test_a_plan_is_kept_for_a_while_and_not_too_many_are() -> None:
    now = [0.0]
    plans, plan = Plans(lambda: now[0]), Plan("", lambda: "")
    first = plans.keep("purge", "me", plan)
    with pytest.raises(InvalidArgument, match="was not previewed here"):
        plans.take(first, "purge", "another")
    now[0] = KEPT_S + 1
    with pytest.raises(InvalidArgument, match="more than 10 minutes old"):
        plans.take(first, "purge", "me")
    ids = [plans.keep("purge", None, plan) for _ in range(PLANS_MAX + 1)]
    with pytest.raises(InvalidArgument):
        plans.take(ids[0], "purge", None)
    assert plans.take(ids[1], "purge", None) is plan
