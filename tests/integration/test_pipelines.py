"""`pxrs pipeline run` with a real Spark: the file that the document shows, to its exact results.

All of it runs in one Java, which `pipeline_probe.py` starts: a Java of its own for each `pxrs` would cost 25 s of CPU
each time. `test_demo.py` has a `pxrs pipeline run` that starts its own.
"""

from __future__ import annotations

import doctest
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest

import pxrs
from pxrs.errors import UnknownGroup
from pxrs.testing.waiting import eventually
from pxrs.web import views
from pxrs.web.observer import Observer
from tests import java_archive, sessions

PATIENCE_S = 240.0
GROUPS = ("totals", "totals.dead-letters", "archive")
DOCUMENT = Path(__file__).parents[2] / "docs" / "pipelines.md"
WALKTHROUGH = DOCUMENT.with_name("walkthrough.md")
MARK = "-- end of a command --"
SPARK = (
    *("--master", "local[2]", "--json", "--conf", "spark.sql.streaming.noDataMicroBatches.enabled=false"),
    *(word for key, value in java_archive.SETTINGS.items() for word in ("--conf", f"{key}={value}")),
)
PROBE = Path(__file__).with_name("pipeline_probe.py")


def order(account: str, amount: str, at: str) -> bytes:
    return f'{{"account":"{account}","amount":{amount},"at":"2026-01-01T{at}:00Z"}}'.encode()


