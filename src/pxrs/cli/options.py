"""Options that several commands have, and functions that open the hub or registry that they name.

Nothing here imports pyarrow before a hub is opened: `pxrs COMMAND --help` and shell completion import this module."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pxrs.cli.amounts import duration
from pxrs.errors import InvalidUrl, NotPermitted

if TYPE_CHECKING:
    from pxrs.hub import Hub
    from pxrs.registry.address import Address

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
AskedAt = Annotated[
    str | None,
    typer.Option("--at", envvar="PXRS_AT", metavar="URL", help="The hub: its directory, or pxrs://HOST:PORT."),
]
"""As `At`, for commands that say themselves why --registry alone is not enough."""
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
        metavar="DURATION",
        parser=duration(0, 86_400),
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
    may_be_missing: bool = False,
    given_as: str = "--at or PXRS_AT",
) -> Iterator[Hub]:
    """Open a hub whose directory and registry are there, as `check_places` has it. Opening a mistyped path would create
    an empty registry there."""
    import pxrs

    check_places(
        at,
        registry,
        needs_log=needs_log,
        makes_registry=makes_registry,
        may_be_missing=may_be_missing,
        given_as=given_as,
    )
    with pxrs.open(at, registry) as hub:
        yield hub


def check_places(
    at: str | None,
    registry: str | None,
    *,
    needs_log: bool = False,
    makes_registry: bool = False,
    may_be_missing: bool = False,
    given_as: str = "--at or PXRS_AT",
) -> None:
    """Raise InvalidUrl if the directory or the registry of a hub does not exist. Opens neither.

    needs_log:      the directory must exist even if the registry is elsewhere, because the command reads messages.
    makes_registry: the given registry need not exist: the command may be the first one that writes to it.
    may_be_missing: neither need exist, but the directory that they will be created in. For commands that run until they
                    are stopped, and may be started before the first topic or queue is created.
    given_as:       how the user gives `at`, for errors."""
    from pxrs.registry.address import parse

    check_given(at, registry)
    if at is not None and (directory := _path_of(parse(at))) is not None:
        if may_be_missing:
            _check_parent(directory, given_as)
        elif (registry is None or needs_log) and not directory.is_dir():
            raise InvalidUrl(f"there is no directory {at}: correct {given_as}")
    if registry is None or (at is not None and is_server(at)):  # `pxrs.open` refuses a registry beside a server
        return
    path = _path_of(parse(registry))
    if may_be_missing and path is not None:
        _check_parent(path, "--registry or PXRS_REGISTRY")
    elif not makes_registry:
        makers = "`pxrs queue create`" if at is None else "`pxrs queue create` or `pxrs registry adopt`"
        check_is_there(registry, "--registry or PXRS_REGISTRY", makers)


def _path_of(address: Address) -> Path | None:
    """The directory or file of this machine that the address names; None if it names another place, or none."""
    if address.scheme == "file":
        return address.directory()
    is_file = address.scheme == "sqlite" and address.rest.startswith("///")
    return Path(address.rest.removeprefix("///")).absolute() if is_file else None


def _check_parent(path: Path, given_as: str) -> None:
    """Raise InvalidUrl if the directory above this path does not exist: then the path is mistyped, rather than that of
    a hub that will be created."""
    if not path.parent.is_dir():
        raise InvalidUrl(
            f"there is no directory {path.parent}, in which {path.name} would be created: correct {given_as}, or "
            "create that directory"
        )


def place_of(at: str | None, registry: str | None) -> list[str]:
    """The options that a command which is printed needs to find the same hub: those that the environment does not
    give. A password is not shown."""
    from pxrs.registry.address import parse

    place = [] if at is None or at == os.environ.get("PXRS_AT") else ["--at", at]
    if registry is None or registry == os.environ.get("PXRS_REGISTRY"):
        return place
    address = parse(registry)
    return [*place, "--registry", address.shown if ":***@" in address.text else registry]


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
        raise typer.BadParameter(
            "which hub? Give --at data or PXRS_AT=data (a directory, or pxrs://HOST:PORT); "
            "for a registry alone, --registry URL"
        )


def check_is_there(registry: str, given_as: str, makers: str = "`pxrs queue create`") -> None:
    """Raise InvalidUrl if there is no such registry. given_as: the option that the error tells the user to correct.
    makers: the commands that create a registry."""
    from pxrs.address import is_missing, parse

    if is_missing(address := parse(registry)):
        raise InvalidUrl(f"there is no registry at {address.text}: correct {given_as}, or create it with {makers}")


def file_bytes(option: str, path: Path) -> bytes:
    """The content of a file that an option names. Raises BadParameter if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint=option) from None


def confirm(question: str, yes: bool) -> None:
    """Ask the user to confirm, unless --yes was given. Ends the command if the user does not, or cannot be asked."""
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        from pxrs.cli.terminal import tell_error

        tell_error("Not a terminal; pass --yes to confirm")
        raise typer.Exit(2)
    try:
        is_confirmed = typer.confirm(question, err=True)
    except typer.Abort:  # Ctrl-C or Ctrl-D instead of an answer
        typer.echo(err=True)
        is_confirmed = False
    if not is_confirmed:
        typer.echo("Aborted; nothing was changed", err=True)
        raise typer.Exit(1)
