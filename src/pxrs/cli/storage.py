"""`pxrs storage`: one storage node of a replicated cluster (docs/cluster-format.md)."""

from __future__ import annotations

import asyncio
import errno
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pxrs import registry as registries
from pxrs.cli.exits import exit_codes
from pxrs.cli.listening import check_listen
from pxrs.cli.monitoring import MetricsListen, monitored
from pxrs.cli.options import Listen, RegistryWait, TlsKey
from pxrs.cli.serve import keep_beating, stopping_start, tls_credentials, with_limits
from pxrs.cli.terminal import echo
from pxrs.errors import Closed, InvalidArgument, LogError, MissingDependency, NodeFull
from pxrs.metrics.health import Beat, Verdict
from pxrs.registry.address import parse
from pxrs.registry.outage import START_WAIT_S, StartWait

if TYPE_CHECKING:
    from pxrs.cluster.storage.running import StorageServer, StorageSettings

LISTEN_DEFAULT: Final = "127.0.0.1:7078"
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@exit_codes()
def storage(
    registry: Annotated[
        str,
        typer.Option("--registry", envvar="PXRS_REGISTRY", metavar="URL", help="The registry of the cluster."),
    ],
    directory: Annotated[
        Path, typer.Option("--dir", metavar="DIRECTORY", help="Where the node keeps its entries; of this node alone.")
    ],
    listen: Listen = LISTEN_DEFAULT,
    advertise: Annotated[
        str | None,
        typer.Option("--advertise", metavar="HOST:PORT", help="The address for brokers, if --listen is not."),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Listen on other addresses than loopback although everybody may use it."),
    ] = False,
    auth: Annotated[
        str | None,
        typer.Option(
            "--auth",
            envvar="PXRS_AUTH",
            metavar="FILE",
            help="Refuse brokers without a token of this file that has the grant cluster=member.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", metavar="FILE", help="The node's certificate, in PEM; with --tls-key."),
    ] = None,
    tls_key: TlsKey = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option("--tls-client-ca", metavar="FILE", help="Refuse brokers without a certificate of this authority."),
    ] = None,
    mark_dir: Annotated[
        Path | None,
        typer.Option(
            "--mark-dir",
            metavar="DIRECTORY",
            help="A directory in memory that outlives this process and not the machine; by default /dev/shm or "
            "/run. In a container: one that outlives the container's restart.",
        ),
    ] = None,
    metrics_listen: MetricsListen = None,
    registry_wait: RegistryWait = START_WAIT_S,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--limit", metavar="NAME=VALUE", help="A limit, see docs/cluster-format.md. May be given several times."
        ),
    ] = None,
) -> None:
    """Run a storage node until Ctrl-C or SIGTERM. It keeps copies of the entries that brokers send to it.

    The directory is the node's identity. A node on an empty or an older directory is a new node; what was in the
    directory is moved aside and never deleted.
    """
    # Over the limit: each option of the command is a parameter with its help text.
    try:
        from pxrs.cluster.storage.mark import default_folder
        from pxrs.cluster.storage.running import StorageSettings
        from pxrs.cluster.storage.settings import StorageLimits
        from pxrs.server.descriptors import connections_within
    except ImportError as error:
        raise MissingDependency.of_extra("pxrs storage", error.name, "remote") from error
    check_listen(listen, is_open=auth is None and not insecure)
    if registry.startswith("memory:"):
        raise InvalidArgument("--registry memory: belongs to this process alone: give the registry of the cluster")
    limits = with_limits(StorageLimits(), {}, limit or ())
    limits = replace(limits, connections_max=connections_within(limits.connections_max))
    credentials = tls_credentials(tls_cert, tls_key, tls_client_ca)
    marks = mark_dir or default_folder()
    settings = StorageSettings(directory, listen, advertise, limits, auth, marks, credentials)
    asyncio.run(
        _run(registry, settings, metrics_listen, StartWait(registry_wait, f"the registry {parse(registry).shown}"))
    )


async def _run(url: str, settings: StorageSettings, metrics_listen: str | None, wait: StartWait) -> None:
    from pxrs.cluster.storage.running import StorageServer

    stop = stopping_start(wait, _SIGNALS)
    beat = Beat("the event loop")
    beating = asyncio.create_task(keep_beating(beat))
    state = _State(wait)
    try:
        with monitored(metrics_listen, live=beat.verdict, ready=state.verdict, tell=echo):
            registry = await asyncio.to_thread(wait, lambda: registries.open(url))
            try:
                await _serve(StorageServer(registry, settings, wait), settings, state, stop)
            finally:
                await asyncio.to_thread(registry.close)
    except Closed:
        if not stop.is_set():
            raise
        echo("stopped before the node was started")
    finally:
        beating.cancel()


async def _serve(server: StorageServer, settings: StorageSettings, state: _State, stop: asyncio.Event) -> None:
    """Start the node, and serve until a signal comes or the node must stop."""
    from pxrs import disk

    loop = asyncio.get_running_loop()
    try:
        await server.start()
    except OSError as error:
        if disk.denied(error, settings.directory) is not None:
            raise disk.log_error(error, settings.directory, "the storage node cannot start: ") from error
        why = f"the storage node cannot start: {disk.explain(error, settings.directory)}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NodeFull(str(settings.directory), why) from error
        raise LogError(why) from error
    echo(f"storage node {server.node.id} in {settings.directory} at {server.address}")
    state.server = server
    stopping = loop.create_task(stop.wait())
    await asyncio.wait((stopping, server.replaced), return_when=asyncio.FIRST_COMPLETED)
    state.reason = "the node is stopping"
    for number in _SIGNALS:
        loop.remove_signal_handler(number)  # a second signal ends the process at once
    stopping.cancel()
    echo("stopping: no new calls; what was accepted is synced")
    await server.stop()
    if server.replaced.done():
        raise server.replaced.result()


class _State:
    """Whether the node is ready. Read by the thread of the health endpoint."""

    def __init__(self, wait: StartWait) -> None:
        self._wait = wait
        self.server: StorageServer | None = None
        """None until the node serves."""
        self.reason: str | None = None
        """Why the node does not serve any more."""

    def verdict(self) -> Verdict:
        if self.server is None or not self.server.is_serving or self.reason is not None:
            return Verdict(False, self.reason or self._wait.reason or "the node is starting")
        load = self.server.node.load
        fields = {"node": self.server.node.id, "ledgers": load.ledgers, "bytes": load.bytes}
        if load.refuses is not None:
            return Verdict(False, f"the node takes no entries: {load.refuses}", fields)
        return Verdict(True, "", fields)
