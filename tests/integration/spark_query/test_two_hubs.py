"""Two hubs that share a registry, and writers of one name in both."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import pxrs
from pxrs.hub import Hub
from pxrs.publishing.manifest import Publisher
from pxrs.publishing.records import Part
from pxrs.publishing.staging.directory import DirectoryStaging
from pxrs.publishing.staging.files import routed_writer
from pxrs.spark.options import write_options
from pxrs.spark.publishers import Publishers

NAME = "app-fan-out"


def write(hub: Hub, registry: str, batch: int, value: bytes) -> None:
    """Rows that name their topics, written as Spark's sink does it."""
    topic = hub.topic("out").topic
    rows = pa.record_batch({"value": [value]})
    staged = DirectoryStaging(hub.url).stage(topic, routed_writer(NAME), batch, 0, [rows])
    options = write_options({"url": hub.url, "registry": registry})
    publishers = Publishers()
    try:
        publishers.publish(options, None, NAME, batch, [Part(topic.id, "out", [staged.name or ""], [])])
    finally:
        publishers.close()


def values(hub: Hub) -> list[bytes]:
    return [message.value or b"" for message in hub.topic("out").messages(0)]


def test_k2_a_name_counts_in_each_hub_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifests of both hubs are in one registry. That of one hub is neither taken for the other's nor finished by
    it: its topics are not there, and would count as deleted."""
    registry = str(tmp_path / "registry")
    with (
        pxrs.open(tmp_path / "one", registry=registry, upkeep=False) as one,
        pxrs.open(tmp_path / "other", registry=registry, upkeep=False) as other,
    ):
        for hub in (one, other):
            hub.create_topic("out", partitions=1)
        write(one, registry, 5, b"one")
        write(other, registry, 5, b"other")
        assert [values(one), values(other)] == [[b"one"], [b"other"]]

        def crash(*arguments: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(Publisher, "_append", crash)  # it has committed the manifest
            with pytest.raises(KeyboardInterrupt):
                write(one, registry, 6, b"more of one")
        write(other, registry, 6, b"more of other")
        write(one, registry, 6, b"repeated")
        assert [values(one), values(other)] == [[b"one", b"more of one"], [b"other", b"more of other"]]
