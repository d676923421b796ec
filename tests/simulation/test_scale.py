"""What a rebalance costs grows with what moves, not with what exists: calls, keys and bytes, counted.

`python -m benchmarks.groups_scale` shows the same for 1,000 members and 10,000 partitions.
"""

from __future__ import annotations

import functools

import pytest

from pxrs.group.protocol import MemberProtocol
from pxrs.group.snapshot import GAP_MAX, GroupState
from pxrs.registry.steps import Steps
from pxrs.testing.simulator.scale import Crowd, CrowdMember, Share

SMALL, LARGE = 20, 80
"""Members; each owns ten partitions."""
CALLS = 30
"""What a member may ask of the store in a rebalance, and more for each partition that it gains or loses."""
CALLS_PER_MOVE = 6
BYTES = 6_000
BYTES_PER_MOVE = (GAP_MAX + 8) * 300


@functools.cache
def costs(members: int, change: str) -> dict[str, Share]:
    crowd = Crowd(members, 10 * members)
    crowd.check()
    found = crowd.costs_of(getattr(crowd, change))
    crowd.check()
    return {share.who: share for share in found}


@pytest.mark.parametrize("change", ["join", "die", "die_leading"])
def test_who_neither_leads_nor_gains_nor_loses_has_nothing_to_do(change: str) -> None:
    others = costs(LARGE, change)["all others"]
    assert others.members > LARGE // 2
    if change == "die_leading":
        # All of them see that the leader is gone, and one takes the lead.
        assert others.most.calls <= CALLS
        assert others.most.size <= BYTES
    else:
        assert others.most.calls == 0


@pytest.mark.parametrize("change", ["join", "die", "die_leading"])
@pytest.mark.parametrize("who", ["gain or lose", "joiner"])
def test_who_gains_or_loses_is_charged_for_that_alone(change: str, who: str) -> None:
    for members in (SMALL, LARGE):
        share = costs(members, change).get(who)
        if share is None:
            assert (who, change) in {("joiner", "die"), ("joiner", "die_leading")}
            continue
        assert 0 < share.moved_max <= 11
        assert share.most.calls <= CALLS + CALLS_PER_MOVE * share.moved_max
        assert share.most.size <= BYTES + BYTES_PER_MOVE * share.moved_max


@pytest.mark.parametrize("change", ["join", "die"])
def test_a_larger_group_costs_a_member_no_more(change: str) -> None:
    small, large = costs(SMALL, change)["gain or lose"], costs(LARGE, change)["gain or lose"]
    assert large.most.calls <= small.most.calls * max(1.0, large.moved_max / small.moved_max)
    assert large.most.size <= 1.1 * small.most.size * max(1.0, large.moved_max / small.moved_max)


def test_the_leader_alone_reads_the_whole_group_and_writes_what_changes() -> None:
    """It reads all owners when it decides, and once more when it has written the targets."""
    leader = costs(LARGE, "join")["leader"]
    assert leader.most.keys > 2 * LARGE * 10
    assert leader.most.writes <= 3


class ReadsEverything(MemberProtocol):
    """As it was: every member reads all owners."""

    def _read_owners(self, state: GroupState) -> Steps[None]:
        yield from self._scan(state, self.keys.members)
        yield from self._scan(state, self.keys.owners)


class WatchesEverything(MemberProtocol):
    """As it was: every member is woken by every other one."""

    def watched_keys(self) -> frozenset[str]:
        return super().watched_keys() | {self.keys.members}


@pytest.mark.parametrize("defect", [ReadsEverything, WatchesEverything])
def test_a_member_that_reads_or_watches_everything_is_noticed(
    defect: type[MemberProtocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pxrs.testing.simulator.scale.MemberProtocol", defect)
    crowd = Crowd(2 * SMALL, 20 * SMALL)
    found = {share.who: share for share in crowd.costs_of(crowd.join)}
    others, loser = found["all others"], found["gain or lose"]
    assert others.most.calls > 0 or loser.most.size > BYTES + BYTES_PER_MOVE * loser.moved_max


def test_a_crowd_that_is_not_settled_is_noticed() -> None:
    crowd = Crowd(2, 4)
    member: CrowdMember = crowd.members[0]
    member.protocol.held.popitem()
    with pytest.raises(AssertionError, match="3 of 4"):
        crowd.check()
