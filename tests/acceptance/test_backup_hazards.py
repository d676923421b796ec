"""V5: what happens to a hub, a folder or a process in the worst moment of a backup or of a restoration."""

from __future__ import annotations

import os
import resource
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import pxrs
from pxrs import registry as registries
from pxrs.backup.making import Progress
from pxrs.backup.manifest import BackupManifest, CopiedFile, CopiedTopic
from pxrs.backup.rebirth import epoch_at
from pxrs.backup.restoring import restore, verify
from pxrs.backup.target import checksum_of, read_manifest
from pxrs.disk import with_checksum
from pxrs.errors import BackupDamaged, BackupError, CopyFailed, RestoreInterrupted, RestoreRefused
from pxrs.group.records import start_key
from pxrs.log.batch import Origin
from pxrs.log.contract import Append
from pxrs.log.directory.check import check
from pxrs.log.directory.repair import plan
from pxrs.log.outcomes import StoredAt
from pxrs.publishing.records import Manifest
from pxrs.testing.log_fixtures import records
from pxrs.testing.transfer import rows_of
from tests.acceptance.backup_steps import Between, Interrupted, a_hub, back_up, read, restored, send


def files_in(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*")}


def test_a_folder_with_files_that_no_backup_has_made_is_refused_as_target_and_stays_as_it_is(tmp_path: Path) -> None:
    """The folders of a hub have the names that those of a backup have, and a backup removes what it does not name."""
    with a_hub(tmp_path / "hub") as hub, a_hub(tmp_path / "other") as other:
        before = files_in(tmp_path / "other" / "logs")
        with pytest.raises(BackupError, match="directory of a hub"):
            back_up(hub, tmp_path / "other")
        assert files_in(tmp_path / "other" / "logs") == before
        assert len(rows_of(other.topic("orders"))) == 60
        program = tmp_path / "program"
        (program / "logs").mkdir(parents=True)
        (program / "logs" / "today.txt").write_text("started")
        with pytest.raises(BackupError, match="holds no backup"):
            back_up(hub, program)
        assert files_in(program) == {"logs", "logs/today.txt"}
        back_up(hub, tmp_path / "b")
        (tmp_path / "b" / "hub.record").touch()
        with pytest.raises(BackupError, match="directory of a hub"):
            back_up(hub, tmp_path / "b")
        (tmp_path / "disk" / "lost+found").mkdir(parents=True)
        back_up(hub, tmp_path / "disk")


def test_backups_of_two_hubs_without_an_id_are_not_mixed(tmp_path: Path) -> None:
    """Version 0.1 gave hubs no ids."""
    with a_hub(tmp_path / "hub") as hub, a_hub(tmp_path / "other") as other:
        for name in ("hub", "other"):
            (tmp_path / name / "hub.record").unlink()
        back_up(hub, tmp_path / "b")
        back_up(hub, tmp_path / "b")
        with pytest.raises(BackupError, match="another hub"):
            back_up(other, tmp_path / "b")


def test_a_backup_needs_no_staged_files_of_another_hub_that_shares_the_registry(tmp_path: Path) -> None:
    store = tmp_path / "registry"
    with (
        pxrs.open(tmp_path / "hub", store, upkeep=False) as hub,
        pxrs.open(tmp_path / "other", store, upkeep=False) as other,
    ):
        hub.create_topic("orders", partitions=2)
        send(hub, 4)
        theirs = other.create_topic("out", partitions=2).id
        hub.registry.commit(put={f"spark/{theirs}/query": Manifest(3, ["00000-1.arrows"]).dump()})
        back_up(hub, tmp_path / "b")
    with restored(tmp_path / "b", tmp_path / "new") as copy:
        assert len(rows_of(copy.topic("orders"))) == 4


def test_g7_no_checkpoint_of_a_backup_is_beyond_the_end_of_its_partition(tmp_path: Path) -> None:
    """Messages come, and a group reads them, when the ends were read for the first time and the registry was not."""
    with a_hub(tmp_path / "hub") as hub:

        def before() -> None:
            send(hub, 20)
            read(hub, 80)

        back_up(hub, tmp_path / "b", registry=Between(hub.registry, before=before))
        with restored(tmp_path / "b", tmp_path / "new") as copy:
            assert [(each.checkpoint, each.end) for each in copy.group("g").describe().partitions] == [(40, 40)] * 2
            send(copy, 2)
            assert len(read(copy, 2)) == 2, "no message is skipped"


@pytest.mark.parametrize("begins", ["before the backup", "before the keys are copied", "after that"])
def test_a_copy_of_a_topic_goes_on_exactly_once_in_the_restored_hub(begins: str, tmp_path: Path) -> None:
    """Pieces that were copied after the registry was: their numbers are given to other messages in the restored hub."""
    with pxrs.open(tmp_path / "source", upkeep=False) as source, pxrs.open(tmp_path / "hub", upkeep=False) as hub:
        source.create_topic("orders", partitions=2)
        hub.create_topic("orders", partitions=2)

        def copy() -> None:
            send(source, 8)
            source.copy_topic("orders", "orders", to=hub)

        if begins == "before the backup":
            copy()
        before = copy if begins == "before the keys are copied" else lambda: None
        back_up(hub, tmp_path / "b", registry=Between(hub.registry, copy, before))
        send(source, 4)
        with restored(tmp_path / "b", tmp_path / "new") as new:
            assert len(rows_of(new.topic("orders"))) == (0 if begins == "after that" else 8)
            source.copy_topic("orders", "orders", to=new)
            assert rows_of(new.topic("orders")) == rows_of(source.topic("orders"))


def test_a_copy_from_a_restored_hub_that_lacks_what_was_copied_is_refused(tmp_path: Path) -> None:
    with a_hub(tmp_path / "hub") as hub, pxrs.open(tmp_path / "other", upkeep=False) as other:
        back_up(hub, tmp_path / "b")
        send(hub, 2)
        hub.copy_topic("orders", "copy", to=other)
        with restored(tmp_path / "b", tmp_path / "new") as source, pytest.raises(CopyFailed, match="is not the orders"):
            source.copy_topic("orders", "copy", to=other)


def test_g8_a_backup_that_is_restored_twice_gives_out_no_epoch_twice() -> None:
    """The second hub, made a day later, begins above everything that the first one has given out by then."""
    assert epoch_at(1_800_000_000 + 86_400) > epoch_at(1_800_000_000) + 80_000
    assert 0 < epoch_at(1_800_000_000) < 1 << 31, "people store epochs in columns of 32 bits"


def test_queues_are_of_the_moment_of_the_registry_and_not_of_a_later_one(tmp_path: Path) -> None:
    with pxrs.open(tmp_path / "hub", upkeep=False) as hub:
        hub.create_queue("new").put(b"job")
        hub.create_queue("done")

        def after() -> None:
            with hub.transaction() as tx:
                tx.put("done", tx.take("new", timeout=5).value)

        back_up(hub, tmp_path / "b", registry=Between(hub.registry, after))
        with restored(tmp_path / "b", tmp_path / "new") as copy:
            assert [[item.value for item in copy.queue(name).peek()] for name in ("new", "done")] == [[b"job"], []]


def test_l4_a_batch_whose_segment_retention_has_removed_is_known_in_the_restored_hub(tmp_path: Path) -> None:
    """The state of producers is in files beside the segments that are left, and in no other place."""
    again = Append.encoded(0, records([b"once"]), Origin(uuid.uuid4(), 0, 0))
    with pxrs.open(tmp_path / "hub", upkeep=False) as hub:
        hub.create_topic("orders", partitions=2, segment_bytes=4_096, retention_bytes=4_096)
        hub.log.topic("orders").append([again])
        send(hub, 60)
        hub.run_upkeep()
        # Without a retention, only the file `start` tells that the first segments are not missing.
        hub.alter_topic("orders", retention_bytes=None)
        back_up(hub, tmp_path / "b")
        bounds = hub.topic("orders").bounds([0])
    with restored(tmp_path / "b", tmp_path / "new") as copy:
        assert copy.topic("orders").bounds([0]) == bounds
        assert bounds[0].start > 0
        assert copy.log.topic("orders").append([again]) == [StoredAt(0, is_duplicate=True)]


def test_a_restored_log_that_ends_elsewhere_than_the_manifest_says_is_an_error(tmp_path: Path) -> None:
    with a_hub(tmp_path / "hub") as hub:
        back_up(hub, tmp_path / "b")
    manifest = read_manifest(tmp_path / "b")
    first, *others = manifest.topics
    parts = [replace(part, end=part.end + 1, whole_end=part.end + 1) for part in first.partitions]
    forged = replace(manifest, topics=(replace(first, partitions=tuple(parts)), *others))
    with registries.open(tmp_path / "new" / "registry") as registry, pytest.raises(BackupError, match="pxrs check"):
        restore(tmp_path / "b", forged, tmp_path / "new", registry, "", lambda progress: None)


def test_a_first_segment_that_the_hub_lacks_is_reported_by_the_restored_hub_too(tmp_path: Path) -> None:
    with a_hub(tmp_path / "hub") as hub:
        folder = tmp_path / "hub" / "logs" / hub.topic("orders").id / "partitions" / "partition-0"
        min(folder.glob("*.log")).unlink()
        back_up(hub, tmp_path / "b")
    with registries.open(tmp_path / "new" / "registry") as registry:
        restore(tmp_path / "b", read_manifest(tmp_path / "b"), tmp_path / "new", registry, "", lambda progress: None)
    old, new = ([each.what for found in check(tmp_path / name) for each in found.findings] for name in ("hub", "new"))
    assert old == new
    assert len(new) == 1


def test_a_repair_while_the_backup_is_made_fails_the_backup_and_the_next_one_is_whole(tmp_path: Path) -> None:
    with a_hub(tmp_path / "hub") as hub:
        folder = tmp_path / "hub" / "logs" / hub.topic("orders").id / "partitions" / "partition-0"
        second = sorted(folder.glob("*.log"))[1]
        data = bytearray(second.read_bytes())
        data[-40] ^= 1
        second.write_bytes(data)

        def between() -> None:
            for step in plan(tmp_path / "hub", [each for found in check(tmp_path / "hub") for each in found.findings]):
                step.perform()

        with pytest.raises(BackupError, match="run the backup again"):
            back_up(hub, tmp_path / "b", registry=Between(hub.registry, between))
        back_up(hub, tmp_path / "b")
        with restored(tmp_path / "b", tmp_path / "new") as copy:
            assert len(rows_of(copy.topic("orders"))) == 58, "one frame, of two messages, was damaged"


def test_the_last_backup_stays_whole_if_a_segment_has_other_bytes_by_now(tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.stage == "writing the manifest":
            raise Interrupted

    with a_hub(tmp_path / "hub") as hub:
        back_up(hub, tmp_path / "b")
        folder = tmp_path / "hub" / "logs" / hub.topic("orders").id / "partitions" / "partition-0"
        first = min(folder.glob("*.log"))
        first.write_bytes(bytes(first.stat().st_size))
        with pytest.raises(Interrupted):
            back_up(hub, tmp_path / "b", stop)
        verify(tmp_path / "b", lambda progress: None)
        back_up(hub, tmp_path / "b")
        copied = {file.place: file for file in verify(tmp_path / "b", lambda progress: None).files}
        assert copied[str(first.relative_to(tmp_path / "hub"))].checksum == checksum_of(first), "copied again"


def test_keys_of_a_topic_whose_deletion_ends_while_the_backup_is_made_are_removed_in_the_restored_hub(
    tmp_path: Path,
) -> None:
    """The janitor removes the keys, and the note that they are to be removed, right after the keys were copied."""
    with a_hub(tmp_path / "hub") as hub:
        read(hub, 1)
        topic = hub.create_topic("gone", retention_bytes=4_096, keep_unread=True).id
        hub.registry.commit(put={start_key(topic): b"{}"})
        (tmp_path / "hub" / "deleted").mkdir(exist_ok=True)
        (tmp_path / "hub" / "deleted" / topic).touch()
        hub.log.delete_topic("gone")
        back_up(hub, tmp_path / "b", registry=Between(hub.registry, hub.run_upkeep))
        assert hub.registry.get(start_key(topic)) is None
    with restored(tmp_path / "b", tmp_path / "new") as copy:
        assert copy.registry.get(start_key(topic)) is not None
        copy.run_upkeep()
        assert copy.registry.get(start_key(topic)) is None


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """While this holds, the system refuses to make a file larger: a full disk for one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_without_room_fails_a_backup_and_a_restoration_and_both_say_where(tmp_path: Path) -> None:
    with a_hub(tmp_path / "hub") as hub:
        with files_up_to(3_000), pytest.raises(BackupError, match=r"backed up to .*run the backup again"):
            back_up(hub, tmp_path / "b")
        back_up(hub, tmp_path / "b")
    with files_up_to(3_000), pytest.raises(BackupError, match=r"restored to .*empty both"):
        restored(tmp_path / "b", tmp_path / "new")
    with pytest.raises(RestoreRefused):
        restored(tmp_path / "b", tmp_path / "new")


def interrupted_at(stage: str) -> Callable[[Progress], None]:
    def tell(progress: Progress) -> None:
        if progress.stage == stage:
            raise Interrupted

    return tell


def test_a_restoration_that_was_killed_leaves_nothing_that_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: object) -> None:
        raise Interrupted

    with a_hub(tmp_path / "hub") as hub:
        hub.create_topic("second")
        hub.create_queue("jobs").put(b"one")
        back_up(hub, tmp_path / "b")
    manifest = read_manifest(tmp_path / "b")
    for moment in ("copying files", "writing the registry", "naming the topics", "comparing the ends"):
        if moment == "naming the topics":
            monkeypatch.setattr(os, "rename", killed)
        elif moment == "comparing the ends":
            monkeypatch.setattr("pxrs.backup.restoring._compare_ends", killed)
        path = tmp_path / moment
        with registries.open(path / "registry") as registry, pytest.raises(Interrupted):
            restore(tmp_path / "b", manifest, path, registry, "x", interrupted_at(moment))
        monkeypatch.undo()
        with pxrs.open(path, upkeep=False) as half:
            assert len(half.topics()) == (2 if moment == "comparing the ends" else 0), "all get their names at once"
            for use in (
                lambda: half.create_topic("orders-2"),
                lambda: half.queue("jobs"),
                half.adopt_registry,
                half.join_registry,
            ):
                with pytest.raises(RestoreInterrupted, match="not finished"):
                    use()
        with pytest.raises(RestoreRefused):
            restored(tmp_path / "b", path)


@pytest.mark.parametrize(
    "forged",
    [
        lambda whole: replace(whole, topics=(CopiedTopic("id", "../outside", ()),)),
        lambda whole: replace(whole, topics=(CopiedTopic("..", "name", ()),)),
        lambda whole: replace(whole, deleted=("../../outside",)),
        lambda whole: replace(whole, files=(*whole.files, CopiedFile("x", "logs/../../outside", 0, ""))),
        lambda whole: replace(whole, files=(*whole.files, CopiedFile("x", "hub.record", 0, ""))),
    ],
)
def test_a_forged_manifest_cannot_name_anything_outside_the_new_hub(
    forged: Callable[[BackupManifest], BackupManifest], tmp_path: Path
) -> None:
    whole = BackupManifest("id", "hub", 0, 0, "there", "shown", "now", 0, "1")
    (tmp_path / "backup.json").write_bytes(with_checksum(forged(whole).dump()))
    with pytest.raises(BackupDamaged, match=r"the manifest (names|contains)"):
        verify(tmp_path, lambda progress: None)
