"""Begins the next ledger of a partition that this broker owns."""

from __future__ import annotations

from typing import NamedTuple

from pxrs.cluster import records
from pxrs.cluster.broker.context import Broker
from pxrs.cluster.ledgers import Fragment, LedgerRecord
from pxrs.cluster.records import OwnerRecord, TopicRecord
from pxrs.errors import Conflict, NotEnoughNodes, PartitionMoved
from pxrs.registry.contract import ABSENT


class Claim(NamedTuple):
    """The owner record of a partition as this broker has last written it."""

    owner: OwnerRecord
    version: int


class Begun(NamedTuple):
    """A ledger that was created in the registry, and the claim, which the same commit has changed."""

    record: LedgerRecord
    version: int
    claim: Claim


def next_ledger(broker: Broker, topic: TopicRecord, partition: int, claim: Claim, base: int) -> Begun:
    """Create the partition's next ledger, which begins at this offset. The commit expects the claim, so that a broker
    that has lost it creates none. Raises PartitionMoved, NotEnoughNodes."""
    nodes = chosen_nodes(broker, topic)
    owner = claim.owner
    record = LedgerRecord(topic.topic.id, partition, owner.next, owner.epoch, topic.quorum, base, (Fragment(0, nodes),))
    key = records.owner_key(topic.topic.id, partition)
    after = owner.with_ledger()
    try:
        versions = broker.registry.commit(
            {key: claim.version, record.key: ABSENT},
            {key: after.dump(), record.key: record.dump()},
            lease=broker.membership.lease,
        )
    except Conflict as error:
        raise PartitionMoved(f"{topic.topic.name}/{partition}: another broker has claimed the partition") from error
    return Begun(record, versions[record.key], Claim(after, versions[key]))


def chosen_nodes(broker: Broker, topic: TopicRecord) -> tuple[str | None, ...]:
    """The nodes of a new ledger; None where there is none. Raises NotEnoughNodes if no entry could be acknowledged."""
    nodes = broker.ensemble(topic)
    if any(
        sum(nodes[position] is not None for position in positions) < topic.quorum.ack_quorum
        for positions in map(topic.quorum.write_set, range(topic.quorum.ensemble))
    ):
        raise NotEnoughNodes(topic.quorum.ack_quorum, sum(node is not None for node in nodes))
    return nodes
