"""Every name of the code that the documents give as `module:Class.function` exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"`(pxrs[\w.]*):([\w.]+)`")
QUESTION = re.compile(r"^\*\*[^*]+\?\*\*", re.MULTILINE)
QUESTIONS_MIN = 20


def documented_names() -> dict[str, list[str]]:
    """By name, the documents that give it."""
    found: dict[str, list[str]] = {}
    for path in [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for module, attributes in NAME.findall(path.read_text()):
            found.setdefault(f"{module}:{attributes}", []).append(path.name)
    return found


@pytest.mark.parametrize("name", sorted(documented_names()))
def test_a_name_in_the_documents_exists(name: str) -> None:
    module, _, attributes = name.partition(":")
    try:
        found: object = importlib.import_module(module)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{', '.join(documented_names()[name])}: {name}: {error}")


def test_each_question_is_answered_with_a_name() -> None:
    _, _, questions = (ROOT / "ARCHITECTURE.md").read_text().partition("\n## Questions of a newcomer\n")
    begins = [match.start() for match in QUESTION.finditer(questions)]
    answers = [questions[begin:end] for begin, end in zip(begins, [*begins[1:], len(questions)], strict=True)]
    assert len(answers) >= QUESTIONS_MIN
    assert [answer for answer in answers if not NAME.search(answer)] == []


def test_no_document_has_the_marks_of_an_unfinished_merge() -> None:
    folder = Path(__file__).parents[2]
    texts = [*folder.glob("*.md"), *folder.glob("docs/**/*.md")]
    marks = ("<<<<<<< ", ">>>>>>> ")
    assert [path.name for path in texts if any(line.startswith(marks) for line in path.read_text().splitlines())] == []
