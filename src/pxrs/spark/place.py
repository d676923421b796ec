"""Where a hub is, for Spark's tasks, which run on executors, and for the driver's processes.

| the option `url` | tasks need | tasks that read | tasks that write |
|---|---|---|---|
| a directory | the directory, so the driver's machine (K5) | map its files | stage files in it |
| `pxrs://host:port` | to reach the server | fetch ranges from it | stage files through it |
| `pxrs://host:port,...`, a cluster | to reach all brokers | fetch ranges from owners | stage files through any broker |

Tasks get neither the address of the registry nor the driver's token. What they show to a server is the `token` of their
`HubPlace`, which the server has made for this query. It is in no plan, no log and no `repr`, only in what Spark sends
to executors.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from pxrs.clock import boot_id
from pxrs.errors import PxrsError, WrongMachine
from pxrs.publishing.staging.contract import Staging
from pxrs.publishing.staging.directory import DirectoryStaging
from pxrs.registry.address import Address, parse

if TYPE_CHECKING:
    from pxrs.log.contract import Log
    from pxrs.remote.client.connection import Connection

_logger = logging.getLogger(__name__)

SERVER: Final = "pxrs"
"""The scheme of servers' addresses."""
_TOKEN_FILE: Final = "token_file"
_FILES: Final = (_TOKEN_FILE, "ca_file", "cert_file", "key_file")
"""The options of an address that are paths."""
ALL: Final = ("*",)
"""In the place of topics' ids: all topics that the driver may read, or write to."""
TOPICS_MAX: Final = 50
"""How many topics a token for tasks names. For more, it permits all that the driver may read or write to."""
TOKEN_S: Final = 86_400.0
"""How long a token for tasks is valid at most. Nothing tells when a batch that reads is over, so its token ends only
then."""
_KEPT_MAX: Final = 8
"""How many connections to servers a worker of Spark keeps between its tasks."""


def is_server(url: str) -> bool:
    return url.startswith(f"{SERVER}:")


def absolute(address: Address) -> str:
    """A server's address with absolute paths in place of relative ones: Spark's processes have several folders."""
    options = {name: str(Path(text).absolute()) if name in _FILES else text for name, text in address.options.items()}
    return _text(address, options)


def end_tokens(url: str, capabilities: Iterable[str | None]) -> None:
    """End the tokens that tasks have had. url: the driver's own address. A failure is only logged: the rows are
    published, and the tokens end by themselves later."""
    for each in {*capabilities} - {None}:
        try:
            _ask(url, "capability.end", {"capability": each})
        except PxrsError as error:
            _logger.warning("a token for tasks could not be revoked, and stays valid until it expires: %s", error)


