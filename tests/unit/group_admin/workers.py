"""A group with a worker: a member without a thread, which does each step when the test says so."""

from __future__ import annotations

import hashlib
import itertools
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from pxrs.group.lane import Lane
from pxrs.group.protocol import MemberProtocol
from pxrs.group.records import Checkpoint, Keys, Member, Owner, Paused
from pxrs.log.memory import MemoryLog
from pxrs.model import Topic
from pxrs.producer.producer import Producer
from pxrs.registry import Registry
from pxrs.registry.steps import Steps, Write, drive

PARTITIONS = 4
KEYS = Keys("billing")
CHECKPOINTS_AT = {0: 3, 1: 0, 2: 10, 3: 7}


def id_of(topic: str) -> str:
    """An id as topics have them: it looks like a random UUID, and is always the same."""
    return uuid.UUID(bytes=hashlib.md5(topic.encode()).digest(), version=4).hex


def fill(log: MemoryLog, name: str, partitions: int = PARTITIONS, **settings: Any) -> None:
    with Producer(log.create_topic(Topic(name, id_of(name), partitions, **settings))) as out:
        for partition, number in itertools.product(range(partitions), range(10)):
            out.send(b"x", partition=partition, timestamp=100 + number)


class Worker:
    """A member, moved by hand."""

    def __init__(self, registry: Registry, log: MemoryLog, name: str, topic: str = "orders", begins: int = 0) -> None:
        source = log.topic(topic)
        self.registry, self.lease = registry, registry.lease(30)
        self.started: list[tuple[int, int]] = []
        member = Member(name, source.id, source.name, source.partitions, "host", 7, time.time())
        keys_max = registry.limits.commit_keys_max
        self.incarnation = f"{name}-{uuid.uuid4().hex[:6]}"
        self.protocol = MemberProtocol(
            KEYS,
            self.incarnation,
            member,
            self,
            lambda _number, first: max(begins, first),
            time.time,
            keys_max,
            handover_s=30.0,
        )

    def drive(self, steps: Steps[Any]) -> Any:
        return drive(steps, self.registry, self.lease)

    def join(self) -> Worker:
        self.drive(self.protocol.join())
        return self

    def settle(self) -> Worker:
        while self.drive(self.protocol.look(time.monotonic())):
            pass
        return self

    def commit(self, done: dict[int, int]) -> list[int]:
        for partition, offset in done.items():
            lane = self.protocol.held[partition].lane
            lane.done = lane.position = offset
        return self.drive(self.protocol.commit(done))  # type: ignore[no-any-return]

    def late_write(self, partition: int, offset: int) -> Write:
        """A checkpoint that is on its way."""
        holding = self.protocol.held[partition]
        assert holding.checkpoint_version is not None
        key = KEYS.checkpoint(id_of("orders"), partition)
        expect = {KEYS.owner(id_of("orders"), partition): holding.version, key: holding.checkpoint_version}
        return Write(expect, {key: Checkpoint(offset, 0.0, "anna", holding.epoch).dump()})

    def leave(self) -> None:
        self.drive(self.protocol.commit(list(self.protocol.held), is_last=True))
        self.lease.close()

    def die(self) -> None:
        self.lease.close()

    def assigned(self, partition: int, epoch: int, offset: int) -> Lane:
        self.started.append((partition, offset))
        return Lane(partition, epoch, offset)

    def revoked(self, lane: Lane) -> None: ...

    def released(self, lane: Lane) -> None: ...

    def lost(self, lane: Lane) -> None: ...


def checkpoints(registry: Registry, topic: str = "orders") -> dict[int, int]:
    entries = registry.scan(f"{KEYS.checkpoints}{id_of(topic)}/")
    return {int(entry.key[-5:]): Checkpoint.load(entry.key, entry.value).offset for entry in entries}


def owner(registry: Registry, partition: int) -> Owner:
    entry = registry.get(KEYS.owner(id_of("orders"), partition))
    assert entry is not None
    return Owner.load(entry.key, entry.value)


def pause(registry: Registry, partition: int, offset: int = 3, topic: str = "orders") -> str:
    key = KEYS.pause(id_of(topic), partition)
    registry.commit(put={key: Paused(offset, "ValueError: no", 5.0, "anna").dump()})
    return key


def before_commit(registry: Registry, monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Let it happen once, between what the next commit's caller has read and that commit."""
    commit = registry.commit
    actions = [action]

    def interrupted(*arguments: Any, **named: Any) -> dict[str, int]:
        if actions:
            actions.pop()()
        return commit(*arguments, **named)

    monkeypatch.setattr(registry, "commit", interrupted)
