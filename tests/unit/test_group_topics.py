"""Groups whose members read several topics: their records, who should own what, and what a member does."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from pxrs.errors import Conflict, GroupActive, OutcomeUnknown, RegistryCorrupt
from pxrs.group.assign import shared_out
from pxrs.group.lane import Lane
from pxrs.group.protocol import MemberProtocol
from pxrs.group.reconcile import Claim, Me, assign_all, moving, reconcile
from pxrs.group.records import Keys, Leader, Member, Owner, ReadTopic, Target, gate_key
from pxrs.group.snapshot import GroupState
from pxrs.log.numbering import Numbering, TopicPartition
from pxrs.registry.contract import Registry
from pxrs.registry.memory import MemoryRegistry, MemoryStore
from pxrs.registry.steps import Write, drive, perform

ORDERS, RETURNS, REFUNDS = (
    ReadTopic(f"{name}-id", name, count) for name, count in (("orders", 4), ("returns", 2), ("refunds", 1))
)
KEYS = Keys("g")


def member(name: str, *topics: ReadTopic, since: float = 0.0, **fields: object) -> Member:
    return Member.reading(name, topics, since=since, **fields)


def state_of(*members: Member) -> GroupState:
    return GroupState({each.name: replace(each, since=float(at)) for at, each in enumerate(members)})


def shares(wanted: dict[str, dict[str, list[int]]]) -> dict[str, int]:
    return {name: sum(map(len, topics.values())) for name, topics in wanted.items()}


class TestRecords:
    def test_the_record_of_a_member_of_one_topic_is_stored_as_before(self) -> None:
        stored = json.loads(member("w", ORDERS).dump())
        assert "further" not in stored
        assert (stored["topic"], stored["topic_name"], stored["partitions"]) == ("orders-id", "orders", 4)
        assert Member.load("k", member("w", ORDERS).dump()) == member("w", ORDERS)

    def test_the_record_of_a_member_of_several_topics_names_them_all(self) -> None:
        found = Member.load("k", member("w", ORDERS, RETURNS, REFUNDS).dump())
        assert found.reads == (ORDERS, RETURNS, REFUNDS)
        assert found.topics == {"orders-id", "returns-id", "refunds-id"}
        assert found.numbering.count == 7
        assert found == member("w", ORDERS, RETURNS, REFUNDS)

    @pytest.mark.parametrize("further", [5, [["returns-id"]], [["returns-id", "returns", 2, 3]]])
    def test_a_damaged_record_is_named(self, further: object) -> None:
        stored = json.loads(member("w", ORDERS).dump())
        with pytest.raises(RegistryCorrupt, match="k: not a valid member record"):
            Member.load("k", json.dumps({**stored, "further": further}).encode())


class TestShares:
    def test_x4_two_topics_of_one_partition_are_shared_by_two_members(self) -> None:
        one, other = replace_count(ORDERS, 1), replace_count(RETURNS, 1)
        wanted = assign_all(state_of(member("a", one, other), member("b", one, other)))
        assert shares(wanted) == {"a": 1, "b": 1}

    @pytest.mark.parametrize("assignor", ["sticky", "round-robin"])
    @pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
    def test_x4_shares_are_fair_over_all_topics_together(self, assignor: str, count: int) -> None:
        found = state_of(*(member(f"m{n}", ORDERS, RETURNS, REFUNDS, assignor=assignor) for n in range(count)))
        sizes = shares(assign_all(found)).values()
        assert sum(sizes) == 7
        assert max(sizes) - min(sizes) <= 1

    @pytest.mark.parametrize("assignor", ["sticky", "round-robin", "range"])
    def test_x4_every_member_gets_a_share_of_each_topic_at_first(self, assignor: str) -> None:
        """A busy topic is not the work of one member alone."""
        topics = [replace_count(each, 4) for each in (ORDERS, RETURNS)]
        wanted = assign_all(state_of(*(member(name, *topics, assignor=assignor) for name in ("a", "b"))))
        assert {name: {topic: len(numbers) for topic, numbers in some.items()} for name, some in wanted.items()} == {
            name: {"orders-id": 2, "returns-id": 2} for name in ("a", "b")
        }

    def test_x4_range_gives_the_same_partitions_of_each_topic_to_the_same_member(self) -> None:
        topics = [replace_count(each, 5) for each in (ORDERS, RETURNS, REFUNDS)]
        wanted = assign_all(state_of(*(member(name, *topics, assignor="range") for name in ("a", "b"))))
        assert wanted == {
            "a": {each.id: [0, 1, 2] for each in topics},
            "b": {each.id: [3, 4] for each in topics},
        }

    def test_members_that_read_different_topics_share_what_they_have_in_common(self) -> None:
        found = state_of(member("a", ORDERS, RETURNS), member("b", RETURNS), member("c", ORDERS, RETURNS))
        wanted = assign_all(found)
        assert wanted["b"].keys() == {"returns-id"}
        owned = [(topic, number) for some in wanted.values() for topic, numbers in some.items() for number in numbers]
        assert sorted(owned) == [*(("orders-id", n) for n in range(4)), *(("returns-id", n) for n in range(2))]
        assert {name: len(wanted[name]["orders-id"]) for name in ("a", "c")} == {"a": 2, "c": 2}

    def test_k4_a_member_that_must_be_alone_gets_all_of_its_topics_and_nothing_else(self) -> None:
        found = state_of(member("a", RETURNS, REFUNDS), member("b", ORDERS, RETURNS, is_alone=True))
        assert assign_all(found) == {
            "a": {"refunds-id": [0]},
            "b": {"orders-id": [0, 1, 2, 3], "returns-id": [0, 1]},
        }

    @pytest.mark.parametrize("assignor", ["sticky", "round-robin", "range"])
    def test_x5_the_same_members_are_assigned_the_same_again(self, assignor: str) -> None:
        """Otherwise partitions would move at each look of the leader."""
        rng = random.Random(1)
        for _ in range(200):
            topics = [replace_count(each, rng.randint(1, 6)) for each in (ORDERS, RETURNS, REFUNDS)]
            found = state_of(
                *(
                    member(f"m{n}", *rng.sample(topics, rng.randint(1, 3)), assignor=assignor)
                    for n in range(rng.randint(1, 5))
                )
            )
            for _ in range(3):
                wanted = assign_all(found)
                _check_complete(found, wanted)
                found.targets = {name: (Target(1, some), 1) for name, some in wanted.items()}
                assert assign_all(found) == wanted
                gone = rng.choice(list(found.members))
                if len(found.members) > 1:
                    del found.members[gone]

    def test_x7_what_a_joining_member_does_not_read_does_not_move(self) -> None:
        found = state_of(member("a", ORDERS, RETURNS), member("b", ORDERS, RETURNS))
        found.targets = {name: (Target(1, some), 1) for name, some in assign_all(found).items()}
        before = {name: target.partitions["orders-id"] for name, (target, _) in found.targets.items()}
        found.members["c"] = member("c", RETURNS, since=9.0)
        after = assign_all(found)
        assert {name: after[name]["orders-id"] for name in ("a", "b")} == before

    def test_sticky_moves_the_fewest_of_all_topics_together(self) -> None:
        members = ["a", "b", "c"]
        before: dict[TopicPartition, str] = shared_out("sticky", members[:2], {"x": 3, "y": 3}, lambda _: None)
        after = shared_out("sticky", members, {"x": 3, "y": 3}, before.get)
        assert Counter(after.values()) == {"a": 2, "b": 2, "c": 2}
        assert sum(before[place] != after[place] for place in before) == 2


def replace_count(topic: ReadTopic, partitions: int) -> ReadTopic:
    return topic._replace(partitions=partitions)


def _check_complete(found: GroupState, wanted: dict[str, dict[str, list[int]]]) -> None:
    """Each partition that somebody reads is meant for one member, which reads its topic."""
    meant = Counter((topic, n) for some in wanted.values() for topic, numbers in some.items() for n in numbers)
    read = {each for one in found.members.values() for each in one.reads}
    assert meant == Counter((each.id, n) for each in read for n in range(each.partitions))
    for name, some in wanted.items():
        assert some.keys() <= found.members[name].topics


class TestActions:
    def test_a_member_claims_partitions_of_each_topic_by_their_owner_keys(self) -> None:
        seen = state_of(member("a", ORDERS, RETURNS))
        seen.leader = Leader("b", 1), 1
        seen.members["b"] = member("b", ORDERS)
        seen.targets["a"] = Target(1, {"orders-id": [1], "returns-id": [0, 1], "refunds-id": [0]}), 7
        seen.owners = {
            ("orders-id", 1): (Owner("b", 3), 13),
            ("returns-id", 0): (Owner(None, 4), 14),
            ("returns-id", 1): (Owner("dead", 5), 15),
        }
        me = Me("a", Numbering([("orders-id", 4), ("returns-id", 2)]))
        assert moving(seen.target("a")[0], me) == {1, 4, 5}
        assert reconcile(seen, me, {}, 0.0, 10.0) == [Claim(4, 14, 5, None), Claim(5, 15, 6, "dead")]


class Joiner:
    """A member on a registry in memory. The test runs its steps one by one."""

    def __init__(
        self,
        registry: Registry,
        name: str,
        *topics: ReadTopic,
        keeps_unread: Sequence[ReadTopic] = (),
        keys_max: int = 64,
        **fields: object,
    ) -> None:
        self.registry, self.lease = registry, registry.lease(60)
        self.started: dict[int, int] = {}
        self.protocol = MemberProtocol(
            KEYS,
            f"{name}-1",
            member(name, *topics, **fields),
            self,
            lambda number, first: 100 * number + first,
            wall=lambda: 0.0,
            keys_max=keys_max,
            handover_s=30.0,
            keeps_unread={each.id for each in keeps_unread},
        )

    def join(self) -> bool:
        return drive(self.protocol.join(), self.registry, self.lease)

    def settle(self) -> None:
        while drive(self.protocol.look(0.0), self.registry, self.lease):
            pass

    def assigned(self, partition: int, epoch: int, offset: int) -> Lane:
        self.started[partition] = offset
        return Lane(partition, epoch, offset)

    def revoked(self, lane: Lane) -> None: ...

    def resumed(self, lane: Lane) -> None: ...

    def released(self, lane: Lane) -> None:
        del self.started[lane.partition]

    def lost(self, lane: Lane) -> None:
        del self.started[lane.partition]


@pytest.fixture
def registry() -> Iterator[Registry]:
    with MemoryRegistry(MemoryStore()) as registry:
        yield registry


class TestProtocol:
    @pytest.mark.parametrize("keys_max", [5, 64])
    def test_g6_every_partition_of_every_topic_has_its_own_start(self, registry: Registry, keys_max: int) -> None:
        one = Joiner(registry, "a", ORDERS, RETURNS, REFUNDS, keys_max=keys_max)
        assert one.join()
        one.settle()
        assert one.started == {number: 100 * number for number in range(7)}
        found = {entry.key for entry in registry.scan(KEYS.checkpoints)}
        assert found == {
            KEYS.checkpoint(each.id, n) for each in (ORDERS, RETURNS, REFUNDS) for n in range(each.partitions)
        }

    def test_g6_a_topic_that_joins_later_is_pinned_too(self, registry: Registry) -> None:
        assert Joiner(registry, "a", ORDERS).join()
        assert Joiner(registry, "b", ORDERS, RETURNS).join()
        assert len(registry.scan(KEYS.checkpoints_of(RETURNS.id))) == RETURNS.partitions

    def test_g6_a_member_waits_for_whoever_writes_the_starts_of_any_of_its_topics(self, registry: Registry) -> None:
        writer = Joiner(registry, "a", RETURNS)
        registry.commit(ephemeral={KEYS.pinning(RETURNS.id): b"a-1"}, lease=writer.lease)
        waiting = Joiner(registry, "b", ORDERS, RETURNS)
        assert not waiting.join()
        assert waiting.protocol.pin_keys == {KEYS.starts(RETURNS.id), KEYS.pinning(RETURNS.id)}
        assert writer.join()
        assert drive(waiting.protocol.pin(), registry, waiting.lease)
        assert waiting.protocol.pin_keys == set()

    def test_o10_only_the_gates_of_topics_with_keep_unread_are_written(self, registry: Registry) -> None:
        assert Joiner(registry, "a", ORDERS, RETURNS, keeps_unread=[RETURNS]).join()
        assert registry.get(gate_key(RETURNS.id)) is not None
        assert registry.get(gate_key(ORDERS.id)) is None

    @pytest.mark.parametrize("keys_max", [2, 5, 64])
    def test_checkpoints_of_all_topics_are_written_and_handed_over(self, registry: Registry, keys_max: int) -> None:
        one, other = (Joiner(registry, name, ORDERS, RETURNS, keys_max=keys_max) for name in ("a", "b"))
        assert one.join()
        one.settle()
        for number, holding in one.protocol.held.items():
            holding.lane.position = holding.lane.handed = holding.lane.done = 1000 + number
        assert other.join()
        for _ in range(3):
            one.settle()
            other.settle()
        assert len(one.started) == len(other.started) == 3
        assert other.started == {number: 1000 + number for number in other.started}
        assert drive(one.protocol.commit(one.protocol.due()), registry, one.lease) == []
        state = GroupState.of(KEYS, registry.scan(KEYS.root))
        places = [*(("orders-id", n) for n in range(4)), *(("returns-id", n) for n in range(2))]
        assert {place: each.offset for place, (each, _) in state.checkpoints.items()} == {
            place: 1000 + number for number, place in enumerate(places)
        }
        owners = {place: owner.incarnation for place, (owner, _) in state.owners.items()}
        assert owners == {place: "a-1" if number in one.started else "b-1" for number, place in enumerate(places)}

    @pytest.mark.parametrize("alone_first", [True, False])
    def test_k4_a_member_that_must_be_alone_shares_no_topic(self, registry: Registry, alone_first: bool) -> None:
        alone = Joiner(registry, "a", ORDERS, RETURNS, is_alone=True)
        other = Joiner(registry, "b", RETURNS, REFUNDS)
        first, second = (alone, other) if alone_first else (other, alone)
        assert first.join()
        with pytest.raises(GroupActive):
            second.join()
        assert Joiner(registry, "c", REFUNDS if alone_first else ORDERS).join(), "it shares no topic with that one"
        with pytest.raises(GroupActive):
            Joiner(registry, "d", RETURNS, is_alone=not alone_first).join()


class TestLateTargets:
    """A commit of the leader's whose reply was lost may be applied long after the leader has decided anew (R5)."""

    @pytest.mark.parametrize("losses", [1, 2, 3])
    def test_r5_targets_that_are_applied_late_leave_no_partition_without_an_owner(
        self, registry: Registry, losses: int
    ) -> None:
        """The leader takes a partition from a member for a new one, in two commits. The first one gets no reply, the
        new member goes, and the leader finds the targets as it wants them. If the first commit were applied then, the
        member would release a partition that is in nobody's target, and nothing would wake the leader."""
        leader = Joiner(registry, "z", RETURNS, keys_max=2)
        one, new = Joiner(registry, "a", ORDERS), Joiner(registry, "b", ORDERS)
        for each in (leader, one):
            assert each.join()
            leader.settle()
        one.settle()
        assert one.started.keys() == {0, 1, 2, 3}
        assert new.join()
        lost: list[Write] = []

        def lose(write: Write) -> dict[str, int]:
            lost.append(write)
            raise OutcomeUnknown("no reply")

        for _ in range(losses):
            with pytest.raises(OutcomeUnknown):
                drive(leader.protocol.look(0.0), registry, leader.lease, commit=lose)
        assert [list(each.put) for each in lost] == [[KEYS.target("a-1")], *[[KEYS.leader]] * (losses - 1)]
        new.lease.close()
        leader.settle()
        for late in lost:
            with pytest.raises(Conflict):
                perform(late, registry, leader.lease)
        one.settle()
        assert one.started.keys() == {0, 1, 2, 3}


def test_x4_whatever_topics_members_read_all_is_owned_in_the_end(registry: Registry) -> None:
    """All members join, one after the other goes: what is left is owned by those that read it."""
    sets = list(itertools.chain.from_iterable(itertools.combinations((ORDERS, RETURNS, REFUNDS), n) for n in (1, 2, 3)))
    joiners = [Joiner(registry, f"m{at}", *topics, since=float(at)) for at, topics in enumerate(sets)]
    for each in joiners:
        assert each.join()
    while joiners:
        for _ in range(4):
            for each in joiners:
                each.settle()
        owned = Counter(each.protocol.place(number) for each in joiners for number in each.started)
        read = {topic for each in joiners for topic in each.protocol.member.reads}
        assert owned == Counter((topic.id, n) for topic in read for n in range(topic.partitions))
        joiners.pop(0).lease.close()
