"""`pxrs cluster retire`, `reinstate`, `forget` and `abandon` (C6), on a registry of files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pxrs import registry as registries
from pxrs.cluster import records
from pxrs.cluster.ledgers import Fragment, LedgerRecord, Quorum
from pxrs.cluster.naming import cluster_id
from pxrs.cluster.records import DECISIONS, AliveNode, NodeRecord, TopicRecord
from pxrs.cluster.status import read_status
from pxrs.model import Topic
from pxrs.registry.contract import Registry
from pxrs.testing.command import Call, Result, run_here

IDS = ("aaaa1111", "aaaa2222", "bbbb3333")
LEDGER = LedgerRecord("t1", 0, 0, 1, Quorum(), 70, (Fragment(0, IDS),))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file:{tmp_path}/registry"


@pytest.fixture
def registry(url: str) -> Iterator[Registry]:
    with registries.open(url) as registry:
        cluster_id(registry)
        registry.commit(put={records.node_key(id): NodeRecord(f"{id}:1", 1).dump() for id in IDS})
        registry.commit(put={records.topic_key("orders"): TopicRecord(Topic("orders", "t1", 1), Quorum()).dump()})
        yield registry


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], url: str) -> Call:
    monkeypatch.setenv("PXRS_REGISTRY", url)
    monkeypatch.delenv("PXRS_AT", raising=False)

    def call(*arguments: str) -> Result:
        return run_here(monkeypatch, capfd, ("cluster", *arguments)).unwrapped()

    return call


def decided(registry: Registry) -> list[str]:
    found = (records.Decision.parse(entry.key, entry.value) for entry in registry.scan(DECISIONS))
    return [each.action for each in found]


def test_a_node_is_retired_reinstated_and_forgotten_by_the_beginning_of_its_id(registry: Registry, call: Call) -> None:
    assert call("retire", "bbbb").code == 0
    assert [node.id for node in read_status(registry).nodes if node.is_retired] == ["bbbb3333"]
    assert call("reinstate", "bbbb3333").code == 0
    assert not any(node.is_retired for node in read_status(registry).nodes)
    assert call("forget", "bbbb").code == 0
    assert [node.id for node in read_status(registry).nodes] == ["aaaa1111", "aaaa2222"]
    assert decided(registry) == ["retire_node", "reinstate_node", "forget_node"], "each is for the audit"


@pytest.mark.parametrize(("given", "why"), [("aaaa", "several"), ("b", "no such"), ("cccc9999", "no such")])
def test_an_id_that_names_no_single_node_is_refused(registry: Registry, call: Call, given: str, why: str) -> None:
    found = call("retire", given)
    assert found.code == 2
    assert why in found.errors
    assert "aaaa1111, aaaa2222, bbbb3333" in found.errors


def test_c6_abandon_tells_what_may_be_lost_and_asks(registry: Registry, call: Call) -> None:
    registry.commit(put={LEDGER.key: LEDGER.dump()})
    asked = call("abandon", "aaaa1111", "aaaa2222")
    assert asked.code == 2, "nobody is there to answer"
    assert "pass --yes" in asked.errors
    assert "orders/0, ledger 0 (open): messages from offset 70 on" in asked.out
    assert decided(registry) == []
    assert call("abandon", "aaaa1111", "aaaa2222", "bbbb3333", "--yes").code == 0
    assert decided(registry) == ["abandon_nodes"]
    assert [each.nodes for each in read_status(registry).abandoned] == [IDS]


def test_c6_a_node_that_lives_is_not_abandoned(registry: Registry, call: Call) -> None:
    registry.commit(put={LEDGER.key: LEDGER.dump()})
    with registry.lease(30) as lease:
        registry.commit(ephemeral={records.alive_key("aaaa1111"): AliveNode("h:1", 1).dump()}, lease=lease)
        found = call("abandon", "aaaa1111", "--yes")
    assert found.code == 2
    assert "is alive" in found.errors
    assert decided(registry) == []


def test_c6_nothing_is_abandoned_where_no_ledger_needs_it(registry: Registry, call: Call) -> None:
    found = call("abandon", "bbbb3333", "--yes")
    assert (found.code, decided(registry)) == (0, [])
    assert "no ledger needs this decision" in found.out
