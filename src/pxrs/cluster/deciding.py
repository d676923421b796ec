"""The decisions of operators about storage nodes: retire, reinstate, forget and abandon (C6).

These functions change the registry directly, which clients of brokers cannot do. Each decision names the person who
made it. The commit that carries out a decision also writes a record under `cluster/decisions/`, which a broker records
in the audit.

Retire a node to take it out of service while it works: brokers stop using it for new ledgers and create its copies
again on other nodes. When `pxrs cluster status` shows that no ledger needs it (`NodeStatus.named` is 0), stop it and
forget it, which removes its record.

Abandon nodes that will never return, if ledgers cannot be recovered without them. A recovery ends a ledger before the
first entry of which Qw - Qa + 1 nodes of its write set answer that they do not have it. A node that does not answer
counts neither for nor against, and so does one that is in doubt (C7) as long as another one does not answer. So the
partition waits. An abandoned node counts as if it did not have the entry: acknowledged entries that no other node has
are lost.
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
    AliveNode,
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
"""How often a change is repeated after a conflict: a node writes its own record too."""


class Loss(NamedTuple):
    """What may be lost of one ledger if nodes are abandoned."""

    ledger: str
    topic: str
    """The name of the topic."""
    partition: int
    state: str
    nodes: tuple[str, ...]
    """The nodes to abandon that this ledger's record names."""
    first: int
    """Acknowledged messages from this offset on may be lost."""
    end: int | None
    """The offset after the last message of the ledger; None if the ledger is not closed, so that its end is not
    known."""
    entries: int | None
    """How many entries of a closed ledger only these nodes have, which would be lost; None if the ledger is not
    closed."""
    waits_for: tuple[str, ...]
    """Other nodes that are away and without which the recovery cannot finish. Abandon them as well, or wait for
    them."""


# Retiring and forgetting nodes.


def retire(registry: Registry, node: str, who: str = "") -> None:
    """Have brokers create the node's copies again on other nodes. The node serves what it has until it is stopped. who:
    by default the user of this process. Raises InvalidArgument, and what the registry raises."""
    _set_state(registry, node, RETIRED, Decision("retire_node", {"who": who or user(), "node": node}))


def reinstate(registry: Registry, node: str, who: str = "") -> None:
    """Cancel the retirement of a node. Raises as `retire`."""
    _set_state(registry, node, IN_USE, Decision("reinstate_node", {"who": who or user(), "node": node}))


