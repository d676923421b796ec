"""How a `pxrs` command starts: what it imports, how long that takes, and what the shell completes."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import pxrs
from pxrs.cli import app, completion
from pxrs.server.serving import serving
from pxrs.testing.command import Call, Result, run_here

PAIRS = 5
"""How often the two programs that are compared are run, in turn."""
ROUNDS_MAX = 4
RATIO_MAX = 2.5


def loaded(*arguments: str) -> set[str]:
    """The packages that a new process has imported when the command has ended."""
    at_exit = "import atexit, sys; atexit.register(lambda: print('\\n', *sys.modules))"
    program = f"{at_exit}\nfrom pxrs.cli.app import main; main()"
    run = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.splitlines()[-1].split())


HEAVY = {"pyarrow", "numpy", "pandas", "grpc", "sqlalchemy", "pyspark", "prometheus_client"}
"""Packages that take longer to import than the rest of a command's `--help`."""
HELP_OF_EVERY_COMMAND = """
import contextlib, io, json, sys, typer.main
from pxrs.cli.app import app

def walk(command, path):
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        app([*path, "--help"], prog_name="pxrs")
    seen[" ".join(path)] = (printed.getvalue(), sorted(heavy & sys.modules.keys()))
    for name, each in getattr(command, "commands", {}).items():
        walk(each, [*path, name])

heavy, seen = set(sys.argv[1:]), {}
walk(typer.main.get_command(app), [])
json.dump(seen, sys.stdout)
"""


def test_the_help_of_every_command_and_subcommand_is_printed_without_pyarrow() -> None:
    """All in one process: the first command that imports one of the packages is the first that has it here."""
    program = [sys.executable, "-c", HELP_OF_EVERY_COMMAND, *HEAVY]
    run = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    seen: dict[str, tuple[str, list[str]]] = json.loads(run.stdout)
    assert {*app.COMMANDS, "topic alter", "pipeline run", "upkeep status", "queue dead list"} <= seen.keys()
    for path, (printed, heavy) in seen.items():
        assert printed.startswith(f"Usage: pxrs {path}".rstrip()), path
        assert heavy == [], f"pxrs {path} --help"


def test_the_list_of_commands_is_printed_without_importing_any() -> None:
    modules = {lazy.module for lazy in app.COMMANDS.values()}
    assert loaded("--help") & modules == set()


def test_every_command_has_its_line_in_the_help(call: Call) -> None:
    root = typer.main.get_command(app.app)
    printed = " ".join(call("--help").out.split())
    for name, lazy in app.COMMANDS.items():
        assert lazy.help.endswith("."), name
        assert root.commands[name].name == name  # type: ignore[attr-defined]
        assert f" {name} {lazy.help} " in f"{printed} ", name


def test_topic_list_costs_little_more_than_importing_what_it_needs(tmp_path: Path) -> None:
    """Compared by CPU time, with both programs run in turn. Modules are compiled before, as an installed package is. A
    machine that is busy with something else may spoil a round, and not all of them."""
    with pxrs.open(tmp_path / "hub") as hub:
        hub.create_topic("orders")
        hub.create_queue("mail")  # so that there is a registry, which the command looks into
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPYCACHEPREFIX": str(tmp_path / "compiled"), "PXRS_AT": str(tmp_path / "hub")}
    listing, importing = ["-m", "pxrs.cli", "topic", "list"], ["-c", "import typer, pyarrow"]
    for arguments in (listing, importing):
        cpu_s(arguments, environment)
    rounds: list[float] = []
    while len(rounds) < ROUNDS_MAX and (not rounds or rounds[-1] > RATIO_MAX):
        pairs = [(cpu_s(listing, environment), cpu_s(importing, environment)) for _ in range(PAIRS)]
        ours, theirs = zip(*pairs, strict=True)
        rounds.append(statistics.median(ours) / statistics.median(theirs))
    assert rounds[-1] <= RATIO_MAX, rounds


def cpu_s(arguments: list[str], environment: dict[str, str]) -> float:
    """The CPU seconds of a new interpreter with these arguments."""
    null = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
    pid = os.posix_spawn(sys.executable, [sys.executable, *arguments], environment, file_actions=[null])
    _, status, usage = os.wait4(pid, 0)
    assert status == 0
    return usage.ru_utime + usage.ru_stime


# Shell completion.


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """A command in this process, with these variables in its environment besides."""
    for name in ("PXRS_AT", "PXRS_REGISTRY"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str, **environment: str) -> Result:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            return run_here(patch, capfd, arguments)

    return call


def asked(shell: str, line: str) -> dict[str, str]:
    """The variables with which the shell asks for completions of the last word of the line."""
    variables = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    return {"_PXRS_COMPLETE": f"complete_{shell}", **variables}


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A hub with two topics, a group and a queue."""
    folder = tmp_path_factory.mktemp("completion") / "hub"
    with pxrs.open(folder) as hub:
        for name in ("orders", "other"):
            hub.create_topic(name, partitions=1)
        hub.group("billing").import_checkpoint(0, "orders")
        hub.create_queue("mail")
    return str(folder)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_completes_commands_and_names(shell: str, call: Call, at: str) -> None:
    assert "tail" in call(**asked(shell, "pxrs ta")).out
    assert "tail" not in call(**asked(shell, "pxrs to")).out
    assert "orders" in call(**asked(shell, "pxrs tail ord"), PXRS_AT=at).out


def test_names_of_topics_groups_and_queues_are_completed(call: Call, at: str) -> None:
    assert call(**asked("bash", "pxrs tail o"), PXRS_AT=at).out.split() == ["orders", "other"]
    assert call(**asked("bash", f"pxrs send --at {at} ord")).out.split() == ["orders"]
    assert call(**asked("bash", "pxrs group describe b"), PXRS_AT=at).out.split() == ["billing"]
    assert call(**asked("bash", "pxrs queue describe "), PXRS_AT=at).out.split() == ["mail"]


def test_names_are_completed_from_a_server(call: Call, at: str) -> None:
    pytest.importorskip("grpc")
    with pxrs.open(at) as hub, serving(hub) as url:
        assert call(**asked("bash", "pxrs topic describe o"), PXRS_AT=url).out.split() == ["orders", "other"]


def test_nothing_is_completed_or_printed_if_the_hub_cannot_be_read(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "TIME_S", 0.2)
    for where in ("", str(tmp_path / "nothing"), "pxrs://127.0.0.1:1", "nonsense://"):
        found = call(**asked("bash", "pxrs tail o"), PXRS_AT=where)
        assert (found.out.strip(), found.errors) == ("", ""), where
    assert not (tmp_path / "nothing").exists()


def test_bash_completes_with_the_script_that_is_printed(at: str, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    command = tmp_path / "pxrs"
    command.write_text(f"#!{sys.executable}\nfrom pxrs.cli.app import main; main()\n")
    command.chmod(0o755)
    program = """
        eval "$(pxrs --show-completion bash)"
        COMP_WORDS=(pxrs tail ord) COMP_CWORD=2
        $(complete -p pxrs | sed 's/.*-F \\([^ ]*\\).*/\\1/') pxrs
        echo "${COMPREPLY[@]}"
    """
    environment = {**os.environ, "PXRS_AT": at, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
    run = subprocess.run([bash, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert (run.stdout, run.stderr) == ("orders\n", "")
