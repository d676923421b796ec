"""Begins the next ledger of a partition that this broker owns, and removes the first ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pxrs.cluster import records
from pxrs.cluster.broker.context import Broker
from pxrs.cluster.ledgers import Fragment, LedgerRecord, Quorum
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


def has_enough(quorum: Quorum, nodes: Sequence[str | None]) -> bool:
    """Whether every entry of a ledger at these positions can get Qa acknowledgements."""
    return all(
        sum(nodes[position] is not None for position in quorum.write_set(entry)) >= quorum.ack_quorum
        for entry in range(quorum.ensemble)
    )


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
    if not has_enough(topic.quorum, nodes):
        raise NotEnoughNodes(topic.quorum.ack_quorum, sum(node is not None for node in nodes))
    return nodes


def remove_ledgers(broker: Broker, claim: Callable[[], Claim], gone: Sequence[LedgerRecord]) -> Iterator[set[int]]:
    """Remove the records of these ledgers of one partition, in as many commits as it takes: the numbers of those that
    each has removed. The nodes find that their copies have no record. claim: as it is at the moment of each commit.
    Raises Conflict, what the registry raises."""
    count = max(1, broker.registry.limits.commit_keys_max - 1)
    for at in range(0, len(gone), count):
        part = gone[at : at + count]
        key = records.owner_key(part[0].topic_id, part[0].partition)
        broker.registry.commit({key: claim().version}, delete=[record.key for record in part])
        yield {record.number for record in part}
