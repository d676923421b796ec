"""A reader beside processes that write, die or boot again: it shows what is settled, and no more (V5, L1)."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import pxrs
import pxrs.registry.sql.registry
import pxrs.registry.sql.sqlite
from pxrs import registry as registries
from pxrs.cli import group as command_group
from pxrs.cli.app import app
from pxrs.errors import AccessDenied, DamagedFrame, NoWritePermission
from pxrs.log.contract import Append
from pxrs.log.directory.published import NAME as PUBLISHED
from pxrs.log.outcomes import offsets_of
from pxrs.registry.file import journal
from pxrs.registry.file.codec import encode_entry
from pxrs.registry.state import Change
from pxrs.testing.waiting import eventually
from tests.acceptance.read_only.reading import NOBODY, WRITES, as_root, look, picture, reading_only, send

LIBC = ctypes.CDLL(None, use_errno=True)
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, CLONE_NEWNS = 0x1, 0x20, 0x1000, 0x4000, 1 << 18, 0x20000


class Child:
    """A forked process that runs `work` until it returns, or until it is told to die."""

    def __init__(self, work: Callable[[Child], None]) -> None:
        self._up, self._down = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(self._up[1])
            os.close(self._down[0])
            return
        try:
            os.close(self._up[0])
            os.close(self._down[1])
            work(self)
            os.write(self._up[1], b".")
        except BaseException:  # noqa: BLE001 - shown by the parent
            os.write(self._up[1], b"!" + traceback.format_exc().encode())
        finally:
            os._exit(0)

    def tell(self) -> None:
        """In the child: the parent may go on."""
        os.write(self._up[1], b"+")

    def await_end(self) -> None:
        """In the child: until the parent wants it to die."""
        os.read(self._down[0], 1)

    def hear(self, skips: str | None = None) -> None:
        """In the parent: wait for `tell`, or for the end. skips: an error that the test cannot be run with."""
        assert select.select([self._up[0]], [], [], 30)[0], "the child says nothing"
        said = os.read(self._up[0], 1)
        if said not in (b"+", b"."):
            error = os.read(self._up[0], 1 << 16).decode() or "the child is gone"
            if skips is not None and skips in error:
                pytest.skip(error.splitlines()[-1])
            pytest.fail(error)

    def die(self) -> None:
        """In the parent."""
        if self._down[1] >= 0:
            os.close(self._down[1])
            self._down = (-1, -1)
            os.waitpid(self.pid, 0)
            os.close(self._up[0])


@contextlib.contextmanager
def child(work: Callable[[Child], None]) -> Iterator[Child]:
    made = Child(work)
    try:
        yield made
    finally:
        made.die()


@as_root
def test_v5_a_reader_follows_processes_that_send_commit_and_compact(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "ENTRIES_MIN", 5)
    commits = 60

    def read(me: Child) -> None:
        with reading_only(data), pxrs.open(data) as hub, hub.registry.watch("n/") as watch:
            orders = hub.topic("orders")
            assert orders.log.ends() == [5, 5, 0]
            me.tell()
            assert orders.wait({2: 0}, 30) == {2}, "the partition had no file yet that could be watched"
            assert [message.value for message in orders.messages(2)] == [b"first"]
            assert orders.log.ends() == [5, 5, 1]
            me.tell()
            last = -1
            while last < commits - 1:
                assert watch.wait(30), "a commit is told"
                entries = hub.registry.scan("n/")
                numbers = [int(entry.value) for entry in entries]
                assert numbers == [*range(len(numbers))]
                assert len(numbers) > last, "a commit that was seen is not taken back"
                last = len(numbers) - 1

    with child(read) as reader, pxrs.open(data) as hub:
        reader.hear()
        with hub.producer("orders") as out:
            out.send("first", partition=2)
        reader.hear()
        for number in range(commits):
            hub.registry.commit(put={f"n/{number:03}": b"%d" % number})
        reader.hear()
    assert len(list((data / "registry" / "pxrs" / "generations").iterdir())) == 1, "it was compacted meanwhile"


@pytest.mark.parametrize("store", ["file", "sqlite"])
def test_v5_a_reader_leaves_out_what_a_dead_process_held(place: Path, store: str) -> None:
    folder = place / "registry"
    folder.mkdir(mode=0o755)
    url = str(folder) if store == "file" else f"sqlite:///{folder}/registry.db"

    def hold(me: Child) -> None:
        registry = registries.open(url)
        lease = registry.lease(1.5)
        registry.commit(ephemeral={"a/held": b"", "b/held": b""}, lease=lease)
        registry.commit(put={"a/kept": b"", "c/kept": b""})
        me.tell()
        me.await_end()

    with child(hold) as holder:
        holder.hear()
        if store == "file":
            before = picture(folder / "pxrs" / "generations")
        with reading_only(folder), registries.open(url) as registry, registry.watch("a/") as watch:
            assert [entry.key for entry in registry.scan("a/")] == ["a/held", "a/kept"]
            assert registry.get("b/held") is not None
            with pytest.raises(NoWritePermission, match="may not write to"):
                registry.commit(put={"x": b""})
            with pytest.raises(NoWritePermission, match="may not write to"):
                registry.lease(5)
            holder.die()
            assert watch.wait(30), "that it is gone is told"
            eventually(lambda: registry.get("b/held") is None)
            assert [entry.key for entry in registry.scan("a/")] == ["a/kept"]
            assert [entry.key for entry in registry.scan("a/", limit=1)] == ["a/kept"], "as many as asked for"
            assert [entry.key for entry in registry.scan("", limit=2)] == ["a/kept", "c/kept"]
    if store == "file":
        assert picture(folder / "pxrs" / "generations") == before, "it was not the reader that ended the lease"
    with registries.open(url) as registry:
        assert registry.get("a/held") is None


def test_v5_a_reader_is_told_of_a_dead_lease_however_many_others_are_left_behind(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pxrs.registry.sql.registry, "DUE_LEASES_MAX", 2)
    folder = place / "registry"
    folder.mkdir(mode=0o755)
    url = f"sqlite:///{folder}/registry.db"

    def hold(me: Child) -> None:
        registry = registries.open(url)
        for number in range(5):
            registry.commit(ephemeral={f"a/early-{number}": b""}, lease=registry.lease(1.5))
        registry.commit(ephemeral={"a/late": b""}, lease=registry.lease(4))
        me.tell()
        me.await_end()

    with child(hold) as holder:
        holder.hear()
        with reading_only(folder), registries.open(url) as registry, registry.watch("a/") as watch:
            assert len(registry.scan("a/")) == 6
            holder.die()
            while registry.get("a/late") is not None:
                assert watch.wait(30), "that the last one is gone is told too"


def test_v5_a_sqlite_file_that_nobody_has_open_needs_write_permission(place: Path) -> None:
    folder = place / "registry"
    folder.mkdir(mode=0o755)
    url = f"sqlite:///{folder}/registry.db"

    def make(me: Child) -> None:
        registries.open(url).close()

    with child(make) as maker:
        maker.hear()
    with reading_only(folder), pytest.raises(AccessDenied, match="keep a process with write permission running"):
        registries.open(url)
    with reading_only(folder), pytest.raises(NoWritePermission, match="may not write to"):
        registries.open(f"sqlite:///{folder}/other.db")


def test_v5_leases_of_another_boot_are_over_for_a_reader_of_sqlite(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place / "registry"
    folder.mkdir(mode=0o755)
    url = f"sqlite:///{folder}/registry.db"

    def hold(me: Child) -> None:
        registry = registries.open(url)
        registry.commit(put={"a/kept": b""}, ephemeral={"a/held": b""}, lease=registry.lease(600))
        me.tell()
        me.await_end()

    with child(hold) as holder:
        holder.hear()
    with reading_only(folder), registries.open(url) as registry:
        assert len(registry.scan("a/")) == 2
    monkeypatch.setattr(pxrs.registry.sql.sqlite, "boot_id", lambda: "another")
    with reading_only(folder), registries.open(url) as registry:
        assert [entry.key for entry in registry.scan("a/", limit=1)] == ["a/kept"]
        assert registry.get("a/held") is None


def test_v5_where_nobody_has_made_the_registry_there_are_no_groups_until_somebody_does(place: Path) -> None:
    data = place / "data"
    with pxrs.open(data) as hub:
        hub.create_topic("orders")
    before = picture(data)
    with reading_only(data):
        reader = pxrs.open(data)
        assert reader.groups() == []
        assert reader.queues() == []
        watch = reader.registry.watch("groups/")
        assert not watch.wait(0.01)
        with pytest.raises(NoWritePermission, match="may not write to"):
            reader.registry.commit(put={"x": b""})
    assert picture(data) == before
    with pxrs.open(data) as hub:
        hub.group("billing").import_checkpoint({0: 0}, "orders")
    with reading_only(data):
        assert watch.wait(30)
        eventually(lambda: reader.groups() == ["billing"])
        assert reader.group("billing").describe().lag == 0
        reader.close()


def test_v5_group_describe_watch_works_for_who_may_only_read(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([None])

    def sleep(seconds: float) -> None:
        try:
            next(looks)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(command_group, "time", SimpleNamespace(sleep=sleep))
    command = ["group", "describe", "billing", "--watch", "--json", "--at", str(data)]
    with reading_only(data):
        result = CliRunner().invoke(app, command)
    assert json.loads(result.stdout.splitlines()[0])["lag"] == 6
    assert result.exit_code == 130, result.output


def test_l1_after_a_boot_a_reader_sees_what_was_published_before_and_more_once_a_writer_came(
    data: Path, boot: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    with pxrs.open(data) as hub:
        folder = Path(hub.topic("orders").log.partition_folder(0))  # type: ignore[attr-defined]
        older = (folder / PUBLISHED).read_bytes()
        send(hub, "orders", 4)
    boot()
    with reading_only(data), pxrs.open(data) as reader:
        assert [reader.topic("orders").end(p) for p in range(3)] == [7, 7, 0]
        assert reader.topic("orders").to_arrow().num_rows == 14
    assert caplog.records == [], "all is shown"
    # A power loss took what was written to `published` last, and left half an append.
    (folder / PUBLISHED).write_bytes(older)
    with open(folder / "00000000000000000000.log", "ab") as segment:
        segment.write(b"PXB")
    with reading_only(data), pxrs.open(data) as reader:
        orders = reader.topic("orders")
        for _ in range(2):
            assert orders.end(0) == 5, "no more is known to have been synced"
            assert [message.value for message in orders.messages(0, 3)] == [b"6", b"8"]
        assert len([record for record in caplog.records if "from offset 5 on are not shown yet" in record.message]) == 1
        with pytest.raises(NoWritePermission):
            offsets_of(orders.log.append([Append.encoded(0, orders.read(0, 0)[0].records)]))
    with pxrs.open(data) as hub:
        assert hub.topic("orders").end(0) == 7
    with reading_only(data), contextlib.closing(reader), pytest.raises(pxrs.errors.Closed):
        orders.end(0)
    with reading_only(data), pxrs.open(data) as reader:
        assert reader.topic("orders").end(0) == 7


@pytest.mark.parametrize("durability", ["os", "disk"])
def test_l1_the_lag_is_not_known_to_a_reader_while_messages_are_not_shown(
    data: Path, boot: Callable[[], None], durability: str
) -> None:
    with pxrs.open(data) as hub:
        hub.create_topic("loose", partitions=1, durability=durability)
        file = Path(hub.topic("loose").log.partition_folder(0)) / PUBLISHED  # type: ignore[attr-defined]
        with hub.producer("loose") as out:
            for _ in range(5):
                out.send("x", partition=0)
        older = file.read_bytes()
        with hub.producer("loose") as out:
            out.send("y", partition=0)
        hub.group("follower").import_checkpoint({0: 6}, "loose")
        hub.group("slow").import_checkpoint({0: 0}, "loose")
    boot()
    if durability == "disk":  # a power loss took what was written to `published` last
        file.write_bytes(older)
    shown = 0 if durability == "os" else 5
    command = ["topic", "describe", "loose", "--at", str(data)]
    with reading_only(data), pxrs.open(data) as reader:
        assert reader.topic("loose").end(0) == shown
        for group in ("follower", "slow"):
            found = reader.group(group).describe()
            (lag,) = found.topics
            assert (found.lag, lag.lag, lag.is_exact) == (None, None, False), group
            assert f"messages from offset {shown} on are not shown yet" in str(lag.problem)
        assert reader.group("billing").describe().lag == 6, "of a topic whose ends are known"
        with pxrs.open("memory:") as other, pytest.raises(pxrs.errors.CopyFailed, match="are not shown yet"):
            reader.copy_topic("loose", "copy", to=other)
        described = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
        assert "are not shown yet" in described["ends_problem"]
        assert "are not shown yet" in CliRunner().invoke(app, command).stdout
        listed = CliRunner().invoke(app, ["topic", "list", "--json", "--at", str(data)])
        rows = [json.loads(line) for line in listed.stdout.splitlines() if line.startswith("{")]
        problems = {row["topic"]: row.get("ends_problem", "") for row in rows}
        assert "are not shown yet" in problems["loose"]
        assert problems["orders"] == ""
        assert listed.exit_code == 0, "nothing is damaged"
        assert "at least" in CliRunner().invoke(app, ["topic", "list", "--at", str(data)]).stdout
    with pxrs.open(data) as hub:
        assert hub.topic("loose").end(0) >= 6
    with reading_only(data), pxrs.open(data) as reader:
        assert reader.group("slow").describe().lag == reader.topic("loose").end(0), "exact again"
        with pxrs.open("memory:") as other:
            assert reader.copy_topic("loose", "copy", to=other).messages >= 5, "a copy needs no write permission"
        assert json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["ends_problem"] is None


def test_l1_an_open_reader_goes_on_when_a_writer_has_found_the_end_again(data: Path, boot: Callable[[], None]) -> None:
    with pxrs.open(data) as hub:
        hub.create_topic("loose", partitions=2, durability="os", segment_bytes=4096)
        with hub.producer("loose") as out:
            for _ in range(5):
                out.send(b"x" * 3000, partition=0)
                out.flush()
        whole = hub.topic("loose").end(0)
    boot()
    with reading_only(data):
        reader = pxrs.open(data)
        loose = reader.topic("loose")
        sealed = loose.end(0)
        assert 0 < sealed < whole, "the last segment was never synced"
        assert len(list(loose.messages(0))) == sealed
        assert loose.wait({0: sealed}, 0.01) == set()
    with pxrs.open(data) as hub:
        assert hub.topic("loose").end(0) >= whole
    with reading_only(data):
        assert loose.wait({0: sealed}, 30) == {0}
        assert len(list(loose.messages(0))) == whole
        reader.close()


def test_l1_a_reader_of_a_damaged_published_end_shows_no_more_than_was_synced_and_takes_nothing_back(
    data: Path,
) -> None:
    with pxrs.open(data) as hub:
        file = Path(hub.topic("orders").log.partition_folder(0)) / PUBLISHED  # type: ignore[attr-defined]
        with hub.producer("orders") as out:
            for _ in range(3):
                out.send("more", partition=0)
                out.flush()
    slots = file.read_bytes()

    def damage(*places: int) -> None:
        damaged = bytearray(slots)
        for place in places:
            damaged[place] ^= 0xFF
        file.write_bytes(damaged)

    with reading_only(data):
        seen = pxrs.open(data)
        assert seen.topic("orders").end(0) == 8
    ends = set()
    for places in ((0,), (64,), (0, 64)):
        damage(*places)
        with reading_only(data), pxrs.open(data) as fresh:
            orders = fresh.topic("orders")
            ends.add(end := orders.end(0))
            assert len(list(orders.messages(0))) == end
            assert seen.topic("orders").end(0) == 8
    assert ends == {0, 7, 8}
    file.unlink()
    with reading_only(data):
        with pytest.raises(DamagedFrame, match="was removed by another program"):
            seen.topic("orders").end(0)
        seen.close()
        with pxrs.open(data) as fresh:
            assert fresh.topic("orders").end(0) == 0
            assert fresh.topic("orders").wait({0: 0}, 0.01) == set()


def test_r9_a_reader_stops_at_an_entry_that_a_power_loss_took_until_a_writer_has_sealed_there(place: Path) -> None:
    with registries.open(place) as registry:
        for number in range(3):
            registry.commit(put={f"n/{number}": b""})
        opened = registry.shared.journal  # type: ignore[attr-defined]
        with opened.prepared(encode_entry(Change(put={"n/lost": b""}), opened.synced)) as scratch:
            os.link(scratch, opened.generation.entry(opened.number + 2))
    with reading_only(place):
        reader = registries.open(place)
        for _ in range(3):
            assert [entry.key for entry in reader.scan("n/")] == ["n/0", "n/1", "n/2"]
            reader.shared.journal._inspect_at = 0.0  # type: ignore[attr-defined]
    with registries.open(place) as registry:
        registry.commit(put={"n/3": b""})
    with reading_only(place):
        assert [entry.key for entry in reader.scan("n/")] == ["n/0", "n/1", "n/2", "n/3"]
        reader.close()


@as_root
def test_v5_who_may_write_to_a_part_of_the_registry_reads_it_all(place: Path) -> None:
    """As where two users share a directory without a common group: each generation belongs to who made it."""

    def hold(me: Child) -> None:
        registry = registries.open(place / "registry")
        registry.commit(put={"a/kept": b""}, ephemeral={"a/held": b""}, lease=registry.lease(600))
        me.tell()
        me.await_end()

    with child(hold) as holder:
        holder.hear()
    for folder in (place / "registry" / "pxrs").iterdir():
        if folder.is_dir():
            os.chown(folder, NOBODY, NOBODY)
    with reading_only(place), registries.open(place / "registry") as registry:
        for _ in range(2):
            assert [entry.key for entry in registry.scan("a/")] == ["a/kept"]
        with pytest.raises(NoWritePermission, match=r"may not write to .*generations/0000"):
            registry.commit(put={"x": b""})


@as_root
def test_v5_a_hub_on_a_read_only_mount_is_read(data: Path) -> None:
    def read(me: Child) -> None:
        at = os.fsencode(data)
        steps = (
            lambda: LIBC.unshare(CLONE_NEWNS),
            lambda: LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
            lambda: LIBC.mount(at, at, None, MS_BIND, None),
            lambda: LIBC.mount(b"none", at, None, MS_BIND | MS_REMOUNT | MS_RDONLY, None),
        )
        if any(step() for step in steps):
            raise OSError(ctypes.get_errno(), "this process may not mount")
        look(data)
        with pxrs.open(data) as hub:
            for name in ("create_topic", "producer", "consumer", "put", "commit"):
                with pytest.raises(NoWritePermission, match="mounted read-only"):
                    WRITES[name](hub)

    before = picture(data)
    with child(read) as reader:
        reader.hear(skips="this process may not mount")
    assert picture(data) == before
