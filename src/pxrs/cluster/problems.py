"""Pure: the problems of a cluster that `pxrs cluster status` and the web page show."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

from pxrs.attention import Attention
from pxrs.cluster.status import (
    UNCHECKED,
    ClusterStatus,
    LackingNodes,
    LedgerStatus,
    NodeStatus,
    Shortage,
    UnservedPartition,
)
from pxrs.cluster.troubles import ADVICE, NODES, PLACEMENT
from pxrs.wording import counted, time_text

LEDGERS_MAX: Final = 20
"""How many ledgers that lack copies are listed; of the others only the number is shown."""
NAMES_MAX: Final = 5
REASONS_MAX: Final = 20
"""How many reasons are listed for which partitions are not served."""
REFUSES: Final = "make room on its disk, or see the log of the node"
ID_CHARACTERS: Final = 8
"""How many characters of an id are shown. `pxrs cluster retire` and `abandon` accept such a prefix."""


def short(id: str) -> str:
    """The first characters of the id of a node, a broker or a topic."""
    return id[:ID_CHARACTERS]


def problems(found: ClusterStatus) -> Iterator[Attention]:
    """The problems, the most urgent first."""
    if not found.brokers:
        yield Attention(True, "cluster", "", "no broker is alive: clients can neither read nor write")
    if found.without_owner:
        names = [f"{each.topic}/{each.partition}" for each in found.without_owner]
        yield Attention(True, "cluster", "", f"{counted(len(names), 'partition')} without an owner: {some(names)}")
    yield from _too_few_nodes(found.cannot_store)
    yield from _unserved(found)
    for failed in found.placements:
        text = (
            f"broker {failed.owner} can choose no storage nodes for {failed.topic}: {failed.why}; {ADVICE[PLACEMENT]}"
        )
        yield Attention(True, "topic", failed.topic, text)
    for node in found.nodes:
        yield from _disk(node)
    yield from _shortages(found)
    for node in found.nodes:
        if node.refuses is not None:
            text = f"storage node {short(node.id)} at {node.address} accepts no entries: {node.refuses}; {REFUSES}"
            yield Attention(True, "node", node.id, text)
    yield from _too_few_nodes([each for each in found.lacking_nodes if each.can_store])
    yield from _doubted(found)
    for each in found.abandoned:
        nodes = some([short(node) for node in each.nodes])
        text = f"ledger {each.ledger} will be recovered without {nodes}, as {each.who} decided"
        yield Attention(False, "ledger", each.ledger, text)
    for gone in found.deletions:
        text = f"topic {gone.name} is being deleted: {counted(gone.ledgers, 'ledger')} left"
        yield Attention(False, "topic", gone.name, text)


def _too_few_nodes(lacking: Iterable[LackingNodes]) -> Iterator[Attention]:
    """One line for all topics that lack the same."""
    topics: defaultdict[tuple[bool, str], list[str]] = defaultdict(list)
    for each in lacking:
        topics[each.can_store, each.why].append(each.topic)
    for (can_store, why), names in topics.items():
        which = f"{'topic' if len(names) == 1 else 'topics'} {some(names)}"
        if can_store:
            text = f"new messages of {which} get fewer copies than asked for: {why}; {ADVICE[NODES]}"
        else:
            text = f"nothing can be stored in {which}: {why}; {ADVICE[NODES]}"
        yield Attention(not can_store, "cluster", "", text)


def _unserved(found: ClusterStatus) -> Iterator[Attention]:
    """One line for all partitions that one broker does not serve for one reason."""
    rows: defaultdict[tuple[str, str, str], list[UnservedPartition]] = defaultdict(list)
    for each in found.unserved:
        rows[each.owner, each.kind, each.why].append(each)
    for (owner, kind, why), some_of in list(rows.items())[:REASONS_MAX]:
        names = [f"{each.topic}/{each.partition}" for each in some_of]
        not_served = f"{counted(len(names), 'partition')} owned by broker {owner} and not served"
        text = f"{not_served} since {time_text(some_of[0].since)}, {some(names)}: {why}; {ADVICE[kind]}"
        yield Attention(True, "cluster", "", text)
    listed = sum(len(each) for each in list(rows.values())[:REASONS_MAX])
    if more := len(found.unserved) + found.unserved_more - listed:
        yield Attention(True, "cluster", "", f"{counted(more, 'more partition')} not served; the brokers' logs say why")


def _disk(node: NodeStatus) -> Iterator[Attention]:
    name = f"storage node {short(node.id)} at {node.address}"
    if node.doubts:
        text = (
            f"{name} is in doubt about {counted(node.doubts, 'ledger')}: it may have lost entries of them; keep the "
            "other storage nodes running, because they have the other copies"
        )
        yield Attention(True, "node", node.id, text)
    if node.damaged:
        text = (
            f"{name} has {counted(node.damaged, 'damaged place', 'damaged places')} on its disk that are not repaired "
            "yet: check the disk; brokers restore the copies from other storage nodes"
        )
        yield Attention(True, "node", node.id, text)
    if node.is_unchecked:
        yield Attention(True, "node", node.id, f"{name} is comparing its entries with the ledgers' records")


def _doubted(found: ClusterStatus) -> Iterator[Attention]:
    doubted = [ledger for ledger in found.ledgers if ledger.doubted]
    for ledger in doubted[:LEDGERS_MAX]:
        nodes = some([short(node) for node in ledger.doubted])
        text = (
            f"{_place(ledger)} was closed by answers of storage nodes that were in doubt ({nodes}): acknowledged "
            f"messages from offset {ledger.end} on are lost if all their copies were damaged"
        )
        yield Attention(False, "ledger", ledger.id, text)
    if len(doubted) > LEDGERS_MAX:
        text = f"and so were {counted(len(doubted) - LEDGERS_MAX, 'more ledger')}"
        yield Attention(False, "cluster", "", text)


def _shortages(found: ClusterStatus) -> Iterator[Attention]:
    alive = {node.id for node in found.nodes if node.is_alive}
    lacking = [each for each in found.under_replicated if any(one.why != UNCHECKED for one in each.shortages)]
    for ledger in sorted(lacking, key=lambda each: live_copies(each, alive))[:LEDGERS_MAX]:
        yield Attention(True, "ledger", ledger.id, f"{_place(ledger)} lacks copies: {_reasons(ledger)}")
    if len(lacking) > LEDGERS_MAX:
        yield Attention(
            True, "cluster", "", f"copies are also missing in {counted(len(lacking) - LEDGERS_MAX, 'more ledger')}"
        )
    if unchecked := len(found.under_replicated) - len(lacking):
        text = f"{counted(unchecked, 'ledger')} to be checked: a broker verifies that all copies exist"
        yield Attention(False, "cluster", "", text)


def _place(ledger: LedgerStatus) -> str:
    if ledger.query is not None:
        return f"a file that query {ledger.query} has staged for {ledger.topic}"
    return f"{ledger.topic}/{ledger.partition}, ledger {ledger.number}"


def titled(ledger: LedgerStatus) -> str:
    """The ledger in a list: topic, partition and number, or whose rows it has."""
    topic = ledger.topic or short(ledger.topic_id)
    if ledger.query is not None:
        return f"{topic}, staged by {ledger.query}"
    return f"{topic}/{ledger.partition}/{ledger.number}"


def live_copies(ledger: LedgerStatus, alive: set[str]) -> int:
    """The number of live nodes of the fragment that has the fewest."""
    return min((sum(node in alive for node in nodes) for _, nodes in ledger.fragments), default=0)


def _reasons(ledger: LedgerStatus) -> str:
    told = [_reason(each) for each in ledger.shortages if each.why != UNCHECKED]
    return some(list(dict.fromkeys(told)), 3)


def _reason(shortage: Shortage) -> str:
    why = f"position {shortage.position} has no node"
    if shortage.node is not None:
        why = f"node {short(shortage.node)} {shortage.why.removeprefix('node ')}"
    return why if shortage.copied_to is None else f"{why}, being copied to {short(shortage.copied_to)}"


def some(names: list[str], count: int = NAMES_MAX) -> str:
    more = f" and {len(names) - count:,} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
