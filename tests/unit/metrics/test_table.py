"""V2: the table of metrics is that of the documentation, and dashboards and alert rules name nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from pxrs.cli import app
from pxrs.metrics.instruments import INSTRUMENTS
from pxrs.metrics.table import TABLE

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| `(pxrs_\w+)` \| `([\w.]+)` \| (\w+) \| `([^`]+)` \| ([^|]*) \| (.*) \|$", re.MULTILINE)
NAME = re.compile(r"\bpxrs_\w+\b")
ALERTS = ROOT / "deploy/prometheus-alerts.yml"
DASHBOARD = ROOT / "deploy/grafana-dashboard.json"


def series() -> dict[str, tuple[str, ...]]:
    """Every name that a query can use, and its labels."""
    found = {}
    for metric in TABLE.values():
        if metric.kind == "histogram":
            found |= {f"{metric.prometheus}_{part}": metric.labels for part in ("bucket", "count", "sum")}
        else:
            found[metric.prometheus] = metric.labels
    return found


def test_v2_the_documentation_has_every_metric_as_the_code_has_it() -> None:
    documented = [
        (name, otel, kind, unit, tuple(re.findall(r"`(\w+)`", labels)), text)
        for name, otel, kind, unit, labels, text in ROW.findall((ROOT / "docs/metrics.md").read_text())
    ]
    there = [(each.prometheus, each.name, each.kind, each.unit, each.labels, each.text) for each in TABLE.values()]
    assert sorted(documented) == sorted(there)


def test_v2_names_follow_the_conventions_of_prometheus_and_opentelemetry() -> None:
    for metric in TABLE.values():
        assert re.fullmatch(r"pxrs(\.[a-z]+(_[a-z]+)*)+", metric.name)
        assert re.fullmatch(r"s|By|\{[a-z]+\}", metric.unit)
        assert metric.kind != "histogram" or metric.unit == "s"
        assert metric.prometheus.endswith("_total") == (metric.kind == "counter")
        base = metric.prometheus.removesuffix("_total")
        assert base.endswith("_seconds") == (metric.unit == "s")
        assert base.endswith("_bytes") == (metric.unit == "By")
    assert len({each.prometheus for each in TABLE.values()}) == len(TABLE)


def test_every_instrument_is_of_the_table() -> None:
    assert set(INSTRUMENTS) <= set(TABLE)
    assert all(TABLE[name] is each.metric for name, each in INSTRUMENTS.items())


def expressions() -> list[tuple[str, str]]:
    yaml = pytest.importorskip("yaml")
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    found = [(rule["alert"], rule["expr"]) for rule in rules]
    board: dict[str, Any] = json.loads(DASHBOARD.read_text())
    for panel in board["panels"]:
        found += [(panel["title"], target["expr"]) for target in panel.get("targets", [])]
    queries = [each["query"]["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    return found + [("variable", query) for query in queries]


def test_v2_alerts_and_dashboard_name_only_metrics_and_labels_that_exist() -> None:
    known = series()
    added = {"le", "instance", "job", "worker"}
    for place, expression in expressions():
        names = NAME.findall(expression)
        assert names, (place, expression)
        assert [name for name in names if name not in known] == [], place
        labels = {label for name in names for label in known[name]} | added
        for grouped in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
            assert {label.strip() for label in grouped.split(",")} <= labels, (place, expression)
        matched = re.findall(r"[{,]\s*(\w+)\s*(?:=~|!=|=)", expression)
        assert set(matched) <= labels, (place, expression)


def test_v2_the_dashboard_shows_every_metric() -> None:
    shown = {name for _, expression in expressions() for name in NAME.findall(expression)}
    left_out = {"pxrs.topic.messages", "pxrs.group.lag_max"}
    missing = [
        metric.name
        for metric in TABLE.values()
        if metric.name not in left_out and not {metric.prometheus, f"{metric.prometheus}_bucket"} & shown
    ]
    assert missing == []


UNITS = ("broker", "metrics", "pipeline@", "serve", "storage", "worker@")


def test_units_of_systemd_do_not_start_again_what_cannot_work() -> None:
    units = sorted((ROOT / "deploy/systemd").iterdir())
    assert [unit.name for unit in units] == [f"pxrs-{name}.service" for name in UNITS]
    documented = (ROOT / "docs/health.md").read_text()
    for unit in units:
        text = unit.read_text()
        assert "\nRestart=on-failure\n" in text
        assert "\nRestartPreventExitStatus=2 3\n" in text
        assert f"`{unit.name}`" in documented


@pytest.mark.parametrize("name", UNITS)
def test_units_of_systemd_call_commands_and_variables_that_exist(name: str) -> None:
    text = (ROOT / f"deploy/systemd/pxrs-{name}.service").read_text()
    (line,) = re.findall(r"^ExecStart=/opt/pxrs/bin/pxrs (.*)$", text, re.MULTILINE)
    command: Any = typer.main.get_command(app.app)
    words = line.split()
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert command.name == {"pipeline@": "run"}.get(name, name.rstrip("@"))
    known = {option for each in command.params for option in each.opts}
    assert {word for word in words if word.startswith("--")} <= known
    read = {each.envvar for each in command.params if each.envvar} | {*re.findall(r"\$\{?(PXRS_\w+)", line)}
    assert {*re.findall(r"PXRS_[A-Z_]+", text)} <= read


def test_units_of_systemd_are_valid(tmp_path: Path) -> None:
    """Those of the command alone: the units name the path of an installation that is not here."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    copies = []
    for unit in sorted((ROOT / "deploy/systemd").iterdir()):
        copies.append(tmp_path / unit.name)
        copies[-1].write_text(unit.read_text().replace("/opt/pxrs/bin/pxrs", sys.executable))
    done = subprocess.run([analyze, "verify", "--man=no", *copies], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_container_has_extras_that_exist_and_gets_its_signals() -> None:
    text = (ROOT / "deploy/Containerfile").read_text().replace("\\\n", "")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    given: dict[str, list[str]] = {}
    for name, rest in lines:
        given.setdefault(name, []).append(rest)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (chosen,) = [rest.removeprefix("EXTRAS=").split(",") for rest in given["ARG"] if rest.startswith("EXTRAS=")]
    assert set(chosen) <= extras.keys()
    assert {"metrics", "remote", "web"} <= set(chosen), "its commands serve, web and metrics work"
    for rest in given["COPY"]:
        if not rest.startswith("--from="):
            assert all((ROOT / name).exists() for name in rest.split()[:-1]), rest
    assert json.loads(given["ENTRYPOINT"][0]) == ["pxrs"]  # exec form: no shell between the signals and the command
    assert json.loads(given["CMD"][0]) == ["--help"]
    assert given["STOPSIGNAL"] == ["SIGTERM"]
    assert given["USER"] == ["10001"]
