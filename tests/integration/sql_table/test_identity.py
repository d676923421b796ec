"""Which table a source is, however it is addressed; and a table of PostgreSQL as Spark's processes read it."""

from __future__ import annotations

import json
import pickle
import traceback
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

import pxrs
from pxrs.errors import (
    IdentityChanged,
    ReadFailed,
    WrongSource,
)
from pxrs.group.records import Checkpoint, Keys
from pxrs.sources import SqlTable, sql_table
from pxrs.sources.sql_table.table import Table
from pxrs.testing.servers import PostgresServer
from pxrs.testing.waiting import aside, eventually
from tests.integration.sql_table.tables import COLUMNS, NUMBERS, Place


class TestIdentity:
    """One table has one identity, or the difference is refused where it would restart a group."""

    @pytest.fixture
    def hub(self, tmp_path: Path) -> Iterator[pxrs.Hub]:
        with pxrs.open(tmp_path / "data") as hub:
            yield hub

    def handled(self, hub: pxrs.Hub, source: SqlTable) -> list[int]:
        with hub.consumer(source, "g", until="end") as inbox:
            return sorted(message.offset for message in inbox)

    def spelled(self, place: Place, host: str, table: str, **settings: Any) -> SqlTable:
        url = sqlalchemy.make_url(place.url).set(host=host).render_as_string(hide_password=False)
        given = {"key_column": "account", "value_column": "body", "partitions": 4}
        return place._stack.enter_context(sql_table(url, table, **{**given, **settings}))

    def test_x21_a_group_goes_on_through_any_spelling_of_a_table(self, postgres: Place, hub: pxrs.Hub) -> None:
        spellings = [(host, table) for host in ("localhost", "127.0.0.1") for table in ("orders", "public.orders")]
        ids = []
        for number, (host, table) in enumerate(spellings, 1):
            postgres.insert("a")
            source = self.spelled(postgres, host, table)
            assert self.handled(hub, source) == [number], "only what is new"
            ids.append(source.id)
        assert len(set(ids)) == 1

    def test_a_table_of_that_name_in_another_schema_is_another_one(self, postgres: Place) -> None:
        postgres.do("CREATE SCHEMA old")
        postgres.do(f"CREATE TABLE old.orders ({COLUMNS['postgresql']})")
        one, other = self.spelled(postgres, "localhost", "orders"), self.spelled(postgres, "localhost", "old.orders")
        assert one.id != other.id
        assert one.fingerprint != other.fingerprint
        assert not {one.id, other.id} & {*one.former_ids, *other.former_ids}

    def test_a_group_that_version_0_1_left_under_another_spelling_is_refused(
        self, postgres: Place, hub: pxrs.Hub
    ) -> None:
        postgres.insert("a", "b")
        source = self.spelled(postgres, "127.0.0.1", "orders")
        url = sqlalchemy.make_url(postgres.url)
        # As that version computed it from the address as it was written.
        where = ["postgresql", "127.0.0.1", url.port, url.database, "orders", "id", "account", 4, "xxh64"]
        former = uuid.uuid5(uuid.UUID("6f0b2a55-0a3c-5d0e-9c53-3f6f1d2f7c21"), json.dumps(where)).hex
        keys = Keys("g")
        hub.registry.commit(put={keys.checkpoint(former, p): Checkpoint(2).dump() for p in range(4)})
        with pytest.raises(IdentityChanged, match=f"--id {former}"):
            hub.consumer(source, "g")
        record = hub.add_source(
            "orders", postgres.url, table="orders", id=former, key_column="account", value_column="body", partitions=4
        )
        assert record.id == former
        hub.source("orders", postgres.url)  # with the password, for all that follows
        with hub.consumer("orders", "g", until="end") as inbox:
            assert [message.offset for message in inbox] == [2]

    def test_two_host_names_of_one_server_are_noticed_by_what_the_server_says(
        self, postgres: Place, hub: pxrs.Hub
    ) -> None:
        """The ids differ, as nobody can see from the names that it is one host; the group is refused, not restarted."""
        postgres.insert("a")
        source = self.spelled(postgres, "127.0.0.1", "orders")
        assert self.handled(hub, source) == [1]
        renamed = self.spelled(postgres, "127.1", "orders")  # another way to write the address, as a DNS name would be
        assert renamed.id != source.id
        assert source.id not in renamed.former_ids
        with pytest.raises(IdentityChanged, match=source.id):
            hub.consumer(renamed, "g")
        assert self.handled(hub, self.spelled(postgres, "127.1", "orders", id=source.id)) == []

    def test_of_two_members_that_begin_at_once_under_two_ids_one_is_refused(
        self, postgres: Place, hub: pxrs.Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        postgres.insert("a")
        one, other = self.spelled(postgres, "127.0.0.1", "orders"), self.spelled(postgres, "127.1", "orders")
        commit = hub.registry.commit

        def commit_after_the_other(expect: Mapping[str, int] = {}, *rest: Any, **more: Any) -> dict[str, int]:
            if any(key.startswith(f"groups/g/checkpoints/{one.id}") for key in expect):
                monkeypatch.setattr(hub.registry, "commit", commit)
                assert self.handled(hub, other) == [1]
            return commit(expect, *rest, **more)

        monkeypatch.setattr(hub.registry, "commit", commit_after_the_other)
        with pytest.raises(IdentityChanged, match=other.id):
            hub.consumer(one, "g")
        assert {row.topic_id for row in hub.group("g").describe().partitions} == {other.id}

    def test_credentials_are_not_stored_and_come_from_the_process(
        self, postgres: Place, hub: pxrs.Hub, server: PostgresServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        settings: dict[str, Any] = {"key_column": "account", "value_column": "body", "partitions": 4}
        secret = server.password
        url = postgres.url.replace("postgresql:", "postgresql+psycopg:")
        record = hub.add_source("orders", url, table="orders", **settings)
        database = url.rpartition("/")[2]
        assert record.address == f"postgresql+psycopg://{server.host}:{server.port}/{database}"
        stored = b"".join(path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file())
        assert b"sources/orders" in stored
        assert secret.encode() not in stored
        assert server.user.encode() + b"@" not in stored
        monkeypatch.delenv("PGPASSWORD", raising=False)
        with pytest.raises(ReadFailed) as refused:
            hub.source("orders")
        assert secret not in str(refused.value)
        assert hub.source("orders", postgres.url).id == record.id
        with pxrs.open(tmp_path / "data") as other:
            monkeypatch.setenv("PXRS_SOURCE_ORDERS", postgres.url.replace(server.host, "localhost"))
            assert other.source("orders").end(0) == 0
        monkeypatch.delenv("PXRS_SOURCE_ORDERS")
        monkeypatch.setenv("PGUSER", server.user)
        monkeypatch.setenv("PGPASSWORD", secret)
        with pxrs.open(tmp_path / "data") as other:
            assert other.source("orders").end(0) == 0
            with pytest.raises(WrongSource) as wrong:
                other.source("orders", server.create_database(f"t{next(NUMBERS)}") + "?application_name=x")
            assert secret not in str(wrong.value)

    def test_a_server_that_cannot_be_asked_leaves_the_lag_unknown_and_shows_no_password(
        self, postgres: Place, hub: pxrs.Hub, server: PostgresServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        postgres.insert("a")
        hub.add_source("orders", postgres.url, table="orders", value_column="body", partitions=4)
        hub.source("orders", postgres.url)
        hub.group("g").import_checkpoint(1, "orders")
        assert hub.group("g").describe().lag_text == "<= 1"
        monkeypatch.setenv("PXRS_SOURCE_ORDERS", postgres.url.replace(server.password, "hunter2hunter2"))
        with pxrs.open(tmp_path / "data") as other:
            found = other.group("g").describe()
        assert found.lag is None
        assert "authentication" in str(found.lag_problem)
        assert "hunter2" not in str(found.lag_problem)
        assert {row.topic for row in found.partitions} == {"orders"}


class TestSpark:
    """What Spark's processes do with a table of PostgreSQL, in this process. SQLite: test_spark_tables.py."""

    def plan(self, hub: pxrs.Hub, **options: str) -> list[Any]:
        pytest.importorskip("pyspark")
        from pxrs.spark.options import read_options
        from pxrs.spark.reader import BatchReader

        return BatchReader(read_options({"url": hub.url, "topic": "orders", **options})).partitions()

    def read(self, parts: list[Any]) -> list[int]:
        from pxrs.spark.tasks import TaskReader

        return [offset for part in parts for batch in TaskReader().read(part) for offset in batch["offset"].to_pylist()]

    def test_x21_a_batch_has_all_rows_before_its_end_though_ids_are_committed_out_of_order(
        self, postgres: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks: list[frozenset[str]] = []
        holders = Table.holders
        monkeypatch.setattr(Table, "holders", lambda table: looks.append(found := holders(table)) or found)
        first, later = postgres.session(), postgres.session()
        first.execute("INSERT INTO orders (account, body) VALUES ('a', '1')")
        postgres.insert("b")
        with pxrs.open(tmp_path / "data") as hub:
            hub.add_source("orders", postgres.url, table="orders", value_column="body", partitions=4)
            planning = aside(lambda: self.plan(hub, sourceUrl=postgres.url, minPartitions="2"))
            eventually(lambda: len(looks) >= 3)
            assert not planning.done(), "the id 1 is still to come"
            first.commit()
            parts = planning.result()
        later.execute("INSERT INTO orders (account, body) VALUES ('c', '3')")
        postgres.insert("d")
        assert self.read(parts) == [1, 2], "tasks wait for no writer, and read up to the planned end"
        later.commit()
        assert self.read(parts) == [1, 2]

    def test_credentials_come_from_the_option_or_the_environment_and_are_not_shown(
        self, postgres: Place, server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        postgres.insert("a", "b")
        monkeypatch.delenv("PGPASSWORD", raising=False)
        with pxrs.open(tmp_path / "data") as hub:
            hub.add_source("orders", postgres.url, table="orders", value_column="body", partitions=4)
            with pytest.raises(ReadFailed, match=r"PXRS_SOURCE_ORDERS.*option sourceUrl"):
                self.plan(hub)
            wrong = postgres.url.replace(server.password, "hunter2hunter2")
            with pytest.raises(ReadFailed, match="authentication") as refused:
                self.plan(hub, sourceUrl=wrong)
            assert "hunter2" not in "".join(traceback.format_exception(refused.value))
            given = self.plan(hub, sourceUrl=postgres.url)
            monkeypatch.setenv("PXRS_SOURCE_ORDERS", postgres.url)
            found = self.plan(hub)
        assert server.password not in repr(given)
        assert server.password.encode() not in pickle.dumps(found)
        assert self.read(given) == self.read(found) == [1, 2]
        monkeypatch.delenv("PXRS_SOURCE_ORDERS")
        assert self.read(given) == [1, 2]
        with pytest.raises(ReadFailed, match=r"PXRS_SOURCE_ORDERS.*option sourceUrl"):
            self.read(found)

    def test_a_task_that_reaches_another_server_with_a_database_of_this_name_is_refused(
        self, postgres: Place, server: PostgresServer, tmp_path: Path
    ) -> None:
        postgres.insert("a")
        with pxrs.open(tmp_path / "data") as hub:
            hub.add_source("orders", postgres.url, table="orders", value_column="body", partitions=4)
            (part,) = self.plan(hub, sourceUrl=postgres.url)
        address = f"postgresql://db.example/{postgres.url.rpartition('/')[2]}"
        planned = replace(part, record=replace(part.record, address=address))
        assert self.read([planned]) == [1], "the server says that it is the registered one, by whatever name"
        with pytest.raises(WrongSource, match="the option sourceUrl") as wrong:
            self.read([replace(planned, record=replace(planned.record, fingerprint="of another server"))])
        assert server.password not in str(wrong.value)
