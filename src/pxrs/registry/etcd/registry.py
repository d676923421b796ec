"""The registry's contract in etcd's terms.

- A commit is one transaction: it compares the modification revision of every expected key and, if one differs, reads
  all of them, so that `Conflict` can name the keys without a second round trip.
- A lease has a key of its own, which is bound to it (`lease`). A commit that names the lease compares that key,
  whatever it writes (R3).
- etcd answers the commit that fills the store with "no space", although that commit took effect. So the first such
  answer becomes OutcomeUnknown. From then on a key of the registry's own is written before each commit, and if that
  fails, StorageFull is raised and nothing of the commit was sent.
- Renewals have a connection of their own, so that they do not wait for commits (R6).

On failure: `link.py` says what is repeated and what is not.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from pyetcd import etcdrpc as rpc

from pxrs.errors import Conflict, LeaseExpired, OutcomeUnknown, RegistryError, StorageFull
from pxrs.registry.contract import ABSENT, Commit, Entry, Limits, Registry, Snapshot
from pxrs.registry.etcd.connection import Certificates
from pxrs.registry.etcd.faults import Compacted
from pxrs.registry.etcd.lease import Granted, attach, begin, lease_key
from pxrs.registry.etcd.link import Link, Login
from pxrs.registry.etcd.narrowing import Narrowing
from pxrs.registry.etcd.stream import Key, Stream
from pxrs.registry.lease import Lease
from pxrs.registry.watch import PrefixWatch

# etcd takes 128 comparisons, one of which may be the lease's. Of its 1.5 MiB for a request, the most keys of
# the longest names leave these bytes: each name is in the comparison, the write and the read.
LIMITS: Final = Limits(commit_keys_max=127, commit_bytes_max=1_400_000, value_bytes_max=1 << 20)

PAGE_KEYS_FIRST, PAGE_KEYS_MAX, PAGE_BYTES = 100, 5_000, 4 << 20
SNAPSHOTS_MAX: Final = 5
"""How often a snapshot is begun because etcd's history was compacted meanwhile."""
# Names with a `;` are ours alone.
_OURS, _ROOM = b";", b";room"
_VERSION_MAX = 2**63 - 1


