"""The page of `pxrs serve --web`: what the tokens of the server permit, and no more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import pxrs
from pxrs.server.auth import tokens
from pxrs.server.auth.gate import Gate
from pxrs.server.auth.names import HubNames
from pxrs.web.access import ServerTokens
from pxrs.web.serving import WebServer
from tests.unit.web.asking import act, ask, confirm, post


@pytest.fixture
def hub() -> Iterator[pxrs.Hub]:
    with pxrs.open("memory:") as made:
        made.create_topic("orders", 1)
        made.create_queue("mails").put(b"x")
        yield made


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "tokens")


def token(file: str, name: str, *grants: str) -> str:
    _, secret = tokens.create(file, name, grants, now=time.time())
    assert secret is not None
    return secret


def test_reading_needs_a_token_that_may_read_the_hub_and_acting_one_that_may_administer_it(
    hub: pxrs.Hub, file: str
) -> None:
    admin, reader = token(file, "admin", "hub=admin"), token(file, "reader", "hub=read")
    second = token(file, "second", "hub=admin")
    limited = token(file, "limited", "topic:orders=read")
    access = ServerTokens(Gate(file, HubNames(hub.topics, hub.registry.get)))
    with WebServer(hub, "127.0.0.1:0", access) as page:
        paths = (
            "overview",
            "queries",
            "cluster",
            "topics/orders",
            "topics/orders/messages",
            "queues/mails",
            "queues/mails/items",
        )
        for path in paths:
            assert ask(page, "GET", f"/api/{path}").status == 401
            assert ask(page, "GET", f"/api/{path}", X_Pxrs_Token="pxrs-wrong").status == 401
            assert ask(page, "GET", f"/api/{path}", X_Pxrs_Token=limited).status == 403
            assert ask(page, "GET", f"/api/{path}", X_Pxrs_Token=reader).status == 200
        given = {"topic": "orders"}
        shown = post(page, "/api/actions/delete-topic/preview", given, admin)
        for sent, status in ((None, 401), ("wrong", 401), (limited, 403), (reader, 403), (second, 400)):
            assert confirm(page, "delete-topic", shown, sent).status == status, "it was shown to another one"
        for sent, status in ((None, 401), ("wrong", 401), (limited, 403), (reader, 403)):
            assert act(page, "delete-topic", given, sent).status == status
        assert [topic.name for topic in hub.topics()] == ["orders"]
        assert act(page, "delete-topic", given, admin).status == 200
        assert hub.topics() == []
        (event,) = [event for event in hub.audit() if event.name == "audit.act_on_page"]
        assert event.fields["who"].startswith("token ")
        assert event.fields["what"] == "deleted topic orders"
        tokens.revoke(file, "reader")
        assert ask(page, "GET", "/api/overview", X_Pxrs_Token=reader).status == 401, "a revoked token ends at once"
