"""The client of `pxrs serve`: `pxrs.open("pxrs://HOST:PORT")` gives the same `Hub` as a directory does.

| module | what it does |
|---|---|
| `settings` | what the address says |
| `connection` | the connection of this process, shared by all that have the same address: calls, and what is armed |
| `link` | connects, and connects again after a break |
| `channel`, `control`, `arming` | one gRPC connection; its control stream; watches and subscriptions that outlive it |
| `faults`, `limits`, `tls` | what a failed call proves; streams without progress; why TLS has failed |
| `log`, `topic`, `session`, `subscriptions`, `reads`, `appends` | the `Log` |
| `registry`, `lease` | the `Registry` |
| `transfers` | streams that may take long: ranges of a topic for Spark's tasks, and staged files |
| `ping` | round trips, for `pxrs ping` |

docs/wire.md says what is sent. Start reading with `connection`.
"""

from __future__ import annotations

from urllib.parse import urlencode

from pxrs import grpc_fork  # noqa: F401 - first: it imports gRPC in its own way
from pxrs.log.contract import Log
from pxrs.registry.address import Address
from pxrs.registry.contract import Registry
from pxrs.remote.client.log import RemoteLog
from pxrs.remote.client.registry import RemoteRegistry
from pxrs.remote.client.settings import Settings


def open(address: Address) -> Registry:
    """Connect to the first server that answers, for its registry. Options:

    timeout=SECONDS     bounds every call of the registry, 10 by default
    patience=SECONDS    how long reads and appends wait for a server that is away, 60 by default
    token_file=FILE     the token to show, if not in the environment as PXRS_TOKEN
    tls=true            encrypt, and trust the authorities that gRPC ships
    ca_file=FILE cert_file=FILE key_file=FILE    encrypt, trust this authority, show this certificate (PEM)

    Raises RegistryUnavailable if no server answers in time, WireMismatch, Unauthenticated, InvalidUrl."""
    return RemoteRegistry(Settings.of(address))


def open_log(address: Address) -> Log:
    """The log behind a server. Does not connect yet. Options as those of `open`. Raises InvalidUrl."""
    settings = Settings.of(address)
    query = urlencode(address.options)
    return RemoteLog(settings, f"{address.scheme}:{address.rest}{'?' if query else ''}{query}")
