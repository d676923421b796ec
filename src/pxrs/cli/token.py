"""`pxrs token`: makes, lists and revokes the tokens of `pxrs serve --auth FILE`."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from pxrs.cli.amounts import UNITS_S, seconds_of
from pxrs.cli.options import Json
from pxrs.cli.terminal import cell, echo, seconds_field, show
from pxrs.server.auth import tokens
from pxrs.server.auth.tokens import Token
from pxrs.wording import time_text

app = typer.Typer(no_args_is_help=True)
Auth = Annotated[
    str, typer.Option("--auth", envvar="PXRS_AUTH", metavar="FILE", help="The tokens file, as given to `pxrs serve`.")
]
_DAYS_MAX: Final = 36_500


@app.command()
def create(
    auth: Auth,
    name: Annotated[str, typer.Option("--name", help="Who gets the token; shown in lists and in the server's log.")],
    allow: Annotated[
        list[str],
        typer.Option(
            "--allow",
            metavar="GRANT",
            help="What it permits, such as topic:orders=read, group:billing=member, queue:mail*=take or hub=admin; see "
            "docs/serve.md. May be given several times.",
        ),
    ],
    expires: Annotated[
        str | None,
        typer.Option(
            "--expires", metavar="DURATION", help="For how long it is valid: 90m, 12h, 30d. By default for ever."
        ),
    ] = None,
    certificate: Annotated[
        str | None,
        typer.Option(
            "--certificate",
            metavar="NAME",
            help="Make no token: permit this to clients whose certificate has this name, CN=worker-7 or SAN=HOST.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a token and print it. It is printed only this once: the file has its hash. A server that runs accepts it
    within about a second.

    The file is made if it is not there, readable by its owner only.
    """
    now = time.time()
    until = None if expires is None else now + _lifetime_s(expires)
    token, secret = tokens.create(auth, name, allow, now=now, expires=until, certificate=certificate)
    if as_json:
        typer.echo(json.dumps({**_plain(token), "token": secret}))
        return
    if secret is not None:
        echo(secret)
    what = f"{certificate} is permitted" if secret is None else "this token is shown only now; it permits"
    typer.echo(f"{token.id} ({token.name}): {what} {', '.join(token.grants.texts)}", err=True)


@app.command("list")
def list_(auth: Auth, as_json: Json = False) -> None:
    """List the tokens: for whom each is, when it ends, and what it permits. Tokens themselves are stored nowhere."""
    _, found = tokens.read(auth)
    if as_json:
        for token in found.by_id.values():
            typer.echo(json.dumps(_plain(token)))
        return
    table = Table("id", "name", "created", "expires", "permits", box=None, header_style="bold")
    for token in found.by_id.values():
        expires = "-" if token.expires is None else time_text(token.expires)
        expires += " (over)" if token.is_expired(time.time()) else ""
        name = token.name if token.certificate is None else f"{token.name} [{token.certificate}]"
        permits = " ".join(token.grants.texts)
        table.add_row(token.id, cell(name), time_text(token.created), expires, cell(permits))
    show(table)


@app.command()
def revoke(
    which: Annotated[str, typer.Argument(metavar="ID", help="The token's id, or its name if only one has it.")],
    auth: Auth,
    as_json: Json = False,
) -> None:
    """Remove a token. A server that runs refuses it within about a second, and ends its open streams."""
    token = tokens.revoke(auth, which)
    if as_json:
        typer.echo(json.dumps(_plain(token)))
    else:
        typer.echo(f"revoked {token.id} ({token.name})")


def _lifetime_s(text: str) -> float:
    try:
        seconds = seconds_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--expires") from None
    if not 0 < seconds <= _DAYS_MAX * UNITS_S["d"]:
        raise typer.BadParameter(f"{text!r} is not above 0 and up to {_DAYS_MAX}d", param_hint="--expires")
    return seconds


def _plain(token: Token) -> dict[str, Any]:
    return {
        "id": token.id,
        "name": token.name,
        "certificate": token.certificate,
        **seconds_field("created", token.created),
        **seconds_field("expires", token.expires),
        "allow": token.grants.texts,
    }
