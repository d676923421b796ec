"""Rows and checkpoint in one transaction (X20), on real databases: lost replies, lost partitions, dead processes.

Run as a program it is one of the processes: python test_transactions.py DATA REGISTRY ENGINE NAME LEASE_TTL
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import OperationalError

import pxrs
from pxrs.consumer.consumer import Consumer
from pxrs.consumer.transactions import Transactions, _Loop, _Taken
from pxrs.errors import InvalidGroup
from pxrs.group.records import Checkpoint, Keys, Owner
from pxrs.hub import Hub
from pxrs.testing.forked import Forked
from pxrs.testing.proxy import Proxy
from pxrs.testing.servers import PostgresServer

EVENTS = 150 if os.environ.get("PXRS_SOAK") else 8
PATIENCE_S = 60.0
PARTITIONS = 4
ACCOUNTS = 10


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@dataclass
class Place:
    """A registry with the user's tables beside it."""

    folder: Path
    registry: str
    engine_url: str
    exits: ExitStack
    engine: Engine = field(init=False)
    hub: Hub = field(init=False)

    def __post_init__(self) -> None:
        self.engine = create_engine(self.engine_url)
        self.exits.callback(self.engine.dispose)
        self.hub = self.exits.enter_context(pxrs.open(self.folder / "data", registry=self.registry))
        self.hub.registry.get("x")  # open, so that its tables are there
        self.run("CREATE TABLE balance (account INTEGER PRIMARY KEY, balance INTEGER NOT NULL)")
        self.run("CREATE TABLE done (part INTEGER, place INTEGER, name TEXT)")
        for account in range(ACCOUNTS):
            self.run(f"INSERT INTO balance VALUES ({account}, 0)")

    def run(self, statement: str) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(statement))

    @property
    def sum(self) -> int:
        with self.engine.connect() as connection:
            return int(connection.execute(text("SELECT sum(balance) FROM balance")).scalar_one())

    def rows(self) -> list[tuple[int, int, str]]:
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text("SELECT part, place, name FROM done ORDER BY 1, 2"))]

    def send(self, count: int, partitions: int = 1) -> int:
        """Messages 1, 2, 3, ...; returns their sum."""
        if "t" not in [topic.name for topic in self.hub.topics()]:
            self.hub.create_topic("t", partitions=partitions)
        out = self.hub.producer("t")
        for number in range(1, count + 1):
            out.send(b"%d" % number, b"key-%d" % number)
        out.flush()
        return count * (count + 1) // 2

    def consumer(self, **options: Any) -> Consumer:
        options = {"until": "end", "lease_ttl": 5.0, **options}
        return self.exits.enter_context(self.hub.consumer("t", "g", **options))

    def checkpoints(self) -> list[Checkpoint]:
        entries = self.hub.registry.scan(f"{Keys('g').checkpoints}{self.hub.topic('t').id}/")
        return [Checkpoint.load(entry.key, entry.value) for entry in entries]

    def take_away(self, partition: int = 0) -> None:
        """As a leader does whose patience has ended."""
        key = Keys("g").owner(self.hub.topic("t").id, partition)
        entry = self.hub.registry.get(key)
        assert entry is not None
        epoch = Owner.load(key, entry.value).epoch
        self.hub.registry.commit({key: entry.version}, {key: Owner(None, epoch + 1).dump()})


def place_on(database: str, tmp_path: Path, server: PostgresServer, exits: ExitStack, **options: object) -> Place:
    if database == "sqlite":
        url = engine_url = f"sqlite:///{tmp_path}/registry.db"
    else:
        url = server.create_database(f"d{uuid.uuid4().hex[:12]}")
        engine_url = url.replace("postgresql:", "postgresql+psycopg:")
    options = {"namespace": "prod", **options}
    return Place(tmp_path, f"{url}?{'&'.join(f'{k}={v}' for k, v in options.items())}", engine_url, exits)


@pytest.fixture
def exits() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path, server: PostgresServer, exits: ExitStack) -> Place:
    return place_on(request.param, tmp_path, server, exits)


@pytest.fixture
def postgresql(tmp_path: Path, server: PostgresServer, exits: ExitStack) -> Place:
    return place_on("postgresql", tmp_path, server, exits)


