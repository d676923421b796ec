"""Files of a registry that somebody removes, moves or replaces, with and without a process that has it open.

Nothing that was acknowledged may be missing without an error, and no two processes may go on with different
histories."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from pxrs import registry
from pxrs.errors import (
    LeaseExpired,
    OutcomeUnknown,
    RegistryCorrupt,
    RegistryError,
    RegistryReplaced,
    RegistryUnavailable,
)
from pxrs.registry import ABSENT, Registry
from pxrs.registry.file import journal
from pxrs.registry.file.codec import Seal, decode_entry, encode_entry
from pxrs.registry.file.folder import Generation
from pxrs.registry.sql import sqlite
from pxrs.registry.state import Change
from pxrs.testing import faults

PATIENCE_S = 30.0


def entries_of(directory: Path) -> list[Path]:
    """The files of all journal entries, in the order of their numbers."""
    return sorted((directory / "pxrs" / "generations").glob("*/[0-9]*"), key=lambda path: path.name)


def commit_many(handle: Registry, count: int) -> None:
    for number in range(1, count + 1):
        handle.commit(put={"n": b"%d" % number})


def names_under(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def raised_within(patience_s: float, call: Callable[[], object]) -> RegistryError:
    """Repeat the call until it raises."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        try:
            call()
        except RegistryError as error:
            return error
    raise AssertionError(f"no error within {patience_s:g} s")


# The journal of a file registry: nobody has it open.


@pytest.mark.parametrize("number", range(1, 8))
def test_a_removed_entry_is_refused_at_opening_and_nothing_is_cut_off(number: int, tmp_path: Path) -> None:
    with registry.open(tmp_path) as handle:
        commit_many(handle, 8)
    removed = entries_of(tmp_path)[number - 1]
    kept = removed.read_bytes()
    removed.unlink()
    before = names_under(tmp_path)
    with pytest.raises(RegistryCorrupt) as error:
        registry.open(tmp_path)
    assert error.value.where == str(removed)
    assert "from a copy" in str(error.value)
    assert names_under(tmp_path) == before
    removed.write_bytes(kept)  # what the error says to do
    with registry.open(tmp_path) as handle:
        entry = handle.get("n")
        assert entry is not None
        assert entry.value == b"8"


def test_without_a_copy_the_registry_opens_once_the_later_entries_are_moved_away(tmp_path: Path) -> None:
    """What docs/registry.md says to do then."""
    with registry.open(tmp_path) as handle:
        commit_many(handle, 8)
    _, _, _, removed, *later = entries_of(tmp_path)
    for path in (removed, *later):
        path.unlink()
    with registry.open(tmp_path) as handle:
        entry = handle.get("n")
        assert entry is not None
        assert entry.value == b"3"
        handle.commit(expect={"n": entry.version}, put={"n": b"4"})


def test_several_removed_entries_are_refused_at_opening(tmp_path: Path) -> None:
    with registry.open(tmp_path) as handle:
        commit_many(handle, 12)
    for path in entries_of(tmp_path)[3:9]:
        path.unlink()
    with pytest.raises(RegistryCorrupt):
        registry.open(tmp_path)


def test_a_removed_seal_is_refused_at_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process died between the seal and the snapshot. Entries of the next generation prove that it was there."""
    monkeypatch.setattr(journal, "ENTRIES_MIN", 4)
    monkeypatch.setattr(journal.Journal, "finish_compaction", lambda *_: None)
    with registry.open(tmp_path) as handle:
        commit_many(handle, 6)
    seals = [path for path in entries_of(tmp_path) if isinstance(decode_entry(path.read_bytes(), "").step, Seal)]
    seals[0].unlink()
    with pytest.raises(RegistryCorrupt) as error:
        registry.open(tmp_path)
    assert error.value.where == str(seals[0])


@pytest.mark.parametrize("is_open", [False, True], ids=["at opening", "while it is open"])
def test_a_removed_generation_that_a_seal_names_is_refused(
    is_open: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process died between the seal and the snapshot, and a copy or an operator left the next generation out."""
    monkeypatch.setattr(journal, "ENTRIES_MIN", 4)
    monkeypatch.setattr(journal.Journal, "finish_compaction", lambda *_: None)
    loads = itertools.count()
    load = journal.Journal._load

    def load_not_for_ever(self: journal.Journal) -> None:
        assert next(loads) < 1000, "it loads the same snapshot again and again"
        load(self)

    with registry.open(tmp_path) as handle:
        commit_many(handle, 6)
        first, second = sorted((tmp_path / "pxrs" / "generations").iterdir())
        shutil.rmtree(second)
        monkeypatch.setattr(journal.Journal, "_load", load_not_for_ever)
        for _ in range(2):
            with pytest.raises(RegistryCorrupt) as error:
                handle.get("n") if is_open else registry.open(tmp_path)
            assert error.value.where == str(second)
    max(first.glob("[0-9]*")).unlink()  # what docs/registry.md says to do without a copy
    with registry.open(tmp_path) as handle:
        entry = handle.get("n")
        assert entry is not None
        assert entry.value == b"4"


