"""docs/operations.md: its commands run, in the order of the page, and change what the page says."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

import pxrs
from pxrs.testing import forked

PAGE = Path(__file__).parents[2] / "docs/operations.md"
BLOCK = re.compile(r"^```(?:sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_every_command_of_the_page_runs_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "disk"
    elsewhere.mkdir()
    ran = set()
    with pxrs.open(tmp_path / "data") as hub:
        hub.create_topic("orders", partitions=8)
        with hub.producer("orders") as out:
            for number in range(20):
                out.send(b"%d" % number, key=b"%d" % number, timestamp=0)
    for line in "".join(BLOCK.findall(PAGE.read_text())).splitlines():
        line = line.removeprefix("$ ").replace("/new/disk", str(elsewhere))
        if line.startswith("export "):
            monkeypatch.setenv(*line.removeprefix("export ").split("=", 1))
            continue
        if line.startswith("mv "):
            shutil.copytree(
                tmp_path / "data", elsewhere / "data", symlinks=True
            )  # the page goes on with the former one
            continue
        command = shlex.split(line, comments=True)
        assert command.pop(0) == "pxrs", line
        done = forked.run_text("pxrs.cli", command, cwd=tmp_path)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        ran.add(" ".join(command[:2]))
    assert {"topic alter", "topic copy", "queue alter", "registry adopt"} <= ran
    with pxrs.open(tmp_path / "data") as hub, pxrs.open(tmp_path / "archive-data") as archive:
        topic = hub.topic("orders").topic
        assert (topic.segment_bytes, topic.codec, topic.retention_s, topic.keep_unread) == (
            16 << 20,
            "zstd",
            None,
            False,
        )
        assert hub.topic("orders-wide").to_arrow().num_rows == archive.topic("archive").to_arrow().num_rows == 20
        assert hub.queue("mail").policy == pxrs.ConsumeTimes(5)
        assert hub.queue("mail").backoff is None
        assert [event.name for event in hub.audit()].count("audit.alter_topic") == 3
