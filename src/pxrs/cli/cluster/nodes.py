"""`pxrs cluster retire`, `reinstate`, `forget`, `abandon`: what only an operator can decide about storage nodes (C6).

They write to the registry of the cluster, which brokers do not let clients do: give --registry.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pxrs.cli.cluster.status import opened
from pxrs.cli.options import Yes, confirm
from pxrs.cli.terminal import echo, show
from pxrs.errors import InvalidArgument
from pxrs.wording import counted, printable

if TYPE_CHECKING:
    from pxrs.cluster.deciding import Loss
    from pxrs.registry.contract import Registry

PREFIX_MIN: Final = 4
"""So many characters of an id at least name a node."""
SHOWN_MAX: Final = 50

Node = Annotated[str, typer.Argument(metavar="NODE", help="The node's id or a prefix of it, from pxrs cluster status.")]
Nodes = Annotated[list[str], typer.Argument(metavar="NODE...", help="The nodes' ids or prefixes of them.")]
Registry_ = Annotated[
    str, typer.Option("--registry", envvar="PXRS_REGISTRY", metavar="URL", help="The registry of the cluster.")
]


def retire(node: Node, registry: Registry_) -> None:
    """Take a storage node out of service: brokers copy its entries to other nodes.

    The node keeps serving until you stop it. Stop it when `pxrs cluster status` says that it may be stopped.
    """
    from pxrs.cluster.deciding import retire as decide

    with opened(None, registry) as found:
        id = resolved(found, node)
        decide(found, id)
    echo(f"retired storage node {id}: its entries are copied to others; pxrs cluster status shows when to stop it")


def reinstate(node: Node, registry: Registry_) -> None:
    """Put a retired storage node back into service."""
    from pxrs.cluster.deciding import reinstate as decide

    with opened(None, registry) as found:
        id = resolved(found, node)
        decide(found, id)
    echo(f"storage node {id} is in use again")


def forget(node: Node, registry: Registry_) -> None:
    """Remove a storage node from the list of nodes. It must be stopped, and no ledger may refer to it."""
    from pxrs.cluster.deciding import forget as decide

    with opened(None, registry) as found:
        id = resolved(found, node)
        decide(found, id)
    echo(f"forgot storage node {id}")


def abandon(nodes: Nodes, registry: Registry_, yes: Yes = False) -> None:
    """Give up storage nodes that will never return. Acknowledged messages may be lost.

    A ledger whose broker is gone is recovered from its storage nodes. If too many of these are gone, its partition
    waits for them. This command lets the recovery continue with the remaining nodes. It lists what may be lost, asks
    for confirmation, and records the decision in the audit log. The processes of the nodes must be stopped for good.
    """
    from pxrs.cluster.deciding import abandon as decide
    from pxrs.cluster.deciding import losses

    with opened(None, registry) as found:
        ids = [resolved(found, node) for node in nodes]
        lost = losses(found, ids)
        if not lost:
            echo("nothing to do: every ledger can be recovered and read without these nodes")
            return
        show(*_told(lost))
        confirm(f"Give up {counted(len(ids), 'storage node')}, and lose what only they have?", yes)
        done = decide(found, ids, [each.ledger for each in lost])
    echo(f"{counted(len(done), 'ledger')} will continue without {', '.join(ids)}; pxrs audit records this decision")


def _told(lost: list[Loss]) -> Iterable[str]:
    yield f"{counted(len(lost), 'ledger')} cannot be recovered or read without these nodes:"
    for each in lost[:SHOWN_MAX]:
        place = printable(f"{each.topic or '(deleted topic)'}/{each.partition}")
        what = (
            f"acknowledged messages from offset {each.first:,} on that are on no other node are lost"
            if each.entries is None
            else f"{counted(each.entries, 'entry', 'entries')} between offsets {each.first:,} and {each.end:,} are lost"
        )
        waits = f"; also waits for {', '.join(each.waits_for)}" if each.waits_for else ""
        yield f"  {place}, ledger {each.ledger.rpartition('/')[2]} ({each.state}): {what}{waits}"
    if len(lost) > SHOWN_MAX:
        yield f"  and {counted(len(lost) - SHOWN_MAX, 'more ledger')}"


def resolved(registry: Registry, given: str) -> str:
    """The id of the one node that begins like this. Raises InvalidArgument."""
    from pxrs.cluster.records import NODES

    known = [entry.key.removeprefix(NODES) for entry in registry.scan(NODES)]
    if given in known:
        return given
    found = [id for id in known if id.startswith(given)] if len(given) >= PREFIX_MIN else []
    if len(found) == 1:
        return found[0]
    why = "several storage nodes have ids with this prefix" if found else "no storage node has such an id"
    raise InvalidArgument(f"{given!r}: {why}; the ids are {', '.join(known) or 'none'}")
