"""The registry: a small coordination kernel that everything else is written over, once.

It holds versioned keys, changes several of them together or not at all, gives leases, and wakes those
who watch. Nothing above it knows which store it is; nothing in it knows what the keys mean.

What every backend keeps, and `pxrs.testing` proves:
- `get` and `commit` are linearizable. `scan` gives for every key a value that was current at some moment during
  the call and misses nothing committed before it; it is not one moment's picture (R1).
- A version changes with every write. It is not used again while the key lives, and a *guard* must be a persistent
  key that is never deleted (R4): ZooKeeper counts a re-created key from the start.
- A commit that names a lease happens only while that lease lives, decided together with the commit (R3).
- A key is persistent or ephemeral as its last write made it. A lease's end removes its keys, as a commit would.
- An error other than `OutcomeUnknown` means that nothing was written. Nothing is retried that might happen twice (R5).

A backend implements the methods that begin with an underscore; the public ones here check the arguments, so that
bad input gets the same error everywhere and never reaches a store.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from pxrs import arguments, dropped
from pxrs.clock import SYSTEM, Clock
from pxrs.errors import (
    Closed,
    CommitTooLarge,
    InvalidArgument,
    InvalidCommit,
    InvalidKey,
    UsedAfterFork,
    ValueTooLarge,
)
from pxrs.registry.lease import LEASE_TTL_MIN, Lease, not_attached
from pxrs.registry.limit import check_time
from pxrs.registry.renewal import Renewer
from pxrs.registry.watch import Watch

ABSENT: Final = 0
"""As an expected version: the key is not there. No key that is there has this version."""

KEY_BYTES_MAX: Final = 512
TIMEOUT_S_DEFAULT: Final = 10.0
CLOSERS_MAX: Final = 16
# Printable ASCII without the space, and without `;`, which marks folders in ZooKeeper.
_SEGMENT = re.compile(r"[!-.0-:<-~]+")
_EMPTY: Final[Mapping[str, bytes]] = {}


@dataclass(frozen=True, slots=True)
class Entry:
    """A key as it was at some moment."""

    key: str
    value: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What one commit may hold on this store. Callers that have more split it."""

    commit_keys_max: int
    """How many different keys one commit may name, expected and written together, the lease aside."""
    commit_bytes_max: int
    """How many bytes the keys and values of one commit may have together."""
    value_bytes_max: int
    key_bytes_max: int = KEY_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit's arguments, checked. No key is in two of `put`, `ephemeral` and `delete`."""

    expect: Mapping[str, int]
    put: Mapping[str, bytes]
    ephemeral: Mapping[str, bytes]
    delete: frozenset[str]
    lease: Lease | None
    quiet: bool
    keys: tuple[str, ...] = field(init=False)
    """Every key it names, in key order."""

    def __post_init__(self) -> None:
        keys = sorted({*self.expect, *self.put, *self.ephemeral, *self.delete})
        object.__setattr__(self, "keys", tuple(keys))

    @property
    def written(self) -> dict[str, bytes]:
        return {**self.put, **self.ephemeral}

    @property
    def changed(self) -> list[str]:
        """Every key it writes or deletes."""
        return [*self.put, *self.ephemeral, *self.delete]


