"""Spark Connect: a query in output mode `update` writes each change once, also if its last batch is repeated."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import pxrs
from tests import sessions

SCRIPT = Path(__file__).with_name("connect_updates.py")
TIMEOUT_S = 300


@pytest.mark.skipif(not os.environ.get("PXRS_SOAK"), reason="it starts two Connect servers: `make soak`")
def test_k1_changed_rows_are_sent_once_over_spark_connect(tmp_path: Path) -> None:
    for module in ("pyspark", "grpc", "grpc_status", "pandas", "zstandard"):
        pytest.importorskip(module)
    folder = tmp_path / "checkpoint"
    with pxrs.open(tmp_path / "hub") as hub:
        for name in ("in", "counts"):
            hub.create_topic(name, partitions=1)
        for batch in range(2):
            with hub.producer("in") as out:
                for number in range(15):
                    out.send(str(number), key=f"key-{number % 5}")
            command = [sys.executable, str(SCRIPT), hub.url, str(folder)]
            assert sessions.run(command, TIMEOUT_S, cwd=tmp_path).returncode == 0
            found = [int(message.value or b"") for message in hub.topic("counts").messages(0)]
            assert found == [3] * 5 + [6] * 5 * batch
            assert hub.group("counter").describe().lag == 0
        for name in ("1", ".1.crc"):  # as if the driver had died before Spark recorded the last batch
            (folder / "commits" / name).unlink()
        assert sessions.run(command, TIMEOUT_S, cwd=tmp_path).returncode == 0
        assert hub.topic("counts").end(0) == 10
