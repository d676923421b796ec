"""`pxrs web`: a page that shows a hub in a browser (docs/web.md)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pxrs.cli.listening import check_listen
from pxrs.cli.options import MaybeAt, RegistryUrl, RegistryWait, file_bytes, open_hub, reach
from pxrs.cli.terminal import echo
from pxrs.errors import Closed, InvalidArgument, MissingDependency
from pxrs.registry.outage import START_WAIT_S, StartWait
from pxrs.waiting import SignalEvent, wait_for_signal

if TYPE_CHECKING:
    from pxrs.hub import Hub
    from pxrs.web.access import Access

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
    registry_wait: RegistryWait = START_WAIT_S,
) -> None:
    """Show a hub in a browser until Ctrl-C or SIGTERM: topics, groups, queues, streaming queries.

    The page changes nothing, unless it is started with --actions-token-file.
    """
    if actions_token_file is not None:
        file_bytes("--actions-token-file", actions_token_file)
    token = None if actions_token_file is None else _access().ActionToken(actions_token_file)
    _check_listen(listen, insecure=insecure)
    stop, wait = SignalEvent(), StartWait(registry_wait, "the hub's registry or server")

    def end(*_: object) -> None:
        stop.set()
        wait.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    with ExitStack() as stack:
        try:
            hub = wait(lambda: stack.enter_context(open_hub(at, registry, may_be_missing=at is not None)))
            wait(lambda: reach(hub))
        except Closed:
            if not stop.is_set():
                raise
            return
        url = stack.enter_context(_page(hub, listen, token, tuple(allow_host or ()), insecure=insecure))
        echo(f"showing {hub.url} at {url}")
        wait_for_signal(stop)


@contextmanager
def beside_server(hub: Hub, listen: str | None, auth: str | None, *, insecure: bool) -> Iterator[None]:
    """The page of `pxrs serve --web`, if that is given. auth: the server's tokens file; without it the page only
    shows."""
    if listen is None:
        yield
        return
    from pxrs.server.auth.gate import Gate
    from pxrs.server.auth.names import HubNames

    tokens = None
    if auth is not None:
        tokens = _access().ServerTokens(Gate(auth, HubNames(hub.topics, hub.registry.get)))
    with _page(hub, listen, tokens, (), insecure=insecure or tokens is not None) as url:
        echo(f"showing {hub.url} at {url}")
        yield


@contextmanager
def _page(hub: Hub, listen: str, access: Access | None, hosts: tuple[str, ...], *, insecure: bool) -> Iterator[str]:
    """Serve the page; its address."""
    _access()
    from pxrs.web.serving import WebServer

    _check_listen(listen, insecure=insecure)
    with WebServer(hub, listen, access, hosts) as server:
        yield server.url


def _check_listen(listen: str, *, insecure: bool) -> None:
    try:
        check_listen(listen, is_open=not insecure)
    except InvalidArgument as error:
        if "--auth" not in str(error):
            raise
        raise InvalidArgument(
            f"{listen} can be reached from other hosts, and everybody there could read all messages: put a proxy with "
            "a login before the page, or give --insecure if the network is trusted"
        ) from None


def _access() -> ModuleType:
    """The module of tokens, and with it the packages of the page. Raises MissingDependency."""
    try:
        import pxrs.web.routes
        import pxrs.web.serving  # noqa: F401 - needs uvicorn
        from pxrs.web import access
    except ImportError as error:
        raise MissingDependency(f"the web page needs {error.name}: pip install 'pxrs[web]'", name=error.name) from error
    return access
