"""The registry on ZooKeeper: reads, scans and commits over the sessions and the layout beside this file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from kazoo.exceptions import NoNodeError

from pxrs.clock import SYSTEM, Clock
from pxrs.errors import LeaseExpired
from pxrs.registry.contract import Commit, Entry, Limits, Registry, Snapshot
from pxrs.registry.lease import Lease, id_of, not_attached
from pxrs.registry.watch import PrefixWatch
from pxrs.registry.zookeeper.client import Client, Endpoint
from pxrs.registry.zookeeper.commit import Attempt
from pxrs.registry.zookeeper.layout import Layout, Version
from pxrs.registry.zookeeper.lease import (
    SESSIONS_MAX,
    Connections,
    LeaseSession,
    Secret,
    StandingSession,
    VisitingSession,
    session_of,
)
from pxrs.registry.zookeeper.session import LastingSession, Session, barrier
from pxrs.registry.zookeeper.snapshot import SnapshotReader
from pxrs.registry.zookeeper.watcher import Watcher

# The wire takes a little more than a megabyte. This leaves room for the paths of that many keys of usual length, each
# named twice; see `commit.WIRE_BYTES_MAX` for the rest.
LIMITS = Limits(commit_keys_max=1000, commit_bytes_max=800_000, value_bytes_max=750_000)


class ZooKeeperRegistry(Registry):
    """A handle to one namespace of an ensemble."""

    limits = LIMITS

    def __init__(
        self, endpoint: Endpoint, layout: Layout, *, clock: Clock = SYSTEM, sessions_max: int = SESSIONS_MAX
    ) -> None:
        """`sessions_max`: how many connections of leases there may be at a time."""
        super().__init__(endpoint.url, clock=clock)
        self._connections = Connections(endpoint.url, sessions_max)
        self._endpoint, self._layout, self.timeout_s = endpoint, layout, endpoint.timeout
        self._watcher = Watcher(layout, self._watches.prefixes, self._wake)
        self._session = LastingSession(endpoint, clock, self._watcher.on_state, self._watcher.on_event)

    # Reading

    def _get(self, key: str) -> Entry | None:
        path = self._layout.leaf(key)

        def read(client: Client, until: float) -> Entry | None:
            passed, result = barrier(client, self._layout.root), client.get_async(path)
            self._session.wait(passed, until)
            try:
                return _entry(key, self._session.wait(result, until))
            except NoNodeError:
                return None

        return self._session.attempt(read, self._session.bound())

    def _scan(self, prefix: str, after: str | None, limit: int | None) -> list[Entry]:
        def read(client: Client, until: float) -> list[Entry]:
            self._session.wait(barrier(client, self._layout.root), until)
            entries: list[Entry] = []
            begin = after
            while limit is None or len(entries) < limit:
                wanted = None if limit is None else limit - len(entries)
                keys = self._list(client, prefix, begin, wanted)
                answers = self._session.read(client, map(self._layout.leaf, keys))
                entries += [_entry(key, found) for key, found in zip(keys, answers, strict=True) if found is not None]
                if wanted is None or len(keys) < wanted:
                    break
                begin = keys[-1]  # if some vanished since they were listed, others take their places
            return entries

        return self._session.attempt(read, self._session.bound())

    def _list(self, client: Client, prefix: str, after: str | None, limit: int | None) -> list[str]:
        """The first keys, in order, level by level, leaving out the folders that cannot hold any of them."""
        found: list[str] = []
        level = [prefix]
        while level:
            below: list[str] = []
            listings = self._session.gather(client.get_children_async, map(self._layout.folder, level))
            for folder, names in zip(level, listings, strict=True):
                keys, prefixes = self._layout.children(folder, names or [])
                found += [key for key in keys if after is None or key > after]
                below += prefixes
            found.sort()
            last = None
            if limit is not None and len(found) >= limit:
                del found[limit:]
                last = found[-1]
            level = [
                folder
                for folder in below
                if (after is None or folder > after or after.startswith(folder)) and (last is None or folder < last)
            ]
        return found

    def _snapshot(self, is_written_once: Callable[[str], bool]) -> Snapshot:
        def read(client: Client, until: float) -> Snapshot:
            return SnapshotReader(self._session, client, self._layout, is_written_once).take(until)

        return self._session.attempt(read, self._session.bound())

    def _commit(self, commit: Commit) -> dict[str, int]:
        holder = session_of(commit.lease)
        session: Session = self._session if holder is None else holder
        until = session.bound() if commit.lease is None else min(session.bound(), commit.lease.deadline)
        with contextlib.nullcontext() if holder is None else holder.opened(until):
            return session.attempt(
                lambda client, until: Attempt(commit, self._layout, session, holder, client, until).perform(), until
            )

    # Leases and watches

    def _lease(self, ttl: float, renewed: bool) -> Lease:
        session = self._session_for(renewed)(self._endpoint, self._layout, self.clock, self._connections, ttl)
        return self._grant(session, session.begin())

    def _attach(self, secret: str, renewed: bool) -> Lease:
        parts = Secret.parse(secret)
        granted_s = self._granted_to(parts)
        session = self._session_for(renewed)(
            self._endpoint, self._layout, self.clock, self._connections, granted_s, parts
        )
        try:
            return self._grant(session, session.renew())
        except BaseException as error:
            session.let_go()
            if isinstance(error, LeaseExpired):
                raise not_attached() from None
            raise

    def _granted_to(self, secret: Secret) -> float:
        """The session time-out, in seconds, of a living lease, asked through the handle's own session: to connect to a
        session touches it, and takes it away from another connection."""
        path = self._layout.lease(id_of(secret.token))

        def read(client: Client, until: float) -> float:
            passed, result = barrier(client, self._layout.root), client.get_async(path)
            self._session.wait(passed, until)
            try:
                value, stat = self._session.wait(result, until)
            except NoNodeError:
                raise not_attached() from None
            if stat.ephemeralOwner != secret.session_id or not value:
                raise not_attached()
            return int(value) / 1000

        return self._session.attempt(read, self._session.bound())

    def _session_for(self, renewed: bool) -> type[LeaseSession]:
        return StandingSession if renewed else VisitingSession

    def _grant(self, session: LeaseSession, deadline: float) -> Lease:
        session.lease = Lease(
            session.lease_id,
            session.granted_s,
            deadline,
            secret=session.secret.text(),
            stored=session,
            on_closed=self._forget_lease,
            clock=self.clock,
        )
        return session.lease

    def _watch(self, watches: Sequence[PrefixWatch]) -> None:
        prefixes = [watch.prefix for watch in watches]
        self._session.attempt(lambda *_: self._watcher.open(self._session, prefixes), self._session.bound())

    def _close(self) -> None:
        """The watches end before the session, whose end would make them arm again."""
        self._watcher.close(self._endpoint.timeout)
        self._session.close()


def _entry(key: str, found: Any) -> Entry:
    value, stat = found
    return Entry(key, value or b"", Version.of(stat).number())
