"""`pxrs web`: a page that shows a hub in a browser (docs/web.md)."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated, Final

import typer

from pxrs.cli.options import MaybeAt, RegistryUrl, open_hub
from pxrs.cli.terminal import echo
from pxrs.errors import InvalidArgument, MissingDependency

LISTEN_DEFAULT: Final = "127.0.0.1:8080"


def web(
    at: MaybeAt = None,
    registry: RegistryUrl = None,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where to listen; port 0 chooses a free one.")
    ] = LISTEN_DEFAULT,
    actions_token_file: Annotated[
        Path | None,
        typer.Option(
            "--actions-token-file",
            metavar="FILE",
            help="Whoever gives the token in this file may act: retry, skip, reset, requeue, purge, delete.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="A host name of the page, such as that of a proxy."),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Listen on other addresses than loopback although everybody may read."),
    ] = False,
) -> None:
    """Show a hub in a browser until Ctrl-C or SIGTERM: topics, groups, queues, streaming queries.

    The page changes nothing, unless it is started with --actions-token-file.
    """
    from pxrs.cli.serve import check_listen

    try:
        from pxrs.web.actions import ActionToken
        from pxrs.web.serving import WebServer
    except ImportError as error:
        raise MissingDependency(f"pxrs web needs {error.name}: pip install 'pxrs[web]'", name=error.name) from error
    try:
        check_listen(listen, is_open=not insecure)
    except InvalidArgument as error:
        if "--auth" not in str(error):
            raise
        raise InvalidArgument(
            f"--listen {listen} can be reached from other hosts, and everybody there could read all messages: put a "
            "proxy with a login before the page, or give --insecure if the network is trusted"
        ) from None
    token = None if actions_token_file is None else ActionToken(actions_token_file)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with (
        open_hub(at, registry, needs_log=at is not None) as hub,
        WebServer(hub, listen, token, tuple(allow_host or ())) as server,
    ):
        echo(f"showing {hub.url} at {server.url}")
        stop.wait()
