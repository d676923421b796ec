"""A copy of a topic that goes on although something has changed: the source is another one with the same id, the
target was restored from a backup, a commit comes late. It copies each message once, or says that it cannot."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import registry as registries
from pxrs.backup.making import make_backup
from pxrs.backup.restoring import restore, verify
from pxrs.copying import copier, pieces
from pxrs.copying.records import is_copy_key
from pxrs.errors import CopyFailed, OutcomeUnknown
from pxrs.hub import Hub
from pxrs.log.batch import Batch
from pxrs.registry.values import Snapshot

OLD = "this is not the orders that was copied into copy"


class Killed(BaseException):
    """Stands for a SIGKILL at this moment: nothing in pxrs catches it."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_ROWS", 5)
    monkeypatch.setattr(copier, "_PAUSE_S", (0.0, 0.0))


@pytest.fixture
def target() -> Iterator[Hub]:
    with pxrs.open("memory:", upkeep=False) as hub:
        yield hub


def opened(path: Path) -> Hub:
    return pxrs.open(path, upkeep=False)


def send(hub: Hub, first: int, count: int, word: str = "order", partition: int = 0) -> None:
    with hub.producer("orders") as out:
        for number in range(first, first + count):
            out.send(f"{word} {number}", key="k", partition=partition)


def values(hub: Hub, topic: str) -> Counter[bytes | None]:
    handle = hub.topic(topic)
    return Counter(message.value for number in range(handle.partitions) for message in handle.messages(number))


@pytest.fixture
def source(tmp_path: Path, target: Hub) -> Path:
    """The directory of a hub, of which 20 messages were copied, and beside it `older`: what it was after 10."""
    with opened(tmp_path / "source") as hub:
        hub.create_topic("orders", partitions=1)
        send(hub, 0, 10)
    shutil.copytree(tmp_path / "source", tmp_path / "older", symlinks=True)
    with opened(tmp_path / "source") as hub:
        send(hub, 10, 10)
        hub.copy_topic("orders", "copy", to=target)
    return tmp_path / "source"


def test_a_source_that_ends_before_what_was_copied_is_no_success(source: Path, target: Hub) -> None:
    with opened(source.parent / "older") as older:
        with pytest.raises(CopyFailed, match=OLD):
            older.copy_topic("orders", "copy", to=target)
        send(older, 10, 9, "other")
        with pytest.raises(CopyFailed, match=OLD):  # its end is one before the position
            older.copy_topic("orders", "copy", to=target)


def test_a_source_with_other_messages_is_refused_although_it_is_long_enough(source: Path, target: Hub) -> None:
    with opened(source.parent / "older") as older:
        send(older, 10, 30, "other")
        with pytest.raises(CopyFailed, match=f"orders/0 has a different message at offset 19: {OLD}"):
            older.copy_topic("orders", "copy", to=target)
    assert sum(values(target, "copy").values()) == 20


def test_the_same_source_in_another_place_goes_on(source: Path, target: Hub) -> None:
    shutil.copytree(source, source.parent / "moved", symlinks=True)
    with opened(source.parent / "moved") as moved:
        send(moved, 20, 7)
        assert moved.copy_topic("orders", "copy", to=target).messages == 7
        assert values(moved, "orders") == values(target, "copy")


