"""What only an operator can decide about storage nodes: to retire one, to forget one, to go on without some (C6).

These are functions on the registry, which clients of brokers cannot reach. Each decision names who has made it. The
same commit leaves a record under `cluster/decisions/`, which a broker puts into the audit.

Retire a node that works, to take it out of service: brokers choose it no more, and make its copies anew on others.
`pxrs cluster status` shows when no ledger needs it (`NodeStatus.named` is 0); stop it then, and forget it.

Abandon nodes that will never return, if ledgers cannot be recovered without them. A recovery ends where Qw - Qa + 1
nodes of an entry's write set have no such entry. A node that does not answer counts as neither "yes" nor "no", so the
partition waits for it. Abandoned nodes count as "no": entries that were acknowledged and are on no other node are lost.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from pxrs.cluster import records
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.cluster.records import (
    IN_USE,
    RETIRED,
    Abandonment,
    Decision,
    NodeRecord,
    TopicRecord,
    abandoned_key,
    alive_key,
    node_key,
)
from pxrs.cluster.recovery import unsettled
from pxrs.errors import Conflict, InvalidArgument, RegistryUnavailable
from pxrs.events.recording import user
from pxrs.registry.contract import Registry

TRIES_MAX: Final = 20
"""How often a change is tried again because the record was changed by its node meanwhile."""


class Loss(NamedTuple):
    """What one ledger may lose if nodes are abandoned."""

    ledger: str
    topic: str
    """Its name."""
    partition: int
    state: str
    nodes: tuple[str, ...]
    """The abandoned nodes that have copies of this ledger."""
    first: int
    """Acknowledged messages from this offset on may be lost."""
    end: int | None
    """The offset behind the last message of the ledger; None: the ledger is not closed, and its end is not known."""
    entries: int | None
    """How many entries of a closed ledger are on these nodes alone, and are lost; None if it is not closed."""
    waits_for: tuple[str, ...]
    """Nodes that are away, too, and without which the recovery cannot end either. Abandon them as well, or wait."""


# Nodes that are to leave, or have left.


def retire(registry: Registry, node: str, who: str = "") -> None:
    """Let brokers move the copies of a node to others. It goes on serving what it has, until it is stopped. who: by
    default the user of this process. Raises InvalidArgument, what the registry raises."""
    _set_state(registry, node, RETIRED, Decision("retire_node", {"who": who or user(), "node": node}))


def reinstate(registry: Registry, node: str, who: str = "") -> None:
    """Use a node again that was retired. Raises as `retire`."""
    _set_state(registry, node, IN_USE, Decision("reinstate_node", {"who": who or user(), "node": node}))


def forget(registry: Registry, node: str, who: str = "") -> None:
    """Remove the record of a node that is stopped and that no ledger names. Its directory begins as a new node if it is
    ever started again. Raises InvalidArgument if it is alive or needed."""
    for _ in range(TRIES_MAX):
        _, version = _node(registry, node)
        if registry.get(alive_key(node)) is not None:
            raise InvalidArgument(f"storage node {node} is alive: retire it, wait until it is not needed, and stop it")
        for entry in registry.scan(records.LEDGERS):
            record = LedgerRecord.parse(entry.key, entry.value)
            if node in record.named:
                raise InvalidArgument(
                    f"storage node {node} is needed: ledger {record.id} names it; wait until `pxrs cluster status` "
                    "shows that its copies were made anew"
                )
        decision = Decision("forget_node", {"who": who or user(), "node": node})
        try:
            registry.commit({node_key(node): version}, _decided(decision), delete=[node_key(node)])
            return
        except Conflict:
            continue
    raise _contended(node)


def _set_state(registry: Registry, node: str, state: str, decision: Decision) -> None:
    for _ in range(TRIES_MAX):
        record, version = _node(registry, node)
        if record.state == state:
            return
        put = {node_key(node): replace(record, state=state).dump(), **_decided(decision)}
        try:
            registry.commit({node_key(node): version}, put)
            return
        except Conflict:  # the node has recorded the end of its journal
            continue
    raise _contended(node)


def _node(registry: Registry, node: str) -> tuple[NodeRecord, int]:
    try:
        entry = registry.get(node_key(node))
    except ValueError as error:
        raise InvalidArgument(str(error)) from error
    if entry is None:
        known = [each.key.removeprefix(records.NODES) for each in registry.scan(records.NODES)]
        raise InvalidArgument(f"there is no storage node {node!r}; there are {', '.join(known) or 'none'}")
    return NodeRecord.parse(entry.key, entry.value), entry.version


def _contended(node: str) -> RegistryUnavailable:
    return RegistryUnavailable(f"the record of storage node {node} was changed by others all the time: try again")


def _decided(decision: Decision) -> dict[str, bytes]:
    """The key and value that a broker turns into an event of the audit."""
    return {f"{records.DECISIONS}{time.time_ns():020}-{uuid.uuid4().hex[:8]}": decision.dump()}


# Nodes that will never return.


def losses(registry: Registry, nodes: Iterable[str]) -> list[Loss]:
    """What may be lost if these nodes are abandoned: the ledgers that cannot be recovered, or not be read, without
    them. Changes nothing. Raises InvalidArgument if one of the nodes is alive or not known."""
    chosen = frozenset(nodes)
    alive = {entry.key.removeprefix(records.ALIVE) for entry in registry.scan(records.ALIVE)}
    for node in sorted(chosen):
        _node(registry, node)
        if node in alive:
            raise InvalidArgument(f"storage node {node} is alive: only nodes that will never return are abandoned")
    topics = {
        record.topic.id: name
        for entry in registry.scan(records.TOPICS)
        for name, record in [(entry.key.removeprefix(records.TOPICS), TopicRecord.parse(entry.key, entry.value))]
    }
    found = [LedgerRecord.parse(entry.key, entry.value) for entry in registry.scan(records.LEDGERS)]
    return assess(found, chosen, alive, topics)


def assess(
    ledgers: Iterable[LedgerRecord], nodes: Collection[str], alive: Collection[str], topics: Mapping[str, str]
) -> list[Loss]:
    """Pure: as `losses`. topics: their names by id."""
    found = []
    for record in ledgers:
        if record.topic_id not in topics or not record.named.intersection(nodes):
            continue  # what belongs to no topic is removed, and is never recovered
        loss = _closed_loss(record, nodes, topics) if record.is_closed else _open_loss(record, nodes, alive, topics)
        if loss is not None:
            found.append(loss)
    return found


def _closed_loss(record: LedgerRecord, nodes: Collection[str], topics: Mapping[str, str]) -> Loss | None:
    assert record.last is not None
    gone = [
        entry
        for entry in range(record.last + 1)
        if all(node is None or node in nodes for _, node in record.nodes_of(entry))
    ]
    if not gone:
        return None
    return _loss(record, nodes, topics, entries=len(gone), waits_for=())


def _open_loss(
    record: LedgerRecord, nodes: Collection[str], alive: Collection[str], topics: Mapping[str, str]
) -> Loss | None:
    """None if the nodes that are alive are enough to recover the ledger."""
    is_blocked, waits_for = False, set[str]()
    before, after = {*record.abandoned}, {*record.abandoned, *nodes}
    for kept, needed in _needed(record):
        if _awaited(kept, needed, alive, before):
            is_blocked = True
            waits_for |= _awaited(kept, needed, alive, after)
    if not is_blocked:
        return None
    return _loss(record, nodes, topics, entries=None, waits_for=tuple(sorted(waits_for)))


def _needed(record: LedgerRecord) -> Iterator[tuple[list[str | None], int]]:
    """The write sets that a recovery needs: the nodes of each, and how many of its positions must answer.

    Behind the last entry that is known to be confirmed: so many that the end of the ledger is certain. Up to that
    entry: one that has a node, because the offset of the ledger's end, its length and the producers' state are read
    from its entries."""
    for fragment, entries in unsettled(record, record.confirmed):
        for entry in entries:
            yield [fragment.nodes[position] for position in record.quorum.write_set(entry)], record.quorum.refusals
    for fragment in record.fragments:
        last = record.last_of(fragment)
        behind = 1 + (record.confirmed if last is None else min(last, record.confirmed))
        for entry in range(fragment.first, min(behind, fragment.first + record.quorum.ensemble)):
            kept = [fragment.nodes[position] for position in record.quorum.write_set(entry)]
            yield kept, 1 + sum(node is None for node in kept)


def _awaited(kept: list[str | None], needed: int, alive: Collection[str], abandoned: Collection[str]) -> set[str]:
    """The nodes of a write set that a recovery waits for; none if enough of them answer. If one of them is abandoned,
    all the others are heard, so as not to lose more than must be (`Recovery`)."""
    away = {node for node in kept if node is not None and node not in alive and node not in abandoned}
    if len(kept) - len(away) < needed or any(node in abandoned for node in kept):
        return away
    return set()


def _loss(
    record: LedgerRecord,
    nodes: Collection[str],
    topics: Mapping[str, str],
    *,
    entries: int | None,
    waits_for: tuple[str, ...],
) -> Loss:
    return Loss(
        record.id,
        topics[record.topic_id],
        record.partition,
        record.state,
        tuple(sorted(record.named.intersection(nodes))),
        record.base,
        record.end,
        entries,
        waits_for,
    )


def abandon(
    registry: Registry, nodes: Iterable[str], ledgers: Collection[str] | None = None, who: str = ""
) -> list[Loss]:
    """Go on without these nodes, in the ledgers that `losses` lists, or in those of them that are named here. The
    processes of the nodes must be stopped for good: a node that still runs, cut off from the registry, may still
    acknowledge entries to a broker that is cut off, too, and these are lost.

    Returns what may be lost. The brokers that own the partitions recover them within seconds. Nodes that come back
    after all serve other ledgers as before. Raises as `losses`."""
    chosen = sorted({*nodes})
    found = [loss for loss in losses(registry, chosen) if ledgers is None or loss.ledger in ledgers]
    if ledgers is not None and (others := {*ledgers} - {loss.ledger for loss in found}):
        raise InvalidArgument(
            f"these ledgers do not need the decision, or are not there: {', '.join(sorted(others))}; `losses` lists "
            "those that do"
        )
    name = who or user()
    count = max(1, registry.limits.commit_keys_max - 1)
    for at in range(0, len(found), count):
        part = found[at : at + count]
        fields = {"who": name, "nodes": chosen, "ledgers": [loss.ledger for loss in part], "count": len(part)}
        put = _decided(Decision("abandon_nodes", fields))
        for loss in part:
            key = abandoned_key(records.LedgerName.of_id(loss.ledger))
            entry = registry.get(key)
            # A recovery may not have seen an earlier decision yet: it stands.
            before = () if entry is None else Abandonment.parse(key, entry.value).nodes
            put[key] = Abandonment(tuple(sorted({*before, *loss.nodes})), name, time.time()).dump()
        registry.commit(put=put)
    return found


def abandonment_of(registry: Registry, record: LedgerRecord) -> Abandonment | None:
    """Which nodes this ledger goes on without, if an operator has decided so. Raises what the registry raises."""
    key = abandoned_key(record.name)
    entry = registry.get(key)
    return None if entry is None else Abandonment.parse(key, entry.value)
