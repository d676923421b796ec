"""What a broker publishes of partitions that it cannot serve."""

from __future__ import annotations

import itertools

import pytest

from pxrs.cluster.broker.beginning import has_enough
from pxrs.cluster.ledgers import Quorum
from pxrs.cluster.placement import nodes_needed, shortfall
from pxrs.cluster.troubles import (
    LISTED_MAX,
    NODES,
    OTHER,
    PLACEMENT,
    RECOVERY,
    WHY_MAX,
    BadPlacement,
    Reason,
    Troubles,
    Unserved,
    reason_of,
    troubles_key,
)
from pxrs.errors import (
    InvalidPlacement,
    InvalidTopic,
    NotEnoughNodes,
    PartitionUnavailable,
    ReadFailed,
    RegistryUnavailable,
)
from pxrs.registry.memory import LIMITS

KEY = troubles_key("i1")


def test_what_is_published_is_bounded_and_names_the_oldest() -> None:
    rows = [Unserved("t" * 32, number, 1e9 - number, OTHER, "\udc80" * 9_000) for number in range(5_000)]
    failed = [BadPlacement(f"{number:05}", "\udc80" * 9_000) for number in range(5_000)]
    troubles = Troubles.of(rows, failed)
    assert troubles.unserved_total == 5_000
    assert [each.partition for each in troubles.unserved] == [*range(4_999, 4_999 - LISTED_MAX, -1)]
    assert len(troubles.unserved[0].why) == WHY_MAX
    assert len(troubles.placements) == LISTED_MAX
    assert len(troubles.dump()) < 750_000 < LIMITS.value_bytes_max, "ZooKeeper takes the fewest bytes"
    assert Troubles.parse(KEY, troubles.dump()) == troubles


def test_nothing_to_tell_is_false_and_one_trouble_is_not() -> None:
    assert not Troubles.of([], [])
    assert Troubles.of([Unserved("t", 0, 1.0, NODES, "why")], [])
    assert Troubles.of([], [BadPlacement("t", "why")])


def test_a_record_of_a_later_version_is_read() -> None:
    value = b'{"unserved":[{"topic_id":"t","partition":1,"since":2,"kind":"new","why":"w","more":1}],"else":3}'
    assert Troubles.parse(KEY, value) == Troubles((Unserved("t", 1, 2.0, OTHER, "w"),))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotEnoughNodes(2, 1, 3), Reason(NODES, "1 of 2 needed storage nodes accept entries (3 in the ensemble)")),
        (InvalidPlacement("it raised"), Reason(PLACEMENT, "it raised")),
        (PartitionUnavailable("ledger t/0/1", "no answer"), Reason(RECOVERY, "ledger t/0/1: no answer")),
        (ReadFailed("gone"), Reason(RECOVERY, "gone")),
        (PartitionUnavailable("orders/0", "a defect"), Reason(OTHER, "a defect")),
        (RegistryUnavailable("away"), Reason(OTHER, "away")),
        (ValueError(), Reason(OTHER, "ValueError")),
    ],
)
def test_the_reason_follows_from_the_error(error: Exception, reason: Reason) -> None:
    assert reason_of(error) == reason


def test_the_nodes_needed_are_those_with_which_every_entry_can_be_acknowledged() -> None:
    checked = 0
    for sizes in itertools.product(range(1, 7), repeat=3):
        try:
            quorum = Quorum(*sizes)
        except InvalidTopic:
            continue
        for count in range(quorum.ensemble + 1):
            nodes = ["n"] * count + [None] * (quorum.ensemble - count)
            assert has_enough(quorum, nodes) == (count >= nodes_needed(quorum)), (quorum, count)
            lack = shortfall(quorum, count)
            assert (lack is None) == (count == quorum.ensemble)
            assert lack is None or lack.can_store == has_enough(quorum, nodes)
            checked += 1
    assert checked > 100
