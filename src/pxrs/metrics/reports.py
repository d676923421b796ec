"""The counts and the state of a worker process, for its supervisor, which exports those of all workers on one port.

The worker writes a report as a line of JSON into a pipe, every REPORT_S; a thread of the supervisor reads the lines of
all workers and keeps the last one of each. A worker that does not report is one that hangs or was stopped; what it
counted is exported until another process takes its place.

Two threads of the worker: one reads the gauges, which may wait for a server or a database, and the other one reports. A
worker whose hub cannot be reached goes on reporting: it waits, and does not hang.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pxrs.metrics.instruments import Distribution, Snapshot, snapshot

REPORT_S: Final = 1.0
REPORT_BYTES_MAX: Final = 32 << 20
"""A longer line ends the reports of its worker."""
_CHUNK: Final = 1 << 16
_logger = logging.getLogger(__name__)


def dump(state: dict[str, Any], counts: Snapshot) -> bytes:
    """A report as a line. state: what /readyz shows of the worker."""
    plain = {name: [[list(labels), value] for labels, value in series] for name, series in counts.items()}
    return json.dumps({"state": state, "counts": plain}).encode() + b"\n"


def load(line: bytes) -> tuple[dict[str, Any], Snapshot]:
    """What `dump` was given."""
    found = json.loads(line)
    counts: Snapshot = {
        name: [
            (tuple(labels), Distribution(tuple(value[0]), value[1]) if isinstance(value, list) else value)
            for labels, value in series
        ]
        for name, series in found["counts"].items()
    }
    return found["state"], counts


class Reporter:
    """Reports from a worker process, from `start` until the supervisor has closed the pipe."""

    def __init__(self, descriptor: int, state: Callable[[], dict[str, Any]], read: Callable[[], Snapshot] = snapshot):
        """descriptor: the pipe. state: must not block. read: may."""
        self._descriptor, self._state, self._read = descriptor, state, read
        self._counts: Snapshot = {}
        """What was read last; replaced as a whole."""
        self._is_over = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._read_all, name="pxrs-worker-counts", daemon=True).start()
        threading.Thread(target=self._report, name="pxrs-worker-report", daemon=True).start()

    def _read_all(self) -> None:
        while not self._is_over.is_set():
            self._counts = self._read()
            self._is_over.wait(REPORT_S)

    def _report(self) -> None:
        while not self._is_over.is_set():
            left = memoryview(dump(self._state(), self._counts))
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except OSError:  # the supervisor is gone: the worker notices that by another pipe
                self._is_over.set()
            self._is_over.wait(REPORT_S)


@dataclass(slots=True)
class Report:
    """The last report of a worker."""

    at: float
    """When it came, on the monotonic clock."""
    state: dict[str, Any]
    counts: Snapshot


class Reports:
    """The reports of all workers, by number. `add` is for the supervisor's main thread, `latest` for any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: dict[int, Report] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe()
        self._added: list[tuple[int, int]] = []
        """Pipes that the thread does not read yet, and the numbers of their workers. Guarded by `_lock`."""
        self._is_closing = False
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._read_all, name="pxrs-worker-reports", daemon=True)
        self._thread.start()

    def add(self, number: int, descriptor: int) -> None:
        """A process of this worker was started, and writes to this pipe, which is closed here."""
        with self._lock:
            self._latest.pop(number, None)  # of the process before
            self._added.append((number, descriptor))
        os.write(self._waker, b".")

    def latest(self) -> dict[int, Report]:
        with self._lock:
            return dict(self._latest)

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        os.write(self._waker, b".")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        os.close(self._waker)

    def _read_all(self) -> None:
        lines: dict[int, bytearray] = {}
        numbers: dict[int, int] = {}
        while not self._is_closing:
            for key, _ in self._selector.select():
                descriptor = key.fd
                part = os.read(descriptor, _CHUNK)
                if descriptor == self._woken:
                    with self._lock:
                        added, self._added = self._added, []
                    for number, each in added:
                        numbers[each], lines[each] = number, bytearray()
                        self._selector.register(each, selectors.EVENT_READ)
                    continue
                lines[descriptor] += part
                is_over = not part or not self._take(numbers[descriptor], lines[descriptor])
                if is_over:
                    self._selector.unregister(descriptor)
                    os.close(descriptor)
                    del lines[descriptor], numbers[descriptor]

    def _take(self, number: int, line: bytearray) -> bool:
        """Keep the last whole line. False if the worker sends something else."""
        if (end := line.rfind(b"\n")) < 0:
            return len(line) <= REPORT_BYTES_MAX
        start = line.rfind(b"\n", 0, end) + 1
        try:
            state, counts = load(bytes(line[start:end]))
        except (ValueError, KeyError, TypeError) as error:  # a handler may write to any descriptor
            _logger.warning("the reports of worker %d are malformed and ignored: %s", number, error)
            return False
        del line[: end + 1]
        with self._lock:
            self._latest[number] = Report(time.monotonic(), state, counts)
        return True
