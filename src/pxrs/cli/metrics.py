"""`pxrs metrics`: exports the lag of all groups and the sizes of topics and queues, whichever processes run."""

from __future__ import annotations

import signal
import threading
from contextlib import closing
from typing import Annotated, Final

import typer

from pxrs.cli.exits import exit_codes
from pxrs.cli.monitoring import monitored
from pxrs.cli.options import MaybeAt, RegistryUrl, open_hub
from pxrs.cli.terminal import echo
from pxrs.metrics.health import always
from pxrs.waiting import wait_for_signal

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
        float, typer.Option("--keep-s", min=0.0, max=3600.0, help="For how many seconds what was read is given again.")
    ] = 5.0,
) -> None:
    """Export the lag of all groups and the sizes of topics and queues for Prometheus, until Ctrl-C or SIGTERM.

    No member of a group needs to run: everything is read from the hub. Nothing is read while nobody asks.
    """
    from pxrs.cli.hub_reading import HubReading, KeptReading

    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in _SIGNALS}
    try:
        with (
            open_hub(at, registry) as hub,
            closing(KeptReading(lambda: HubReading(hub).read(), keep_s)) as kept,
            monitored(listen, live=always, ready=kept.ready, tell=echo, read=kept.parts),
        ):
            wait_for_signal(stop)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
