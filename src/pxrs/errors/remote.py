"""Errors of `pxrs serve` and its clients. An error of the hub behind the server is raised as on that hub."""

from __future__ import annotations

from pxrs.errors.general import PxrsError
from pxrs.errors.registry import RegistryUnavailable


class RemoteError(PxrsError):
    """The base of the errors of servers and their clients."""

    code = "remote"


class WireMismatch(RemoteError):
    """The client and the server have no protocol version in common. Upgrade the older one.

    `version` is that of the client, `lowest` and `highest` are those of the server."""

    code = "remote.wire-mismatch"

    def __init__(self, version: int, lowest: int, highest: int) -> None:
        self.version, self.lowest, self.highest = version, lowest, highest
        older = "client" if version < lowest else "server"
        super().__init__(
            f"the client speaks version {version} of the protocol and the server {lowest} to {highest}: upgrade pxrs "
            f"on the {older}"
        )


class ServerBusy(RemoteError, RegistryUnavailable):
    """The client has reached a limit of the server for open watches, subscriptions or calls. The call had no effect.
    Close some of them, or raise the limit of `pxrs serve`."""

    code = "remote.server-busy"


class Unauthenticated(RemoteError):
    """The server did not accept the token or certificate of this client, or received none. The call had no effect. Pass
    a valid token: PXRS_TOKEN, or `?token_file=PATH` in the address."""

    code = "remote.unauthenticated"


class NotPermitted(RemoteError):
    """The token of this client does not permit this call. The call had no effect. The error does not tell whether what
    the call names exists. `pxrs token create` on the server's side creates a token with more permissions."""

    code = "remote.not-permitted"
