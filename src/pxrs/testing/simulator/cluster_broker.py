"""A simulated broker: it claims partitions, recovers and replays their ledgers, writes new ones, answers producers.

Its lease may end at any moment without its noticing. It then goes on as before, until it is told by a fence or by a
conflict, or is stopped: two brokers both think that they own the partition.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pxrs.cluster.ledgers import EntryHead, Fragment, LedgerRecord
from pxrs.cluster.records import NOBODY, OwnerRecord, owner_key, state_ledgers
from pxrs.cluster.recovery import (
    MISSING,
    UNKNOWN,
    UNREADABLE,
    AddEntry,
    Closed,
    FenceNode,
    Measure,
    NeedSpares,
    ReadEntry,
    Recovery,
    Stopped,
)
from pxrs.cluster.replication import CLOSED, Change, Confirmed, LedgerWriter, Send, Stop
from pxrs.cluster.storage.core import Entries, NodeCore
from pxrs.errors import LedgerFenced, LedgerRemoved, SequenceGap, UnknownProducer
from pxrs.log.batch import Origin
from pxrs.log.producers import Incoming, Producers
from pxrs.testing.simulator.cluster_ghost import Batch, Partition
from pxrs.testing.simulator.cluster_schedule import ClusterSchedule

Answer = Callable[[int | None], None]
"""Gets the offset of a batch; None: not stored, or not known."""


class SimulatedBroker:
    """A broker's process, and the partitions that it has or tries to have."""

    def __init__(self, world: ClusterSchedule, partitions: Sequence[Partition]) -> None:
        self.world = world
        self.name = world.next_name("b")
        self.is_dead = False
        world.registry.leases.add(self.name)
        self.owned = {partition: self.make_owned(partition) for partition in partitions}

    def make_owned(self, partition: Partition) -> OwnedPartition:
        return OwnedPartition(self, partition)

    @property
    def is_busy(self) -> bool:
        return any(owned.phase in ("recovering", "serving") for owned in self.owned.values())

    def phases(self) -> list[tuple[Partition, str]]:
        return [(partition, owned.phase) for partition, owned in self.owned.items()]

    def die(self) -> None:
        self.is_dead = True


