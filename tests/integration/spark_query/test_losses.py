"""A query that loses its lease, its partitions or its registry for a while: nothing is passed over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import pxrs
from pxrs.errors import (
    CheckpointOutOfRange,
    CommitUnknown,
    GroupUnavailable,
    OutcomeUnknown,
    PartitionLost,
    RegistryError,
    RegistryUnavailable,
)
from pxrs.group.member import GroupMember
from pxrs.group.records import Checkpoint, Keys
from pxrs.hub import Hub
from pxrs.log.memory import MemoryLog
from pxrs.publishing.manifest import fingerprint
from pxrs.publishing.membership import Membership
from pxrs.publishing.query import Query
from pxrs.registry.contract import Commit
from pxrs.registry.memory import MemoryStore
from pxrs.spark.following import join_query
from pxrs.spark.options import ReadOptions
from pxrs.testing.hooked import HookedRegistry
from pxrs.testing.waiting import eventually
from tests.integration.spark_query.queries import HASTY, OPTIONS, SHARED, checkpoints, publish, read, run_batch, send

DEADLINE_S = 20.0


@pytest.fixture
def single() -> Iterator[Hub]:
    """One partition with a hundred messages."""
    with pxrs.open("memory:") as hub:
        hub.create_topic("orders", partitions=1)
        with hub.producer("orders") as out:
            out.send_batch(pa.table({"value": [b"v"] * 100}))
        yield hub


def test_a_lease_that_was_lost_is_taken_anew_and_nothing_is_passed_over(hub: Hub) -> None:
    with join_query(hub, OPTIONS) as query:
        start, _ = run_batch(query, {}, 100)
        lease = query.membership.member.lease
        assert lease is not None
        lease.close()
        eventually(lambda: query.membership.member.lease is not lease and query.membership.member.is_settled)
        end, spans = run_batch(query, start)
        assert {span.start for span in spans.values()} == {25}
        query.finish(end)
        assert hub.group("g").describe().lag == 0


def test_alone_partitions_that_are_lost_before_the_tasks_begin_are_claimed_again(hub: Hub, tmp_path: Path) -> None:
    with join_query(hub, OPTIONS) as query:
        end = query.latest({}, 100, None)
        lease = query.membership.member.lease
        assert lease is not None
        lease.close()
        eventually(lambda: query.membership.member.lease is not lease and query.membership.member.is_settled)
        spans, fences = query.ranges({}, end)
        assert spans == end, "as it was planned"
        assert query.ranges({}, end) == (spans, fences)
        publish(hub, tmp_path, query, spans, has_state=False)  # the fences are those of the new claims
        assert checkpoints(hub) == [25, 25, 25, 25]
        query.finish(run_batch(query, end)[0])
        assert hub.group("g").describe().lag == 0


def test_alone_what_tasks_read_when_the_lease_is_lost_is_refused_and_a_restart_reads_it(
    hub: Hub, tmp_path: Path
) -> None:
    with join_query(hub, OPTIONS) as query:
        end, spans = run_batch(query, {}, 100)
        lease = query.membership.member.lease
        assert lease is not None
        lease.close()
        eventually(lambda: query.membership.member.lease is not lease and query.membership.member.is_settled)
        assert query.ranges({}, end)[0] == spans, "its tasks are told the same"
        with pytest.raises(PartitionLost, match="Start the query again"):
            publish(hub, tmp_path, query, spans, has_state=False)
    with join_query(hub, OPTIONS) as query:
        assert query.ranges({}, end)[0] == spans
        publish(hub, tmp_path, query, spans, has_state=False)
    assert checkpoints(hub) == [25, 25, 25, 25]


class Outage:
    """A registry that cannot be reached while `is_on`: no request and no renewal of a lease comes through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, registry: HookedRegistry) -> None:
        self.is_on = False
        self.refused = 0
        self.refused_max: int | None = None
        """After so many refused requests it is over."""
        self.renews = False
        """Renewals come through nevertheless."""
        registry.reach = self.reach
        store = registry._store
        for name in ("renew_lease", "begin_lease"):
            monkeypatch.setattr(store, name, partial(self._renewed, getattr(store, name)))

    def begin(self, refused_max: int | None = None) -> None:
        self.refused, self.refused_max, self.is_on = 0, refused_max, True

    def reach(self) -> None:
        if self.is_on and self.refused == self.refused_max:
            self.is_on = False
        if self.is_on:
            self.refused += 1
            raise RegistryUnavailable("nobody answers")

    def _renewed(self, renew: Callable[..., Any], *given: Any) -> Any:
        if self.is_on and not self.renews:
            raise RegistryUnavailable("nobody answers")
        return renew(*given)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hub, Outage]]:
    """As `hub`, with a registry that may be away."""
    registry = HookedRegistry(MemoryStore())
    hub = Hub(MemoryLog(), registry)
    with hub:
        hub.create_topic("orders", partitions=4)
        send(hub, 400)
        outage = Outage(monkeypatch, registry)
        yield hub, outage
        outage.is_on = False