@pytest.fixture
def sqlite(tmp_path: Path, server: PostgresServer, exits: ExitStack) -> Place:
    return place_on("sqlite", tmp_path, server, exits)


def book(messages: list[pxrs.Message], db: Connection, name: str = "") -> None:
    sums: dict[int, int] = {}
    for message in messages:
        assert message.value is not None
        number = int(message.value)
        sums[number % ACCOUNTS] = sums.get(number % ACCOUNTS, 0) + number
        row = {"part": message.partition, "place": message.offset, "name": name}
        db.execute(text("INSERT INTO done VALUES (:part, :place, :name)"), row)
    for account, number in sorted(sums.items()):  # in one order, so that members do not wait for each other in a circle
        values = {"n": number, "account": account}
        db.execute(text("UPDATE balance SET balance = balance + :n WHERE account = :account"), values)


def eventually(condition: Callable[[], bool], what: str = "") -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, what or "it did not come true"
        time.sleep(0.01)


def loop_on(loop: Iterator[Any]) -> Iterator[Any]:
    """Go on with a loop that is under way; `for` would begin it anew."""
    while (found := next(loop, None)) is not None:
        yield found


def transactions(inbox: Consumer, engine: Any, max_messages: Any = 500) -> Transactions:
    loop = inbox.transactions(engine, max_messages)
    assert isinstance(loop, Transactions)
    return loop


def once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, extra: Callable[[], None], *, first: bool) -> None:
    """Do something once, before or after the method's first call."""
    original, calls = getattr(owner, name), itertools.count()

    def replaced(self: Any, *arguments: Any) -> Any:
        is_now = next(calls) == 0
        if is_now and first:
            extra()
        result = original(self, *arguments)
        if is_now and not first:
            extra()
        return result

    monkeypatch.setattr(owner, name, replaced)


