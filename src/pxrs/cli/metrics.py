"""`pxrs metrics`: exports the lag of all groups and the sizes of topics and queues, whichever processes run."""

from __future__ import annotations

import signal
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pxrs.cli.amounts import duration
from pxrs.cli.exits import exit_codes
from pxrs.cli.monitoring import monitored
from pxrs.cli.options import MaybeAt, RegistryUrl, RegistryWait, check_places, open_hub
from pxrs.cli.terminal import echo
from pxrs.errors import Closed, RegistryUnavailable
from pxrs.metrics.health import always
from pxrs.registry.outage import START_WAIT_S, StartWait
from pxrs.waiting import SignalEvent, wait_for_signal

if TYPE_CHECKING:
    from pxrs.hub import Hub
    from pxrs.metrics.instruments import Snapshot

LISTEN_DEFAULT: Final = "127.0.0.1:9465"
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@exit_codes()
def metrics(
    at: MaybeAt = None,
    registry: RegistryUrl = None,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where to answer; a port alone is on 127.0.0.1.")
    ] = LISTEN_DEFAULT,
    keep_s: Annotated[
        float,
        typer.Option(
            "--keep-s", metavar="DURATION", parser=duration(0, 3600), help="For how long what was read is given again."
        ),
    ] = 5.0,
    registry_wait: RegistryWait = START_WAIT_S,
) -> None:
    """Export the lag of all groups and the sizes of topics and queues for Prometheus, until Ctrl-C or SIGTERM.

    No member of a group needs to run: everything is read from the hub. Nothing is read while nobody asks.
    """
    from pxrs.cli.hub_reading import HubReading, KeptReading

    may_be_missing = at is not None
    check_places(at, registry, may_be_missing=may_be_missing)
    stop, wait = SignalEvent(), StartWait(registry_wait, "the hub's server")
    hub: Hub | None = None

    def end(*_: object) -> None:
        stop.set()
        wait.stop()

    def read() -> Snapshot:
        if hub is None:
            raise RegistryUnavailable(wait.reason or "the hub is not open yet")
        return HubReading(hub).read()

    before = {number: signal.signal(number, end) for number in _SIGNALS}
    try:
        with ExitStack() as stack:
            # The hub is closed last; no reading is under way then.
            hubs = stack.enter_context(ExitStack())
            kept = stack.enter_context(closing(KeptReading(read, keep_s)))
            stack.enter_context(monitored(listen, live=always, ready=kept.ready, tell=echo, read=kept.parts))
            # An address that is wrong ends the command. A registry that is away does not: its metrics say so.
            hub = wait(lambda: hubs.enter_context(open_hub(at, registry, may_be_missing=may_be_missing)))
            wait_for_signal(stop)
    except Closed:
        if not stop.is_set():
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
