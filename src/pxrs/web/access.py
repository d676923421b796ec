"""Who may read and who may act through the page.

`pxrs web` has one token for actions, and everybody who reaches the page may read. `pxrs serve --web` goes by the tokens
of the server: without a tokens file the page only shows; with one, reading needs a token that may read the whole hub,
and acting one that may administer it. The token is in a header of each request; the page uses no cookies.
"""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from pxrs.errors import InvalidArgument, NotPermitted, Unauthenticated

if TYPE_CHECKING:
    from pxrs.server.auth.gate import Gate

TOKEN_CHARACTERS_MIN: Final = 16


class Access(Protocol):
    """Decides about each request by the token in it, None if there is none."""

    @property
    def has_actions(self) -> bool:
        """Whether anybody may act."""

    @property
    def is_open(self) -> bool:
        """Whether everybody may read."""

    def check_read(self, given: str | None) -> None:
        """Raise Unauthenticated or NotPermitted."""

    def check_act(self, given: str | None) -> str | None:
        """Raise Unauthenticated or NotPermitted; else who acts, None if it is the user of this process."""


class ReadOnly:
    """Everybody may read, nobody may act."""

    has_actions = False
    is_open = True

    def check_read(self, given: str | None) -> None:
        pass

    def check_act(self, given: str | None) -> str | None:
        raise NotPermitted(
            "the page is read-only: to allow actions, start `pxrs web` with --actions-token-file FILE, or `pxrs serve` "
            "with --auth FILE"
        )


class ActionToken:
    """Everybody may read; who gives the token may act. It is read once, from a file of its own."""

    has_actions = True
    is_open = True

    def __init__(self, path: Path) -> None:
        """Raises OSError, and InvalidArgument if the token is too short to be a secret."""
        token = path.read_text().strip()
        if len(token) < TOKEN_CHARACTERS_MIN or not token.isascii():
            raise InvalidArgument(
                f"{path} has no valid token: write at least {TOKEN_CHARACTERS_MIN} ASCII characters into it, such as "
                "the output of `openssl rand -hex 32`"
            )
        self._token = token.encode()

    def check_read(self, given: str | None) -> None:
        pass

    def check_act(self, given: str | None) -> str | None:
        """The tokens are compared in constant time."""
        if given is None or not hmac.compare_digest(given.encode("utf-8", "replace"), self._token):
            raise NotPermitted("wrong token: give the one in the file of --actions-token-file; nothing was changed")
        return None

    def __repr__(self) -> str:
        return "<ActionToken>"


class ServerTokens:
    """The tokens of a server. The file is read again when it has changed, so a revoked token ends at once."""

    has_actions = True
    is_open = False

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def check_read(self, given: str | None) -> None:
        self._gate.refresh()
        if not self._gate.identify(_metadata(given)).grants.is_reader:
            raise NotPermitted("the token does not permit to read the whole hub: use one that permits hub=read")

    def check_act(self, given: str | None) -> str | None:
        self._gate.refresh()
        caller = self._gate.identify(_metadata(given))
        if not caller.grants.is_admin:
            raise NotPermitted("the token does not permit hub=admin: nothing was changed")
        return caller.who


def _metadata(given: str | None) -> dict[str, str | bytes]:
    if not given:
        raise Unauthenticated("this page needs a token of the server")
    return {"authorization": f"Bearer {given}"}
