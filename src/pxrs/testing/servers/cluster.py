"""Several servers that make a quorum."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Generic, Self, TypeVar

from pxrs.testing.servers.process import (
    START_S_MAX,
    Server,
    ServerFailed,
    wait_until,
)


class QuorumServer(Server):
    """A server that may be one of several under an elected leader."""

    @abc.abstractmethod
    def is_leader(self) -> bool:
        """Say whether this server leads now; False also when it cannot be reached."""


AnyQuorumServer = TypeVar("AnyQuorumServer", bound=QuorumServer)


class Cluster(Generic[AnyQuorumServer]):
    """Servers that elect a leader. Fault tests act on `nodes[i]`; the cluster starts and ends them together."""

    def __init__(self, nodes: Sequence[AnyQuorumServer]) -> None:
        self.nodes = tuple(nodes)

    @property
    def urls(self) -> list[str]:
        """One address for each node."""
        return [node.url for node in self.nodes]

    @property
    def url(self) -> str:
        """One address that names all nodes."""
        hosts = ",".join(f"{node.host}:{node.port}" for node in self.nodes)
        return f"{self.nodes[0].scheme}://{hosts}"

    def start(self) -> Self:
        """Start the nodes that do not run, and wait until all of them serve."""
        try:
            for node in self.nodes:
                node.start(wait=False)  # none can serve alone
            self.wait_until_ready()
        except BaseException:
            for node in self.nodes:
                node.kill()
            raise
        return self

    def wait_until_ready(self, timeout_s: float = START_S_MAX) -> None:
        """Return once every node serves."""
        for node in self.nodes:
            node.wait_until_ready(timeout_s)

    def leader(self, timeout_s: float = START_S_MAX) -> int:
        """Return the index of the leader, waiting out an election: the moment when exactly one node says it leads."""
        leaders: list[int] = []

        def found_one() -> bool:
            leaders[:] = [i for i, node in enumerate(self.nodes) if node.is_leader()]
            return len(leaders) == 1

        if not wait_until(found_one, timeout_s):
            raise ServerFailed(f"no single leader within {timeout_s} s: {leaders}")
        return leaders[0]

    def stop(self) -> None:
        """Stop every node. The data stay."""
        for node in self.nodes:
            node.stop()

    def close(self) -> None:
        """Stop every node and delete their folders."""
        with ExitStack() as stack:  # all of them, even if one fails
            for node in self.nodes:
                stack.callback(node.close)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()