@pytest.mark.parametrize("more", [3, 40])
def test_a_piece_that_was_begun_is_not_finished_with_other_messages(
    more: int, source: Path, target: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = target.log.topic("copy")

    def killed(_: object) -> None:
        raise Killed

    shutil.copytree(source, source.parent / "before", symlinks=True)
    with opened(source) as hub:
        send(hub, 20, 5)
        with monkeypatch.context() as patched:
            patched.setattr(log, "append", killed)
            with pytest.raises(Killed):
                hub.copy_topic("orders", "copy", to=target)
    with opened(source.parent / "before") as other:
        send(other, 20, more, "other")
        with pytest.raises(CopyFailed, match=OLD):
            other.copy_topic("orders", "copy", to=target)
    with opened(source) as hub:
        assert hub.copy_topic("orders", "copy", to=target).messages == 5
        assert values(hub, "orders") == values(target, "copy")


def test_a_source_that_loses_its_end_during_the_copy_ends_the_copy(
    source: Path, target: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(source) as hub:
        send(hub, 20, 20)
        log = hub.log.topic("orders")
        read, reads = log.read, 0

        def shorter(partition: int, offset: int, *arguments: Any) -> list[Batch]:
            nonlocal reads
            reads += 1
            assert reads < 100, "it reads at the end for ever"
            return [] if offset >= 30 else read(partition, offset, *arguments)

        monkeypatch.setattr(log, "read", shorter)
        with pytest.raises(CopyFailed, match=f"orders/0 ends at offset 30, but ended at 40: {OLD}"):
            hub.copy_topic("orders", "copy", to=target)


def test_a_commit_that_comes_after_its_reply_was_lost_is_that_of_this_copy(
    source: Path, target: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, late = target.registry.commit, []

    def lossy(expect: dict[str, int], *arguments: Any, **named: Any) -> dict[str, int]:
        if not any(map(is_copy_key, expect)):
            return commit(expect, *arguments, **named)
        if not late:
            late.append((expect, *arguments))
            raise OutcomeUnknown("no reply")
        commit(*late.pop())
        return commit(expect, *arguments, **named)

    with opened(source) as hub:
        send(hub, 20, 20)
        monkeypatch.setattr(target.registry, "commit", lossy)
        assert hub.copy_topic("orders", "copy", to=target).messages == 20
        assert values(hub, "orders") == values(target, "copy")


def test_a_record_that_is_older_than_the_target_is_noticed_by_a_piece_that_is_there(source: Path, target: Hub) -> None:
    """Such as after the registry alone was restored."""
    with opened(source) as hub:
        (before,) = [entry for entry in target.registry.scan("topics/") if is_copy_key(entry.key)]
        send(hub, 20, 4)
        hub.copy_topic("orders", "copy", to=target)
        now = target.registry.get(before.key)
        assert now is not None
        target.registry.commit({before.key: now.version}, {before.key: before.value})
        send(hub, 24, 1)
        with pytest.raises(CopyFailed, match="is older than the target"):
            hub.copy_topic("orders", "copy", to=target)


@pytest.mark.parametrize("is_cut_short", [False, True])
def test_a_target_that_is_older_than_the_record_is_noticed_by_its_end(
    is_cut_short: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry is not in the directory, and the directory was replaced by an older copy."""
    there, registry = tmp_path / "target", f"sqlite:///{tmp_path}/registry.db"
    with opened(source) as hub:
        with pxrs.open(there, registry, upkeep=False) as target:
            hub.copy_topic("orders", "copy", to=target, end=10)
        shutil.copytree(there, tmp_path / "older target", symlinks=True)
        with pxrs.open(there, registry, upkeep=False) as target:
            log = target.log.topic("copy")
            append = log.append

            def last(appends: Any) -> Any:
                outcomes = append(appends)
                if is_cut_short and sum(log.ends()) == 20:
                    raise Killed
                return outcomes

            monkeypatch.setattr(log, "append", last)
            with pytest.raises(Killed) if is_cut_short else nullcontext():
                hub.copy_topic("orders", "copy", to=target)
        with (
            pxrs.open(tmp_path / "older target", registry, upkeep=False) as target,
            pytest.raises(CopyFailed, match="copy/0 ends at offset 10, but ended at"),
        ):
            hub.copy_topic("orders", "copy", to=target)


class Between:
    """The registry of a hub, and what happens right before and after it is copied."""

    def __init__(self, hub: Hub, before: Callable[[], object], after: Callable[[], object]) -> None:
        self._registry, self._before, self._after = hub.registry, before, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    def snapshot(self, *arguments: Any) -> Snapshot:
        self._before()
        found = self._registry.snapshot(*arguments)
        self._after()
        return found


@pytest.mark.parametrize("known", [0, 6], ids=["begun after the registry was copied", "begun before"])
def test_a_copy_goes_on_in_a_target_restored_from_a_backup_that_was_made_meanwhile(known: int, tmp_path: Path) -> None:
    """The log of the backup is newer than its registry. The copy that goes on makes its pieces otherwise, under numbers
    that the log has seen.

    known: how many messages of each partition are copied when the registry is."""
    with opened(tmp_path / "source") as source:
        source.create_topic("orders", partitions=2)
        send(source, 0, 20, "left", partition=0)
        send(source, 0, 20, "right", partition=1)
        with opened(tmp_path / "target") as target:
            target.create_topic("copy", partitions=1)

            def copy(end: int) -> None:
                if end:
                    source.copy_topic("orders", "copy", to=target, end=end)

            copy(known // 2)
            registry: Any = Between(target, lambda: copy(known), lambda: copy(known + 4))
            home = target.join_registry()
            assert home is not None
            make_backup(tmp_path / "target", home.hub, registry, "", tmp_path / "backup", "", lambda _: None)
        manifest = verify(tmp_path / "backup", lambda _: None)
        new = tmp_path / "new"
        with registries.open(new / "registry") as made:
            restore(tmp_path / "backup", manifest, new, made, str(new / "registry"), lambda _: None)
        with opened(new) as restored:
            assert sum(values(restored, "copy").values()) == 2 * known, "what the restored registry knows"
            source.copy_topic("orders", "copy", to=restored, end=known + 2)
            source.copy_topic("orders", "copy", to=restored)
            assert values(restored, "copy") == values(source, "orders")
