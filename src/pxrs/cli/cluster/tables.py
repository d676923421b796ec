"""The status of a cluster as tables for people. Nothing here does I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pxrs.cli.terminal import cell, facts
from pxrs.cluster.problems import problems, short, titled
from pxrs.cluster.status import ClusterStatus, LedgerStatus, NodeStatus, PartitionStatus

ALL_WELL: Final = "every partition has an owner and is served, and every entry has all its copies"


def parts(found: ClusterStatus, *, topic: str | None = None, with_ledgers: bool = False) -> list[RenderableType]:
    """What is wrong first; then brokers, storage nodes, partitions, and ledgers if they are asked for.

    topic: partitions and ledgers of this topic alone."""
    shown = [each for each in found.partitions if topic is None or each.topic == topic]
    made: list[RenderableType] = [
        facts(
            {
                "cluster": short(found.id or ""),
                "brokers": len(found.brokers),
                "storage nodes": f"{sum(node.is_alive for node in found.nodes)} of {len(found.nodes)}",
                "topics": sum(not each.is_internal for each in found.topics),
                "partitions": len(found.partitions),
                "ledgers": len(found.ledgers),
            }
        ),
        *problem_lines(found),
        "",
        _brokers(found),
        "",
        _nodes(found.nodes),
        "",
        _partitions(shown),
    ]
    if with_ledgers:
        made += ["", _ledgers(found, [each for each in found.ledgers if topic is None or each.topic == topic])]
    return made


def problem_lines(found: ClusterStatus) -> list[Text]:
    lines = []
    for each in problems(found):
        line = cell(each.text)
        line.stylize("red" if each.is_urgent else "yellow")
        lines.append(line)
    return lines or [Text(ALL_WELL, "green")]


def _brokers(found: ClusterStatus) -> Table:
    table = _table(("broker", "address", "id", "version", "state"), ("partitions",))
    for each in found.brokers:
        state = Text("leaving", "yellow") if each.is_leaving else Text("serving", "green")
        table.add_row(
            cell(each.name or "-"),
            cell(each.address),
            short(each.incarnation),
            cell(each.version),
            state,
            f"{each.partitions:,}",
        )
    return table


def _nodes(nodes: Sequence[NodeStatus]) -> Table:
    table = _table(("storage node", "address", "state"), ("ledgers", "used", "free", "starts"))
    for each in nodes:
        used, free = (size(each.used_bytes), size(each.free_bytes)) if each.is_alive else ("-", "-")
        table.add_row(
            short(each.id), cell(each.address), _state(each), f"{each.named:,}", used, free, f"{each.starts:,}"
        )
    return table


def _state(node: NodeStatus) -> Text:
    if node.is_retired and not node.named:
        return Text("retired, may be stopped", "green")
    if node.is_retired:
        return Text("retired, being emptied", "yellow")
    if not node.is_alive:
        return Text("away", "red" if node.named else "dim")
    if node.damaged or node.doubts:
        return Text("damaged" if node.damaged else "in doubt", "red")
    return Text("in use", "green") if node.refuses is None else Text("accepts no entries", "red")


def _partitions(rows: Sequence[PartitionStatus]) -> Table:
    table = _table(("partition", "owner", "ledgers"), ("epoch", "first offset", "closed", "lacking copies"))
    for each in rows:
        owner = cell(each.owner) if each.broker else Text("none", "red")
        if each.unserved is not None:
            owner.append(", not served", "red")
        ledgers = ", ".join(f"{count:,} {state}" for state, count in each.ledgers.items())
        lacking = Text(f"{each.under_replicated:,}", "yellow" if each.under_replicated else "")
        table.add_row(
            cell(f"{each.topic}/{each.partition}"),
            owner,
            ledgers,
            f"{each.epoch:,}",
            f"{each.start:,}",
            size(each.size),
            lacking,
        )
    return table


def _ledgers(found: ClusterStatus, ledgers: Sequence[LedgerStatus]) -> Table:
    alive = {node.id for node in found.nodes if node.is_alive}
    table = _table(("ledger", "state", "nodes, by fragment"), ("offsets", "size"))
    for each in ledgers:
        offsets = f"{each.base:,} to " + ("" if each.end is None else f"{each.end:,}")
        table.add_row(
            cell(titled(each)),
            each.state,
            _copies(each, alive),
            offsets,
            size(each.size),
        )
    return table


def _copies(ledger: LedgerStatus, alive: set[str]) -> Text:
    """The nodes of each fragment: red if they are away, and a dash for a position without one."""
    made = Text()
    for number, (first, nodes) in enumerate(ledger.fragments):
        made.append("" if number == 0 else f"  from {first:,}: ", "dim")
        for position, node in enumerate(nodes):
            made.append(" " if position else "")
            made.append("-" if node is None else short(node), "" if node in alive else "red")
    return made


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _table(words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in words:
        table.add_column(column)
    for column in numbers:
        table.add_column(column, justify="right")
    return table
