"""`pxrs cluster status`: what the registry knows of a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from pxrs.cli.options import Json, RegistryUrl, check_given, check_is_there
from pxrs.cli.terminal import echo, seconds_field, show
from pxrs.errors import InvalidArgument

if TYPE_CHECKING:
    from pxrs.cluster.status import ClusterStatus
    from pxrs.registry.contract import Registry

At = Annotated[
    str | None,
    typer.Option("--at", envvar="PXRS_AT", metavar="URL", help="The cluster: pxrs://HOST:PORT of its brokers."),
]


_TIMES: Final = (("brokers", "started_at"), ("deletions", "deleted_at"), ("abandoned", "at"), ("unserved", "since"))
"""The lists whose rows have a time, and the name of its field."""


def status(
    at: At = None,
    registry: RegistryUrl = None,
    topic: Annotated[str | None, typer.Option("--topic", help="Show only the partitions of this topic.")] = None,
    with_ledgers: Annotated[bool, typer.Option("--ledgers", help="Also list every ledger and its copies.")] = False,
    as_json: Json = False,
) -> None:
    """Show brokers, storage nodes, partitions and missing copies, the most urgent first.

    It only reads the registry: directly, or with --at through a broker. Exit code 1 if a partition has no owner or is
    not served, a ledger lacks copies, too few storage nodes accept entries for a topic, a placement function fails, or
    a storage node is in doubt or has damaged entries.
    """
    found = read(at, registry)
    if as_json:
        echo(json.dumps(plain(found, with_ledgers=with_ledgers)))
    else:
        from pxrs.cli.cluster.tables import parts

        show(*parts(found, topic=topic, with_ledgers=with_ledgers))
    if found.has_faults:
        raise typer.Exit(1)


def plain(found: ClusterStatus, *, with_ledgers: bool) -> dict[str, Any]:
    """As values for JSON, with times as all commands write them."""
    values = found.to_json(ledgers=with_ledgers)
    for name, time in _TIMES:
        for row in values[name]:
            row.update(seconds_field(time, row.pop(time) or None))
    return values


def read(at: str | None, registry: str | None) -> ClusterStatus:
    """The status of the cluster. Raises InvalidArgument if there is no cluster, and what the registry raises."""
    from pxrs.cluster.status import read_status

    with opened(at, registry) as found:
        seen = read_status(found)
        if seen.id is None:
            raise InvalidArgument(
                f"there is no cluster in {found.url}: give the --registry of its `pxrs broker` and `pxrs storage`"
            )
        return seen


@contextmanager
def opened(at: str | None, registry: str | None) -> Iterator[Registry]:
    """The registry of the cluster: the given one, or as a broker passes it on."""
    check_given(at, registry)
    if registry is not None:
        from pxrs import registry as registries

        check_is_there(registry, "--registry or PXRS_REGISTRY", "`pxrs cluster up` or `pxrs broker`")
        with registries.open(registry) as found:
            yield found
        return
    assert at is not None
    import pxrs
    from pxrs.cli.options import is_server

    if not is_server(at):
        raise InvalidArgument(f"{at} is not a cluster: give pxrs://HOST:PORT of its brokers, or --registry URL")
    with pxrs.open(at) as hub:
        yield hub.registry
