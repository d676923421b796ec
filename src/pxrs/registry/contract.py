"""The contract of a registry: a small coordination kernel over which groups, queues and the Spark sink are written.

A registry holds versioned keys, changes several of them together or not at all, gives leases, and wakes watches after a
change. The code above it does not know which store it runs on, and no backend knows what the keys mean.

What every backend keeps, and `pxrs.testing` proves:
- `get` and `commit` are linearizable. `scan` gives for every key a value that was current at some moment during
  the call and misses nothing committed before it; the values of two keys may be of different moments (R1).
- A version changes with every write and is not used again while the key exists. A *guard*, a key whose version fences
  writes, must be persistent and never deleted (R4): ZooKeeper counts the versions of a re-created key from the start.
- A commit that names a lease happens only while that lease is alive; the store decides both in one step (R3).
- The last write of a key makes it persistent or ephemeral. The end of a lease removes its ephemeral keys in one step.
- `snapshot` gives all persistent keys as they were at one moment: of each commit all writes, or none.
- An error other than `OutcomeUnknown` means that nothing was written. A request that could take effect twice is never
  sent twice (R5).
- A lease that this handle does not renew outlives the handle and its process, until its expiry (W2).

A backend implements the abstract methods, whose names begin with an underscore. The public methods here check the
arguments, so that invalid input raises the same error on every backend and never reaches a store.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from pxrs import arguments, dropped
from pxrs.clock import SYSTEM, Clock
from pxrs.errors import (
    Closed,
    InvalidArgument,
    InvalidCommit,
    InvalidKey,
    LeaseExpired,
    UsedAfterFork,
)
from pxrs.registry.lease import LEASE_TTL_MIN, Lease, not_attached
from pxrs.registry.limit import check_time
from pxrs.registry.renewal import Renewer
from pxrs.registry.values import (
    ABSENT,
    Commit,
    Entry,
    Limits,
    Snapshot,
    SqlPlace,
    check_commit,
    check_key,
    check_prefix,
)
from pxrs.registry.watch import PrefixWatch, SharedWatches, Watch
from pxrs.scheduler import Scheduler

__all__ = ["ABSENT", "Commit", "Entry", "Limits", "Registry", "Snapshot", "SqlPlace"]

TIMEOUT_S_DEFAULT: Final = 10.0
CLOSERS_MAX: Final = 16
"""How many leases `close` ends at the same time."""
_EMPTY: Final[Mapping[str, bytes]] = {}


class Registry(ABC):
    """A handle to a store. Threads share it; a forked child must open its own.

    Close it. A handle refers to the leases that it renews and to its watches. A handle that is garbage-collected with
    all of them closes itself, with a ResourceWarning; on stores whose driver's threads refer to the handle, it stays
    open until the process ends."""

    # Over the limit: each public method checks its arguments and has a counterpart that backends implement.

    limits: Limits
    timeout_s: float = TIMEOUT_S_DEFAULT
    """How long one call may take; the option `timeout` of the address. `registry.limit` bounds several calls."""
    folder: Path | None = None
    """The folder of this store, in which other code may put files beside the store's own; None on most stores."""

    def __init__(self, url: str, *, clock: Clock = SYSTEM) -> None:
        """`url` is shown in messages, so the caller must have removed its password."""
        self.url = url
        self.clock = clock
        self._pid = os.getpid()
        self._closed = False
        self._handles_lock = threading.Lock()
        self._leases: set[Lease] = set()
        """The leases that this handle renews."""
        self._unrenewed: weakref.WeakSet[Lease] = weakref.WeakSet()
        """The other leases that this handle has given out."""
        self._renewer = Renewer(clock)
        self.scheduler = Scheduler(clock, "pxrs-group")
        """Runs the recurring work of everything that is built on this handle, such as members of groups."""
        self.housekeeping = Scheduler(clock, "pxrs-housekeeping", threads_max=1)
        """Runs work that no caller waits for and that may be slow, one piece at a time, such as writing readable
        files."""
        self._watches = SharedWatches()

    # The public face.

    def get(self, key: str) -> Entry | None:
        """The key's current value and version, or None."""
        self._check_usable()
        check_key(key)
        check_time(self.url)
        return self._get(key)

    def scan(self, prefix: str, after: str | None = None, limit: int | None = None) -> list[Entry]:
        """The entries whose keys begin with `prefix`, in byte order of their keys, those after the key `after`,
        at most `limit` of them. A prefix is empty or ends in a slash."""
        self._check_usable()
        check_prefix(prefix)
        if after is not None and not (isinstance(after, str) and after.isascii()):
            raise InvalidKey(f"after must be a key (ASCII text) or None, not {arguments.shown(after)}")
        limit = None if limit is None else arguments.whole(InvalidKey, "limit", limit, 1)
        check_time(self.url)
        return self._scan(prefix, after, limit)

    def snapshot(self, is_written_once: Callable[[str], bool] = lambda key: False) -> Snapshot:
        """All persistent keys as they were at one moment, for a backup. Ephemeral keys are left out: their leases do
        not outlive a copy. May take longer than `timeout_s` on a large registry; each request to the store may not.

        is_written_once: whether a key is never written a second time, not even after it was deleted. A store without
                         snapshots need not read the value of such a key at the very moment."""
        self._check_usable()
        check_time(self.url)
        return self._snapshot(is_written_once)

    def commit(
        self,
        expect: Mapping[str, int] = {},
        put: Mapping[str, bytes] = _EMPTY,
        ephemeral: Mapping[str, bytes] = _EMPTY,
        lease: Lease | None = None,
        delete: Iterable[str] = (),
        quiet: bool = False,
    ) -> dict[str, int]:
        """Change several keys together, or none. Returns the new version of each key written.

        expect:    the version that each of these keys must have, or ABSENT; a difference raises Conflict.
        put:       keys to write as persistent keys.
        ephemeral: keys to write that vanish when `lease` ends.
        lease:     a lease that this handle gave out. It must be alive, whatever is written, else LeaseExpired.
        delete:    keys to remove; a missing key is not an error.
        quiet:     promises that no watch covers these keys, so that some stores need not send a notification.
        """
        self._check_usable()
        if lease is not None and not isinstance(lease, Lease):
            raise InvalidCommit(f"lease must be a Lease of this registry, or None, not {arguments.shown(lease)}")
        try:
            commit = Commit(dict(expect), dict(put), dict(ephemeral), frozenset(delete), lease, quiet)
        except TypeError as error:
            raise InvalidKey(
                f"expect, put and ephemeral must be mappings, and delete an iterable of keys: {error}"
            ) from error
        check_commit(commit, self.limits)
        if lease is not None:
            if lease.alive and not self._has_given_out(lease):
                raise InvalidCommit("the lease belongs to another registry handle: attach to it with its secret")
            lease.check()
        if not commit.keys and lease is None:
            return {}
        check_time(self.url)
        try:
            return self._commit(commit)
        except LeaseExpired:
            if lease is not None:
                lease.expire()  # its holder must not wait for the next renewal to learn of it
            raise

    def lease(self, ttl: float | timedelta, renewed: bool = True) -> Lease:
        """A new lease. The store may grant more than `ttl` seconds.

        renewed: whether this handle renews the lease in the background until it is closed, which ends the lease. If
                 False, it lives for its ttl after each `Lease.renew`, whatever becomes of this handle or process."""
        self._check_usable()
        seconds = arguments.seconds(InvalidArgument, "ttl", ttl, LEASE_TTL_MIN, arguments.DAY_S)
        check_time(self.url)
        return self._give_out(self._lease(seconds, renewed), renewed)

    def attach(self, secret: str, renewed: bool = False) -> Lease:
        """A grant of this handle for a live lease, found by its `Lease.secret`. Attaching renews the lease once.

        Raises LeaseExpired if no live lease has this secret.

        renewed: as in `lease`."""
        self._check_usable()
        if not isinstance(secret, str):
            raise InvalidArgument(f"secret must be the `secret` of a lease, not of type {type(secret).__name__}")
        check_time(self.url)
        if not secret.isascii():
            raise not_attached()
        return self._give_out(self._attach(secret, renewed), renewed)

    def _give_out(self, lease: Lease, renewed: bool) -> Lease:
        """Keep account of a new grant, and renew it if that was asked for."""
        try:
            if renewed:
                self._renewer.add(lease)
            with self._handles_lock:
                if not self._closed:
                    (self._leases if renewed else self._unrenewed).add(lease)
                    return lease
        except BaseException:
            lease.close()
            raise
        lease.close()
        raise Closed(f"the registry {self.url} was closed")

    def watch(self, *prefixes: str) -> Watch:
        """A watch that wakes after any change under any of the prefixes. Open it, then scan.

        A prefix that does not end in a slash watches that single key. Handles with the same prefixes share what the
        store does for them: the store's threads and connections do not grow with the number of handles (W6)."""
        self._check_usable()
        if not prefixes:
            raise InvalidKey("a watch needs at least one prefix; the empty prefix watches all keys")
        for prefix in prefixes:
            if isinstance(prefix, str) and prefix and not prefix.endswith("/"):
                check_key(prefix)
            else:
                check_prefix(prefix)
        watch = Watch(prefixes, self._forget_watch)
        with self._handles_lock:
            self._check_usable()
            self._watches.add(watch)
        try:
            self._watches.arm(watch, self._watch, self._unwatch)
        except BaseException:
            watch.close()
            raise
        return watch

    def close(self) -> None:
        """End the leases that this handle renews, wake the waiters, let go of the store. In this order: ending a lease
        needs the store. Leases that it does not renew stay in the store until they expire."""
        if os.getpid() != self._pid:
            return  # in a forked child: the registry belongs to the parent
        with self._handles_lock:
            if self._closed:
                return
            self._closed = True
            leases, watches = [*self._leases, *self._unrenewed], self._watches.handles()
        try:
            self._renewer.close()
            for lease in leases:
                lease.expire()
            if len(leases) > 1:  # at the same time: a store that does not answer is not waited for once for each lease
                # RuntimeError: the interpreter is exiting and starts no more threads. Then the loop below closes them.
                with suppress(RuntimeError), ThreadPoolExecutor(min(len(leases), CLOSERS_MAX)) as pool:
                    list(pool.map(Lease.close, leases))
            for lease in leases:
                lease.close()
        finally:
            for watch in watches:
                watch.close()
            self._close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or os.getpid() != self._pid or sys.is_finalizing() or self._is_idle():
            return
        name = repr(self)
        dropped.apart(self.close)
        dropped.warn(name, "its leases and watches end now", self)

    # What a backend implements.

    def _is_idle(self) -> bool:
        """Whether nothing has to be closed. Called by the finalizer, which must not take a lock."""
        return not self._leases and not self._watches

    @abstractmethod
    def _get(self, key: str) -> Entry | None: ...

    @abstractmethod
    def _scan(self, prefix: str, after: str | None, limit: int | None) -> list[Entry]: ...

    @abstractmethod
    def _snapshot(self, is_written_once: Callable[[str], bool]) -> Snapshot: ...

    @abstractmethod
    def _commit(self, commit: Commit) -> dict[str, int]:
        """Raise LeaseExpired only if the store says that the named lease has ended: `commit` marks the lease as lost
        then."""

    @abstractmethod
    def _lease(self, ttl: float, renewed: bool) -> Lease:
        """A new lease. A backend does not renew it itself; `renewed` says that this handle will. If it is False, the
        lease must outlive this process. Pass `on_closed=self._forget_lease` to the lease."""

    @abstractmethod
    def _attach(self, secret: str, renewed: bool) -> Lease:
        """A grant for the living lease of this secret, which is ASCII text and may be malformed. Raise `not_attached()`
        if there is none, without any effect on a lease whose secret is another one."""

    @abstractmethod
    def _watch(self, watches: Sequence[PrefixWatch]) -> None:
        """Return only when every later change under these prefixes will wake them. Called once for each distinct
        prefix, however many handles share it, until `_unwatch`. Several threads may call it at once, for different
        prefixes. Must end, in about the store's time limit."""

    def _unwatch(self, watch: PrefixWatch) -> None:  # noqa: B027 - most backends keep nothing for each prefix
        """Called when the last handle with this prefix is closed, also if `_watch` has failed; perhaps twice."""

    @abstractmethod
    def _close(self) -> None: ...

    # What backends share.

    def _wake(self, keys: Iterable[str] | None) -> None:
        """Wake the watches that cover any of the keys. None: it is not known what changed, so all watches wake."""
        self._watches.wake(keys)

    def _forget_lease(self, lease: Lease) -> None:
        with self._handles_lock:
            self._leases.discard(lease)
            self._unrenewed.discard(lease)

    def _forget_watch(self, watch: Watch) -> None:
        for unused in self._watches.remove(watch):
            self._unwatch(unused)

    def sql_place(self) -> SqlPlace | None:
        """Where the keys are in a SQL database; None if this store is none. Asks the server if there is one between:
        raises RegistryUnavailable."""
        return None

    def check_usable(self) -> None:
        """Raise Closed or UsedAfterFork if this handle may not be used."""
        self._check_usable()

    def _check_usable(self) -> None:
        if self._closed:
            raise Closed(f"the registry {self.url} was closed")
        if os.getpid() != self._pid:
            raise UsedAfterFork(f"the registry {self.url} was opened before a fork: open it again in the child")

    def _has_given_out(self, lease: Lease) -> bool:
        return lease in self._leases or lease in self._unrenewed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}{' closed' if self._closed else ''}>"