class Java:
    """A folder, and the Java in which Spark works there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = {**os.environ, "TZ": "Asia/Tokyo"}  # of which nothing shows
        self._process: subprocess.Popen[str] | None = None

    def gateway(self) -> dict[str, str]:
        """The environment of a process that uses this Java."""
        if self._process is None:
            with (self.folder / "probe.stderr").open("wb") as errors:
                command = [sys.executable, str(PROBE)]
                self._process = subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=self._environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    start_new_session=True,
                )
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            assert line, self._errors()
            self._port, self._secret = json.loads(line)
        return {
            **self._environment,
            "PYSPARK_GATEWAY_PORT": str(self._port),
            "PYSPARK_GATEWAY_SECRET": self._secret,
        }

    def probe(self) -> tuple[int, str, str]:
        """Exit code, output and errors of the probe, which ends, and this Java with it."""
        self.gateway()
        assert self._process is not None
        process = self._process
        try:
            out, _ = process.communicate("probe\n", PATIENCE_S)
        finally:
            sessions.end(process.pid)
            self._process = None
        return process.returncode, out, self._errors()

    def close(self) -> None:
        """Also when a session is still in use: the next `gateway` starts another Java."""
        if self._process is not None:
            try:
                self._process.communicate(timeout=PATIENCE_S)
            finally:
                sessions.end(self._process.pid)
                self._process = None

    def _errors(self) -> str:
        return (self.folder / "probe.stderr").read_text()


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Java]:
    java = Java(tmp_path_factory.mktemp("pipelines"))
    yield java
    java.close()


class Shop:
    def __init__(self, java: Java) -> None:
        self._java = java
        self.folder = folder = java.folder
        (text,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
        (folder / "shop.py").write_text(text)
        self.hub = pxrs.open(folder / "hub")
        for topic, partitions in (("orders", 2), ("totals", 2), ("orders-bad", 1)):
            self.hub.create_topic(topic, partitions=partitions)
        self.running: list[Running] = []

    def send(self, *values: bytes, key: bytes = b"k") -> None:
        with self.hub.producer("orders") as out:
            for value in values:
                out.send(value, key=key, headers=[("trace", b"7")])

    def run(self, *arguments: str) -> Running:
        self.running.append(Running(self.folder, self._java.gateway(), *arguments))
        return self.running[-1]

    def totals(self) -> list[tuple[str, str, str]]:
        return sorted(
            (message.key.decode(), found["hour"][11:16], str(found["total"]))
            for number in range(2)
            for message in self.hub.topic("totals").messages(number)
            for found in [json.loads(message.value)]
        )

    def archived(self) -> list[tuple[str, str]]:
        table = pyarrow.dataset.dataset(self.folder / "archive", format="parquet", partitioning="hive").to_table()
        assert set(table["day"].to_pylist()) == {"2026-01-01"}
        return sorted(zip(table["account"].to_pylist(), map(str, table["amount"].to_pylist()), strict=True))

    def dead(self) -> list[tuple[bytes | None, dict[str, str]]]:
        return [
            (message.value, {name: data.decode() for name, data in message.headers or []})
            for message in self.hub.topic("orders-bad").messages(0)
        ]

    def lags(self) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        for group in GROUPS:
            try:
                found[group] = self.hub.group(group).describe().lag
            except UnknownGroup:
                found[group] = None
        return found


class Running:
    def __init__(self, folder: Path, environment: dict[str, str], *arguments: str) -> None:
        command = [sys.executable, "-m", "pxrs.cli", "pipeline", "run", "shop.py", "--at", "hub", *SPARK, *arguments]
        self._out, self._error = folder / f"out-{time.monotonic_ns()}", folder / f"error-{time.monotonic_ns()}"
        with self._out.open("wb") as out, self._error.open("wb") as error:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=error)

    def told(self) -> tuple[str, str]:
        return self._out.read_text(), self._error.read_text()

    def end(self) -> list[dict[str, Any]]:
        """Its events, when it has ended well."""
        code = self.process.wait(PATIENCE_S)
        out, error = self.told()
        assert (code, error) == (0, ""), (out, error)
        return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def shop(java: Java) -> Iterator[Shop]:
    shop = Shop(java)
    yield shop
    for each in shop.running:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait(10)
            java.close()  # its session is still there, and Java has room for one
    shop.hub.close()


def check_monitored(running: Running) -> None:
    """V2, V4: metrics of the queries by name, alive, and ready while all of them run."""
    events = [json.loads(line) for line in running.told()[0].splitlines()]
    (told,) = [event["what"] for event in events if event["event"] == "metrics"]
    (address,) = re.findall(r"http://[\d.:]+", told)

    def asked(path: str) -> str:
        with urllib.request.urlopen(address + path, timeout=PATIENCE_S) as answer:
            return str(answer.read(), "utf-8")

    assert json.loads(asked("/readyz")) == {"ok": True, "queries": dict.fromkeys(GROUPS, "running")}
    assert json.loads(asked("/healthz")) == {"ok": True}
    rows = 'pxrs_spark_rows_total{query="archive"} 3.0'
    eventually(lambda: rows in asked("/metrics"), what=lambda: asked("/metrics"))


def check_page(page: Observer, *, dead: int, members: int) -> dict[str, dict[str, Any]]:
    """The page of queries shows those that write to topics: by name, what it has of each."""

    def look() -> list[dict[str, Any]] | None:
        page.forget()
        found: list[dict[str, Any]] = page.see(lambda: views.queries(page))["queries"]
        # The rows of a batch are published soon after it is committed, and a query that ends leaves soon after that.
        are_there = all(row["state"] != "committed" and row["members"] == members for row in found)
        return found if are_there else None

    found = eventually(look, PATIENCE_S, what=lambda: page.see(lambda: views.queries(page))["queries"])
    by_group = {row["groups"][0]: row for row in found}
    assert set(by_group) == {"totals", "totals.dead-letters"}, found
    for group, topic, messages in (("totals", "totals", None), ("totals.dead-letters", "orders-bad", dead)):
        row = by_group[group]
        assert (row["state"], row["lag"], row["members"]) == ("published", 0, members), row
        assert [each["topic"] for each in (*row["reads"], *row["writes"])] == ["orders", topic]
        assert row["is_of_dead_letters"] is (messages is not None)
        assert messages is None or row["writes"][0]["messages"] == messages
        assert abs(row["committed_at"] - time.time()) < PATIENCE_S
    return by_group


@pytest.mark.sampled(3, of="long spark stories")
def test_s4_pipelines_give_exact_results_and_go_on_where_they_were(shop: Shop) -> None:
    shop.send(order("ann", "10.50", "10:05"), order("bob", "1", "10:15"), order("ann", "2.25", "10:55"))
    shop.send(b"\xff\xfe", order("bob", '"many"', "10:15"), order("eve", "-1", "10:20"), key=b"bad")
    events = shop.run("--once").end()
    assert {(event["pipeline"], event["rows"], event["lag"]) for event in events if event["event"] == "ended"} == {
        (name, 6, 0) for name in GROUPS
    }
    assert shop.totals() == [("ann", "10:00", "12.75"), ("bob", "10:00", "1.0")]
    archived = [("ann", "10.50"), ("ann", "2.25"), ("bob", "1.00"), ("eve", "-1.00")]
    assert shop.archived() == archived
    reasons = [(value, headers["pxrs-reason"], headers["trace"]) for value, headers in shop.dead()]
    assert sorted(reasons) == [
        (order("bob", '"many"', "10:15"), "amount is not of type decimal(12,2)", "7"),
        (order("eve", "-1", "10:20"), "amount is not positive", "7"),
        (b"\xff\xfe", "it is not UTF-8", "7"),
    ]
    assert re.fullmatch(r"orders/[01] offset \d+", shop.dead()[0][1]["pxrs-origin"])
    page = Observer(shop.hub)
    before = check_page(page, dead=3, members=0)
    assert [row["batches"][-1]["rows"] for row in before.values()] == [6, 6]

    # As if Spark had died between the publishing of these batches and its own note of it: they come again.
    for name in ("totals", "totals.dead-letters"):
        shutil.rmtree(shop.folder / "hub" / "pipelines" / name / "commits")
    shop.send(order("ann", "0.25", "10:59"), b"{}", order("cid", "7", "11:00"))
    running = shop.run("--metrics-listen", "0")
    eventually(
        lambda: shop.lags() == dict.fromkeys(GROUPS, 0) or running.process.poll() is not None,
        PATIENCE_S,
        what=running.told,
    )
    check_monitored(running)
    for group, row in check_page(page, dead=4, members=1).items():
        assert row["batch"] > before[group]["batch"]
        assert row["batches"][-1]["rows"] == 3
    page.close()
    running.process.send_signal(signal.SIGTERM)
    events = running.end()
    assert "stopping" in {event["event"] for event in events}
    ended = {event["pipeline"]: event for event in events if event["event"] == "ended"}
    assert {name: event["lag"] for name, event in ended.items()} == dict.fromkeys(GROUPS, 0)
    assert ended["archive"]["rows"] == 3
    assert shop.totals() == [
        *[("ann", "10:00", "12.75"), ("ann", "10:00", "13.0")],
        *[("bob", "10:00", "1.0"), ("cid", "11:00", "7.0")],
    ]
    assert shop.archived() == sorted([*archived, ("ann", "0.25"), ("cid", "7.00")])
    assert [headers["pxrs-reason"] for _, headers in shop.dead()][3:] == ["account is missing"]
    assert shop.lags() == dict.fromkeys(GROUPS, 0)
    eventually(
        lambda: not any(shop.hub.group(group).describe().members for group in GROUPS), PATIENCE_S, what=shop.lags
    )


@pytest.mark.sampled(3, of="spark stories")
def test_the_walkthrough_goes_as_it_is_printed(java: Java, tmp_path: Path) -> None:
    text = WALKTHROUGH.read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "shop.py").write_text(code)
    steps: list[tuple[str, str]] = []
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, printed = step.partition("\n")
            if not command.startswith("pip "):
                steps.append((command, printed))
    script = "\n".join(["set -e", *(f"{command}\necho '{MARK}'" for command, _ in steps)])
    environment = java.gateway()
    path = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment |= {"PATH": path, "COLUMNS": "200", "TZ": "UTC"}
    run = sessions.run(["bash", "-c", script], PATIENCE_S, cwd=tmp_path, env=environment)
    assert run.returncode == 0, (run.stdout, run.stderr)
    assert run.stderr == ""
    told = run.stdout.split(f"{MARK}\n")[:-1]
    like = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for (command, printed), found in zip(steps, told, strict=True):
        assert doctest.OutputChecker().check_output(printed, found.lstrip(), like), (command, printed, found)


def test_s4_bad_rows_state_and_failures_are_told_for_what_they_are(java: Java) -> None:
    """The probe prints what it finds, and ends as `pxrs pipeline run` ends when one fails."""
    code, out, errors = java.probe()
    lines = [json.loads(line) for line in out.splitlines()]
    assert len(lines) > 5, errors
    reasons, good, columns, table, operators, refused, lost, history_refused, *told = lines
    with pxrs.open(java.folder / "probed") as hub:
        assert [message.value for message in hub.topic("out").messages(0)] == [b"oops"], "that of copies"
    assert reasons == [
        ["", "it is not one JSON document"],
        ["not json", "it is not one JSON document"],
        ['{"a": "x"', "it is not one JSON document"],
        ['{"a": "x", "n": 1} {}', "it is not one JSON document"],
        ['{"a": "x", "n": 1}] [', "it is not one JSON document"],
        ['{"a": "x", "n": 1}} {', "it is not one JSON document"],
        ["[]", "it is not a JSON object"],
        ["null", "it is not a JSON object"],
        ["{}", "a is missing"],
        ['{"a": null, "n": 1}', "a is missing"],
        ['{"a": "x", "n": 1.5}', "n is not of type int"],
        ['{"a": "x", "n": 99999999999}', "n is not of type int"],
        ['{"a": "x", "o": {"p": "q"}}', "it does not fit the schema"],
        ['{"a": "x", "o": {}}', "o.p is missing"],
        ["{'a': 'x'}", "it is not one JSON document"],
        ['{"a": "x", "d": 1e400}', "d is not of type double"],
        ['{"a": "x", "d": "NaN"}', "d is not of type double"],
        ["latin: \ufffd", "it is not UTF-8"],
        [None, "it has no value"],
    ]
    assert good == [["x", 1, None, 19], ["y", None, 5, 20]]
    assert columns == ["Key", "OFFSET", "partition", "timestamp"], "Spark does not tell key from Key"
    assert [line.split() for line in table] == [
        ["parsed"],
        ["twice", "twice"],
        ["2023-11-14T22:13:20.123456Z", "a\\xff"],
    ]
    assert operators == {
        "an aggregation": ["an aggregation"],
        "distinct": ["dropDuplicates"],
        "dropDuplicates": ["dropDuplicates"],
        "dropDuplicatesWithinWatermark": ["dropDuplicatesWithinWatermark"],
        "limit": ["limit"],
        "a join of two streams": ["a join of two streams"],
        "a join with a table, which may be aggregated": [],
        "a filter": [],
        "a batch": [],
    }
    assert (
        refused == "counts: it keeps state (an aggregation) and cannot share its group: when partitions move to other "
        "members, their state would not move with them. Give it a group of its own"
    )
    assert lost.startswith("archive: a stream has written batches into files, up to 9, that the checkpoint location")
    assert history_refused.startswith("archive: a streaming query writes to files, and Spark reads only files that its")
    history = [event for event in told if "row" in event]
    row = {"value": "b29wcw==", "timestamp": "2023-11-14T22:13:20.123456Z"}
    assert history == [{"pipeline": "fails", "row": row}], "a batch, shown and not written"
    (failed,) = [event for event in told if event.get("event") == "failed"]
    assert failed.pop("time")
    assert failed == {"event": "failed", "pipeline": "fails", "rows": 0, "lag": 1, "error": "ValueError: oops"}
    assert [event["pipeline"] for event in told if event.get("event") == "ended"] == ["copies"]
    assert code == 1
    assert errors.endswith("the pipeline fails has failed: ValueError: oops (PipelineFailed)\n")
    assert "at org.apache.spark" not in errors, "the rest is in the file"
