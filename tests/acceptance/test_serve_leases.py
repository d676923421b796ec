"""Leases of clients of `pxrs serve` (W2): a frozen client loses its lease although the server lives, and what it sends
later is refused; a client whose server was away for less than half of its lease loses nothing."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs.errors import Conflict, LeaseExpired, PxrsError
from pxrs.group.records import Checkpoint, Keys, Owner
from pxrs.hub import Hub
from pxrs.queue.records import TAKERS
from pxrs.registry import Entry
from pxrs.server.serving import ServerSettings, serving
from pxrs.server.settings import ServerLimits
from pxrs.testing.accounting import Account, Worker, account, checkpoints, members, read_journals
from pxrs.testing.actor import Actor
from pxrs.testing.proxy import Proxy
from pxrs.testing.queue_worker import DONE, JOBS, QueueWorker
from pxrs.testing.servers import HubServer
from pxrs.testing.waiting import aside, eventually
from tests.acceptance.queue_chaos import create_queues, values

PARTITIONS = 4
LATE_S = 10.0
"""For what the network has held back to arrive."""
TTL_S = 1.5
LASTING_TTLS_S = (8.0, 16.0, 32.0)
"""Tried in turn, until one is long enough for the server to be back within half of it on this machine."""
PATIENCE_S = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "data", forked=True) as server:
        yield server


@pytest.fixture
def hub(server: HubServer) -> Iterator[Hub]:
    """Opened without the server, for what is no part of what is tried."""
    with pxrs.open(server.data, upkeep=False) as hub:
        yield hub


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def send(hub: Hub, count: int) -> dict[int, int]:
    """Send messages to all partitions of `t`; where each partition ends then."""
    with hub.producer("t") as out:
        for number in range(count):
            out.send(b"%d" % number, partition=number % PARTITIONS)
    return {partition: hub.topic("t").end(partition) for partition in range(PARTITIONS)}


def wait_for(check: Callable[[], object], what: str) -> None:
    eventually(check, PATIENCE_S, what=what)


def test_w2_a_frozen_member_loses_its_partitions_although_the_server_lives(
    server: HubServer, hub: Hub, stack: ExitStack, tmp_path: Path
) -> None:
    topic = hub.create_topic("t", partitions=PARTITIONS)
    frozen, other = (
        stack.enter_context(Worker(server.url, "-", "t", "g", name, tmp_path, TTL_S)) for name in ("frozen", "other")
    )

    def caught_up() -> bool:
        return checkpoints(hub.registry, "g", topic.id) == list(ends.values())

    wait_for(lambda: members(hub.registry, "g") == {"frozen", "other"}, "both join")
    wait_for(lambda: frozen.journal.exists() and "assigned" in frozen.journal.read_text(), "partitions are assigned")
    ends = send(hub, 400)
    wait_for(lambda: frozen.journal.read_text().count("handled") > 5, "messages are handled")
    frozen.signal(signal.SIGSTOP)
    wait_for(lambda: members(hub.registry, "g") == {"other"}, "the frozen member loses its lease")
    assert server.is_ready()
    ends = send(hub, 400)
    wait_for(caught_up, "the other member reads everything")
    frozen.signal(signal.SIGCONT)
    wait_for(lambda: members(hub.registry, "g") == {"frozen", "other"}, "the frozen member comes back")
    ends = send(hub, 400)
    wait_for(caught_up, "both go on")
    assert [worker.end() for worker in (frozen, other)] == [0, 0], frozen.errors.read_text()
    found = account(read_journals([frozen.journal, other.journal]), ends)
    # One handler may run while the process is stopped, and goes on when it is woken (G8).
    assert found == Account(1200, 0, 0, found.redone, 0, found.late, found.ownerships)
    assert found.late <= 1


def test_w2_a_commit_of_a_frozen_queue_worker_that_arrives_after_its_lease_is_refused(
    server: HubServer, hub: Hub, stack: ExitStack, tmp_path: Path
) -> None:
    create_queues(hub)
    hub.queue(JOBS[0]).put_many(f"{number}" for number in range(500))
    worker = stack.enter_context(QueueWorker(server.url, "-", "frozen", tmp_path, TTL_S, 1, ["jobs"]))
    wait_for(lambda: worker.is_ready, "the worker starts")

    def halts() -> bool:
        if not worker.is_halted:
            worker.signal(signal.SIGHUP)  # again and again: the handler of SIGCONT takes it back
        return worker.is_halted

    def is_at_commit() -> bool:
        """The worker has checked its lease, and has not sent the commit yet. It also stops at takes."""
        worker.signal(signal.SIGCONT)
        wait_for(halts, "the worker stops")
        assert worker.is_running, worker.errors.read_text()
        last = worker.read().attempts[-1]
        return last.is_sent and not last.outcome and bool(last.taken)

    wait_for(is_at_commit, "the worker is about to commit")
    number = len(worker.read().attempts) - 1
    wait_for(lambda: not hub.registry.scan(TAKERS), "the frozen worker loses its lease")
    assert server.is_ready()
    done = values(hub, DONE)
    worker.signal(signal.SIGUSR1)  # begin no other transaction
    worker.signal(signal.SIGCONT)
    wait_for(lambda: worker.read().is_calm, "the worker ends its transaction")
    assert worker.read().attempts[number].outcome == "lost"
    assert values(hub, DONE) == done


def test_w2_a_checkpoint_that_arrives_after_another_member_has_taken_over_is_refused(tmp_path: Path) -> None:
    """The network holds the checkpoint back. The server itself tells that it came, and that it was refused. Tried
    again if the network has held back a renewal of the lease and was cut before the checkpoint was sent."""
    for number in range(5):
        (tmp_path / f"{number}").mkdir()
        with ExitStack() as stack:
            if is_late_checkpoint_refused(tmp_path / f"{number}", stack):
                return
    raise AssertionError("no checkpoint was sent in time")


def is_late_checkpoint_refused(tmp_path: Path, stack: ExitStack) -> bool:
    """Whether the checkpoint came at all: then it was refused."""
    hub = stack.enter_context(pxrs.open(tmp_path / "data", upkeep=False))
    topic = hub.create_topic("t", partitions=1)
    with hub.producer("t") as out:
        for number in range(10):
            out.send(b"%d" % number)
    seen: list[tuple[int, Exception | None]] = []
    stack.enter_context(pytest.MonkeyPatch.context()).setattr(
        hub.registry, "commit", noting(hub.registry.commit, Keys("g").checkpoints, seen)
    )
    url = stack.enter_context(serving(hub))
    host, port = url.removeprefix("pxrs://").split(":")
    proxy = stack.enter_context(Proxy(host, int(port)))
    late_hub = stack.enter_context(pxrs.open(f"pxrs://{proxy.host}:{proxy.port}"))
    late = stack.enter_context(late_hub.consumer("t", group="g", lease_ttl=TTL_S, commit_interval=60, ack="manual"))
    messages = late.poll(4, timeout=PATIENCE_S)
    for message in messages:
        late.ack(message)
    proxy.hold_requests()
    late_commit = aside(late.commit)
    proxy.wait_for_request(PATIENCE_S)
    proxy.reset_connections()  # what was sent still arrives, and nothing that takes it back
    wait_for(lambda: not members(hub.registry, "g"), "the late member loses its lease")
    other = stack.enter_context(
        stack.enter_context(pxrs.open(url)).consumer("t", group="g", lease_ttl=60, commit_interval=60, ack="manual")
    )
    again = other.poll(10, timeout=PATIENCE_S)
    for message in again:
        other.ack(message)
    other.commit()
    assert [message.offset for message in again] == list(range(len(again)))  # nothing was checkpointed
    assert checkpoints(hub.registry, "g", topic.id) == [len(again)]
    seen.clear()
    proxy.release_requests()
    until = time.monotonic() + LATE_S
    while not seen:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    offset, error = seen[0]
    assert offset == len(messages)
    assert isinstance(error, Conflict | LeaseExpired), error
    assert checkpoints(hub.registry, "g", topic.id) == [len(again)]
    assert isinstance(late_commit.exception(PATIENCE_S), PxrsError | None)
    return True


def noting(
    commit: Callable[..., Any], prefix: str, seen: list[tuple[int, Exception | None]]
) -> Callable[..., dict[str, int]]:
    """The commit; what becomes of those that write a checkpoint is noted: its offset, and the error."""

    def note(expect: Any = None, put: Any = None, *rest: Any, **named: Any) -> dict[str, int]:
        offsets = [Checkpoint.load(key, value).offset for key, value in (put or {}).items() if key.startswith(prefix)]
        try:
            versions: dict[str, int] = commit(expect or {}, put or {}, *rest, **named)
        except PxrsError as error:
            seen.extend((offset, error) for offset in offsets)
            raise
        seen.extend((offset, None) for offset in offsets)
        return versions

    return note


def test_w5_a_server_that_stops_does_not_wait_for_a_frozen_client(stack: ExitStack) -> None:
    """Meanwhile the other clients have no server, and most have a lease of 10 s."""
    long_s = 3 * PATIENCE_S
    limits = ServerLimits(drain_s=long_s, keepalive_s=long_s, keepalive_timeout_s=long_s)
    hub = stack.enter_context(pxrs.open("memory:"))
    serve = serving(hub, ServerSettings(limits=limits))
    actor = stack.enter_context(Actor(serve.__enter__()))
    actor.send("wait_change", prefix="a/", timeout=long_s)
    assert actor.receive() == "watching"
    actor.signal(signal.SIGSTOP)
    aside(lambda: serve.__exit__(None, None, None)).result(PATIENCE_S)


def test_w2_a_client_whose_server_is_away_for_less_than_half_its_lease_loses_nothing(
    server: HubServer, hub: Hub, stack: ExitStack, tmp_path: Path
) -> None:
    hub.create_topic("t", partitions=PARTITIONS)
    create_queues(hub)
    for ttl in LASTING_TTLS_S:
        folder = tmp_path / f"{ttl}"
        folder.mkdir()
        with ExitStack() as clients:
            if outage(server, hub, clients, folder, ttl) < ttl / 2:
                return
    pytest.fail("the machine is too slow: the server was not back within half of the longest lease")


def outage(server: HubServer, hub: Hub, clients: ExitStack, folder: Path, ttl: float) -> float:
    """Kill the server and start it again after most of half a lease. Checks that nobody has lost anything, if it was
    back in time. For how long it was away."""
    group = f"g{ttl:g}"
    wait_for(lambda: not hub.registry.scan(TAKERS), "the lease of the taker with a shorter one has ended")
    workers = [
        clients.enter_context(Worker(server.url, "-", "t", group, f"{group}-{number}", folder, ttl))
        for number in range(2)
    ]
    taker = clients.enter_context(QueueWorker(server.url, "-", f"taker{ttl:g}", folder, ttl, 1, ["coins"]))
    names = {worker.name for worker in workers}
    wait_for(lambda: members(hub.registry, group) == names, "the members join")
    share = dict.fromkeys(names, PARTITIONS // len(workers))
    wait_for(lambda: Counter(owner.name for owner in owners(hub, group)) == share, "each has its share")
    wait_for(lambda: taker.is_ready and hub.registry.scan(TAKERS), "the queue worker takes")
    ends = send(hub, 100)
    wait_for(lambda: all("kept" in text_of(worker.journal) for worker in workers), "messages are handled")
    before = held(hub, group)
    away_since = time.monotonic()
    server.kill()
    time.sleep(0.4 * ttl)  # it is away for so long
    server.start()
    away_s = time.monotonic() - away_since
    kept = [text_of(worker.journal).count("kept") for worker in workers]
    written = taker.journal.stat().st_size
    ends = send(hub, 100)
    wait_for(
        lambda: all(text_of(worker.journal).count("kept") > count for worker, count in zip(workers, kept, strict=True)),
        "all members write checkpoints again",
    )
    wait_for(lambda: taker.journal.stat().st_size > written + 500, "the queue worker goes on")
    if away_s < ttl / 2:
        if held(hub, group) != before and ttl < LASTING_TTLS_S[-1]:
            return ttl  # too slow for so short a lease: the longest one must last
        assert held(hub, group) == before
        wait_for(
            lambda: checkpoints(hub.registry, group, hub.topic("t").id) == list(ends.values()), "the group catches up"
        )
        assert [worker.end() for worker in workers] == [0, 0]
        count = sum(ends.values())
        found = account(read_journals([worker.journal for worker in workers]), ends)
        assert found == Account(count, 0, 0, 0, 0, 0, found.ownerships)
    return away_s


def owners(hub: Hub, group: str) -> list[Owner]:
    return [Owner.load(entry.key, entry.value) for entry in hub.registry.scan(Keys(group).owners)]


def held(hub: Hub, group: str) -> list[Entry]:
    """Who owns which partition, and who takes items: with the versions of these keys, which change with each claim."""
    return [*hub.registry.scan(Keys(group).owners), *hub.registry.scan(TAKERS)]


def text_of(journal: Path) -> str:
    return journal.read_text() if journal.exists() else ""
