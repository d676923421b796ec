"""What the documents print runs, as printed, and can be run again in the same folder."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import CodeType

import pytest

import pxrs
from pxrs.cli.app import app

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```(?:console|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SERVED = ROOT / "docs/serve.md"
"""Its commands and programs need the servers that it starts: `test_the_page_of_the_server_runs` runs them."""
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
STARTS_SPARK = "pxrs.spark import session"
"""In a block that starts Spark. `test_examples.py` runs these, and `test_recipes.py` those of `spark-recipes.md`, in
the session that they have."""
RUN_AGAIN = ("topic create", "send", "check", "queue create", "queue put", "queue depth", "queue dead list", "backup")
"""The commands that are run twice. The others wait for ever, ask, need a server, or need Spark."""


def blocks() -> list[tuple[str, str]]:
    return [
        (f"{path.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}", match[1])
        for path in DOCUMENTS
        for text in [path.read_text()]
        for match in BLOCK.finditer(text)
        if STARTS_SPARK not in match[1] and path.name != "spark-recipes.md" and path != SERVED
    ]


def compiled(place: str, code: str) -> CodeType:
    """As a program whose tracebacks name the document and its line."""
    document, line = place.rsplit(":", 1)
    return compile("\n" * int(line) + code, str(ROOT / document), "exec")


def run(program: CodeType) -> None:
    """In this process: starting one for each block takes longer than most of them run."""
    exec(program, {"__name__": "__main__"})


@pytest.mark.parametrize(("place", "code"), blocks(), ids=[place for place, _ in blocks()])
def test_python_in_the_documents_runs_twice_in_one_folder(
    place: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = compiled(place, code)
    run(program)
    run(program)


def test_python_of_all_documents_runs_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader who tries one after the other finds no topic, queue or table of another snippet in the way."""
    monkeypatch.chdir(tmp_path)
    for place, code in blocks():
        run(compiled(place, code))


def commands() -> list[tuple[str, list[str]]]:
    """By document: the command lines, without the prompt and what is printed."""
    found = []
    for path in DOCUMENTS:
        lines = []
        for block in COMMANDS.findall(path.read_text()):
            if "pip install ./" in block:
                continue  # its commands need a package that it shows how to write
            prompted = re.findall(r"^\$ (.+)$", block, re.MULTILINE)
            lines += prompted or block.splitlines()
        found.append((str(path.relative_to(ROOT)), lines))
    return found


def test_commands_in_the_documents_run_twice_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = set()
    for document, lines in commands():
        folder = tmp_path / document
        folder.mkdir(parents=True)
        monkeypatch.chdir(folder)
        Path("orders.jsonl").write_text('{"account": "ann", "amount": 10.5}\n')
        Path("letters.txt").write_text("to: carl\n")
        for line in lines * 2:
            if line.startswith("export "):
                monkeypatch.setenv(*line.removeprefix("export ").split("=", 1))
            before, _, command = line.rpartition("pxrs ")
            command, _, source = command.partition(" < ")
            if command.startswith(RUN_AGAIN) and "://" not in command:
                Path("echoed").write_text("".join(shlex.split(before)[1:2]))  # of "echo '...' |"
                with open(source or "echoed") as file, monkeypatch.context() as patch:
                    patch.setattr(sys, "stdin", file)
                    assert not app(shlex.split(command, comments=True), standalone_mode=False), f"{document}: {line}"
                ran.add(command.split()[0])
    assert ran == {"topic", "send", "check", "queue", "backup"}


def test_the_readme_shows_the_refusal_it_talks_of(capsys: pytest.CaptureFixture[str]) -> None:
    place, code = next(block for block in blocks() if block[0].startswith("README") and "Conflict" in block[1])
    run(compiled(place, code))
    assert capsys.readouterr().out == "not in the expected version: owners/7; nothing was written\n"


def test_make_targets_that_the_documents_name_exist() -> None:
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = {
        target
        for path in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]
        for target in re.findall(r"make ([a-z]+)", path.read_text())
    }
    assert named - {"sure", "room"} <= set(re.findall(r"make ([a-z]+)", listed)), listed


def test_a_topic_goes_to_other_libraries_by_the_lines_that_are_printed() -> None:
    text = (ROOT / "docs/log.md").read_text()
    lines = dict(re.findall(r"^\| (pandas|Polars|DuckDB) \| `(.+)` \|$", text, re.MULTILINE))
    assert lines.keys() == {"pandas", "Polars", "DuckDB"}
    with pxrs.open("memory:") as hub:
        orders = hub.create_topic("orders")
        with hub.producer("orders") as out:
            for number in range(30):
                out.send(b"%d" % number, key=b"%d" % (number % 3))
        names = {"orders": orders, "polars": pytest.importorskip("polars"), "duckdb": pytest.importorskip("duckdb")}
        *setup, query = lines["DuckDB"].split("; ")
        exec("; ".join(setup), names)
        assert sorted(eval(query, names).fetchall()) == [(b"0", 10), (b"1", 10), (b"2", 10)]
        assert eval(lines["Polars"], names).shape == (30, 6)
        if find_spec("pandas"):
            assert eval(lines["pandas"], names).shape == (30, 6)
