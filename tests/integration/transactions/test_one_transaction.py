"""Rows and checkpoint in one transaction (X20), on real databases: the loop, the fence, lost replies."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

import pxrs
from pxrs.consumer.transactions import _Loop, _Taken
from pxrs.group.records import Keys
from pxrs.testing.proxy import Proxy
from pxrs.testing.servers import PostgresServer
from pxrs.testing.waiting import eventually
from tests.integration.transactions.bookings import PARTITIONS, PATIENCE_S, Place, book, loop_on, place_on, transactions


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
        place.hub.create_topic("t", partitions=2)
        out = place.hub.producer("t")

        def send(partition: int) -> None:
            for _ in range(10):
                out.send(b"1", partition=partition)
            out.flush()

        send(1)  # the partition with the highest number is the one that its owner is asked for
        revoked: list[int] = []
        first = place.consumer(until=None, on_revoked=revoked.extend)
        loop = transactions(first, place.engine, max_messages=5)
        batch, db = next(loop)
        book(batch, db, "first")
        second = place.consumer(until=None)
        eventually(lambda: revoked == [1])
        assert not second.assignment
        send(0)
        batch, db = next(loop)  # not fenced: the release waits for it
        assert {message.partition for message in batch} == {0}
        assert place.rows() == [(1, number, "first") for number in range(5)]
        eventually(lambda: second.assignment == [1])
        loop.close()
        first.close()
        second.close()
        for batch, db in transactions(place.consumer(), place.engine):
            book(batch, db, "last")
        assert place.sum == 20


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
        # Once only, if the member has noticed the loss before it handed the messages out the first time.
        assert len(epochs) in (1, 2), "handed out again, once it was claimed again"
        assert epochs == sorted(set(epochs)), "under another epoch"
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
