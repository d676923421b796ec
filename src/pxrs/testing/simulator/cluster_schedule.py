"""What the processes of a simulated cluster share: the choices of a seed, the events that are to come, the network, the
registry, and the parts that a test may replace by defective ones.

An event is a function that is called once. Messages, replies, syncs and timeouts are events. The schedule takes the
next one out of those that wait, not always the oldest, so that messages overtake each other; some are lost, some are
delivered twice. A request whose message or reply is lost fails for its sender at some later moment.

Most mistakes of such a protocol need one message that comes very late, after others have done a lot. Delays of single
messages hardly ever reach them. So there are stalls: for a while all messages of one kind wait, of one sender or to one
machine, or all of them; then they arrive together.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from pxrs.cluster.copies import Repair
from pxrs.cluster.ledgers import LedgerName, LedgerRecord
from pxrs.cluster.records import LEDGERS, ledgers_prefix
from pxrs.cluster.recovery import Recovery
from pxrs.cluster.replication import LedgerWriter
from pxrs.cluster.storage.core import NodeCore
from pxrs.testing.simulator.cluster_themes import THEMES, Theme

Event = Callable[[], None]
ABSENT: Final = 0


class Stall(NamedTuple):
    """Which events are held."""

    kinds: tuple[str, ...]
    sender: object = None
    """None: any."""
    address: int | None = None
    """None: any."""


NO_STALL: Final = Stall(())


class Hold(NamedTuple):
    """A stall beside the one of the theme, by a trap."""

    stall: Stall
    until: int
    """The step at which what it holds arrives."""
    events: list[Event]


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


SOUND_CLUSTER: Final = ClusterDefects()


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

    def __init__(
        self, seed: int, defects: ClusterDefects = SOUND_CLUSTER, *, theme: Theme | None = None, trace: int = 0
    ) -> None:
        """theme: instead of the one that the seed chooses."""
        self.seed, self.defects = seed, defects
        self.rng = rng = random.Random(f"cluster {seed}")
        chosen = rng.choice(THEMES)
        self.theme = theme = theme or chosen
        self.quorum = rng.choice(theme.quorums)
        self.lost, self.early = rng.choice(theme.lost), rng.choice(theme.early)
        self.doubled = rng.choice((0.0, 0.05))
        self.unknown, self.slow = rng.choice(theme.unknown), rng.choice(theme.slow)
        self.laggard: int | None = None
        """The address of the machine to which the entry that is sent now takes long."""
        self.spread, self.stall_rate = rng.choice(theme.spread), rng.choice(theme.stall)
        self.stall, self.stall_until = NO_STALL, 0
        self.stalled: list[Event] = []
        """What the stall holds."""
        self.holds: list[Hold] = []
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
        self.on_append: Callable[[Any, LedgerRecord], None] = lambda broker, record: None
        """Told of every entry before a broker sends it to its nodes."""
        self.on_garbage: Callable[[LedgerRecord], None] = lambda record: None
        """Told of every ledger that a node is about to remove because the record does not name it."""
        self.retired: set[str] = set()
        """Nodes whose copies are to be moved elsewhere."""
        self.counts: Counter[str] = Counter()
        """How often each kind of fault has happened."""
        self.is_beyond = theme.beyond > 0 and rng.random() < theme.beyond
        """Whether more copies may be damaged than the quorum allows. Entries may be lost then; a few rules hold even
        so."""
        self.is_calm = False
        self.steps = 0
        self.names = 0
        self.overtaken = 0
        """How many events have happened before an older one."""
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

    def delay(self, event: Event, kind: str = "", sender: object = None, address: int | None = None) -> None:
        """An event that may take long, or be held by a stall."""
        held = next((hold for hold in self.holds if _is_held(hold.stall, kind, sender, address)), None)
        if held is not None:
            held.events.append(event)
        elif _is_held(self.stall, kind, sender, address):
            self.stalled.append(event)
            self.counts["stalled"] += 1
        elif not self.is_calm and (
            self.rng.random() < self.slow or (kind == "add" and address is not None and address == self.laggard)
        ):
            self.held.append(event)
        else:
            self.waiting.append(event)

    def hold(self, stall: Stall, steps: int) -> None:
        """Hold these events for so many steps."""
        self.holds.append(Hold(stall, self.steps + steps, []))

    def end_holds(self, step: int) -> None:
        """What was held up to this step arrives."""
        for hold in [hold for hold in self.holds if hold.until <= step]:
            self.holds.remove(hold)
            self.waiting += hold.events

    def begin_stall(self, stall: Stall, steps: int) -> None:
        """End the last stall, and begin this one."""
        self.waiting += self.stalled
        self.stalled = []
        self.stall, self.stall_until = stall, self.steps + steps
        self.counts["stall"] += bool(stall.kinds)
        self.note("stall", stall, steps)

    def change_stall(self) -> None:
        rng = self.rng
        if self.stall.kinds or rng.random() >= self.stall_rate:
            self.begin_stall(NO_STALL, self.theme.stall_pause)
        else:
            address = int(rng.random() * len(self.machines)) if rng.random() < 0.7 else None
            self.begin_stall(Stall(rng.choice(self.theme.stalls), None, address), rng.choice(self.theme.stall_steps))

    def release(self) -> None:
        for _ in range(min(len(self.held), 2)):
            self.waiting.append(self.held.pop(int(self.rng.random() * len(self.held))))

    def happen(self) -> bool:
        """Let one of the events happen that wait; False if there is none."""
        waiting = self.waiting
        if not waiting:
            return False
        at = int(self.rng.random() * min(len(waiting), self.spread))
        self.overtaken += at > 0
        waiting.pop(at)()
        return True

    def send(
        self,
        deliver: Event,
        fail: Event | None = None,
        kind: str = "",
        sender: object = None,
        address: int | None = None,
    ) -> None:
        """A message, which may be lost or delivered twice; `fail` tells the sender of its loss."""
        if self.is_calm:
            self.waiting.append(deliver)
            return
        roll = self.rng.random()
        if roll < self.lost:
            self.counts["lost"] += 1
            if fail is not None:
                self.waiting.append(fail)
            return
        self.delay(deliver, kind, sender, address)
        if roll > 1.0 - self.doubled:
            self.counts["doubled"] += 1
            self.delay(deliver)
        elif roll > 1.0 - self.doubled - self.early and fail is not None:
            self.counts["failed early"] += 1
            self.waiting.append(fail)

    def request(
        self,
        node: str,
        act: Callable[[NodeCore], Any],
        on_reply: Callable[[Any], None],
        on_failure: Event,
        kind: str,
        sender: object = None,
    ) -> None:
        """Ask a storage node. act: the request; on_reply: gets the node's reply, or the error that it has refused it
        with; on_failure: the node did not answer, or another one answered in its place; kind, sender: see `Stall`."""
        deliver = partial(self._deliver, node, act, on_reply, on_failure)
        self.send(deliver, on_failure, kind, sender, self.machine_of(node).address)

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
            else:
                self.counts["unanswered commit " + ("refused" if version is None else "applied")] += 1

        if is_lost:
            self.delay(apply, "commit")
            self.delay(on_unknown)
        elif "commit" in self.stall.kinds:
            self.delay(apply, "commit")
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
        """The nodes that an operator has decided to go on without in this ledger (C6): some of those whose disk is
        gone for good. In the calm, all of them if it cannot be recovered with them. A record may name more lost nodes
        than a quorum allows if a disk is lost while the commit that names its node is under way; nothing was confirmed
        by such a node. So nothing that was acknowledged is lost."""
        lost = self.lost_nodes & record.named
        if not lost:
            return lost
        if not self.is_calm:
            return lost if self.rng.random() < 0.3 else set()
        counts = [len(lost.intersection(fragment.nodes)) for fragment in record.fragments]
        # Once a node of a write set is abandoned, a recovery hears all the others. A node in doubt cannot take the
        # place of one that is lost: it does not know what it lacks (C8).
        in_doubt = any(record.id in machine.core.doubts() for machine in self.machines)
        return lost if record.abandoned or in_doubt or max(counts) >= self.quorum.ack_quorum else set()

    def read(self, record: LedgerRecord, entry: int, nodes: list[str] | None = None) -> Any:
        """The body of an entry, from whichever of its nodes serves it now; None if none does."""
        for node in nodes or [node for _, node in record.nodes_of(entry) if node is not None]:
            machine = self.machine_of(node)
            state = machine.core.state(record.id) if machine.is_up and machine.core.node == node else None
            if state is not None and entry in state.index and (record.id, entry) not in machine.disk.unreadable:
                return self.bodies[state.index.checksum(entry)]
        return None


def _is_held(stall: Stall, kind: str, sender: object, address: int | None) -> bool:
    return kind in stall.kinds and stall.sender in (None, sender) and stall.address in (None, address)


def ledger_key(ledger: str) -> str:
    return LedgerName.of_id(ledger).key
