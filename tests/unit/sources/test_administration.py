"""The lag of a group that reads a registered source, administration of it, and the commands."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pxrs
from pxrs.cli.app import app
from pxrs.errors import (
    GroupError,
    OffsetOutOfRange,
    UnknownGroup,
)
from pxrs.group.lag import Seen
from pxrs.group.records import Checkpoint, Keys, Member, Paused
from pxrs.hashing import xxh64
from pxrs.log.arrivals import wait_for_messages
from pxrs.sources import SqlTable
from pxrs.sources.sql_table.partitioned import PASSABLE_MAX
from pxrs.testing.waiting import PATIENCE_S, eventually
from tests.unit.sources.shop import PARTITIONS, Shop, handle_all


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
            assert wait_for_messages(table, {quiet: 1}, PATIENCE_S) == {quiet}
            (batch,) = table.read(quiet, 1)
            assert (batch.records.num_rows, batch.next_offset) == (0, 3)
            assert wait_for_messages(table, {quiet: 3}, 0) == set()

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
            assert "table 'events' does not exist" in (other.group("g").describe().lag_problem or "")
            shop.do("ALTER TABLE hidden RENAME TO events")
            assert "table 'events' does not exist" in (other.group("g").describe().lag_problem or ""), (
                "not asked again at once"
            )
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
        assert "restarted its offsets" in (found.lag_problem or "")

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
            eventually(lambda: len(inbox.assignment) == PARTITIONS)
            assert inbox.lag == dict.fromkeys(range(PARTITIONS), 1)

    def test_two_readers_at_different_positions_do_not_keep_a_quiet_partition_back(self, shop: Shop) -> None:
        shop.insert("busy", "busy", "busy")
        with shop.table(poll_s=0.01) as table:
            quiet = (xxh64(b"busy") + 1) % PARTITIONS
            until = time.monotonic() + PATIENCE_S
            ready: set[int] = set()
            while not ready and time.monotonic() < until:
                ready = wait_for_messages(table, {quiet: 1}, 0) & wait_for_messages(table, {quiet: 2}, 0.01)
            assert ready == {quiet}
            for offset in range(2000):
                table._passable.has_been(quiet, offset, 10_000)
            assert len(table._passable._since) <= PASSABLE_MAX

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
        assert "skipped" in shop.run("group", "skip", "g", "events", str(number), "--yes")
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
        assert (found["end"], "table 'events' does not exist" in found["problem"]) == (None, True)

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
