"""A file that this process may not read is not taken for damaged (V5): the error names the file, the user, who owns the
file and what to change; and it is final, because trying again cannot help."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pxrs
import pxrs.registry.file.registry
from pxrs import registry as registries
from pxrs.backup.restoring import verify
from pxrs.cli.app import app
from pxrs.cli.restarts import is_final
from pxrs.errors import (
    AccessDenied,
    AppendFailed,
    BackupDamaged,
    BackupError,
    BatchRefused,
    InvalidUrl,
    LogError,
    LogNotReadable,
    LogNotWritable,
    NoWritePermission,
    PxrsError,
    TopicExists,
)
from pxrs.hub_record import NAME as RECORD
from pxrs.log.batch import encode
from pxrs.log.contract import Append
from pxrs.log.directory.check import check
from pxrs.publishing.staging.frames import read_arrow_file
from tests.acceptance.read_only.reading import reading_only


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Nobody but root may use the file or folder, and this process is not root."""
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        with reading_only(path.parent):
            yield
    finally:
        path.chmod(mode)


def explains(error: BaseException | None, path: Path) -> None:
    """The text says which user may not read which file, who owns it, and what to change."""
    text = str(error)
    assert f"may not read {path} (owner: " in text
    assert "uid " in text
    assert "mode " in text
    assert "run it as" in text
    assert "damage" not in text
    assert "delete" not in text


def folder_of(data: Path, topic: str) -> Path:
    return (data / "topics" / topic).resolve()


@pytest.fixture
def description(data: Path) -> Path:
    with pxrs.open(data) as hub:
        hub.create_topic("other", partitions=1)
    return folder_of(data, "orders") / "topic.json"


