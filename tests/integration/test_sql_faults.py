"""The SQL registry when things go wrong: lost replies, stopped servers, crashes, stepped clocks, races."""

from __future__ import annotations

import gc
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pxrs.registry
from pxrs.errors import (
    AccessDenied,
    Conflict,
    InvalidUrl,
    LeaseExpired,
    OutcomeUnknown,
    RegistryCorrupt,
    RegistryUnavailable,
    SchemaMissing,
    StorageFull,
    UsedAfterFork,
)
from pxrs.registry import ABSENT, Registry
from pxrs.registry.contract import Commit
from pxrs.registry.sql import ddl, sqlite
from pxrs.registry.sql import registry as sql_registry
from pxrs.registry.sql.commit import CommitPlan
from pxrs.registry.sql.database import ConnectionLost, Inherited, Session
from pxrs.registry.sql.postgresql import PostgresSession
from pxrs.registry.sql.registry import SqlRegistry
from pxrs.registry.sql.sqlite import SqliteDatabase
from pxrs.registry.sql.statements import Call, Statement, key_range, statements_for
from pxrs.testing import faults
from pxrs.testing.actor import Actor
from pxrs.testing.history import record
from pxrs.testing.linearizability import check
from pxrs.testing.proxy import Proxy
from pxrs.testing.registry_contract import at_once, eventually, quieten
from pxrs.testing.servers import PostgresServer, certificates, installed_postgres

LOCALE = "en_US.UTF-8"
GOLDEN = Path(__file__).parents[1] / "golden" / "0.1"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer(locales=[LOCALE]) as server:
        yield server


@pytest.fixture
def proxy(server: PostgresServer) -> Iterator[Proxy]:
    with Proxy(server.host, server.port) as proxy:
        yield proxy


def url_of(server: PostgresServer, place: Proxy | None = None, namespace: str = "", **options: object) -> str:
    """The server's address, or that of the proxy before it, in a namespace of its own unless one is given."""
    url = server.url if place is None else server.url.replace(f":{server.port}/", f":{place.port}/")
    options = {"namespace": namespace or f"t{uuid.uuid4().hex[:12]}", **options}
    return f"{url}?{'&'.join(f'{name}={value}' for name, value in options.items())}"


def open_sql(url: str) -> SqlRegistry:
    registry = pxrs.registry.open(url)
    assert isinstance(registry, SqlRegistry)
    return registry


def plan_of(registry: SqlRegistry, commit: Commit) -> CommitPlan:
    """What the registry would do, to be done step by step."""
    return CommitPlan(commit, registry._namespace, registry.statements)


def within(seconds: float, kind: type[Exception], call: Callable[[], object]) -> Exception:
    """The error of that kind that the call raises, in time."""
    began = time.monotonic()
    with pytest.raises(kind) as raised:
        call()
    assert time.monotonic() - began < seconds
    assert type(raised.value).__module__ == "pxrs.errors"
    return raised.value