def _ask(url: str, call: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    from pxrs.remote.client.transfers import ask, connected

    with connected(url, None) as connection:
        return ask(connection, call, arguments)


def _few(topics: Collection[str]) -> Sequence[str]:
    """A token names few topics: it is sent with each call."""
    return sorted(topics) if len(topics) <= TOPICS_MAX else ALL


def staging_at(url: str) -> Staging:
    """The staging place of the hub at this address, for the driver's processes. url: a directory, or a server."""
    if not is_server(url):
        return DirectoryStaging(url)
    from pxrs.publishing.staging.served import ServedStaging

    return ServedStaging(url)


@dataclass(frozen=True)
class HubPlace:
    """Where a task finds the hub."""

    url: str
    """The directory, or the server's address."""
    machine: str | None
    """Boot id of the driver's machine, where the directory is; None for a server."""
    token: str | None = field(default=None, repr=False)
    """What the task shows to the server; None: what the environment of its process has."""
    capability: str | None = None
    """The id by which the driver ends the token; None if there is none."""

    @classmethod
    def of(cls, url: str) -> HubPlace:
        """Where tasks find the hub that the driver has at this address. If the hub is behind a server, they need a
        token: see `to_read` and `to_stage`."""
        if not is_server(url):
            return cls(url, boot_id())
        address = parse(url)
        # The file is the driver's own, and executors need not have it.
        options = {name: text for name, text in address.options.items() if name != _TOKEN_FILE}
        return cls(_text(address, options), None)

    @classmethod
    def to_read(cls, url: str, topics: Collection[str], lease: str | None = None) -> HubPlace:
        """For tasks that read ranges of these topics, given by their ids. Asks the server for a token that permits
        nothing else, and that ends with the lease of this secret, after TOKEN_S at the latest."""
        return cls.of(url)._with_token(url, _few(topics), (), lease)

    def to_stage(self, url: str, topics: Collection[str] | None) -> HubPlace:
        """For tasks that stage rows for these topics, given by their ids; None for all that the driver may write to.
        `end_tokens` ends the token, after TOKEN_S at the latest. url: the driver's own address."""
        return self._with_token(url, (), ALL if topics is None else _few(topics), None)

    def _with_token(self, url: str, read: Sequence[str], stage: Sequence[str], lease: str | None) -> HubPlace:
        if not self.is_served:
            return self
        asked = {"read": list(read), "stage": list(stage), "seconds": TOKEN_S, "lease": lease}
        found = _ask(url, "capability.create", asked)
        return replace(self, token=found["token"], capability=found["capability"])

    @property
    def is_served(self) -> bool:
        return self.machine is None

    def load(self) -> None:
        """Import what tasks need: they call `freeze_imports` after that."""
        if self.is_served:
            from pxrs.publishing.staging import served  # noqa: F401

    def check(self) -> None:
        """Raise WrongMachine in a task that cannot reach the hub's directory (K5)."""
        if self.machine is not None:
            check_machine(
                self.machine, f"it cannot read the hub's directory. Use the address of a server: {SERVER}://HOST:PORT"
            )

    def staging(self) -> Staging:
        """The staging place, for tasks."""
        if self.machine is not None:
            return DirectoryStaging(self.url)
        from pxrs.publishing.staging.served import ServedStaging

        _keep(self.url, self.token)
        return ServedStaging(self.url, self.token)

    @contextmanager
    def connected(self) -> Iterator[Connection]:
        """The connection to the server, for the block. It stays open for the next tasks of this process."""
        _keep(self.url, self.token)
        from pxrs.remote.client.transfers import connected

        with connected(self.url, self.token) as connection:
            yield connection

    @contextmanager
    def connected_for(self, connection: Connection, topic: str, topic_id: str, partition: int) -> Iterator[Connection]:
        """The connection by which a range of this partition is read, for the block: in a cluster, one to the
        partition's owner, so that no other broker has to pass the rows on. The other brokers of the address come
        behind it: if the owner is away, one of them passes on what the next owner has.

        connection: that of `connected`."""
        address = _owner(connection, topic, topic_id, partition)
        if address is None:
            yield connection
            return
        found = parse(self.url)
        others = [host for host in found.rest.strip("/").split(",") if host != address]
        nearest = replace(found, rest=f"//{','.join([address, *others])}")
        with replace(self, url=_text(nearest, dict(found.options))).connected() as owner:
            yield owner

    @contextmanager
    def log(self) -> Iterator[Log]:
        """The log, for the block."""
        if self.machine is not None:
            from pxrs.log.directory.log import DirectoryLog

            log: Log = DirectoryLog(Path(self.url))
        else:
            from pxrs.remote.client.log import RemoteLog
            from pxrs.remote.client.transfers import settings_of

            _keep(self.url, self.token)
            log = RemoteLog(settings_of(self.url, self.token), self.url)
        try:
            yield log
        finally:
            log.close()


def check_machine(machine: str, why: str) -> None:
    """Raise WrongMachine in a task on another machine than the driver's (K5)."""
    if boot_id() != machine:
        raise WrongMachine(
            f"an executor runs on {os.uname().nodename}, which is not the driver's machine: {why}; or run the "
            "executors on the driver's machine"
        )


def _owner(connection: Connection, topic: str, topic_id: str, partition: int) -> str | None:
    """The address of the broker that owns a partition; None if the server is none of a cluster, or nobody owns the
    partition now."""
    from pxrs.remote.client.transfers import ask

    if connection.last_hello is None:
        ask(connection, "server.ping", {})  # connects
    if connection.last_hello is None or not connection.last_hello.is_cluster:
        return None
    owners = ask(connection, "topic.owners", {"topic": topic, "topic_id": topic_id})["owners"]
    return next((str(address) for number, address in owners if number == partition), None)


_kept: OrderedDict[tuple[int, str, str | None], ExitStack] = OrderedDict()
"""By process id, address and token: connections that are kept between tasks. A worker runs one task at a time."""


def _keep(url: str, token: str | None) -> None:
    from pxrs.remote.client.transfers import connected

    key = os.getpid(), url, token
    if not _kept:
        atexit.register(let_go)
    if key not in _kept:
        stack = ExitStack()
        stack.enter_context(connected(url, token))
        _kept[key] = stack
    _kept.move_to_end(key)
    while len(_kept) > _KEPT_MAX:
        _kept.popitem(last=False)[1].close()


def let_go() -> None:
    """Close the connections that this process keeps for further tasks; those of its parent are the parent's."""
    for key in list(_kept):
        stack = _kept.pop(key)
        if key[0] == os.getpid():
            stack.close()


def _text(address: Address, options: dict[str, str]) -> str:
    return f"{address.scheme}:{address.rest}{'?' if options else ''}{urlencode(options, safe='/')}"