def test_entries_behind_a_hole_that_nobody_had_synced_are_cut_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a power loss leaves: entry 3 was never synced, so nobody was told that 3 or 4 was committed."""
    with registry.open(tmp_path) as handle:
        commit_many(handle, 4)
    *_, lost, behind = entries_of(tmp_path)
    behind.write_bytes(encode_entry(decode_entry(behind.read_bytes(), "").step, synced=2))
    lost.unlink()
    with caplog.at_level(logging.WARNING, "pxrs"), registry.open(tmp_path) as handle:
        entry = handle.get("n")
        assert entry is not None
        assert entry.value == b"2"
        handle.commit(expect={"n": entry.version}, put={"n": b"new"})
    assert str(lost) in caplog.text
    with registry.open(tmp_path) as fresh:
        entry = fresh.get("n")
        assert entry is not None
        assert entry.value == b"new"


def test_a_hole_among_entries_of_version_0_1_is_cut_off_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with registry.open(tmp_path) as handle:
        commit_many(handle, 4)
    for path in entries_of(tmp_path):
        path.write_bytes(encode_entry(decode_entry(path.read_bytes(), "").step, synced=None))
    entries_of(tmp_path)[2].unlink()
    with caplog.at_level(logging.WARNING, "pxrs"), registry.open(tmp_path) as handle:
        entry = handle.get("n")
        assert entry is not None
        assert entry.value == b"2"
    assert "0.1" in caplog.text


# The journal of a file registry: processes have it open.


def test_a_removed_entry_stops_the_opener_and_the_running_handle(tmp_path: Path) -> None:
    """Otherwise the opener ends the history at the hole and both own the same things under the same versions."""
    with registry.open(tmp_path) as running:
        commit_many(running, 8)
        entries_of(tmp_path)[3].unlink()
        with pytest.raises(RegistryCorrupt):
            registry.open(tmp_path)
        error = raised_within(PATIENCE_S, lambda: running.commit(put={"n": b"late"}))
        assert isinstance(error, RegistryCorrupt)
        for _ in range(3):  # and it stays so: the handle does not load a shorter history
            with pytest.raises(RegistryCorrupt):
                running.get("n")
            with pytest.raises(RegistryCorrupt):
                running.commit(put={"n": b"late"})


def test_a_running_handle_looks_before_its_first_commit_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with registry.open(tmp_path) as running:
        commit_many(running, 8)
        entries_of(tmp_path)[3].unlink()
        monkeypatch.setattr(running.shared.journal, "_inspect_at", 0.0)  # type: ignore[attr-defined]
        with pytest.raises(RegistryCorrupt):
            running.commit(put={"n": b"late"})
    assert len(entries_of(tmp_path)) == 7


@pytest.mark.parametrize("removed", [1, 2, 3], ids=lambda count: f"{count} removed")
def test_a_handle_that_is_behind_does_not_write_into_a_hole(removed: int, tmp_path: Path) -> None:
    with registry.open(tmp_path) as behind, registry.open(tmp_path) as ahead:
        version = behind.commit(put={"owner": b"behind"})["owner"]
        ahead.commit(expect={"owner": version}, put={"owner": b"ahead"})
        commit_many(ahead, 6)
        hole = entries_of(tmp_path)[1 : 1 + removed]
        for path in hole:
            path.unlink()
        behind.shared.journal._inspect_at = 0.0 if removed > 1 else behind.shared.journal._inspect_at  # type: ignore[attr-defined]
        with pytest.raises(RegistryCorrupt):
            behind.commit(expect={"owner": version}, put={"owner": b"behind again"})
        assert not any(path.exists() for path in hole)


def test_a_handle_whose_last_entry_is_gone_commits_nothing_behind_it(tmp_path: Path) -> None:
    """As after an older copy was put in its place: another process would open the registry as it was then."""
    with registry.open(tmp_path) as running:
        commit_many(running, 8)
        last = entries_of(tmp_path)[-1]
        last.unlink()
        with pytest.raises(RegistryCorrupt) as error:
            running.commit(put={"n": b"late"})
        assert error.value.where == str(last)
    with registry.open(tmp_path) as fresh:
        entry = fresh.get("n")
        assert entry is not None
        assert entry.value == b"7"


def test_a_handle_whose_history_was_cut_off_by_another_process_stops(tmp_path: Path) -> None:
    """An opener of version 0.1 ends the history at the hole; the running handle must not go on in the old folder."""
    with registry.open(tmp_path) as running:
        commit_many(running, 8)
        for path in entries_of(tmp_path):
            path.write_bytes(encode_entry(decode_entry(path.read_bytes(), "").step, synced=None))
        entries_of(tmp_path)[3].unlink()
        with registry.open(tmp_path) as other:
            other.commit(put={"n": b"other"})
            error = raised_within(PATIENCE_S, lambda: running.commit(put={"n": b"late"}))
            assert isinstance(error, RegistryCorrupt)


def test_a_compaction_does_not_hide_a_removed_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder with the hole would be moved away: nobody could find the entry missing any more."""
    monkeypatch.setattr(journal, "ENTRIES_MIN", 20)
    monkeypatch.setattr(journal, "INSPECT_S", 1e9)
    with registry.open(tmp_path) as running:
        commit_many(running, 8)
        entries_of(tmp_path)[3].unlink()
        error = raised_within(PATIENCE_S, lambda: running.commit(put={"n": b"late"}))
        assert isinstance(error, RegistryCorrupt)
        assert len(entries_of(tmp_path)) <= 20


