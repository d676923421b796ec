"""A plain Flight server of pyarrow, in a process of its own: what `benchmarks.serve` compares with.

It takes batches and forgets them, and gives out batches that it has in memory: the wire, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow.flight as flight

from benchmarks.log.workload import records
from pxrs.log.batch import SCHEMA


class Peer(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(self, location: str) -> None:
        super().__init__(location)
        self._batch = records()

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
            writer.write(b"%d" % chunk.data.num_rows)

    def do_get(self, context: Any, ticket: Any) -> Any:
        return flight.GeneratorStream(SCHEMA, (self._batch for _ in range(int(ticket.ticket))))


@contextmanager
def peer() -> Iterator[flight.FlightClient]:
    """A client of a new one."""
    command = [sys.executable, "-m", "benchmarks.flight_peer"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            with flight.connect(f"grpc://127.0.0.1:{int(process.stdout.readline())}") as client:
                yield client
        finally:
            process.kill()


if __name__ == "__main__":
    server = Peer("grpc://127.0.0.1:0")
    print(server.port, flush=True)
    server.serve()
