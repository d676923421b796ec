"""The page of a cluster: what it shows, and that it shows it as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

import pxrs
from pxrs.cluster import records
from pxrs.cluster.ledgers import CLOSED, Fragment, Joining, LedgerRecord, Quorum
from pxrs.cluster.naming import cluster_id
from pxrs.cluster.records import AliveNode, BrokerRecord, NodeRecord, OwnerRecord, TopicRecord
from pxrs.cluster.status import Found, assemble
from pxrs.cluster.troubles import NODES, Troubles, Unserved
from pxrs.model import Topic
from pxrs.web.cluster import LEDGERS_MAX, shown_ledgers, view
from pxrs.web.serving import WebServer
from tests.unit.web.asking import ask, get, server

HOSTILE = """<script>alert(1)</script>"'><img src=x onerror=alert(1)>"""
OPEN = LedgerRecord("t1", 0, 3, 1, Quorum(), 70, (Fragment(0, ("aaaa", "bbbb", None)),))
FOUND = Found(
    id="c1",
    brokers={"i1": BrokerRecord(HOSTILE, HOSTILE)},
    nodes={name: NodeRecord(f"n:{name}", 1) for name in ("aaaa", "bbbb", "cccc")},
    alive={name: AliveNode(f"n:{name}", 1, 5, 2, 7) for name in ("aaaa", "cccc")},
    topics={"orders": TopicRecord(Topic("orders", "t1", 2), Quorum())},
    owners={"t1/0": OwnerRecord(4, "i1", "h:1", 4)},
    ledgers=(OPEN,),
)


@pytest.fixture
def page() -> Iterator[WebServer]:
    with pxrs.open("memory:") as hub:
        cluster_id(hub.registry)
        hub.registry.commit(
            put={
                **{records.broker_key(id): each.dump() for id, each in FOUND.brokers.items()},
                **{records.node_key(id): each.dump() for id, each in FOUND.nodes.items()},
                **{records.alive_key(id): each.dump() for id, each in FOUND.alive.items()},
                **{records.topic_key(name): each.dump() for name, each in FOUND.topics.items()},
                **{records.OWNERS + place: each.dump() for place, each in FOUND.owners.items()},
                OPEN.key: OPEN.dump(),
            }
        )
        with server(hub) as made:
            yield made


def test_the_page_of_a_cluster_has_nodes_copies_and_what_is_wrong(page: WebServer) -> None:
    assert get(page, "/api/session")["has_cluster"] is True
    found = get(page, "/api/cluster")
    assert [each["name"] for each in found["brokers"]] == [HOSTILE], "as text; the scripts make no HTML of it"
    assert [(each["id"], each["is_alive"], each["used"]) for each in found["nodes"]] == [
        ("aaaa", True, 5),
        ("bbbb", False, None),
        ("cccc", True, 5),
    ]
    (ledger,) = found["ledgers"]
    assert ledger["copies"] == {"aaaa": "whole", "bbbb": "node is away"}
    assert ledger["empty"] == 1
    assert (found["lacking"], found["without_owner"]) == (1, 1)
    assert [row["partition"] for row in found["partitions"]] == [1, 0], "the one without an owner first"
    assert found["attention"][0] == {"level": "bad", "text": "1 partition without an owner: orders/1"}
    assert ask(page, "GET", "/api/cluster").headers["content-type"] == "application/json"


def test_a_copy_that_is_being_made_is_in_the_map() -> None:
    moving = replace(
        OPEN,
        state=CLOSED,
        last=4,
        end=80,
        fragments=(Fragment(0, ("aaaa", "bbbb", "cccc")),),
        joining=(Joining("dddd", 0, 1),),
    )
    (ledger,) = view(assemble(replace(FOUND, ledgers=(moving,))))["ledgers"]
    assert ledger["copies"] == {
        "aaaa": "not checked",
        "bbbb": "node is away",
        "cccc": "not checked",
        "dddd": "being copied",
    }


def test_a_partition_that_is_not_served_comes_first_with_its_reason() -> None:
    owners = {f"t1/{number}": OwnerRecord(4, "i1", "h:1", 4) for number in range(2)}
    troubles = {"i1": Troubles.of([Unserved("t1", 1, 5.0, NODES, HOSTILE)], [])}
    alive = {**FOUND.alive, "aaaa": replace(FOUND.alive["aaaa"], doubts=2, damaged=3)}
    found = view(assemble(replace(FOUND, owners=owners, troubles=troubles, alive=alive)))
    assert [(row["partition"], row["unserved"]) for row in found["partitions"]] == [(1, HOSTILE), (0, None)]
    assert (found["unserved"], found["without_owner"]) == (1, 0)
    assert [(row["doubts"], row["damaged"]) for row in found["nodes"]] == [(2, 3), (0, 0), (0, 0)]
    assert any("not served since" in each["text"] for each in found["attention"])


def test_of_many_ledgers_those_that_lack_copies_and_the_newest_are_shown() -> None:
    whole = [
        replace(
            OPEN,
            partition=partition,
            number=number,
            state=CLOSED,
            last=4,
            end=80,
            is_complete=True,
            quorum=Quorum(2, 2, 2),
            fragments=(Fragment(0, ("aaaa", "cccc")),),
        )
        for partition in (0, 1)
        for number in range(LEDGERS_MAX)
    ]
    found = assemble(replace(FOUND, ledgers=(*whole, OPEN)))
    chosen = [(each.partition, each.number) for each in shown_ledgers(found)]
    assert len(chosen) == LEDGERS_MAX
    assert chosen[:5] == [(0, 3), (0, 199), (1, 199), (0, 198), (1, 198)]
    assert view(found)["ledgers_total"] == 2 * LEDGERS_MAX + 1