class Registry(ABC):
    """A handle to a store. Threads share it; a forked child must open its own.

    Close it. It keeps the leases and watches that it gave out, and closes itself, with a ResourceWarning, if nobody has
    it or one of them any more; on stores whose driver's threads keep the handle, it stays open until the process ends.
    """

    limits: Limits
    timeout_s: float = TIMEOUT_S_DEFAULT
    """How long one call may take; the option `timeout` of the address. See `registry.limit` for several together."""
    folder: Path | None = None
    """A folder of this store's own, where files about what it keeps may be put beside its own. Most have none."""

    def __init__(self, url: str, *, clock: Clock = SYSTEM) -> None:
        """`url` is shown in messages, so its password must be hidden already."""
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
        self._watches: set[Watch] = set()

    # The public face.

    def get(self, key: str) -> Entry | None:
        """The key's current value and version, or None."""
        self._check_usable()
        _check_key(key)
        check_time(self.url)
        return self._get(key)

    def scan(self, prefix: str, after: str | None = None, limit: int | None = None) -> list[Entry]:
        """The entries whose keys begin with `prefix`, in byte order of their keys, those after the key `after`,
        at most `limit` of them. A prefix is empty or ends in a slash."""
        self._check_usable()
        _check_prefix(prefix)
        if after is not None and not (isinstance(after, str) and after.isascii()):
            raise InvalidKey(f"after is {arguments.shown(after)}: give a key, which is ASCII text, or None")
        limit = None if limit is None else arguments.whole(InvalidKey, "limit", limit, 1)
        check_time(self.url)
        return self._scan(prefix, after, limit)

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
        put:       keys to write, for good.
        ephemeral: keys to write that live and die with `lease`.
        lease:     must be alive, whatever is written, else LeaseExpired.
        delete:    keys to remove; one that is not there is no error.
        quiet:     a promise that nobody watches these keys, which spares some stores a notification.
        """
        self._check_usable()
        if lease is not None and not isinstance(lease, Lease):
            raise InvalidCommit(f"lease is {arguments.shown(lease)}: give what `lease` returned, or None")
        try:
            commit = Commit(dict(expect), dict(put), dict(ephemeral), frozenset(delete), lease, quiet)
        except TypeError as error:
            raise InvalidKey(f"a commit takes mappings from keys, which are strings: {error}") from error
        self._check_commit(commit)
        if lease is not None:
            lease.check()
        if not commit.keys and lease is None:
            return {}
        check_time(self.url)
        return self._commit(commit)

    def lease(self, ttl: float | timedelta, renewed: bool = True) -> Lease:
        """A new lease. The store may grant more than `ttl` seconds.

        renewed: whether this handle renews the lease in the background until it is closed, which ends the lease. If
                 False, it lives for its ttl after each `Lease.renew`, whatever becomes of this handle or process."""
        self._check_usable()
        seconds = arguments.seconds(InvalidArgument, "ttl", ttl, LEASE_TTL_MIN, arguments.DAY_S)
        check_time(self.url)
        return self._give_out(self._lease(seconds, renewed), renewed)

    def attach(self, secret: str, renewed: bool = False) -> Lease:
        """A grant of this handle for a living lease, by the `Lease.secret` of it. Attaching renews the lease once.

        Raises LeaseExpired if no living lease has this secret.

        renewed: as in `lease`."""
        self._check_usable()
        if not isinstance(secret, str):
            raise InvalidArgument(f"secret is of type {type(secret).__name__}: give the `secret` of a lease")
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

        A prefix that does not end in a slash watches that single key."""
        self._check_usable()
        if not prefixes:
            raise InvalidKey("a watch needs at least one prefix; the empty one watches everything")
        for prefix in prefixes:
            if isinstance(prefix, str) and prefix and not prefix.endswith("/"):
                _check_key(prefix)
            else:
                _check_prefix(prefix)
        watch = Watch(prefixes, self._forget_watch)
        with self._handles_lock:
            self._check_usable()
            self._watches.add(watch)
        try:
            self._watch(watch)
        except BaseException:
            watch.close()
            raise
        return watch

    def close(self) -> None:
        """End the leases that this handle renews, wake the waiters, let go of the store. In this order: ending a lease
        needs the store. Leases that it does not renew stay in the store until they expire."""
        if os.getpid() != self._pid:
            return  # it is the parent's
        with self._handles_lock:
            if self._closed:
                return
            self._closed = True
            leases, watches = [*self._leases, *self._unrenewed], list(self._watches)
        try:
            self._renewer.close()
            for lease in leases:
                lease.expire()
            if len(leases) > 1:  # a store that does not answer is waited for once, not once for each lease
                # RuntimeError: the interpreter is exiting and starts no more threads. Then one after the other, below.
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
        """Whether nothing has to be closed: called by the finalizer, and so without any lock."""
        return not self._leases and not self._watches

    @abstractmethod
    def _get(self, key: str) -> Entry | None: ...

    @abstractmethod
    def _scan(self, prefix: str, after: str | None, limit: int | None) -> list[Entry]: ...

    @abstractmethod
    def _commit(self, commit: Commit) -> dict[str, int]: ...

    @abstractmethod
    def _lease(self, ttl: float, renewed: bool) -> Lease:
        """A new lease. A backend does not renew it itself; `renewed` says that this handle will. If it is False, the
        lease must outlive this process. Pass `on_closed=self._forget_lease` to the lease."""

    @abstractmethod
    def _attach(self, secret: str, renewed: bool) -> Lease:
        """A grant for the living lease of this secret, which is ASCII text and may be malformed. Raise `not_attached()`
        if there is none, without any effect on a lease whose secret is another one."""

    @abstractmethod
    def _watch(self, watch: Watch) -> None:
        """Return only when every later change will wake the watch."""

    def _unwatch(self, watch: Watch) -> None:  # noqa: B027 - most backends keep nothing per watch
        """Called once when a watch is closed."""

    @abstractmethod
    def _close(self) -> None: ...

    # What backends share.

    def _wake(self, keys: Iterable[str] | None) -> None:
        """Wake the watches that cover any of the keys; None is a doubt, and wakes all."""
        with self._handles_lock:
            watches = list(self._watches)
        if not watches:
            return
        keys = None if keys is None else list(keys)
        for watch in watches:
            if keys is None or any(map(watch.covers, keys)):
                watch.wake()

    def _forget_lease(self, lease: Lease) -> None:
        with self._handles_lock:
            self._leases.discard(lease)
            self._unrenewed.discard(lease)

    def _forget_watch(self, watch: Watch) -> None:
        with self._handles_lock:
            self._watches.discard(watch)
        self._unwatch(watch)

    def _check_usable(self) -> None:
        if self._closed:
            raise Closed(f"the registry {self.url} was closed")
        if os.getpid() != self._pid:
            raise UsedAfterFork(f"the registry {self.url} was opened before a fork: open it again in the child")

    def _check_commit(self, commit: Commit) -> None:
        for key in commit.keys:
            _check_key(key)
        for key, version in commit.expect.items():
            if not isinstance(version, int) or isinstance(version, bool) or version < 0:
                raise InvalidCommit(f"expect {key}: {version!r} is not a version; use ABSENT or one that was read")
        both = (commit.put.keys() & commit.ephemeral.keys()) | (commit.delete & commit.written.keys())
        if both:
            raise InvalidCommit(f"written twice in one commit: {', '.join(sorted(both))}")
        if commit.ephemeral and commit.lease is None:
            raise InvalidCommit("ephemeral keys need the lease that they live with")
        if commit.lease is not None and commit.lease.alive and not self._has_given_out(commit.lease):
            raise InvalidCommit("the lease belongs to another registry handle: attach to it with its secret")
        self._check_size(commit)

    def _has_given_out(self, lease: Lease) -> bool:
        return lease in self._leases or lease in self._unrenewed

    def _check_size(self, commit: Commit) -> None:
        for key, value in commit.written.items():
            if not isinstance(value, bytes):
                raise InvalidCommit(f"put {key}: the value is {type(value).__name__}, not bytes")
            if len(value) > self.limits.value_bytes_max:
                raise ValueTooLarge(f"{key}: {len(value):,} bytes, and {self.limits.value_bytes_max:,} is the most")
        keys = commit.keys
        if len(keys) > self.limits.commit_keys_max:
            raise CommitTooLarge(f"{len(keys):,} keys in one commit, and {self.limits.commit_keys_max:,} is the most")
        size = sum(map(len, keys)) + sum(map(len, commit.written.values()))
        if size > self.limits.commit_bytes_max:
            raise CommitTooLarge(f"{size:,} bytes in one commit, and {self.limits.commit_bytes_max:,} is the most")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}{' closed' if self._closed else ''}>"


def _check_key(key: str) -> None:
    if not isinstance(key, str) or not key:
        raise InvalidKey(f"{key!r}: a key is a slash path such as 'groups/billing/leader'")
    _check_segments(key)


@functools.lru_cache(maxsize=4096)  # a group names the same keys again and again
def _check_segments(key: str) -> None:
    if len(key) > KEY_BYTES_MAX:
        raise InvalidKey(f"{key[:40]!r}...: {len(key)} characters, and {KEY_BYTES_MAX} is the most")
    for segment in key.split("/"):
        if segment in ("", ".", "..") or not _SEGMENT.fullmatch(segment):
            raise InvalidKey(
                f"{key!r}: the segment {segment!r} is not allowed; use printable ASCII without space or ';', "
                "and no empty, '.' or '..' segment"
            )


def _check_prefix(prefix: str) -> None:
    if prefix == "":
        return
    if not isinstance(prefix, str) or not prefix.endswith("/"):
        raise InvalidKey(f"{prefix!r}: a prefix is empty or ends in a slash, so that 'a/' never matches 'ab'")
    _check_key(prefix[:-1])
