"""One schedule of a whole cluster, by a seed: which message arrives next, who crashes, whose lease ends.

First the storm: producers send and retry; brokers claim, recover and write; storage nodes crash, and come back with all
of their disk, with an empty one or with an older copy; ledgers are repaired, trimmed, and their garbage removed; one
topic may be deleted. `ClusterGhost` checks what is confirmed and every record. Then the calm: nothing fails any more.
Every producer must come to its end, every ledger to all its copies, and everything that was shown must still be there.

No more disks are lost at a time than the quorum allows: of the nodes that a fragment names, Qa - 1.
"""

from __future__ import annotations

from typing import Final

from pxrs.cluster.copies import needs_repair
from pxrs.cluster.records import OwnerRecord, owner_key
from pxrs.testing.simulator.cluster_broker import SimulatedBroker
from pxrs.testing.simulator.cluster_ghost import ClusterGhost, Partition
from pxrs.testing.simulator.cluster_machine import Machine
from pxrs.testing.simulator.cluster_schedule import SOUND_CLUSTER, ClusterDefects, ClusterSchedule
from pxrs.testing.simulator.cluster_tending import Deletion, Repairer, SimulatedProducer, trim
from pxrs.testing.simulator.ghost import Violation

CALM_STEPS_MAX: Final = 20_000
TICKS: Final = (
    *("broker", "broker", "broker", "producer", "producer", "producer", "producer"),
    *("release", "release", "repair", "garbage", "faults", "faults"),
)
FAULTS: Final = ("crash", "crash", "crash", "disk", "disk", "lease", "lease", "lease", "broker", "broker", "notice")


class ClusterSimulation(ClusterSchedule):
    def __init__(self, seed: int, defects: ClusterDefects = SOUND_CLUSTER, *, steps: int = 350, trace: int = 0) -> None:
        """`trace` is how many of the last events are kept, to be shown."""
        super().__init__(seed, defects, trace=trace)
        self.steps_max = steps
        rng = self.rng
        self.ghost = ClusterGhost(self)
        self.registry.on_ledger = self.ghost.on_ledger
        for address in range(self.quorum.ensemble + rng.choice((0, 1, 1, 2))):
            self.machines.append((defects.machine or Machine)(self, address))
        self.partitions: list[Partition] = [("topic1", 0), ("topic2", 0)][: 1 + (rng.random() < 0.3)]
        for partition in self.partitions:
            self.registry.commit({}, {owner_key(*partition): OwnerRecord()})
        self.deletion = Deletion(self, self.partitions[-1][0], 1)
        self.has_deletion = rng.random() < 0.2
        self.brokers = [self.new_broker(), self.new_broker()]
        self.producers = [
            SimulatedProducer(self, number, self.partitions[number % len(self.partitions)], rng.choice((2, 3, 5)))
            for number in range(rng.choice((2, 3, 5)))
        ]
        self.repairers = [Repairer(self), Repairer(self)]
        self.on_append = self.may_end_lease
        self.trap_rate = rng.choice((0.0, 0.03, 0.15))
        """How often a broker's lease ends while an entry is on its way."""
        self.tick_rate = rng.choice((0.1, 0.25))
        self.fault_rate = rng.choice((0.1, 0.4, 0.8))
        self.stopped: list[SimulatedBroker] = []
        """Brokers whose lease has ended and that have not noticed it."""

    def new_broker(self) -> SimulatedBroker:
        return (self.defects.broker or SimulatedBroker)(self, self.partitions)

    # The storm.

    def run(self) -> ClusterSimulation:
        """Raises Violation."""
        while self.steps < self.steps_max:
            self.steps += 1
            if self.rng.random() < self.tick_rate or not self.happen():
                self._tick(TICKS[int(self.rng.random() * len(TICKS))])
        self._come_to_rest()
        return self

    def _tick(self, kind: str) -> None:
        rng = self.rng
        brokers = self.brokers + self.stopped
        match kind:
            case "broker":
                # One that has not noticed the end of its lease is slow to notice anything.
                some = self.stopped if self.stopped and rng.random() < 0.1 else self.brokers
                broker = some[int(rng.random() * len(some))]
                broker.owned[self.partitions[int(rng.random() * len(self.partitions))]].tick()
            case "producer":
                broker = brokers[int(rng.random() * len(brokers))]
                self.producers[int(rng.random() * len(self.producers))].tick(broker)
            case "release":
                self.release()
            case "repair":
                self.repairers[int(rng.random() * 2)].tick()
            case "garbage":
                machine = self.machines[int(rng.random() * len(self.machines))]
                if machine.is_up:
                    machine.collect()
                if rng.random() < 0.2:
                    trim(self, self.partitions[0])
                self.deletion.tick()
            case "faults":
                if rng.random() < self.fault_rate:
                    self._fail(rng.choice(FAULTS))
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
                if kind == "broker":
                    self.note(broker.name, "crashes")
                    broker.die()
            case "notice" if self.stopped and rng.random() < 0.3:
                self.stopped.pop(0).die()

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
        lost = self.lost_nodes | {node}
        for record, _ in self.registry.ledgers():
            for fragment in record.fragments:
                # A node in `joining` may have its place by a commit that is under way.
                nodes = {*fragment.nodes, *(each.node for each in record.joining)}
                if len(lost & nodes) >= self.quorum.ack_quorum:
                    return False
        return True

    def may_end_lease(self, broker: SimulatedBroker) -> None:
        if not self.is_calm and self.rng.random() < self.trap_rate:
            self.post(lambda: self.end_lease(broker))

    # The calm.

    def _come_to_rest(self) -> None:
        self.note("calm")
        self.is_calm, self.spread = True, 1
        for machine in self.machines:
            if not machine.is_up:
                machine.start()
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
        self.ghost.check_rest()

    def _is_at_rest(self) -> bool:
        if not all(producer.is_done for producer in self.producers):
            return False
        live = {*self.live_nodes()}
        records = self.registry.ledgers()
        if any(needs_repair(record, live) for record, _ in records):
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


def simulate_cluster(seed: int, defects: ClusterDefects = SOUND_CLUSTER, *, steps: int = 350) -> ClusterSimulation:
    """Run one schedule. A Violation says how to replay it."""
    try:
        return ClusterSimulation(seed, defects, steps=steps).run()
    except Violation as violation:
        violation.add_note(f"SEED={seed}  replay: ClusterSimulation({seed}, trace=100_000).run()")
        raise
