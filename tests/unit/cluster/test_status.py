"""The status of a cluster, from records alone."""

from __future__ import annotations

import json
from dataclasses import replace

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
            ephemeral |= {records.broker_key(name): broker.dump() for name, broker in FOUND.brokers.items()}
            registry.commit(ephemeral=ephemeral, lease=lease)
            found = read_status(registry)
    pending = status.AbandonedLedger("t1/0/3", ("b",), "me", 3.0)
    expected = replace(FOUND, ledgers=(STAGED_LEDGER, *FOUND.ledgers), staged={STAGED_LEDGER.id: STAGED})
    assert found == replace(assemble(expected), abandoned=(pending,))
    shown = json.loads(json.dumps(found.to_json()))
    assert shown["ledgers"][2]["fragments"] == [[0, ["a", "b", "c"]]]
    assert "ledgers" not in found.to_json(ledgers=False)
