"""What the processes of a simulated cluster share: the choices of a seed, the events that are to come, the network, the
registry, and the parts that a test may replace by defective ones.

An event is a function that is called once. Messages, replies, syncs and timeouts are events. The schedule takes the
next one out of those that wait, not always the oldest, so that messages overtake each other; some are lost, some are
delivered twice. A request whose message or reply is lost fails for its sender at some later moment.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from pxrs.cluster.copies import Repair
from pxrs.cluster.ledgers import LedgerName, LedgerRecord, Quorum
from pxrs.cluster.records import LEDGERS, ledgers_prefix
from pxrs.cluster.recovery import Recovery
from pxrs.cluster.replication import LedgerWriter
from pxrs.cluster.storage.core import NodeCore

Event = Callable[[], None]
ABSENT: Final = 0


@dataclass(frozen=True, slots=True)
class ClusterDefects:
    """What a test puts in place of the sound parts, to see that the simulator notices."""

    node: type[NodeCore] = NodeCore
    writer: type[LedgerWriter] = LedgerWriter
    recovery: type[Recovery] = Recovery
    repair: type[Repair] = Repair
    machine: type[Any] | None = None
    """A subclass of `cluster_machine.Machine`."""
    broker: type[Any] | None = None
    """A subclass of `cluster_broker.SimulatedBroker`."""
    quorum: Quorum | None = None
    """Simulate this one alone."""


SOUND_CLUSTER: Final = ClusterDefects()
QUORUMS: Final = (
    *(Quorum(3, 3, 2), Quorum(3, 3, 2), Quorum(3, 3, 2), Quorum(4, 3, 2), Quorum(5, 3, 2)),
    *(Quorum(3, 3, 3), Quorum(2, 2, 2), Quorum(3, 2, 2), Quorum(4, 2, 2), Quorum(4, 4, 3), Quorum(1, 1, 1)),
)


class Stored(NamedTuple):
    """A value of the registry."""

    value: Any
    version: int


NOTHING: Final = Stored(None, ABSENT)


class SimulatedRegistry:
    """The registry: values with versions, compared and set at one moment. Values are the records themselves."""

    def __init__(self) -> None:
        self.keys: dict[str, Stored] = {}
        self.leases: set[str] = set()
        """The incarnations of brokers whose lease lives."""
        self.version = 0
        self.on_ledger: Callable[[LedgerRecord | None, LedgerRecord], None] = lambda before, after: None

    def get(self, key: str) -> Stored:
        return self.keys.get(key, NOTHING)

    def ledgers(self, topic_id: str | None = None, partition: int | None = None) -> list[tuple[LedgerRecord, int]]:
        prefix = LEDGERS if topic_id is None else ledgers_prefix(topic_id, partition)
        return [self.keys[key] for key in sorted(key for key in self.keys if key.startswith(prefix))]

    def commit(
        self, expect: Mapping[str, int], put: Mapping[str, Any], *, lease: str | None = None, absent: str = ""
    ) -> int | None:
        """The new version, or None if an expectation is not met. absent: a broker whose lease must have ended."""
        if (lease is not None and lease not in self.leases) or absent in self.leases:
            return None
        if any(self.get(key).version != version for key, version in expect.items()):
            return None
        self.version += 1
        for key, value in put.items():
            if isinstance(value, LedgerRecord):
                self.on_ledger(self.get(key).value, value)
            if value is None:
                self.keys.pop(key, None)
            else:
                self.keys[key] = Stored(value, self.version)
        return self.version


class ClusterSchedule:
    """The state of one schedule, apart from its processes."""

    ghost: Any
    """The `cluster_ghost.ClusterGhost` of the schedule. Its module, and those of machines and brokers, import this one,
    so that their types cannot be named here."""

    def __init__(self, seed: int, defects: ClusterDefects = SOUND_CLUSTER, *, trace: int = 0) -> None:
        self.seed, self.defects = seed, defects
        self.rng = rng = random.Random(f"cluster {seed}")
        self.quorum = defects.quorum or rng.choice(QUORUMS)
        self.lost = rng.choice((0.0, 0.0, 0.03, 0.1))
        self.doubled = rng.choice((0.0, 0.05))
        self.early = rng.choice((0.0, 0.0, 0.03))
        """How often a request fails for its sender although its message and reply are only late."""
        self.unknown = rng.choice((0.0, 0.1, 0.3))
        self.slow = rng.choice((0.0, 0.1, 0.3))
        """How often something takes so long that everything else goes on meanwhile."""
        self.spread = rng.choice((1, 3, 8, 30))
        """Among how many of the oldest events the next one is chosen."""
        self.registry = SimulatedRegistry()
        self.machines: list[Any] = []
        self.homes: dict[str, Any] = {}
        """By node, whether it still exists or not: where it was started."""
        self.waiting: list[Event] = []
        self.held: list[Event] = []
        """Events that take long; `release` lets them wait with the others."""
        self.bodies: dict[int, Any] = {}
        """By checksum: the bytes of an entry."""
        self.lost_nodes: set[str] = set()
        """Nodes whose disk is gone for good."""
        self.on_append: Callable[[Any], None] = lambda broker: None
        """Told of every entry that a broker has sent to its nodes."""
        self.is_calm = False
        self.steps = 0
        self.names = 0
        self.events: deque[str] = deque(maxlen=trace)
        self.has_trace = trace > 0

    def next_name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}{self.names}"

    def note(self, *what: object) -> None:
        if self.has_trace:
            self.events.append(f"{self.steps:5} " + " ".join(map(str, what)))

    # Events.

    def post(self, event: Event) -> None:
        self.waiting.append(event)

    def delay(self, event: Event) -> None:
        """An event that may take long."""
        if not self.is_calm and self.rng.random() < self.slow:
            self.held.append(event)
        else:
            self.waiting.append(event)

    def release(self) -> None:
        for _ in range(min(len(self.held), 2)):
            self.waiting.append(self.held.pop(int(self.rng.random() * len(self.held))))

    def happen(self) -> bool:
        """Let one of the events happen that wait; False if there is none."""
        waiting = self.waiting
        if not waiting:
            return False
        waiting.pop(int(self.rng.random() * min(len(waiting), self.spread)))()
        return True

    def send(self, deliver: Event, fail: Event | None = None) -> None:
        """A message, which may be lost or delivered twice; `fail` tells the sender of its loss."""
        if self.is_calm:
            self.waiting.append(deliver)
            return
        roll = self.rng.random()
        if roll < self.lost:
            if fail is not None:
                self.waiting.append(fail)
            return
        self.delay(deliver)
        if roll > 1.0 - self.doubled:
            self.delay(deliver)
        elif roll > 1.0 - self.doubled - self.early and fail is not None:
            self.waiting.append(fail)

    def request(
        self, node: str, act: Callable[[NodeCore], Any], on_reply: Callable[[Any], None], on_failure: Event
    ) -> None:
        """Ask a storage node. act: the request; on_reply: gets the node's reply, or the error that it has refused it
        with; on_failure: the node did not answer, or another one answered in its place."""
        self.send(partial(self._deliver, node, act, on_reply, on_failure), on_failure)

    def _deliver(
        self, node: str, act: Callable[[NodeCore], Any], on_reply: Callable[[Any], None], on_failure: Event
    ) -> None:
        self.machine_of(node).receive(node, act, on_reply, on_failure)

    # The registry.

    def commit(
        self,
        expect: Mapping[str, int],
        put: Mapping[str, Any],
        on_done: Callable[[int | None], None],
        on_unknown: Event,
        *,
        lease: str | None = None,
        absent: str = "",
    ) -> None:
        """A commit that is applied at some later moment. on_done: gets the version, or None after a conflict;
        on_unknown: the reply was lost, and the commit may be applied even later."""
        is_lost = not self.is_calm and self.rng.random() < self.unknown

        def apply() -> None:
            version = self.registry.commit(expect, put, lease=lease, absent=absent)
            if not is_lost:
                self.post(partial(on_done, version))

        if is_lost:
            self.delay(apply)
            self.delay(on_unknown)
        else:
            self.post(apply)

    # Storage nodes.

    def machine_of(self, node: str) -> Any:
        """The machine at the node's address; another node may answer there by now."""
        return self.homes[node]

    def live_nodes(self) -> list[str]:
        """The nodes that serve, in the order of a new choice."""
        nodes = [machine.core.node for machine in self.machines if machine.is_up]
        self.rng.shuffle(nodes)
        return nodes

    def given_up(self, record: LedgerRecord) -> set[str]:
        """In the calm, an operator abandons the lost nodes of a ledger that cannot be recovered with them (C6). A
        record may name more lost nodes than a quorum allows if a disk is lost while the commit that names its node is
        under way; nothing was confirmed by such a node."""
        lost = [self.lost_nodes.intersection(filter(None, fragment.nodes)) for fragment in record.fragments]
        if not self.is_calm or all(len(each) < self.quorum.ack_quorum for each in lost):
            return set()
        return set().union(*lost)

    def read(self, record: LedgerRecord, entry: int, nodes: list[str] | None = None) -> Any:
        """The body of an entry, from whichever of its nodes serves it now; None if none does."""
        for node in nodes or [node for _, node in record.nodes_of(entry) if node is not None]:
            machine = self.machine_of(node)
            state = machine.core.state(record.id) if machine.is_up and machine.core.node == node else None
            if state is not None and entry in state.index:
                return self.bodies[state.index.checksum(entry)]
        return None


def ledger_key(ledger: str) -> str:
    return LedgerName.of_id(ledger).key
