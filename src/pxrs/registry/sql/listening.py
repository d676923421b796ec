"""Watching PostgreSQL: `Listener`, one connection and one thread for each registry, which receive notifications.

The thread sleeps until a notification comes, until the nearest lease may have expired, or until the connection has to
be probed. The notification of a commit that binds keys to a lease says how soon that lease may expire, so the thread
need not query the expiry after every commit.

Invariants:
- `add` returns when LISTEN is active. If a lost connection is just being replaced, `add` returns at once, and every
  watch wakes when LISTEN is active again.
- After a lost connection changes may have been missed: every watch wakes when the loss is noticed, and again when
  LISTEN is active on the next connection (R2).
- PostgreSQL delivers a notification only after the commit that sent it is visible.

On failure: the error is logged and the thread connects again, with pauses from BACKOFF_S_MIN to BACKOFF_S_MAX.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import psycopg

from pxrs.errors import Closed, PxrsError, RegistryError
from pxrs.registry.contract import Entry
from pxrs.registry.sql.commit import parse_payload
from pxrs.registry.sql.wire import Command, Reply, Wire
from pxrs.registry.watch import PrefixWatch
from pxrs.waiting import start_thread

if TYPE_CHECKING:
    from pxrs.registry.sql.registry import SqlRegistry

log = logging.getLogger(__name__)

BACKOFF_S_MIN: Final = 0.05
BACKOFF_S_MAX: Final = 1.0
# The database stores expiries in whole milliseconds: after this pause the lease is over by its clock too.
_EXPIRY_SLACK_S: Final = 0.003


class ListeningDatabase(Protocol):
    """What the listener needs of `PostgresDatabase`."""

    timeout: float

    def connect_alone(self, timeout: float) -> Wire:
        """A connection that only the listener uses."""

    def translate(self, reply: Reply) -> Exception:
        """The error that a failed reply means."""


class Listener:
    """Wakes the watches of a registry on notifications."""

    def __init__(self, registry: SqlRegistry, database: ListeningDatabase, channel: str) -> None:
        self._registry, self._database, self._channel = registry, database, channel
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wire: Wire | None = None
        self._stopped = threading.Event()
        self._bell_receiver, self._bell_sender = -1, -1
        self._sweep_at = 0.0
        self._probe_at = 0.0

    def add(self, watches: Sequence[PrefixWatch]) -> None:
        with self._lock:
            if self._stopped.is_set():
                raise Closed(f"the registry {self._registry.url} was closed")
            if self._thread is None:
                # On the caller's thread, so that an error of the first connection is raised to the caller.
                if self._wire is None:
                    self._listen()
                if self._bell_sender < 0:
                    self._bell_receiver, self._bell_sender = os.pipe()
                self._thread = start_thread(self._run, "pxrs-sql-listener")

    def remove(self, watch: PrefixWatch) -> None:
        """Nothing is kept for each prefix."""

    def note_read(self, entries: Iterable[Entry]) -> None:
        """Nothing to do: the server sends a notification for every change, whatever was read."""

    def close(self) -> None:
        with self._lock:
            self._stopped.set()
            thread, self._thread = self._thread, None
        if self._bell_sender < 0:
            return
        if thread is None:  # it could not be started
            self._drop()
        else:
            os.write(self._bell_sender, b"!")
            thread.join(self._database.timeout)
            if thread.is_alive():
                return
        os.close(self._bell_sender)
        os.close(self._bell_receiver)
        self._bell_sender = self._bell_receiver = -1

    def _run(self) -> None:
        backoff = BACKOFF_S_MIN
        while not self._stopped.is_set():
            try:
                wire = self._wire
                if wire is None:
                    wire = self._listen()
                    self._registry.watched.wake(None)
                    backoff = BACKOFF_S_MIN
                self._serve(wire)
            except Exception as error:  # logged; the thread must go on, or watches would never wake
                if isinstance(error, PxrsError | psycopg.Error):
                    log.info("watching %s: %s; will connect again", self._registry.url, error)
                else:
                    log.exception("watching %s failed unexpectedly; will connect again", self._registry.url)
                if self._drop():
                    self._registry.watched.wake(None)
                self._stopped.wait(backoff)
                backoff = min(backoff * 2, BACKOFF_S_MAX)
        self._drop()

    def _listen(self) -> Wire:
        timeout = self._database.timeout
        wire = self._database.connect_alone(timeout)
        reply = wire.run([Command.plain(f"LISTEN {self._channel}")], time.monotonic() + timeout)
        if reply.has_failed():
            wire.close()
            raise self._database.translate(reply)
        self._wire = wire
        self._sweep_at = 0.0
        self._probe_at = time.monotonic() + timeout
        return wire

    def _drop(self) -> bool:
        """Close the connection; returns whether there was one."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        return wire is not None

    def _serve(self, wire: Wire) -> None:
        """Receive notifications until `close` is called. Raises an error if the connection breaks."""
        events = select.poll()
        events.register(wire.fileno(), select.POLLIN)
        events.register(self._bell_receiver, select.POLLIN)
        while not self._stopped.is_set():
            self._sweep()
            if time.monotonic() >= self._probe_at:
                self._probe(wire)
            for payload in wire.notifications():
                self._hear(payload)
            left = min(self._sweep_at, self._probe_at) - time.monotonic()
            events.poll(max(left, 0.0) * 1000)

    def _hear(self, payload: str) -> None:
        try:
            ttl, places = parse_payload(payload)
        except ValueError:  # another program notified this channel: what changed is not known
            self._registry.watched.wake(None)
            return
        if ttl:
            self._sweep_at = min(self._sweep_at, time.monotonic() + ttl + _EXPIRY_SLACK_S)
        self._registry.watched.wake([place for place in places if place and not place.endswith("/")])
        for place in places:
            if not place or place.endswith("/"):
                self._registry.watched.wake_under(place)

    def _sweep(self) -> None:
        if time.monotonic() < self._sweep_at:
            return
        try:
            left = self._registry.sweep()
        except RegistryError as error:
            log.info("watching %s: could not look for expired leases: %s", self._registry.url, error)
            left = BACKOFF_S_MAX
        self._sweep_at = float("inf") if left is None else time.monotonic() + left + _EXPIRY_SLACK_S

    def _probe(self, wire: Wire) -> None:
        """Run a query, so that a connection that broke without an error is noticed."""
        timeout = self._database.timeout
        reply = wire.run([Command.plain("SELECT 1")], time.monotonic() + timeout)
        if reply.has_failed():
            raise self._database.translate(reply)
        self._probe_at = time.monotonic() + timeout
