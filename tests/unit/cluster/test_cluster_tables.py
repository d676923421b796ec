"""What `pxrs cluster status` prints for people."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from pxrs.cli.cluster.tables import parts, size
from pxrs.cluster.ledgers import CLOSED, Fragment, LedgerRecord, Quorum
from pxrs.cluster.problems import LEDGERS_MAX, problems
from pxrs.cluster.records import AliveNode, BrokerRecord, NodeRecord, OwnerRecord, TopicRecord
from pxrs.cluster.status import ClusterStatus, Found, assemble
from pxrs.model import Topic

OPEN = LedgerRecord("t1", 0, 3, 1, Quorum(), 70, (Fragment(0, ("a", "b", "c")),))
FOUND = Found(
    id="c1",
    brokers={"i1": BrokerRecord("h:1", "first")},
    nodes={name: NodeRecord(f"n:{name}", 1) for name in "abc"},
    alive={name: AliveNode(f"n:{name}", 1, 5, 2, 7_200_000_000) for name in "abc"},
    topics={"orders": TopicRecord(Topic("orders", "t1", 1), Quorum())},
    owners={"t1/0": OwnerRecord(4, "i1", "h:1", 4)},
    ledgers=(OPEN,),
)


def printed(found: ClusterStatus, **options: bool) -> str:
    text = io.StringIO()
    Console(file=text, width=200, highlight=False).print(*parts(found, **options), sep="\n")
    return text.getvalue()


def test_a_cluster_in_order_says_so_and_shows_every_part() -> None:
    text = printed(assemble(FOUND), with_ledgers=True)
    assert "every partition has an owner and is served, and every entry has all its copies" in text
    for part in ("first", "h:1", "n:b", "7.2 GB", "orders/0", "1 open", "orders/0/3", "a b c"):
        assert part in text, part


def test_the_most_urgent_comes_first() -> None:
    gone = replace(FOUND, brokers={}, alive={"a": AliveNode("n:a", 1, refuses="the disk is full")})
    told = list(problems(assemble(gone)))
    assert [each.text.partition(":")[0] for each in told] == [
        "no broker is alive",
        "1 partition without an owner",
        "nothing can be stored in topic orders",
        "orders/0, ledger 3 lacks copies",
        "storage node a at n",
    ]
    assert "node b is away, node c is away" in told[3].text
    assert all(each.is_urgent for each in told)


def test_ledgers_with_the_fewest_copies_come_first_and_a_long_list_is_cut() -> None:
    worse = replace(OPEN, number=9, fragments=(Fragment(0, (None, None, "a")),))
    many = [replace(OPEN, number=number) for number in range(10, 10 + LEDGERS_MAX)]
    found = assemble(replace(FOUND, alive={"a": FOUND.alive["a"], "b": FOUND.alive["b"]}, ledgers=(*many, worse)))
    told = list(problems(found))
    assert "ledger 9 lacks copies: position 0 has no node, position 1 has no node" in told[0].text
    assert next(each.text for each in told if each.kind == "cluster") == "copies are also missing in 1 more ledger"


def test_ledgers_to_be_checked_are_counted_and_not_urgent() -> None:
    closed = replace(OPEN, state=CLOSED, last=2, end=80, is_complete=False)
    (told,) = problems(assemble(replace(FOUND, ledgers=(closed,))))
    assert (told.is_urgent, told.text.partition(":")[0]) == (False, "1 ledger to be checked")


def test_hostile_names_are_printed_as_text() -> None:
    hostile = "[red]\x1b[31m\ud800\x07"
    found = replace(FOUND, brokers={"i1": BrokerRecord(hostile, hostile)}, owners={})
    text = printed(assemble(found))
    assert "[red]\\x1b[31m" in text
    assert "\x1b" not in text
    assert "\x07" not in text


def test_sizes() -> None:
    assert [size(each) for each in (0, 999, 1_000, 1_500_000, 3e12, 5e15)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.5 MB",
        "3.0 TB",
        "5000.0 TB",
    ]
