"""V2, V4: metrics and health of real processes over HTTP, and the exit codes that a supervisor sees."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.metrics.endpoint import Endpoint
from pxrs.testing.forked import run_text
from pxrs.testing.waiting import PATIENCE_S, eventually
from tests.acceptance.running import Running, starting

pytestmark = pytest.mark.sampled(2, of="module")

SERIES = re.compile(r"^(\w+)(?:\{(.*)\})? ([-+.\deINFNa]+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


class Command(Running):
    """A command with an endpoint for metrics."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        super().__init__(folder, *arguments)
        found = eventually(lambda: re.search(r"health at (http://[\d.:]+)", self.told()), what=self.told)
        self.url = found[1]

    def ask(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def probe(self, path: str) -> tuple[int, Any]:
        status, body = self.ask(path)
        return status, json.loads(body)

    def value(self, name: str, **labels: str) -> float:
        """The sum of the series with these labels."""
        status, body = self.ask("/metrics")
        assert status == 200, body
        found = [
            float(value)
            for each, given, value in SERIES.findall(body)
            if each == name and labels.items() <= dict(LABEL.findall(given)).items()
        ]
        return sum(found)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Command]]:
    yield from starting(Command, tmp_path, monkeypatch)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[pxrs.Hub]:
    (tmp_path / "shop.py").write_text("def handle(message):\n    pass\n")
    with pxrs.open(tmp_path / "data", upkeep=False) as hub:
        hub.create_topic("orders", partitions=4)
        yield hub


def send(hub: pxrs.Hub, count: int) -> None:
    with hub.producer("orders") as out:
        for number in range(count):
            out.send(b"x", partition=number % 4)


def test_v4_a_worker_answers_for_all_its_processes(hub: pxrs.Hub, start: Callable[..., Command]) -> None:
    given = ("--topic", "orders", "--group", "g", "--processes", "2", "--lease-ttl", "2", "--metrics-listen", "0")
    worker = start("worker", "shop:handle", "--at", "data", *given)
    assert worker.probe("/healthz") == (200, {"ok": True})
    eventually(lambda: worker.probe("/readyz")[0] == 200, what=worker.told)
    assert worker.probe("/readyz")[1] == {"ok": True, "workers": {"1": "ready", "2": "ready"}}
    eventually(lambda: worker.value("pxrs_consumer_partitions", group="g", topic="orders") == 4, what=worker.told)
    send(hub, 100)
    eventually(lambda: worker.value("pxrs_consumer_messages_total", group="g", topic="orders") == 100, what=worker.told)
    assert worker.value("pxrs_worker_processes", state="ready") == 2
    each = [worker.value("pxrs_consumer_messages_total", worker=number) for number in "12"]
    assert sum(each) == 100
    # A worker that dies is not ready, is started again, and is counted.
    pid = int(re.findall(r"worker 2 \(pid (\d+)\) started", worker.told())[0])
    subprocess.run(["kill", "-9", str(pid)], check=True)
    eventually(lambda: worker.value("pxrs_worker_restarts_total", worker="2") == 1, what=worker.told)
    eventually(lambda: worker.probe("/readyz")[0] == 200, what=worker.told)
    assert worker.probe("/healthz")[0] == 200
    assert worker.end() == 0


