"""Registered sources: somebody else's table under a name, with SQLite. PostgreSQL is in tests/integration."""

from __future__ import annotations

import logging
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import pxrs
from pxrs.cli.app import app
from pxrs.errors import (
    GroupActive,
    InvalidTopic,
    InvalidUrl,
    ReadFailed,
    SourceExists,
    TopicExists,
    UnknownSource,
    UnknownTopic,
    WrongSource,
)
from pxrs.registry.contract import Registry
from pxrs.sources import sql_table
from pxrs.sources.catalog import Catalog, _check_place, open_record
from pxrs.sources.sql_table.identity import public_url, shown_url, without_secrets
from tests.unit.sources.shop import SETTINGS, Shop, handle_all


class TestCatalog:
    def test_x21_a_registered_source_is_consumed_by_its_name_alone(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert(*(f"account-{i % 9}" for i in range(40)))
        record = shop.add(hub)
        assert (record.kind, record.name, record.table, record.partitions) == ("sql-table", "events", "events", 6)
        assert hub.sources() == [record]
        assert handle_all(hub, "events") == list(range(1, 41))
        shop.insert("account-1")
        with pxrs.open(shop.at) as other:
            assert handle_all(other, "events") == [41]
            assert other.group("g").describe().lag == 0

    def test_a_source_has_the_id_that_sql_table_gives_so_that_groups_go_on(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert("a", "b", "c")
        with shop.table() as table:
            assert handle_all(hub, table) == [1, 2, 3]
            assert shop.add(hub).id == table.id
        assert handle_all(hub, "events") == []

    def test_the_id_may_be_given(self, shop: Shop, hub: pxrs.Hub) -> None:
        with shop.table(identity="the shop") as table:
            assert shop.add(hub, id=table.id).id == table.id
            with pytest.raises(SourceExists, match="under the name events"):
                shop.add(hub, "again", identity="the shop")
        with pytest.raises(InvalidTopic, match="identity or id, not both"):
            shop.add(hub, "both", identity="a", id="b")
        with pytest.raises(InvalidTopic, match="letters and digits"):
            shop.add(hub, "bad", id="a/b")

    def test_what_is_registered_is_as_the_table_is(self, shop: Shop, hub: pxrs.Hub) -> None:
        for settings, match in (
            ({"key_column": "nothing"}, "no column 'nothing'"),
            ({"partitions": 0}, "0 partitions"),
            ({"value_column": None}, "either value_column or value_columns"),
            ({"value_column": None, "value_columns": "body"}, "list of names"),
            ({"partitioner": "crc"}, "crc"),
        ):
            with pytest.raises(InvalidTopic, match=match):
                shop.add(hub, **settings)
        with pytest.raises(InvalidTopic, match="table 'nothing' does not exist"):
            hub.add_source("events", shop.url, table="nothing", value_column="body")
        with pytest.raises(InvalidTopic, match="source name 'a b'"):
            shop.add(hub, "a b")
        with pytest.raises(InvalidUrl):
            hub.add_source("events", "nonsense", table="events", value_column="body")
        assert hub.sources() == []

    def test_create_topic_with_exist_ok_asks_once_whether_a_source_has_the_name(
        self, shop: Shop, hub: pxrs.Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shop.add(hub)
        hub.create_topic("orders")
        find, asked = Catalog.find, list[str]()
        monkeypatch.setattr(Catalog, "find", lambda self, name: (asked.append(name), find(self, name))[1])
        with pytest.raises(TopicExists, match="registered source"):
            hub.create_topic("events", exist_ok=True)
        assert asked == ["events"]

    def test_a_name_is_a_topics_or_a_sources(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.add(hub)
        hub.create_topic("orders")
        with pytest.raises(TopicExists, match="registered source"):
            hub.create_topic("events")
        with pytest.raises(SourceExists, match="is a topic"):
            shop.add(hub, "orders")
        assert [topic.name for topic in hub.topics()] == ["orders"]

    def test_a_topic_wins_over_a_source_of_its_name(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert("a")
        shop.add(hub)
        with pxrs.open(shop.at, "memory:") as elsewhere:  # this one cannot know of the source
            elsewhere.create_topic("events", partitions=1)
        assert hub.readable("events").partitions == 1

    def test_registered_twice_it_must_be_the_same(self, shop: Shop, hub: pxrs.Hub) -> None:
        first = shop.add(hub)
        with pytest.raises(SourceExists, match="is already registered"):
            shop.add(hub)
        assert shop.add(hub, exist_ok=True) == first
        with pytest.raises(SourceExists, match="partitions is 6, not 8"):
            shop.add(hub, partitions=8, exist_ok=True)
        shop.do("CREATE TABLE others (id INTEGER PRIMARY KEY, account TEXT, body TEXT)")
        with pytest.raises(SourceExists, match="table is 'events', not 'others'"):
            hub.add_source("events", shop.url, table="others", id=first.id, exist_ok=True, **SETTINGS)

    def test_a_name_that_nobody_has_is_an_unknown_topic_and_makes_no_registry(self, tmp_path: Path) -> None:
        with pxrs.open(tmp_path / "data") as hub:
            assert hub.sources() == []
            with pytest.raises(UnknownTopic):
                hub.consumer("events", group="g")
        assert not (tmp_path / "data").exists()

    def test_what_is_removed_is_forgotten_and_its_checkpoints_are_not(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert("a", "b")
        shop.add(hub)
        with hub.consumer("events", "g", until="end") as inbox:
            assert len(list(inbox)) == 2
            with pytest.raises(GroupActive, match="of group g"):
                hub.remove_source("events")
        hub.remove_source("events")
        assert hub.sources() == []
        for ask in (lambda: hub.source("events"), lambda: hub.remove_source("events")):
            with pytest.raises(UnknownSource):
                ask()
        shop.insert("c")
        shop.add(hub, "renamed")
        assert handle_all(hub, "renamed") == [3]

    def test_only_the_source_that_was_looked_at_is_removed(
        self, shop: Shop, hub: pxrs.Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another process removes it and adds another one of the name, which a member then reads."""
        shop.add(hub)
        looks: list[str] = []

        def look(_registry: Registry, id: str) -> list[tuple[str, str]]:
            looks.append(id)
            if len(looks) > 1:
                return [("g", "anna")]
            with pxrs.open(shop.at) as other:
                other.remove_source("events")
                shop.add(other, partitions=8)
            return []

        with monkeypatch.context() as patched:
            real = pxrs.group.listing.members_of
            looking = iter([look, real])
            patched.setattr("pxrs.group.listing.members_of", lambda *args: next(looking, look)(*args))
            with pytest.raises(GroupActive):
                hub.remove_source("events")
        assert [each.partitions for each in hub.sources()] == [8]

    def test_the_hub_opens_a_source_once_and_closes_it(self, shop: Shop) -> None:
        with pxrs.open(shop.at) as hub:
            shop.add(hub)
            first = hub.source("events")
            assert hub.source("events") is first
            assert hub.readable("events") is first
            with hub.source("events") as again:
                assert again is first
            first.close()
            assert not first.is_closed, "others may be reading it"
            assert hub.source("events") is first
        assert first.is_closed


class TestAddresses:
    def test_a_process_gives_the_address_in_its_environment(
        self, shop: Shop, hub: pxrs.Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        record = shop.add(hub, "my.events-2")
        assert record.variable == "PXRS_SOURCE_MY_EVENTS_2"
        monkeypatch.setenv(record.variable, f"sqlite:///{shop.folder}/other.db")
        with sqlite3.connect(shop.folder / "other.db") as connection:
            connection.execute("CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, account TEXT, body TEXT)")
        connection.close()
        with pytest.raises(WrongSource, match=r"other\.db, which is another database.*--id " + record.id):
            hub.source("my.events-2")
        monkeypatch.delenv(record.variable)
        assert hub.source("my.events-2").id == record.id
        with pytest.raises(WrongSource):
            hub.source("my.events-2", f"sqlite:///{shop.folder}/other.db")

    def test_the_address_does_not_depend_on_the_current_directory(
        self, shop: Shop, hub: pxrs.Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(shop.folder)
        record = hub.add_source("events", "sqlite:///shop.db", table="events", **SETTINGS)
        assert record.address == shop.url
        monkeypatch.chdir("/")
        assert hub.source("events").id == shop.table().id

    @pytest.mark.parametrize("driver", ["", "+psycopg"])
    def test_secrets_are_neither_stored_nor_shown(self, driver: str) -> None:
        sqlalchemy = pytest.importorskip("sqlalchemy")
        url = sqlalchemy.make_url(
            f"postgresql{driver}://anna:s%40crt@db.example:5433/shop?password=hidden&sslpassword=key&sslmode=require"
        )
        assert public_url(url).render_as_string(hide_password=False) == (
            f"postgresql{driver}://db.example:5433/shop?sslmode=require"
        )
        assert shown_url(url) == f"postgresql{driver}://anna@db.example:5433/shop?sslmode=require"
        assert without_secrets("s@crt s%40crt hidden key other", url) == "*** *** *** *** other"

    def test_another_server_at_the_registered_address_is_refused(self, shop: Shop, hub: pxrs.Hub) -> None:
        """If both databases tell which one they are, the address does not count."""
        record = shop.add(hub)
        with shop.table(id=record.id) as table:
            _check_place(record, table, "the url")
            _check_place(replace(record, fingerprint=None), table, "the url")
            with pytest.raises(WrongSource, match=f"--id {record.id}"):
                _check_place(replace(record, fingerprint="of another server"), table, "the url")

    @pytest.mark.parametrize("name", ["anna:s3cret@db.example/shop", "anna:s3cret", "s3cret@db.example"])
    def test_a_password_that_a_typing_error_puts_into_the_database_name_is_not_shown(
        self, shop: Shop, hub: pxrs.Hub, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        shop.add(hub)
        record = replace(hub.sources()[0], address="postgresql://db.example/shop")
        for call in (
            lambda: sql_table(f"postgresql:///{name}", "events", value_column="body"),
            lambda: hub.source("events", f"postgresql:///{name}"),
            lambda: open_record(record, f"postgresql:///{name}"),
        ):
            with pytest.raises(InvalidUrl) as refused:
                call()
            assert "s3cret" not in str(refused.value)

    def test_options_that_are_not_stored_are_named(
        self, shop: Shop, hub: pxrs.Hub, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "pxrs.sources.catalog"):
            record = hub.add_source("events", f"{shop.url}?isolation_level=IMMEDIATE", table="events", **SETTINGS)
        assert record.address == shop.url
        assert "isolation_level; each process must pass them in PXRS_SOURCE_EVENTS" in caplog.text
        assert "IMMEDIATE" not in caplog.text


def test_a_database_that_cannot_be_reached_is_not_registered_and_its_password_is_not_shown(shop: Shop) -> None:
    url = "postgresql://anna:hunter2hunter2@127.0.0.1:1/shop?password=hunter2more&connect_timeout=2"
    with pxrs.open("memory:") as hub, pytest.raises(ReadFailed) as failed:
        hub.add_source("events", url, table="events", **SETTINGS)
    assert "hunter2" not in str(failed.value)
    assert "anna@127.0.0.1:1/shop" in str(failed.value)
    done = CliRunner().invoke(
        app,
        ["source", "add", "e", "--at", shop.at, "--sql-table", url, "--table", "events", "--value-column", "body"],
    )
    assert "hunter2" not in f"{done.output}{done.exception}"


@pytest.mark.parametrize(
    "url", ["postgresql://anna:hunter2@hunter2@db.example/shop", b"postgresql://anna:hunter2@db/s"]
)
def test_an_address_that_cannot_be_used_is_refused_without_being_shown(shop: Shop, url: Any) -> None:
    with pxrs.open("memory:") as hub:
        shop.add(hub)
        for call in (
            lambda: hub.add_source("others", url, table="events", **SETTINGS),
            lambda: hub.source("events", url),
        ):
            with pytest.raises(InvalidUrl) as refused:
                call()
            assert "hunter2" not in str(refused.value)
