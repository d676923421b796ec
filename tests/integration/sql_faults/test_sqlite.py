"""SQLite as a registry, and connections of either database in a forked child."""

from __future__ import annotations

import gc
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import pxrs.registry
from pxrs.errors import (
    AccessDenied,
    InvalidUrl,
    LeaseExpired,
    RegistryCorrupt,
    RegistryUnavailable,
    SchemaMissing,
    StorageFull,
    UsedAfterFork,
)
from pxrs.registry.limit import time_limit
from pxrs.registry.sql import ddl, sqlite
from pxrs.registry.sql.database import Inherited
from pxrs.registry.sql.sqlite import SqliteDatabase
from pxrs.registry.sql.statements import Call, Statement, statements_for
from pxrs.testing import faults
from pxrs.testing.registry_contract import at_once, quieten
from pxrs.testing.servers import PostgresServer
from tests.integration.sql_faults.stores import open_sql, url_of, within


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
        with open_sql(f"{url}?timeout=3") as registry:
            registry.commit(put={"a": b"1"})
            calls: list[Callable[[], object]] = [
                lambda: registry.commit(put={"a": b"2"}),
                lambda: registry.lease(5),
            ]
            command = [sys.executable, "-c", holding, str(tmp_path / "r.db")]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
                try:
                    assert holder.stdout is not None
                    assert holder.stdout.readline() == b"held\n"
                    holder.send_signal(signal.SIGSTOP)
                    for call in calls:
                        with time_limit(0.4):  # the others have more time on a busy machine
                            within(5, RegistryUnavailable, call)
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
            connections = list(registry.database._pools["work"]._idle)
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
            assert registry.database._pools["work"]._idle == connections, "none was lost"


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
