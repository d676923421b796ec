"""`pxrs ping`: whether a server answers, how fast, and whether it accepts this client."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pxrs.cli.amounts import duration
from pxrs.cli.options import is_server
from pxrs.cli.terminal import echo
from pxrs.errors import MissingDependency
from pxrs.registry.address import parse
from pxrs.wording import counted, printable

if TYPE_CHECKING:
    from pxrs.remote.client.ping import Pings


def ping(
    at: Annotated[str, typer.Option("--at", envvar="PXRS_AT", metavar="URL", help="The server, pxrs://HOST:PORT.")],
    count: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many round trips.")] = 10,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="DURATION",
            parser=duration(0.001, 3600),
            help="How long each answer may take, and the connection.",
        ),
    ] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure round trips to a server, and show its version, whether it uses TLS, and whether it accepts this client.

    Exit code 1 if it does not answer in time. A server that refuses the token answers: the output says so.
    """
    if not is_server(at):
        raise typer.BadParameter(f"{at} is no server: give pxrs://HOST:PORT, as `pxrs serve` prints it")
    try:
        from pxrs.remote.client.ping import ping as ping_server
        from pxrs.remote.client.settings import Settings
    except ImportError as error:
        raise MissingDependency(f"pxrs ping needs {error.name}: pip install 'pxrs[remote]'", name=error.name) from error
    settings = replace(Settings.of(parse(at)), timeout_s=timeout)
    found = ping_server(settings, count)
    is_tls = settings.certificates is not None
    times_ms = {f"{name}_ms": round(1_000 * value, 3) for name, value in _figures(found.round_trips_s).items()}
    if as_json:
        typer.echo(json.dumps({"at": settings.shown, **_plain(found, is_tls), "round_trips": count, **times_ms}))
        return
    figures = ", ".join(f"{name.removesuffix('_ms')} {value:g} ms" for name, value in times_ms.items())
    echo(f"{settings.shown}: {counted(count, 'round trip')}: {figures}")
    if found.refusal is None:
        echo(f"server  {found.server}, instance {found.instance}, protocol {found.wire}")
    echo(f"tls     {'yes' if is_tls else 'no'}")
    echo(f"access  {'granted' if found.refusal is None else printable(f'refused: {found.refusal}')}")


def _figures(round_trips_s: list[float]) -> dict[str, float]:
    """The shortest, and those that half and 99 % of all do not exceed."""
    ordered = sorted(round_trips_s)
    ranks = {"min": 1, "median": math.ceil(len(ordered) / 2), "p99": math.ceil(len(ordered) * 0.99)}
    return {name: ordered[rank - 1] for name, rank in ranks.items()}


def _plain(found: Pings, is_tls: bool) -> dict[str, Any]:
    return {
        "server": found.server,
        "instance": found.instance,
        "protocol": found.wire,
        "tls": is_tls,
        "access": "granted" if found.refusal is None else "refused",
        "problem": found.refusal,
    }
