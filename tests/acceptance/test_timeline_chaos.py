"""V8: the timeline of owners, rebuilt from `_events`, is exact while processes are killed between a claim and its
event, stopped and woken, and while administrators reset and delete the group, delete a topic, and decide about failed
messages.

One short run on files belongs to `make test`; with PXRS_SOAK it is long, and runs on every store.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from pxrs.clock import SYSTEM
from pxrs.errors import GroupError, RegistryUnavailable, UnknownTopic
from pxrs.events.model import Json
from pxrs.events.timeline import owners
from pxrs.group.records import Checkpoint, Keys, Owner
from pxrs.hub import Hub
from pxrs.log.numbering import TopicPartition
from pxrs.testing.accounting import DIED, FAILING, differences_of_timeline, tell_commits
from pxrs.testing.servers import EtcdServer, PostgresServer, ZooKeeperServer
from tests.acceptance.test_group_chaos import Chaos

IS_SOAK = bool(os.environ.get("PXRS_SOAK"))
EVENTS = 40 if IS_SOAK else 4
STORES = ("file", "sqlite", "postgresql", "etcd", "zookeeper") if IS_SOAK else ("file",)
PARTITIONS = 4


@pytest.fixture(params=STORES)
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    servers: Mapping[str, Callable[[], PostgresServer | EtcdServer | ZooKeeperServer]] = {
        "postgresql": PostgresServer,
        "etcd": EtcdServer,
        "zookeeper": ZooKeeperServer,
    }
    with ExitStack() as stack:
        if request.param in servers:
            yield stack.enter_context(servers[request.param]()).url
        else:
            yield "-" if request.param == "file" else f"sqlite:///{tmp_path}/registry.db"


class Lost:
    """The recorder of an administrator who is killed before any event is stored."""

    def record(self, name: str, on_stored: Callable[[], None] | None = None, /, **fields: Json) -> None: ...

    def audit(self, action: str, /, **fields: Json) -> None: ...


class Administrators:
    """Change the group at random. What they commit is in a journal, as what the workers commit."""

    def __init__(self, hub: Hub, chaos: Chaos) -> None:
        self._hub, self._random = hub, chaos.random
        self.journal = chaos.folder / "administrators.journal"
        self.counts = dict.fromkeys(("reset", "delete", "delete_topic", "decide"), 0)

        def note(place: TopicPartition, owner: Owner) -> None:
            id, partition = place
            with self.journal.open("a") as journal:
                journal.write(f"owner {id} {partition} {owner.epoch} {owner.name or '-'} {SYSTEM.now()}\n")

        def ignore(place: TopicPartition, checkpoint: Checkpoint, moment: float) -> None: ...

        tell_commits(hub.registry, Keys("g"), ignore, note)

    def act(self, kind: str) -> None:
        group = self._hub.group("g")
        if self._random.random() < 0.3:
            setattr(group, "_recorder", Lost())  # noqa: B010 - for this one, and not for its class
        try:
            if kind == "reset":
                group.reset("earliest", force=True)
            elif kind == "delete":
                group.delete(force=True)
            elif kind == "delete_topic":
                self._hub.delete_topic("u")
                self._hub.create_topic("u", partitions=PARTITIONS)
            else:
                self._decide()
        except (GroupError, UnknownTopic):  # it changes too fast, or there is nothing to decide about
            return
        except RegistryUnavailable:  # on SQLite, a process that was stopped in a transaction has the only lock
            assert "sqlite" in self._hub.registry.url
            return
        self.counts[kind] += 1

    def _decide(self) -> None:
        group = self._hub.group("g")
        for each in group.describe().partitions:
            if each.paused is not None:
                decision = group.retry if self._random.random() < 0.5 else group.skip
                decision(each.topic, each.partition)


def test_v8_the_timeline_is_exact_through_kills_stops_pauses_resets_and_deletions(
    registry: str, tmp_path: Path
) -> None:
    with Chaos(tmp_path, registry, ["t", "u"], ["t", "u"], ["t"], dies=0.05) as chaos:
        hub = chaos.open()
        for name in ("t", "u"):
            hub.create_topic(name, partitions=PARTITIONS)
        administrators = Administrators(hub, chaos)
        sent = 0

        def load() -> None:
            nonlocal sent
            with hub.producer("t") as out:
                for _ in range(20):
                    sent += 1
                    out.send(FAILING if sent % 150 == 0 else b"%d" % sent, b"key-%d" % (sent % 100))

        kinds = [*administrators.counts]
        plan = [kinds[number // 2 % len(kinds)] if number % 2 else None for number in range(EVENTS)]
        for some in plan:
            chaos.go_on(hub, load, events=1, first=0 if chaos.workers else 3)
            if some is not None:
                administrators.act(some)
        chaos.calm_down(hub)
        codes = [worker.end() for worker in chaos.running()]
        # 1: a worker ends with an error if its topic is deleted.
        assert {*codes} <= {0, 1, DIED, -signal.SIGTERM}, chaos.tell(f"{codes}")
        hub.run_upkeep()  # records the last owners
        journals = [*chaos.journals, administrators.journal]
        assert differences_of_timeline(hub, "g", journals) == [], chaos.tell("the timeline")
        tenures = [each for found in owners(hub.events(group="g")).values() for each in found]
        print(f"v8 SEED={chaos.seed}: {len(tenures)} epochs, {administrators.counts}")  # noqa: T201
        assert min(administrators.counts.values()) > 0 or not IS_SOAK
