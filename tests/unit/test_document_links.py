"""The documents name files, headings and packages that exist."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
INSTALLING = ROOT / "docs/walkthrough.md"
"""Its section "Installing" is the one to which the other pages link."""
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
FROM_AN_INDEX = re.compile(r"pip\s+install\s+(?:-\S+\s+)*['\"]?pxrs(?![\w./-])")
"""Such as `pip install 'pxrs[sql]'` or `pip install -U pxrs`."""


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    found: Counter[str] = Counter()
    named = set()
    for heading in HEADING.findall(FENCED.sub("", path.read_text())):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        named.add(f"{anchor}-{found[anchor]}" if found[anchor] else anchor)
        found[anchor] += 1
    return named


@pytest.mark.parametrize("path", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_links_of_a_document_lead_to_a_file_and_a_heading_that_exist(path: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", FENCED.sub("", path.read_text()))
    broken = []
    for link in LINK.findall(text):
        target, _, anchor = link.partition("#")
        file = path.parent / target if target else path
        if ":" not in target and (not file.exists() or (anchor and anchor not in anchors(file))):
            broken.append(link)
    assert broken == []


def test_anchors_are_those_of_github(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text("# A queue: `drain_queue`\n\n```sh\n# no heading\n```\n\n## *Why?* A-B, c\n\n## Why A-B c\n")
    assert anchors(document) == {"a-queue-drain_queue", "why-a-b-c", "why-a-b-c-1"}


def test_documents_do_not_install_a_package_that_no_index_has() -> None:
    """Until there is a release."""
    found = {
        str(path.relative_to(ROOT)): FROM_AN_INDEX.findall(path.read_text())
        for path in DOCUMENTS
        if path.parent.name != "decisions"
    }
    assert {name: each for name, each in found.items() if each} == {}


def test_no_unit_or_document_claims_a_page_of_the_project_on_an_index() -> None:
    files = [*DOCUMENTS, *(path for path in (ROOT / "deploy").rglob("*") if path.is_file())]
    assert [str(path.relative_to(ROOT)) for path in files if "pypi.org/project/pxrs" in path.read_text()] == []


def test_the_installation_names_the_wheel_and_every_extra_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = INSTALLING.read_text()
    assert set(re.findall(r"dist/pxrs-([^-]+)-py3-none-any\.whl", text)) == {project["version"]}
    rows = re.findall(r"^\| (`.+) \| .* \|$", text, re.MULTILINE)
    extras = {extra for row in rows for extra in re.findall(r"`([a-z]+)`", row)}
    assert extras == {*project["optional-dependencies"]} - {"bench", "dev"}