def test_v5_a_topic_that_may_not_be_read_is_told_of_as_such_and_the_others_are_used(
    data: Path, description: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with unreadable(description), pxrs.open(data) as hub:
        assert [topic.name for topic in hub.topics()] == ["other"]
        (found,) = hub.damaged_topics()
        assert (found.name, found.id) == ("orders", description.parent.name)
        assert isinstance(found.error, LogNotReadable)
        assert found.error.path == str(description)
        explains(found.error, description)
        with pytest.raises(LogNotReadable) as caught:
            hub.topic("orders")
        explains(caught.value, description)
        assert is_final(caught.value)
        with pytest.raises(LogNotReadable):
            hub.consumer("orders", "billing")
        with pytest.raises(TopicExists, match="may not read") as exists:
            raise hub.log._exists("orders")  # type: ignore[attr-defined]
        assert "damaged" not in str(exists.value)
    assert "topic orders is not readable" in caplog.text
    assert "damaged" not in caplog.text


def test_v5_the_list_of_topics_does_not_advise_to_delete_what_may_not_be_read(data: Path, description: Path) -> None:
    with unreadable(description):
        shown = CliRunner().invoke(app, ["topic", "list", "--at", str(data)])
        told = CliRunner().invoke(app, ["topic", "list", "--at", str(data), "--json"])
    assert (shown.exit_code, told.exit_code) == (1, 1)
    assert "delete" not in shown.output
    assert "damage" not in shown.output
    row = next(json.loads(line) for line in told.stdout.splitlines() if "orders" in line)
    assert "damage" not in row
    assert "may not read" in row["error"]


PLACES: dict[str, Callable[[Path], Path]] = {
    "description": lambda topic: topic / "topic.json",
    "topic": lambda topic: topic,
    "partitions": lambda topic: topic / "partitions",
    "partition": lambda topic: topic / "partitions/partition-0",
    "segment": lambda topic: next(topic.glob("partitions/partition-0/*.log")),
    "published": lambda topic: topic / "partitions/partition-0/published",
}


@pytest.mark.parametrize("place_of", PLACES.values(), ids=PLACES)
def test_v5_the_checker_does_not_report_what_it_may_not_read_as_damage(
    data: Path, place_of: Callable[[Path], Path]
) -> None:
    place = place_of(folder_of(data, "orders"))
    with unreadable(place):
        with pytest.raises(LogNotReadable) as caught:
            list(check(data))
        result = CliRunner().invoke(app, ["check", str(data), "--json"])
    explains(caught.value, place)
    assert isinstance(result.exception, LogNotReadable)
    assert result.stdout == ""


def test_v5_a_log_whose_folder_may_not_be_searched_is_not_called_no_log(data: Path) -> None:
    with unreadable(data / "topics"), pytest.raises(LogNotReadable) as caught:
        list(check(data))
    explains(caught.value, data / "topics")


@pytest.mark.parametrize("name", ["partition", "segment", "published"])
def test_v5_messages_that_may_not_be_read_are_no_failed_read_that_is_tried_again(data: Path, name: str) -> None:
    place = PLACES[name](folder_of(data, "orders"))
    with unreadable(place), pxrs.open(data) as hub, pytest.raises(LogNotReadable) as caught:
        list(hub.topic("orders").messages(0))
    explains(caught.value, place)
    assert is_final(caught.value)


def test_v5_an_append_to_files_that_may_not_be_used_is_not_tried_again(data: Path) -> None:
    published = PLACES["published"](folder_of(data, "orders"))
    with pxrs.open(data) as hub:
        records = hub.topic("orders").read(0, 0)[0].records
    with unreadable(published), pxrs.open(data) as hub:
        log = hub.topic("orders").log
        (outcome,) = log.append([Append(0, encode(records, "none"))])
        error = outcome.error  # type: ignore[union-attr]
        assert isinstance(error, LogNotReadable | LogNotWritable)
        assert not isinstance(error, AppendFailed), "a producer would try that again"


def test_v5_a_member_whose_hub_record_may_not_be_read_ends(data: Path) -> None:
    with pxrs.open(data) as hub:
        hub.join_registry()
    record = data / RECORD
    with unreadable(record), pxrs.open(data) as hub, pytest.raises(PxrsError) as caught:
        hub.consumer("orders", "billing")
    assert is_final(caught.value)
    assert isinstance(caught.value, LogNotReadable | NoWritePermission)


def generation_of(data: Path) -> Path:
    return next((data / "registry/pxrs/generations").iterdir())


@pytest.mark.parametrize("inside", ["", "snapshot", "0" * 19 + "1"], ids=["generation", "snapshot", "entry"])
def test_v5_a_registry_that_may_not_be_read_is_not_corrupt(data: Path, inside: str) -> None:
    place = generation_of(data) / inside
    with unreadable(place):
        with pytest.raises(AccessDenied) as caught:
            registries.open(data / "registry").scan("")
        with pytest.raises(AccessDenied):
            pxrs.open(data).groups()
    explains(caught.value, place)
    assert is_final(caught.value)


@pytest.mark.parametrize("name", ["backup.json", "registry/*"])
def test_v5_a_backup_that_may_not_be_read_is_not_damaged(data: Path, place: Path, name: str) -> None:
    target = place / "target"
    done = CliRunner().invoke(app, ["backup", "--at", str(data), str(target)])
    assert done.exit_code == 0, done.output
    file = next(target.glob(name))
    with unreadable(file), pytest.raises(BackupError) as caught:
        verify(target, lambda progress: None)
    assert not isinstance(caught.value, BackupDamaged)
    explains(caught.value, file)


def test_v5_a_backup_leaves_out_no_topic_that_another_user_could_read(
    data: Path, place: Path, description: Path
) -> None:
    target = place / "target"
    target.mkdir()
    target.chmod(0o777)
    with unreadable(description):
        done = CliRunner().invoke(app, ["backup", "--at", str(data), str(target / "backup")])
    assert isinstance(done.exception, LogNotReadable)
    explains(done.exception, description)
    assert not (target / "backup/backup.json").exists()


def test_v5_a_staged_file_that_may_not_be_read_is_not_a_refused_batch(place: Path) -> None:
    file = place / "0.arrow"
    file.write_bytes(b"anything")
    with unreadable(file), pytest.raises(LogError) as caught:
        list(read_arrow_file(str(file), "none"))
    assert not isinstance(caught.value, BatchRefused)
    explains(caught.value, file)


def test_v5_a_hub_below_a_folder_that_may_not_be_searched_says_who_may(data: Path) -> None:
    with unreadable(data), pytest.raises(InvalidUrl) as caught:
        pxrs.open(data / "hub")
    explains(caught.value, data)


def test_v5_a_storage_node_that_may_not_write_its_directory_does_not_ask_to_be_restarted(place: Path) -> None:
    from pxrs.cli.storage import _serve
    from pxrs.cluster.storage.identity import Directory

    class Server:
        async def start(self) -> None:
            Directory(place / "node")

    class Settings:
        directory = place / "node"

    refusal = "the storage node cannot start: .* may not write to"
    with reading_only(place), pytest.raises(LogNotWritable, match=refusal) as raised:
        asyncio.run(_serve(Server(), Settings(), None, None))  # type: ignore[arg-type]
    assert is_final(raised.value)


def test_v5_a_command_line_that_meets_a_refused_file_says_who_may_read_it(data: Path) -> None:
    from pxrs.cli.terminal import error_text

    file = data / RECORD
    with unreadable(file):
        try:
            file.read_bytes()
        except OSError as error:
            text = error_text(error)
    assert "may not read" in text
    assert str(file) in text


def test_v5_a_sqlite_registry_that_may_not_be_read_says_who_may(place: Path) -> None:
    file = place / "registry.db"
    registries.open(f"sqlite:///{file}").close()
    with unreadable(file), pytest.raises(AccessDenied) as caught:
        registries.open(f"sqlite:///{file}")
    explains(caught.value, file)
