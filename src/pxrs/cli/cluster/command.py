"""The commands of `pxrs cluster`. `pxrs cluster --help` loads this module, and no other of its package."""

from __future__ import annotations

from typing import Final

import typer

from pxrs.cli.lazy import Lazy, LazyGroup

COMMANDS: Final = {
    "up": Lazy("pxrs.cli.cluster.up", "up", "Run a cluster of real processes on this machine, to try it out."),
    "status": Lazy("pxrs.cli.cluster.status", "status", "Show brokers, storage nodes, partitions and missing copies."),
    "retire": Lazy("pxrs.cli.cluster.nodes", "retire", "Take a storage node out of service and move its copies."),
    "reinstate": Lazy("pxrs.cli.cluster.nodes", "reinstate", "Put a retired storage node back into service."),
    "forget": Lazy("pxrs.cli.cluster.nodes", "forget", "Remove a storage node that is stopped and not needed."),
    "abandon": Lazy("pxrs.cli.cluster.nodes", "abandon", "Give up storage nodes that will never return."),
    "demo": Lazy("pxrs.cli.cluster.demo.command", "demo", "Kill a broker and a storage node, and count every message."),
}


class _Commands(LazyGroup):
    table = COMMANDS


app = typer.Typer(cls=_Commands, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _cluster() -> None:
    pass
