"""The broker's place in the cluster: its lease, and the key that names it and its load (P1)."""

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
    """One broker, which may have several incarnations one after the other: a lease that was lost is not revived (R3).
    Threads share it."""

    def __init__(self, registry: Registry, address: str, name: str, lease_ttl: float) -> None:
        self._registry, self.address, self._name, self._lease_ttl = registry, address, name, lease_ttl
        self._lock = threading.Lock()
        self._started_at = time.time()
        self._lease: Lease | None = None
        self.incarnation = ""
        """Names this incarnation in owner records; empty before the first `join`."""
        self._load = 0.0
        self._is_leaving = False

    @property
    def lease(self) -> Lease | None:
        """The lease if it lives, as far as this process can know."""
        lease = self._lease
        return lease if lease is not None and lease.alive else None

    def join(self) -> bool:
        """Have a living lease and a key. True if the incarnation is a new one: then every claim of the last one is
        void, and other brokers may have taken its partitions. Raises what the registry raises."""
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
                    "the broker %s has lost its lease, and with it its partitions; it goes on as %s",
                    self.incarnation,
                    incarnation,
                )
                old.close()
            # In this order: whoever sees the new lease must not take it for that of the old incarnation (C4).
            self.incarnation = incarnation
            self._lease = lease
            return True

    def named(self) -> dict[str, str]:
        """The fields of events that name this broker."""
        return {"broker": self._name or self.address, "incarnation": self.incarnation, "address": self.address}

    def tell_load(self, load: float) -> None:
        """Put the load into the key, if it has changed. Raises what the registry raises."""
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
            return  # noticed by the next `join`

    def tell_leaving(self) -> None:
        """Other brokers count on this one for no more partitions. Raises what the registry raises."""
        self._is_leaving = True
        self._tell()

    def _record(self) -> BrokerRecord:
        return BrokerRecord(self.address, self._name, self._load, self._started_at, __version__, self._is_leaving)

    def close(self) -> None:
        """End the lease: other brokers take the partitions at once."""
        with self._lock:
            if self._lease is not None:
                self._lease.close()
