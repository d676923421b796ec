"""Who may use a SQL registry: permissions, TLS; and what PostgreSQL does for a scan."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pxrs.registry
from pxrs.errors import (
    AccessDenied,
    InvalidUrl,
    RegistryUnavailable,
    SchemaMissing,
)
from pxrs.registry import ABSENT
from pxrs.registry.sql import ddl
from pxrs.registry.sql.statements import Call, Statement, key_range, statements_for
from pxrs.testing.registry_contract import quieten
from pxrs.testing.servers import PostgresServer, certificates, installed_postgres
from pxrs.testing.waiting import eventually
from tests.integration.sql_faults.stores import LOCALE, open_sql, url_of, within

pytestmark = pytest.mark.sampled(2, of="module")


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
            lease = registry.lease(3.0)
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
            other.commit(put={"k/sweep": b""}, ephemeral={"m": b""}, lease=other.lease(1.0, renewed=False))
            eventually(lambda: not failures)
            eventually(lambda: other.get("m") is None)
            quieten(watch)
            assert "a mistake" in caplog.text or "and again" in caplog.text
            other.commit(put={"k/after": b""})
            assert watch.wait(30), "the thread is dead"
