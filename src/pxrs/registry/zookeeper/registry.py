"""The registry on ZooKeeper: reads, scans and commits over the sessions and the layout beside this file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kazoo.exceptions import NoNodeError

from pxrs.clock import SYSTEM, Clock
from pxrs.registry.contract import Commit, Entry, Limits, Registry
from pxrs.registry.lease import Lease
from pxrs.registry.watch import PrefixWatch
from pxrs.registry.zookeeper.commit import Attempt
from pxrs.registry.zookeeper.layout import Layout, Version
from pxrs.registry.zookeeper.lease import LeaseSession, session_of
from pxrs.registry.zookeeper.session import Client, Endpoint, LastingSession, Session, barrier
from pxrs.registry.zookeeper.watcher import Watcher

# The wire takes a little more than a megabyte. This leaves room for the paths of that many keys of usual length, each
# named twice; see `commit.WIRE_BYTES_MAX` for the rest.
LIMITS = Limits(commit_keys_max=1000, commit_bytes_max=800_000, value_bytes_max=750_000)


class ZooKeeperRegistry(Registry):
    """A handle to one namespace of an ensemble."""

    limits = LIMITS

    def __init__(self, endpoint: Endpoint, layout: Layout, *, clock: Clock = SYSTEM) -> None:
        super().__init__(endpoint.url, clock=clock)
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

    def _commit(self, commit: Commit) -> dict[str, int]:
        holder = session_of(commit.lease)
        session: Session = self._session if holder is None else holder
        until = session.bound() if commit.lease is None else min(session.bound(), commit.lease.deadline)
        return session.attempt(
            lambda client, until: Attempt(commit, self._layout, session, holder, client, until).perform(), until
        )

    # Leases and watches

    def _lease(self, ttl: float) -> Lease:
        return LeaseSession(self._endpoint, self._layout, ttl, self.clock).begin(self._forget_lease)

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
