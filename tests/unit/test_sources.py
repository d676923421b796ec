"""Registered sources: somebody else's table under a name, with SQLite. PostgreSQL is in tests/integration."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

import pxrs
from pxrs.cli.app import app
from pxrs.errors import (
    Conflict,
    GroupActive,
    GroupError,
    IdentityChanged,
    InvalidTopic,
    InvalidUrl,
    OffsetOutOfRange,
    ReadFailed,
    SourceChanged,
    SourceExists,
    TopicExists,
    UnknownGroup,
    UnknownSource,
    UnknownTopic,
    WrongSource,
)
from pxrs.group.foreign import foreign_of
from pxrs.group.incarnation import Hooks
from pxrs.group.lag import Seen
from pxrs.group.protocol import MemberProtocol
from pxrs.group.records import Checkpoint, Keys, Member, Paused
from pxrs.hashing import xxh64
from pxrs.registry.contract import Registry
from pxrs.registry.steps import Write, perform
from pxrs.sources import SqlTable, sql_table
from pxrs.sources.catalog import Catalog, _check_place, open_record
from pxrs.sources.sql_table.identity import Meaning, Resolved, identify, public_url, shown_url, without_secrets
from pxrs.sources.sql_table.source import PASSABLE_MAX

PARTITIONS = 6
PATIENCE_S = 30.0
SETTINGS: dict[str, Any] = {"key_column": "account", "value_column": "body", "partitions": PARTITIONS}


class Shop:
    """A table `events` in a file, a hub, and the hub's command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder}/shop.db"
        self.at = str(folder / "data")
        self.do("CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, account TEXT, body TEXT)")

    def do(self, statement: str, *rows: tuple[Any, ...]) -> None:
        with sqlite3.connect(self.folder / "shop.db") as connection:
            if rows:
                connection.executemany(statement, rows)
            else:
                connection.execute(statement)
        connection.close()

    def insert(self, *accounts: str) -> None:
        self.do("INSERT INTO events (account, body) VALUES (?, ?)", *((account, account) for account in accounts))

    def add(self, hub: pxrs.Hub, name: str = "events", **settings: Any) -> Any:
        return hub.add_source(name, self.url, table="events", **{**SETTINGS, **settings})

    def table(self, **settings: Any) -> SqlTable:
        return sql_table(self.url, "events", **{**SETTINGS, **settings})

    def run(self, *arguments: str, code: int = 0) -> str:
        """What a command prints."""
        done = CliRunner().invoke(app, [*arguments, "--at", self.at])
        if code == 0 and done.exception is not None:
            raise done.exception
        assert done.exit_code == code, done.output
        return done.output


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


@pytest.fixture
def hub(shop: Shop) -> Iterator[pxrs.Hub]:
    with pxrs.open(shop.at) as hub:
        yield hub


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def handle_all(hub: pxrs.Hub, topic: str | SqlTable, group: str = "g") -> list[int]:
    with hub.consumer(topic, group, until="end") as inbox:
        return sorted(message.offset for message in inbox)


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
        with pytest.raises(InvalidTopic, match="one of them"):
            shop.add(hub, "both", identity="a", id="b")
        with pytest.raises(InvalidTopic, match="letters and digits"):
            shop.add(hub, "bad", id="a/b")

    def test_what_is_registered_is_as_the_table_is(self, shop: Shop, hub: pxrs.Hub) -> None:
        for settings, match in (
            ({"key_column": "nothing"}, "no column 'nothing'"),
            ({"partitions": 0}, "0 partitions"),
            ({"value_column": None}, "one of them"),
            ({"value_column": None, "value_columns": "body"}, "list of names"),
            ({"partitioner": "crc"}, "crc"),
        ):
            with pytest.raises(InvalidTopic, match=match):
                shop.add(hub, **settings)
        with pytest.raises(InvalidTopic, match="no table 'nothing'"):
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
        with pytest.raises(SourceExists, match="registered already"):
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
            real = pxrs.group.admin.members_of
            looking = iter([look, real])
            patched.setattr("pxrs.group.admin.members_of", lambda *args: next(looking, look)(*args))
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
        assert "isolation_level; processes give them in PXRS_SOURCE_EVENTS" in caplog.text
        assert "IMMEDIATE" not in caplog.text