def test_a_registry_that_is_away_for_less_than_the_lease_ends_no_query(away: tuple[Hub, Outage]) -> None:
    hub, outage = away
    with join_query(hub, OPTIONS) as query:
        start, _ = run_batch(query, {}, 100)
        lease = query.membership.member.lease
        outage.begin(refused_max=5)
        end, spans = run_batch(query, start)
        assert {span.start for span in spans.values()} == {25}
        assert outage.refused == 5
        assert checkpoints(hub) == [25, 25, 25, 25]
        outage.begin(refused_max=3)
        query.finish(end)
        assert query.membership.member.lease is lease
    assert hub.group("g").describe().lag == 0


def test_a_checkpoint_whose_reply_is_lost_ends_no_query(away: tuple[Hub, Outage]) -> None:
    hub, _ = away
    registry = hub.registry
    assert isinstance(registry, HookedRegistry)
    with join_query(hub, OPTIONS) as query:
        start, _ = run_batch(query, {}, 100)
        lost: list[Commit] = []

        def lose_reply(commit: Commit) -> None:
            if len(lost) < 2 and any("/checkpoints/" in key for key in commit.put):
                lost.append(commit)
                raise OutcomeUnknown("the reply is lost")

        registry.after = lose_reply
        end, _ = run_batch(query, start)
        assert lost
        query.finish(end)
    assert hub.group("g").describe().lag == 0


@pytest.mark.parametrize("options", [OPTIONS, SHARED], ids=["alone", "shared"])
def test_a_registry_that_is_away_for_less_than_the_lease_ends_no_restart(
    away: tuple[Hub, Outage], tmp_path: Path, options: ReadOptions
) -> None:
    hub, outage = away
    with join_query(hub, options) as query:
        end, spans = run_batch(query, {}, 100)
        publish(hub, tmp_path, query, spans, has_state=False)
    with join_query(hub, options) as query:
        query.membership.settle(time.monotonic() + DEADLINE_S)
        outage.begin(refused_max=5)
        assert query.ranges({}, end) == ({}, {})
        assert query.membership.registry_id == fingerprint(hub.registry)


def test_after_an_outage_that_outlasts_the_lease_the_query_claims_again_and_passes_nothing_over(
    away: tuple[Hub, Outage],
) -> None:
    hub, outage = away
    with join_query(hub, HASTY) as query:
        start, first = run_batch(query, {}, 100)
        lease = query.membership.member.lease
        assert lease is not None
        outage.begin()
        threading.Thread(target=lambda: (eventually(lambda: not lease.alive), setattr(outage, "is_on", False))).start()
        end, spans = run_batch(query, start)
        assert outage.refused
        assert query.membership.member.lease is not lease
        assert {number: span.start for number, span in spans.items()} == {n: s.end for n, s in first.items()}
        assert all(spans[number].epoch > first[number].epoch for number in spans)
        query.finish(end)
    assert hub.group("g").describe().lag == 0


