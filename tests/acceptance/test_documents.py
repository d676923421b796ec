"""What the documents print runs, as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import pxrs

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks() -> list[tuple[str, str]]:
    return [
        (f"{path.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}", match[1])
        for path in DOCUMENTS
        for text in [path.read_text()]
        for match in BLOCK.finditer(text)
    ]


@pytest.mark.parametrize(("place", "code"), blocks(), ids=[place for place, _ in blocks()])
def test_python_in_the_documents_runs(place: str, code: str, tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{place}\n{result.stderr}"


def test_the_readme_shows_the_refusal_it_talks_of(tmp_path: Path) -> None:
    _, code = next(block for block in blocks() if block[0].startswith("README") and "Conflict" in block[1])
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout == "not as expected: owners/7; nothing was written\n"


def test_make_targets_that_the_documents_name_exist() -> None:
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = {
        target
        for path in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]
        for target in re.findall(r"make ([a-z]+)", path.read_text())
    }
    assert named - {"sure", "room"} <= set(re.findall(r"make ([a-z]+)", listed)), listed


def test_links_between_documents_lead_somewhere() -> None:
    for path in [*DOCUMENTS, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


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
        if find_spec("pandas"):  # not installed for the tests: Spark's processes would load it each time
            assert eval(lines["pandas"], names).shape == (30, 6)
