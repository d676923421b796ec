"""`pxrs serve`: a server in front of a hub, so that other hosts can use it (docs/serve.md)."""

from __future__ import annotations

import asyncio
import functools
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from pxrs.cli.amounts import duration
from pxrs.cli.exits import exit_codes
from pxrs.cli.listening import check_listen
from pxrs.cli.monitoring import MetricsListen, monitored
from pxrs.cli.options import (
    ClientTokens,
    Insecure,
    Listen,
    RegistryUrl,
    RegistryWait,
    TlsClientCa,
    TlsKey,
    file_bytes,
    is_server,
    open_hub,
    reach,
)
from pxrs.cli.terminal import echo
from pxrs.cli.web import beside_server
from pxrs.errors import Closed, InvalidArgument, MissingDependency
from pxrs.metrics.health import Beat, Verdict
from pxrs.registry.outage import START_WAIT_S, StartWait
from pxrs.server.settings import MAY_BE_ZERO, ServerLimits

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from pxrs.hub import Hub

    L = TypeVar("L", bound=DataclassInstance)

LISTEN_DEFAULT: Final = "127.0.0.1:7077"
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_BYTES: Final = 1 << 20
_DEFAULTS: Final = ServerLimits()


@exit_codes()
def serve(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIRECTORY", envvar="PXRS_AT", help="The hub's directory, or memory:; by default PXRS_AT."
        ),
    ],
    registry: RegistryUrl = None,
    listen: Listen = LISTEN_DEFAULT,
    insecure: Insecure = False,
    auth: ClientTokens = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", metavar="FILE", help="The server's certificate, in PEM; with --tls-key."),
    ] = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    threads: Annotated[
        int, typer.Option("--threads", min=1, max=1_000, help="How many calls of the hub may run at a time.")
    ] = _DEFAULTS.threads,
    streams_max: Annotated[
        int, typer.Option("--streams-max", min=1, help="How many streams of all clients may be open at a time.")
    ] = _DEFAULTS.streams_max,
    calls_max: Annotated[
        int, typer.Option("--calls-max", min=1, help="How many calls of one client may be unanswered.")
    ] = _DEFAULTS.calls_max,
    watches_max: Annotated[
        int, typer.Option("--watches-max", min=1, help="How many watches of the registry one client may have.")
    ] = _DEFAULTS.watches_max,
    subscriptions_max: Annotated[
        int, typer.Option("--subscriptions-max", min=1, help="How many waiting reads of topics one client may have.")
    ] = _DEFAULTS.subscriptions_max,
    append_mb_max: Annotated[
        int,
        typer.Option(
            "--append-mb-max", min=1, help="Maximum of received and not yet stored data of all clients, in MiB."
        ),
    ] = _DEFAULTS.append_bytes_max // _BYTES,
    drain_s: Annotated[
        float,
        typer.Option(
            "--drain-s",
            metavar="DURATION",
            parser=duration(0),
            help="How long SIGTERM waits for calls in progress.",
        ),
    ] = _DEFAULTS.drain_s,
    metrics_listen: MetricsListen = None,
    registry_wait: RegistryWait = START_WAIT_S,
    web: Annotated[
        str | None,
        typer.Option("--web", metavar="HOST:PORT", help="Also serve the web page on this address: docs/web.md."),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option("--limit", metavar="NAME=VALUE", help="Another limit, see docs/serve.md; may be repeated."),
    ] = None,
) -> None:
    """Serve a hub to other processes and hosts until Ctrl-C or SIGTERM: pxrs.open("pxrs://HOST:PORT").

    Only the server needs access to the directory and the registry. It also runs the upkeep of the hub. If it is killed
    and started again at the same address, its clients reconnect, and nothing that it acknowledged is lost.
    """
    # Over the limit: each option of the command is a parameter with its help text.
    try:
        from pxrs.server.descriptors import connections_within
        from pxrs.server.serving import ServerSettings
    except ImportError as error:
        raise MissingDependency.of_extra("pxrs serve", error.name, "remote") from error
    if is_server(directory):
        raise InvalidArgument(f"{directory} is the address of another server: give the hub's directory")
    check_listen(listen, is_open=auth is None and not insecure)
    named: dict[str, float] = {
        "streams_max": streams_max,
        "calls_max": calls_max,
        "watches_max": watches_max,
        "subscriptions_max": subscriptions_max,
        "append_bytes_max": append_mb_max * _BYTES,
        "threads": threads,
        "drain_s": drain_s,
    }
    limits = with_limits(_DEFAULTS, named, limit or ())
    limits = replace(limits, connections_max=connections_within(limits.connections_max))
    settings = ServerSettings(listen, limits, auth, tls_credentials(tls_cert, tls_key, tls_client_ca))
    with open_hub(directory, registry, makes_registry=True, may_be_missing=True, given_as="DIRECTORY") as hub:
        page = functools.partial(beside_server, hub, web, auth, insecure=insecure)
        wait = StartWait(registry_wait, f"the registry {hub.registry_address}")
        asyncio.run(_run(hub, settings, wait, page, is_tls=tls_cert is not None, metrics_listen=metrics_listen))


