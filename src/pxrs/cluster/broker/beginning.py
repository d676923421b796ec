"""Creates the next ledger of a partition that this broker owns, and removes old ledgers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pxrs.cluster import records
from pxrs.cluster.broker.context import Broker
from pxrs.cluster.ledgers import Fragment, LedgerRecord, Quorum
from pxrs.cluster.placement import nodes_needed, storage_candidates
from pxrs.cluster.records import OwnerRecord, TopicRecord
from pxrs.errors import Conflict, InvalidPlacement, NotEnoughNodes, PartitionMoved
from pxrs.registry.contract import ABSENT


class Claim(NamedTuple):
    """The owner record of a partition, and its version, as this broker has last written it."""

    owner: OwnerRecord
    version: int


class Begun(NamedTuple):
    """A ledger that was created in the registry, and the claim as the same commit has changed it."""

    record: LedgerRecord
    version: int
    claim: Claim


def has_enough(quorum: Quorum, nodes: Sequence[str | None]) -> bool:
    """Whether every entry of a ledger with these nodes at its positions can get Qa acknowledgements."""
    return all(
        sum(nodes[position] is not None for position in quorum.write_set(entry)) >= quorum.ack_quorum
        for entry in range(quorum.ensemble)
    )


def next_ledger(broker: Broker, topic: TopicRecord, partition: int, claim: Claim, base: int) -> Begun:
    """Create the partition's next ledger, which begins at the offset `base`. The commit expects the version of the
    claim, so that a broker that has lost the claim creates no ledger. Raises PartitionMoved, NotEnoughNodes,
    InvalidPlacement."""
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
    """The node at each position of a new ledger; None where there is none. Raises NotEnoughNodes if an entry could not
    get Qa acknowledgements, InvalidPlacement if that is because of the placement function, or if it fails."""
    accepting = len(storage_candidates(broker.view.seen.takers))
    nodes = broker.ensemble(topic)
    if not has_enough(topic.quorum, nodes):
        needed = nodes_needed(topic.quorum)
        if accepting >= needed:
            raise InvalidPlacement(
                f"the placement function {topic.placement!r} chose {sum(node is not None for node in nodes)} of "
                f"{accepting} storage nodes, but {needed} are needed"
            )
        raise NotEnoughNodes(needed, accepting, topic.quorum.ensemble)
    return nodes


def remove_ledgers(broker: Broker, claim: Callable[[], Claim], gone: Sequence[LedgerRecord]) -> Iterator[set[int]]:
    """Remove the records of these ledgers of one partition, in as many commits as necessary. Yields, after each commit,
    the numbers of the removed ledgers. Storage nodes then remove the copies as garbage. claim: returns the current
    claim, whose version each commit expects. Raises Conflict, and what the registry raises."""
    count = max(1, broker.registry.limits.commit_keys_max - 1)
    for at in range(0, len(gone), count):
        part = gone[at : at + count]
        key = records.owner_key(part[0].topic_id, part[0].partition)
        broker.registry.commit({key: claim().version}, delete=[record.key for record in part])
        yield {record.number for record in part}
