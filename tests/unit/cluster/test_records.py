"""The records of the cluster in the registry: their keys, their JSON, their rules."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pxrs.cluster.ledgers import CLOSED, RECOVERING, Fragment, Joining, LedgerName, LedgerRecord, Quorum
from pxrs.cluster.records import (
    AliveNode,
    BrokerRecord,
    DeletedTopic,
    NodeRecord,
    OwnerRecord,
    TopicRecord,
    broker_key,
    state_ledgers,
)
from pxrs.errors import InvalidTopic, RegistryCorrupt
from pxrs.model import Topic


def record(**changes: object) -> LedgerRecord:
    made = LedgerRecord("t1", 2, 7, 4, Quorum(), 100, (Fragment(0, ("a", "b", "c")),))
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_ledger_record_survives_json_in_every_state() -> None:
    opened = record(confirmed=3)
    recovering = opened.in_recovery(5).with_joining([Joining("d", 0, 1)])
    closed = recovering.with_node(2, 1, None).closed(5, 130, size=900, stored_at=17, is_complete=False)
    for each in (opened, recovering, closed, replace(closed, abandoned=("b",), is_complete=True)):
        assert LedgerRecord.parse(each.key, each.dump()) == each
    assert opened.key == "cluster/ledgers/t1/2/0000000007"
    assert LedgerName.of_key(opened.key) == LedgerName.of_id(opened.id) == opened.name
    assert (recovering.state, recovering.recovery, closed.state, closed.joining) == (RECOVERING, 1, CLOSED, ())
    assert closed.fragments == (Fragment(0, ("a", "b", "c")), Fragment(2, ("a", None, "c")))


def test_the_other_records_survive_json_and_unknown_fields_of_later_versions() -> None:
    topic = TopicRecord(Topic("orders", "t1", 4, extra={"later": 1}), Quorum(5, 3, 2), "random")
    for each in (
        topic,
        DeletedTopic("orders", 4, 17.5),
        BrokerRecord("h:1", "b1", 2.0, 17.0, "1.0"),
        NodeRecord("h:2", 3, 1, 4096),
        AliveNode("h:2", 3, 10, 2, 99, "disk full"),
        OwnerRecord().claimed("b1", "h:1").with_ledger(),
    ):
        assert type(each).parse("cluster/x", each.dump()) == each
    assert OwnerRecord.parse("k", b'{"epoch":3,"colour":"red"}') == OwnerRecord(3)
    assert OwnerRecord(3, "b1", "h", 5).released() == OwnerRecord(3, "", "", 5)


@pytest.mark.parametrize("value", [b"", b"[]", b"{}", b'{"epoch": {}}'])
def test_what_is_no_record_is_refused_with_its_key(value: bytes) -> None:
    with pytest.raises(RegistryCorrupt, match="cluster/ledgers/t/0/0"):
        LedgerRecord.parse("cluster/ledgers/t/0/0000000000", value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fragments", '[[0,"abc"]]'),
        ("fragments", '[[0,["a",3,"c"]]]'),
        ("fragments", '[[0,["a","","c"]]]'),
        ("base", "Infinity"),
        ("state", '"sealed"'),
        ("last", '"x"'),
        ("ack_quorum", "1"),
        ("joining", "[" * 3_000 + "]" * 3_000),
    ],
)
def test_a_ledger_record_with_a_value_that_does_not_fit_is_refused(name: str, value: str) -> None:
    whole = json.loads(record().closed(0, 100, size=0, stored_at=0, is_complete=True).dump())
    text = json.dumps({**whole, name: "@"}).replace('"@"', value)
    with pytest.raises(RegistryCorrupt, match=record().key):
        LedgerRecord.parse(record().key, text.encode())


def test_a_record_that_names_a_node_twice_or_has_no_fragment_from_0_on_is_refused() -> None:
    for fragments in ((), (Fragment(1, ("a", "b", "c")),), (Fragment(0, ("a", "a", "c")),), (Fragment(0, ("a",)),)):
        with pytest.raises(ValueError, match="t1/2/7"):
            record(fragments=fragments)
    with pytest.raises(ValueError, match="nothing to recover"):
        record().closed(0, 0, size=0, stored_at=0, is_complete=True).in_recovery(5)
    with pytest.raises(ValueError, match="is not a valid id"):
        broker_key("a/b")


@pytest.mark.parametrize("given", [(2, 3, 2), (3, 2, 3), (3, 3, 1), (0, 0, 0), (17, 3, 2), (3, 3, True)])
def test_c2_quorums_that_are_not_safe_or_not_possible_are_refused(given: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidTopic):
        Quorum(*given)


def test_an_entry_is_kept_by_its_own_write_set() -> None:
    quorum = Quorum(5, 3, 2)
    assert [quorum.write_set(entry) for entry in (0, 3, 4)] == [[0, 1, 2], [3, 4, 0], [4, 0, 1]]
    assert [entry for entry in range(6) if quorum.keeps(1, entry)] == [0, 1, 4, 5]
    assert quorum.refusals == 2
    closed = LedgerRecord("t", 0, 0, 1, quorum, 0, (Fragment(0, tuple("abcde")), Fragment(3, ("a", "x", *"cde"))))
    closed = closed.closed(6, 10, size=0, stored_at=0, is_complete=True)
    assert [node for _, node in closed.nodes_of(1)] == ["b", "c", "d"]
    assert [node for _, node in closed.nodes_of(4)] == ["e", "a", "x"]
    first, second = closed.fragments
    assert list(closed.entries_of(first, 1)) == [0, 1]
    assert list(closed.entries_of(second, 1)) == [4, 5, 6]
    assert closed.named == {*"abcdex"}


def test_a_node_is_replaced_from_an_entry_on_in_every_later_fragment() -> None:
    changed = record().with_node(4, 0, "d").with_node(2, 1, "e")
    assert changed.fragments == (
        Fragment(0, ("a", "b", "c")),
        Fragment(2, ("a", "e", "c")),
        Fragment(4, ("d", "e", "c")),
    )
    assert changed.with_node(0, 2, None).fragments[0] == Fragment(0, ("a", "b", None))
    assert changed.with_node_in(2, 1, "x").fragments[1:] == (Fragment(2, ("a", "x", "c")), Fragment(4, ("d", "e", "c")))


def test_c3_the_producers_state_is_rebuilt_from_the_last_ledger_that_has_a_snapshot() -> None:
    full = record().closed(4, 110, size=0, stored_at=0, is_complete=True)
    empty = record().closed(-1, 100, size=0, stored_at=0, is_complete=True)
    assert [state_ledgers(each) for each in ([], [empty], [full, full], [full, full, empty, empty])] == [0, 0, 1, 1]
