"""The other processes of a simulated cluster: producers, readers, repairs, retention, the deletion of a topic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from pxrs.cluster.copies import CopyEntry, Ended, ListEntries, Repair, Repaired, needs_repair
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.cluster.records import DeletedTopic, deleted_key, owner_key, state_ledgers
from pxrs.cluster.replication import Change
from pxrs.cluster.storage.core import NodeCore
from pxrs.testing.simulator.cluster_broker import SimulatedBroker
from pxrs.testing.simulator.cluster_ghost import Partition
from pxrs.testing.simulator.cluster_schedule import ClusterSchedule


class SimulatedProducer:
    """Sends one batch after the other to one partition, each under its own origin until it is told the offset."""

    def __init__(self, world: ClusterSchedule, number: int, partition: Partition, batches: int) -> None:
        self.world, self.number, self.partition, self.batches = world, number, partition, batches
        self.sequence = 0
        self.is_waiting = False
        self.tries = 0

    @property
    def is_done(self) -> bool:
        return self.sequence == self.batches or self.partition[0] in self.world.ghost.deleted

    def tick(self, broker: SimulatedBroker) -> None:
        """Send the batch, or send it again to this broker; answers to earlier tries are ignored from then on."""
        if self.is_done or (self.is_waiting and not self.world.is_calm and self.world.rng.random() < 0.7):
            return
        self.is_waiting, self.tries = True, self.tries + 1
        origin, rows = (self.number, self.sequence), 1 + self.sequence % 2
        answer = partial(self.reply, self.tries, origin)
        self.world.send(lambda: broker.owned[self.partition].append(origin, rows, answer), partial(answer, None))

    def reply(self, number: int, origin: tuple[int, int], offset: int | None) -> None:
        self.world.send(
            partial(self.is_answered, number, origin, offset), partial(self.is_answered, number, origin, None)
        )

    def is_answered(self, number: int, origin: tuple[int, int], offset: int | None) -> None:
        if number != self.tries or not self.is_waiting:
            return
        self.is_waiting = False
        if offset is not None:
            self.world.ghost.is_told(self.partition, origin, offset)
            self.sequence += 1


class SimulatedReader:
    """Reads one partition in order, from whichever broker serves it. A broker past its lease answers no reads (C4)."""

    def __init__(self, world: ClusterSchedule, partition: Partition) -> None:
        self.world, self.partition = world, partition
        self.position = 0

    def tick(self, broker: SimulatedBroker) -> None:
        """Read what there is, as far as nodes serve it now."""
        world, owned = self.world, broker.owned[self.partition]
        writer = owned.writer
        is_serving = owned.phase == "serving" and broker.name in world.registry.leases and not broker.is_dead
        if writer is None or not is_serving or self.partition[0] in world.ghost.deleted:
            return
        records = [record for record, _ in world.registry.ledgers(*self.partition)]
        readable = owned.readable()
        end = owned.bodies[readable][0].next_offset if readable >= 0 else writer.record.base
        if end < self.position:
            world.ghost.fail("P4 reads are monotonic", broker.name, "ends at", end, "and was read up to", self.position)
        self.position = max(self.position, records[0].base)
        for record in records:
            if record.id == writer.record.id:
                self.read([owned.bodies[entry][1] for entry in range(1, readable + 1)])
            elif (record.end or 0) > self.position and not self.read(
                world.read(record, entry) for entry in range(1, (record.last or 0) + 1)
            ):
                return

    def read(self, bodies: Iterable[Any]) -> bool:
        """False: one of them cannot be read now."""
        for body in bodies:
            if body is None:
                return False
            if body.offset >= self.position:
                self.world.ghost.is_read(self.partition, self.position, body)
                self.position = body.offset + body.rows
        return True


class Repairer:
    """Repairs one closed ledger after the other. Several do so at once, and none knows of the others."""

    def __init__(self, world: ClusterSchedule) -> None:
        self.world = world
        self.repair: Repair | None = None
        self.turn = 0

    def tick(self) -> None:
        """Begin a repair; one that is under way is given up now and then."""
        world = self.world
        patience = 0.95 if world.is_calm or world.retired else 0.8
        if self.repair is not None and not self.repair.ended and world.rng.random() < patience:
            return
        live = {*world.live_nodes()}
        # A node that is down may come back; whoever repairs waits for a while, and not for ever.
        down = [machine.core.node for machine in world.machines if not machine.is_up]
        patient = (live | {node for node in down if world.rng.random() < 0.5}) - world.retired
        found = [each for each in world.registry.ledgers() if needs_repair(each[0], patient)]
        self.turn += 1
        self.repair = None
        if found:
            record, version = found[int(world.rng.random() * len(found))]
            world.note("repair", record.id, patient)
            spares = [node for node in world.live_nodes() if node not in world.retired]
            self.repair = world.defects.repair(record, version, patient, spares, at_once=2)
            self.perform(self.repair.start())

    def guard(self, function: Callable[..., None], *arguments: Any) -> Callable[..., None]:
        turn = self.turn

        def call(*more: Any) -> None:
            if self.turn == turn:
                function(*arguments, *more)

        return call

    def perform(self, actions: Sequence[Any]) -> None:
        repair = self.repair
        assert repair is not None
        record = repair.record
        for action in actions:
            match action:
                case Change():
                    self.world.commit(
                        {action.record.key: action.expect},
                        {action.record.key: action.record},
                        self.guard(self.is_changed, repair),
                        self.guard(lambda: self.perform(repair.unknown())),
                    )
                case ListEntries(node):
                    on_reply = self.guard(lambda reply, node=node: self.perform(self.listed(repair, node, reply)))
                    self.world.request(node, partial(_index, record.id), on_reply, self.fail(repair, node), "index")
                case CopyEntry():
                    self.world.post(self.guard(self.copy, repair, action))
                case Repaired() | Ended():
                    self.world.note("repair ends", action)

    def listed(self, repair: Repair, node: str, reply: Any) -> Sequence[Any]:
        """A node does not list entries that it cannot read."""
        unreadable = self.world.machine_of(node).disk.unreadable
        return repair.listed(node, [entry for entry in reply.entries if (repair.record.id, entry) not in unreadable])

    def is_changed(self, repair: Repair, version: int | None) -> None:
        self.perform(repair.conflicted() if version is None else repair.committed(version))

    def fail(self, repair: Repair, node: str) -> Callable[[], None]:
        return self.guard(lambda: self.perform(repair.failed(node)))

    def copy(self, repair: Repair, action: CopyEntry) -> None:
        """Read the entry from a source, then add it on the target."""
        record, (entry, sources, target, recovery) = repair.record, action
        for node in sources:
            machine = self.world.machine_of(node)
            state = machine.core.state(record.id) if machine.is_up and machine.core.node == node else None
            if state is not None and entry in state.index and (record.id, entry) not in machine.disk.unreadable:
                head = state.index.heads[entry]
                act = partial(_add, record.id, entry, head, recovery)
                on_reply = self.guard(self.is_added, repair, target, entry)
                self.world.request(target, act, on_reply, self.fail(repair, target), "copy")
                return
        self.perform(repair.lost(entry))

    def is_added(self, repair: Repair, target: str, entry: int, reply: Any) -> None:
        self.perform(repair.failed(target) if isinstance(reply, Exception) else repair.copied(target, entry))


def _index(ledger: str, core: NodeCore) -> Any:
    return core.index(ledger)


def _add(ledger: str, entry: int, head: Any, recovery: int, core: NodeCore) -> Any:
    return core.add(ledger, entry, head, -1, recovery)


def trim(world: ClusterSchedule, partition: Partition) -> None:
    """Retention removes the record of the oldest ledger, if the producers' state does not need it."""
    records: list[LedgerRecord] = [record for record, _ in world.registry.ledgers(*partition)]
    closed = [record for record in records if record.is_closed]
    if state_ledgers(closed) > 0:
        world.note("trims", closed[0].id)
        world.counts["trim"] += 1
        world.counts["trim during a fail-over"] += not records[-1].is_closed and records[-1].recovery > 0
        world.registry.commit({}, {closed[0].key: None})


