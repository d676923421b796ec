"""Options that several commands have, and functions that open the hub or registry that they name.

Nothing here imports pyarrow before a hub is opened: `pxrs COMMAND --help` and shell completion import this module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pxrs.errors import InvalidUrl, NotPermitted

if TYPE_CHECKING:
    from pxrs.hub import Hub

At = Annotated[
    str, typer.Option("--at", envvar="PXRS_AT", metavar="URL", help="The hub: its directory, or pxrs://HOST:PORT.")
]
MaybeAt = Annotated[
    str | None,
    typer.Option(
        "--at",
        envvar="PXRS_AT",
        metavar="URL",
        help="The hub: its directory, or pxrs://HOST:PORT. Not needed if --registry is given.",
    ),
]
"""The option --at of commands that need no directory if --registry is given."""
RegistryUrl = Annotated[
    str | None,
    typer.Option(
        "--registry",
        envvar="PXRS_REGISTRY",
        metavar="URL",
        help="The registry, if it is not in the hub's directory; not used with a server.",
    ),
]
RegistryWait = Annotated[
    float,
    typer.Option(
        "--registry-wait",
        envvar="PXRS_REGISTRY_WAIT",
        metavar="SECONDS",
        min=0.0,
        max=86_400.0,
        help="How long to wait at startup for a registry or server that does not answer, before exiting with code 1.",
    ),
]
"""The option of the commands that run until they are stopped; by default START_WAIT_S."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
ExistOk = Annotated[bool, typer.Option("--exist-ok", help="Succeed if it exists already with exactly these settings.")]
Listen = Annotated[
    str, typer.Option("--listen", metavar="HOST:PORT", help="The address to listen on; port 0 picks a free port.")
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Allow other hosts to connect without --auth; every client has full access."),
]
ClientTokens = Annotated[
    str | None,
    typer.Option(
        "--auth",
        envvar="PXRS_AUTH",
        metavar="FILE",
        help="Accept only clients with a token from this file; see pxrs token create.",
    ),
]
"""The option --auth of the commands that clients connect to."""
TlsKey = Annotated[
    Path | None, typer.Option("--tls-key", metavar="FILE", help="The private key of the certificate, in PEM.")
]
TlsClientCa = Annotated[
    Path | None,
    typer.Option("--tls-client-ca", metavar="FILE", help="Accept only clients with a certificate from this CA."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


def bytes_of(argument: str) -> bytes:
    """The bytes of an argument as they were given: those that are no UTF-8 are lone surrogates in `argument`."""
    return argument.encode(errors="surrogateescape")


@contextmanager
def open_hub(
    at: str | None,
    registry: str | None,
    *,
    needs_log: bool = False,
    makes_registry: bool = False,
    given_as: str = "--at or PXRS_AT",
) -> Iterator[Hub]:
    """Open an existing hub. Opening a mistyped path would create an empty registry there.

    needs_log:      the directory must exist even if the registry is elsewhere, because the command reads messages.
    makes_registry: the given registry need not exist: the command may be the first one that writes to it.
    given_as:       how the user gives `at`, for errors."""
    import pxrs
    from pxrs.registry.address import parse

    check_given(at, registry)
    has_server = False
    if at is not None:
        address = parse(at)
        has_server = is_server(at)
        if (registry is None or needs_log) and address.scheme == "file" and not address.directory().is_dir():
            raise InvalidUrl(f"there is no directory {at}: correct {given_as}")
    if registry is not None and not makes_registry and not has_server:  # `pxrs.open` refuses it beside a server
        makers = "`pxrs queue create`" if at is None else "`pxrs queue create` or `pxrs registry adopt`"
        check_is_there(registry, "--registry or PXRS_REGISTRY", makers)
    with pxrs.open(at, registry) as hub:
        yield hub


def reach(hub: Hub) -> None:
    """Open the hub's registry and have it answer once. May be called again. Raises what the registry raises."""
    with suppress(NotPermitted):  # of a server: an answer too
        hub.registry.get("groups")


def is_server(at: str) -> bool:
    """Whether this is the address of a server, `pxrs serve`."""
    from pxrs.registry.address import parse

    return parse(at).scheme == "pxrs"


def refuse_server(at: str | None, command: str, why: str) -> None:
    """Raise InvalidUrl if this is the address of a server. command: what to run instead, beside the server."""
    if at is not None and is_server(at):
        from pxrs.registry.address import parse

        raise InvalidUrl(f"{parse(at).text} is a server; {why}: run `{command}` on its host with the hub's directory")


def check_given(at: str | None, registry: str | None) -> None:
    """Raise an error if neither a directory nor a registry is given."""
    if at is None and registry is None:
        raise typer.BadParameter("give --registry URL or PXRS_REGISTRY, or --at URL or PXRS_AT")


def check_is_there(registry: str, given_as: str, makers: str = "`pxrs queue create`") -> None:
    """Raise InvalidUrl if there is no such registry. given_as: the option that the error tells the user to correct.
    makers: the commands that create a registry."""
    from pxrs.address import is_missing, parse

    if is_missing(address := parse(registry)):
        raise InvalidUrl(f"there is no registry at {address.text}: correct {given_as}, or create it with {makers}")


def confirm(question: str, yes: bool) -> None:
    """Ask the user to confirm, unless --yes was given."""
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        from pxrs.cli.terminal import tell_error

        tell_error("standard input is no terminal to ask at; give --yes to do it")
        raise typer.Exit(2)
    typer.confirm(question, abort=True, err=True)