def forget(registry: Registry, node: str, who: str = "") -> None:
    """Remove the record of a node that is stopped and that no ledger's record names. If the node is started again, it
    starts with a new id. Raises InvalidArgument if it is alive or needed."""
    for _ in range(TRIES_MAX):
        _, version = _node(registry, node)
        if registry.get(alive_key(node)) is not None:
            raise InvalidArgument(f"storage node {node} is alive: retire it, and stop it when no ledger needs it")
        for entry in registry.scan(records.LEDGERS):
            record = LedgerRecord.parse(entry.key, entry.value)
            if node in record.named:
                raise InvalidArgument(
                    f"storage node {node} is in use: ledger {record.id} names it; wait until `pxrs cluster status` "
                    "shows that its copies are on other nodes"
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
        except Conflict:  # for example because the node has written the end of its journal to its record
            continue
    raise _contended(node)


def _node(registry: Registry, node: str) -> tuple[NodeRecord, int]:
    try:
        entry = registry.get(node_key(node))
    except ValueError as error:
        raise InvalidArgument(str(error)) from error
    if entry is None:
        known = [each.key.removeprefix(records.NODES) for each in registry.scan(records.NODES)]
        raise InvalidArgument(f"there is no storage node {node!r}; known nodes: {', '.join(known) or 'none'}")
    return NodeRecord.parse(entry.key, entry.value), entry.version


def _contended(node: str) -> RegistryUnavailable:
    return RegistryUnavailable(f"the record of storage node {node} was changed by others at every attempt: try again")


def _decided(decision: Decision) -> dict[str, bytes]:
    """The key and value of a decision, which a broker records in the audit."""
    return {f"{records.DECISIONS}{time.time_ns():020}-{uuid.uuid4().hex[:8]}": decision.dump()}


# Abandoning nodes.


def losses(registry: Registry, nodes: Iterable[str]) -> list[Loss]:
    """What may be lost if these nodes are abandoned: the ledgers that cannot be recovered or read without them. Changes
    nothing. Raises InvalidArgument if one of the nodes is alive or unknown."""
    chosen = frozenset(nodes)
    alive = {
        entry.key.removeprefix(records.ALIVE): AliveNode.parse(entry.key, entry.value)
        for entry in registry.scan(records.ALIVE)
    }
    for node in sorted(chosen):
        _node(registry, node)
        if node in alive:
            raise InvalidArgument(f"storage node {node} is alive: only nodes that will never return can be abandoned")
    topics = {
        record.topic.id: name
        for entry in registry.scan(records.TOPICS)
        for name, record in [(entry.key.removeprefix(records.TOPICS), TopicRecord.parse(entry.key, entry.value))]
    }
    found = [LedgerRecord.parse(entry.key, entry.value) for entry in registry.scan(records.LEDGERS)]
    unsure = {node for node, each in alive.items() if each.doubts or each.damaged}
    return assess(found, chosen, alive.keys(), topics, unsure)


def assess(
    ledgers: Iterable[LedgerRecord],
    nodes: Collection[str],
    alive: Collection[str],
    topics: Mapping[str, str],
    unsure: Collection[str] = (),
) -> list[Loss]:
    """Pure: as `losses`. alive: the ids of live nodes. topics: names of topics by id. unsure: the live nodes that are
    in doubt about some ledger, or have damaged entries: a recovery may not be able to count on them."""
    found = []
    for record in ledgers:
        if record.topic_id not in topics or not record.named.intersection(nodes):
            continue  # a ledger without a topic is removed and never recovered
        loss = (
            _closed_loss(record, nodes, topics)
            if record.is_closed
            else _open_loss(record, nodes, alive, topics, {*alive} - {*unsure})
        )
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
    record: LedgerRecord,
    nodes: Collection[str],
    alive: Collection[str],
    topics: Mapping[str, str],
    sure: Collection[str],
) -> Loss | None:
    """What may be lost of a ledger that is not closed; None if the live nodes are enough to recover it. sure: the live
    nodes on which a recovery can count."""
    is_blocked, waits_for = False, set[str]()
    before, after = {*record.abandoned}, {*record.abandoned, *nodes}
    for kept, needed in _needed(record):
        # Of a write set with an abandoned node, an answer of a node in doubt is enough (`Recovery`).
        counted = alive if before.intersection(kept) else sure
        if _awaited(kept, needed, counted, before):
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
    """Have brokers recover ledgers without these nodes: all ledgers that `losses` lists, or those of them in `ledgers`.
    The processes of the nodes must be stopped for good. A node that still runs but cannot reach the registry may
    acknowledge entries to a broker that cannot reach it either; such entries are lost.

    Returns what may be lost. The brokers that own the partitions recover the ledgers within seconds. If an abandoned
    node comes back, it serves other ledgers as before. Raises as `losses`."""
    chosen = sorted({*nodes})
    found = [loss for loss in losses(registry, chosen) if ledgers is None or loss.ledger in ledgers]
    if ledgers is not None and (others := {*ledgers} - {loss.ledger for loss in found}):
        raise InvalidArgument(
            f"these ledgers do not need the decision, or do not exist: {', '.join(sorted(others))}; `losses` lists "
            "the ledgers that need it"
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
    """The decision of an operator to recover this ledger without some nodes; None if there is none. Raises what the
    registry raises."""
    key = abandoned_key(record.name)
    entry = registry.get(key)
    return None if entry is None else Abandonment.parse(key, entry.value)
