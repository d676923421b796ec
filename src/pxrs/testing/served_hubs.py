"""Servers of many hubs in one process, which a test may kill and start again.

`pxrs serve` is one process for each hub, and a suite of a hundred tests needs a hub for each. Here one process serves
them all, each at a port of its own and without upkeep, so that a registry holds only what a test has put there.

    with ServedHubs() as hubs:
        url = hubs.serve(folder, "postgresql://...")
        hubs.kill_and_start()      # SIGKILL; then the same hubs at the same ports

python -m pxrs.testing.served_hubs reads requests as lines of JSON, and answers each with a line when it is done.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import pxrs
from pxrs.launching import HOST, free_ports
from pxrs.testing.forked import Forked


class _Served(NamedTuple):
    folder: str
    registry: str | None
    """None: the registry in the folder."""
    port: int


class ServedHubs:
    """The parent's side. Belongs to one thread."""

    def __init__(self) -> None:
        self._served: list[_Served] = []
        self._start()

    def serve(self, folder: Path, registry: str | None = None) -> str:
        """Serve the hub in this folder; the address of its server."""
        (port,) = free_ports(1)
        self._served.append(_Served(str(folder), registry, port))
        self._call({"serve": self._served[-1]})
        return f"pxrs://{HOST}:{port}"

    def forget_all(self) -> None:
        """Stop all servers, and close their hubs. If the process has ended, start another one, and raise EOFError."""
        self._served.clear()
        try:
            self._call({"end": True})
        except EOFError:
            self._end()
            self._start()
            raise

    def kill_and_start(self) -> None:
        """Kill the process (SIGKILL), and serve the same hubs at the same addresses by another one."""
        self._process.send_signal(signal.SIGKILL)
        self._end()
        self._start()
        for served in self._served:
            self._call({"serve": served})

    def close(self) -> None:
        self._process.kill()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        its_input, our_output = os.pipe()
        our_input, its_output = os.pipe()
        self._process = Forked(
            "pxrs.testing.served_hubs", stdin=its_input, stdout=its_output, has_group=True, is_mortal=True
        )
        os.close(its_input)
        os.close(its_output)
        self._requests, self._replies = open(our_output, "wb"), open(our_input, "rb")  # noqa: SIM115 - see `_end`

    def _end(self) -> None:
        self._process.wait(10)
        self._replies.close()
        with suppress(BrokenPipeError):  # what was buffered for a killed process cannot be delivered
            self._requests.close()

    def _call(self, request: dict[str, Any]) -> None:
        try:
            self._requests.write((json.dumps(request) + "\n").encode())
            self._requests.flush()
        except BrokenPipeError as error:
            raise EOFError("the process that serves the hubs has ended") from error
        if not self._replies.readline():
            raise EOFError("the process that serves the hubs has ended")


def _serve() -> None:
    from pxrs.server.serving import ServerSettings, serving  # after the fork: it imports gRPC

    stack = ExitStack()
    for line in sys.stdin:
        request = json.loads(line)
        if "serve" in request:
            served = _Served(*request["serve"])
            hub = stack.enter_context(pxrs.open(served.folder, registry=served.registry, upkeep=False))
            stack.enter_context(serving(hub, ServerSettings(listen=f"{HOST}:{served.port}")))
        else:
            stack.close()
        print("done", flush=True)  # noqa: T201 - the protocol


if __name__ == "__main__":
    _serve()
