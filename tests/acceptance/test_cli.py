"""The command line as people and scripts use it: real processes, real output."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from pxrs import open as open_hub
from pxrs import registry
from pxrs.testing import forked


def pxrs(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run_text("pxrs.cli", arguments)


def test_scan_and_get_print_for_people_and_for_machines(tmp_path: Path) -> None:
    with registry.open(tmp_path) as handle:
        versions = handle.commit(put={"a/text": "grün".encode(), "a/binary": b"\xff\x00", "b": b""})
    lines = [json.loads(line) for line in pxrs("registry", "scan", str(tmp_path), "a/", "--json").stdout.splitlines()]
    assert lines == [
        {"key": "a/binary", "version": versions["a/binary"], "base64": "/wA="},
        {"key": "a/text", "version": versions["a/text"], "value": "grün"},
    ]
    assert "a/text" in pxrs("registry", "scan", str(tmp_path)).stdout
    assert pxrs("registry", "get", str(tmp_path), "a/text").stdout == "grün"
    missing = pxrs("registry", "get", str(tmp_path), "nothing")
    assert (missing.returncode, missing.stdout, missing.stderr) == (1, "", "no such key: nothing\n")


@pytest.mark.parametrize("dialect", ["oracle", "postgresql", "sqlite"])
def test_ddl_is_printed_for_each_database(dialect: str) -> None:
    result = pxrs("registry", "ddl", "--dialect", dialect)
    assert result.returncode == 0, result.stderr
    assert "CREATE TABLE" in result.stdout
    assert ("GRANT" in result.stdout) == (dialect != "sqlite")


def test_a_topic_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PXRS_AT", str(tmp_path / "data"))
    assert pxrs("topic", "create", "orders", "--partitions", "4").stdout == "made orders with 4 partitions\n"
    lines = "".join(f'{{"id": "a{i % 7}", "n": {i}}}\n' for i in range(500))
    send = ["send", "orders", "--key", "id"]
    sent = forked.run_text("pxrs.cli", send, input=lines.encode())
    assert sent.stdout == "sent 500 messages to orders\n", sent.stderr
    assert json.loads(pxrs("topic", "list", "--json").stdout) == {"topic": "orders", "partitions": 4, "messages": 500}
    described = json.loads(pxrs("topic", "describe", "orders", "--json").stdout)
    assert sum(p["end"] - p["start"] for p in described["partitions"]) == 500
    tail = [json.loads(line) for line in pxrs("tail", "orders", "-n", "500", "--json").stdout.splitlines()]
    assert [json.loads(message["value"])["n"] for message in tail] == list(range(500))
    assert len({(message["key"], message["partition"]) for message in tail}) == 7, "a key has one partition"
    assert "orders" in pxrs("topic", "list").stdout
    bad = forked.run_text("pxrs.cli", send, input=b"not json\n")
    assert bad.returncode == 1
    assert "line 1" in bad.stderr
    assert pxrs("topic", "delete", "orders", "--yes").stdout == "removed orders and its 500 messages\n"
    assert pxrs("tail", "orders").returncode == 1


def test_check_reads_everything_and_reports_all_damage(tmp_path: Path) -> None:
    with open_hub(tmp_path) as hub:
        hub.create_topic("t", partitions=2, segment_bytes=8192)
        with hub.producer("t", linger_s=0.0) as out:
            for i in range(60):
                out.send(b"x" * 500, partition=i % 2)
                out.flush()
    whole = pxrs("check", str(tmp_path))
    assert (whole.returncode, whole.stdout.split(",")[0]) == (0, "60 messages"), whole.stderr
    first, *_, last = sorted((tmp_path / "topics/t/partitions/partition-1").glob("*.log"))
    for path, position in ((first, 300), (first, 2000), (last, 50)):
        data = bytearray(path.read_bytes())
        data[position] ^= 0x20
        path.write_bytes(data)
    first.with_name("x").touch()  # what is not ours is not looked at
    index = next(iter(sorted((tmp_path / "topics/t/partitions/partition-0").glob("*.index"))))
    index.write_bytes(index.read_bytes()[:-3])
    damaged = pxrs("check", str(tmp_path), "--json")
    assert damaged.returncode == 1
    *findings, summary = [json.loads(line) for line in damaged.stdout.splitlines()]
    assert summary["findings"] == len(findings) == 4
    assert sorted(Path(finding["file"]).name for finding in findings) == sorted(
        [first.name, first.name, last.name, index.name]
    )


def test_an_error_is_one_line_that_says_what_to_do_and_no_traceback() -> None:
    for arguments, words in (
        (("registry", "scan", "kafka://host"), "unknown scheme 'kafka'; choose from"),
        (("registry", "scan", "localhost:2379"), "looks like a host"),
        (("registry", "ddl", "--dialect", "mysql"), "oracle"),
        (("registry", "scan", "memory:", "no-slash"), "end in a slash"),
    ):
        result = pxrs(*arguments)
        assert result.returncode != 0
        assert words in " ".join(result.stderr.split()), result.stderr
        assert "Traceback" not in result.stderr


def test_help_and_version() -> None:
    assert "registry" in pxrs("--help").stdout
    assert pxrs("--version").stdout.startswith("pxrs 0.")
    assert pxrs().returncode in (0, 2)
