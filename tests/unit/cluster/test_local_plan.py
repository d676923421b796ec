"""Which processes a local cluster has, and at which ports."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from pxrs.cli.cluster.plan import Plan, Wish, planned, remembered
from pxrs.errors import InvalidArgument


@pytest.fixture
def ports() -> Callable[[int], list[int]]:
    counter = itertools.count(20_000)
    return lambda count: list(itertools.islice(counter, count))


def test_the_default_is_two_brokers_three_nodes_and_an_etcd(ports: Callable[[int], list[int]]) -> None:
    plan = planned(Wish(), None, ports)
    assert (plan.brokers, plan.storage, plan.etcd) == (
        (20_000, 20_001),
        (20_002, 20_003, 20_004),
        (20_005, 20_006, 20_007),
    )
    assert plan.address == "pxrs://127.0.0.1:20000,127.0.0.1:20001"
    assert Plan.parse(plan.dump(), "cluster.json") == plan


def test_a_second_start_keeps_the_ports_and_adds_what_is_asked_for(ports: Callable[[int], list[int]]) -> None:
    first = planned(Wish(brokers=1, storage=3), None, ports)
    more = planned(Wish(storage=5), first, ports)
    assert more.brokers == first.brokers
    assert more.storage[:3] == first.storage
    assert len(more.storage) == 5
    assert more.etcd == first.etcd


def test_nodes_that_are_not_started_keep_their_ports_for_later(ports: Callable[[int], list[int]]) -> None:
    first = planned(Wish(storage=5), None, ports)
    fewer = planned(Wish(storage=3), first, ports)
    assert fewer.storage == first.storage[:3]
    assert planned(Wish(storage=5), remembered(fewer, first), ports).storage == first.storage


def test_given_ports_follow_each_other(ports: Callable[[int], list[int]]) -> None:
    assert planned(Wish(brokers=3, port=7_077), None, ports).brokers == (7_077, 7_078, 7_079)
    with pytest.raises(InvalidArgument, match="need ports up to 65537"):
        planned(Wish(brokers=3, port=65_535), None, ports)


def test_a_given_registry_needs_no_etcd_and_cannot_be_changed(ports: Callable[[int], list[int]]) -> None:
    plan = planned(Wish(registry="etcd://a:2379"), None, ports)
    assert plan.etcd == ()
    with pytest.raises(InvalidArgument, match=r"uses etcd://a:2379 as its registry, but no --registry was given"):
        planned(Wish(), plan, ports)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "brokers": ["x"]}'])
def test_a_file_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"c\.json"):
        Plan.parse(text, "c.json")