class TestOneTransaction:
    def test_x20_rows_and_checkpoint_are_committed_together(self, place: Place) -> None:
        total = place.send(100, PARTITIONS)
        seen = []
        for batch, db in transactions(place.consumer(name="me"), place.engine, max_messages=7):
            assert 1 <= len(batch) <= 7
            assert len({message.partition for message in batch}) == 1
            book(batch, db)
            seen.append(batch)
            if len(seen) > 1:  # what came before is there for everybody, and this is not
                assert len(place.rows()) == sum(map(len, seen[:-1]))
        assert place.sum == total
        ends = [place.hub.topic("t").end(partition) for partition in range(PARTITIONS)]
        checkpoints = place.checkpoints()
        assert [each.offset for each in checkpoints] == ends
        assert {(each.by, each.epoch) for each in checkpoints} == {("me", 1)}

    def test_ordinary_commits_go_on_from_it(self, place: Place) -> None:
        place.send(20)
        inbox = place.consumer(until=None, commit_interval=60)
        loop = transactions(inbox, place.engine, max_messages=5)
        for _ in range(2):
            book(*next(loop))
        loop.close()
        assert [each.offset for each in place.checkpoints()] == [5]
        assert [message.offset for message in inbox.poll(5)] == [5, 6, 7, 8, 9]
        inbox.commit()
        assert [each.offset for each in place.checkpoints()] == [10]
        book(*next(loop := transactions(inbox, place.engine, max_messages=5)))
        next(loop)
        loop.close()
        assert [each.offset for each in place.checkpoints()] == [15]
        assert [row[1] for row in place.rows()] == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]

    def test_versions_are_drawn_as_the_registry_draws_them(self, place: Place) -> None:
        """Nobody may get a version that a transaction has used."""
        place.send(10)
        for batch, db in transactions(place.consumer(), place.engine, max_messages=5):
            book(batch, db)
        key = Keys("g").checkpoint(place.hub.topic("t").id, 0)
        entry = place.hub.registry.get(key)
        assert entry is not None
        assert place.hub.registry.commit(put={"other": b""})["other"] > entry.version

    def test_an_exception_in_the_body_undoes_the_rows_and_the_messages_come_again(self, place: Place) -> None:
        total = place.send(10)
        inbox = place.consumer()
        for attempt in range(2):
            try:
                for batch, db in transactions(inbox, place.engine):
                    book(batch, db)
                    raise RuntimeError(f"attempt {attempt}")
            except RuntimeError:  # with its traceback still at hand
                assert place.sum == 0
                assert [each.offset for each in place.checkpoints()] == [0]
                place.run("UPDATE balance SET balance = 0")  # nobody holds a lock
        for batch, db in transactions(inbox, place.engine):
            book(batch, db)
        assert place.sum == total

    def test_a_loop_that_is_entered_again_does_not_commit_what_it_was_left_with(self, place: Place) -> None:
        total = place.send(10)
        loop = transactions(place.consumer(), place.engine)
        for attempt in itertools.count():
            try:
                for batch, db in loop:
                    book(batch[:5], db)
                    if attempt < 2:
                        raise RuntimeError
                    book(batch[5:], db)
                break
            except RuntimeError:
                continue
        assert place.sum == total

    def test_break_undoes_what_is_in_hand(self, place: Place) -> None:
        place.send(10)
        for batch, db in transactions(place.consumer(), place.engine, max_messages=5):
            book(batch, db)
            if batch[0].offset == 5:
                break
        assert [row[1] for row in place.rows()] == [0, 1, 2, 3, 4]
        assert [each.offset for each in place.checkpoints()] == [5]

    def test_what_another_loop_was_left_with_comes_again(self, place: Place) -> None:
        total = place.send(10)
        inbox = place.consumer()
        for _ in inbox:
            break
        for batch, db in transactions(inbox, place.engine):
            book(batch, db)
        assert place.sum == total

    def test_commit_in_the_body_marks_nothing_done(self, postgresql: Place) -> None:
        place = postgresql
        place.send(10)
        inbox = place.consumer()
        for batch, db in transactions(inbox, place.engine):
            book(batch, db)
            inbox.commit()
            break
        assert [each.offset for each in place.checkpoints()] == [0]

    def test_a_partition_that_is_asked_for_moves_when_the_transaction_is_over(self, postgresql: Place) -> None:
        place = postgresql
        total = place.send(100, 2)
        revoked = threading.Event()
        first = place.consumer(until=None, on_revoked=lambda partitions: revoked.set())
        loop = transactions(first, place.engine, max_messages=10)
        batch, db = next(loop)
        book(batch, db, "first")
        second = place.consumer(until=None)
        if not revoked.wait(1):  # the other partition was given away, which nobody had in hand
            eventually(lambda: bool(second.assignment))
        else:
            assert not second.assignment
        batch, db = next(loop)  # not fenced: the release waits for it
        assert [row[2] for row in place.rows()] == ["first"] * 10
        loop.close()
        first.close()
        second.close()
        for batch, db in transactions(place.consumer(), place.engine):
            book(batch, db, "last")
        assert place.sum == total


