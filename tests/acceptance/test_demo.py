"""`pxrs demo` as people run it: with Spark and all, alone, on another registry, without what it could have."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from pxrs import registry

PATIENCE_S = 480
"""More than the demo gives itself, also with `PATIENT`."""
PATIENT = "from pxrs.cli.demo import story; story.STORY_S, story.SPARK_START_S = 420, 300"
"""Spark may take minutes to start while other tests have the processors."""
ALONE = ("--no-spark", "--messages", "150")


def demo(folder: Path, *arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """before: Python that spoils something first. Nobody watches: it looks and draws less often than for people."""
    code = f"import sys; {before}\nfrom pxrs.cli.demo import story; story.LOOK_S = 0.1"
    code += "\nfrom pxrs.cli.app import main; main()"
    command = [sys.executable, "-c", code, "demo", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)


def without(module: str) -> str:
    return f"sys.modules[{module!r}] = None"


def table(text: str) -> dict[str, tuple[str, str]]:
    """The account: what was expected and what was found."""
    rows = re.findall(r"^│ (.+?) +│ +(\S+) │ +(.+?) │$", text, re.MULTILINE)
    return {what: (expected, found) for what, expected, found in rows}


def in_order(story: list[str], text: str) -> None:
    places = [text.find(line) for line in story]
    assert -1 not in places, text
    assert places == sorted(places), text


def test_x19_s4_the_whole_story_with_spark_is_exact_and_leaves_a_picture(tmp_path: Path) -> None:
    result = demo(tmp_path, "--messages", "200", "--chart", "run.png", before=PATIENT)
    assert result.returncode == 0, result.stdout + result.stderr
    in_order(
        [
            "3 workers and Spark, 8 partitions",
            "133 messages are being sent, 60 in a second; 8 of them are bad orders",
            "anna was killed; the others own her partitions after",
            "Spark runs too, and has read ",
            "66 more messages are being sent",
            "ben was stopped with a message in hand",
            "tried to commit: refused (group demo",
            "Spark has read them too",
            "the account is exact",
            "a chart of the run: run.png",
        ],
        result.stdout,
    )
    found = table(result.stdout)
    assert all(expected == there for expected, there in found.values()), result.stdout
    sent = int(found["messages handled"][0].replace(",", ""))
    assert sent >= 200, "and some more while Spark starts"
    for what in ("lost", "order violations", "duplicates beyond the last checkpoint", "workers: lag"):
        assert found[what] == ("0", "0")
    assert found["late commit of the zombie"] == ("refused", "refused")
    assert int(found["Spark: dead letters, with place and reason"][1]) >= sent // 16 - 1
    assert found["Spark: lag, read outside Spark"] == ("0", "0")
    totals, archived = (int(found[f"Spark: right totals in {where}"][1]) for where in ("the topic", "Parquet"))
    assert totals == archived + 1, "the window of the last order is still open"
    assert found["processes that ended in good order"] == ("3", "3")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "\x1b" not in result.stdout, "no colours where nobody looks"
    assert result.stderr == ""


def test_x19_the_demo_without_spark_and_matplotlib_tells_its_story(tmp_path: Path) -> None:
    result = demo(tmp_path, *ALONE, before=without("matplotlib"))
    assert result.returncode == 0, result.stdout + result.stderr
    in_order(
        [
            "100 messages are being sent",
            "anna was killed; the others own her partitions after",
            "all 100 messages are done",
            "49 more messages are being sent",
            "ben was stopped with a message in hand",
            "tried to commit: refused (group demo",
            "all 150 messages are done",
            "no chart: the chart needs matplotlib: pip install 'pxrs[demo]'",
        ],
        result.stdout,
    )
    found = table(result.stdout)
    assert found["messages handled"] == ("150", "150")
    assert not any(what.startswith("Spark") for what in found)
    assert list(tmp_path.iterdir()) == []


def test_the_demo_leaves_nothing_in_somebodys_registry_and_stops_nobody_on_sqlite(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/registry.db"
    result = demo(tmp_path, "--registry", url, "--messages", "150", before=without("pyspark"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "without Spark: pyspark is missing: pip install 'pxrs[spark]'" in result.stdout
    assert "no zombie here" in result.stdout
    assert table(result.stdout)["messages handled"] == ("150", "150")
    assert (tmp_path / "pxrs-demo.png").exists()
    with registry.open(url) as handle:
        left = [entry.key for entry in handle.scan("")]
    assert left == ["spark/registry"], "the registry's own id, which other hubs may have recorded by now"


def test_the_demo_refuses_a_registry_that_processes_cannot_share(tmp_path: Path) -> None:
    result = demo(tmp_path, "--registry", "memory:")
    assert result.returncode == 2
    assert "exists in one process only" in result.stderr


def test_x19_an_account_that_is_not_exact_is_shown_and_is_an_error(tmp_path: Path) -> None:
    forget_one = """
from pxrs.cli.demo import story
exact = story.account
def account(sent, told):
    missed = max(line for line in told if line.startswith("handled"))
    return exact(sent, [line for line in told if line != missed])
story.account = account
"""
    result = demo(tmp_path, *ALONE, before=forget_one)
    assert result.returncode == 1
    assert table(result.stdout)["lost"] == ("0", "1"), result.stdout
    assert "the account is not exact" in result.stdout


def test_a_demo_that_takes_too_long_says_what_it_waited_for(tmp_path: Path) -> None:
    result = demo(tmp_path, *ALONE, before="from pxrs.cli.demo import story; story.STORY_S = 0.01")
    assert result.returncode == 1
    assert "the workers did not share the partitions in time. Is the machine very busy?" in result.stdout
    assert "account" not in result.stdout
