"""The registry behind a server: see `pxrs.registry.contract.Registry`.

Every call is passed on. `get` and `scan` are made again, within their time, if no answer comes. A commit is sent once:
without an answer its outcome is unknown, unless it is certain that it was not sent (W1, R5). A prefix that is watched
here is watched by the server, over the same stream, and woken after each break of that stream (R2).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pxrs.errors import Closed, InvalidUrl, OutcomeUnknown, PxrsError, RegistryUnavailable
from pxrs.registry.contract import Commit, Entry, Registry, Snapshot, SqlPlace
from pxrs.registry.lease import Lease
from pxrs.registry.limit import seconds_left
from pxrs.registry.watch import PrefixWatch
from pxrs.remote import wire
from pxrs.remote.client.arming import Armed
from pxrs.remote.client.connection import acquire, release
from pxrs.remote.client.faults import Unanswered
from pxrs.remote.client.lease import RemoteLease
from pxrs.remote.client.settings import Settings

_NOT_TOLD: Final = (PxrsError, Closed)
"""What a server answers with if it failed while it made a commit: exactly these classes, and none below them."""


class RemoteRegistry(Registry):
    """A handle to the registry of the hub that a server keeps."""

    def __init__(self, settings: Settings) -> None:
        """Connects. Raises RegistryUnavailable, and why the server refuses this client."""
        super().__init__(settings.shown)
        self.timeout_s = settings.timeout_s
        self._connection = acquire(settings)
        self._armed: dict[PrefixWatch, Armed] = {}
        self._armed_lock = threading.Lock()
        try:
            self.limits = self._connection.hello(seconds_left(settings.timeout_s)).limits
        except BaseException as error:
            self._closed = True
            release(self._connection)
            if isinstance(error, Unanswered):
                raise RegistryUnavailable(f"{self.url}: {error}") from error
            raise

    def _is_idle(self) -> bool:
        return False  # the connection has threads

    # Keys.

    def _get(self, key: str) -> Entry | None:
        found = self._ask("registry.get", {"key": key})["entry"]
        return None if found is None else wire.entry_of(found)

    def _scan(self, prefix: str, after: str | None, limit: int | None) -> list[Entry]:
        entries: list[Entry] = []
        while True:
            left = None if limit is None else limit - len(entries)
            found = self._ask("registry.scan", {"prefix": prefix, "after": after, "limit": left})
            entries += map(wire.entry_of, found["entries"])
            if not found["more"] or not found["entries"]:
                return entries
            after = entries[-1].key

    def _snapshot(self, is_written_once: Callable[[str], bool]) -> Snapshot:
        # A token permits some keys, and a snapshot is all of them.
        raise InvalidUrl(
            f"{self.url}: a snapshot of a registry cannot be read through a server: run this on the server's host, "
            "with the registry's own address"
        )

    def _commit(self, commit: Commit) -> dict[str, int]:
        arguments = {
            "expect": dict(commit.expect),
            "put": {key: wire.text_of(value) for key, value in commit.put.items()},
            "ephemeral": {key: wire.text_of(value) for key, value in commit.ephemeral.items()},
            "delete": sorted(commit.delete),
            "lease": None if commit.lease is None else commit.lease.secret,
            "quiet": commit.quiet,
        }
        try:
            found = self._connection.call("registry.commit", arguments, seconds_left(self.timeout_s))
        except Unanswered as error:
            if error.was_sent and commit.changed:
                raise OutcomeUnknown(f"{self.url}: {error}") from error
            raise RegistryUnavailable(f"{self.url}: {error}") from error
        except PxrsError as error:
            if type(error) in _NOT_TOLD and commit.changed:
                self._check_usable()
                raise OutcomeUnknown(f"{self.url}: {error}") from error
            raise
        versions: dict[str, int] = found["versions"]
        return versions

    def sql_place(self) -> SqlPlace | None:
        found = self._ask("registry.sql", {})["place"]
        return None if found is None else SqlPlace(*map(str, found))

    # Leases.

    def _lease(self, ttl: float, renewed: bool) -> Lease:
        return self._grant("registry.lease", {"ttl": ttl})

    def _attach(self, secret: str, renewed: bool) -> Lease:
        return self._grant("registry.attach", {"secret": secret})

    def _grant(self, call: str, arguments: Mapping[str, Any]) -> Lease:
        sent_at = self.clock.now()
        try:
            # Not made again: a lease whose grant is lost expires, and so may be counted against a bound of the server.
            found = self._connection.call(call, arguments, seconds_left(self.timeout_s))
        except Unanswered as error:
            raise RegistryUnavailable(f"{self.url}: {error}") from error
        secret, ttl = str(found["secret"]), float(found["ttl"])
        return Lease(
            str(found["id"]),
            ttl,
            sent_at + float(found["left_s"]),
            secret=secret,
            stored=RemoteLease(self._connection, secret, ttl, self.clock),
            on_closed=self._forget_lease,
            clock=self.clock,
        )

    # Watches.

    def _watch(self, watches: Sequence[PrefixWatch]) -> None:
        armed = []
        try:
            for watch in watches:
                arguments = {"prefixes": [watch.prefix]}
                armed.append(self._connection.arm("registry.watch", "registry.unwatch", arguments, watch.wake))
                with self._armed_lock:
                    self._armed[watch] = armed[-1]
            timeout_s = seconds_left(self.timeout_s)
            for each in armed:
                self._connection.wait_armed(each, timeout_s)
        except BaseException as error:
            for watch in watches:
                self._unwatch(watch)
            if isinstance(error, Unanswered):
                raise RegistryUnavailable(f"{self.url}: {error}") from error
            raise

    def _unwatch(self, watch: PrefixWatch) -> None:
        with self._armed_lock:
            armed = self._armed.pop(watch, None)
        if armed is not None:
            self._connection.disarm(armed)

    def _close(self) -> None:
        with self._armed_lock:
            left = list(self._armed)
        for watch in left:
            self._unwatch(watch)
        release(self._connection)

    def _ask(self, call: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._connection.ask(call, arguments, seconds_left(self.timeout_s))
        except Unanswered as error:
            self._check_usable()
            given_up = self._connection.given_up(self.timeout_s)
            raise RegistryUnavailable(f"{self.url}: {error}; {given_up}") from error
