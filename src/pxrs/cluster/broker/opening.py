"""Opens a partition that this broker has claimed.

`open_partition` recovers the last ledger, rebuilds the producers' state, and begins the next ledger. Every step can be
repeated: if the broker fails in between, the next owner begins from the first step (C1).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pxrs.cluster import records
from pxrs.cluster.broker.beginning import Claim
from pxrs.cluster.broker.context import Broker
from pxrs.cluster.broker.entries import STATE_ENTRY, load_state, origin_heads
from pxrs.cluster.broker.opened import Opened, counts
from pxrs.cluster.broker.partition import OwnedPartition
from pxrs.cluster.broker.recovering import Recoverer
from pxrs.cluster.deciding import abandonment_of
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.cluster.records import OwnerRecord, state_ledgers
from pxrs.cluster.troubles import RECOVERY, Reason
from pxrs.errors import PartitionMoved, PartitionUnavailable, ReadFailed
from pxrs.log.producers import Producers

_logger = logging.getLogger(__name__)


def open_partition(broker: Broker, partition: OwnedPartition, is_crowded: Callable[[], bool] = lambda: False) -> bool:
    """Open the partition and serve it. Returns whether a ledger had to be recovered. is_crowded: as for `Recoverer`.
    Raises PartitionMoved if another broker has claimed it, PartitionUnavailable if too few nodes answer, and what the
    registry raises."""
    topic = partition.topic
    key = records.owner_key(topic.topic.id, partition.partition)
    entry = broker.registry.get(key)
    owner = OwnerRecord() if entry is None else OwnerRecord.parse(entry.key, entry.value)
    if entry is None or owner.broker != partition.incarnation or owner.epoch != partition.epoch:
        moved = PartitionMoved(f"{partition.name}: another broker has claimed the partition")
        partition.give_up(moved)
        raise moved
    partition.claim = claim = Claim(owner, entry.version)
    counted = counts(broker.view.seen.alive)  # before the records, which nodes may change meanwhile
    chain = [
        (LedgerRecord.parse(found.key, found.value), found.version)
        for found in broker.registry.scan(records.ledgers_prefix(topic.topic.id, partition.partition))
    ]
    closed = [record for record, _ in chain]
    has_recovered = bool(chain) and not closed[-1].is_closed
    if has_recovered:
        record, version = chain[-1]
        _logger.info("recovering ledger %s", record.id)
        if partition.reason is None:  # else the reason of the last attempt is more exact
            partition.tell_why(Reason(RECOVERY, f"ledger {record.id} is being recovered{_away(broker, record)}"))
        confirmed = partition.confirmed_of(record.id)
        recoverer = Recoverer(
            broker, topic, record, version, partition.epoch, partition.check_kept, confirmed, is_crowded
        )
        try:
            closed[-1] = recoverer.run().record
        except PartitionUnavailable as error:
            raise PartitionUnavailable(error.place, f"{error.why}{_away(broker, record)}") from error
    partition.check_end(closed)
    producers = _producers(broker, partition, closed)
    end = closed[-1].end if closed else 0
    assert end is not None
    writer, claim = partition.begin_next(end, claim)
    partition.serve(Opened(closed, writer, producers, counted, claim))
    return has_recovered


def _away(broker: Broker, record: LedgerRecord) -> str:
    """The nodes of the ledger that are away now, as the end of a message."""
    away = sorted(record.named - broker.view.seen.alive.keys())
    if not away:
        return ""
    return f"; of its storage nodes {', '.join(away)} {'is' if len(away) == 1 else 'are'} away"


def _producers(broker: Broker, partition: OwnedPartition, closed: list[LedgerRecord]) -> Producers:
    """The producers' state at the end of the closed ledgers (C3)."""
    producers = Producers()
    for record in closed[state_ledgers(closed) :] if closed else ():
        if record.last is None or record.last < STATE_ENTRY:
            continue
        try:
            _load(broker, partition, record, producers)
        except ReadFailed as error:
            if not record.abandoned and abandonment_of(broker.registry, record) is None:
                raise
            # An operator has accepted the loss (C6). A batch that a producer sends again may now be stored twice.
            _logger.error("%s: incomplete producers' state, a batch may be stored twice: %s", partition.name, error)
    return producers


def _load(broker: Broker, partition: OwnedPartition, record: LedgerRecord, producers: Producers) -> None:
    """Add the producers' state in one ledger: its entry 0, and the origins of its batches. Raises ReadFailed,
    PartitionUnavailable."""
    assert record.last is not None
    now = broker.clock.wall_time_us() / 1e6
    (state,) = broker.reader.read(record, STATE_ENTRY, STATE_ENTRY)
    try:
        producers.load(load_state(bytes(state.body)))
    except (KeyError, TypeError, ValueError) as error:
        raise PartitionUnavailable(partition.name, f"entry 0 of ledger {record.id} is damaged: {error}") from error
    if record.last > STATE_ENTRY:
        for read in broker.reader.read(record, STATE_ENTRY + 1, record.last, heads=True):
            where = f"entry {read.entry} of ledger {record.id}"
            producers.note_all(origin_heads(read.body, where, partition.place), now)