class EtcdRegistry(Registry):
    """A handle to a namespace of an etcd cluster."""

    limits = LIMITS

    def __init__(
        self,
        url: str,
        namespace: str,
        targets: Sequence[str],
        *,
        certificates: Certificates | None,
        login: Login | None,
        timeout_s: float,
        refused_s: float = math.inf,
    ) -> None:
        """refused_s: how long the first connection is tried while every member refuses it."""
        super().__init__(url)
        self.timeout_s = timeout_s
        self._root = f"/{namespace}/".encode()
        # Renewals wait for a member that is started again: the first connection of `_keys` was made before.
        self._keys, self._renewals = (
            Link(url, targets, certificates=certificates, login=login, timeout_s=timeout_s, refused_s=seconds)
            for seconds in (refused_s, math.inf)
        )
        self._narrowing = Narrowing()
        self._stream = Stream(self._keys, ignored=self._root + _OURS)
        self._was_full = False

    def check_access(self) -> None:
        """Raise unless the cluster answers and lets us read the namespace."""
        self._range(rpc.RangeRequest(key=self._root, range_end=_end_of(self._root), count_only=True))

    # Keys.

    def _get(self, key: str) -> Entry | None:
        for found in self._range(rpc.RangeRequest(key=self._root + key.encode())).kvs:
            return Entry(key, found.value, found.mod_revision)
        return None

    def _scan(self, prefix: str, after: str | None, limit: int | None) -> list[Entry]:
        """Page by page, so that no answer is without bound. Every page is of its own moment, which R1 allows, and no
        compaction can take that moment away."""
        root = self._root + prefix.encode()
        first, end = root, _end_of(root)
        if after is not None:
            first = max(first, self._root + after.encode() + b"\0")
        if limit is None:
            return list(self._pages(first, end, sys.maxsize, [])) if first < end else []
        entries: list[Entry] = []
        counts: list[int] = []
        for widened, near_end in enumerate(self._narrowing.ends(root, first, end)):
            if first < near_end:
                entries += self._pages(first, near_end, limit - len(entries), counts)
                first = near_end
            if len(entries) == limit or near_end == end:
                head = self._root + entries[0].key.encode() if entries and after is None else None
                self._narrowing.learn(root, counts[0] if counts else 0, widened, head)
                break
        return entries

    def _snapshot(self, is_written_once: Callable[[str], bool]) -> Snapshot:
        """Page by page, all of the revision of the first page. If etcd's history is compacted meanwhile, that revision
        is gone, and the reading begins again."""
        for left in reversed(range(SNAPSHOTS_MAX)):
            try:
                return self._read_at_one_revision()
            except Compacted:
                if not left:
                    raise
        raise AssertionError("the last round returns or raises")

    def _read_at_one_revision(self) -> Snapshot:
        first, end, start = self._root, _end_of(self._root), len(self._root)
        entries: list[Entry] = []
        revision, page_keys = 0, PAGE_KEYS_FIRST
        while True:
            page = self._range(rpc.RangeRequest(key=first, range_end=end, limit=page_keys, revision=revision))
            revision = revision or page.header.revision
            entries += [
                Entry(found.key[start:].decode(), found.value, found.mod_revision)
                for found in page.kvs
                if not found.lease and not found.key.startswith(_OURS, start)
            ]
            if not page.more:
                return Snapshot(tuple(entries), f"revision {revision}")
            first = page.kvs[-1].key + b"\0"
            page_keys = max(1, min(PAGE_KEYS_MAX, PAGE_BYTES * len(page.kvs) // page.ByteSize()))

    def _pages(self, first: bytes, end: bytes, wanted: int, counts: list[int]) -> Iterator[Entry]:
        """The first entries of a range; appends how many keys etcd counted for each answer."""
        start, page_keys = len(self._root), PAGE_KEYS_FIRST
        while wanted > 0:
            # Without a sort order etcd answers in key order; with one it would read everything for each page.
            page = self._range(rpc.RangeRequest(key=first, range_end=end, limit=min(page_keys, wanted)))
            counts.append(page.count)
            for found in page.kvs:
                if not found.key.startswith(_OURS, start):
                    wanted -= 1
                    yield Entry(found.key[start:].decode(), found.value, found.mod_revision)
            if not page.more:
                return
            first = page.kvs[-1].key + b"\0"
            page_keys = max(1, min(PAGE_KEYS_MAX, PAGE_BYTES * len(page.kvs) // page.ByteSize()))

    def _range(self, request: Any) -> Any:
        return self._keys.call(lambda send: send("range", request), repeatable=True)

    def _commit(self, commit: Commit) -> dict[str, int]:
        request = self._transaction(commit)
        if self._was_full and commit.written:
            self._check_room()
        try:
            # What writes nothing is a read, and may be repeated like one.
            response = self._keys.call(lambda send: send("txn", request), repeatable=not commit.changed)
        except StorageFull as error:
            self._was_full = True
            if not commit.changed:
                raise
            raise OutcomeUnknown(f"{error}: this commit may have been the last that went in") from None
        if not response.succeeded:
            raise self._refusal(commit, response)
        return dict.fromkeys(commit.written, response.header.revision)

    def _check_room(self) -> None:
        """Raise StorageFull, with nothing of the commit sent, while etcd takes no writes."""
        put = rpc.RequestOp(request_put=rpc.PutRequest(key=self._root + _ROOM))
        self._keys.call(lambda send: send("txn", rpc.TxnRequest(success=[put])), repeatable=True)
        self._was_full = False

    def _transaction(self, commit: Commit) -> Any:
        compare, success, failure = [], [], []
        root, lease = self._root, 0
        for key, version in commit.expect.items():
            name, revision = root + key.encode(), min(version, _VERSION_MAX)
            compare.append(rpc.Compare(key=name, target=rpc.Compare.MOD, mod_revision=revision))
            failure.append(_read(name))
        if commit.lease is not None:
            lease = int(commit.lease.id, 16)
            name = lease_key(root, commit.lease.id)
            compare.append(
                rpc.Compare(key=name, target=rpc.Compare.CREATE, result=rpc.Compare.GREATER, create_revision=0)
            )
            failure.append(_read(name))
        for key, value in commit.put.items():
            success.append(rpc.RequestOp(request_put=rpc.PutRequest(key=root + key.encode(), value=value)))
        for key, value in commit.ephemeral.items():
            put = rpc.PutRequest(key=root + key.encode(), value=value, lease=lease)
            success.append(rpc.RequestOp(request_put=put))
        for key in commit.delete:
            delete = rpc.DeleteRangeRequest(key=root + key.encode())
            success.append(rpc.RequestOp(request_delete_range=delete))
        return rpc.TxnRequest(compare=compare, success=success, failure=failure)

    def _refusal(self, commit: Commit, response: Any) -> RegistryError:
        found = [answer.response_range.kvs for answer in response.responses]
        if commit.lease is not None and not found[-1]:
            return LeaseExpired(f"lease {commit.lease.id} has ended in etcd; take a new one and claim again")
        versions = [entries[0].mod_revision if entries else ABSENT for entries in found]
        return Conflict(
            [key for (key, expected), v in zip(commit.expect.items(), versions, strict=False) if v != expected]
        )

    # Leases.

    def _lease(self, ttl: float, renewed: bool) -> Lease:
        return self._grant(begin(self._renewals, self._root, ttl, self.clock))

    def _attach(self, secret: str, renewed: bool) -> Lease:
        return self._grant(attach(self._renewals, self._root, secret, self.clock))

    def _grant(self, granted: Granted) -> Lease:
        return Lease(
            granted.stored.id,
            granted.stored.ttl,
            granted.deadline,
            secret=granted.secret,
            stored=granted.stored,
            on_closed=self._forget_lease,
            clock=self.clock,
        )

    # Watches.

    def _watch(self, watches: Sequence[PrefixWatch]) -> None:
        ranges: dict[Key, tuple[bytes, bytes, Callable[[], None]]] = {}
        for watch in watches:
            name = self._root + watch.prefix.encode()
            ranges[watch] = name, _end_of(name) if name.endswith(b"/") else b"", watch.wake
        self._stream.open(ranges)

    def _unwatch(self, watch: PrefixWatch) -> None:
        self._stream.remove(watch)

    def _close(self) -> None:
        self._stream.close()
        self._renewals.close()
        self._keys.close()


def _end_of(prefix: bytes) -> bytes:
    """The first name after all that begin with the prefix, whose last byte is a slash."""
    return prefix[:-1] + b"0"


def _read(name: bytes) -> Any:
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=name, keys_only=True))
