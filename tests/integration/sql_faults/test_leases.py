"""Leases of the SQL registry when clocks are stepped, processes die and others race with them."""

from __future__ import annotations

import signal
import threading
import time
import uuid
from pathlib import Path

import psycopg
import pytest

from pxrs.errors import (
    Conflict,
    LeaseExpired,
)
from pxrs.registry import ABSENT
from pxrs.registry.contract import Commit
from pxrs.registry.sql import registry as sql_registry
from pxrs.testing.actor import Actor
from pxrs.testing.registry_contract import at_once
from pxrs.testing.servers import PostgresServer
from pxrs.testing.waiting import eventually
from tests.integration.sql_faults.stores import open_sql, plan_of, url_of

pytestmark = pytest.mark.sampled(2, of="module")

GOLDEN = Path(__file__).parents[2] / "golden" / "0.1"


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
        with open_sql(url_of(server, timeout=20)) as registry, registry.lease(4) as lease:
            registry.commit(put={"a": b""}, ephemeral={"m": b""}, lease=lease)
            with psycopg.connect(server.url) as blocker:
                blocker.execute("SELECT 1 FROM pxrs_entry WHERE namespace = %s FOR UPDATE", [registry._namespace])
                waiting = [
                    threading.Thread(target=lambda: registry.commit(put={"a": b""}, lease=lease)) for _ in range(12)
                ]
                for thread in waiting:
                    thread.start()
                assert not lease.lost.wait(5.5), "the commits wait for up to 15 s, and the renewals with them"
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
