"""`pxrs demo` as people run it, and its account, which must not let a lie pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pxrs import registry
from pxrs.cli.demo import Account, account


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pxrs.cli", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_x19_the_demo_tells_its_story_and_its_account_is_exact() -> None:
    result = demo()
    assert result.returncode == 0, result.stdout + result.stderr
    story = [
        "100 messages sent",
        "anna was killed; the others own her partitions after",
        "all 100 messages are done",
        "50 more messages sent",
        "ben was stopped with a message in hand",
        "refused (PartitionLost: ",
        "all 150 messages are done",
        "account: 150 of 150 messages accounted for: lost 0, order violations 0, duplicates beyond the last "
        "checkpoint 0",
    ]
    places = [result.stdout.find(line) for line in story]
    assert -1 not in places, result.stdout
    assert places == sorted(places), result.stdout
    assert "\x1b" not in result.stdout, "no colours where nobody looks"
    assert result.stderr == ""


def test_the_demo_leaves_nothing_in_somebodys_registry_and_stops_nobody_on_sqlite(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/registry.db"
    result = demo("--registry", url)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no zombie here" in result.stdout
    assert "150 of 150 messages accounted for: lost 0" in result.stdout
    with registry.open(url) as handle:
        assert handle.scan("") == []


def test_the_demo_refuses_a_registry_that_processes_cannot_share() -> None:
    result = demo("--registry", "memory:")
    assert result.returncode == 2
    assert "one process's own" in result.stderr


SENT = [(0, offset) for offset in range(4)]
ANNA = ["began 0 1 0", "handled 0 1 0", "committed 0 1 1", "began 0 1 1", "handled 0 1 1"]
"""She is killed before the second message is written down."""


@pytest.mark.parametrize(
    ("ben", "expected"),
    [
        (["handled 0 2 1", "committed 0 2 2", "handled 0 2 2", "handled 0 2 3"], Account(4, 0, 0, 0, 1)),
        (["handled 0 2 2", "handled 0 2 3"], Account(4, 0, 0, 0, 0)),
        (["handled 0 2 1", "handled 0 2 2", "refused it is gone"], Account(4, 1, 0, 0, 1)),
        (["handled 0 2 3"], Account(4, 1, 1, 0, 0)),
        (["handled 0 2 1", "handled 0 2 3", "handled 0 2 2"], Account(4, 0, 2, 0, 1)),
        (["handled 0 2 0", "handled 0 2 1", "handled 0 2 2", "handled 0 2 3"], Account(4, 0, 0, 1, 1)),
        (["handled 0 2 2", "handled 0 2 3", "handled 0 2 4"], Account(4, 0, 1, 0, 0)),
    ],
    ids=[
        "redone what was in hand",
        "nothing redone",
        "one lost at the end",
        "one passed over",
        "two turned round",
        "one redone from before the checkpoint",
        "one that nobody has sent",
    ],
)
def test_x19_the_account_catches_a_lie(ben: list[str], expected: Account) -> None:
    for told in ([*ANNA, *ben], [*ben, *ANNA]):  # the epochs say who came first, not the order of the reports
        found = account(SENT, told)
        assert found == expected
        assert found.is_exact == (expected.lost == expected.order_violations == expected.duplicates == 0)


def test_x19_a_worker_that_was_never_heard_of_is_all_lost() -> None:
    assert account(SENT, []).lost == 4
    assert "0 of 4 messages accounted for: lost 4" in str(account(SENT, []))