# Over the limit: a method for each step from the claim to the close, and for each outcome of a step.
class OwnedPartition:
    """What a broker does with one partition. `phase` says what it waits for."""

    def __init__(self, broker: SimulatedBroker, partition: Partition) -> None:
        self.broker, self.world, self.partition = broker, broker.world, partition
        self.key = owner_key(*partition)
        self.phase = "idle"
        self.turn = 0
        """Raised with each phase: what was asked for in an earlier one is void."""
        self.owner, self.owner_version = OwnerRecord(), 0
        self.recovery: Recovery | None = None
        self.writer: LedgerWriter | None = None
        self.was_fenced: LedgerWriter | None = None
        """The writer that was last told that its ledger is fenced."""
        self.producers = Producers()
        self.base = 0
        self.confirmed = -1
        self.bodies: dict[int, tuple[EntryHead, Any]] = {}
        self.waiting: dict[int, list[tuple[Batch, Answer]]] = {}
        self.doubted: set[str] = set()
        """The nodes that are known to be in doubt about the ledger that is written now."""
        self.offsets: dict[int, int] = {}
        """By offset: the entry of the ledger that is written now."""

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.turn += 1
        self.world.note(self.broker.name, self.partition, phase)

    def guard(self, function: Callable[..., None], *arguments: Any) -> Callable[..., None]:
        """The function, unless the broker is dead or does something else by then."""
        turn = self.turn

        def call(*more: Any) -> None:
            if self.turn == turn and not self.broker.is_dead:
                function(*arguments, *more)

        return call

    def tick(self) -> None:
        """Time passes: ask again, or give up."""
        match self.phase:
            case "idle":
                self.claim()
            case "finding":
                self.find()
            case "recovering" if self.recovery is not None:
                self.perform_recovery([*self.recovery.offer(self.world.live_nodes()), *self.recovery.retry()])
                if self.phase == "recovering" and self.world.rng.random() < 0.05:
                    self.find()  # begins anew, as after an error
            case "replaying":
                self.replay()
            case "creating":
                self.create()
            case "serving" if self.writer is not None:
                self.tend(self.writer)

    def tend(self, writer: LedgerWriter) -> None:
        rng = self.world.rng
        for node in sorted(writer.record.named):
            machine = self.world.machine_of(node)
            state = machine.core.state(writer.record.id) if machine.is_up and machine.core.node == node else None
            lacks = state is not None and (
                state.is_in_doubt or any(ledger == writer.record.id for ledger, _ in machine.disk.unreadable)
            )
            if lacks and node not in self.doubted and rng.random() < 0.5:
                self.doubted.add(node)
                self.perform(writer.doubted(node))
        if self.writer is not writer:
            return
        if writer.is_degraded:
            self.perform(writer.offer(self.world.live_nodes()))
        late = writer.awaiting()
        if late and rng.random() < self.world.theme.timeout:
            self.fail(writer, *late[0][:2])
        if self.phase == "serving" and writer.confirmed + 1 < writer.next and rng.random() < 0.15:
            self.stop_writing()
            self.find()
        elif self.phase == "serving" and (writer.should_roll or (rng.random() < 0.1 and writer.next > 1)):
            self.perform(writer.close())

    # Claim, find.

    def claim(self) -> None:
        registry, me = self.world.registry, self.broker.name
        owner, version = registry.get(self.key)
        if owner is None or owner.is_deleted or (owner.broker in registry.leases and owner.broker != me):
            return
        self.enter("claiming")
        absent = owner.broker if owner.broker not in (me, NOBODY) else ""
        claimed = owner.claimed(me, "")
        done, unknown = self.guard(self.is_claimed, claimed), self.guard(self.look_at_claim, claimed)
        self.world.commit({self.key: version}, {self.key: claimed}, done, unknown, lease=me, absent=absent)

    def is_claimed(self, claimed: OwnerRecord, version: int | None) -> None:
        if version is None:
            self.enter("idle")
            return
        self.owner, self.owner_version = claimed, version
        self.find()

    def look_at_claim(self, claimed: OwnerRecord) -> None:
        found, version = self.world.registry.get(self.key)
        self.is_claimed(claimed, version if found == claimed else None)

    def find(self) -> None:
        """The last ledger: recover it if it is not closed."""
        self.enter("finding")
        if self.world.registry.get(self.key).version != self.owner_version:
            self.enter("idle")
            return
        records = self.world.registry.ledgers(*self.partition)
        if records and not records[-1][0].is_closed:
            self.enter("recovering")
            record, version = records[-1]
            window, abandoned = self.world.rng.choice((1, 2, 4)), self.world.given_up(record)
            self.world.counts["nodes abandoned"] += bool(abandoned)
            self.recovery = self.world.defects.recovery(
                record, version, self.owner.epoch, window=window, abandoned=abandoned
            )
            self.perform_recovery(self.recovery.start())
        else:
            self.enter("replaying")
            self.replay()

    # Recover.

    def perform_recovery(self, actions: Sequence[Any]) -> None:
        recovery = self.recovery
        assert recovery is not None
        ledger = recovery.record.id
        for action in actions:
            match action:
                case Change():
                    self.world.ghost.proposes(recovery)
                    self.change(action, recovery, self.perform_recovery)
                case FenceNode(node, number):
                    self.ask(node, partial(_fence, ledger, number), "fence")
                case ReadEntry(node, entry, number):
                    act = self.reading(node, ledger, entry, number)
                    self.ask(node, act, "read", entry)
                case AddEntry(node, entry, head, _, lac, number):
                    self.ask(node, partial(_add, ledger, entry, head, lac, number), "add", entry)
                case NeedSpares():
                    pass  # a tick offers them
                case Measure(last):
                    self.world.post(self.guard(lambda last=last: self.perform_recovery(recovery.measured(last, 0))))
                case Closed():
                    self.enter("replaying")
                    self.replay()
                    return
                case Stopped():
                    self.enter("finding")
                    return

    def reading(self, node: str, ledger: str, entry: int, number: int) -> Callable[[NodeCore], Any]:
        def act(core: NodeCore) -> Any:
            outcome = core.read(ledger, entry, entry, number)
            if isinstance(outcome.reply, LedgerFenced):
                return outcome
            assert isinstance(outcome.reply, Entries)
            state = core.state(ledger)
            found: Any = UNKNOWN if outcome.reply.is_in_doubt else MISSING
            if state is not None and entry in state.index:
                is_whole = (ledger, entry) not in self.world.machine_of(node).disk.unreadable
                found = state.index.heads[entry] if is_whole else UNREADABLE  # type: ignore[attr-defined]
            self.world.counts["unknown"] += found == UNKNOWN
            return outcome._replace(reply=found)

        return act

    def ask(self, node: str, act: Callable[[NodeCore], Any], kind: str, entry: int = -1) -> None:
        recovery = self.recovery
        assert recovery is not None

        def on_reply(reply: Any) -> None:
            if isinstance(reply, LedgerFenced):
                actions = recovery.refused()
            elif kind == "fence":
                self.world.ghost.is_heard(recovery, reply.lac)
                actions = recovery.fenced(node, reply.lac)
            elif kind == "add":
                actions = recovery.acked(node, entry)
            elif reply == MISSING:
                actions = recovery.missing(node, entry)
            elif reply == UNKNOWN:
                actions = recovery.doubtful(node, entry)
            elif reply == UNREADABLE:
                actions = recovery.unreadable(node, entry)
            else:
                self.world.ghost.is_found(recovery, entry)
                actions = recovery.found(node, entry, reply, self.world.bodies[reply.checksum])
            self.perform_recovery(actions)

        on_failure = self.guard(lambda: self.perform_recovery(recovery.failed(node)))
        request = partial(self.world.request, node, act, self.guard(on_reply), on_failure, kind, self.broker)
        # A fence that takes long, where the reads that follow it do not, is what the fencing reads are for.
        self.world.delay(request) if kind == "fence" else request()

    def change(self, change: Change, core: Any, perform: Callable[[Sequence[Any]], None]) -> None:
        """The compare-and-set of a ledger's record, for the writer or the recovery."""

        def on_done(version: int | None) -> None:
            if version is not None:
                perform(core.committed(version))
            else:
                found = self.world.registry.get(change.record.key)
                self.world.counts["own change adopted"] += found.value == change.record
                perform(core.conflicted(*found))

        on_unknown = self.guard(lambda: perform(core.unknown()))
        self.world.commit(self.expected(change), {change.record.key: change.record}, self.guard(on_done), on_unknown)

    def expected(self, change: Change) -> dict[str, int]:
        return {change.record.key: change.expect}

    # Replay, create.

    def replay(self) -> None:
        """Rebuild the producers' state from the closed ledgers (C3). Waits as long as an entry cannot be read."""
        records = [record for record, _ in self.world.registry.ledgers(*self.partition)]
        if not all(record.is_closed for record in records):  # another broker has claimed the partition meanwhile
            self.enter("finding")
            return
        producers = Producers()
        for record in records[state_ledgers(records) :]:
            assert record.last is not None
            for entry in range(record.last + 1):
                body = self.world.read(record, entry)
                if body is None:
                    return
                if isinstance(body, Batch):
                    producers.note(origin_of(body.origin), body.offset, 0.0)
                    self.world.ghost.show(self.partition, body)
                elif entry == 0:
                    producers.load(body)
        self.producers = producers
        self.base = records[-1].end or 0 if records else 0
        self.enter("creating")
        self.create()

    def create(self) -> None:
        """The next ledger."""
        quorum, live = self.world.quorum, self.world.live_nodes()
        if len(live) < quorum.ack_quorum:
            return
        self.enter("creating")
        nodes = tuple([*live, *[None] * quorum.ensemble][: quorum.ensemble])
        owner = self.owner.with_ledger()
        record = LedgerRecord(
            *self.partition, self.owner.next, self.owner.epoch, quorum, self.base, (Fragment(0, nodes),)
        )
        done = self.guard(self.is_created, owner, record)
        unknown = self.guard(self.look_at_ledger, owner, record)
        put = {self.key: owner, record.key: record}
        expect = {self.key: self.owner_version, record.key: 0}
        self.world.commit(expect, put, done, unknown, lease=self.broker.name)

    def look_at_ledger(self, owner: OwnerRecord, record: LedgerRecord) -> None:
        found, version = self.world.registry.get(record.key)
        if found == record:
            self.is_created(owner, record, version)
        # Else the same owner's version is expected by the next try, at the next tick: one of them is committed.

    def is_created(self, owner: OwnerRecord, record: LedgerRecord, version: int | None) -> None:
        if version is None:
            found, owner_version = self.world.registry.get(self.key)
            if found == owner:  # an earlier try was committed
                self.owner, self.owner_version = owner, owner_version
                self.find()
            else:
                self.enter("idle")
            return
        self.owner, self.owner_version = owner, version
        self.enter("serving")
        self.bodies, self.waiting, self.offsets, self.confirmed = {}, {}, {}, -1
        self.writer = self.world.defects.writer(record, version)
        self.doubted = set()
        self.add(self.producers.dump(), 0)

    # Write.

    def add(self, body: Any, rows: int) -> int:
        writer = self.writer
        assert writer is not None
        entry, checksum = writer.next, len(self.world.bodies)
        head = EntryHead(writer.end, rows, 1, 0, 0, checksum)
        self.world.bodies[checksum] = body
        self.bodies[entry] = head, body
        self.perform(writer.append(head))
        return entry

    def append(self, origin: tuple[int, int], rows: int, answer: Answer) -> None:
        """A producer sends a batch."""
        writer = self.writer
        if self.phase != "serving" or self.broker.is_dead or writer is None or writer.is_closing:
            answer(None)
            return
        try:
            ((offset, is_new),) = self.producers.place([Incoming(origin_of(origin), rows)], writer.end)
        except (UnknownProducer, SequenceGap) as refusal:
            self.is_refused(origin, refusal)
            answer(None)
            return
        batch = Batch(origin, offset, rows)
        if is_new:
            self.producers.note(origin_of(origin), offset, 0.0)
            entry = self.offsets[offset] = writer.next
            self.waiting[entry] = [(batch, answer)]
            self.world.on_append(self.broker, writer.record)
            self.add(batch, rows)
        elif self.offsets.get(offset, -1) <= writer.confirmed:
            answer(offset)
        else:
            self.waiting[self.offsets[offset]].append((batch, answer))

    def is_refused(self, origin: tuple[int, int], refusal: Exception) -> None:
        """A broker that has lost the partition does not know what was stored since; the owner must."""
        if self.world.registry.get(self.key) == (self.owner, self.owner_version):
            self.world.ghost.fail("C3 producers are known", origin, refusal)

    def perform(self, actions: Sequence[Any]) -> None:
        writer = self.writer
        assert writer is not None
        for action in actions:
            if writer is self.was_fenced and not isinstance(action, Stop):
                self.world.ghost.fail("C1 fenced is the end", self.broker.name, action)
            match action:
                case Send(node, tenure, entry, lac):
                    head = self.bodies[entry][0]
                    act = partial(_add, writer.record.id, entry, head, lac, None)
                    on_reply = self.guard(self.is_answered, writer, node, tenure, entry)
                    on_failure = self.guard(self.fail, writer, node, tenure)
                    self.world.request(node, act, on_reply, on_failure, "add", self.broker)
                case Change():
                    self.world.post(self.guard(lambda: self.perform(writer.offer(self.world.live_nodes()))))
                    self.change(action, writer, self.perform)
                case Confirmed(upto):
                    self.confirm(writer, upto)
                case Stop(why, record):
                    self.stop_writing()
                    if why == CLOSED and record is not None:
                        self.base = record.end or 0
                        self.enter("creating")
                        self.create()
                    else:
                        self.enter("idle")
                    return

    def is_answered(self, writer: LedgerWriter, node: str, tenure: int, entry: int, reply: Any) -> None:
        if isinstance(reply, LedgerFenced):
            self.was_fenced = writer
            self.world.counts["writer fenced"] += 1
            self.is_fenced(writer, node, tenure)
        elif isinstance(reply, LedgerRemoved):
            self.world.counts["ledger removed"] += 1
            self.world.ghost.refused.add((writer.record.id, node))
            self.perform(writer.failed(node, tenure, is_lasting=True))
        else:
            self.perform(writer.acked(node, tenure, entry))

    def fail(self, writer: LedgerWriter, node: str, tenure: int) -> None:
        if self.world.rng.random() < 0.5:
            self.perform(writer.offer(self.world.live_nodes()))
        if self.writer is writer:
            self.perform(writer.failed(node, tenure))

    def is_fenced(self, writer: LedgerWriter, node: str, tenure: int) -> None:
        self.perform(writer.fenced())

    def confirm(self, writer: LedgerWriter, upto: int) -> None:
        first, self.confirmed = self.confirmed + 1, max(upto, self.confirmed)
        for entry in range(first, upto + 1):
            self.world.ghost.is_confirmed(writer.record, entry, self.bodies[entry][1])
            for batch, answer in self.waiting.pop(entry, ()):
                answer(batch.offset)

    def readable(self) -> int:
        """The last entry of the ledger that is written which readers may see; -1: none."""
        return self.confirmed

    def stop_writing(self) -> None:
        """The outcome of what is not confirmed is unknown."""
        if self.writer is not None and self.writer.stopped is None:
            self.writer.stop("given up")
        waiting, self.waiting, self.writer = self.waiting, {}, None
        self.turn += 1
        for answers in waiting.values():
            for _, answer in answers:
                answer(None)


def origin_of(origin: tuple[int, int]) -> Origin:
    return Origin(uuid.UUID(int=origin[0] + 1), 0, origin[1])


def _fence(ledger: str, recovery: int, core: NodeCore) -> Any:
    return core.fence(ledger, recovery)


def _add(ledger: str, entry: int, head: EntryHead, lac: int, recovery: int | None, core: NodeCore) -> Any:
    return core.add(ledger, entry, head, lac, recovery)