class TestLostReplies:
    """R5: what is known after a failure, and what is not."""

    def before_commit(self, monkeypatch: pytest.MonkeyPatch, fault: Callable[[], None]) -> list[int]:
        """Let the fault happen once the locks are held, before the writes and COMMIT are sent; counts the commits."""
        commit, count = PostgresSession.commit, [0]

        def commit_with_fault(session: PostgresSession, calls: Any) -> None:
            count[0] += 1
            fault()
            commit(session, calls)

        monkeypatch.setattr(PostgresSession, "commit", commit_with_fault)
        return count

    def test_r5_a_lost_answer_to_commit_is_an_unknown_outcome(
        self, server: PostgresServer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with open_sql(url_of(server, proxy)) as registry:
            registry.commit(put={"a": b"1"})
            count = self.before_commit(monkeypatch, lambda: proxy.drop_replies(close_after=0.2))
            with pytest.raises(OutcomeUnknown):
                registry.commit(put={"a": b"2"})
            assert count == [1], "an unknown outcome is never tried again"
            monkeypatch.undo()
            proxy.restore()
            entry = registry.get("a")
            assert entry is not None
            assert entry.value == b"2", "it did happen; only the answer was lost"

    def test_r5_a_commit_that_gets_no_answer_in_time_is_an_unknown_outcome(
        self, server: PostgresServer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with open_sql(url_of(server, proxy, timeout=0.5)) as registry:
            registry.commit(put={"a": b"1"})
            count = self.before_commit(monkeypatch, proxy.drop_replies)
            within(5, OutcomeUnknown, lambda: registry.commit(put={"a": b"2"}))
            assert count == [1]
            monkeypatch.undo()
            proxy.restore()
            entry = registry.get("a")
            assert entry is not None
            assert entry.value == b"2"

    def test_a_connection_that_breaks_before_commit_changes_nothing(self, server: PostgresServer, proxy: Proxy) -> None:
        with open_sql(url_of(server, proxy)) as registry:
            registry.commit(put={"a": b"1"})
            proxy.cut()
            within(5, RegistryUnavailable, lambda: registry.commit(put={"a": b"2"}))
            within(5, RegistryUnavailable, lambda: registry.get("a"))
            proxy.restore()
            entry = registry.get("a")
            assert entry is not None
            assert entry.value == b"1"
            registry.commit(expect={"a": entry.version}, put={"a": b"3"})

    def test_dead_connections_are_replaced_without_a_word(self, server: PostgresServer, proxy: Proxy) -> None:
        with open_sql(url_of(server, proxy)) as registry:
            at_once(*[lambda i=i: registry.commit(put={f"k/{i}": b""}) for i in range(4)])  # type: ignore[misc]
            for i in range(2):
                proxy.reset_connections()
                registry.commit(expect={"a": ABSENT}, put={"a": b"%d" % i})
                proxy.reset_connections()
                assert registry.get("a") is not None
                registry.commit(delete=["a"])

    def test_a_client_that_stops_in_the_middle_is_ended_and_the_others_go_on(self, server: PostgresServer) -> None:
        url = url_of(server, timeout=2)
        with open_sql(url) as stopped, open_sql(url) as other:
            plan = plan_of(stopped, Commit({}, {"a": b"late"}, {}, frozenset(), None, False))

            def stop_in_the_middle(session: Session) -> None:
                found = plan.judge(session.begin(plan.locks))
                other.commit(expect={"a": ABSENT}, put={"a": b"in time"})
                session.commit(plan.writes(found))

            # Definite: the server says that it had ended the transaction.
            with pytest.raises(ConnectionLost), stopped.database.session(time.monotonic() + 5) as session:
                stop_in_the_middle(session)
            assert [e.value for e in stopped.scan("")] == [b"in time"]


def registry_url(server: PostgresServer, registry: SqlRegistry) -> str:
    """The same namespace, without the proxy."""
    return url_of(server, namespace=registry._namespace)


class TestServerFaults:
    def test_a_stopped_server_is_an_error_in_time(self, server: PostgresServer) -> None:
        with open_sql(url_of(server, timeout=0.6)) as registry, registry.watch("w/"):
            registry.commit(put={"a": b"1"})
            calls: list[Callable[[], object]] = [
                lambda: registry.commit(put={"a": b"2"}),
                lambda: registry.get("a"),  # this one has to connect
            ]
            server.pause()
            try:
                for call in calls:
                    within(5, RegistryUnavailable, call)
            finally:
                server.resume()
            # What was never answered had not sent COMMIT.
            entry = eventually(lambda: _patient_get(registry, "a"))
            assert entry.value == b"1"

    def test_a_silent_network_is_an_error_in_time(self, server: PostgresServer, proxy: Proxy) -> None:
        with open_sql(url_of(server, proxy, timeout=0.5)) as registry:
            version = registry.commit(put={"a": b"1"})["a"]
            proxy.stall()
            # One that expects all its keys is sent whole, so nobody knows whether it arrives.
            within(5, OutcomeUnknown, lambda: registry.commit(expect={"a": version}, delete=["a"]))
            within(5, RegistryUnavailable, lambda: registry.commit(put={"a": b"2"}))
            proxy.restore()
            registry.commit(put={"a": b"2"})

    def test_kill_9_and_restart_lose_nothing_and_the_handle_goes_on(self, server: PostgresServer) -> None:
        url = url_of(server)
        with open_sql(url) as registry, registry.watch("w/") as watch:
            at_once(*[lambda i=i: registry.commit(put={f"k/{i}": b""}) for i in range(4)])  # type: ignore[misc]
            versions = registry.commit(put={"w/a": b"1", "w/b": b"1"})
            quieten(watch)
            server.kill()
            assert watch.wait(30), "a lost connection is a doubt, and a doubt is a wake"
            server.restart()
            with open_sql(url) as other:
                other.commit(expect=versions, put={"w/a": b"2"})
            while True:
                entry = _patient_get(registry, "w/a")
                if entry is not None and entry.value == b"2":
                    break
                assert watch.wait(30), "the change during the outage was missed"
            registry.commit(expect={"w/a": entry.version}, put={"w/a": b"3"})
            eventually(lambda: not watch.wait(0.2))
            with open_sql(url) as other:
                other.commit(put={"w/a": b"4"})
            assert watch.wait(30), "it listens again"

    @pytest.mark.parametrize("fault", ["crash", "lost replies"])
    def test_r1_histories_stay_linearizable_through_faults(
        self, server: PostgresServer, proxy: Proxy, fault: str
    ) -> None:
        """What was said to have had no effect had none, and what was answered has happened."""

        def crash() -> None:
            server.kill()
            server.restart()

        def lose_replies() -> None:
            for _ in range(30):
                time.sleep(0.02)  # long enough for all to be at work again, at locks or at COMMIT
                proxy.drop_replies(close_after=0.2)
                time.sleep(0.002)
                proxy.restore()

        seed = random.randrange(1 << 30)
        during = crash if fault == "crash" else lose_replies
        history = record([url_of(server, proxy, timeout=4)], 3, 300, seed, keys=("a", "b", "c/d"), during=during)
        assert fault == "crash" or any(getattr(operation, "outcome", "") == "unknown" for operation in history)
        verdict = check(history)
        assert verdict.ok, f"seed {seed}: {verdict}"

    def test_a_lease_survives_a_restart_of_the_server(self, server: PostgresServer) -> None:
        with open_sql(url_of(server)) as registry, registry.lease(4) as lease:
            registry.commit(ephemeral={"m": b""}, lease=lease)
            server.kill()
            server.restart()
            deadline = lease.deadline
            eventually(lambda: lease.deadline > deadline)
            registry.commit(put={"a": b""}, lease=lease)
            assert registry.get("m") is not None

    def test_a_watch_that_the_network_silently_forgot_is_woken(self, server: PostgresServer, proxy: Proxy) -> None:
        with open_sql(url_of(server, proxy, timeout=0.5)) as registry, registry.watch("w/") as watch:
            quieten(watch)
            proxy.stall()
            with open_sql(registry_url(server, registry)) as other:
                other.commit(put={"w/a": b""})
            assert watch.wait(30), "a probe that gets no answer is a doubt"
            proxy.restore()

    def test_r2_a_change_while_nobody_listened_wakes(self, server: PostgresServer, proxy: Proxy) -> None:
        with open_sql(url_of(server, proxy)) as registry, registry.watch("w/") as watch:
            quieten(watch)
            proxy.cut()
            assert watch.wait(30), "a lost connection is a doubt"
            quieten(watch)
            with open_sql(registry_url(server, registry)) as other:
                other.commit(put={"w/a": b""})
            assert not watch.wait(0.1), "nobody can have told it yet"
            proxy.restore()
            assert watch.wait(30)

    def test_the_watcher_learns_of_a_lease_that_is_younger_than_the_watch(self, server: PostgresServer) -> None:
        url = url_of(server)
        with open_sql(url) as registry, open_sql(url) as other, registry.watch("m/") as watch:
            quieten(watch)
            lease = other.lease(2.0)
            other.commit(ephemeral={"m/1": b""}, lease=lease)
            lease.abandon()
            assert watch.wait(30), "the key came"
            assert watch.wait(30), "the key went, and nobody but the watcher looked"
            assert registry.scan("m/") == []


def _patient_get(registry: Registry, key: str) -> Any:
    try:
        return registry.get(key)
    except RegistryUnavailable:
        return None


class TestLeases:
    def test_r7_a_clock_stepped_back_does_not_revive_a_lease(self, server: PostgresServer) -> None:
        url = self.database_with_a_clock_to_step(server)
        with open_sql(url) as first, open_sql(url) as second:
            lease = first.lease(30)
            lease.abandon()
            first.commit(ephemeral={"m": b""}, put={"owner": b"first"}, lease=lease)
            self.step(server, 60)
            assert second.get("m") is None, "its time is over"
            self.step(server, 0)
            assert second.get("m") is None
            assert second.scan("m/") == []
            second.commit(expect={"m": ABSENT}, put={"owner": b"second"})
            assert lease.alive, "its holder has not noticed"
            with pytest.raises(LeaseExpired):
                lease.stored.renew()
            with pytest.raises(LeaseExpired):
                first.commit(put={"owner": b"first"}, lease=lease)
            assert not lease.alive

    @pytest.mark.parametrize("look", ["commit", "scan", "other commit"])
    def test_r7_a_lease_dies_by_a_write_of_whoever_looks(self, server: PostgresServer, look: str) -> None:
        url = self.database_with_a_clock_to_step(server)
        with open_sql(url) as first, open_sql(url) as second:
            lease = first.lease(30)
            lease.abandon()
            first.commit(ephemeral={"m/1": b"", "m/2": b""}, lease=lease)
            self.step(server, 60)
            if look == "commit":
                second.commit(expect={"m/1": ABSENT})
            elif look == "scan":
                assert second.scan("m/") == []
            else:
                second.commit(put={"m/2": b"taken"})
            self.step(server, 0)
            assert [e.value for e in first.scan("m/")] == ([b"taken"] if look == "other commit" else [])
            with pytest.raises(LeaseExpired):
                first.commit(put={"a": b""}, lease=lease)

    @pytest.mark.parametrize("look", ["get", "scan", "commit", "claim", "lease", "sweep"])
    def test_r7_a_clock_set_back_keeps_a_dead_holder_for_one_more_ttl_at_most(
        self, server: PostgresServer, look: str
    ) -> None:
        """Its lease expires an hour and 30 s ahead of the clock, which no lease of 30 s does. Whoever notices it sets
        the expiry to 30 s from now: a living holder has a whole ttl to renew."""
        url = self.database_with_a_clock_to_step(server)
        with open_sql(url) as first, open_sql(url) as second:
            lease = first.lease(30)
            lease.abandon()
            first.commit(ephemeral={"m/1": b""}, lease=lease)
            self.step(server, -3600)
            if look == "get":
                assert second.get("m/1") is not None
            elif look == "scan":
                assert len(second.scan("m/")) == 1
            elif look == "commit":
                first.commit(put={"a": b""}, lease=lease)
            elif look == "claim":
                with pytest.raises(Conflict):
                    second.commit(expect={"m/1": ABSENT}, put={"a": b""})
            elif look == "lease":
                second.lease(30).close()
            else:
                left = second.sweep()
                assert left is not None
                assert left <= 31
            self.step(server, -3600 + 15)
            assert second.get("m/1") is not None, "it has a whole ttl"
            self.step(server, -3600 + 40)
            assert second.get("m/1") is None
            with pytest.raises(LeaseExpired):
                first.commit(put={"a": b""}, lease=lease)

    def test_r7_a_clock_set_back_ends_no_living_lease(self, server: PostgresServer) -> None:
        url = self.database_with_a_clock_to_step(server)
        with open_sql(url) as first, open_sql(url) as second, first.lease(30) as lease:
            first.commit(ephemeral={"m": b""}, lease=lease)
            self.step(server, -3600)
            assert second.get("m") is not None
            lease.stored.renew()
            self.step(server, -3600 + 20)
            lease.stored.renew()
            self.step(server, -3600 + 40)
            assert second.get("m") is not None
            first.commit(put={"a": b""}, lease=lease)

    def test_r7_a_watcher_notices_that_the_clock_was_set_back(self, server: PostgresServer) -> None:
        """Nobody else looks: the key of the dead holder goes, and the watch is woken."""
        url = self.database_with_a_clock_to_step(server)
        with open_sql(url) as first, open_sql(url) as second, second.watch("m/") as watch:
            lease = first.lease(3.0)
            lease.abandon()
            first.commit(ephemeral={"m/1": b""}, lease=lease)
            self.step(server, -3600)
            eventually(lambda: not second.versions(("m/",))[0], 30)
            assert watch.wait(30)

    def test_many_leases_that_expire_too_far_ahead_are_all_corrected_by_one_watcher(
        self, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sql_registry, "DUE_LEASES_MAX", 2)
        with open_sql(self.database_with_a_clock_to_step(server)) as registry:
            for _ in range(5):
                registry.lease(30).abandon()
            self.step(server, -3600)
            while registry.sweep() == 0.0:
                continue
            ahead = f"SELECT count(*) FROM pxrs_lease WHERE expires_ms > {int((time.time() - 3600 + 60) * 1000)}"
            assert server.sql(ahead, self._database) == [(0,)]

    def test_tables_of_version_0_1_are_opened_and_their_leases_corrected(self, server: PostgresServer) -> None:
        """`ttl_ms` was there from the start, so the tables need no change, with and without the right to make any."""
        url = self.database_with_a_clock_to_step(server)
        statements = (GOLDEN / "postgresql.sql").read_text().replace("pxrs_app", "CURRENT_USER")
        server.sql(statements, self._database)
        for address in (url, f"{url}?create=false"):
            with open_sql(address) as registry, registry.lease(30) as lease:
                registry.commit(ephemeral={"m": b""}, put={"n": b"1"}, lease=lease)
                server.sql("UPDATE pxrs_lease SET expires_ms = expires_ms + 3600000", self._database)
                assert registry.get("m") is not None
                left = "SELECT max(expires_ms - extract(epoch FROM clock_timestamp()) * 1000)::bigint FROM pxrs_lease"
                ((left_ms,),) = server.sql(left, self._database)
                assert left_ms <= 31_000

    def test_r3_an_expired_lease_that_nobody_has_met_yet_is_not_renewed(self, server: PostgresServer) -> None:
        with open_sql(self.database_with_a_clock_to_step(server)) as registry:
            lease = registry.lease(30)
            self.step(server, 60)
            with pytest.raises(LeaseExpired):
                lease.stored.renew()
            with pytest.raises(LeaseExpired):
                registry.commit(put={"a": b""}, lease=lease)

    def test_r3_a_lease_cannot_end_in_the_middle_of_a_commit_that_names_it(self, server: PostgresServer) -> None:
        url = url_of(server)
        with open_sql(url) as registry, open_sql(url) as other, registry.lease(30) as lease:
            plan = plan_of(registry, Commit({}, {}, {"m": b""}, frozenset(), lease, False))
            ending = threading.Thread(target=other.attach(lease.secret).end)
            with registry.database.session(time.monotonic() + 5) as session:
                found = plan.judge(session.begin(plan.locks))
                ending.start()
                ending.join(0.2)
                assert ending.is_alive(), "the end waits for the commit"
                session.commit(plan.writes(found))
            ending.join(30)
            assert registry.get("m") is None, "and then takes its keys"

    def database_with_a_clock_to_step(self, server: PostgresServer) -> str:
        name = f"d{uuid.uuid4().hex[:12]}"
        url = server.create_database(name)
        self._database = name
        for statement in (
            "CREATE SCHEMA stepped",
            "CREATE TABLE stepped.clock (seconds int)",
            "INSERT INTO stepped.clock VALUES (0)",
            "CREATE FUNCTION stepped.clock_timestamp() RETURNS timestamptz VOLATILE LANGUAGE sql AS "
            "'SELECT pg_catalog.clock_timestamp() + make_interval(secs => seconds) FROM stepped.clock'",
            f"ALTER DATABASE {name} SET search_path = stepped, pg_catalog, public",
        ):
            server.sql(statement, name)
        return url

    def step(self, server: PostgresServer, seconds: int) -> None:
        server.sql(f"UPDATE stepped.clock SET seconds = {seconds}", self._database)

    def test_r6_commits_that_wait_do_not_keep_renewals_waiting(self, server: PostgresServer) -> None:
        with open_sql(url_of(server, timeout=5)) as registry, registry.lease(2.5) as lease:
            registry.commit(put={"a": b""}, ephemeral={"m": b""}, lease=lease)
            with psycopg.connect(server.url) as blocker:
                blocker.execute("SELECT 1 FROM pxrs_entry WHERE namespace = %s FOR UPDATE", [registry._namespace])
                waiting = [
                    threading.Thread(target=lambda: registry.commit(put={"a": b""}, lease=lease)) for _ in range(12)
                ]
                for thread in waiting:
                    thread.start()
                assert not lease.lost.wait(3.5), "the commits wait for up to 3.75 s, and the renewals with them"
                blocker.rollback()
            for thread in waiting:
                thread.join(30)
            assert lease.alive

    def test_leases_that_nobody_meets_are_cleared_away(self, server: PostgresServer) -> None:
        with open_sql(url_of(server)) as registry:
            for _ in range(3):
                registry.lease(2.0).abandon()
            count = f"SELECT count(*) FROM pxrs_lease WHERE namespace = '{registry._namespace}'"
            assert server.sql(count) == [(3,)]
            now_ms = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
            eventually(lambda: server.sql(f"{count} AND expires_ms > {now_ms}") == [(0,)])
            with registry.lease(5):
                assert server.sql(count) == [(1,)]


class TestRaces:
    def test_r7_write_skew_on_absent_keys(self, server: PostgresServer) -> None:
        """Around a ring, each puts its own key expecting the next one's absent: the last to commit must be refused."""
        url = url_of(server)
        handles = [open_sql(url) for _ in range(4)]
        try:
            for turn in range(25):
                keys = [f"ring/{turn}/{i}" for i in range(len(handles))]

                def take(i: int, keys: list[str] = keys) -> int:
                    following = keys[(i + 1) % len(keys)]
                    try:
                        return handles[i].commit(expect={following: ABSENT}, put={keys[i]: b""})[keys[i]]
                    except Conflict:
                        return 0

                versions = at_once(*[lambda i=i: take(i) for i in range(len(handles))])  # type: ignore[misc]
                assert [e.version for e in handles[0].scan(f"ring/{turn}/")] == [v for v in versions if v]
                for i, version in enumerate(versions):
                    later = versions[(i + 1) % len(versions)]
                    assert not version or not later or version < later
        finally:
            for handle in handles:
                handle.close()

    def test_r7_commits_in_opposite_orders_never_deadlock(self, server: PostgresServer) -> None:
        url = url_of(server)
        keys = [f"k/{i}" for i in range(5)]
        with open_sql(url) as registry, Actor(url) as one, Actor(url) as two:
            before = self.deadlocks(server)
            one.send("twin_writes", keys=keys)
            two.send("twin_writes", keys=keys[::-1])

            def write(order: int) -> None:
                for i in range(40):
                    some = keys[::order]
                    put = dict.fromkeys(some[:3], b"%d" % i)
                    registry.commit(put=put, expect={"k/none": ABSENT}, delete=some[3:])

            at_once(*[lambda order=order: write(order) for order in (1, -1, 1, -1)])  # type: ignore[misc]
            for actor in (one, two):
                actor.signal(signal.SIGKILL)
        # A session reports what it counted when it ends, at the latest.
        others = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pxrs'"
        eventually(lambda: server.sql(others) == [(0,)])
        assert self.deadlocks(server) == before

    def deadlocks(self, server: PostgresServer) -> int:
        ((count,),) = server.sql("SELECT sum(deadlocks) FROM pg_stat_database")
        return int(count)

    def test_several_processes_may_open_an_empty_database_at_once(self, server: PostgresServer) -> None:
        for i in range(3):
            url = server.create_database(f"empty{i}")
            handles = at_once(*[lambda url=url: open_sql(url)] * 6)  # type: ignore[misc]
            for n, handle in enumerate(handles):
                handle.commit(put={f"k/{n}": b""})
            assert len(handles[0].scan("")) == 6
            for handle in handles:
                handle.close()


class TestAccess:
    def test_a_wrong_password_is_denied_and_not_shown(
        self, server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wrong = "so-secret"
        bare = server.url.replace(f":{server.password}@", "@")
        secret = tmp_path / "secret"
        secret.write_text(f"{server.password}\n")
        error = within(5, AccessDenied, lambda: open_sql(server.url.replace(server.password, wrong)))
        assert wrong not in str(error) + repr(error) + repr(error.__cause__)
        within(5, AccessDenied, lambda: open_sql(bare))
        with open_sql(f"{bare}?password_file={secret}") as registry:
            assert server.password not in repr(registry)
        monkeypatch.setenv("PXRS_REGISTRY_PASSWORD", server.password)
        open_sql(bare).close()

    def test_what_is_not_there_is_said(self, server: PostgresServer) -> None:
        within(5, InvalidUrl, lambda: open_sql(server.url_of("nowhere")))
        within(5, InvalidUrl, lambda: open_sql(f"{server.url}?sslmode=maybe"))
        within(5, InvalidUrl, lambda: open_sql(f"{server.url}?keepalives=often"))
        within(5, AccessDenied, lambda: open_sql(server.url.replace("//pxrs:", "//nobody:")))
        gone = server.url.replace(f":{server.port}/", ":1/")
        within(5, RegistryUnavailable, lambda: open_sql(gone))

    def test_create_false_needs_the_tables_and_least_privileges_suffice(self, server: PostgresServer) -> None:
        url = server.create_database("owned")
        within(5, SchemaMissing, lambda: open_sql(f"{url}?create=false"))
        server.sql("CREATE ROLE pxrs_app LOGIN PASSWORD 'app'")
        app = url.replace(f"pxrs:{server.password}@", "pxrs_app:app@")
        within(5, AccessDenied, lambda: open_sql(app))
        with psycopg.connect(url) as owner:
            owner.execute(ddl("postgresql").encode())
        for address in (f"{app}?create=false", app):
            with open_sql(address) as registry, registry.watch("m/") as watch, registry.lease(5) as lease:
                quieten(watch)
                registry.commit(expect={"a": ABSENT}, put={"a": b"1"}, ephemeral={"m/1": b""}, lease=lease)
                assert watch.wait(30)
                assert len(registry.scan("")) == 2
                registry.commit(delete=["a"])
        server.sql("UPDATE pxrs_meta SET value = '99' WHERE name = 'layout'", "owned")
        assert "99" in str(within(5, SchemaMissing, lambda: open_sql(app)))

    def test_a_session_that_may_not_write_is_denied(self, server: PostgresServer) -> None:
        url = server.create_database("readonly")
        with open_sql(url) as registry:
            server.sql("ALTER DATABASE readonly SET default_transaction_read_only = on")
            registry.database.drop_connections()
            within(5, AccessDenied, lambda: registry.commit(put={"a": b""}))

    def test_v5_a_user_that_may_only_select_reads_past_the_keys_of_a_dead_lease(self, server: PostgresServer) -> None:
        url = server.create_database("shown")
        with open_sql(url) as registry:
            lease = registry.lease(1.0)
            registry.commit(put={"a/kept": b"", "b/kept": b""}, ephemeral={"a/held": b"", "b/held": b""}, lease=lease)
            server.sql("CREATE ROLE pxrs_reader LOGIN PASSWORD 'reader'")
            server.sql("GRANT SELECT ON pxrs_entry, pxrs_lease, pxrs_meta TO pxrs_reader", "shown")
            address = url.replace(f"pxrs:{server.password}@", "pxrs_reader:reader@")
            with open_sql(address) as reader:
                assert len(reader.scan("")) == 4
                with reader.watch("a/") as watch:
                    quieten(watch)
                    lease.abandon()
                    assert watch.wait(30), "the lease is over, and nobody has ended it"
                    eventually(lambda: reader.get("a/held") is None)
                    assert [entry.key for entry in reader.scan("", limit=2)] == ["a/kept", "b/kept"]
                    assert reader.get("b/held") is None
                within(5, AccessDenied, lambda: reader.commit(put={"x": b""}))
            with open_sql(address) as fresh:
                assert fresh.get("b/held") is None, "also if no watch has met the lease before"
            assert server.sql("SELECT count(*) FROM pxrs_lease", "shown") == [(1,)]

    def test_commits_are_on_disk_before_they_are_answered(self, server: PostgresServer) -> None:
        url = server.create_database("hasty")
        server.sql("ALTER DATABASE hasty SET synchronous_commit = off")
        server.sql("ALTER DATABASE hasty SET default_transaction_isolation = 'serializable'")
        with open_sql(url) as registry, registry.database.session(time.monotonic() + 5) as session:
            names = ("synchronous_commit", "transaction_isolation", "lock_timeout", "statement_timeout")
            shows = [Call(Statement(f"show_{name}", f"SHOW {name}", (), True, False, False), {}) for name in names]
            values = [rows[0][0] for rows in session.begin(shows)]
            session.rollback()
        assert values == ["on", "read committed", "7500ms", "11s"]


class TestPostgresScans:
    def test_r7_another_collation_does_not_change_the_order(self, server: PostgresServer) -> None:
        url = server.create_database("words", locale=LOCALE)
        assert server.sql("SELECT 'a' < 'B'", "words") == [(True,)], "this database sorts as a dictionary does"
        keys = ["B", "a", "a-b", "a/B", "a/a", "a/b", "a/b/c", "a0", "ab", "b/1", "b/10", "b/2", "~/x", "!/y"]
        with open_sql(url) as registry:
            registry.commit(put=dict.fromkeys(keys, b""))
            assert [e.key for e in registry.scan("")] == sorted(keys)
            assert [e.key for e in registry.scan("a/")] == ["a/B", "a/a", "a/b", "a/b/c"]
            assert [e.key for e in registry.scan("a/", after="a/B", limit=2)] == ["a/a", "a/b"]
            pages: list[str] = []
            while page := registry.scan("", after=pages[-1] if pages else None, limit=3):
                pages += [e.key for e in page]
            assert pages == sorted(keys)

    def test_a_limited_scan_reads_no_more_than_it_gives(self, server: PostgresServer) -> None:
        with open_sql(url_of(server)) as registry:
            for start in range(0, 3000, 1000):
                registry.commit(put={f"many/{i:05}": b"x" * 20 for i in range(start, start + 1000)}, quiet=True)
            assert [e.key for e in registry.scan("many/", after="many/00100", limit=2)] == ["many/00101", "many/00102"]
            text = statements_for("postgresql").scan_some.text
            values = {**key_range("many/"), "namespace": registry._namespace, "limit": "5"}
            for n, name in enumerate(statements_for("postgresql").scan_some.parameters, 1):
                text = text.replace(f"${n}::", f"'{values[name.removeprefix('the_')]}'::")
            (((plan, *_),),) = server.sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {text}")
        read = [node["Actual Rows"] for node in _nodes(plan["Plan"]) if node.get("Relation Name") == "pxrs_entry"]
        assert read == [5]

    def test_quiet_commits_send_no_notification(self, server: PostgresServer) -> None:
        with open_sql(url_of(server)) as registry, psycopg.connect(server.url, autocommit=True) as listener:
            listener.execute(f"LISTEN {registry._channel}".encode())
            registry.commit(put={"a": b"quiet"}, quiet=True)
            registry.commit(put={"b/c": b"loud"})
            assert [n.payload for n in listener.notifies(timeout=5, stop_after=1)] == ["0 b/c"]

    def test_polling_works_where_notifications_do_not_pass(self, server: PostgresServer) -> None:
        url = url_of(server, watch="poll", poll=0.05)
        with (
            open_sql(url) as registry,
            open_sql(url.replace("watch=poll&", "")) as listening,
            registry.watch("w/") as watch,
            listening.watch("w/") as heard,
        ):
            quieten(watch)
            quieten(heard)
            listening.commit(put={"w/a": b""})
            assert watch.wait(30)
            quieten(heard)
            registry.commit(put={"w/a": b"2"})
            assert heard.wait(30), "who polls notifies those who listen"
            lease = listening.lease(2.0)
            listening.commit(ephemeral={"w/m": b""}, lease=lease)
            lease.abandon()
            while registry.get("w/m") is not None:
                assert watch.wait(30)


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from _nodes(child)


class TestSqlite:
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path / 'r.db'}"

    def test_paths_that_cannot_be(self, tmp_path: Path) -> None:
        text = tmp_path / "text"
        text.write_text("this is no database, " * 100)
        for path in (tmp_path, tmp_path / "none" / "r.db", text):
            within(5, InvalidUrl, lambda p=path: open_sql(f"sqlite:///{p}"))  # type: ignore[misc]
        within(5, SchemaMissing, lambda: open_sql(f"sqlite:///{tmp_path / 'new.db'}?create=false"))
        assert not (tmp_path / "new.db").exists()

    def test_an_expiry_further_ahead_than_its_ttl_is_corrected(self, tmp_path: Path) -> None:
        """SQLite counts on a clock that is never set back; but a file may come from elsewhere."""
        path = tmp_path / "registry.db"
        with open_sql(f"sqlite:///{path}") as registry, closing(sqlite3.connect(path)) as connection:
            lease = registry.lease(30)
            lease.abandon()
            registry.commit(ephemeral={"m": b""}, lease=lease)
            ((before,),) = connection.execute("SELECT expires_ms FROM pxrs_lease")
            connection.execute("UPDATE pxrs_lease SET expires_ms = expires_ms + 3600000")
            connection.commit()
            assert registry.get("m") is not None
            ((after,),) = connection.execute("SELECT expires_ms FROM pxrs_lease")
            assert before <= after < before + 3_000_000

    def test_the_printed_ddl_makes_what_create_false_needs(self, tmp_path: Path) -> None:
        path = tmp_path / "r.db"
        with closing(sqlite3.connect(path)) as connection:
            within(5, SchemaMissing, lambda: open_sql(f"sqlite:///{path}?create=false"))
            connection.executescript(ddl("sqlite"))
        with open_sql(f"sqlite:///{path}?create=false") as registry, registry.lease(5) as lease:
            registry.commit(ephemeral={"a": b""}, lease=lease)
            assert registry.get("a") is not None

    def test_a_relative_path_stays_where_it_was(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with open_sql("sqlite:///r.db") as registry:
            monkeypatch.chdir("/")
            registry.database.drop_connections()
            registry.commit(put={"a": b""})
        assert (tmp_path / "r.db").exists()

    def test_a_process_that_stops_with_the_lock_is_an_error_in_time(self, url: str, tmp_path: Path) -> None:
        holding = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None); "
        holding += "c.execute('BEGIN IMMEDIATE'); print('held', flush=True); input()"
        with open_sql(f"{url}?timeout=0.4") as registry:
            registry.commit(put={"a": b"1"})
            command = [sys.executable, "-c", holding, str(tmp_path / "r.db")]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
                try:
                    assert holder.stdout is not None
                    assert holder.stdout.readline() == b"held\n"
                    holder.send_signal(signal.SIGSTOP)
                    within(5, RegistryUnavailable, lambda: registry.commit(put={"a": b"2"}))
                    within(5, RegistryUnavailable, lambda: registry.lease(5))
                    entry = registry.get("a")
                    assert entry is not None, "readers are not in the way"
                    assert entry.value == b"1"
                finally:
                    holder.kill()
            registry.commit(put={"a": b"3"})

    def test_leases_of_another_boot_are_gone_with_their_keys(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with open_sql(url) as registry:
            lease = registry.lease(3600)
            registry.commit(put={"stays": b""}, ephemeral={"goes": b""}, lease=lease)
            lease.abandon()
            with open_sql(url) as same_boot:
                assert len(same_boot.scan("")) == 2
            monkeypatch.setattr(sqlite, "boot_id", lambda: "another")
            with open_sql(url) as after:
                assert [e.key for e in after.scan("")] == ["stays"]
                assert after.sweep() is None, "no lease is left"
            with pytest.raises(LeaseExpired):
                registry.commit(put={"a": b""}, lease=lease)

    def test_a_full_disk_a_read_only_file_and_a_damaged_one(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        connect, pragma = SqliteDatabase._connect, ["PRAGMA max_page_count=12"]

        def connect_and_set(database: SqliteDatabase, timeout: float) -> Any:
            connection = connect(database, timeout)
            connection.execute(pragma[0])
            return connection

        with open_sql(url) as registry:
            registry.commit(put={"a": b"1"})
            monkeypatch.setattr(SqliteDatabase, "_connect", connect_and_set)
            registry.database.drop_connections()
            with pytest.raises(StorageFull):
                registry.commit(put={"a": b"2", "b": b"x" * 100_000})
            assert [(e.key, e.value) for e in registry.scan("")] == [("a", b"1")]
            pragma[0] = "PRAGMA query_only=1"
            registry.database.drop_connections()
            with pytest.raises(AccessDenied):
                registry.commit(put={"a": b"2"})
            monkeypatch.undo()
            registry.database.drop_connections()
            registry.commit(put={"a": b"3"})
        path = Path(url.removeprefix("sqlite:///"))
        data = path.read_bytes()
        path.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))
        with pytest.raises(RegistryCorrupt):
            open_sql(url).scan("")

    def test_a_limited_scan_uses_the_key(self, url: str) -> None:
        with open_sql(url) as registry, registry.database.session(time.monotonic() + 5) as session:
            scan = statements_for("sqlite").scan_some
            explain = Statement("explain", f"EXPLAIN QUERY PLAN {scan.text}", (), True, scan.is_timed, False)
            values = {"the_lower": "a/", "the_upper": "a0", "the_namespace": "pxrs", "the_limit": 5}
            plan = " ".join(row[-1] for row in session.begin([Call(explain, values)])[0])
            session.rollback()
        assert "namespace=? AND key>? AND key<?" in plan
        assert "TEMP B-TREE" not in plan


class _Driver:
    """Stands for a driver that says goodbye to its server when its connection is forgotten."""

    def __init__(self, farewell: int) -> None:
        self._farewell = farewell

    def __del__(self) -> None:
        os.write(self._farewell, b"goodbye")


class _Inheritable(Inherited, _Driver):
    pass


class TestForks:
    def test_r11_a_connection_is_closed_by_the_process_that_made_it_alone(self) -> None:
        receiver, sender = os.pipe()
        connection = _Inheritable(sender)
        pid = os.fork()
        if pid == 0:
            del connection
            gc.collect()
            os._exit(0)
        os.waitpid(pid, 0)
        os.set_blocking(receiver, False)
        with pytest.raises(BlockingIOError):
            os.read(receiver, 7)
        del connection
        assert os.read(receiver, 7) == b"goodbye"
        os.close(receiver)
        os.close(sender)

    @pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
    def test_r11_a_child_neither_uses_nor_closes_what_it_inherits(
        self, server: PostgresServer, tmp_path: Path, kind: str
    ) -> None:
        url = url_of(server) if kind == "postgresql" else f"sqlite:///{tmp_path / 'r.db'}"
        with open_sql(url) as registry, registry.watch("w/") as watch:
            at_once(*[lambda i=i: registry.commit(put={f"k/{i}": b""}) for i in range(4)])  # type: ignore[misc]
            connections = list(registry.database._lanes["work"]._idle)
            pid = os.fork()
            if pid == 0:
                # What a child does that forgets all about it, and then ends in the ordinary way.
                registry.__dict__.clear()
                del registry, watch, connections
                gc.collect()
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            quieten(watch)
            registry.commit(put={"w/a": b""})
            assert watch.wait(30)
            assert registry.database._lanes["work"]._idle == connections, "none was lost"


def test_tls_is_spoken_to_a_postgresql_that_has_it(tmp_path: Path) -> None:
    """The packaged server has none, so this takes one that the system has."""
    programs = installed_postgres()
    if programs is None:
        pytest.skip("no PostgreSQL with TLS is installed here")
    certs = certificates(tmp_path)
    with PostgresServer(tls=certs, client_auth=True, bin_dir=programs) as server:
        tls = f"sslmode=verify-full&sslrootcert={certs.ca}"
        client = f"{tls}&sslcert={certs.client_cert}&sslkey={certs.client_key}"
        with pxrs.registry.open(f"{server.url}?{client}") as store:
            store.commit(put={"a": b"over TLS"})
            assert server.sql("SELECT count(*) FROM pg_stat_ssl WHERE ssl")[0][0] >= 1
        with pytest.raises((AccessDenied, RegistryUnavailable)):
            pxrs.registry.open(f"{server.url}?{tls}&timeout=5")


def test_r11_a_sqlite_file_that_was_open_at_the_fork_is_refused_in_the_child(tmp_path: Path) -> None:
    """SQLite's own books of locks go wrong there: the child's acknowledged commits would be lost."""
    url = f"sqlite:///{tmp_path}/r.db"
    with pxrs.registry.open(url) as parent:
        parent.commit(put={"a": b""})

        def child() -> None:
            with pytest.raises(UsedAfterFork, match="spawn"):
                pxrs.registry.open(url)

        with faults.child(child) as pid:
            assert faults.wait_exit(pid) == 0
        parent.commit(put={"b": b""})

    def later() -> None:
        with pxrs.registry.open(url) as store:
            store.commit(put={"c": b""})

    with faults.child(later) as pid:
        assert faults.wait_exit(pid) == 0


@pytest.mark.parametrize("database", ["postgresql", "sqlite"])
def test_r2_the_thread_that_wakes_watches_survives_what_it_does_not_expect(
    server: PostgresServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    database: str,
) -> None:
    url = f"sqlite:///{tmp_path}/registry.db?poll=0.01" if database == "sqlite" else url_of(server)
    start, is_full = threading.Thread.start, True

    def refuse(thread: threading.Thread) -> None:
        if is_full and thread.name.startswith("pxrs-sql-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with open_sql(url) as never_watched, pytest.raises(RuntimeError):
        never_watched.watch("")
    with open_sql(url) as registry, open_sql(f"{url}&timeout=9") as other:
        with pytest.raises(RuntimeError):
            registry.watch("")
        is_full = False
        with registry.watch("") as watch:
            quieten(watch)
            sweep, failures = registry.sweep, [ValueError("a mistake"), ValueError("and again")]

            def fail() -> float | None:
                if failures:
                    raise failures.pop()
                return sweep()

            monkeypatch.setattr(registry, "sweep", fail)
            other.commit(put={"k/sweep": b""}, ephemeral={"m": b""}, lease=other.lease(0.1, renewed=False))
            eventually(lambda: not failures)
            eventually(lambda: other.get("m") is None)
            quieten(watch)
            assert "a mistake" in caplog.text or "and again" in caplog.text
            other.commit(put={"k/after": b""})
            assert watch.wait(30), "the thread is dead"
