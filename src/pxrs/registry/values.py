"""What calls of a registry take and return, as values, and the checks of what users give. Nothing here does I/O."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pxrs.errors import CommitTooLarge, InvalidCommit, InvalidKey, ValueTooLarge
from pxrs.registry.lease import Lease

ABSENT: Final = 0
"""An expected version that means: the key does not exist. No existing key has this version."""

KEY_BYTES_MAX: Final = 512
# Printable ASCII without the space, and without `;`, which marks folders in ZooKeeper.
_SEGMENT = re.compile(r"[!-.0-:<-~]+")


@dataclass(frozen=True, slots=True)
class Entry:
    """A key as it was at some moment."""

    key: str
    value: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All persistent keys of a registry as they were at one moment."""

    entries: tuple[Entry, ...]
    """In byte order of their keys."""
    moment: str
    """Which moment that was, in the words of the store, to be shown: "revision 512", say."""
    unread: tuple[str, ...] = ()
    """Keys that were there at the moment and whose values could not be read: they were deleted before the store, which
    has no snapshots (ZooKeeper), was asked for them. Not among `entries`. Empty on every other store."""
    seen: Mapping[str, bytes] = field(default_factory=dict)
    """Values of keys that were read shortly before or after the moment, if there are keys in `unread`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one commit may hold on a store. A caller that has more makes several commits."""

    commit_keys_max: int
    """How many different keys one commit may name, expected and written together, the lease aside."""
    commit_bytes_max: int
    """How many bytes the keys and values of one commit may have together."""
    value_bytes_max: int
    key_bytes_max: int = KEY_BYTES_MAX


@dataclass(frozen=True, slots=True)
class SqlPlace:
    """Where the keys of a registry are in a SQL database, for who runs its statements on a connection of their own."""

    dialect: str
    """postgresql, sqlite or oracle."""
    namespace: str
    channel: str
    """Where a commit notifies watches; empty if the database cannot."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The arguments of one commit. After `check_commit`, no key is in two of `put`, `ephemeral` and `delete`."""

    expect: Mapping[str, int]
    put: Mapping[str, bytes]
    ephemeral: Mapping[str, bytes]
    delete: frozenset[str]
    lease: Lease | None
    quiet: bool
    keys: tuple[str, ...] = field(init=False)
    """Every key that the commit names, in key order."""

    def __post_init__(self) -> None:
        keys = sorted({*self.expect, *self.put, *self.ephemeral, *self.delete})
        object.__setattr__(self, "keys", tuple(keys))

    @property
    def written(self) -> dict[str, bytes]:
        return {**self.put, **self.ephemeral}

    @property
    def changed(self) -> list[str]:
        """Every key that the commit writes or deletes."""
        return [*self.put, *self.ephemeral, *self.delete]


def check_commit(commit: Commit, limits: Limits) -> None:
    """Raise an error if the arguments contradict each other or are more than the store takes."""
    for key in commit.keys:
        check_key(key)
    for key, version in commit.expect.items():
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise InvalidCommit(f"expect {key}: {version!r} is not a version; use ABSENT or a version that was read")
    both = (commit.put.keys() & commit.ephemeral.keys()) | (commit.delete & commit.written.keys())
    if both:
        raise InvalidCommit(f"keys written twice in one commit: {', '.join(sorted(both))}")
    if commit.ephemeral and commit.lease is None:
        raise InvalidCommit("ephemeral keys need a lease")
    for key, value in commit.written.items():
        if not isinstance(value, bytes):
            raise InvalidCommit(f"put {key}: the value is {type(value).__name__}, not bytes")
        if len(value) > limits.value_bytes_max:
            raise ValueTooLarge(f"{key}: {len(value):,} bytes; the limit is {limits.value_bytes_max:,}")
    keys = commit.keys
    if len(keys) > limits.commit_keys_max:
        raise CommitTooLarge(f"{len(keys):,} keys in one commit; the limit is {limits.commit_keys_max:,}")
    size = sum(map(len, keys)) + sum(map(len, commit.written.values()))
    if size > limits.commit_bytes_max:
        raise CommitTooLarge(f"{size:,} bytes in one commit; the limit is {limits.commit_bytes_max:,}")


def check_key(key: str) -> None:
    """Raise InvalidKey unless this is a slash path of allowed segments."""
    if not isinstance(key, str) or not key:
        raise InvalidKey(f"{key!r}: a key is a slash path such as 'groups/billing/leader'")
    _check_segments(key)


@functools.lru_cache(maxsize=4096)  # a group names the same keys again and again
def _check_segments(key: str) -> None:
    if len(key) > KEY_BYTES_MAX:
        raise InvalidKey(f"{key[:40]!r}...: {len(key)} characters; the limit is {KEY_BYTES_MAX}")
    for segment in key.split("/"):
        if segment in ("", ".", "..") or not _SEGMENT.fullmatch(segment):
            raise InvalidKey(
                f"{key!r}: the segment {segment!r} is not allowed; use printable ASCII without space or ';', "
                "and no empty, '.' or '..' segment"
            )


def check_prefix(prefix: str) -> None:
    """Raise InvalidKey unless this is empty or a slash path that ends in a slash."""
    if prefix == "":
        return
    if not isinstance(prefix, str) or not prefix.endswith("/"):
        raise InvalidKey(f"{prefix!r}: a prefix must be empty or end in a slash, so that 'a/' never matches 'ab'")
    check_key(prefix[:-1])
