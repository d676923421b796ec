"""What an administrator does to a simulated group: set a checkpoint back, and have a failed message tried again."""

from __future__ import annotations

from dataclasses import replace

from pxrs.group.records import Checkpoint, Gate, Owner, Starts, Target, gate_key, start_key
from pxrs.log.numbering import TopicPartition
from pxrs.registry.contract import ABSENT
from pxrs.registry.steps import Write
from pxrs.testing.simulator.environment import Environment
from pxrs.testing.simulator.ghost import ADMIN
from pxrs.testing.simulator.store import Request


def reset_checkpoint(environment: Environment, place: TopicPartition) -> None:
    """Set a checkpoint back. The same commit frees the partition (G5), raises `taken` in the owner's target, so that
    the owner looks, and writes the gate that retention expects (O10)."""
    keys, state = environment.keys, environment.store.state
    owner, checkpoint = (state.get(key(*place)) for key in (keys.owner, keys.checkpoint))
    start = state.get(start_key(place[0]))
    if owner is None or checkpoint is None:
        return
    starts = Starts() if start is None else Starts.load(start.key, start.value)
    offset = environment.rng.randint(starts.of(place[1]), Checkpoint.load(checkpoint.key, checkpoint.value).offset)
    before = Owner.load(owner.key, owner.value)
    epoch = before.epoch + 1
    put = {
        owner.key: Owner(None, epoch).dump(),
        checkpoint.key: Checkpoint(offset, by=ADMIN, epoch=epoch).dump(),
        gate_key(place[0]): Gate(ADMIN, environment.now).dump(),
    }
    expect = {entry.key: entry.version for entry in (owner, checkpoint)}
    entry = state.get(keys.target(before.incarnation or "-"))
    if entry is not None:
        target = Target.load(entry.key, entry.value)
        expect[entry.key] = entry.version
        put[entry.key] = replace(target, taken=target.taken + 1).dump()
    expect[start_key(place[0])] = ABSENT if start is None else start.version
    environment.apply(Request(Write(expect, put, is_leased=False), ADMIN, None))


def retry_paused(environment: Environment) -> None:
    """Perhaps have a message tried again, by deleting the pause of its partition. Then a late write of the same pause,
    if there is one, is applied: it must not pause the partition a second time."""
    paused = environment.store.state.scan(environment.keys.paused, None, None)
    if not paused or environment.rng.random() < 0.5:
        return
    key = environment.rng.choice(paused).key
    environment.note(ADMIN, "retries", key)
    environment.store.delete(key)
    late = [each for each in environment.late if isinstance(each.operation, Write) and key in each.operation.put]
    if late:
        request = environment.rng.choice(late)
        environment.late.remove(request)
        environment.apply(request)
