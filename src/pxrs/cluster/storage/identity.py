"""The identity of a node's directory (C5), and the start of a node on it. `core.decide_start` has the rules.

    node.json    the node's id, the cluster's id, the number of starts, the version of the format
    lock         held with flock while a process uses the directory; so is the directory itself, because this file can
                 be deleted by mistake
    journal/     the journal's segments
    aside-.../   the former content, if the directory became that of a new node; pxrs never deletes it

A start first raises the counter of starts on the disk, synced, and then in the registry, by compare-and-set. A process
that finds a higher counter in the registry than its own stops: another process has started as this node
(`registration`).

    what the commit in the registry answers     what the start does
    done                                        serve
    registry unreachable, outcome unknown       repeat the same commit, for as long as `wait` allows
    Conflict, and the record has our `start`    an earlier try has landed: serve
    Conflict, and the record has an id of       begin again: an earlier start of this disk has landed late, or somebody
    `tries` or `before`                         has changed the record's `state`
    Conflict, and the record has another id     end: a process on a copy of this disk was faster. The next start finds
                                                an older copy
    the wait is over                            end. The disk keeps the id of this start in `tries`: if the commit lands
                                                later, the next start knows it as its own. A disk with TRIES_KEPT ids
                                                first has the registry bar them (`core.has_many_tries`)

If the disk is so full that the counter cannot be written, the node of the directory starts read-only: it raises the
counter nowhere, and serves what it has under the number of its last start. It acknowledges nothing, neither adds nor
fences, so no copy of the disk can lack what it has acknowledged under that number. Its key among the live nodes makes
other processes on copies of the directory wait, as that of any node does. When there is room, it starts again as it
should (`running`).

A start is proven or in doubt (C9, `core.proven_end`). In doubt, the node journals what it does not know after the
commit, and before it serves (`_begin_doubt`).

A copy of the directory of a running node has the right counter, and lacks what the node has acknowledged since. So
before a start raises the counter, it waits until no process at another address is alive as this node.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from pxrs import disk
from pxrs.cluster.naming import cluster_id
from pxrs.cluster.records import (
    IN_USE,
    LEDGERS,
    OWNERS,
    AliveNode,
    LedgerName,
    LedgerRecord,
    NodeRecord,
    OwnerRecord,
    alive_key,
    checked_id,
    node_key,
)
from pxrs.cluster.storage import scrub
from pxrs.cluster.storage.core import Cookie, Start, decide_start, has_many_tries, next_cookie, proven_end
from pxrs.cluster.storage.format import FORMAT
from pxrs.cluster.storage.mark import MarkFile
from pxrs.cluster.storage.node import NodeSettings, StorageNode, is_ledger
from pxrs.errors import ClusterError, Conflict, InvalidArgument, NodeFormatUnsupported, NodeFull, RegistryCorrupt
from pxrs.log.directory.segments.files import segment_bases
from pxrs.registry.contract import ABSENT, Entry, Registry
from pxrs.registry.outage import StartWait

_logger = logging.getLogger(__name__)

COOKIE: Final = "node.json"
LOCK: Final = "lock"
JOURNAL: Final = "journal"
ASIDE: Final = "aside-"
_UNKNOWN_END: Final = 1 << 62
TRIES_MAX: Final = 5
ALIVE_S_MAX: Final = 30.0
"""How long a start waits for the end of the lease of another process that is alive as the same node."""
_LOOK_S: Final = 1.0
FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a disk that is full."""


class Started(NamedTuple):
    """A node whose start is recorded on its disk and in the registry."""

    node: StorageNode
    cluster: str
    starts: int
    directory: Directory
    mark: MarkFile | None = None
    """Open: the node moves it after each sync."""
    is_read_only: bool = False
    """The disk is full, and this start is not recorded: `starts` is the number of the last one that is."""


