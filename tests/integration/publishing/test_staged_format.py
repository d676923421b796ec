"""The format of staged files: what earlier versions have staged is published, and what is damaged is refused."""

from __future__ import annotations

import errno
import struct
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import pxrs
from pxrs.errors import BatchRefused, UnknownProducer
from pxrs.log.contract import Append
from pxrs.log.outcomes import NotStored, Outcome, StoredAt
from pxrs.log.producers import BATCHES_KEPT
from pxrs.publishing.manifest import Publisher
from pxrs.publishing.records import Manifest
from pxrs.publishing.staging.appends import append_pieces
from pxrs.publishing.staging.directory import DirectoryStaging
from pxrs.publishing.staging.frames import FORMAT, Piece
from tests.integration.publishing.driver import QUERY, Driver, Place, table_of

GOLDEN = Path(__file__).parents[2] / "golden" / "staged-arrow" / "old.tar.xz"


def stored(topic: pxrs.TopicHandle) -> list[int]:
    return sorted(int(value) for value in topic.to_arrow().column("value").to_pylist())


@pytest.mark.parametrize("name", ["committed", "in-part"])
@pytest.mark.parametrize("is_own", [True, False], ids=["its own query", "another query"])
def test_k1_a_manifest_that_names_arrow_files_is_finished(tmp_path: Path, name: str, is_own: bool) -> None:
    """As the last version left it that staged Arrow files: see tests/golden/staged-arrow/make.py."""
    with tarfile.open(GOLDEN) as packed:
        packed.extractall(tmp_path)  # our own archive; `filter` came with Python 3.11.4
    with pxrs.open(tmp_path / name) as hub:
        topic, staging = hub.topic("out"), DirectoryStaging(hub.url)
        assert len(stored(topic)) == {"committed": 10, "in-part": 24}[name]
        publisher = Publisher(hub.registry, topic.log, staging)
        publish = pa.record_batch({"value": [b"60"]})
        if is_own:
            batch = staging.stage(topic.topic, QUERY, 2, 0, [publish]).name
            publisher.publish(QUERY, 2, [batch or ""])
        else:
            publisher.finish_others()
        assert stored(topic) == list(range(61 if is_own else 60))
        entry = hub.registry.get(f"spark/{topic.id}/{QUERY}")
        assert entry is not None
        assert Manifest.load(entry).is_published
        assert not [path for path in (tmp_path / name / "staging").rglob("*") if path.is_file()]


def staged_file(place: Place) -> tuple[Driver, Path]:
    driver = Driver(place)
    name = driver.staging.stage(driver.topic, QUERY, 0, 0, [table_of([(b"k", b"v" * 1000)])]).name
    return driver, Path(place.url, "staging", place.target.id, QUERY, "0", name)


@pytest.mark.parametrize("at", [0, 700, -60, -30, -1])
def test_k1_a_staged_file_with_a_changed_byte_is_refused_by_name(place: Place, at: int) -> None:
    driver, path = staged_file(place)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(BatchRefused, match=f"the staged file {path} cannot be read"):
        driver.publisher.publish(QUERY, 0, [path.name])
    assert place.arrived() == 0


def test_a_staged_file_of_a_later_format_is_refused(place: Place) -> None:
    driver, path = staged_file(place)
    data = path.read_bytes()
    path.write_bytes(data[:-16] + struct.pack("<I4x", FORMAT + 1) + data[-8:])
    with pytest.raises(BatchRefused, match=rf"format {FORMAT + 1}, but this version of pxrs reads format {FORMAT}"):
        driver.publisher.publish(QUERY, 0, [path.name])


class TornLog:
    """A log of which a power loss has left the first `kept` pieces of each partition's append."""

    def __init__(self, inner: Any, kept: int) -> None:
        self._inner, self._kept = inner, kept
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def append(self, appends: Sequence[Append]) -> list[Outcome]:
        self.calls += 1
        if self.calls == 1:
            for number in {append.partition for append in appends}:
                self._inner.append([append for append in appends if append.partition == number][: self._kept])
        return list(self._inner.append(appends))


@pytest.mark.parametrize("kept", [1, BATCHES_KEPT, BATCHES_KEPT + 1, 11, 12])
def test_k1_a_part_of_an_append_may_be_stored_that_has_more_pieces_than_a_partition_remembers(
    place: Place, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pxrs.publishing.staging.appends._TOGETHER_MAX", 64)
    driver = Driver(place)
    tables = [table_of([(b"k%d" % number, b"%d" % number)]) for number in range(12)]
    pieces: list[Piece] = []
    for task in range(12):
        table = tables[task].append_column("partition", pa.array([task % 2], pa.int32()))
        both = pa.Table.from_batches([table, table.set_column(2, "partition", pa.array([1 - task % 2], pa.int32()))])
        name = driver.staging.stage(driver.topic, QUERY, 0, task, both.to_batches()).name
        pieces += driver.staging.pieces(driver.topic, QUERY, 0, [name])
    log = TornLog(place.hub.topic("out").log, kept)
    append_pieces(log, QUERY, 0, pieces, [0, 0])  # type: ignore[arg-type]
    append_pieces(log, QUERY, 0, pieces, [0, 0])  # type: ignore[arg-type]
    for number in (0, 1):
        found = [int(message.value or b"") for message in place.target.messages(number)]
        assert found == list(range(12))


def test_k1_an_append_that_is_refused_for_another_reason_is_raised_and_not_repeated(place: Place) -> None:
    class Refusing:
        def __init__(self) -> None:
            self.id, self.calls = "t", 0

        def append(self, appends: Sequence[Append]) -> list[Outcome]:
            self.calls += 1
            if self.calls == 1:
                return [StoredAt(0, False), NotStored(UnknownProducer("forgotten"))]
            raise AssertionError("it was repeated")

    driver, path = staged_file(place)
    (piece,) = driver.staging.pieces(driver.topic, QUERY, 0, [path.name])
    with pytest.raises(UnknownProducer, match="forgotten"):
        append_pieces(Refusing(), QUERY, 0, [piece, Piece(1, piece.payload)], [])  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", [".frames", ".arrow"])
def test_k1_a_staged_file_that_cannot_be_opened_now_is_not_taken_for_a_damaged_one(
    place: Place, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """The batch is committed. BatchRefused would tell the user to give it up."""
    driver, path = staged_file(place)
    renamed = path.rename(path.with_suffix(suffix))

    def refuse(path: str) -> None:
        raise OSError(errno.EMFILE, "Failed to open local file", path)

    with monkeypatch.context() as patched:
        patched.setattr(pa, "memory_map", refuse)
        with pytest.raises(OSError, match="Failed to open") as caught:
            driver.publisher.publish(QUERY, 0, [renamed.name])
    assert caught.value.errno == errno.EMFILE
    manifest = place.manifest()
    assert manifest is not None
    assert not manifest.is_published
    if suffix == ".frames":
        driver.publisher.publish(QUERY, 0, [])
        assert place.arrived() == 1
