"""The SQL registry when replies are lost, and when its server stops, restarts or is killed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pxrs.errors import (
    OutcomeUnknown,
    RegistryUnavailable,
)
from pxrs.registry import ABSENT, Registry
from pxrs.registry.contract import Commit
from pxrs.registry.limit import time_limit
from pxrs.registry.sql.database import ConnectionLost, Session
from pxrs.registry.sql.postgresql import PostgresSession
from pxrs.registry.sql.registry import SqlRegistry
from pxrs.testing.history import record
from pxrs.testing.linearizability import check
from pxrs.testing.proxy import Proxy
from pxrs.testing.registry_contract import at_once, quieten
from pxrs.testing.servers import PostgresServer
from pxrs.testing.waiting import eventually
from tests.integration.sql_faults.stores import open_sql, plan_of, url_of, within

pytestmark = pytest.mark.sampled(2, of="module")

TIMEOUT_S = 3.0
"""Of the handles: enough to connect on a busy machine. `time_limit` bounds the calls that are to fail."""


@pytest.fixture
def proxy(server: PostgresServer) -> Iterator[Proxy]:
    with Proxy(server.host, server.port) as proxy:
        yield proxy


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
        with open_sql(url_of(server, proxy, timeout=TIMEOUT_S)) as registry:
            registry.commit(put={"a": b"1"})
            count = self.before_commit(monkeypatch, proxy.drop_replies)
            with time_limit(0.5):
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
        with open_sql(url_of(server, timeout=TIMEOUT_S)) as registry, registry.watch("w/"):
            registry.commit(put={"a": b"1"})
            calls: list[Callable[[], object]] = [
                lambda: registry.commit(put={"a": b"2"}),
                lambda: registry.get("a"),  # this one has to connect
            ]
            server.pause()
            try:
                for call in calls:
                    with time_limit(0.6):
                        within(5, RegistryUnavailable, call)
            finally:
                server.resume()
            # What was never answered had not sent COMMIT.
            entry = eventually(lambda: _patient_get(registry, "a"))
            assert entry.value == b"1"

    def test_a_silent_network_is_an_error_in_time(self, server: PostgresServer, proxy: Proxy) -> None:
        with open_sql(url_of(server, proxy, timeout=TIMEOUT_S)) as registry:
            version = registry.commit(put={"a": b"1"})["a"]
            proxy.stall()
            # One that expects all its keys is sent whole, so nobody knows whether it arrives.
            with time_limit(0.5):
                within(5, OutcomeUnknown, lambda: registry.commit(expect={"a": version}, delete=["a"]))
            with time_limit(0.5):
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
                try:
                    proxy.wait_for_request(1.0)
                except TimeoutError:  # the clients have done all their operations
                    break
                time.sleep(0.002)  # the server answers
                proxy.restore()
            proxy.restore()

        during = crash if fault == "crash" else lose_replies
        for _ in range(3):  # where a reply is lost is up to the machine, and it may be that of no COMMIT
            seed = random.randrange(1 << 30)
            history = record([url_of(server, proxy, timeout=4)], 3, 300, seed, keys=("a", "b", "c/d"), during=during)
            verdict = check(history)
            assert verdict.ok, f"seed {seed}: {verdict}"
            if fault == "crash" or any(getattr(operation, "outcome", "") == "unknown" for operation in history):
                return
        pytest.fail("no outcome of a commit was unknown")

    def test_a_lease_survives_a_restart_of_the_server(self, server: PostgresServer) -> None:
        # Longer than a restart takes on a busy machine.
        with open_sql(url_of(server)) as registry, registry.lease(20) as lease:
            registry.commit(ephemeral={"m": b""}, lease=lease)
            server.kill()
            server.restart()
            deadline = lease.deadline
            eventually(lambda: lease.deadline > deadline)
            registry.commit(put={"a": b""}, lease=lease)
            assert registry.get("m") is not None

    def test_a_watch_that_the_network_silently_forgot_is_woken(self, server: PostgresServer, proxy: Proxy) -> None:
        with open_sql(url_of(server, proxy, timeout=1.5)) as registry, registry.watch("w/") as watch:
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