class Directory:
    """The directory of one node, which this process locks until `close`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises InvalidArgument if another process uses it, UnsupportedPlatform, OSError."""
        disk.require_posix("a storage node")
        self.path = Path(path).absolute()
        disk.refuse_network_file_system(self.path, "a storage node")
        disk.make_folders(self.path)
        self._locks = [
            os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644),
            os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC),
        ]
        try:
            for lock in self._locks:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise InvalidArgument(
                f"{self.path} is in use by another storage node: give another --dir, or stop that node"
            ) from None

    @property
    def journal(self) -> str:
        return str(self.path / JOURNAL)

    def has_segments(self) -> bool:
        return os.path.isdir(self.journal) and bool(segment_bases(self.journal))

    def cookie(self) -> Cookie | None:
        """The content of `node.json`; None if the file does not exist or cannot be read. Raises
        NodeFormatUnsupported."""
        try:
            found = json.loads((self.path / COOKIE).read_bytes())
            number, cookie = int(found["format"]), None
            if number == FORMAT:
                cookie = Cookie(
                    checked_id(str(found["node"])),
                    str(found["cluster"]),
                    int(found["starts"]),
                    tuple(str(each) for each in found.get("tries", ())),
                    str(found.get("before", "")),
                )
        except FileNotFoundError:
            return None
        except (KeyError, TypeError, ValueError) as error:
            _logger.error("%s is damaged, so the node starts with a new id: %r", self.path / COOKIE, error)
            return None
        if cookie is None:
            raise NodeFormatUnsupported(str(self.path), number, FORMAT)
        return cookie

    def write_cookie(self, cookie: Cookie) -> None:
        """Write `node.json` durably. Raises OSError."""
        text = json.dumps({**cookie._asdict(), "format": FORMAT}, indent=2) + "\n"
        disk.replace_file(str(self.path / COOKIE), text.encode(), is_durable=True)
        disk.sync_folder(self.path)

    def move_aside(self) -> Path | None:
        """Move `node.json`, the journal and what is known of it to a new folder. Returns the folder; None if there was
        nothing to move. Raises OSError."""
        found = [name for name in (COOKIE, JOURNAL, scrub.FILE) if (self.path / name).exists()]
        if not found:
            return None
        aside = self.path / f"{ASIDE}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{uuid.uuid4().hex[:8]}"
        aside.mkdir()
        for name in found:
            os.rename(self.path / name, aside / name)
        disk.sync_folder(aside)
        disk.sync_folder(self.path)
        return aside

    def close(self) -> None:
        """Idempotent."""
        while self._locks:
            os.close(self._locks.pop())


def start(
    path: str | os.PathLike[str],
    registry: Registry,
    address: str,
    settings: NodeSettings | None = None,
    alive_s_max: float = ALIVE_S_MAX,
    wait: StartWait | None = None,
    marks: Path | None = None,
) -> Started:
    """Start the node of this directory, or a node with a new id if `decide_start` does not accept the directory. The
    caller closes the node, then the directory.

    address: where brokers reach the node. alive_s_max: see ALIVE_S_MAX. wait: for how long the registry is waited for.
    marks: the folder of the node's mark (`mark`); None: without one, every start after a crash is in doubt. Raises
    NodeFormatUnsupported, InvalidArgument, ClusterError if another process is alive as this node, RegistryError,
    OSError."""
    wait = wait or StartWait()
    directory = Directory(path)
    try:
        for left in reversed(range(TRIES_MAX)):
            cookie = directory.cookie()
            if cookie is not None:
                _wait_for_other(registry, cookie.node, address, directory, alive_s_max, wait)
            try:
                return _start(directory, registry, address, settings, wait, marks)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                return _start_read_only(directory, registry, settings, wait, error, marks)
            except NodeFull as error:  # there is no room for the doubts
                full = OSError(errno.ENOSPC, str(error), directory.journal)
                return _start_read_only(directory, registry, settings, wait, full, marks)
            except Conflict as error:
                if not left or not _is_own(directory, registry, wait):
                    raise
                _logger.warning("another process has changed the record of this node, retrying: %s", error)
        raise AssertionError("the last try returns or raises")
    except BaseException:
        directory.close()
        raise


def _wait_for_other(
    registry: Registry, node: str, address: str, directory: Directory, s_max: float, wait: StartWait
) -> None:
    """Return when no process at another address is alive as this node. A process at this address was the one before:
    no two can listen there."""
    key, until, told, outages = alive_key(node), time.monotonic() + s_max, "", wait.outages
    with wait(lambda: registry.watch(key)) as watch:
        while (entry := wait(lambda: registry.get(key))) is not None:
            other = AliveNode.parse(key, entry.value).address
            if wait.outages != outages:  # no lease could end in the registry meanwhile
                outages, until = wait.outages, time.monotonic() + s_max
            left_s = until - time.monotonic()
            if other == address:
                return
            if left_s <= 0:
                raise ClusterError(
                    f"storage node {node} already runs at {other}, and {directory.path} is a copy of its directory: "
                    "stop that node first, or start another one on an empty directory"
                )
            if other != told:
                told = other
                _logger.warning("storage node %s is alive at %s; waiting until its lease expires", node, other)
            watch.wait(min(left_s, _LOOK_S))


