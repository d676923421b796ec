"""What the page changes: only with its token, only after a confirmation, and with a record in the audit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import pxrs
from pxrs.errors import InvalidArgument
from pxrs.testing.waiting import eventually
from pxrs.web.access import ActionToken
from pxrs.web.actions import ACTIONS
from pxrs.web.serving import WebServer
from tests.unit.web import asking
from tests.unit.web.asking import TOKEN, Answer, get, post, server


def fail(message: pxrs.Message) -> None:
    raise ValueError("a bad order")


@pytest.fixture
def hub() -> Iterator[pxrs.Hub]:
    """A topic with a partition that is paused at offset 0, and a queue with three dead letters."""
    with pxrs.open("memory:") as made:
        made.create_topic("orders", 1)
        with made.producer("orders") as out:
            for _ in range(5):
                out.send(b"x")
        consumer = made.consumer("orders", "billing")
        runs = made.consumer("orders", "idle")
        with runs:
            for _ in runs.poll(max_messages=5):
                pass
            runs.commit()
        thread = threading.Thread(target=consumer.run, args=(fail,), daemon=True)
        thread.start()
        eventually(lambda: any(row.paused for row in _rows(made)))
        consumer.close()
        thread.join()
        queue = made.create_queue("mails", pxrs.ConsumeOnce())
        queue.put_many([b"a", b"b", b"c"])
        with suppress(RuntimeError), made.transaction() as taken:
            for _ in range(3):
                taken.take("mails")
            raise RuntimeError("no")
        eventually(lambda: queue.depth().dead == 3)
        yield made


def _rows(hub: pxrs.Hub) -> tuple[pxrs.PartitionDescription, ...]:
    try:
        return hub.group("billing").describe().partitions
    except pxrs.errors.UnknownGroup:
        return ()


@pytest.fixture
def page(hub: pxrs.Hub, tmp_path: Path) -> Iterator[WebServer]:
    with server(hub, tmp_path) as made:
        yield made


GIVEN = {
    "retry": {"group": "billing", "topic": "orders", "partition": 0},
    "skip": {"group": "billing", "topic": "orders", "partition": 0, "offset": 0},
    "reset": {"group": "idle", "to": "earliest"},
    "delete-group": {"group": "idle"},
    "requeue": {"queue": "mails"},
    "purge": {"queue": "mails"},
    "delete-queue": {"queue": "mails"},
    "delete-topic": {"topic": "orders"},
}


def state(hub: pxrs.Hub) -> object:
    groups = {name: hub.group(name).describe().partitions for name in hub.groups()}
    return hub.topics(), groups, [(each.name, each.depth()) for each in hub.queues()]


def test_nothing_is_changed_without_the_token_or_the_confirmation(hub: pxrs.Hub, page: WebServer) -> None:
    assert GIVEN.keys() == ACTIONS.keys()
    before = state(hub)
    for action, given in GIVEN.items():
        plan = post(page, f"/api/actions/{action}/preview", given).json["plan"]
        confirmed = {**given, "plan": plan, "confirmed": True}
        for token in (None, "", "wrong", TOKEN[:-1], TOKEN.upper()):
            assert post(page, f"/api/actions/{action}", confirmed, token).status == 403
            assert post(page, f"/api/actions/{action}/preview", given, token).status == 403
        assert post(page, f"/api/actions/{action}", confirmed, Origin="http://evil.example").status == 403
        assert post(page, f"/api/actions/{action}", confirmed, Content_Type="text/plain").status == 415
        assert post(page, f"/api/actions/{action}", confirmed, Host="evil.example").status == 421
        for wrong in (
            {"plan": plan},
            {"plan": plan, "confirmed": 1},
            {"confirmed": True},
            {**given, "confirmed": True},
        ):
            assert post(page, f"/api/actions/{action}", wrong).status == 400
        for plan in ("", "x", [], {}, None, 1, True):
            assert post(page, f"/api/actions/{action}", {"plan": plan, "confirmed": True}).status == 400
        for method in ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"):
            headers = {"X_Pxrs_Token": TOKEN, "X_HTTP_Method_Override": "POST"}
            assert asking.ask(page, method, f"/api/actions/{action}?confirmed=true", **headers).status == 405
    assert state(hub) == before


def test_a_page_without_a_token_only_shows(hub: pxrs.Hub) -> None:
    before = state(hub)
    with server(hub) as page:
        assert get(page, "/api/session") == {"has_actions": False, "is_open": True, "has_cluster": False}
        for action, given in GIVEN.items():
            assert post(page, f"/api/actions/{action}", {**given, "confirmed": True}).status == 403
    assert state(hub) == before


def act(page: WebServer, action: str, **given: object) -> str:
    answer = asking.act(page, action, {**GIVEN[action], **given})
    assert answer.status == 200, answer
    return str(answer.json["text"])


def preview(page: WebServer, action: str, **given: object) -> Answer:
    return post(page, f"/api/actions/{action}/preview", {**GIVEN[action], **given})


def test_a_paused_partition_is_tried_again(hub: pxrs.Hub, page: WebServer) -> None:
    (row,) = get(page, "/api/groups/billing")["rows"]
    assert row["paused"]["error"] == "ValueError: a bad order"
    assert "in fail" in row["paused"]["traceback"]
    assert act(page, "retry") == "group billing retries offset 0 of orders/0"
    assert _rows(hub)[0].paused is None
    (row,) = get(page, "/api/groups/billing")["rows"]
    assert row["paused"] is None, "the next answer shows it"


def test_a_message_is_skipped_only_if_it_is_the_one_that_was_shown(hub: pxrs.Hub, page: WebServer) -> None:
    assert preview(page, "skip", offset=3).status == 400
    paused = _rows(hub)[0].paused
    assert paused is not None
    assert not paused.skip
    act(page, "skip")
    paused = _rows(hub)[0].paused
    assert paused is not None
    assert paused.skip


def test_a_reset_shows_what_would_be_repeated_or_skipped(hub: pxrs.Hub, page: WebServer) -> None:
    found = post(page, "/api/actions/reset/preview", {"group": "idle", "to": "2"}).json
    assert found["rows"] == [
        {"topic": "orders", "partition": 0, "checkpoint": 5, "offset": 2, "repeated": 3, "skipped": 0}
    ]
    assert "3 messages will be handled again, 0 messages will be skipped" in found["text"]
    act(page, "reset", to="2")
    assert hub.group("idle").describe().partitions[0].checkpoint == 2
    found = post(page, "/api/actions/reset/preview", {"group": "idle", "to": "latest"}).json
    assert (found["rows"][0]["repeated"], found["rows"][0]["skipped"]) == (0, 3)
    for wrong in ("", "tomorrow", "2026-01-31T12:00", "-1", "99"):
        assert post(page, "/api/actions/reset/preview", {"group": "idle", "to": wrong}).status in (400, 409)


def test_dead_letters_are_put_back_or_removed(hub: pxrs.Hub, page: WebServer) -> None:
    ids = [item["id"] for item in get(page, "/api/queues/mails/items?state=dead")["items"]]
    assert "RuntimeError" in get(page, "/api/queues/mails/items?state=dead")["items"][0]["error"]
    assert act(page, "requeue", ids=ids[:1]) == "1 dead letter of mails will be retried"
    assert act(page, "purge", ids=ids[1:2]) == "removed 1 dead letter of mails"
    assert (hub.queue("mails").depth().ready, hub.queue("mails").depth().dead) == (1, 1)
    assert get(page, "/api/queues/mails")["dead"] == 1
    act(page, "purge")
    assert hub.queue("mails").depth().dead == 0


def test_a_group_a_queue_and_a_topic_are_deleted(hub: pxrs.Hub, page: WebServer) -> None:
    act(page, "delete-group")
    act(page, "delete-queue")
    act(page, "delete-topic")
    assert (hub.groups(), hub.queues(), hub.topics()) == (["billing"], [], [])


def test_each_action_is_in_the_audit(hub: pxrs.Hub, page: WebServer) -> None:
    act(page, "skip")
    act(page, "retry")
    act(page, "requeue", ids=[item["id"] for item in get(page, "/api/queues/mails/items?state=dead")["items"]][:1])
    for action in ("purge", "reset", "delete-group", "delete-queue", "delete-topic"):
        act(page, action)
    wanted = ["skip", "retry", "requeue", "purge", "reset", "delete_group", "delete_queue", "delete_topic"]
    found = [event for event in hub.audit() if event.name.removeprefix("audit.") in wanted]
    assert [event.name.removeprefix("audit.") for event in found] == wanted
    assert all(event.fields["who"] for event in found)


def test_a_token_that_is_too_short_is_refused_and_none_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("abc-secret\n")
    with pytest.raises(InvalidArgument, match="at least 16") as error:
        ActionToken(file)
    assert "abc-secret" not in str(error.value)
    file.write_text(TOKEN)
    assert TOKEN not in repr(ActionToken(file))