def test_v4_a_server_and_its_clients_are_counted(hub: pxrs.Hub, start: Callable[..., Command], tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    server = start("serve", "data", "--listen", "127.0.0.1:0", "--metrics-listen", "0")
    (at,) = eventually(lambda: re.findall(r"at (pxrs://[\d.:]+)", server.told()), what=server.told)
    eventually(lambda: server.probe("/readyz") == (200, {"ok": True}), what=server.told)
    assert server.probe("/healthz") == (200, {"ok": True})
    with pxrs.open(at) as client:
        send(client, 1000)
        with client.consumer("orders", "g", until="end") as inbox:
            assert len(list(inbox)) == 1000
        assert server.value("pxrs_server_streams") >= 1
    assert server.value("pxrs_server_received_bytes_total") > 1000
    assert server.value("pxrs_server_sent_bytes_total") > 1000
    assert server.value("pxrs_server_calls_total", outcome="ok") > 5
    assert server.value("pxrs_server_call_seconds_count") == server.value("pxrs_server_calls_total")
    assert server.value("pxrs_server_refused_total") == 0
    eventually(lambda: server.value("pxrs_server_streams_ended_total") >= 1)
    assert server.end() == 0


def test_v2_metrics_of_a_hub_need_no_member(hub: pxrs.Hub, start: Callable[..., Command]) -> None:
    send(hub, 8)
    with hub.consumer("orders", "g") as inbox:
        inbox.poll(1)
        inbox.commit()
    metrics = start("metrics", "--at", "data", "--listen", "0", "--keep-s", "0")
    assert metrics.probe("/readyz") == (200, {"ok": True})
    assert metrics.value("pxrs_group_lag", group="g", topic="orders") == 7
    assert metrics.value("pxrs_topic_messages", topic="orders") == 8
    assert metrics.value("pxrs_group_members", group="g") == 0
    assert metrics.value("pxrs_hub_up") == 1
    send(hub, 4)
    eventually(lambda: metrics.value("pxrs_group_lag", group="g", topic="orders") == 11, what=metrics.told)
    assert metrics.end() == 0


def test_v4_upkeep_is_ready_when_it_is_the_janitor(hub: pxrs.Hub, start: Callable[..., Command]) -> None:
    hub.join_registry()
    upkeep = start("upkeep", "--at", "data", "--metrics-listen", "0")
    eventually(lambda: upkeep.probe("/readyz")[0] == 200, what=upkeep.told)
    assert upkeep.probe("/readyz")[1]["role"] == "elected"
    assert upkeep.probe("/healthz")[0] == 200
    eventually(lambda: upkeep.value("pxrs_upkeep_rounds_total") >= 1, what=upkeep.told)
    assert upkeep.end() == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("serve", "data", "--listen", "0.0.0.0:0"), 2, "is reachable from other hosts"),
        (("serve", "data", "--listen", "127.0.0.1:0", "--metrics-listen", "{taken}"), 1, "(CannotListen)"),
        (("upkeep", "--at", "data", "--metrics-listen", "{taken}"), 1, "(CannotListen)"),
        (("upkeep", "--at", "data", "--metrics-listen", "nowhere"), 2, "--metrics-listen is 'nowhere'"),
        (("metrics", "--at", "data", "--listen", "{taken}"), 1, "(CannotListen)"),
        (("upkeep", "--at", "data", "--once", "--metrics-listen", "0"), 2, "cannot be used with --once"),
        (("pipeline", "run", "none.py", "--at", "data", "--history", "--metrics-listen", "0"), 2, "cannot be used"),
        (("worker", "shop:handle", "--at", "data", "--topic", "x", "--group", "g", "--no-wait"), 3, "no topic 'x'"),
        (("pipeline", "run", "none.py", "--at", "data"), 2, "none.py"),
        (("pipeline", "run", "none.py", "--at", "nowhere"), 2, "there is no directory nowhere"),
    ],
)
def test_v4_exit_codes_tell_a_supervisor_whether_to_start_it_again(
    hub: pxrs.Hub, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    pytest.importorskip("grpc")
    with Endpoint("0", lambda accept: (b"", "")) as taken:
        given = [each.replace("{taken}", taken.address) for each in arguments]
        done = run_text("pxrs.cli", given, cwd=tmp_path, timeout=PATIENCE_S)
    assert (done.returncode, words in " ".join(done.stderr.split())) == (code, True), done.stderr


def test_v2_without_prometheus_client_the_error_names_the_extra(hub: pxrs.Hub, tmp_path: Path) -> None:
    program = "import sys; sys.modules['prometheus_client'] = None; from pxrs.cli.app import main; main()"
    command = [sys.executable, "-c", program, "upkeep", "--at", "data"]
    command += ["--metrics-listen", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    told = " ".join(done.stderr.split())
    assert (done.returncode, "needs prometheus_client: pip install '.[metrics]'" in told) == (3, True), done.stderr
