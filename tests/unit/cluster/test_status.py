"""The status of a cluster, from records alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pxrs.cluster import records, status
from pxrs.cluster.ledgers import CLOSED, Fragment, Joining, LedgerRecord, Quorum
from pxrs.cluster.problems import problems, titled
from pxrs.cluster.records import (
    CLUSTER_ID,
    RETIRED,
    Abandonment,
    AliveNode,
    BrokerRecord,
    DeletedTopic,
    NodeRecord,
    OwnerRecord,
    TopicRecord,
)
from pxrs.cluster.staged import StagedFile, StagedName
from pxrs.cluster.status import AWAY, NO_NODE, RETIRING, UNCHECKED, Found, assemble, read_status
from pxrs.cluster.troubles import NODES, RECOVERY, BadPlacement, Troubles, Unserved, troubles_key
from pxrs.model import Topic
from pxrs.registry import memory

OPEN = LedgerRecord("t1", 0, 3, 1, Quorum(), 70, (Fragment(0, ("a", "b", "c")),))
CLOSED_ONE = replace(OPEN, number=2, base=10, state=CLOSED, last=4, end=70, size=900, is_complete=True)
STAGED = StagedName("t1", "q", 3, "00000-f")
STAGED_LEDGER = replace(CLOSED_ONE, **STAGED.ledger()._asdict())
FOUND = Found(
    id="c1",
    brokers={"i1": BrokerRecord("h:1", "first"), "i2": BrokerRecord("h:2")},
    nodes={name: NodeRecord(f"n:{name}", 1) for name in "abcd"},
    alive={name: AliveNode(f"n:{name}", 1, 5, 2, 7) for name in "abc"},
    topics={"orders": TopicRecord(Topic("orders", "t1", 2), Quorum())},
    owners={"t1/0": OwnerRecord(4, "i1", "h:1", 4), "t1/1": OwnerRecord(2, "gone", "h:9", 0)},
    ledgers=(CLOSED_ONE, OPEN),
)


def test_p6_a_whole_ledger_has_no_shortage_and_partitions_name_their_owners() -> None:
    found = assemble(FOUND)
    assert found.shortages == []
    assert [(each.partition, each.owner, each.broker, each.epoch) for each in found.partitions] == [
        (0, "first", "i1", 4),
        (1, "", "", 2),  # the broker that has claimed it is not there any more
    ]
    assert found.partitions[0].ledgers == {"open": 1, "closed": 1}
    assert found.partitions[0].start == 10
    assert not found.is_whole
    assert [each.partition for each in found.without_owner] == [1]
    assert [(broker.name, broker.partitions) for broker in found.brokers] == [("", 0), ("first", 1)]
    nodes = {node.id: node for node in found.nodes}
    assert (nodes["a"].is_alive, nodes["a"].named, nodes["a"].free_bytes) == (True, 2, 7)
    assert (nodes["d"].is_alive, nodes["d"].named) == (False, 0)


def test_p6_every_reason_for_a_shortage_is_told_with_ledger_position_and_node() -> None:
    empty = replace(CLOSED_ONE, fragments=(Fragment(0, ("a", None, "c")), Fragment(3, ("a", "b", "d"))))
    moving = replace(OPEN, number=5, state=CLOSED, last=9, end=80, is_complete=False, joining=(Joining("d", 0, 1),))
    nodes = {**FOUND.nodes, "b": NodeRecord("n:b", 1, state=RETIRED)}
    found = assemble(replace(FOUND, nodes=nodes, ledgers=(empty, moving)))
    shown = [(each.ledger, each.first, each.position, each.node, each.why, each.copied_to) for each in found.shortages]
    assert shown == [
        ("t1/0/2", 0, 1, None, NO_NODE, None),
        ("t1/0/2", 3, 1, "b", RETIRING, None),
        ("t1/0/2", 3, 2, "d", AWAY, None),
        ("t1/0/5", 0, 0, "a", UNCHECKED, None),
        ("t1/0/5", 0, 1, "b", RETIRING, "d"),
        ("t1/0/5", 0, 2, "c", UNCHECKED, None),
    ]
    assert found.topics[0].under_replicated == found.partitions[0].under_replicated == 2


def test_p6_a_place_without_entries_lacks_nothing() -> None:
    spread = Quorum(3, 2, 2)
    one_entry = replace(CLOSED_ONE, quorum=spread, last=0, fragments=(Fragment(0, ("a", "b", None)),))
    assert assemble(replace(FOUND, ledgers=(one_entry,))).shortages == []
    is_open = replace(OPEN, quorum=spread, fragments=(Fragment(0, ("a", "b", None)),))
    assert len(assemble(replace(FOUND, ledgers=(is_open,))).shortages) == 1


def test_p6_rows_that_spark_has_staged_lack_copies_too_once_their_file_is_finished() -> None:
    finished, unfinished = StagedName("t1", "q", 3, "00000-f"), StagedName("t1", "q", 3, "00001-f")
    nodes = (Fragment(0, ("a", "b", "d")),)
    closed = replace(CLOSED_ONE, **finished.ledger()._asdict(), fragments=nodes)
    is_open = replace(OPEN, **unfinished.ledger()._asdict(), fragments=nodes)
    staged = {name.ledger().id: name for name in (finished, unfinished)}
    found = assemble(replace(FOUND, ledgers=(closed, is_open), staged=staged))
    assert [(each.ledger, each.topic, each.node, each.why) for each in found.shortages] == [
        (closed.id, "orders", "d", AWAY)
    ]
    assert [(each.topic, each.query) for each in found.ledgers] == [("orders", "q")] * 2
    assert (found.topics[0].under_replicated, found.partitions[0].under_replicated) == (1, 0)
    assert next(problems(replace(found, partitions=()))).text == (
        "a file that query q has staged for orders lacks copies: node d is away"
    )
    assert titled(found.ledgers[0]) == "orders, staged by q"
    assert assemble(replace(FOUND, topics={}, ledgers=(closed,), staged=staged)).shortages == []


def test_p7_what_is_left_of_deleted_topics_is_shown() -> None:
    found = assemble(replace(FOUND, topics={}, deleted={"t1": DeletedTopic("orders", 2, 5.0)}))
    assert [(each.name, each.ledgers) for each in found.deletions] == [("orders", 2)]
    assert found.partitions == ()
    without = assemble(replace(FOUND, topics={}, alive={}))
    assert without.shortages == [], "what belongs to no topic gets no more copies"


TROUBLES = {"i1": Troubles.of([Unserved("t1", 0, 5.0, NODES, "why")], [])}
OWNED = replace(FOUND, owners={**FOUND.owners, "t1/1": OwnerRecord(2, "i2", "h:2", 0)})
"""Without a fault."""
WHY = "1 of 2 needed storage nodes accept entries (3 in the ensemble)"


def test_a_partition_that_its_owner_cannot_serve_is_a_fault() -> None:
    assert not assemble(OWNED).has_faults
    told = Troubles.of([Unserved("t1", 1, 5.0, NODES, WHY)], [])
    found = assemble(replace(OWNED, troubles={"i2": told}))
    (row,) = found.unserved
    assert (row.topic, row.partition, row.broker, row.owner, row.since) == ("orders", 1, "i2", "h:2", 5.0)
    assert [each.unserved for each in found.partitions] == [None, WHY]
    assert found.has_faults
    assert not found.is_whole
    assert [(each.is_urgent, each.text) for each in problems(found)] == [
        (
            True,
            "1 partition owned by broker h:2 and not served since 1970-01-01 00:00:05Z, orders/1: "
            f"{WHY}; start more storage nodes, or make room on those that refuse entries",
        )
    ]


def test_what_a_broker_says_of_a_partition_that_it_does_not_own_any_more_is_ignored() -> None:
    rows = [Unserved("t1", 1, 5.0, NODES, WHY), Unserved("deleted", 0, 5.0, NODES, WHY)]
    former = Troubles.of(rows, [BadPlacement("deleted", "why")])
    for troubles in ({"i1": former}, {"gone": replace(former, unserved_total=200)}):
        found = assemble(replace(OWNED, troubles=troubles))
        assert (found.unserved, found.unserved_more, found.placements) == ((), 0, ())
        assert not found.has_faults


def test_partitions_that_a_broker_does_not_list_count_too() -> None:
    found = assemble(replace(OWNED, troubles={"i2": Troubles((), 150)}))
    assert found.unserved_more == 150
    assert found.has_faults
    assert [each.text for each in problems(found)] == ["150 more partitions not served; the brokers' logs say why"]


def test_partitions_are_told_together_by_their_reason() -> None:
    topics = {"orders": replace(FOUND.topics["orders"], topic=Topic("orders", "t1", 8))}
    owners = {f"t1/{number}": OwnerRecord(1, "i1", "h:1", 4) for number in range(8)}
    rows = [Unserved("t1", number, 9.0 - number, NODES if number else RECOVERY, WHY) for number in range(8)]
    found = assemble(replace(OWNED, topics=topics, owners=owners, troubles={"i1": Troubles.of(rows, [])}))
    first, second = (each.text for each in problems(found))
    assert first.startswith("7 partitions owned by broker first and not served since 1970-01-01 00:00:02Z, orders/7")
    assert "and 2 more: 1 of 2 needed" in first
    assert second.startswith("1 partition owned by broker first and not served since 1970-01-01 00:00:09Z, orders/0:")
    assert "pxrs cluster abandon" in second, "the advice is that of the kind"


def test_too_few_nodes_for_an_ensemble_are_told_and_are_a_fault_if_nothing_can_be_stored() -> None:
    wide = TopicRecord(Topic("wide", "t2", 1), Quorum(5, 3, 2))
    topics, owners = {**FOUND.topics, "wide": wide}, {**OWNED.owners, "t2/0": OwnerRecord(1, "i1", "h:1", 0)}
    full = replace(FOUND.alive["c"], refuses="the disk is full")
    retired = {**FOUND.nodes, "b": NodeRecord("n:b", 1, state=RETIRED)}
    degraded = assemble(replace(OWNED, alive={**FOUND.alive, "c": full}, ledgers=()))
    assert [(each.topic, each.accepting, each.can_store) for each in degraded.lacking_nodes] == [("orders", 2, True)]
    assert not degraded.has_faults
    assert [each.is_urgent for each in problems(degraded)] == [True, False]
    assert [each.text for each in problems(degraded)][1].startswith("new messages of topic orders get fewer copies")
    alive = {**FOUND.alive, "c": full}
    found = assemble(replace(OWNED, topics=topics, owners=owners, alive=alive, nodes=retired, ledgers=()))
    assert not found.without_owner
    assert [(each.topic, each.accepting, each.needed, each.ensemble) for each in found.cannot_store] == [
        ("orders", 1, 2, 3),
        ("wide", 1, 4, 5),
    ]
    assert found.has_faults
    told = [each.text for each in problems(found)]
    assert told[0].startswith(f"nothing can be stored in topic orders: {WHY}; start more storage nodes")
    assert "topic wide: 1 of 4 needed storage nodes accept entries (5 in the ensemble)" in told[1]


def test_a_placement_function_that_fails_is_a_fault() -> None:
    found = assemble(replace(OWNED, troubles={"i1": Troubles.of([], [BadPlacement("t1", "it raised")])}))
    assert found.has_faults
    (told,) = problems(found)
    assert told.text.startswith("broker first can choose no storage nodes for orders: it raised; correct the function")


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("doubts", "is in doubt about 2 ledgers"),
        ("damaged", "has 2 damaged places"),
        ("is_unchecked", "is comparing its entries"),
    ],
)
def test_c7_a_node_in_doubt_or_with_damaged_entries_is_a_fault(field: str, words: str) -> None:
    bad = replace(FOUND.alive["b"], **{field: True if field == "is_unchecked" else 2})
    found = assemble(replace(OWNED, alive={**FOUND.alive, "b": AliveNode.parse("k", bad.dump())}))
    assert [bool(getattr(node, field)) for node in found.nodes] == [False, True, False, False]
    assert found.has_faults
    (told,) = problems(found)
    assert told.is_urgent
    assert f"storage node b at n:b {words}" in told.text


def test_c8_a_ledger_that_was_ended_by_nodes_in_doubt_is_told_and_is_no_fault() -> None:
    found = assemble(replace(OWNED, ledgers=(replace(CLOSED_ONE, doubted=("a", "b")), OPEN)))
    assert not found.has_faults
    (told,) = problems(found)
    assert not told.is_urgent
    assert "orders/0, ledger 2 was closed by answers of storage nodes that were in doubt (a, b)" in told.text
    assert "from offset 70 on" in told.text
    assert found.to_json(ledgers=False)["doubted"] == [{"ledger": "t1/0/2", "nodes": ("a", "b")}]


def test_the_status_is_read_from_the_registry_alone_and_is_json() -> None:
    with memory.MemoryRegistry() as registry:
        assert read_status(registry).id is None
        registry.commit(
            put={
                CLUSTER_ID: b'{"id": "c1"}',
                records.topic_key("orders"): FOUND.topics["orders"].dump(),
                records.owner_key("t1", 0): FOUND.owners["t1/0"].dump(),
                records.owner_key("t1", 1): FOUND.owners["t1/1"].dump(),
                records.abandoned_key(OPEN.name): Abandonment(("b",), "me", 3.0).dump(),
                records.abandoned_key(CLOSED_ONE.name): Abandonment(("b",), "me", 3.0).dump(),  # nothing waits for it
                OPEN.key: OPEN.dump(),
                STAGED.key: StagedFile(STAGED_LEDGER.id, 5.0).dump(),
                STAGED_LEDGER.key: STAGED_LEDGER.dump(),
                CLOSED_ONE.key: CLOSED_ONE.dump(),
                **{records.node_key(name): node.dump() for name, node in FOUND.nodes.items()},
            }
        )
        with registry.lease(30) as lease:
            ephemeral = {records.alive_key(name): alive.dump() for name, alive in FOUND.alive.items()}
            ephemeral |= {troubles_key(name): each.dump() for name, each in TROUBLES.items()}
            ephemeral |= {records.broker_key(name): broker.dump() for name, broker in FOUND.brokers.items()}
            registry.commit(ephemeral=ephemeral, lease=lease)
            found = read_status(registry)
    pending = status.AbandonedLedger("t1/0/3", ("b",), "me", 3.0)
    expected = replace(FOUND, ledgers=(STAGED_LEDGER, *FOUND.ledgers), staged={STAGED_LEDGER.id: STAGED})
    expected = replace(expected, troubles=TROUBLES)
    assert found == replace(assemble(expected), abandoned=(pending,))
    shown = json.loads(json.dumps(found.to_json()))
    assert shown["ledgers"][2]["fragments"] == [[0, ["a", "b", "c"]]]
    assert "ledgers" not in found.to_json(ledgers=False)
    assert [(each["topic"], each["partition"], each["kind"]) for each in shown["unserved"]] == [("orders", 0, NODES)]
    assert shown["has_faults"]