def test_nothing_is_taken_for_damage_while_others_commit_and_compact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look inspects the whole folder, while other processes seal generations and move them away."""
    monkeypatch.setattr(journal, "ENTRIES_MIN", 7)
    monkeypatch.setattr(journal, "INSPECT_S", 0.0)
    monkeypatch.setattr(journal, "INSPECT_SHARE", 1e9)

    def work() -> None:
        with registry.open(tmp_path) as handle:
            for number in range(150):
                is_done = False
                while not is_done:
                    # Where files are in memory, a generation of seven entries may be sealed, compacted and removed
                    # while a commit to it is under way, whose outcome is then unknown.
                    with suppress(OutcomeUnknown):
                        handle.commit(put={f"{os.getpid()}": b"%d" % number})
                        is_done = True
                assert handle.get("shared") is None

    with faults.child(work) as one, faults.child(work) as two, faults.child(work) as three:
        for pid in (one, two, three):
            assert faults.wait_exit(pid) == 0
    with registry.open(tmp_path) as handle:
        assert [entry.value for entry in handle.scan("")] == [b"149"] * 3


@pytest.mark.parametrize("looks_at", ["the whole folder", "two names"])
def test_a_generation_that_is_moved_away_between_two_looks_is_not_taken_for_damage(
    looks_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process commits while this one looks, and compacts right after this one has seen the folder in place."""
    monkeypatch.setattr(journal, "ENTRIES_MIN", 4)
    with registry.open(tmp_path) as behind, registry.open(tmp_path) as ahead:
        behind.commit(put={"a": b"1"})
        generation: Generation = behind.shared.journal.generation  # type: ignore[attr-defined]
        numbers, has_entry, in_place = generation.numbers, generation.has_entry, generation.in_place

        def commit_first() -> None:
            if not calls["ahead"]:
                calls["ahead"] = True
                commit_many(ahead, 2)

        def has_entry_late(number: int) -> bool:
            if looks_at == "two names" and number > 1:
                commit_first()
            return has_entry(number)

        def numbers_late() -> set[int] | None:
            commit_first()
            return numbers()

        def in_place_before_it_moves() -> bool:
            is_in_place = in_place()
            if calls["ahead"] and not calls["moved"]:
                calls["moved"] = True
                commit_many(ahead, 2)
                assert not in_place()
            return is_in_place

        calls = {"ahead": False, "moved": False}
        monkeypatch.setattr(generation, "has_entry", has_entry_late)
        monkeypatch.setattr(generation, "in_place", in_place_before_it_moves)
        if looks_at == "the whole folder":
            monkeypatch.setattr(generation, "numbers", numbers_late)
            behind.shared.journal._inspect_at = 0.0  # type: ignore[attr-defined]
        behind.commit(put={"b": b"2"})
        assert all(calls.values())
        assert [entry.value for entry in ahead.scan("")] == [b"1", b"2", b"2"]


