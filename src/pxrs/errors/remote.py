"""Errors of `pxrs serve` and its clients. An error of the hub behind the server is raised as on that hub."""

from __future__ import annotations

from pxrs.errors.general import PxrsError
from pxrs.errors.registry import RegistryUnavailable


class RemoteError(PxrsError):
    """The base of the errors of servers and their clients."""

    code = "remote"


class WireMismatch(RemoteError):
    """The client and the server speak no common version of the protocol. Upgrade the one that is older.

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
    """A client has as much open on the server as it may: watches, subscriptions, calls. The call had no effect. Close
    some of it, or raise the limit of `pxrs serve`."""

    code = "remote.server-busy"


class Unauthenticated(RemoteError):
    """The server has not accepted the token or the certificate of this client, or got none. The call had no effect.
    Give a valid token: PXRS_TOKEN, or `?token_file=PATH` in the address."""

    code = "remote.unauthenticated"


class NotPermitted(RemoteError):
    """The token of this client does not permit this call. The call had no effect. Whether what it names exists is not
    told. `pxrs token create` on the server's side makes a token with more permissions."""

    code = "remote.not-permitted"