def _start(
    directory: Directory,
    registry: Registry,
    address: str,
    settings: NodeSettings | None,
    wait: StartWait,
    marks: Path | None,
) -> Started:
    """Raises Conflict if another process has changed the node's record since it was read."""
    cluster = wait(lambda: cluster_id(registry))
    cookie = directory.cookie()
    entry = None if cookie is None else wait(lambda: registry.get(node_key(cookie.node)))
    with contextlib.ExitStack() as stack:
        # First decide without the journal, which is opened only if the directory's identity is accepted otherwise.
        decided = _decide(cookie, entry, cluster, _UNKNOWN_END)
        if not decided.is_new and not directory.has_segments():
            # Each start makes one before it is recorded. The end of the journal is recorded only now and then.
            decided = Start(uuid.uuid4().hex, 1, True, "the files of its journal are gone")
        node: StorageNode | None = None
        mark = None if marks is None else MarkFile(marks, decided.node)
        if not decided.is_new:
            before = None if entry is None else NodeRecord.parse(entry.key, entry.value)
            proof = proven_end(before, None if mark is None else mark.read())
            node = _open(directory, decided.node, settings, proof, is_stop=_has_stopped(before))
            stack.callback(node.close)
            decided = _decide(cookie, entry, cluster, node.journal.end)
        if decided.is_new:
            stack.close()
            aside = directory.move_aside()
            _logger.warning(
                "the storage node starts with a new id, %s: %s%s",
                decided.node,
                decided.why,
                "" if aside is None else f"; the content of the directory was moved to {aside}",
            )
            entry = None
            if mark is not None and cookie is not None:
                MarkFile(mark.path.parent, cookie.node).remove()
        if entry is not None and has_many_tries(cookie, decided):
            entry = _bar_tries(registry, entry, wait)
        registered = None if entry is None else NodeRecord.parse(entry.key, entry.value)
        tried = uuid.uuid4().hex
        directory.write_cookie(next_cookie(cookie, registered, decided, cluster, tried))
        if decided.is_new:
            node = _open(directory, decided.node, settings)
            stack.callback(node.close)
        assert node is not None
        if not node.is_proven:
            # First of all: without the mark, and behind new segments, the next start could not tell what was torn.
            node.journal.keep_found()
        if mark is not None:
            stack.callback(mark.close)
            if node.is_proven:
                # Before the commit: if this process ends right after it, the next start has a mark for either record.
                mark.begin((tried, *(each for each in [registered and registered.start] if each)), node.journal.end)
            else:
                mark.remove()
        node.recorded_end = node.journal.end
        _register(registry, decided, entry, address, node.recorded_end, tried, wait)
        if not node.is_proven:
            _begin_doubt(registry, node, wait)
            if mark is not None:
                mark.begin((tried,), node.journal.end)
        if mark is not None:
            with node.lock:  # nothing is appended before the node serves, except what the lines above have appended
                node.on_synced = mark.move
        stack.pop_all()
        return Started(node, cluster, decided.starts, directory, mark)


def _begin_doubt(registry: Registry, node: StorageNode, wait: StartWait) -> None:
    """Journal which ledgers the node may have lost entries or fences of (C7). Called after the commit that records the
    start: from then on no other process is the node, and none acknowledges anything as the node. Raises RegistryError,
    OSError."""
    unclosed: list[str] = []
    highest: dict[tuple[str, int], int] = {}
    for found in wait(lambda: list(registry.scan(LEDGERS))):
        name = LedgerName.of_key(found.key)
        try:
            record = LedgerRecord.parse(found.key, found.value)
            is_concerned = not record.is_closed and node.id in record.named
        except RegistryCorrupt as error:
            _logger.error(
                "the record of a ledger is damaged, so the node treats the ledger as in doubt (docs/cluster.md): %s",
                error,
            )
            is_concerned = True
        if is_ledger(name.id):
            partition = name.topic_id, name.partition
            highest[partition] = max(name.number, highest.get(partition, -1))
            if is_concerned:
                unclosed.append(name.id)
    for found in wait(lambda: list(registry.scan(OWNERS))):  # ledgers whose record is removed had writers, too
        topic_id, _, partition_number = found.key.removeprefix(OWNERS).rpartition("/")
        try:
            number = OwnerRecord.parse(found.key, found.value).next - 1
        except RegistryCorrupt as error:
            _logger.error("the record of a partition is damaged, so the node does not know its ledgers: %s", error)
            continue
        partition = topic_id, int(partition_number)
        highest[partition] = max(number, highest.get(partition, -1))
    _logger.warning(
        "the disk may lack entries that the node has acknowledged: the node is in doubt about %d ledgers that are not "
        "closed, and accepts entries of later ledgers only",
        len(unclosed),
    )
    names = [LedgerName(*partition, number).id for partition, number in highest.items() if number >= 0]
    node.begin_doubt(unclosed, names)


