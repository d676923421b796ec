"""One schedule of a whole cluster, by a seed: which message arrives next, who crashes, whose lease ends.

First the storm: producers send and retry; readers follow; brokers claim, recover and write; storage nodes crash, and
come back with all of their disk, with an empty one or with an older copy; machines come late; ledgers are repaired,
moved, trimmed, and their garbage removed; one topic may be deleted. How much of what: see `cluster_themes`.
`ClusterGhost` checks what is confirmed, what is read, and every record. Then the calm: nothing fails any more. Every
producer must come to its end, every ledger to all its copies, and everything that was shown must still be there.

No more disks are lost at a time than the quorum allows: of the nodes that a fragment names, Qa - 1.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from pxrs.cluster.copies import needs_repair
from pxrs.cluster.ledgers import LedgerRecord
from pxrs.cluster.records import OwnerRecord, owner_key
from pxrs.cluster.replication import LedgerWriter
from pxrs.cluster.storage.core import FenceItem, StoreItem
from pxrs.testing.simulator.cluster_broker import OwnedPartition, SimulatedBroker
from pxrs.testing.simulator.cluster_ghost import Beyond, ClusterGhost, Partition
from pxrs.testing.simulator.cluster_machine import Disk, Machine
from pxrs.testing.simulator.cluster_schedule import (
    NO_STALL,
    SOUND_CLUSTER,
    ClusterDefects,
    ClusterSchedule,
    Event,
    Stall,
)
from pxrs.testing.simulator.cluster_tending import Deletion, Repairer, SimulatedProducer, SimulatedReader, trim
from pxrs.testing.simulator.cluster_themes import Theme
from pxrs.testing.simulator.ghost import Violation

CALM_STEPS_MAX: Final = 20_000


class ClusterSimulation(ClusterSchedule):
    def __init__(
        self,
        seed: int,
        defects: ClusterDefects = SOUND_CLUSTER,
        *,
        steps: int | None = None,
        theme: Theme | None = None,
        trace: int = 0,
    ) -> None:
        """`trace` is how many of the last events are kept, to be shown. theme: instead of the seed's. steps: instead of
        the theme's."""
        super().__init__(seed, defects, theme=theme, trace=trace)
        self.steps_max = self.theme.steps if steps is None else steps
        rng = self.rng
        self.ghost = ClusterGhost(self)
        self.registry.on_ledger = self.ghost.on_ledger
        # Fewer than the ensemble: positions are empty until a machine comes.
        for _ in range(max(self.quorum.ack_quorum, self.quorum.ensemble + rng.choice(self.theme.machines))):
            self._add_machine()
        self.partitions: list[Partition] = [("topic1", 0), ("topic2", 0)][: 1 + (rng.random() < 0.3)]
        for partition in self.partitions:
            self.registry.commit({}, {owner_key(*partition): OwnerRecord()})
        self.deletion = Deletion(self, self.partitions[-1][0], 1)
        self.has_deletion = rng.random() < 0.2
        self.brokers = [self.new_broker(), self.new_broker()]
        self.producers = [
            SimulatedProducer(self, number, self.partitions[number % len(self.partitions)], rng.choice((1, 2, 4)))
            for number in range(rng.choice(self.theme.producers))
        ]
        self.repairers = [Repairer(self), Repairer(self)]
        self.readers = [SimulatedReader(self, partition) for partition in self.partitions]
        self.counts["E > Qw"] += self.quorum.ensemble > self.quorum.write_quorum
        self.on_append, self.on_garbage = self.may_end_lease, self.may_move_back
        self.ghost.on_recovered = self.may_move_away
        self.burst_rate, self.trap_rate = rng.choice(self.theme.burst), rng.choice(self.theme.trap)
        self.harm_rate = rng.choice(self.theme.harm) if self.theme.harm != (0.0,) else 0.0
        self.tick_rate = rng.choice((0.1, 0.25))
        self.fault_rate = rng.choice(self.theme.fault)
        self.traps: list[tuple[int, Event]] = []
        """What a trap does, and at which step."""
        self.copied: Any = None
        """The copy of a disk that a trap has made: the machine, the ledger that was written, the copy, and what the
        machine's `scan` has found."""
        self.quiet_until = 0
        """Until this step producers send nothing, so that what a trap does concerns the last entry."""
        self.trap_until = 0
        """Until this step no other lease ends in this way."""
        self.stopped: list[SimulatedBroker] = []
        """Brokers whose lease has ended and that have not noticed it."""

    def new_broker(self) -> SimulatedBroker:
        return (self.defects.broker or SimulatedBroker)(self, self.partitions)

    def _add_machine(self) -> None:
        self.machines.append((self.defects.machine or Machine)(self, len(self.machines)))

    # The storm.

    def run(self) -> ClusterSimulation:
        """Raises Violation."""
        try:
            self._storm()
            if not self.is_beyond:
                self._come_to_rest()
        except Beyond as beyond:
            self.note("more is damaged than the quorum allows:", beyond)
            self.counts["beyond"] += 1
        return self

    def _storm(self) -> None:
        ticks = self.theme.ticks
        while self.steps < self.steps_max:
            self.steps += 1
            self.end_holds(self.steps)
            for trap in [trap for trap in self.traps if trap[0] <= self.steps]:
                self.traps.remove(trap)
                trap[1]()
            if self.steps >= self.stall_until:
                self.change_stall()
            if self.rng.random() < self.tick_rate or not self.happen():
                self._tick(ticks[int(self.rng.random() * len(ticks))])

    def _tick(self, kind: str) -> None:
        rng = self.rng
        brokers = self.brokers + self.stopped
        match kind:
            case "broker":
                # One that has not noticed the end of its lease is slow to notice anything.
                some = self.stopped if self.stopped and rng.random() < 0.1 else self.brokers
                broker = some[int(rng.random() * len(some))]
                broker.owned[self.partitions[int(rng.random() * len(self.partitions))]].tick()
            case "producer" if self.steps >= self.quiet_until:
                broker = brokers[int(rng.random() * len(brokers))]
                # Several at once: their entries are under way at the same time.
                senders = self.producers if rng.random() < self.burst_rate else [rng.choice(self.producers)]
                for producer in senders:
                    producer.tick(broker)
            case "reader":
                broker = self.brokers[int(rng.random() * len(self.brokers))]
                rng.choice(self.readers).tick(broker)
            case "release":
                self.release()
            case "repair":
                self.repairers[int(rng.random() * 2)].tick()
            case "garbage":
                for machine in self.machines:
                    if machine.is_up and rng.random() < 0.5:
                        machine.collect()
                if rng.random() < 0.2:
                    trim(self, self.partitions[0])
                self.deletion.tick()
            case "faults":
                if rng.random() < self.fault_rate:
                    self._fail(rng.choice(self.theme.faults))
                for machine in self.machines:
                    if not machine.is_up and rng.random() < 0.5:
                        machine.start()

    def _fail(self, kind: str) -> None:
        rng = self.rng
        if self.has_deletion and rng.random() < 0.1:
            self.deletion.begin()
        match kind:
            case "crash":
                # Those with something to lose matter most.
                unsynced = [machine for machine in self.machines if machine.tail and machine.is_up]
                self._crash(rng.choice(unsynced if unsynced and rng.random() < 0.7 else self.machines))
            case "disk":
                machine = self.machines[int(rng.random() * len(self.machines))]
                if self.may_lose(machine.core.node):
                    self._crash(machine)
                    machine.lose_disk(older=bool(machine.copies) and rng.random() < 0.6)
            case "lease" | "broker":
                # A broker that writes or recovers has something to lose.
                busy = [each for each in self.brokers if each.is_busy]
                broker = rng.choice(busy if busy and rng.random() < 0.7 else self.brokers)
                self.end_lease(broker)
                self.counts[kind] += 1
                if kind == "broker":
                    self.note(broker.name, "crashes")
                    broker.die()
            case "retire":
                # An operator has the copies of a node moved elsewhere, or changes their mind.
                self.retired = {rng.choice(self.machines).core.node} if rng.random() < 0.8 else set()
                self.counts["retire"] += 1
            case "machine" if len(self.machines) < self.quorum.ensemble + 2:
                self.counts["late machine"] += 1
                self._add_machine()
            case "notice" if self.stopped and rng.random() < 0.3:
                self.stopped.pop(0).die()
            case "power all":
                self.counts[kind] += 1
                for machine in self.machines:
                    machine.lose_power()
            case "harm" | "cut" | "copy" | "rot" | "power" | "kill":
                self.harm(self.machines[int(rng.random() * len(self.machines))], kind)

    def harm(self, machine: Machine, kind: str) -> None:
        """The disk of this machine loses something that was synced, if the quorum allows that."""
        rng, journal = self.rng, machine.disk.journal
        if kind in ("power", "kill"):
            self.counts[kind] += 1
            machine.lose_power() if kind == "power" else self._crash(machine)
        elif machine.disk.cookie is None or not journal or machine.disk.node in self.lost_nodes:
            return
        elif kind == "copy":
            copy, run = machine.disk.copy(), machine.run
            machine.scanned = machine.scan() if machine.is_up else None
            self.delay(partial(self._turn_back, machine, run, copy))
        elif not self.may_lose(machine.disk.node):
            return
        elif kind == "rot":
            entries = [(ledger, entry) for ledger, found in sorted(machine.disk.durable.items()) for entry in found]
            if entries:
                self.counts[kind] += 1
                machine.rot(*rng.choice(entries))
        else:
            self.counts[kind] += 1
            machine.lose_power() if rng.random() < 0.5 else self._crash(machine)
            journal = machine.disk.journal
            # The last items matter most: what they say is not known elsewhere yet.
            count = 1 + int(rng.random() * min(3, len(journal)))
            first = len(journal) - count if rng.random() < 0.7 else int(rng.random() * (len(journal) - count + 1))
            machine.harm(range(first, first + count), is_cut=kind == "cut")

    def _turn_back(self, machine: Machine, run: int, copy: Disk) -> None:
        """A copy of the disk, made while the machine ran, takes the place of the disk."""
        is_same = machine.run == run and copy.node == machine.disk.node
        if is_same and not self.is_calm and self.may_lose(machine.disk.node):
            self.counts["copy"] += 1
            machine.lose_power() if self.rng.random() < 0.5 else self._crash(machine)
            machine.turn_back(copy)

    def end_lease(self, broker: SimulatedBroker) -> None:
        """The broker does not notice it. Another one tries to take its partitions at once."""
        if broker not in self.brokers:
            return
        self.note("the lease of", broker.name, "ends")
        self.brokers.remove(broker)
        self.registry.leases.discard(broker.name)
        self.stopped.append(broker)
        self.brokers.append(self.new_broker())
        for partition in self.partitions:
            self.post(self.brokers[0].owned[partition].tick)

    def _crash(self, machine: Machine) -> None:
        if machine.is_up:
            machine.crash()

    def may_lose(self, node: str) -> bool:
        """Whether every entry is safe without this disk. A new node may take part in what comes next at once, so its
        disk is safe to lose only as any other's."""
        if self.is_beyond:
            return True
        lost = self.lost_nodes | {machine.disk.node for machine in self.machines if machine.is_hurt} | {node}
        for record, _ in self.registry.ledgers():
            for fragment in record.fragments:
                # A node in `joining` may have its place by a commit that is under way.
                nodes = {*fragment.nodes, *(each.node for each in record.joining)}
                if len(lost & nodes) >= self.quorum.ack_quorum:
                    return False
        return True

    def may_end_lease(self, broker: SimulatedBroker, record: LedgerRecord) -> None:
        """Before an entry is sent: it may be that its messages are all late, and that the lease ends meanwhile."""
        if self.theme.has_laggards:
            self.laggard = self._address_in(record)
        if self.harm_rate and not self.is_calm and self.steps >= self.trap_until and self.rng.random() < self.harm_rate:
            self._set_trap(broker, record)
        if self.is_calm or self.steps < self.trap_until or self.rng.random() >= self.trap_rate:
            return
        if self.rng.random() < self.stall_rate:
            address = self._address_in(record) if self.rng.random() < 0.7 else None
            kinds = ("add",) if address is None or self.rng.random() < 0.2 else ("add", "fence")
            steps = self.rng.choice(self.theme.trap_steps)
            self.trap_until = self.steps + steps
            begin = partial(self.begin_stall, Stall(kinds, None, address), steps)
            begin() if self.rng.random() < 0.5 else self.post(begin)
        self.post(lambda: self.end_lease(broker))

    # Over the limit: the kinds of traps share the machines and the moments.
    def _set_trap(self, broker: SimulatedBroker, record: LedgerRecord) -> None:
        """An entry of this ledger is about to be sent to the nodes. What damage can do then, step by step:

        lost     the entry reaches A and B, and not C; A loses it; the broker's lease ends; B is late with its answers
        moved    A has the entry and fails; another node takes its place from the next entry on; B gets the entry, which
                 is now confirmed; then as above
        turned   as `lost`, with an earlier copy of A's disk
        begun    the copy was made before the ledger was begun
        fence    the broker's lease ends while the entry is on its way; the recovery fences A and B, and not C; A loses
                 the fence; then the entry reaches A and C
        lac      B alone has an entry that says that an earlier one is confirmed, and tells it late; all lose that one
        """
        rng = self.rng
        nodes = [node for node in record.fragments[-1].nodes if node is not None]
        if len(nodes) < 3:
            return
        rng.shuffle(nodes)
        a, b, c = (self.machine_of(node) for node in nodes[:3])
        owned = broker.owned[record.topic_id, record.partition]
        writer = owned.writer
        kinds = ("lost", "turned", *["moved"] * 7, *["begun", "fence"] * 5, *["lac"] * 16 * self.is_beyond)
        kind = rng.choice(kinds)
        if self.copied is not None and self.copied[0] in (a, b, c) and self.copied[1] != record.id:
            kind = "begun"
        self.note("trap", kind, a.address, b.address, c.address)
        self.counts[f"trap {kind}"] += 1
        steps = rng.choice((12, 20, 30))
        self.trap_until = self.quiet_until = self.steps + 3 * steps
        if kind == "begun" and (self.copied is None or self.copied[0] not in (a, b, c) or self.copied[1] == record.id):
            # The copy is made now, and used when the next ledger is written.
            self.copied = a, record.id, a.disk.copy(), a.scan() if a.is_up else None
            self.post(lambda: self._roll(owned, writer))
            self.trap_until = self.quiet_until = 0
            return
        copy, scanned = a.disk.copy(), None
        if kind == "begun" and self.copied is not None:
            others = [each for each in (a, b, c) if each is not self.copied[0]]
            a, _, copy, scanned = self.copied
            b, c = others[:2]
            self.copied = None
        if kind == "fence":
            self.hold(Stall(("add",), broker, b.address), 5 * steps)
            self.hold(Stall(("add",), broker), 3 * steps)
            self.hold(Stall(("fence", "read"), None, c.address), 4 * steps)
            self.post(lambda: self.end_lease(broker))
            self.traps.append((self.steps + 2 * steps, lambda: self._lose_fence(a, record.id)))
            return
        self.hold(Stall(("add",), None, c.address), 4 * steps)
        if kind == "moved":
            self.hold(Stall(("add",), None, b.address), steps)

            def fail() -> None:
                if owned.writer is writer and writer is not None:
                    owned.perform(writer.offer(self.live_nodes()))
                    position = writer.record.position_of(a.core.node, writer.next - 1)
                    late = [each for each in writer.slots if each.node == a.core.node]
                    if owned.writer is writer and position is not None and late:
                        owned.fail(writer, a.core.node, late[0].tenure)

            self.traps.append((self.steps + steps // 2, fail))

        def spring() -> None:
            if kind in ("turned", "begun"):
                if self.may_lose(a.disk.node) and a.is_up and copy.node == a.disk.node:
                    self._crash(a)
                    a.turn_back(copy)
                    a.scanned = scanned
            elif kind != "lac":
                self.harm(a, rng.choice(("harm", "harm", "cut")))
            else:
                for machine, kept in ((a, 0), (b, 1), (c, 0)):
                    self._lose_entries(machine, record.id, kept)
                self.hold(Stall(("fence",), None, b.address), 3 * steps)
            self.hold(Stall(("read",), None, b.address), (4 if kind == "lac" else 3) * steps)
            for machine in (a, b, c):
                if not machine.is_up:
                    machine.start()
            if rng.random() < 0.3 and a.is_up:
                self._crash(a)
                a.start()
            if rng.random() < 0.3:
                a.settle(a.run)
            self.end_lease(broker)

        self.traps.append((self.steps + steps + 5 * (kind == "moved"), spring))

    def _roll(self, owned: OwnedPartition, writer: LedgerWriter | None) -> None:
        """The next ledger is begun."""
        if writer is not None and owned.writer is writer:
            owned.perform(writer.close())

    def _lose_fence(self, machine: Machine, ledger: str) -> None:
        """The disk loses the fences of a ledger."""
        if self.may_lose(machine.disk.node) and machine.is_up:
            self._crash(machine)
            journal = machine.disk.journal
            fences = [at for at, item in enumerate(journal) if isinstance(item, FenceItem) and item.ledger == ledger]
            machine.harm(fences)
            machine.start()

    def _lose_entries(self, machine: Machine, ledger: str, kept: int) -> None:
        """The disk loses the entries of a ledger except the last ones."""
        if machine.is_up:
            self._crash(machine)
            journal = machine.disk.journal
            entries = [at for at, item in enumerate(journal) if isinstance(item, StoreItem) and item.ledger == ledger]
            machine.harm(entries[: len(entries) - kept])

    def _address_in(self, record: LedgerRecord) -> int | None:
        """Of one of the nodes to which entries are sent now."""
        node = self.rng.choice(record.fragments[-1].nodes)
        return None if node is None else self.machine_of(node).address

    def may_move_away(self, record: LedgerRecord) -> None:
        """A recovery has closed the ledger."""
        if self.theme.is_moving and not self.is_calm:
            self.post(lambda: self.move(record))

    def may_move_back(self, record: LedgerRecord) -> None:
        """A node is about to remove the ledger: another one's copies are moved, and this one may get them."""
        if self.theme.is_moving and not self.is_calm and record.is_closed and self.rng.random() < 0.7:
            if self.steps >= self.trap_until:
                self.begin_stall(Stall(("remove",)), self.rng.choice(self.theme.stall_steps))
            self.move(record)

    def move(self, record: LedgerRecord) -> None:
        """An operator has the copies of one of the ledger's nodes made elsewhere."""
        self.counts["retire"] += 1
        self.retired = {node for node in [self.rng.choice(record.fragments[-1].nodes)] if node is not None}
        for repairer in self.repairers:
            repairer.tick()

    # The calm.

    def _come_to_rest(self) -> None:
        self.note("calm")
        self.begin_stall(NO_STALL, 0)
        self.is_calm, self.spread, self.retired = True, 1, set()
        for machine in self.machines:
            if not machine.is_up:
                machine.start()
        self.traps = []
        self.end_holds(self.steps_max * 2)
        while len(self.machines) < self.quorum.ensemble:
            self._add_machine()
        self.rng.shuffle(self.held)
        self.waiting += self.held
        # Brokers that have lost their lease hear of everything that is still on its way.
        for _ in range(CALM_STEPS_MAX):
            if not self.happen():
                break
        for broker in self.stopped:
            broker.die()
        self.stopped = []
        for _ in range(CALM_STEPS_MAX):
            self.steps += 1
            if self.happen():
                continue
            if self._is_at_rest():
                break
            for broker in self.brokers:
                for partition in self.partitions:
                    broker.owned[partition].tick()
            for repairer in self.repairers:
                repairer.tick()
            for producer in self.producers:
                owners = [b for b in self.brokers if b.owned[producer.partition].phase == "serving"]
                if owners:
                    producer.tick(owners[0])
            for machine in self.machines:
                machine.collect()
            self.deletion.tick()
        else:
            self.ghost.fail(
                "P5 comes to rest", [(b.name, p, o.phase) for b in self.brokers for p, o in b.owned.items()]
            )
        self._read_all()
        self.ghost.check_rest()

    def _read_all(self) -> None:
        for reader in self.readers:
            for broker in self.brokers:
                reader.tick(broker)

    def _is_at_rest(self) -> bool:
        if not all(producer.is_done for producer in self.producers):
            return False
        live = {*self.live_nodes()}
        records = self.registry.ledgers()
        if any(needs_repair(record, live) for record, _ in records):
            return False
        if any(machine.is_hurt or machine.core.doubts() or machine.disk.is_unchecked for machine in self.machines):
            # A ledger that is written stays in doubt until its broker has closed it, which it does.
            return False
        for machine in self.machines:
            for ledger, _ in machine.core.ledgers():
                record = next((each for each, _ in records if each.id == ledger), None)
                if record is None or machine.core.node not in record.named:
                    return False
        if any(topic_id in key for topic_id in self.ghost.deleted for key in self.registry.keys):
            return False
        for partition in self.partitions:
            if partition[0] not in self.ghost.deleted:
                chain = [record for record, _ in self.registry.ledgers(*partition)]
                if chain and not chain[-1].is_closed and not self._is_written(partition):
                    return False
                if not self.ghost.is_whole(partition, chain):
                    return False
        return True

    def _is_written(self, partition: Partition) -> bool:
        return any(broker.owned[partition].phase == "serving" for broker in self.brokers)


def simulate_cluster(
    seed: int, defects: ClusterDefects = SOUND_CLUSTER, *, steps: int | None = None, theme: Theme | None = None
) -> ClusterSimulation:
    """Run one schedule. A Violation says how to replay it."""
    try:
        return ClusterSimulation(seed, defects, steps=steps, theme=theme).run()
    except Violation as violation:
        named = "" if theme is None else f"theme={theme.name.upper()}, "
        violation.add_note(f"SEED={seed}  replay: ClusterSimulation({seed}, {named}trace=100_000).run()")
        raise
