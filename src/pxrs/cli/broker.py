"""`pxrs broker`: one broker of a replicated cluster (docs/cluster.md)."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pxrs.cli.amounts import duration
from pxrs.cli.exits import exit_codes
from pxrs.cli.listening import check_listen
from pxrs.cli.monitoring import MetricsListen, monitored
from pxrs.cli.options import ClientTokens, Insecure, Listen, RegistryWait, TlsClientCa, TlsKey, file_bytes
from pxrs.cli.serve import keep_beating, stopping_start, tls_credentials, with_limits
from pxrs.cli.terminal import echo
from pxrs.errors import Closed, InvalidArgument, InvalidPlacement, MissingDependency
from pxrs.metrics.health import Beat, Verdict
from pxrs.registry.address import parse
from pxrs.registry.outage import START_WAIT_S, StartWait

if TYPE_CHECKING:
    from collections.abc import Callable

    from pxrs.cluster.broker.running import RunningBroker
    from pxrs.server.serving import Server, ServerSettings

LISTEN_DEFAULT: Final = "127.0.0.1:7077"
NO_LEASE: Final = "the broker has no lease in the registry"
STAND_BACK_S: Final = 0.2
"""How often the broker looks whether it has a lease."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@exit_codes()
def broker(
    registry: Annotated[
        str,
        typer.Option("--registry", envvar="PXRS_REGISTRY", metavar="URL", help="The registry of the cluster."),
    ],
    listen: Listen = LISTEN_DEFAULT,
    advertise: Annotated[
        str | None,
        typer.Option(
            "--advertise", metavar="HOST:PORT", help="The address for clients and other brokers, if --listen is not."
        ),
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Shown by pxrs cluster status.")] = "",
    lease_s: Annotated[
        float,
        typer.Option(
            "--lease-s",
            metavar="DURATION",
            parser=duration(1),
            help="After so long a silence other brokers take the partitions.",
        ),
    ] = 6.0,
    node_timeout_s: Annotated[
        float,
        typer.Option(
            "--node-timeout-s",
            metavar="DURATION",
            parser=duration(0.1),
            help="How long a storage node may take to answer.",
        ),
    ] = 5.0,
    append_s: Annotated[
        float,
        typer.Option(
            "--append-s", metavar="DURATION", parser=duration(0.1), help="How long an append waits for enough copies."
        ),
    ] = 10.0,
    copies_grace_s: Annotated[
        float,
        typer.Option(
            "--copies-grace-s",
            metavar="DURATION",
            parser=duration(0.1),
            help="After this time a lost node's copies are made anew.",
        ),
    ] = 10.0,
    placement: Annotated[
        str,
        typer.Option(
            "--placement",
            help="How nodes are chosen for topics that are created through this broker: least loaded, round robin, "
            "random, or an entry point pxrs.placements.",
        ),
    ] = "least loaded",
    cache_mb: Annotated[
        int, typer.Option("--cache-mb", min=1, help="How much of the newest messages is kept in memory for readers.")
    ] = 256,
    insecure: Insecure = False,
    auth: ClientTokens = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="The token to show to storage nodes and other brokers."),
    ] = None,
    ca_file: Annotated[
        Path | None,
        typer.Option("--ca-file", metavar="FILE", help="Reach storage nodes and brokers by TLS; trust this authority."),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", metavar="FILE", help="The broker's certificate, in PEM; with --tls-key."),
    ] = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    metrics_listen: MetricsListen = None,
    registry_wait: RegistryWait = START_WAIT_S,
    limit: Annotated[
        list[str] | None,
        typer.Option("--limit", metavar="NAME=VALUE", help="A limit, see docs/serve.md. May be given several times."),
    ] = None,
) -> None:
    """Run a broker until Ctrl-C or SIGTERM: it owns partitions, and clients reach the cluster through it.

    Any broker takes every call. A broker that ends, or is killed, is followed by the others: they take its partitions,
    and clients find them there by themselves.
    """
    # Over the limit: each option of the command is a parameter with its help text.
    try:
        from pxrs import registry as registries
        from pxrs.cluster.broker.context import BrokerSettings
        from pxrs.cluster.broker.running import RunningBroker
        from pxrs.cluster.links import LinkSettings
        from pxrs.cluster.placement import placement_named
        from pxrs.remote.client.settings import Certificates, Settings
        from pxrs.server.descriptors import connections_within
        from pxrs.server.serving import ServerSettings
        from pxrs.server.settings import ServerLimits
    except ImportError as error:
        raise MissingDependency(
            f"pxrs broker needs {error.name}: pip install 'pxrs[remote]'", name=error.name
        ) from error
    try:
        placement_named(placement)
    except InvalidPlacement as error:
        raise typer.BadParameter(str(error), param_hint="--placement") from None
    check_listen(listen, is_open=auth is None and not insecure)
    if registry.startswith("memory:"):
        raise InvalidArgument("--registry memory: belongs to this process alone: give the registry of the cluster")
    limits = with_limits(ServerLimits(), {}, limit or ())
    limits = replace(limits, connections_max=connections_within(limits.connections_max))
    server = ServerSettings(listen, limits, auth, tls_credentials(tls_cert, tls_key, tls_client_ca))
    own = (None, None) if tls_cert is None or tls_key is None else (tls_cert.read_bytes(), tls_key.read_bytes())
    certificates = None if ca_file is None else Certificates(file_bytes("--ca-file", ca_file), *own)
    if token_file is not None:
        file_bytes("--token-file", token_file)
    wait = StartWait(registry_wait, f"the registry {parse(registry).shown}")

    def make() -> RunningBroker:
        opened = wait(lambda: registries.open(registry))
        try:
            return RunningBroker(
                opened,
                name=name,
                settings=BrokerSettings(
                    append_s=append_s, recent_bytes=cache_mb << 20, copies_grace_s=copies_grace_s, placement=placement
                ),
                links=LinkSettings(node_timeout_s, token_file=token_file, certificates=certificates),
                peers=Settings("pxrs://", (), 2.0, 2.0, certificates, token_file),
                lease_ttl=lease_s,
                wait=wait,
            )
        except BaseException:
            opened.close()
            raise

    asyncio.run(_run(make, server, wait, advertise, is_tls=tls_cert is not None, metrics_listen=metrics_listen))


