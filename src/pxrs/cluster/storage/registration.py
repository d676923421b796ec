"""Keeps the records of a storage node in the registry up to date: the ephemeral key of a live node with its load, and
the end of its journal.

Safety does not depend on the node's lease. The node serves while the registry cannot be reached, and takes a new lease
when it has lost the old one. It stops only if its record shows that this process is no longer the node: another process
has started with the same id (the disk was copied), or an operator has removed the record (`forget`). A retired node
serves what it has until it is stopped.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from pxrs.cluster.records import RETIRED, AliveNode, NodeRecord, alive_key, node_key
from pxrs.cluster.storage.node import Load, StorageNode
from pxrs.cluster.storage.settings import StorageLimits
from pxrs.errors import Closed, ClusterError, Conflict, PxrsError, RegistryError
from pxrs.registry.contract import Registry
from pxrs.registry.lease import Lease
from pxrs.registry.outage import StartWait
from pxrs.waiting import start_thread

_logger = logging.getLogger(__name__)

RECORD_EVERY: Final = 10
"""The node records the end of its journal in every tenth round, and when it stops."""
CHANGE: Final = 0.05
"""The node writes its load when it has changed by more than this fraction, because every write wakes all brokers."""


class Registration:
    """Runs one thread, from `start` to `close`."""

    def __init__(
        self,
        registry: Registry,
        node: StorageNode,
        starts: int,
        address: str,
        limits: StorageLimits,
        on_replaced: Callable[[PxrsError], None],
        wait: StartWait | None = None,
    ) -> None:
        """on_replaced: called once, on that thread, if this process must stop because it is no longer the node. wait:
        for how long `start` waits for the registry."""
        self._wait = wait or StartWait()
        self._registry, self._node, self._starts, self._address = registry, node, starts, address
        self._limits, self._on_replaced = limits, on_replaced
        self._lease: Lease | None = None
        self._shown: Load | None = None
        """The load that was last written under the current lease; None if none was."""
        self._problem: str | None = None
        self._is_retired = False
        """Whether the node's record was retired when it was last read. Used only for the log and for
        `AliveNode.refuses`."""
        self._is_closing = threading.Event()
        self._has_run = self._is_recorded = False
        """Whether the thread ran and has ended; whether the stop of the node is recorded."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write the key of the live node, then start the thread. Raises RegistryError, ClusterError."""
        self._wait(self._show)
        self._thread = start_thread(self._run, "pxrs-storage-registration")

    def close(self) -> None:
        """End the lease, which deletes the key of the live node. Idempotent."""
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._has_run = True
        if self._lease is not None:
            self._lease.close()

    def record_stop(self) -> None:
        """Record the end of the journal, which is closed: the node acknowledges nothing more, so the next start can
        compare the journal with it (C9). If the registry does not answer, the next start may be in doubt."""
        if not self._has_run or self._is_recorded:
            return
        try:
            self._record(is_stop=True)
        except PxrsError as error:
            _logger.warning("the stop of the node could not be recorded in the registry: %s", error)

    def _run(self) -> None:
        rounds = 0
        while not self._is_closing.wait(self._limits.alive_s):
            self._node.look_at_room()
            rounds += 1
            try:
                self._show()
                if rounds % RECORD_EVERY == 0:
                    self._record()
                if self._problem is not None:
                    self._problem = None
                    _logger.info("the registry is reachable again")
            except ClusterError as error:
                _logger.error("%s", error)
                self._on_replaced(error)
                return
            except Closed:
                return
            except PxrsError as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    _logger.warning("the registry does not answer; the node continues to serve: %s", error)

    def _show(self) -> None:
        """Write the key of the live node if the lease was lost or the load has changed."""
        load = self._node.load
        if self._lease is None or not self._lease.alive:
            if self._lease is not None:
                _logger.warning("the node has lost its lease and acquires a new one")
                self._lease.close()
            self._lease, self._shown = None, None
            self._check_standing()
            self._lease = self._registry.lease(self._limits.lease_s)
        elif self._shown is not None and not _differs(load, self._shown):
            return
        refuses = "it was retired" if self._is_retired else load.refuses
        alive = AliveNode(
            self._address,
            self._starts,
            load.bytes,
            load.ledgers,
            load.free_bytes,
            refuses,
            doubts=load.doubts,
            damaged=load.damaged,
            is_unchecked=load.is_unchecked,
            cleared=load.cleared,
        )
        self._registry.commit(ephemeral={alive_key(self._node.id): alive.dump()}, lease=self._lease)
        self._shown = load

    def _check_standing(self) -> tuple[NodeRecord, int]:
        """The node's record and its version. Raises ClusterError if this process is no longer the node."""
        entry = self._registry.get(node_key(self._node.id))
        if entry is None:
            raise self._replaced(
                "its record is gone: an operator removed it (forget), or the registry was emptied or replaced"
            )
        record = NodeRecord.parse(entry.key, entry.value)
        if record.starts > self._starts:
            raise self._replaced(
                f"another process was started as this node ({record.address}, start {record.starts}; this process is "
                f"start {self._starts}), so one directory is a copy of the other; run only one of the two",
            )
        with self._node.lock:
            end = self._node.journal.end
        if record.journal_end > end:  # this process alone has recorded it
            raise self._replaced(
                f"its journal ends at {end:,} but had {record.journal_end:,} bytes, so the machine was restored to an "
                "earlier state"
            )
        if (record.state == RETIRED) != self._is_retired:
            self._is_retired, self._shown = not self._is_retired, None
            _logger.warning("the node was retired" if self._is_retired else "the node is in use again")
        return record, entry.version

    def _replaced(self, why: str) -> ClusterError:
        return ClusterError(f"this process is no longer the storage node {self._node.id}: {why}")

    def _record(self, *, is_stop: bool = False) -> None:
        """Write the end of the journal to the node's record. A disk with a shorter journal is an older copy (C5)."""
        record, version = self._check_standing()
        if (problem := older_registry(record, self._starts, self._node.recorded_end)) is not None:
            raise RegistryError(problem)  # and is left as it is, so that no ledger is removed (`collecting`)
        with self._node.lock:
            end = self._node.journal.end
        if end == self._node.recorded_end and not is_stop:
            return
        value = replace(record, journal_end=end, stopped_at=end if is_stop else None).dump()
        try:
            self._registry.commit(expect={node_key(self._node.id): version}, put={node_key(self._node.id): value})
        except Conflict:
            if is_stop:
                raise
            return  # somebody has changed the record; the next round reads it again
        self._node.recorded_end, self._is_recorded = end, is_stop


def older_registry(record: NodeRecord, starts: int, recorded_end: int) -> str | None:
    """Why the registry cannot be the one that this process has written to; None if it can. Records that are missing in
    a registry that was restored from a backup do not make a ledger garbage."""
    if record.starts >= starts and record.journal_end >= recorded_end:
        return None
    return (
        f"the registry is an older copy: it has start {record.starts} of this node and the journal up to "
        f"{record.journal_end:,}, but had recorded start {starts} and {recorded_end:,}. Replace it by the newer copy. "
        "The node removes no ledger until it is restarted"
    )


def _differs(now: Load, shown: Load) -> bool:
    """Whether the load has changed enough to be written."""
    exact = ("refuses", "ledgers", "doubts", "damaged", "is_unchecked", "cleared")
    if any(getattr(now, name) != getattr(shown, name) for name in exact):
        return True
    return any(
        abs(a - b) > CHANGE * max(b, 1 << 20) for a, b in ((now.bytes, shown.bytes), (now.free_bytes, shown.free_bytes))
    )
