"""`pxrs demo` as people run it: with Spark and all; on another registry, without what it could have; cut short."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pxrs import registry
from pxrs.cli.app import main
from pxrs.cli.demo import show, story
from pxrs.cli.demo.account import Line
from pxrs.cli.demo.samples import Sample
from tests import sessions

PATIENCE_S = story.RUN_S_MAX + 60
"""More than the demo gives itself."""


def demo(folder: Path, *arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """before: Python that changes something first. Nobody watches: it looks and draws less often than for people."""
    code = f"import sys; {before}\nfrom pxrs.cli.demo import story; story.LOOK_S = story.DRAW_S = 0.2"
    code += "\nfrom pxrs.cli.app import main; main()"
    command = [sys.executable, "-c", code, "demo", *arguments]
    return sessions.run(command, PATIENCE_S, cwd=folder)


def table(text: str) -> dict[str, tuple[str, str]]:
    """The account: what was expected and what was found."""
    rows = re.findall(r"^│ (.+?) +│ +(\S+) │ +(.+?) │$", text, re.MULTILINE)
    return {what: (expected, found) for what, expected, found in rows}


def in_order(story: list[str], text: str) -> None:
    at = 0
    for line in story:
        at = text.find(line, at)
        assert at >= 0, f"{line!r} is not where it should be in\n{text}"


def test_x19_s4_the_whole_story_with_spark_is_exact_and_leaves_a_picture(tmp_path: Path) -> None:
    result = demo(tmp_path, "--messages", "200", "--chart", "run.png")
    assert result.returncode == 0, result.stdout + result.stderr
    in_order(
        [
            "3 workers and Spark, 8 partitions",
            "133 messages are being sent, 60 in a second; 8 of them are bad orders",
            "anna was killed; the others own her partitions after",
            "waiting for Spark to start and read the first messages: ",
            " s of CPU time used",
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
    assert sent <= 200 + story.SLOW_MAX + 10 * story.MORE, "however long that takes"
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


LATE_KILL = """
sys.modules["pyspark"] = sys.modules["matplotlib"] = None
from pxrs.cli.demo import story
at_once = story.Demo._kill
def kill(self):
    self._until(lambda: self._sender.is_done and self._is_done(), "handle all")
    at_once(self)
story.Demo._kill = kill
"""
"""There is neither Spark nor matplotlib, and anna is killed when all messages are handled."""


def test_x19_a_step_that_comes_when_all_is_done_sends_more_and_nothing_is_left_in_somebodys_registry(
    tmp_path: Path,
) -> None:
    """On a busy machine the workers may have handled everything before one of them is to be killed at work. There is
    no zombie on SQLite."""
    url = f"sqlite:///{tmp_path}/registry.db"
    result = demo(tmp_path, "--registry", url, "--messages", "150", before=LATE_KILL)
    assert result.returncode == 0, result.stdout + result.stderr
    in_order(
        [
            "without Spark: pyspark is missing: pip install '.[spark]'",
            "100 messages are being sent",
            "anna was killed; the others own her partitions after",
            " messages are done",
            "49 more messages are being sent",
            "no zombie here",
            "the account is exact",
            "no chart: the chart needs matplotlib: pip install '.[demo]'",
        ],
        result.stdout,
    )
    found = table(result.stdout)
    assert int(found["messages handled"][1]) >= 150 + story.MORE
    assert not any(what.startswith("Spark") for what in found)
    with registry.open(url) as handle:
        left = [entry.key for entry in handle.scan("")]
    assert left == ["spark/registry"], "the registry's own id, which other hubs may have recorded by now"
    assert {path.stem for path in tmp_path.iterdir()} == {"registry"}


def test_the_demo_refuses_a_registry_that_processes_cannot_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["pxrs", "demo", "--registry", "memory:"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "exists in one process only" in capsys.readouterr().err


def test_x19_an_account_that_is_not_exact_is_shown_and_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tests/unit/test_demo.py` has what the account finds."""

    class Ended:
        """In place of a run."""

        samples = (Sample(0.0, 0, 0, None, ("anna",)), Sample(1.0, 9, 9, None, ("anna",)))
        marks = spans = ()

        def __init__(self, *_: object) -> None:
            pass

        def run(self) -> story.Ending:
            return story.Ending([Line("lost", "0", "1")], 0, 9, {}, True)

    monkeypatch.setattr(show, "Demo", Ended)
    assert show.show(None, False, 150, tmp_path / "nowhere" / "run.png") == 1
    out = capsys.readouterr().out
    assert table(out)["lost"] == ("0", "1"), out
    assert "the account is not exact" in out


def kill_anna(demo: story.Demo, _: int) -> None:
    os.kill(demo._workers[0].process.pid, signal.SIGKILL)


LAST_WORDS = "import sys; sys.exit('\\n'.join(f'line {n}' for n in range(9)))"


@pytest.mark.parametrize(
    ("patches", "says"),
    [
        (
            {"story.RUN_S_MAX": story.END_S_MAX},
            "the workers did not share the partitions in 0 s: the time of the demo, 0.5 minutes, is over. Is",
        ),
        ({"story.STALLED_S_MAX": -1.0}, " s: nothing has changed for -1 s. Is the machine very busy?"),
        ({"story.Demo._send": kill_anna}, "anna was killed by signal 9: it said nothing"),
        (
            {"spark._CODE": LAST_WORDS, "story.SPARK_STARTS_MAX": 1},
            "Spark ended with exit code 1; it said last:\n    line 4\n    line 5\n    line 6\n    line 7\n    line 8",
        ),
    ],
    ids=["its time is over", "nothing changes", "a worker is killed", "Spark ends"],
)
def test_a_demo_that_cannot_go_on_says_so_at_once_and_why(
    patches: dict[str, Any],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for place, value in ({"story.WORKERS": ("anna",)} | patches).items():
        monkeypatch.setattr(f"pxrs.cli.demo.{place}", value)
    assert show.show(None, "spark._CODE" in patches, 150, tmp_path / "run.png") == 1
    out = capsys.readouterr().out
    assert says in out, out
    assert "account" not in out