def _is_own(directory: Directory, registry: Registry, wait: StartWait) -> bool:
    """After a Conflict: whether the record is that of this disk all the same. An earlier start of it may have landed
    late, or somebody has changed the record's `state`."""
    cookie = directory.cookie()
    entry = None if cookie is None else wait(lambda: registry.get(node_key(cookie.node)))
    return cookie is not None and not _decide(cookie, entry, cookie.cluster, _UNKNOWN_END).is_new


def _start_read_only(
    directory: Directory,
    registry: Registry,
    settings: NodeSettings | None,
    wait: StartWait,
    full: OSError,
    marks: Path | None,
) -> Started:
    """Start the node of this directory without writing anything. full: why it cannot be written to; raised if the
    directory is not that of a node."""
    cluster = wait(lambda: cluster_id(registry))
    cookie = directory.cookie()
    entry = None if cookie is None else wait(lambda: registry.get(node_key(cookie.node)))
    if entry is None or not directory.has_segments() or _decide(cookie, entry, cluster, _UNKNOWN_END).is_new:
        raise full
    registered = NodeRecord.parse(entry.key, entry.value)
    why = f"the disk is full, so the node only serves the entries that it has: {disk.explain(full, directory.path)}"
    assert cookie is not None
    proof = proven_end(registered, None if marks is None else MarkFile(marks, cookie.node).read())
    node = StorageNode(cookie.node, directory.journal, settings, why, proof, is_stop=_has_stopped(registered))
    if _decide(cookie, entry, cluster, node.journal.end).is_new:
        node.close()
        raise full
    node.recorded_end = registered.journal_end
    _logger.error("the storage node %s starts read-only: %s", node.id, why)
    return Started(node, cluster, registered.starts, directory, is_read_only=True)


def _decide(cookie: Cookie | None, entry: Entry | None, cluster: str, journal_end: int) -> Start:
    registered = None if entry is None else NodeRecord.parse(entry.key, entry.value)
    return decide_start(cookie, registered, cluster, journal_end, uuid.uuid4().hex)


def _has_stopped(registered: NodeRecord | None) -> bool:
    return registered is not None and registered.stopped_at is not None


def _open(
    directory: Directory,
    node: str,
    settings: NodeSettings | None,
    proof: int | None = None,
    *,
    is_stop: bool = False,
) -> StorageNode:
    disk.make_folders(Path(directory.journal))
    return StorageNode(node, directory.journal, settings, proof=proof, is_stop=is_stop)


def _bar_tries(registry: Registry, entry: Entry, wait: StartWait) -> Entry:
    """Write the node's record as it is. Starts that expect this version of it, or an older one, can no longer land.
    Returns the record with its new version. Raises Conflict if one of them has landed, if somebody has changed the
    record, or if this commit is repeated after its reply was lost: the caller begins again."""
    versions = wait(lambda: registry.commit(expect={entry.key: entry.version}, put={entry.key: entry.value}))
    return replace(entry, version=versions[entry.key])


def _register(
    registry: Registry,
    start: Start,
    entry: Entry | None,
    address: str,
    journal_end: int,
    tried: str,
    wait: StartWait,
) -> None:
    """Write the node's record with the new counter. tried: the id of this start, which the disk has. Raises Conflict if
    another process has changed the record since it was read."""
    key = node_key(start.node)
    if entry is None:
        record = NodeRecord(address, start.starts, FORMAT, journal_end, IN_USE, tried)
    else:
        before = NodeRecord.parse(entry.key, entry.value)
        record = replace(
            before,
            address=address,
            starts=start.starts,
            format=FORMAT,
            journal_end=journal_end,
            start=tried,
            stopped_at=None,
        )
    expect = {key: ABSENT if entry is None else entry.version}

    def commit() -> None:
        try:
            registry.commit(expect=expect, put={key: record.dump()})
        except Conflict:
            # Repeated after an unknown outcome, the commit conflicts with our own record if that has landed. Somebody
            # may have changed another field of it since, for example `state`.
            found = registry.get(key)
            if found is None or NodeRecord.parse(found.key, found.value).start != tried:
                raise

    wait(commit)