class TestIdentity:
    MEANING = Meaning("id", "account", 8, "xxh64")

    def ids(self, url: str, *names: str) -> tuple[str, tuple[str, ...]]:
        sqlalchemy = pytest.importorskip("sqlalchemy")
        found = identify(sqlalchemy.make_url(url), Resolved(None, names), self.MEANING, None, None)
        return found.id, found.former_ids

    def test_spellings_of_one_table_have_one_id_and_it_is_that_of_version_0_1(self) -> None:
        ids = {
            self.ids(f"postgresql{driver}://{login}{host}{port}/shop", "events", "public.events")[0]
            for driver in ("", "+psycopg")
            for login in ("", "anna:secret@")
            for host in ("localhost", "127.0.0.1", "[::1]", "LOCALHOST")
            for port in ("", ":5432")
        }
        # Of postgresql://localhost/shop and events, by version 0.1.
        assert ids == {"ddaf646763765c05b07a3b4c5c935bb8"}

    def test_other_places_and_tables_have_other_ids(self) -> None:
        ids = [
            self.ids(url, *names)[0]
            for url in ("postgresql://localhost/shop", "postgresql://db/shop", "postgresql://localhost:5433/shop")
            for names in (("events", "public.events"), ("audit.events",))
        ]
        ids += [self.ids("postgresql:///shop?host=db2", "events")[0], self.ids("postgresql:///shop", "events")[0]]
        assert len(set(ids)) == 8

    def test_other_services_and_sockets_are_other_places(self) -> None:
        urls = [
            *("postgresql:///?service=a", "postgresql:///?service=b"),
            *("postgresql:///shop?host=/run/a", "postgresql:///shop?host=/run/b", "postgresql:///shop"),
        ]
        ids = [self.ids(url, "events") for url in urls]
        assert len({id for id, _ in ids}) == 5
        # Version 0.1 computed one id for all services, and one for all folders of sockets.
        assert self.ids("postgresql:///", "events")[0] in ids[0][1]
        assert self.ids("postgresql:///shop", "events")[0] in ids[2][1]
        assert not {id for id, _ in ids[:2]} & {*ids[0][1], *ids[1][1]}

    def test_the_id_that_version_0_1_computed_for_a_port_among_the_options_is_known(self) -> None:
        by_0_1 = self.ids("postgresql://db/shop", "events")[0]  # it took this address for one with the port 5432
        id, former = self.ids("postgresql://db/shop?port=5433", "events")
        assert id == self.ids("postgresql://db:5433/shop", "events")[0]
        assert by_0_1 in former
        assert by_0_1 not in self.ids("postgresql://db:5433/shop", "events")[1]

    def test_the_ids_of_other_spellings_in_version_0_1_are_known(self) -> None:
        spelled = {
            "127.0.0.1 and events": "cb4e1ec2fe5250e592589cd7d235ce9b",
            "localhost and public.events": "aaccaa49998f5a1f9666f3075a649ce4",
            "no host and events": "7f65979d4e145f16962283f7d24b2748",
        }
        id, former = self.ids("postgresql://127.0.0.1/shop", "events", "public.events")
        assert id not in former
        assert set(spelled.values()) <= set(former)
        assert len(former) == 7, "four ways to write the host, two to write the table, less the id itself"
        assert self.ids("postgresql://db/shop", "audit.events")[1] == ()
        id, former = self.ids("postgresql://DB/shop", "events")
        assert former != (), "version 0.1 took DB for another host than db"

    def test_a_group_with_checkpoints_under_another_id_is_refused(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert("a", "b")
        with shop.table(id="former1") as former:
            assert handle_all(hub, former) == [1, 2]
        with shop.table() as table, pytest.raises(IdentityChanged, match=r"--id former1") as refused:
            hub.consumer(table, "g")
        assert (refused.value.former, refused.value.id) == ("former1", table.id)
        assert f"events of {shop.url}" in str(refused.value)
        found = hub.group("g").describe()
        assert {row.topic_id for row in found.partitions} == {"former1"}
        assert found.members == ()
        shop.add(hub, id="former1")
        shop.insert("c")
        assert handle_all(hub, "events") == [3]

    def test_a_group_of_version_0_1_under_a_former_spelling_is_refused(
        self, shop: Shop, hub: pxrs.Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It has checkpoints, and no record of what it reads."""
        keys = Keys("g")
        with shop.table() as table:
            table.former_ids = ("spelled",)
            hub.registry.commit(put={keys.checkpoint("spelled", p): Checkpoint(2).dump() for p in range(PARTITIONS)})
            with pytest.raises(IdentityChanged, match="spelled"):
                hub.consumer(table, "g")
            shop.insert("a", "b", "c")
            hub.group("g", table).import_checkpoint(2, "events")  # that is a word from the user
            assert handle_all(hub, table) == [2, 3]

    def test_a_group_of_version_0_1_learns_the_name_of_its_table_when_a_member_joins(
        self, shop: Shop, hub: pxrs.Hub
    ) -> None:
        keys = Keys("g")
        with shop.table(name="mine") as table:
            hub.registry.commit(put={keys.checkpoint(table.id, p): Checkpoint(1).dump() for p in range(PARTITIONS)})
            assert {row.topic for row in hub.group("g").describe().partitions} == {table.id}
            hub.consumer(table, "g").close()
        assert {row.topic for row in hub.group("g").describe().partitions} == {"mine"}
        assert (shop.folder / "data/registry/pxrs/consumer-groups/g/offsets/mine/partition-0.offset").exists()

    @pytest.mark.parametrize("given", [{"id": "typo"}, {"identity": "the shop"}])
    def test_an_id_that_is_given_does_not_restart_a_group_either(
        self, shop: Shop, hub: pxrs.Hub, given: dict[str, str]
    ) -> None:
        """The group is one of version 0.1, without a record of what it reads."""
        keys = Keys("g")
        with shop.table() as table:
            hub.registry.commit(put={keys.checkpoint(table.id, p): Checkpoint(1).dump() for p in range(PARTITIONS)})
        shop.add(hub, **given)
        with pytest.raises(IdentityChanged, match=table.id):
            hub.consumer("events", "g")

    @pytest.mark.parametrize("changed", [{"partitions": 8}, {"partitions": 4}, {"key_column": None}])
    def test_checkpoints_are_not_taken_for_those_of_other_partitions(
        self, shop: Shop, hub: pxrs.Hub, changed: dict[str, Any]
    ) -> None:
        """Rows that change their partition could lie before its checkpoint, and would be passed over."""
        shop.insert("a", "b")
        record = shop.add(hub)
        handle_all(hub, "events")
        hub.remove_source("events")
        shop.add(hub, id=record.id, **changed)
        with pytest.raises(SourceChanged, match="6 partitions by xxh64, the key column account"):
            hub.consumer("events", "g")
        with pytest.raises(SourceChanged):
            hub.group("g").import_checkpoint(1, "events")
        hub.group("g").delete()
        assert handle_all(hub, "events") == [1, 2]

    @pytest.mark.parametrize("partitions", [4, 8])
    def test_checkpoints_of_version_0_1_must_be_of_as_many_partitions(
        self, shop: Shop, hub: pxrs.Hub, partitions: int
    ) -> None:
        keys = Keys("g")
        with shop.table() as table:
            hub.registry.commit(
                put={keys.checkpoint(table.id, p): Checkpoint(1, by="anna").dump() for p in range(PARTITIONS)}
            )
        shop.add(hub, id=table.id, partitions=partitions)
        with pytest.raises(SourceChanged, match="with 6 partitions, and it is read with"):
            hub.consumer("events", "g")

    def test_a_part_of_the_partitions_may_be_imported(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert("a", "b")
        shop.add(hub)
        hub.group("g").import_checkpoint({0: 3}, "events")
        assert handle_all(hub, "events") == [i for i, key in ((1, b"a"), (2, b"b")) if xxh64(key) % PARTITIONS]

    def test_a_deleted_group_may_begin_under_another_id(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert("a")
        with shop.table(id="former1") as former:
            assert handle_all(hub, former) == [1]
        hub.group("g").delete()
        with shop.table() as table:
            assert handle_all(hub, table) == [1]


class TestChangedSettings:
    """A group that has checkpoints of a table goes on only with the settings that they were written with."""

    CHANGES: tuple[dict[str, Any], ...] = (
        {"partitions": 8},
        {"key_column": None},
        {"partitioner": "murmur2"},
        {"id_column": "number"},
    )

    @pytest.mark.parametrize("change", CHANGES)
    def test_x21_a_group_is_not_restarted_when_a_source_is_registered_with_other_settings(
        self, shop: Shop, hub: pxrs.Hub, change: dict[str, Any]
    ) -> None:
        shop.do("ALTER TABLE events ADD COLUMN number INTEGER")
        shop.insert(*(f"account-{i}" for i in range(12)))
        former = shop.add(hub)
        assert len(handle_all(hub, "events")) == 12
        hub.remove_source("events")
        shop.add(hub, **change)
        with pytest.raises(SourceChanged, match=f"pxrs group delete g --topic {former.id}") as refused:
            handle_all(hub, "events")
        assert "6 partitions by xxh64, the key column account" in str(refused.value)
        assert hub.group("g").describe().members == ()
        with pytest.raises(SourceChanged), shop.table(**change) as table:
            hub.consumer(table, "g")

    def test_of_two_members_that_join_with_different_settings_only_one_begins(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert("a", "b")
        shop.add(hub)
        first = hub.readable("events")
        hub.remove_source("events")
        shop.add(hub, partitions=8)
        second = hub.readable("events")
        keys = Keys("g")
        protocols = [protocol_of(keys, source) for source in (first, second)]
        # Both read the group's records before either of them writes its first checkpoints.
        steps = [protocol._pin() for protocol in protocols]
        writes = [until_write(each, hub.registry) for each in steps]
        perform(writes[0], hub.registry, None)
        with pytest.raises(Conflict) as refused:
            perform(writes[1], hub.registry, None)
        with pytest.raises(SourceChanged):
            until_write(steps[1], hub.registry, refused.value)

    def test_a_member_with_the_former_settings_is_refused_once_a_checkpoint_was_imported_for_the_new_ones(
        self, shop: Shop, hub: pxrs.Hub
    ) -> None:
        shop.insert("a", "b", "c")
        with shop.table() as former, shop.table(partitions=8) as table:
            assert handle_all(hub, former) == [1, 2, 3]
            hub.group("g", table).import_checkpoint(3, "events")
            assert handle_all(hub, table) == [3]
            with pytest.raises(SourceChanged):
                hub.consumer(former, "g")

    def test_a_group_forgets_one_of_its_sources(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert("a", "b")
        former = shop.add(hub)
        hub.create_topic("orders", partitions=2)
        handle_all(hub, "events")
        handle_all(hub, "orders")
        hub.remove_source("events")
        shop.add(hub, partitions=8)
        assert hub.group("g").describe().lag is None
        assert f"removed the checkpoints of {former.id}" in shop.run(
            "group", "delete", "g", "--topic", former.id, "--yes"
        )
        found = hub.group("g").describe()
        assert {row.topic for row in found.partitions} == {"orders"}
        assert found.lag == 0
        assert handle_all(hub, "events") == [1, 2]
        hub.group("g").delete(topic="events")
        hub.group("g").delete(topic="orders")
        with pytest.raises(UnknownGroup):
            hub.group("g").describe()

    def test_a_topic_that_is_read_or_not_known_is_not_forgotten(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert("a")
        shop.add(hub)
        hub.create_topic("orders", partitions=1)
        handle_all(hub, "orders")
        with hub.consumer("events", "g") as inbox:
            with pytest.raises(GroupActive):
                hub.group("g").delete(topic="events")
            hub.group("g").delete(topic="orders")
            assert inbox.poll(timeout=PATIENCE_S), "the members of other topics stay"
            hub.group("g").delete(force=True, topic="events")
            (again,) = inbox.poll(timeout=PATIENCE_S)
            assert again.offset == 1, "the member has joined again and starts afresh"
        hub.group("g").delete(topic="events")
        with pytest.raises(UnknownGroup):
            hub.group("g").delete(topic="events")
        handle_all(hub, "orders")
        with pytest.raises(GroupError, match="nothing that is called events"):
            hub.group("g").delete(topic="events")


def protocol_of(keys: Keys, source: Any) -> MemberProtocol:
    return MemberProtocol(
        keys,
        "incarnation",
        Member("m", source.id, source.name, source.partitions),
        hooks=cast(Hooks, None),
        start_of=lambda _number, _start: 0,
        wall=lambda: 0.0,
        keys_max=1000,
        handover_s=1.0,
        foreign=foreign_of(keys, source),
    )


def until_write(steps: Any, registry: Registry, error: Exception | None = None) -> Write:
    """Perform what is read until the next write, which is not performed."""
    operation = next(steps) if error is None else steps.throw(error)
    while not isinstance(operation, Write):
        operation = steps.send(perform(operation, registry, None))
    return operation


class TestLag:
    def test_x17_the_ids_of_a_table_are_counted_once_and_are_a_bound(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert(*(f"account-{i}" for i in range(20)))
        shop.do("DELETE FROM events WHERE id IN (15, 16)")
        shop.add(hub)
        hub.group("g").import_checkpoint(11, "events")
        found = hub.group("g").describe()
        assert (found.lag, found.is_lag_exact, found.lag_text) == (10, False, "<= 10")
        assert {(row.topic, row.lag, row.is_lag_exact) for row in found.partitions} == {("events", 10, False)}
        assert "lag <= 10" in str(found)
        assert set(found.to_arrow()["is_lag_exact"].to_pylist()) == {False}
        assert handle_all(hub, "events") == [11, 12, 13, 14, 17, 18, 19, 20]
        found = hub.group("g").describe()
        assert (found.lag, found.is_lag_exact, found.lag_text) == (0, True, "0")
        shop.insert("account-1")
        assert hub.group("g").describe().lag_text == "<= 1"

    def test_the_lag_of_topics_and_sources_together_is_a_bound(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert("a", "b")
        shop.add(hub)
        hub.create_topic("orders", partitions=2)
        with hub.producer("orders") as out:
            out.send(b"x", partition=0)
        group = hub.group("g")
        group.import_checkpoint(1, "events")
        assert group.describe().lag_text == "<= 2"
        group.import_checkpoint({0: 0, 1: 0}, "orders")
        assert group.describe().lag_text == "<= 3"
        topics = [(each.topic, each.is_source, each.lag, each.is_exact) for each in group.describe().topics]
        assert topics == [("events", True, 2, False), ("orders", False, 1, True)]

    def test_a_partition_without_messages_follows_the_others(self, shop: Shop, hub: pxrs.Hub) -> None:
        """Else a group that has handled everything would be behind for ever."""
        shop.insert("busy", "busy")
        with shop.table(poll_s=600.0) as table:
            quiet = (xxh64(b"busy") + 1) % PARTITIONS
            assert table.wait({quiet: 1}, PATIENCE_S) == {quiet}
            (batch,) = table.read(quiet, 1)
            assert (batch.records.num_rows, batch.next_offset) == (0, 3)
            assert table.wait({quiet: 3}, 0) == set()

    def test_a_source_that_cannot_be_reached_has_an_unknown_lag_and_says_why(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert("a")
        shop.add(hub)
        handle_all(hub, "events")
        shop.do("ALTER TABLE events RENAME TO hidden")
        found = hub.group("g").describe()
        assert (found.lag, found.is_lag_exact, found.lag_text) == (None, False, "unknown")
        assert {(row.topic, row.checkpoint, row.lag) for row in found.partitions} == {("events", 2, None)}
        assert "the lag in events is not known" in (found.lag_problem or "")
        assert "no such table" in (found.lag_problem or "")
        with pxrs.open(shop.at) as other:
            assert "no table 'events'" in (other.group("g").describe().lag_problem or "")
            shop.do("ALTER TABLE hidden RENAME TO events")
            assert "no table 'events'" in (other.group("g").describe().lag_problem or ""), "not asked again at once"
        assert hub.group("g").describe().lag == 0

    def test_a_source_that_is_not_registered_has_an_unknown_lag_and_its_name(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert("a")
        with shop.table(name="mine") as table:
            handle_all(hub, table)
            assert hub.group("g", table).describe().lag == 0
        with pxrs.open(shop.at) as other:
            found = other.group("g").describe()
        assert {row.topic for row in found.partitions} == {"mine"}
        assert (found.lag, found.lag_text) == (None, "unknown")
        assert f"pxrs source add mine --id {table.id}" in (found.lag_problem or "")

    def test_a_table_that_counts_anew_has_no_lag_of_0(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert("a", "b", "c")
        shop.add(hub)
        handle_all(hub, "events")
        shop.do("DELETE FROM events")
        assert hub.group("g").describe().lag == 0, "rows that were handled may go"
        shop.do("DELETE FROM sqlite_sequence")
        shop.insert("d")
        found = hub.group("g").describe()
        assert found.lag is None
        assert "counts anew" in (found.lag_problem or "")

    def test_rows_that_are_not_final_count(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert("a")
        shop.add(hub, settle_s=600.0)
        hub.group("g").import_checkpoint(1, "events")
        assert hub.group("g").describe().lag == 1

    def test_a_partition_without_a_checkpoint_counts_from_the_start(self) -> None:
        seen = Seen([(1, 21)] * 3, has_gaps=True, is_source=True)
        assert seen.total("t", "i", {0: 11, 2: 21}).lag == 20
        assert seen.total("t", "i", {0: 11, 1: 12, 2: 21}).lag == 10
        assert seen.total("t", "i", {0: 21, 1: 22, 2: 21}) == seen.total("t", "i", dict.fromkeys(range(3), 21))

    def test_a_member_that_has_written_no_checkpoint_yet_leaves_a_lag(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert("a", "b")
        record = shop.add(hub)
        topic = hub.create_topic("orders", partitions=2)
        with hub.producer("orders") as out:
            for _ in range(3):
                out.send(b"x", partition=1)
        keys = Keys("g")
        members = {
            keys.member("one"): Member("one", record.id, "events", PARTITIONS),
            keys.member("two"): Member("two", topic.id, "orders", 2),
        }
        hub.registry.commit(put={key: member.dump() for key, member in members.items()})
        found = hub.group("g").describe()
        assert [(each.topic, each.lag, each.is_exact) for each in found.topics] == [
            ("events", 2, False),
            ("orders", 3, False),
        ]
        assert len(found.partitions) == PARTITIONS + 2
        assert (found.partitions[-1].checkpoint, found.partitions[-1].lag) == (None, 3)

    def test_partitions_of_a_topic_without_a_checkpoint_count_from_their_start(self, hub: pxrs.Hub) -> None:
        hub.create_topic("orders", partitions=4)
        with hub.producer("orders") as out:
            for number in range(8):
                out.send(b"x", partition=number % 4)
        hub.group("g").import_checkpoint({0: 2}, "orders")
        found = hub.group("g").describe()
        assert (found.lag, found.is_lag_exact, found.lag_text) == (6, False, "<= 6")
        assert [(row.checkpoint, row.lag, row.is_lag_exact) for row in found.partitions] == [
            (2, 0, True),
            *[(None, 2, False)] * 3,
        ]

    def test_a_consumer_counts_rows_that_are_not_final(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert("a")
        shop.add(hub, settle_s=600.0)
        hub.group("g").import_checkpoint(1, "events")
        with hub.consumer("events", "g") as inbox:
            wait_until(lambda: len(inbox.assignment) == PARTITIONS)
            assert inbox.lag == dict.fromkeys(range(PARTITIONS), 1)

    def test_two_readers_at_different_positions_do_not_keep_a_quiet_partition_back(self, shop: Shop) -> None:
        shop.insert("busy", "busy", "busy")
        with shop.table(poll_s=0.01) as table:
            quiet = (xxh64(b"busy") + 1) % PARTITIONS
            until = time.monotonic() + PATIENCE_S
            ready: set[int] = set()
            while not ready and time.monotonic() < until:
                ready = table.wait({quiet: 1}, 0) & table.wait({quiet: 2}, 0.01)
            assert ready == {quiet}
            for offset in range(2000):
                table._has_been_passable(quiet, offset, 10_000)
            assert len(table._passable) <= PASSABLE_MAX

    def test_a_group_of_another_hub_has_no_lag_of_0(self, shop: Shop, tmp_path: Path) -> None:
        registry = f"sqlite:///{tmp_path}/registry.db"
        with pxrs.open(shop.at, registry) as hub:
            hub.create_topic("orders", partitions=1)
            with hub.producer("orders") as out:
                out.send(b"x")
            hub.consumer("orders", "g").close()
            assert hub.group("g").describe().lag == 1
        with pxrs.open(tmp_path / "other", registry) as other:
            other.create_topic("mail", partitions=1)
            other.consumer("mail", "h").close()
            assert other.group("g").describe().lag is None


class TestAdministration:
    def paused(self, shop: Shop, hub: pxrs.Hub, topic: str | SqlTable = "events") -> int:
        """A partition of `events` that its second row holds up."""

        def handle(message: pxrs.Message) -> None:
            if message.value == b"bad":
                raise ValueError("not this one")

        shop.insert("good", "bad", "good")
        with hub.consumer(topic, "g", until="end") as inbox, pytest.raises(pxrs.errors.PartitionsPaused):
            inbox.run(handle)
        return xxh64(b"bad") % PARTITIONS

    def test_x14_a_paused_row_is_shown_retried_and_skipped_by_name(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.add(hub)
        number = self.paused(shop, hub)
        shown = shop.run("group", "describe", "g")
        assert f"events/{number} is paused at offset 2: ValueError: not this one" in shown
        shop.run("group", "retry", "g", "events", str(number))
        assert handle_all(hub, "events")[:1] == [2]
        assert json.loads(shop.run("group", "describe", "g", "--json"))["lag"] == 0

    def test_x14_also_of_a_source_that_is_not_registered(self, shop: Shop, hub: pxrs.Hub) -> None:
        with shop.table() as table:
            number = self.paused(shop, hub, table)
        assert f"events/{number} is paused at offset 2" in shop.run("group", "describe", "g")
        assert "leaves out" in shop.run("group", "skip", "g", "events", str(number), "--yes")
        with shop.table() as table:
            assert 2 not in handle_all(hub, table)

    def test_of_a_group_of_version_0_1_the_refusal_says_to_register_the_source(self, shop: Shop, hub: pxrs.Hub) -> None:
        """That version kept no name with the group."""
        keys = Keys("g")
        with shop.table() as table:
            put = {keys.checkpoint(table.id, p): Checkpoint(2).dump() for p in range(PARTITIONS)}
            hub.registry.commit(put={**put, keys.pause(table.id, 1): Paused(2, "ValueError: bad").dump()})
        group = hub.group("g")
        for call in (
            lambda: group.retry("events", 1),
            lambda: group.skip("events", 1),
            lambda: group.reset("latest"),
        ):
            with pytest.raises(GroupError, match=f"pxrs source add NAME --id {table.id}"):
                call()
        assert f"pxrs source add NAME --id {table.id}" in shop.run("group", "describe", "g")
        shop.insert("a", "b")
        shop.add(hub)
        assert group.reset("latest") == {"events": dict.fromkeys(range(PARTITIONS), 3)}

    def test_a_reset_of_a_source_that_is_not_registered_says_to_register_it(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert("a")
        with shop.table() as table:
            handle_all(hub, table)
        for topic in (None, "events"):
            with pytest.raises(GroupError, match=f"pxrs source add events --id {table.id}"):
                hub.group("g").reset("earliest", topic)
        shop.add(hub)
        hub.group("g").reset("earliest")
        assert handle_all(hub, "events") == [1]

    def test_x21_a_checkpoint_is_imported_by_name(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert("a", "b", "c")
        shop.add(hub)
        lines = shop.run("group", "import-checkpoint", "g", "3", "--topic", "events", "--json").splitlines()
        assert [json.loads(line)["offset"] for line in lines] == [3] * PARTITIONS
        assert handle_all(hub, "events") == [3]

    def test_a_pause_is_found_by_every_name_of_the_table(self, shop: Shop, hub: pxrs.Hub) -> None:
        with shop.table(name="mine") as table:
            number = self.paused(shop, hub, table)
        shop.add(hub)
        for name in ("mine", "events", table.id):
            assert hub.group("g").paused(name, number).offset == 2
        hub.group("g").retry("mine", number)

    def test_without_a_directory_groups_of_registered_sources_are_changed(self, shop: Shop) -> None:
        with pxrs.open(registry=f"sqlite:///{shop.folder}/registry.db") as hub:
            shop.add(hub)
            number = self.paused(shop, hub)
            group = hub.group("g")
            group.retry("events", number)
            assert group.reset("earliest") == {"events": dict.fromkeys(range(PARTITIONS), 1)}
            group.import_checkpoint(2, "events", force=True)
            hub.registry.commit(put={Keys("g").pause(hub.sources()[0].id, 0): Paused(2, "ValueError: no").dump()})
            assert group.skip("events", 0) == 2
            group.delete()
            assert hub.groups() == []
            for call in (group.delete, lambda: group.reset("earliest"), lambda: group.retry("events", 0)):
                with pytest.raises(UnknownGroup):
                    call()

    def test_an_id_that_the_table_has_not_given_out_is_no_checkpoint(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert("a", "b", "c")
        shop.add(hub)
        group = hub.group("g")
        calls = (lambda: group.import_checkpoint(5, "events"), lambda: group.import_checkpoint({0: 5}, "events"))
        for call in calls:
            with pytest.raises(OffsetOutOfRange):
                call()
        assert hub.groups() == []
        group.import_checkpoint(1, "events")
        for to in (5, {0: 5}):
            with pytest.raises(OffsetOutOfRange):
                group.reset(to)
        shop.do("DELETE FROM events")
        with pxrs.open(shop.at) as other:
            other.group("g").reset(4)  # the table has given out 3, though its row is gone
        assert set(group.describe().to_arrow()["checkpoint"].to_pylist()) == {4}


class TestCommands:
    def test_v6_a_source_is_added_listed_described_and_removed(self, shop: Shop) -> None:
        options = ("--table", "events", "--key-column", "account", "--value-column", "body", "--partitions", "6")
        shop.insert("a", "b")
        assert shop.run("source", "add", "events", "--sql-table", shop.url, *options) == (
            f"registered events: events of {shop.url}, in 6 partitions\n"
        )
        assert json.loads(shop.run("source", "list", "--json"))["source"] == "events"
        assert "events" in shop.run("source", "list")
        found = json.loads(shop.run("source", "describe", "events", "--json"))
        assert (found["start"], found["end"], found["problem"], found["partitions"]) == (1, 3, None, 6)
        assert found["since"].endswith("Z")
        assert "and 1 registered source: see `pxrs source list`" in shop.run("topic", "list")
        again = ("source", "add", "events", "--sql-table", shop.url, *options)
        assert json.loads(shop.run(*again, "--exist-ok", "--json"))["id"] == found["id"]
        shop.run("source", "remove", "events", code=2)
        assert found["id"] in shop.run("source", "remove", "events", "--yes")
        assert shop.run("source", "list", "--json") == ""

    def test_a_source_that_cannot_be_read_is_described_with_the_reason(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.add(hub)
        shop.do("DROP TABLE events")
        found = json.loads(shop.run("source", "describe", "events", "--json", code=1))
        assert (found["end"], "no table 'events'" in found["problem"]) == (None, True)

    def test_the_address_may_be_in_the_environment(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        options = ("--table", "events", "--value-column", "account", "--value-column", "body")
        assert "PXRS_SOURCE_EVENTS" in shop.run("source", "add", "events", *options, code=2)
        monkeypatch.setenv("PXRS_SOURCE_EVENTS", shop.url)
        shop.run("source", "add", "events", *options)
        shop.insert("a")
        assert json.loads(json.loads(shop.run("tail", "events", "--json"))["value"]) == {"account": "a", "body": "a"}

    def test_v6_the_last_rows_of_a_source_are_shown_in_the_order_of_their_ids(self, shop: Shop, hub: pxrs.Hub) -> None:
        shop.insert(*(f"account-{i}" for i in range(30)))
        shop.do("DELETE FROM events WHERE id BETWEEN 22 AND 28")
        shop.add(hub)
        lines = [json.loads(line) for line in shop.run("tail", "events", "-n", "5", "--json").splitlines()]
        assert [line["offset"] for line in lines] == [19, 20, 21, 29, 30]
        assert shop.run("tail", "events", "-n", "0") == ""
        assert len(shop.run("tail", "events", "-n", "100", "--json").splitlines()) == 23

    def test_x17_a_list_of_groups_says_which_lags_are_bounds_and_which_are_not_known(
        self, shop: Shop, hub: pxrs.Hub
    ) -> None:
        shop.insert("a", "b")
        shop.add(hub)
        hub.group("bound").import_checkpoint(1, "events")
        with shop.table(partitions=2, name="mine") as table:
            handle_all(hub, table, "dark")
        rows = {row["group"]: row for row in map(json.loads, shop.run("group", "list", "--json").splitlines())}
        assert (rows["bound"]["lag"], rows["bound"]["is_lag_exact"], rows["bound"]["lag_problem"]) == (2, False, None)
        assert (rows["dark"]["lag"], rows["dark"]["is_lag_exact"]) == (None, False)
        assert "pxrs source add mine" in rows["dark"]["lag_problem"]
        shown = shop.run("group", "list")
        assert "<= 2" in shown
        assert "unknown" in shown
        assert "dark: mine" in shown

    def test_no_directory_is_needed_where_the_registry_is_elsewhere(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PXRS_REGISTRY", f"sqlite:///{shop.folder}/registry.db")
        monkeypatch.setenv("PXRS_SOURCE_EVENTS", shop.url)
        shop.insert("a", "b")
        shop.run("source", "add", "events", "--table", "events", "--value-column", "body", "--partitions", "2")
        shop.run("group", "import-checkpoint", "g", "2", "--topic", "events")
        assert json.loads(shop.run("group", "describe", "g", "--json"))["lag"] == 1
        with pxrs.open(shop.at, f"sqlite:///{shop.folder}/registry.db") as hub:
            assert handle_all(hub, "events") == [2]
        assert not Path(shop.at).exists()

    def test_commands_for_sources_and_groups_need_a_registry_alone(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PXRS_REGISTRY", f"sqlite:///{shop.folder}/registry.db")
        monkeypatch.setenv("PXRS_SOURCE_EVENTS", shop.url)
        monkeypatch.delenv("PXRS_AT", raising=False)
        shop.insert("a", "b")
        for line in (
            "source add events --table events --value-column body --partitions 2",
            "source list",
            "source describe events",
            "tail events",
            "group import-checkpoint g 2 --topic events",
            "group list",
            "group describe g",
            "group reset g --to earliest --yes",
            "group delete g --yes",
            "source remove events --yes",
        ):
            done = CliRunner().invoke(app, line.split())
            assert done.exit_code == 0, (line, done.output, done.exception)

    def test_every_command_has_a_help(self, shop: Shop) -> None:
        shown = CliRunner().invoke(app, ["source", "--help"]).output
        for command in ("add", "list", "describe", "remove"):
            assert f"  {command} " in shown


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
