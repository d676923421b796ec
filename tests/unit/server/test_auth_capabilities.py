"""Capabilities: what executors of a query may do, signed by the server, and ended with the query."""

from __future__ import annotations

import base64
import json
import random
from dataclasses import replace

import pytest

from pxrs.errors import InvalidArgument
from pxrs.server.auth.capabilities import ALL, Capability, claimed_query, new_secret, secret_key, sign, verify, within
from pxrs.server.auth.keys import HIDDEN
from pxrs.server.auth.permissions import Grants
from tests.unit.server.permitted import ORDERS, SECRET_TOPIC, may

DRIVER = Grants.parse(["hub=admin"])
QUERY = Capability("q-1.run", "0" * 12, 100.0, read=(ORDERS,))


def test_a_signed_capability_is_verified_with_the_same_secret_until_its_time_is_over() -> None:
    secret = new_secret()
    text = sign(secret, QUERY)
    assert claimed_query(text) == "q-1.run"
    assert verify(secret, text, 99.9) == QUERY
    assert verify(secret, text, 100.0) is None
    assert verify(new_secret(), text, 0.0) is None, "the query ended, and another one has its id"
    assert verify(b"", text, 0.0) is None
    assert secret_key("q-1.run").startswith(HIDDEN), "no client may read the secret"


def test_a_changed_capability_is_refused() -> None:
    secret = new_secret()
    text = sign(secret, QUERY)
    payload, signature = text.removeprefix("pxrsc_").split(".")
    wider = json.loads(base64.urlsafe_b64decode(payload + "=="))
    wider["read"].append(SECRET_TOPIC)
    forged = base64.urlsafe_b64encode(json.dumps(wider).encode()).rstrip(b"=").decode()
    assert claimed_query(f"pxrsc_{forged}.{signature}") == "q-1.run"
    assert verify(secret, f"pxrsc_{forged}.{signature}", 0.0) is None
    assert verify(secret, f"pxrsc_{payload}.", 0.0) is None
    rolls = random.Random(7)
    for _ in range(500):
        at = rolls.randrange(len(text))
        other = text[:at] + rolls.choice("abcXYZ019_-.") + text[at + 1 :]
        found = verify(secret, other, 0.0)
        # The last character of base64 has bits that stand for nothing, so that another one may mean the same.
        assert other == text or found is None or found == QUERY


@pytest.mark.parametrize(
    "text", ["", "pxrs_x", "pxrsc_", "pxrsc_.", "pxrsc_e30.e30", "pxrsc_!!.x", "pxrsc_" + "a" * 70_000]
)
def test_what_is_no_capability_is_refused_without_an_error(text: str) -> None:
    assert claimed_query(text) is None
    assert verify(new_secret(), text, 0.0) is None


def test_a_capability_reads_its_topics_by_id_and_nothing_else() -> None:
    grants = QUERY.grants_of(DRIVER)
    assert may(grants, "DoGet", topic="orders", topic_id=ORDERS)
    assert may(grants, "topic.bounds", topic="orders", topic_id=ORDERS)
    for topic, id in (("orders", None), ("orders", SECRET_TOPIC), ("secret", SECRET_TOPIC), ("secret", ORDERS)):
        assert not may(grants, "DoGet", topic=topic, topic_id=id), "another topic, or a name that is not the id's"
    for call in ("DoPut", "log.delete_topic", "topic.trim", "topic.check_writable", "topic.plan_retention"):
        assert not may(grants, call, topic="orders", topic_id=ORDERS)
    assert not may(grants, "registry.lease")
    assert not may(grants, "hub.identity", joins=True)
    assert not may(grants, "registry.get", key=f"topics/{ORDERS}/start")
    stages = replace(QUERY, read=(), stage=(ORDERS,)).grants_of(DRIVER)
    assert not may(stages, "DoPut", topic="orders", topic_id=ORDERS), "rows are staged, not appended"
    assert not may(stages, "DoGet", topic="orders", topic_id=ORDERS)
    assert not may(stages, "registry.lease")
    assert may(stages, "staging.stage", topic="orders", topic_id=ORDERS)
    for topic, id in (("orders", None), ("orders", SECRET_TOPIC), ("secret", SECRET_TOPIC), ("secret", ORDERS)):
        assert not may(stages, "staging.stage", topic=topic, topic_id=id)
    for call in ("staging.publish", "staging.clear", "staging.make_durable", "staging.sweep", "staging.read"):
        assert not may(stages, call, topic="orders", topic_id=ORDERS), "the driver publishes"


def test_a_capability_for_all_topics_has_those_of_the_drivers_token() -> None:
    driver = Grants.parse(["topic:ord*=write", "topic:secret=read"])
    every = replace(QUERY, read=ALL, stage=ALL)
    assert within(every, driver, {})
    grants = every.grants_of(driver)
    assert may(grants, "staging.stage", topic="orders", topic_id=ORDERS)
    assert may(grants, "log.topic", topic="orders")
    assert not may(grants, "staging.stage", topic="secret", topic_id=SECRET_TOPIC)
    assert may(grants, "DoGet", topic="secret", topic_id=SECRET_TOPIC)
    assert not may(grants, "DoGet", topic="orders", topic_id=ORDERS)
    assert not may(grants, "DoPut", topic="orders", topic_id=ORDERS)


def test_a_capability_permits_no_more_than_the_token_of_its_driver() -> None:
    names: dict[str, str | None] = {ORDERS: "orders", SECRET_TOPIC: "secret"}
    reader = Grants.parse(["topic:orders=read"])
    assert within(QUERY, reader, names)
    assert not within(replace(QUERY, read=(ORDERS, SECRET_TOPIC)), reader, names)
    assert not within(replace(QUERY, stage=(ORDERS,)), reader, names)
    assert within(replace(QUERY, stage=(ORDERS,)), Grants.parse(["topic:orders=read,write"]), names)
    assert not within(QUERY, reader, {}), "the topic is gone"
    assert not within(QUERY, Grants(), names)


@pytest.mark.parametrize(
    "change",
    [
        {"query": ""},
        {"query": "a/b"},
        {"query": "../x"},
        {"read": ("orders",)},
        {"stage": ("*", ORDERS)},
        {"read": (ORDERS,) * 65},
    ],
)
def test_a_capability_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        replace(QUERY, **change)  # type: ignore[arg-type]
