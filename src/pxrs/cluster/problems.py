"""Pure: the problems of a cluster that `pxrs cluster status` and the web page show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pxrs.attention import Attention
from pxrs.cluster.status import UNCHECKED, ClusterStatus, LedgerStatus, Shortage
from pxrs.wording import counted

LEDGERS_MAX: Final = 20
"""How many ledgers that lack copies are listed; of the others only the number is shown."""
NAMES_MAX: Final = 5
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
    yield from _shortages(found)
    for node in found.nodes:
        if node.refuses is not None:
            text = f"storage node {short(node.id)} at {node.address} accepts no entries: {node.refuses}"
            yield Attention(True, "node", node.id, text)
    for each in found.abandoned:
        nodes = some([short(node) for node in each.nodes])
        text = f"ledger {each.ledger} will be recovered without {nodes}, as {each.who} decided"
        yield Attention(False, "ledger", each.ledger, text)
    for gone in found.deletions:
        text = f"topic {gone.name} is being deleted: {counted(gone.ledgers, 'ledger')} left"
        yield Attention(False, "topic", gone.name, text)


def _shortages(found: ClusterStatus) -> Iterator[Attention]:
    alive = {node.id for node in found.nodes if node.is_alive}
    lacking = [each for each in found.under_replicated if any(one.why != UNCHECKED for one in each.shortages)]
    for ledger in sorted(lacking, key=lambda each: live_copies(each, alive))[:LEDGERS_MAX]:
        yield Attention(True, "ledger", ledger.id, f"{_place(ledger)} lacks copies: {_reasons(ledger)}")
    if len(lacking) > LEDGERS_MAX:
        yield Attention(
            True, "cluster", "", f"copies are also lacking in {counted(len(lacking) - LEDGERS_MAX, 'more ledger')}"
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