class TestFence:
    def test_g4_rows_of_a_partition_that_was_taken_away_are_rolled_back(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        total = place.send(10)
        lost: list[int] = []
        inbox = place.consumer(on_lost=lost.extend)
        loop = transactions(inbox, place.engine)
        # SQLite lets nobody write while the transaction is open: so just before.
        once(monkeypatch, _Loop, "begin", place.take_away, first=True)
        epochs = []
        for batch, db in loop:
            epochs.append(batch[0].epoch)
            book(batch, db)
            assert len(epochs) == 1 or place.sum == 0
        assert lost == [0]
        assert len(epochs) == 2, "handed out again, once it was claimed again"
        assert epochs[1] > epochs[0]
        assert place.sum == total

    def test_g10_the_owner_can_be_fenced_while_the_body_runs(self, postgresql: Place) -> None:
        place = postgresql
        total = place.send(10)
        times = []
        for attempt, (batch, db) in enumerate(transactions(place.consumer(), place.engine)):
            book(batch, db)
            if attempt == 0:
                began = time.monotonic()
                place.take_away()
                times.append(time.monotonic() - began)
        assert times[0] < 5.0, "no lock of the body's is in the way"
        assert place.sum == total

    def test_x20_rows_of_a_zombie_never_appear(self, postgresql: Place) -> None:
        place = postgresql
        total = place.send(50)
        zombie = place.consumer(until=None, name="zombie", lease_ttl=3.0)
        loop = transactions(zombie, place.engine, max_messages=10)
        batch, db = next(loop)
        for message in batch:  # into rows that nobody else waits for: a stopped client keeps its locks
            values = {"place": message.offset}
            db.execute(text("INSERT INTO done VALUES (0, :place, 'zombie')"), values)
        lease, member = zombie._member.lease, zombie._member
        assert lease is not None
        with member.session.mutex:  # a process that is stopped does not look after its membership either
            lease.abandon()
            with pxrs.open(place.folder / "data", registry=place.registry) as hub:
                heir = hub.consumer("t", "g", until="end", name="heir")
                until = time.monotonic() + 30
                while not heir.assignment:  # one that has nothing is at the end at once: others read it
                    assert time.monotonic() < until
                    time.sleep(0.01)
                for theirs, connection in transactions(heir, place.engine):
                    book(theirs, connection, "heir")
        assert place.sum == total
        zombie._hand_out._ends = {0: 0}
        assert not list(loop_on(loop))
        assert {row[2] for row in place.rows()} == {"heir"}
        assert place.sum == total

    @pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
    def test_an_own_commit_in_between_is_no_loss(self, postgresql: Place, isolation: str) -> None:
        """The checkpoint has another version, and the same offset: as when the member has passed a gap."""
        place = postgresql
        total = place.send(10)
        key = Keys("g").checkpoint(place.hub.topic("t").id, 0)
        engine = create_engine(place.engine_url, isolation_level=isolation)
        lost: list[int] = []
        for attempt, (batch, db) in enumerate(transactions(place.consumer(on_lost=lost.extend), engine)):
            book(batch, db)
            if attempt == 0:
                entry = place.hub.registry.get(key)
                assert entry is not None
                place.hub.registry.commit({key: entry.version}, {key: entry.value})
        engine.dispose()
        assert attempt == (0 if isolation == "READ COMMITTED" else 1), "serialization failures are handed out again"
        assert not lost
        assert place.sum == total

    def test_r7_a_client_that_stops_before_commit_holds_no_row_for_long(
        self, tmp_path: Path, server: PostgresServer, exits: ExitStack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = place_on("postgresql", tmp_path, server, exits, timeout=2)
        total = place.send(10)
        key = Keys("g").owner(place.hub.topic("t").id, 0)

        def stop() -> None:
            entry = place.hub.registry.get(key)
            assert entry is not None
            place.hub.registry.commit({key: entry.version})  # it waits for the lock, and gets it

        once(monkeypatch, _Taken, "_fence", stop, first=False)
        attempts = 0
        for batch, db in transactions(place.consumer(), place.engine):
            attempts += 1
            book(batch, db)
        assert attempts == 2
        assert place.sum == total


class TestLostReplies:
    @pytest.fixture
    def through(self, postgresql: Place, server: PostgresServer) -> Iterator[tuple[Place, Engine, Proxy]]:
        with Proxy(server.host, server.port) as proxy:
            engine = create_engine(postgresql.engine_url.replace(f":{server.port}/", f":{proxy.port}/"))
            yield postgresql, engine, proxy
            engine.dispose()

    def consume(self, place: Place, engine: Engine, proxy: Proxy) -> list[int]:
        """The first offsets of the batches in the order in which they were handed out."""
        found = []
        for batch, db in transactions(place.consumer(), engine, max_messages=5):
            found.append(batch[0].offset)
            book(batch, db)
        return found

    def test_r5_a_commit_whose_reply_was_lost_is_not_redone(
        self, through: tuple[Place, Engine, Proxy], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place, engine, proxy = through
        total = place.send(15)
        once(monkeypatch, _Taken, "_fence", lambda: proxy.drop_replies(close_after=0.2), first=False)
        once(monkeypatch, _Taken, "end", proxy.restore, first=False)
        assert self.consume(place, engine, proxy) == [0, 5, 10]
        assert place.sum == total

    def test_r5_a_commit_that_never_arrived_is_redone(
        self, through: tuple[Place, Engine, Proxy], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place, engine, proxy = through
        total = place.send(15)
        once(monkeypatch, _Taken, "_fence", proxy.cut, first=False)
        once(monkeypatch, _Taken, "end", proxy.restore, first=False)
        assert self.consume(place, engine, proxy) == [0, 0, 5, 10]
        assert place.sum == total

    def test_r5_a_commit_that_lands_late_is_waited_for(
        self, through: tuple[Place, Engine, Proxy], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The client has given up while COMMIT is still on its way: a look at the rows would not find it."""
        place, engine, proxy = through
        total = place.send(15)
        settling, late = threading.Event(), []

        def deliver_late() -> None:
            proxy.wait_for_request(PATIENCE_S)
            proxy.reset_connections()
            assert settling.wait(PATIENCE_S)
            time.sleep(0.3)  # long enough for a look that does not wait to have looked
            proxy.release_requests()

        def hold() -> None:
            proxy.hold_requests()
            late.append(threading.Thread(target=deliver_late))
            late[0].start()

        once(monkeypatch, _Taken, "_fence", hold, first=False)
        once(monkeypatch, _Taken, "end", settling.set, first=False)
        assert self.consume(place, engine, proxy) == [0, 5, 10]
        late[0].join()
        assert place.sum == total

    def test_an_interrupt_after_commit_does_not_redo_it(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        total = place.send(15)
        inbox = place.consumer()
        found: list[int] = []

        def interrupt() -> None:
            raise KeyboardInterrupt

        def consume() -> None:
            for batch, db in transactions(inbox, place.engine, max_messages=5):
                found.append(batch[0].offset)
                book(batch, db)

        once(monkeypatch, Connection, "commit", interrupt, first=False)
        with pytest.raises(KeyboardInterrupt):
            consume()
        consume()
        assert found == [0, 5, 10]
        assert place.sum == total


class TestRefusals:
    def test_the_engine_of_another_database_is_refused(
        self, place: Place, tmp_path: Path, server: PostgresServer, exits: ExitStack
    ) -> None:
        place.send(1)
        inbox = place.consumer()
        if place.engine.dialect.name == "sqlite":
            others = [f"sqlite:///{tmp_path}/other.db"]
        else:
            others = [server.create_database(f"d{uuid.uuid4().hex[:12]}").replace("postgresql:", "postgresql+psycopg:")]
        # With tables of its own, and the same group in them, it is still another one.
        (tmp_path / "twin").mkdir()
        twin = place_on(place.engine.dialect.name, tmp_path / "twin", server, exits)
        twin.send(1)
        twin.consumer()
        for url in (*others, twin.engine_url):
            engine = create_engine(url)
            with pytest.raises(InvalidGroup, match="does not lead to the tables"):
                transactions(inbox, engine)
            engine.dispose()

    def test_another_kind_of_database_or_registry_is_refused(self, sqlite: Place, tmp_path: Path) -> None:
        sqlite.send(1)
        with pytest.raises(InvalidGroup, match="span"):
            transactions(sqlite.consumer(), create_engine("postgresql+psycopg://nobody@localhost/x"))
        with pxrs.open(tmp_path / "plain") as hub:
            hub.create_topic("t", partitions=1)
            with pytest.raises(InvalidGroup, match="no PostgreSQL or SQLite"):
                transactions(hub.consumer("t", "g"), sqlite.engine)

    def test_an_engine_that_commits_by_itself_is_refused(self, postgresql: Place) -> None:
        postgresql.send(1)
        engine = create_engine(postgresql.engine_url, isolation_level="AUTOCOMMIT")
        with pytest.raises(InvalidGroup, match="AUTOCOMMIT"):
            transactions(postgresql.consumer(), engine)
        engine.dispose()

    def test_manual_acknowledgement_and_bad_sizes_are_refused(self, sqlite: Place) -> None:
        sqlite.send(1)
        with pytest.raises(InvalidGroup, match="acknowledges"):
            transactions(sqlite.consumer(ack="manual"), sqlite.engine)
        with pytest.raises(InvalidGroup, match="max_messages"):
            transactions(sqlite.consumer(), sqlite.engine, 0)

    @pytest.mark.parametrize("what", ["commit", "rollback"])
    def test_a_body_that_ends_the_transaction_is_refused(self, place: Place, what: str) -> None:
        place.send(10)
        inbox = place.consumer()
        loop = transactions(inbox, place.engine)
        batch, db = next(loop)
        book(batch, db)
        if what == "rollback":
            db.rollback()
        with pytest.raises(InvalidGroup, match="the body"):
            db.commit() if what == "commit" else next(loop)
        loop.close()
        assert place.sum == 0
        assert [each.offset for each in place.checkpoints()] == [0]

    def test_acknowledging_in_the_body_is_refused(self, postgresql: Place) -> None:
        postgresql.send(10)
        inbox = postgresql.consumer(commit_interval=60)
        loop = transactions(inbox, postgresql.engine)
        batch, db = next(loop)
        book(batch, db)
        with pytest.raises(InvalidGroup, match="transaction"):
            inbox.ack(batch[0])


class TestSqlite:
    def test_leases_are_renewed_beside_a_loop_that_nearly_always_writes(self, sqlite: Place, tmp_path: Path) -> None:
        place = sqlite
        total = place.send(80, 2)
        lost: list[int] = []
        with pxrs.open(place.folder / "data", registry=place.registry) as hub:
            bystander = hub.registry.lease(2.5)
            for batch, db in transactions(place.consumer(lease_ttl=2.5, on_lost=lost.extend), place.engine, 1):
                book(batch, db)
                time.sleep(0.05)  # under the write lock
            assert bystander.alive
        assert not lost
        assert place.sum == total

    def test_a_wait_for_the_member_does_not_lock_up(self, sqlite: Place) -> None:
        """The member's thread waits for the write lock with its own in hand, while the body has the write lock."""
        place = sqlite
        total = place.send(10)
        inbox = place.consumer()
        loop = transactions(inbox, place.engine)
        book(*next(loop))
        has_mutex = threading.Event()

        def write_as_the_member() -> None:
            with inbox._member.session.mutex:
                has_mutex.set()
                place.hub.registry.commit(put={"x": b""})

        writing = threading.Thread(target=write_as_the_member)
        writing.start()
        assert has_mutex.wait(PATIENCE_S)
        began = time.monotonic()
        assert not list(loop_on(loop))
        assert time.monotonic() - began < 8.0, "it waited for a lock until the registry's timeout"
        writing.join()
        assert place.sum == total

    def test_the_write_lock_is_taken_before_the_body_reads(self, sqlite: Place) -> None:
        """What somebody else writes behind a read would make SQLite refuse the body's own writes."""
        sqlite.send(10)
        impatient = create_engine(sqlite.engine_url, connect_args={"timeout": 0})
        loop = transactions(sqlite.consumer(), sqlite.engine)
        next(loop)
        with pytest.raises(OperationalError, match="locked"), impatient.begin() as connection:
            connection.execute(text("UPDATE balance SET balance = 1"))
        loop.close()
        impatient.dispose()

    def test_a_transaction_that_a_listener_has_begun_is_used(self, sqlite: Place) -> None:
        from sqlalchemy import event

        engine = create_engine(sqlite.engine_url)

        @event.listens_for(engine, "connect")
        def leave_transactions_to_us(raw: Any, _: object) -> None:
            raw.isolation_level = None

        @event.listens_for(engine, "begin")
        def begin(connection: Connection) -> None:
            connection.exec_driver_sql("BEGIN")

        total = sqlite.send(10)
        for batch, db in transactions(sqlite.consumer(), engine, 3):
            book(batch, db)
        assert sqlite.sum == total
        engine.dispose()


class Process:
    """A member in a process of its own."""

    def __init__(self, place: Place, name: str) -> None:
        self.name, self.errors = name, place.folder / f"{name}.stderr"
        url = place.engine_url + ("" if place.engine_url.startswith("sqlite") else f"?application_name={name}")
        arguments = [str(place.folder / "data"), place.registry, url, name, "1.5"]
        with self.errors.open("wb") as errors:
            self.process = Forked(__file__, arguments, stderr=errors.fileno())

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self.is_running:
            self.process.kill()
        self.process.wait(PATIENCE_S)


def test_x20_balances_are_exact_though_members_are_killed_stopped_and_woken(place: Place) -> None:
    seed = int(os.environ.get("SEED", time.time_ns() % 1_000_000))
    chance = random.Random(seed)
    processes: list[Process] = []
    stopped: list[Process] = []

    total = sent = 0
    place.hub.create_topic("t", partitions=PARTITIONS)
    out = place.hub.producer("t")

    def start() -> None:
        processes.append(Process(place, f"w{len(processes)}"))
        place.exits.callback(processes[-1].end)

    def running() -> list[Process]:
        return [each for each in processes if each.is_running and each not in stopped]

    def send() -> None:
        nonlocal total, sent
        for _ in range(20):
            sent += 1
            total += sent
            out.send(b"%d" % sent, b"key-%d" % sent)
        out.flush()
        time.sleep(0.01)

    for _ in range(3):
        start()
    for _ in range(EVENTS):
        until = time.monotonic() + chance.uniform(0.1, 1.0)
        while time.monotonic() < until:
            send()
        kind = chance.choice(["kill", "stop", "stop", "wake", "join"])
        if kind == "wake" and stopped:
            stopped.pop().wake()
        elif kind == "join" or len(running()) < 2:
            start()
        elif kind == "kill":
            killed = chance.choice(running()).process
            killed.kill()
            killed.wait(10)  # so that it does not count among those that run
        elif kind == "stop" and not stopped:
            stopped.append(chance.choice(running()))
            stopped[0].stop()
    while stopped:
        stopped.pop().wake()
    if place.engine.dialect.name == "postgresql":  # on SQLite nobody can take over from one that is in its body
        while len(running()) < 2:
            start()
        let_a_zombie_try(place, running, send, seed)
    while sum(each.is_running for each in processes) < 2:
        start()
    ends = [place.hub.topic("t").end(partition) for partition in range(PARTITIONS)]
    until = time.monotonic() + PATIENCE_S
    while [each.offset for each in place.checkpoints()] != ends:
        errors = "\n".join(f"{each.name}: {each.errors.read_text()[-1500:]}" for each in processes)
        assert time.monotonic() < until, f"SEED={seed}: {place.checkpoints()} of {ends}\n{errors}"
        time.sleep(0.05)
    for each in processes:
        each.end()
    assert place.sum == total, f"SEED={seed}"
    every = [(partition, offset) for partition, end in enumerate(ends) for offset in range(end)]
    assert [row[:2] for row in place.rows()] == every, f"SEED={seed}"


def let_a_zombie_try(place: Place, running: Callable[[], list[Process]], send: Callable[[], None], seed: int) -> None:
    """Stop a process in its body until others have handled its messages, and wake it."""

    def last_query(name: str) -> str:
        """In the transaction that it has open; empty if it has none."""
        with place.engine.connect() as db:
            query = "SELECT query FROM pg_stat_activity WHERE application_name = :name AND state != 'idle'"
            return "".join(db.execute(text(query), {"name": name}).scalars())

    def is_in_its_body(name: str) -> bool:
        return last_query(name).startswith("INSERT")  # not among the balances, whose rows it would keep locked

    def is_all_done() -> bool:
        ends = [place.hub.topic("t").end(partition) for partition in range(PARTITIONS)]
        return [each.offset for each in place.checkpoints()] == ends

    until = time.monotonic() + PATIENCE_S
    while True:
        assert time.monotonic() < until, f"SEED={seed}: none was ever met in its body"
        for process in running():
            send()
            process.stop()
            if is_in_its_body(process.name):
                time.sleep(0.05)  # a signal takes a moment to arrive
                if is_in_its_body(process.name):
                    eventually(is_all_done, f"SEED={seed}: nobody takes over from a stopped member")
                    process.wake()
                    eventually(lambda name=process.name: not last_query(name), f"SEED={seed}")  # type: ignore[misc]
                    return
            process.wake()


def _work(data: str, registry: str, engine_url: str, name: str, ttl: str) -> None:
    engine = create_engine(engine_url)
    with pxrs.open(data, registry=registry) as hub:
        inbox = hub.consumer("t", "g", name=name, lease_ttl=float(ttl))
        for batch, db in transactions(inbox, engine, max_messages=50):
            book(batch, db, name)


if __name__ == "__main__":
    _work(*sys.argv[1:])
