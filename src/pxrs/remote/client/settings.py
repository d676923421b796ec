"""What the address of a server says: `pxrs://HOST:PORT,HOST:PORT?option=value`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from pxrs import disk
from pxrs.errors import InvalidUrl
from pxrs.registry.address import REFUSED_S, Address

PORT: Final = 7077
"""The port of an address that names none: the one on which `pxrs serve` listens by default."""
TIMEOUT_S: Final = 10.0
PATIENCE_S: Final = 60.0
AWAY_S: Final = 1.0
"""How long a call waits for the first connection to a single broker."""
LOST_S: Final = 0.2
"""How long it waits for a connection that was lost: the broker may be gone, and its partitions be elsewhere soon."""
TOKEN_VARIABLE: Final = "PXRS_TOKEN"
OPTIONS: Final = ("timeout", "patience", "token_file", "tls", "ca_file", "cert_file", "key_file")


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files for TLS: the authority to trust, if not those that gRPC ships, and our own certificate, if any."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class Settings:
    """How to reach a server. Two handles with equal settings share one connection."""

    shown: str
    """The address without its options, for messages."""
    targets: tuple[str, ...]
    """Host and port of each server, as gRPC takes them."""
    timeout_s: float
    """How long a call of the registry may take, and how long anything waits for the first connection."""
    patience_s: float
    """How long reads and appends wait for a server that was there and is away."""
    certificates: Certificates | None = None
    """None: no TLS."""
    token_file: Path | None = None
    given_token: str | None = field(default=None, repr=False)
    """The token of the environment; not used if there is a `token_file`."""
    is_direct: bool = False
    """The server is a broker, and is asked for partitions that it owns itself (`routes`). If it cannot be reached, the
    caller asks who owns them now, so nothing waits for it for longer than AWAY_S."""
    refused_s: float = REFUSED_S
    """How long the first connection is tried while every server of the address refuses it."""

    @classmethod
    def of(cls, address: Address) -> Self:
        """Raises InvalidUrl."""
        if "namespace" in address.options:
            raise InvalidUrl(
                f"{address.text}: a server's address takes no namespace; set it with `pxrs serve --registry`"
            )
        if "@" in address.rest:
            raise InvalidUrl(
                f"{address.scheme}: a server's address takes no user; pass a token by token_file or {TOKEN_VARIABLE}"
            )
        address.refuse_unknown_options(OPTIONS)
        if address.path:
            raise InvalidUrl(f"{address.text}: a server's address takes no path; write {address.scheme}://HOST:PORT")
        found = cls(
            address.text,
            tuple(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in address.hosts(PORT)),
            address.seconds("timeout", TIMEOUT_S),
            address.seconds("patience", PATIENCE_S),
            _certificates(address),
            address.file("token_file"),
            os.environ.get(TOKEN_VARIABLE) or None,
            refused_s=address.refused_s,
        )
        found.token()
        return found

    @property
    def token_place(self) -> str:
        """Where the token is taken from, for messages."""
        if self.token_file is not None:
            return f"token_file={self.token_file}"
        if self.given_token is not None:
            return f"{TOKEN_VARIABLE} or ?token_file=FILE in the address; {TOKEN_VARIABLE} is set"
        return f"{TOKEN_VARIABLE} or ?token_file=FILE in the address; neither is set"

    def token(self) -> str | None:
        """The token to send, None if there is none. The file is read each time: a token may be replaced while the
        process runs. Raises InvalidUrl, which does not show the token."""
        token = self.given_token
        if self.token_file is not None:
            try:
                token = self.token_file.read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                why = disk.explain(error) if isinstance(error, OSError) else error
                raise InvalidUrl(f"{self.shown}: token_file={self.token_file} cannot be read: {why}") from error
        if token is not None and not (token and token.isascii() and token.isprintable()):
            where = TOKEN_VARIABLE if self.token_file is None else f"token_file={self.token_file}"
            raise InvalidUrl(f"{self.shown}: {where} contains no token: use the line that `pxrs token create` prints")
        return token


def _certificates(address: Address) -> Certificates | None:
    """What TLS needs, or None for no TLS."""
    ca, cert, key = address.file("ca_file"), address.file("cert_file"), address.file("key_file")
    if (cert is None) != (key is None):
        raise InvalidUrl(f"{address.text}: give cert_file=FILE and key_file=FILE together")
    is_implied = ca is not None or cert is not None
    if not address.flag("tls", is_implied):
        if is_implied:
            raise InvalidUrl(f"{address.text}: tls=false contradicts ca_file, cert_file and key_file")
        return None
    try:
        return Certificates(*(None if path is None else path.read_bytes() for path in (ca, cert, key)))
    except OSError as error:
        raise InvalidUrl(f"{address.text}: {disk.explain(error)}") from error