def with_limits(limits: L, named: Mapping[str, float], given: Iterable[str]) -> L:
    """The limits with what the options say.

    named: those with an option of their own; given: the others, NAME=VALUE. Raises InvalidArgument."""
    others = {field.name: field for field in fields(limits) if field.name not in named}
    found: dict[str, float] = {}
    for each in given:
        name, _, value = each.partition("=")
        if name not in others:
            raise InvalidArgument(f"--limit {each}: unknown limit; choose from {', '.join(sorted(others))}")
        kind = float if isinstance(others[name].default, float) else int
        try:
            found[name] = kind(value)
        except ValueError:
            raise InvalidArgument(f"--limit {each}: give a number") from None
        may_be_zero = MAY_BE_ZERO in others[name].metadata
        if not (0 < found[name] < float("inf") or (may_be_zero and not found[name])):
            raise InvalidArgument(f"--limit {each}: give a number above 0{', or 0' if may_be_zero else ''}")
    return replace(limits, **named, **found)


def tls_credentials(cert: Path | None, key: Path | None, client_ca: Path | None) -> object:
    """What gRPC needs for TLS, by the files that the options name; None if they name none. Raises InvalidArgument,
    BadParameter."""
    import grpc

    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise InvalidArgument("TLS needs both --tls-cert and --tls-key")
    pair = (file_bytes("--tls-key", key), file_bytes("--tls-cert", cert))
    root = None if client_ca is None else file_bytes("--tls-client-ca", client_ca)
    return grpc.ssl_server_credentials([pair], root, require_client_auth=client_ca is not None)


async def _run(
    hub: Hub,
    settings: object,
    wait: StartWait,
    page: Callable[[], AbstractContextManager[None]],
    *,
    is_tls: bool,
    metrics_listen: str | None,
) -> None:
    """page: serves the page of --web, if that is given."""
    from pxrs.server.serving import Server, ServerSettings

    assert isinstance(settings, ServerSettings)
    stop = stopping_start(wait, _SIGNALS)
    loop = asyncio.get_running_loop()
    beat, state = Beat("the event loop"), _State(wait)
    beating = loop.create_task(keep_beating(beat))
    try:
        with monitored(metrics_listen, live=beat.verdict, ready=state.verdict, tell=echo):
            await asyncio.to_thread(wait, lambda: reach(hub))
            with page():
                server = Server(hub, settings)
                await server.start()
                hub.start_upkeep()
                echo(f"serving {hub.url} at pxrs://{server.address}{'?tls=true' if is_tls else ''}")
                state.is_serving = True
                await stop.wait()
                state.reason = "the server is stopping"
                for number in _SIGNALS:
                    loop.remove_signal_handler(number)  # a second signal ends the process at once
                echo("stopping: refusing new calls; waiting for calls in progress")
                await server.stop()
    except Closed:
        if not stop.is_set():
            raise
        echo("stopped during the start of the server")
    finally:
        beating.cancel()


class _State:
    """Whether the server is ready. Read by the thread of the health endpoint."""

    def __init__(self, wait: StartWait) -> None:
        self._wait = wait
        self.is_serving = False
        self.reason: str | None = None
        """Why the server does not serve any more."""

    def verdict(self) -> Verdict:
        if self.is_serving and self.reason is None:
            return Verdict(True)
        return Verdict(False, self.reason or self._wait.reason or "the server is starting")


def stopping_start(wait: StartWait, signals: Iterable[signal.Signals]) -> asyncio.Event:
    """An event that each of these signals sets, from now on until its handler is removed. A signal also ends the wait
    for the registry."""
    stop = asyncio.Event()

    def end() -> None:
        stop.set()
        wait.stop()

    for number in signals:
        asyncio.get_running_loop().add_signal_handler(number, end)
    return stop


async def keep_beating(beat: Beat) -> None:
    """Show that the event loop runs, until this is cancelled."""
    while True:
        beat.beat()
        await asyncio.sleep(1.0)