class Deletion:
    """The deletion of a topic, step by step."""

    def __init__(self, world: ClusterSchedule, topic_id: str, partitions: int) -> None:
        self.world, self.topic_id, self.partitions = world, topic_id, partitions

    def begin(self) -> None:
        """The name is free; no broker can claim the partitions or create ledgers of them any more."""
        registry = self.world.registry
        owners = {key: registry.get(key).value for key in self.owner_keys()}
        if None in owners.values() or self.topic_id in self.world.ghost.deleted:
            return
        self.world.note("deletes", self.topic_id)
        self.world.counts["deletion"] += 1
        self.world.ghost.deleted.add(self.topic_id)
        registry.commit(
            {},
            {
                **{key: owner.deleted() for key, owner in owners.items()},
                deleted_key(self.topic_id): DeletedTopic(self.topic_id, self.partitions),
            },
        )

    def owner_keys(self) -> list[str]:
        return [owner_key(self.topic_id, partition) for partition in range(self.partitions)]

    def tick(self) -> None:
        """Whoever comes by removes the next record; in the end, the owners and the mark of the deletion."""
        registry = self.world.registry
        if registry.get(deleted_key(self.topic_id)).value is None:
            return
        records = registry.ledgers(self.topic_id)
        if records:
            registry.commit({}, {records[0][0].key: None})
        else:
            registry.commit({}, {**dict.fromkeys(self.owner_keys()), deleted_key(self.topic_id): None})
