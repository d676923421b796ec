"""What the documents print runs, as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
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
