"""Real processes of one group on every store, killed, stopped, woken, joined and left at random under load."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import create_engine, text

import pxrs
from pxrs.hashing import xxh64
from pxrs.hub import Hub
from pxrs.sources import sql_table
from pxrs.testing.accounting import (
    DIED,
    Account,
    Worker,
    account,
    checkpoints,
    differences_of_timeline,
    members,
    read_journals,
)
from pxrs.testing.servers import EtcdServer, PostgresServer, ZooKeeperServer

EVENTS = 60 if os.environ.get("PXRS_SOAK") else 10
DIES = 0.03 if os.environ.get("PXRS_SOAK") else 0.06
"""How probably a worker kills itself after each change of an owner, before it records the event."""
PARTITIONS = 8
TTL_S = 1.5
PATIENCE_S = 60.0
WRITERS = 4
WRITER = Path(__file__).with_name("table_writer.py")
OLD_ROWS = 100
"""Those that the old consumer had handled."""
WAITING_ROWS = 500
"""Those that it had not."""


@pytest.fixture(params=["file", "sqlite", "postgresql", "etcd", "zookeeper"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with ExitStack() as stack:
        match request.param:
            case "file":
                yield "-"
            case "sqlite":
                yield f"sqlite:///{tmp_path}/registry.db"
            case "postgresql":
                yield stack.enter_context(PostgresServer()).url
            case "etcd":
                yield stack.enter_context(EtcdServer()).url
            case "zookeeper":
                yield stack.enter_context(ZooKeeperServer()).url


class Chaos(ExitStack):
    """Workers that come and go by seed, while messages are sent. What was started is ended with it."""

    def __init__(
        self, folder: Path, registry: str, *topics: str | Sequence[str] | Mapping[str, Any], dies: float = 0.0
    ) -> None:
        """topics: what workers read: the first one the first of these, the second one the second, and so on in turn.
        dies: how probably a worker kills itself after each change of an owner (`Worker`)."""
        super().__init__()
        self.dies = dies
        self.seed = int(os.environ.get("SEED", time.time_ns() % 1_000_000))
        self.random = random.Random(self.seed)
        self.folder, self.registry, self.topics = folder, registry, topics
        self.url = str(folder / "data")
        self.workers: list[Worker] = []
        self.stopped: dict[Worker, float] = {}
        self.leaving: list[Worker] = []
        self.stops = 0

    def open(self) -> Hub:
        hub = self.enter_context(pxrs.open(self.url, registry=None if self.registry == "-" else self.registry))
        hub.registry.get("x")  # open, so that its tables are there before the workers race for them
        return hub

    def start(self) -> Worker:
        number = len(self.workers)
        topic = self.topics[number % len(self.topics)]
        worker = Worker(self.url, self.registry, topic, "g", f"w{number}", self.folder, TTL_S, self.dies)
        self.workers.append(self.enter_context(worker))
        return worker

    def running(self) -> list[Worker]:
        gone = {*self.stopped, *self.leaving}
        return [worker for worker in self.workers if worker.is_running and worker not in gone]

    def go_on(self, hub: Hub, load: Callable[[], None], events: int = EVENTS, first: int = 3) -> None:
        """So many first workers, and all the events, while there is load between them."""
        begun = [self.start() for _ in range(first)]
        # So that the events do not go to processes that are starting: it takes some as long as several events.
        self.eventually(
            lambda: not begun or {each.name for each in begun if each.is_running} <= members(hub.registry, "g"),
            lambda: "the first members do not join",
        )
        for _ in range(events):
            until = time.monotonic() + self.random.uniform(0.05, 0.6)
            while time.monotonic() < until:
                load()
                time.sleep(0.01)
            self.event()

    def event(self) -> None:
        kind = self.random.choice(["kill", "stop", "stop", "cont", "join", "leave"])
        running = self.running()
        if kind == "cont" and self.stopped:
            worker = self.random.choice(list(self.stopped))
            del self.stopped[worker]
            worker.signal(signal.SIGCONT)
            return
        if kind == "join" or len(running) < 2:
            self.start()
            return
        # Rather one that has something to lose: on a busy machine many are still starting.
        worker = self.random.choice([each for each in running if each.journal.exists()] or running)
        if kind == "leave":
            self.leaving.append(worker)
            worker.signal(signal.SIGTERM)
        elif kind == "kill":
            worker.signal(signal.SIGKILL)
            worker.process.wait(10)  # so that it does not count among those that run
        elif kind == "stop" and not (self.registry.startswith("sqlite") and self.stopped):
            worker.signal(signal.SIGSTOP)
            self.stops += 1
            self.stopped[worker] = time.monotonic()

    def calm_down(self, hub: Hub) -> None:
        """Nobody is stopped any more, and two at least run, one of them with all topics. From now on none kills itself
        that was not started to."""
        self.dies = 0.0
        if self.registry.startswith("sqlite"):
            for worker in self.stopped:
                self._stop_without_lock(worker)
        stopped = {worker.name for worker in self.stopped}
        self.eventually(lambda: not stopped & members(hub.registry, "g"), lambda: "a stopped member is still there")
        for worker in self.stopped:  # as zombies
            worker.signal(signal.SIGCONT)
        self.stopped.clear()
        before = set(self.workers)
        while len(self.running()) < 2 or all(
            worker.topic != self.topics[0] or worker in before for worker in self.running()
        ):
            self.start()

    def _stop_without_lock(self, worker: Worker) -> None:
        """On SQLite, a process that was stopped in a transaction has the database's only lock, and nobody can take over
        from it. Let it run for a moment and stop it again, until the lock can be taken."""

        def is_without() -> bool:
            place = self.registry.removeprefix("sqlite:///")
            # Others take the lock for milliseconds; a second is enough to get it from them.
            with closing(sqlite3.connect(place, timeout=1, isolation_level=None)) as connection:
                try:
                    connection.execute("BEGIN IMMEDIATE")
                except sqlite3.OperationalError:
                    worker.signal(signal.SIGCONT)
                    time.sleep(self.random.uniform(0.01, 0.1))
                    worker.signal(signal.SIGSTOP)
                    self.stops += 1
                    return False
                return True

        self.eventually(is_without, lambda: f"{worker.name} has the lock whenever it is stopped")

    def end(self) -> None:
        codes = {worker: worker.end() for worker in (*self.running(), *self.leaving)}
        # One that was sent away while it was still starting had nothing to give up.
        # Some end themselves when they give up a partition.
        codes = {worker: 0 if code == DIED else code for worker, code in codes.items()}
        failed = {worker.name: code for worker, code in codes.items() if code and worker.journal.exists()}
        assert not failed, self.tell(f"{failed}")
        assert set(codes.values()) <= {0, -signal.SIGTERM}, self.tell(f"{codes.values()}")

    @property
    def journals(self) -> list[Path]:
        return [worker.journal for worker in self.workers]

    def check(self, count: int, messages: Mapping[int, int | Sequence[int]], starts: Mapping[int, int] = {}) -> Account:
        """Nothing lost, nothing out of order, nothing twice but what no checkpoint told of."""
        found = account(read_journals(self.journals), messages, starts)
        assert found == Account(count, 0, 0, found.redone, 0, found.late, found.ownerships), self.tell(f"{found}")
        # A handler that is running when its process is stopped goes on when it is woken: one for each stop (G8).
        assert found.late <= self.stops, self.tell(f"{found}")
        return found

    def eventually(self, check: Callable[[], bool], tell: Callable[[], str]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not check():
            assert time.monotonic() < until, self.tell(tell())
            time.sleep(0.05)

    def tell(self, what: str) -> str:
        errors = "\n".join(f"{worker.name}: {worker.errors.read_text()[-2000:]}" for worker in self.workers)
        return f"SEED={self.seed}: {what}\n{errors}"


@pytest.mark.sampled(5)
def test_x3_x6_x11_random_kills_stops_joins_and_leaves_leave_an_exact_account(registry: str, tmp_path: Path) -> None:
    """On files, most workers read two topics, and every third one reads one of them."""
    read: list[str | list[str]] = [["t", "u"], ["t", "u"], ["t"]] if registry == "-" else ["t"]
    with Chaos(tmp_path, registry, *read, dies=DIES) as chaos:
        hub = chaos.open()
        topics = [hub.create_topic("t", partitions=PARTITIONS)]
        if len(read) > 1:
            topics.append(hub.create_topic("u", partitions=PARTITIONS // 2))
        outs = [hub.producer(topic.name) for topic in topics]
        sent = 0

        def load() -> None:
            nonlocal sent
            for _ in range(20):
                outs[sent % len(outs)].send(b"%d" % sent, b"key-%d" % (sent % 100))
                sent += 1
            for out in outs:
                out.flush()

        chaos.go_on(hub, load)
        chaos.calm_down(hub)
        ends = dict(enumerate(topic.end(p) for topic in topics for p in range(topic.partitions)))
        ids = [topic.id for topic in topics]
        chaos.eventually(
            lambda: checkpoints(hub.registry, "g", *ids) == list(ends.values()),
            lambda: f"{checkpoints(hub.registry, 'g', *ids)} of {ends}",
        )
        chaos.end()
        chaos.check(sent, ends)
        hub.run_upkeep()  # records the last owners, if a member was killed before it had done so
        assert differences_of_timeline(hub, "g", chaos.journals) == [], chaos.tell("the timeline")


# Somebody's table.

ORDERS = {
    "sqlite": "CREATE TABLE orders (id INTEGER PRIMARY KEY AUTOINCREMENT, account TEXT, body TEXT)",
    "postgresql": "CREATE TABLE orders (id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, account TEXT, body TEXT)",
}
NOTIFYING = """
CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NOTIFY orders; RETURN NULL; END $$;
CREATE TRIGGER tell AFTER INSERT ON orders FOR EACH STATEMENT EXECUTE FUNCTION tell()
"""


class Place(NamedTuple):
    """A database with the table `orders`, and where the group that reads it keeps its things."""

    url: str
    registry: str
    settings: Mapping[str, Any]
    """For `sql_table`."""

    @property
    def kind(self) -> str:
        return self.url.partition(":")[0]

    def run(self, statement: str, *rows: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        engine = create_engine(self.url.replace("postgresql:", "postgresql+psycopg:"))
        with engine.begin() as connection:
            done = connection.execute(text(statement), list(rows) or None)
            found = [tuple(row) for row in done] if done.returns_rows else []
        engine.dispose()
        return found

    def ids(self) -> dict[int, list[int]]:
        """Those that are there, by partition. No partition is without: the rows from before see to that."""
        found: dict[int, list[int]] = {partition: [] for partition in range(PARTITIONS)}
        for number, key in self.run("SELECT id, account FROM orders ORDER BY id"):
            found[xxh64(key.encode()) % PARTITIONS].append(number)
        return found


@pytest.fixture(params=["postgresql", "postgresql and files", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    # Small pages and a small cache: there is always one to be read, and one to be thrown away.
    settings = {"key_column": "account", "value_column": "body", "partitions": PARTITIONS, "poll_s": 0.05}
    settings |= {"table": "orders", "page_bytes": 16_000, "cache_bytes": 100_000}
    with ExitStack() as stack:
        if request.param == "sqlite":
            url = registry = f"sqlite:///{tmp_path}/shop.db"
        else:
            server = stack.enter_context(PostgresServer(settings={"track_commit_timestamp": "on", "fsync": "off"}))
            url = registry = server.url
        if request.param == "postgresql and files":
            registry, settings["notify_channel"] = "-", "orders"
        place = Place(url, registry, {"url_or_engine": url, **settings})
        place.run(ORDERS[place.kind])
        if "notify_channel" in settings:
            place.run(NOTIFYING)
        rows = [{"account": f"account-{n % 40}", "body": "from before"} for n in range(OLD_ROWS + WAITING_ROWS)]
        place.run("INSERT INTO orders (account, body) VALUES (:account, :body)", *rows)
        place.run("DELETE FROM orders WHERE id % 10 = 3")
        yield place


class Writers:
    """Processes that write to the table; they too are killed, and stopped where that does not stop everybody."""

    def __init__(self, url: str, chaos: Chaos) -> None:
        self._url, self._chaos = url, chaos
        self._can_stop = not url.startswith("sqlite")  # there it may hold the lock that everybody needs
        self._all: list[subprocess.Popen[bytes]] = []
        self._stopped: subprocess.Popen[bytes] | None = None
        self._started = 0
        for _ in range(WRITERS):
            self._start()

    def disturb(self) -> None:
        """Now and then: about once a second."""
        chance = self._chaos.random
        if chance.random() > 0.02:
            return
        if self._stopped is not None:
            self.wake()
        elif self._can_stop and chance.random() < 0.6:
            self._stopped = chance.choice(self._all)
            self._stopped.send_signal(signal.SIGSTOP)
        else:
            killed = chance.choice(self._all)
            killed.kill()
            killed.wait(10)
            self._all.remove(killed)
            self._start()

    def wake(self) -> None:
        if self._stopped is not None:
            self._stopped.send_signal(signal.SIGCONT)
            self._stopped = None

    def end(self) -> None:
        self.wake()
        for writer in self._all:
            writer.send_signal(signal.SIGTERM)
        codes = {writer.wait(PATIENCE_S) for writer in self._all}
        assert codes <= {0, -signal.SIGTERM}, self._chaos.tell(f"writers ended with {codes}")

    def _start(self) -> None:
        self._started += 1
        command = [sys.executable, str(WRITER), self._url, f"{self._chaos.seed + self._started}"]
        writer = self._chaos.enter_context(subprocess.Popen(command))
        self._chaos.callback(writer.kill)  # before it is waited for, should the test fail
        self._all.append(writer)


@pytest.mark.sampled(3)
def test_x21_a_table_with_many_writers_is_read_exactly_from_an_old_checkpoint_on(place: Place, tmp_path: Path) -> None:
    start = OLD_ROWS + 1
    with Chaos(tmp_path, place.registry, place.settings) as chaos:
        hub = chaos.open()
        with sql_table(**place.settings) as source:
            hub.group("g", source).import_checkpoint(start, "orders")

        def reached() -> list[int]:
            return checkpoints(hub.registry, "g", source.id)

        def catch_up() -> dict[int, list[int]]:
            """The ids of each partition, when the group is behind the last of them."""
            ids = place.ids()
            chaos.eventually(
                lambda: all(at > ids[number][-1] for number, at in enumerate(reached())),
                lambda: f"{reached()} of {[each[-1] for each in ids.values()]}",
            )
            return ids

        writers = Writers(place.url, chaos)
        chaos.go_on(hub, writers.disturb)
        chaos.calm_down(hub)
        writers.wake()
        catch_up()  # with those who write
        writers.end()
        messages = catch_up()
        chaos.end()
        count = sum(number >= start for ids in messages.values() for number in ids)
        found = chaos.check(count, messages, dict.fromkeys(messages, start))
    gaps, late = max(map(max, messages.values())) - sum(map(len, messages.values())), late_rows(place)
    print(f"x21 SEED={chaos.seed}: {found}; {gaps} ids without a row, {late} rows behind a later one")  # noqa: T201
    assert gaps, "every id has its row: this has tried nothing"
    assert late or place.kind == "sqlite", "all rows came in the order of their ids: this has tried nothing"


def late_rows(place: Place) -> int:
    """How many rows came when one with a larger id was there already."""
    if place.kind == "sqlite":
        return 0
    moments = "SELECT id, pg_xact_commit_timestamp(xmin) AS moment FROM orders"
    following = "min(moment) OVER (ORDER BY id ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING)"
    compared = f"SELECT moment > {following} AS is_late FROM ({moments}) AS moments"
    ((count,),) = place.run(f"SELECT count(*) FROM ({compared}) AS compared WHERE is_late")
    return int(count)
