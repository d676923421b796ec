"""Learns of new rows through NOTIFY, where the database has it (PostgreSQL)."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from pxrs.errors import InvalidTopic, ReadFailed
from pxrs.sources.sql_table.table import Table
from pxrs.waiting import start_thread

log = logging.getLogger(__name__)

CLOSE_S_MAX: Final = 5.0
"""How long `close` waits for a thread that is connecting."""
_BACKOFF_S: Final = (0.1, 5.0)


class Listener:
    """Calls `wake` after each notification on a channel, and whenever one may have been missed, such as after a lost
    connection. Has one connection and one thread."""

    def __init__(self, table: Table, channel: str, wake: Callable[[], None]) -> None:
        self._table, self._channel, self._wake = table, channel, wake
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._connection = table.listen(channel)  # in the constructor, so that its caller gets the error
        self._bell_receiver, self._bell_sender = os.pipe()
        self._stopped = threading.Event()

    @property
    def is_listening(self) -> bool:
        return self._connection is not None

    def start(self) -> None:
        with self._lock:
            if self._thread is None and not self._stopped.is_set():
                self._thread = start_thread(self._run, "pxrs-table-listener")

    def close(self) -> None:
        with self._lock:
            if self._stopped.is_set():
                return
            self._stopped.set()
            thread = self._thread
        os.write(self._bell_sender, b"!")
        if thread is not None:
            # It may be connecting, or wait for the answer to LISTEN, each of which is limited.
            thread.join(CLOSE_S_MAX)
            if thread.is_alive():
                log.warning("the listener of %s is still connecting while the table is closed", self._table.address)
                return  # the thread is a daemon, and still uses the pipe
        self._drop()
        os.close(self._bell_sender)
        os.close(self._bell_receiver)

    def _run(self) -> None:
        backoff = _BACKOFF_S[0]
        while not self._stopped.is_set():
            try:
                if self._connection is None:
                    self._connection = self._table.listen(self._channel)
                    self._wake()  # notifications were missed while there was no connection
                backoff = _BACKOFF_S[0]
                self._hear(self._connection)
            except (ReadFailed, InvalidTopic, OSError, self._table.engine.dialect.loaded_dbapi.Error) as error:
                log.info("listening to %s at %s: %s; will connect again", self._channel, self._table.address, error)
                self._drop()
                self._wake()
                self._stopped.wait(backoff)
                backoff = min(backoff * 2, _BACKOFF_S[1])

    def _hear(self, connection: Any) -> None:
        events = select.poll()  # `select.select` fails with descriptors above 1,023
        events.register(connection.fileno(), select.POLLIN)
        events.register(self._bell_receiver, select.POLLIN)
        while not self._stopped.is_set():
            # The driver may have read notifications together with an answer; `poll` does not report those.
            heard = list(connection.notifies(timeout=0))
            if heard:
                self._wake()
            else:
                events.poll()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(self._table.engine.dialect.loaded_dbapi.Error):
                connection.close()