def test_who_seals_too_late_does_not_mind_that_its_new_folder_was_compacted_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several processes open a registry after a power loss, and the first of them has compacted twice meanwhile."""
    with registry.open(tmp_path) as handle:
        commit_many(handle, 4)
    *_, lost, behind = entries_of(tmp_path)
    behind.write_bytes(encode_entry(decode_entry(behind.read_bytes(), "").step, synced=2))
    lost.unlink()
    publish = journal.Journal.publish

    def publish_late(self: journal.Journal, scratch: str, step: Change | Seal) -> journal.Published | None:
        monkeypatch.setattr(journal.Journal, "publish", publish)
        monkeypatch.setattr(journal, "ENTRIES_MIN", 2)
        with registry.open(tmp_path) as first:
            commit_many(first, 6)
        return publish(self, scratch, step)

    monkeypatch.setattr(journal.Journal, "publish", publish_late)
    with registry.open(tmp_path) as late:
        entry = late.get("n")
        assert entry is not None
        assert entry.value == b"6"


# The whole store.


def sqlite_files(place: Path) -> list[Path]:
    return [place.with_name(place.name + end) for end in ("", "-wal", "-shm")]


class Store:
    """A registry under test, and how its files are moved away and put back."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.place = folder / "registry"
        self.url = str(self.place) if kind == "file" else f"sqlite:///{self.place}"
        self._files = [self.place] if kind == "file" else sqlite_files(self.place)

    def _elsewhere(self, path: Path) -> Path:
        return path.with_name(f"moved-{path.name}")

    def move_away(self) -> None:
        for path in self._files:
            path.rename(self._elsewhere(path))

    def put_back(self) -> None:
        for path in self._files:
            self._elsewhere(path).rename(path)

    def restore_copy(self) -> None:
        for path in self._files:
            source = self._elsewhere(path)
            shutil.copytree(source, path) if source.is_dir() else shutil.copy(source, path)

    def remove(self) -> None:
        for path in self._files:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture(params=["file", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(request.param, tmp_path)


def assert_stopped(handle: Registry) -> None:
    """Not a commit, not a read and no new lease; and no file is made in the place of those that are gone."""
    for call in (
        lambda: handle.commit(put={"n": b"lost"}),
        lambda: handle.commit(expect={"n": ABSENT}, put={"n": b"lost"}),
        lambda: handle.get("n"),
        lambda: handle.scan(""),
    ):
        with pytest.raises(RegistryReplaced) as error:
            call()
        assert "was open" in str(error.value)
    with pytest.raises((RegistryReplaced, RegistryUnavailable)):
        handle.lease(30)


def test_a_registry_that_was_removed_is_noticed_by_its_open_handle(store: Store) -> None:
    with registry.open(store.url) as handle:
        handle.commit(put={"n": b"1"})
        store.remove()
        assert_stopped(handle)
        assert not store.place.exists()


def test_a_registry_that_was_moved_away_is_noticed_and_works_again_when_it_is_back(store: Store) -> None:
    with registry.open(store.url) as handle:
        handle.commit(put={"n": b"1"})
        store.move_away()
        assert_stopped(handle)
        store.put_back()
        entry = handle.get("n")
        assert entry is not None
        assert entry.value == b"1"
        handle.commit(expect={"n": entry.version}, put={"n": b"2"})
        with registry.open(store.url) as fresh:
            entry = fresh.get("n")
            assert entry is not None
            assert entry.value == b"2"


def test_a_new_registry_in_the_place_of_the_old_one_is_noticed(store: Store) -> None:
    with registry.open(store.url) as handle:
        handle.commit(put={"n": b"old"})
        store.remove()
        with registry.open(store.url) as other:
            other.commit(put={"n": b"new"})
            assert_stopped(handle)
            assert [entry.value for entry in other.scan("")] == [b"new"]


def test_a_copy_in_the_place_of_the_original_is_noticed(store: Store) -> None:
    with registry.open(store.url) as handle:
        handle.commit(put={"n": b"old"})
        store.move_away()
        store.restore_copy()
        assert_stopped(handle)


def test_a_lease_ends_when_its_registry_is_replaced(store: Store) -> None:
    """Nobody who opens the registry that is in place now sees the lease, so its holder must not count on it."""
    with registry.open(store.url) as handle:
        lease = handle.lease(5.0)
        handle.commit(ephemeral={"member": b""}, lease=lease)
        store.move_away()
        store.restore_copy()
        assert lease.lost.wait(PATIENCE_S)
        with pytest.raises(LeaseExpired):
            handle.commit(put={"n": b"1"}, lease=lease)


def test_a_file_registry_replaced_in_the_moment_of_a_commit_is_an_unknown_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store("file", tmp_path)
    with registry.open(store.url) as handle:
        handle.commit(put={"n": b"1"})
        link = os.link

        def link_and_replace(source: str, target: str) -> None:
            link(source, target)
            store.move_away()
            store.restore_copy()

        with monkeypatch.context() as patched:
            patched.setattr(os, "link", link_and_replace)
            with pytest.raises(OutcomeUnknown):
                handle.commit(put={"n": b"2"})
        assert_stopped(handle)


def test_a_sqlite_file_removed_in_the_moment_of_a_commit_is_an_unknown_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store("sqlite", tmp_path)
    with registry.open(store.url) as handle:
        handle.commit(put={"n": b"1"})

        def execute(connection: sqlite3.Connection, statement: str, *values: object) -> sqlite3.Cursor:
            cursor = sqlite3.Connection.execute(connection, statement, *values)  # type: ignore[arg-type]
            if statement == "COMMIT":
                store.remove()
            return cursor

        with monkeypatch.context() as patched:
            patched.setattr("pxrs.registry.sql.sqlite._Connection.execute", execute, raising=False)
            with pytest.raises(OutcomeUnknown):
                handle.commit(put={"n": b"2"})
        assert_stopped(handle)


def test_a_waiting_watch_is_woken_when_a_sqlite_file_is_removed(tmp_path: Path) -> None:
    with registry.open(f"sqlite:///{tmp_path}/registry") as handle, handle.watch("a/") as watch:
        while watch.wait(0.2):
            continue
        for path in sqlite_files(tmp_path / "registry"):
            path.unlink()
        assert watch.wait(PATIENCE_S)


def test_a_sqlite_file_behind_a_symbolic_link_is_opened_and_watched_over(tmp_path: Path) -> None:
    """SQLite keeps its write-ahead log beside the file that the link names, not beside the link."""
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(Path("data", "registry"))
    with registry.open(f"sqlite:///{tmp_path}/link") as handle:
        handle.commit(put={"n": b"1"})
        with registry.open(f"sqlite:///{tmp_path}/data/registry") as other:
            entry = other.get("n")
            assert entry is not None
            assert entry.value == b"1"
        (tmp_path / "data" / "registry-wal").unlink()
        with pytest.raises(RegistryReplaced):
            handle.commit(put={"n": b"2"})


def test_a_symbolic_link_to_another_sqlite_file_is_noticed(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with registry.open(f"sqlite:///{tmp_path}/{name}"):
            pass
    link = tmp_path / "link"
    link.symlink_to("one")
    with registry.open(f"sqlite:///{link}") as handle:
        handle.commit(put={"n": b"1"})
        link.unlink()
        link.symlink_to("two")
        assert_stopped(handle)


def test_a_removed_write_ahead_log_is_noticed(tmp_path: Path) -> None:
    """What is in it has not reached the main file yet, and others would begin a new one."""
    with registry.open(f"sqlite:///{tmp_path}/registry") as handle:
        handle.commit(put={"n": b"1"})
        (tmp_path / "registry-wal").unlink()
        with pytest.raises(RegistryReplaced):
            handle.commit(put={"n": b"2"})


@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_a_registry_emptied_in_its_own_directory_is_noticed(kind: str, tmp_path: Path) -> None:
    """The directory itself stays, and another process makes a new registry in it."""
    url = str(tmp_path) if kind == "file" else f"sqlite:///{tmp_path}/registry"
    with registry.open(url) as handle:
        handle.commit(put={"n": b"old"})
        root = tmp_path / "pxrs" if kind == "file" else tmp_path
        for path in root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        with registry.open(url) as other:
            other.commit(put={"n": b"new"})
            assert_stopped(handle)


@pytest.mark.parametrize("refusal", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")])
def test_r5_a_commit_on_sqlite_after_which_the_file_cannot_be_looked_at_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: OSError
) -> None:
    """The check after COMMIT fails, and the commit has taken effect: to say that nothing was written would be wrong."""
    identity = sqlite._identity

    def is_committed() -> bool:
        with closing(sqlite3.connect(tmp_path / "r.db")) as other:
            (found,) = other.execute("SELECT count(*) FROM pxrs_entry WHERE value = ?", (b"stored",)).fetchone()
            return bool(found)

    def look(path: Path) -> object:
        if is_committed():
            raise refusal
        return identity(path)

    with registry.open(f"sqlite:///{tmp_path}/r.db") as store:
        store.commit(put={"a": b"before"})
        with monkeypatch.context() as patch:
            patch.setattr(sqlite, "_identity", look)
            with pytest.raises(OutcomeUnknown, match="a commit was in progress"):
                store.commit(put={"a": b"stored"})
        stored = store.get("a")
        assert stored is not None
        assert stored.value == b"stored"
