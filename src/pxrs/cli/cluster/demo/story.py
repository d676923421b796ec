"""What happens in the demo, and when: producers and consumers run; a broker is killed, then a storage node.

Every wait has a bound: a demo that cannot go on says what it waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import pxrs
from pxrs.cli.cluster.demo.pauses import Pause, longest
from pxrs.cli.cluster.demo.traffic import TOPIC, Consuming, Producing
from pxrs.cli.cluster.local import LocalCluster
from pxrs.cli.cluster.process import Process
from pxrs.cli.demo.account import Line, account, are_right
from pxrs.cli.demo.samples import Mark, Sample
from pxrs.cluster.status import ClusterStatus, read_status
from pxrs.errors import PxrsError
from pxrs.registry.contract import Registry

PARTITIONS: Final = 4
MEMBERS: Final = 2
STEADY_S: Final = 2.0
"""How long nothing happens before each kill, and after the last one."""
WAIT_S: Final = 60.0
LOOK_S: Final = 0.1


class Stuck(Exception):
    """The demo cannot go on."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A process that was killed, and what it cost."""

    name: str
    at: float
    """Monotonic."""
    produce: Pause
    consume: Pause


@dataclass(slots=True)
class Ending:
    lines: list[Line]
    kills: list[Kill]
    messages: int
    redone: int
    problems: list[str] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        return are_right(self.lines)


class Story:
    """One run. say: prints a line."""

    def __init__(self, cluster: LocalCluster, registry: Registry, say: Callable[[str], None]) -> None:
        self._cluster, self._registry, self._say = cluster, registry, say
        self._producing = Producing(cluster.plan.address, PARTITIONS)
        self._consuming = Consuming(cluster.plan.address, MEMBERS)
        self._began = time.monotonic()
        self._ended_at = self._began
        """When the producers were told to send no more."""
        self._killed: list[tuple[str, float]] = []
        self._lacking = 0
        """How many ledgers lacked copies when `_has_all_copies` last looked. The account has this number: on a busy
        machine a storage node may lose its lease a moment later, which says nothing about the messages."""
        self.samples: list[Sample] = []
        self.marks: list[Mark] = []

    def run(self) -> Ending:
        """Raises Stuck, PxrsError."""
        with pxrs.open(self._cluster.plan.address) as hub:
            hub.create_topic(TOPIC, partitions=PARTITIONS)
        self._until(lambda: None not in (self._owners() or (None,)), "own the partitions", "the brokers")
        self._began = time.monotonic()
        try:
            self._producing.start()
            self._consuming.start()
            self._flow("be handled")
            self._say(f"{PARTITIONS} producers and {MEMBERS} consumers run; each message is stored on three nodes")
            self._rest()
            self._kill_broker()
            self._rest()
            self._kill_node()
            self._rest()
        finally:
            self._ended_at = time.monotonic()
            self._producing.stop()
        sent = len(self._producing.acknowledged)
        try:
            self._until(lambda: self._consuming.handled >= sent, "handle all messages", "the consumers")
            self._say(f"all {sent:,} messages are handled")
            self._until(self._has_all_copies, "make all copies", "the brokers")
            self._say("every entry has three copies again")
        finally:
            self._consuming.stop()
        return self._ending()

    def _kill_broker(self) -> None:
        victim = self._cluster.brokers[0]
        other = self._cluster.brokers[1].name
        self._kill(victim)
        self._until(lambda: set(self._owners()) == {other}, "take over", other)
        took_s = time.monotonic() - self._killed[-1][1]
        self._say(f"{other} owns all partitions {took_s:.2f} s after {victim.name} was [red]killed[/]")
        self._flow("be acknowledged again")
        victim.start()
        self._until(lambda: victim.is_ready(victim), "start again", victim.name)
        self._say(f"{victim.name} was restarted")

    def _kill_node(self) -> None:
        in_use = {node for ledger in self._status().ledgers for _, nodes in ledger.fragments[-1:] for node in nodes}
        addresses = {node.address for node in self._status().nodes if node.id in in_use}
        victim = next(
            process
            for process, port in zip(self._cluster.storage, self._cluster.plan.storage, strict=True)
            if any(address.endswith(f":{port}") for address in addresses)
        )
        self._kill(victim)
        self._flow("be acknowledged again")
        self._say(f"messages are acknowledged without {victim.name}, which was [red]killed[/]; another takes its place")

    def _kill(self, process: Process) -> None:
        now = time.monotonic()
        process.kill()
        self._killed.append((process.name, now))
        self.marks.append(Mark(now - self._began, f"{process.name}: kill -9"))

    def _flow(self, what: str) -> None:
        """Wait until a message of every partition that was sent from now on is acknowledged, and one is handled."""
        now = time.monotonic()
        self._until(
            lambda: (
                all(found and found[-1] > now for found in list(self._producing.moments.values()))
                and any(found[-1] > now for found in list(self._consuming.moments.values()))
            ),
            what,
            "the messages",
        )

    def _rest(self) -> None:
        until = time.monotonic() + STEADY_S
        self._until(lambda: time.monotonic() >= until, "run", "the producers")

    def _until(self, condition: Callable[[], bool], what: str, who: str) -> None:
        until = time.monotonic() + WAIT_S
        while not condition():
            for error in (*self._producing.errors, *self._consuming.errors):
                raise Stuck(error)
            if time.monotonic() > until:
                raise Stuck(f"{who} did not {what} within {WAIT_S:g} s. Is the machine very busy?")
            self._sample()
            time.sleep(LOOK_S)

    def _sample(self) -> None:
        sent = len(self._producing.acknowledged)
        at_s = time.monotonic() - self._began
        self.samples.append(Sample(at_s, sent, self._consuming.handled, None, self._owners()))

    def _status(self) -> ClusterStatus:
        return read_status(self._registry)

    def _owners(self) -> tuple[str | None, ...]:
        """The owner of each partition; None if there is none."""
        try:
            rows = [each for each in self._status().partitions if each.topic == TOPIC]
        except PxrsError:
            return ()
        return tuple(each.owner or None for each in rows)

    def _has_all_copies(self) -> bool:
        found = self._status()
        self._lacking = len(found.under_replicated)
        return not (found.under_replicated or found.without_owner)

    def _ending(self) -> Ending:
        found = account(self._producing.acknowledged, self._consuming.told)
        errors = len(self._producing.errors) + len(self._consuming.errors)
        lines = [
            *found.lines(len(self._producing.acknowledged)),
            Line("errors of producers and consumers", "0", str(errors)),
            Line("ledgers that lack copies", "0", f"{self._lacking:,}"),
        ]
        ends = [*(at for _, at in self._killed[1:]), self._ended_at]
        kills = [
            Kill(name, at, longest(self._producing.moments, at, end), longest(self._consuming.moments, at, end))
            for (name, at), end in zip(self._killed, ends, strict=True)
        ]
        return Ending(lines, kills, found.messages, found.redone)
