"""`--metrics-listen HOST:PORT`: /metrics, /healthz and /readyz of a command that runs until it is stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from pxrs.metrics.endpoint import Endpoint, parse_listen
from pxrs.metrics.health import Probe

if TYPE_CHECKING:
    from pxrs.metrics.prometheus import Part

MetricsListen = Annotated[
    str | None,
    typer.Option(
        "--metrics-listen",
        envvar="PXRS_METRICS_LISTEN",
        metavar="HOST:PORT",
        help="Serve /metrics, /healthz and /readyz over HTTP on this address; a port alone is on 127.0.0.1.",
    ),
]


def refuse_metrics(context: typer.Context, why: str) -> None:
    """Refuse the option where the command ends by itself. The environment variable has no effect then: a container may
    set it for all commands."""
    source = context.get_parameter_source("metrics_listen")
    if source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter(why)


@contextmanager
def monitored(
    listen: str | None,
    *,
    live: Probe,
    ready: Probe,
    tell: Callable[[str], None],
    read: Callable[[], Iterable[Part]] | None = None,
) -> Iterator[None]:
    """Answer over HTTP for the block; nothing if `listen` is None.

    tell: is given the line that says where. read: gives the counts; by default those of this process. Raises
    MissingDependency, and InvalidArgument if the port cannot be had."""
    if listen is None:
        yield
        return
    parse_listen(listen)
    from pxrs.metrics.prometheus import Exposition

    exposition = Exposition() if read is None else Exposition(read)
    with Endpoint(listen, exposition.render, live=live, ready=ready) as endpoint:
        tell(f"metrics and health at http://{endpoint.address}/metrics, /healthz and /readyz")
        yield
