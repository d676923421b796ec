"""The membership of a broker in the cluster: its lease, and its ephemeral record with its address and load (P1)."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from typing import Final

from pxrs import __version__
from pxrs.cluster import records
from pxrs.cluster.records import BrokerRecord
from pxrs.errors import LeaseExpired
from pxrs.registry.contract import Registry
from pxrs.registry.lease import Lease

_logger = logging.getLogger(__name__)

LEASE_TTL_DEFAULT: Final = 6.0


class Membership:
    """The membership of one broker. If its lease is lost, it joins again with a new lease and a new incarnation,
    because an expired lease cannot be renewed (R3). Threads share it."""

    def __init__(self, registry: Registry, address: str, name: str, lease_ttl: float) -> None:
        self._registry, self.address, self._name, self._lease_ttl = registry, address, name, lease_ttl
        self._lock = threading.Lock()
        self._started_at = time.time()
        self._lease: Lease | None = None
        self.incarnation = ""
        """The id of the current incarnation, which owner records contain; empty before the first `join`."""
        self._load = 0.0
        self._is_leaving = False

    @property
    def lease(self) -> Lease | None:
        """The lease; None if it has expired according to this process's clock."""
        lease = self._lease
        return lease if lease is not None and lease.alive else None

    def join(self) -> bool:
        """Take a lease and write the broker's record, unless the current lease is valid. Returns True for a new
        incarnation: all claims of the former one are void, and other brokers may have claimed its partitions. Raises
        what the registry raises."""
        with self._lock:
            if self.lease is not None:
                return False
            old, lease = self._lease, self._registry.lease(self._lease_ttl)
            incarnation = uuid.uuid4().hex
            try:
                self._registry.commit(ephemeral={records.broker_key(incarnation): self._record().dump()}, lease=lease)
            except BaseException:
                lease.close()
                raise
            if old is not None:
                _logger.warning(
                    "the broker %s has lost its lease and its partitions; it continues as incarnation %s",
                    self.incarnation,
                    incarnation,
                )
                old.close()
            # In this order: a thread that reads the new lease must not combine it with the old incarnation (C4).
            self.incarnation = incarnation
            self._lease = lease
            return True

    def named(self) -> dict[str, str]:
        """The fields that identify this broker in events."""
        return {"broker": self._name or self.address, "incarnation": self.incarnation, "address": self.address}

    def tell_load(self, load: float) -> None:
        """Write the load to the broker's record if it has changed. Raises what the registry raises."""
        if load != self._load:
            self._load = load
            self._tell()

    def _tell(self) -> None:
        lease = self.lease
        if lease is None:
            return
        try:
            self._registry.commit(ephemeral={records.broker_key(self.incarnation): self._record().dump()}, lease=lease)
        except LeaseExpired:
            return  # the next `join` notices it

    def tell_leaving(self) -> None:
        """Mark the broker's record as leaving, so that other brokers do not expect this one to claim partitions. Raises
        what the registry raises."""
        self._is_leaving = True
        self._tell()

    def _record(self) -> BrokerRecord:
        return BrokerRecord(self.address, self._name, self._load, self._started_at, __version__, self._is_leaving)

    def close(self) -> None:
        """End the lease, so that other brokers can claim the partitions at once."""
        with self._lock:
            if self._lease is not None:
                self._lease.close()
