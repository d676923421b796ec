"""Which table a registered source is, and what happens when its settings change."""

from __future__ import annotations

from typing import Any, cast

import pytest

import pxrs
from pxrs.errors import (
    Conflict,
    GroupActive,
    GroupError,
    IdentityChanged,
    ReadFailed,
    SourceChanged,
    UnknownGroup,
)
from pxrs.group.foreign import foreign_parts
from pxrs.group.incarnation import Hooks
from pxrs.group.protocol import MemberProtocol
from pxrs.group.records import Checkpoint, Keys, Member
from pxrs.hashing import xxh64
from pxrs.registry.contract import Registry
from pxrs.registry.steps import Write, perform
from pxrs.sources import sql_table
from pxrs.sources.sql_table.identity import Meaning, Resolved, identify, place_of
from pxrs.testing.waiting import PATIENCE_S
from tests.unit.sources.shop import PARTITIONS, Shop, handle_all


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
        steps = [protocol._pin(protocol.member.reads[0]) for protocol in protocols]
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


def test_postgres_is_another_spelling_of_postgresql() -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    pytest.importorskip("psycopg")
    places = [place_of(sqlalchemy.make_url(f"{scheme}://me@db/shop")) for scheme in ("postgres", "postgresql")]
    assert places[0] == places[1]
    with pytest.raises(ReadFailed, match=r"postgresql\+psycopg://me@127\.0\.0\.1:1/shop"):
        sql_table("postgres://me:secret@127.0.0.1:1/shop", "events", value_column="body")


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
        foreign=foreign_parts(keys, source),
    )


def until_write(steps: Any, registry: Registry, error: Exception | None = None) -> Write:
    """Perform what is read until the next write, which is not performed."""
    operation = next(steps) if error is None else steps.throw(error)
    while not isinstance(operation, Write):
        operation = steps.send(perform(operation, registry, None))
    return operation
