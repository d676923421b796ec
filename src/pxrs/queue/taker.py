"""A process that takes items: a lease, an ephemeral key, and slots for the outcomes of its transactions.

The keys of the items that a taker has in flight name the taker. While the taker's key is there, nobody else moves these
items, however long a handler works. Once the key is gone, a sweeper returns them (`sweeping`)."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid

from pxrs.errors import LeaseExpired, OutcomeUnknown, PxrsError, RegistryUnavailable
from pxrs.queue.outcomes import Slot, delete_slots
from pxrs.queue.records import OUTCOMES, TAKERS
from pxrs.registry.contract import ABSENT, Registry
from pxrs.registry.steps import drive

_logger = logging.getLogger(__name__)


class Taker:
    """Created when a process first needs it, and again with another id when its lease was lost."""

    def __init__(self, registry: Registry, ttl: float) -> None:
        self.id = uuid.uuid4().hex
        self.key = f"{TAKERS}{self.id}"
        self._registry = registry
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self._slots_count = 0
        self.lease = registry.lease(ttl)
        about = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        try:
            registry.commit({self.key: ABSENT}, ephemeral={self.key: json.dumps(about).encode()}, lease=self.lease)
        except (OutcomeUnknown, LeaseExpired) as error:  # a process that was stopped may find its new lease ended
            self.lease.close()
            raise RegistryUnavailable(f"{registry.url}: it is not known whether this process is registered") from error
        except BaseException:
            self.lease.close()
            raise

    @property
    def is_alive(self) -> bool:
        return self.lease.alive

    def slot(self) -> Slot:
        """A slot that no other transaction uses now."""
        with self._lock:
            if self._free:
                return self._free.pop()
            self._slots_count += 1
            return Slot(f"{OUTCOMES}{self.id}-{self._slots_count}")

    def free(self, slot: Slot) -> None:
        """The outcome of the slot's transaction is known: another one may use the slot."""
        with self._lock:
            self._free.append(slot)

    def close(self) -> None:
        """Leave: delete the slots, and end the lease. What is still in flight is returned by a sweeper."""
        try:
            with self._lock:
                slots = list(self._free)
            drive(delete_slots(slots), self._registry, self.lease)
        except PxrsError as error:
            url = self._registry.url
            _logger.debug("queues of %s: the slots of taker %s are left to a sweeper: %s", url, self.id, error)
        finally:
            self.lease.close()
