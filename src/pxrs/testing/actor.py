"""A registry client in a process of its own that executes requests line by line, so that a test can kill or stop it.

    with Actor(url) as actor:
        actor.call("lease", ttl=1.0)
        actor.call("commit", ephemeral={"members/a": b""}, lease=True)
        actor.signal(signal.SIGKILL)

A request is one line of JSON, and so is a reply. Errors of `pxrs.errors` are raised as the same classes here.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from pxrs import errors
from pxrs.registry import ABSENT, Entry, Lease, Registry
from pxrs.registry import open as open_registry
from pxrs.testing.forked import Forked


class Actor:
    """The parent's side."""

    def __init__(self, url: str) -> None:
        its_input, our_output = os.pipe()
        our_input, its_output = os.pipe()
        self._process = Forked("pxrs.testing.actor", [url], stdin=its_input, stdout=its_output)
        os.close(its_input)
        os.close(its_output)
        self._requests, self._replies = open(our_output, "wb"), open(our_input, "rb")  # noqa: SIM115 - see `close`
        self.pid = self._process.pid
        self._lock = threading.Lock()

    def send(self, operation: str, **arguments: Any) -> None:
        """Send a request without waiting for the reply, so that several actors work at the same time."""
        self._requests.write((json.dumps({"do": operation, **_encode(arguments)}) + "\n").encode())
        self._requests.flush()

    def receive(self) -> Any:
        """The reply to the oldest request that has none yet. Raises what the operation raised."""
        line = self._replies.readline()
        if not line:
            raise EOFError(f"the actor {self.pid} is gone")
        reply = json.loads(line)
        if "error" in reply:
            raise _rebuild(reply["error"], reply["arguments"])
        return _decode(reply["result"])

    def call(self, operation: str, **arguments: Any) -> Any:
        with self._lock:
            self.send(operation, **arguments)
            return self.receive()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait(10)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
        self._process.wait(10)
        self._replies.close()
        with suppress(BrokenPipeError):  # what was buffered for a killed actor cannot be delivered
            self._requests.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Script:
    """The child's side, with one method for each operation."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.held: Lease | None = None

    def get(self, key: str) -> Entry | None:
        return self.registry.get(key)

    def commit(self, lease: bool = False, **arguments: Any) -> dict[str, int]:
        return self.registry.commit(lease=self.held if lease else None, **arguments)

    def lease(self, ttl: float) -> float:
        self.held = self.registry.lease(ttl)
        return self.held.ttl

    def unrenewed_lease(self, ttl: float) -> str:
        """Take a lease that nobody renews by itself; returns its secret."""
        self.held = self.registry.lease(ttl, renewed=False)
        return self.held.secret

    def lease_state(self) -> dict[str, Any]:
        assert self.held is not None
        return {"alive": self.held.alive, "left": self.held.deadline - self.registry.clock.now()}

    def claim(self, key: str, value: bytes) -> bool:
        """Take a key that nobody has."""
        try:
            self.registry.commit(expect={key: ABSENT}, put={key: value})
        except errors.Conflict:
            return False
        return True

    def increment(self, key: str, times: int) -> int:
        """Add one, many times, by compare-and-commit; returns how often it had to try again."""
        retries = 0
        for _ in range(times):
            while not self._add_one(key):
                retries += 1
        return retries

    def _add_one(self, key: str) -> bool:
        entry = self.registry.get(key)
        version, count = (ABSENT, 0) if entry is None else (entry.version, int(entry.value))
        try:
            self.registry.commit(expect={key: version}, put={key: b"%d" % (count + 1)})
        except errors.Conflict:
            return False
        return True

    def twin_writes(self, keys: list[str]) -> None:
        """Write the same value to all keys in one commit, again and again, until the process is killed."""
        count = 0
        while True:
            count += 1
            self.registry.commit(put=dict.fromkeys(keys, b"%d-%d" % (os.getpid(), count)))

    def wait_change(self, prefix: str, timeout: float) -> float:
        """Wait for the next change under the prefix; returns when it was seen, as `time.monotonic()`."""
        with self.registry.watch(prefix) as watch:
            print(json.dumps({"result": "watching"}), flush=True)  # noqa: T201 - the protocol
            while not watch.wait(timeout):
                raise TimeoutError(prefix)
            return time.monotonic()


def _serve(url: str) -> None:
    with open_registry(url) as registry:
        script = _Script(registry)
        for line in sys.stdin:
            request = json.loads(line)
            operation: Callable[..., Any] = getattr(script, request.pop("do"))
            try:
                reply = {"result": _encode(operation(**_decode(request)))}
            except Exception as error:  # noqa: BLE001 - reported to the parent, which raises it
                arguments = [list(error.keys)] if isinstance(error, errors.Conflict) else [str(error)]
                reply = {"error": type(error).__name__, "arguments": arguments}
            print(json.dumps(reply), flush=True)  # noqa: T201 - the protocol


def _encode(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Entry):
        return {"entry": [value.key, value.value.hex(), value.version]}
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    return value


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {"bytes"}:
        return bytes.fromhex(value["bytes"])
    if value.keys() == {"entry"}:
        key, data, version = value["entry"]
        return Entry(key, bytes.fromhex(data), version)
    return {key: _decode(item) for key, item in value.items()}


def _rebuild(name: str, arguments: list[Any]) -> Exception:
    kind = getattr(errors, name, None)
    return kind(*arguments) if kind is not None else RuntimeError(f"{name}: {arguments}")


if __name__ == "__main__":
    _serve(sys.argv[1])