def test_an_outage_that_does_not_end_ends_the_query_with_advice(away: tuple[Hub, Outage]) -> None:
    hub, outage = away
    with join_query(hub, HASTY) as query:
        start, _ = run_batch(query, {}, 100)
        query.membership.settle_s = 0.2
        outage.begin()
        with pytest.raises(RegistryUnavailable, match=r"the lease has run out.* Start the query again"):
            query.latest(start, None, None)
        outage.is_on = False
        query.membership.settle_s = DEADLINE_S
        end, _ = run_batch(query, start)
        outage.renews = True
        outage.begin()
        with pytest.raises(
            RegistryUnavailable, match=r"could not be reached for the whole time of the lease.* Start the query again"
        ):
            query.finish(end)
        outage.is_on = False


@pytest.mark.parametrize(
    "error", [CommitUnknown("g", [0], "no reply"), GroupUnavailable("g", [0], "not written", "no reply")]
)
def test_what_a_group_says_of_an_outage_is_told_with_advice_and_stays_unknown_if_it_is(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, error: RegistryError
) -> None:
    def refuse() -> None:
        raise error

    with join_query(hub, replace(OPTIONS, lease_ttl=0.5)) as query:
        end, _ = run_batch(query, {}, 100)
        with monkeypatch.context() as patch:
            patch.setattr(query.membership.member, "commit", refuse)
            with pytest.raises(RegistryError, match=r"no reply\. Start the query again") as caught:
                query.finish(end)
        assert isinstance(caught.value, OutcomeUnknown) == isinstance(error, OutcomeUnknown)


def test_alone_a_repeated_batch_is_read_whole_or_not_at_all(hub: Hub) -> None:
    with join_query(hub, OPTIONS) as query:
        end, _ = run_batch(query, {}, 100)
    with join_query(hub, OPTIONS) as query:
        query.membership.settle(time.monotonic() + DEADLINE_S)
        lane = query.membership.lanes[2]
        lane.is_lost = True
        with pytest.raises(PartitionLost):
            query.ranges({}, end)


def lose(query: Query, number: int) -> None:
    """As the member finds out that somebody has taken a partition."""
    with query.membership.member.session.mutex:
        assert query.membership.member.session.protocol is not None
        query.membership.member.session.protocol.lose(number)


def put_checkpoint(hub: Hub, number: int, offset: int) -> None:
    hub.registry.commit(put={Keys("g").checkpoint(hub.topic("orders").id, number): Checkpoint(offset).dump()})


def test_k3_a_batch_is_told_the_same_however_often_spark_asks(hub: Hub) -> None:
    """A stream that stands twice in a plan is asked for twice."""
    with join_query(hub, SHARED) as query:
        end, spans = run_batch(query, {}, 100)
        lose(query, 2)
        assert query.ranges({}, end)[0] == spans
    put_checkpoint(hub, 1, 10)  # somebody else has done a part of it
    with join_query(hub, SHARED) as query:
        first = query.ranges({}, end)
        assert set(first[0]) == {0, 2, 3}
        assert query.ranges({}, end) == first
        after, rest = run_batch(query, end)
        assert {number: span.start for number, span in rest.items()} == {0: 25, 1: 10, 2: 25, 3: 25}
        query.finish(after)
        assert hub.group("g").describe().lag == 0


def test_k2_what_is_left_of_a_batch_that_was_published_in_part_is_read_in_the_next(hub: Hub) -> None:
    """One partition was lost between plan and batch, the sink published the others, and the driver died."""
    with join_query(hub, SHARED) as query:
        end = query.latest({}, 100, None)
        lose(query, 1)
        assert set(query.ranges({}, end)[0]) == {0, 2, 3}
    for number in (0, 2, 3):
        put_checkpoint(hub, number, 25)
    with join_query(hub, SHARED) as query:
        assert query.ranges({}, end) == ({}, {}), "the sink has this batch, and takes no more of it"
        _, spans = run_batch(query, end)
        assert {number: span.start for number, span in spans.items()} == {0: 25, 1: 0, 2: 25, 3: 25}