async def _run(
    make: Callable[[], RunningBroker],
    settings: ServerSettings,
    wait: StartWait,
    advertise: str | None,
    *,
    is_tls: bool,
    metrics_listen: str | None,
) -> None:
    stop = stopping_start(wait, _SIGNALS)
    beat = Beat("the event loop")
    beating = asyncio.create_task(keep_beating(beat))
    state = _State(wait)
    try:
        with monitored(metrics_listen, live=beat.verdict, ready=state.verdict, tell=echo):
            running = await asyncio.to_thread(make)
            try:
                await _serve(running, settings, state, stop, advertise, is_tls=is_tls)
            finally:
                await asyncio.to_thread(running.close)
    except Closed:
        if not stop.is_set():
            raise
        echo("stopped before the broker was started")
    finally:
        beating.cancel()


async def _serve(
    running: RunningBroker,
    settings: ServerSettings,
    state: _State,
    stop: asyncio.Event,
    advertise: str | None,
    *,
    is_tls: bool,
) -> None:
    """Listen, join the cluster, and serve until a signal comes."""
    from pxrs.server.serving import Server

    loop = asyncio.get_running_loop()
    server = Server(running.hub, settings)
    try:
        await server.start()
        await asyncio.to_thread(running.join, advertise or server.address)
    except BaseException:
        await server.stop()
        raise
    running.hub.start_upkeep()
    standing_back = loop.create_task(_stand_back(server, running))
    try:
        state.running = running
        echo(f"broker of {running.hub.url} at pxrs://{server.address}{'?tls=true' if is_tls else ''}")
        await stop.wait()
        state.reason = "the broker is stopping"
    finally:
        standing_back.cancel()  # the lease ends below, and calls that are under way are still answered
    for number in _SIGNALS:
        loop.remove_signal_handler(number)  # a second signal ends the process at once
    echo("stopping: other brokers take the partitions; waiting for calls that are under way")
    await asyncio.to_thread(running.leave)
    await server.stop()


async def _stand_back(server: Server, running: RunningBroker) -> None:
    """Send clients to other brokers while this one has no lease: it owns no partition, and what it has seen of the
    cluster is old, so that it would send them to owners that are gone."""
    while True:
        has_lease = running.broker.membership.lease is not None
        server.service.stand_back(None if has_lease else NO_LEASE)
        await asyncio.sleep(STAND_BACK_S)


class _State:
    """Whether the broker is ready. Read by the thread of the health endpoint."""

    def __init__(self, wait: StartWait) -> None:
        self._wait = wait
        self.running: RunningBroker | None = None
        """None until the broker has joined the cluster."""
        self.reason: str | None = None
        """Why the broker does not serve any more."""

    def verdict(self) -> Verdict:
        if self.running is None or self.reason is not None:
            return Verdict(False, self.reason or self._wait.reason or "the broker is starting")
        partitions = self.running.ownership.partitions().values()
        unopened = sum(partition.why_not is not None for partition in partitions)
        degraded = sum(partition.is_degraded for partition in partitions)
        fields = {"partitions": len(partitions), "not serving": unopened, "degraded": degraded}
        if self.running.broker.membership.lease is None:
            return Verdict(False, f"{NO_LEASE}; it joins again when it can", fields)
        return Verdict(True, "", fields)
