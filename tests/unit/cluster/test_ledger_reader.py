"""Which nodes a broker reads from."""

from __future__ import annotations

from typing import Any

import pytest

from pxrs.cluster.broker import reading
from pxrs.cluster.broker.reading import LedgerReader
from pxrs.cluster.ledgers import EntryHead, Fragment, LedgerRecord, Quorum
from pxrs.cluster.links import EntryRead
from pxrs.errors import NodeUnreachable

RECORD = LedgerRecord("t", 0, 0, 1, Quorum(3, 3, 2), 0, (Fragment(0, ("a", "b", "c")),))


class Nodes:
    """The links to nodes of which some do not answer, and which node each read went to."""

    def __init__(self) -> None:
        self.hanging: set[str] = set()
        self.asked: list[str] = []

    def __call__(self, node: str) -> Any:
        nodes = self

        class Link:
            def read(self, ledger: str, first: int, last: int, *, heads: bool = False) -> list[EntryRead]:
                nodes.asked.append(node)
                if node in nodes.hanging:
                    raise NodeUnreachable(node, "no answer")
                return [EntryRead(each, EntryHead(each, 1, 1, 0, 0, 0), b"x") for each in range(first, last + 1)]

        return Link()


def test_a_node_that_did_not_answer_is_asked_last_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes()
    reader = LedgerReader(nodes)
    nodes.hanging = {"a"}
    for _ in range(3):
        assert [read.entry for read in reader.read(RECORD, 0, 0)] == [0]
    assert nodes.asked == ["a", "b", "b", "b"]
    nodes.hanging, nodes.asked = {"b", "c"}, []
    assert [read.entry for read in reader.read(RECORD, 0, 0)] == [0]
    assert nodes.asked == ["b", "c", "a"]  # it is asked all the same where no other one answers
    monkeypatch.setattr(reading, "AVOIDED_S", 0.0)
    nodes.hanging, nodes.asked = {"a"}, []
    other = LedgerReader(nodes)
    for _ in range(2):
        list(other.read(RECORD, 0, 0))
    assert nodes.asked == ["a", "b", "a", "b"]