def test_g7_a_checkpoint_beyond_the_end_is_an_error(hub: Hub) -> None:
    put_checkpoint(hub, 3, 150)
    with (
        join_query(hub, OPTIONS) as query,
        pytest.raises(CheckpointOutOfRange, match=r"at offset 150 of orders/3.* at 100"),
    ):
        query.latest({}, None, None)


def test_available_now_does_not_end_because_the_lease_has(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process was stopped for longer than its lease, and its member has not yet noticed."""
    with join_query(hub, OPTIONS) as query:
        query.target_now()
        query.membership.settle(time.monotonic() + DEADLINE_S)
        deadline = GroupMember.deadline.__get__
        resumed_at = time.monotonic() + 0.5
        is_over = lambda member: float("-inf") if time.monotonic() < resumed_at else deadline(member)  # noqa: E731
        monkeypatch.setattr(GroupMember, "deadline", property(is_over))
        assert {span.end for span in query.latest({}, None, None).values()} == {100}


def test_k3_what_a_repeated_batch_leaves_out_is_not_passed_over_by_a_later_restart(single: Hub) -> None:
    with join_query(single, SHARED) as query:
        planned = query.latest({}, None, None)
        assert read(query, {}, planned) == [(0, 100)]
    with single.consumer("orders", "g", ack="manual") as inbox:  # the driver died, and a consumer does a part of it
        messages = inbox.poll(500, 10)
        while len(messages) < 50:
            messages += inbox.poll(500, 10)
        for message in messages[:50]:
            inbox.ack(message)
    with join_query(single, SHARED) as query:
        assert read(query, {}, planned) == []  # and Spark counts the batch as finished
    with join_query(single, SHARED) as query:
        assert read(query, planned, query.latest(planned, None, None)) == [(50, 100)]


def test_k3_what_was_lost_between_plan_and_batch_is_not_passed_over(single: Hub) -> None:
    with join_query(single, replace(SHARED, lease_ttl=5.0)) as query:
        planned = query.latest({}, None, None)
        lease = query.membership.member.lease
        assert lease is not None
        lease.close()
        eventually(lambda: query.membership.member.lease is not lease and query.membership.member.is_settled)
        assert read(query, {}, planned) == []
        assert read(query, planned, query.latest(planned, None, None)) == [(0, 100)]


def test_lanes_are_not_read_before_they_are_placed(hub: Hub) -> None:
    """A lease was lost and the partitions claimed again: the new lanes are at the group's checkpoints, which may lie
    before what Spark has finished."""
    with join_query(hub, OPTIONS) as query:
        membership = query.membership
        end, _ = run_batch(query, {})
        query.finish(end)
        assert membership.placed_lanes() is not None
        membership.lanes_assigned(list(membership.lanes.values()))
        assert membership.placed_lanes() is None
        assert len(membership.take_unplaced()) == 4
        assert membership.placed_lanes() is not None


@pytest.mark.parametrize("is_leased", [True, False])
def test_checkpoints_that_cannot_be_written_end_a_query_only_while_its_lease_lives(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, is_leased: bool
) -> None:
    """Without a lease, the lanes are over anyway: the next ones are placed by what Spark has finished."""

    def away() -> None:
        raise RegistryUnavailable("away")

    with join_query(hub, OPTIONS) as query, monkeypatch.context() as patch:
        end, _ = run_batch(query, {})
        patch.setattr(Membership, "is_leased", property(lambda _: is_leased))
        patch.setattr(query.membership, "lease_s", 0.0)
        patch.setattr(query.membership.member, "commit", away)
        if is_leased:
            with pytest.raises(RegistryUnavailable, match="Start the query again"):
                query.finish(end)
        else:
            query.finish(end)
