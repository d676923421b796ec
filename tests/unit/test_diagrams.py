"""The Mermaid diagrams of the documents: no renderer is at hand, so this finds what breaks a diagram most often."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pxrs.group import reconcile

ROOT = Path(__file__).parents[2]
FLOWS = ["Producing", "Joining a group", "Hand-over", "Take-over", "A queue's transaction", "A Spark batch"]
STATES = {
    "Hand-over": {"Claim", "Revoke", "Resume", "Release", "Lose"},
    "Take-over": {"free", "owned"},
    "A queue's transaction": {"open", "unknown", "committed", "ready", "delayed", "inflight", "dead"},
    "A Spark batch": {"absent", "committed", "published"},
}
"""By section of flows.md: the states, or the actions between them, that its state diagrams must show."""
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```", re.MULTILINE | re.DOTALL)
KINDS = re.compile(r"sequenceDiagram|stateDiagram-v2|flowchart (TB|LR)")
BLOCK = re.compile(r"(alt|opt|loop|par|subgraph) \S")
ARROW = re.compile(r"(\w+)(?:->>|-->>|-x|--x)(\w+): \S")
PARTICIPANT = re.compile(r"participant (\w+) as \S")
SYNTAX = re.compile(r"[;#]|\bend\b|%%")
"""What Mermaid does not read as text, wherever it is in a line."""


def diagrams() -> list[tuple[str, str]]:
    found = []
    for path in [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        inside = DIAGRAM.findall(text)
        assert len(inside) == text.count("```mermaid"), path
        found += [(f"{path.name}-{number}", diagram) for number, diagram in enumerate(inside, 1)]
    return found


@pytest.mark.parametrize("diagram", [each for _, each in diagrams()], ids=[name for name, _ in diagrams()])
def test_a_diagram_is_one_that_mermaid_draws(diagram: str) -> None:
    kind, *lines = [line.strip() for line in diagram.splitlines() if line.strip()]
    assert KINDS.fullmatch(kind)
    opened = 0
    named: set[str] = set()
    for line in lines:
        assert line.count('"') % 2 == 0, line
        if line == "end":
            opened -= 1
            continue
        assert not SYNTAX.search(line), line
        opened += BLOCK.match(line) is not None
        if kind == "sequenceDiagram":
            check_line_of_a_sequence(line, named)
    assert opened == 0, "each block has its end"


def check_line_of_a_sequence(line: str, named: set[str]) -> None:
    if participant := PARTICIPANT.match(line):
        named.add(participant[1])
    elif arrow := ARROW.match(line):
        assert {arrow[1], arrow[2]} <= named, line
    elif line.startswith("Note "):
        over = re.match(r"Note (?:over|right of|left of) (\w+)(?:,(\w+))?: \S", line)
        assert over, line
        assert {name for name in over.groups() if name is not None} <= named, line
    else:
        assert BLOCK.match(line) or re.match(r"(else|and) \S", line) or line == "autonumber", line


def section_of(flow: str) -> str:
    text = (ROOT / "docs" / "flows.md").read_text()
    (section,) = re.findall(rf"^## {flow}\b.*?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert isinstance(section, str)
    return section


@pytest.mark.parametrize("flow", STATES)
def test_the_states_of_a_flow_are_drawn(flow: str) -> None:
    drawn = " ".join(each for each in DIAGRAM.findall(section_of(flow)) if each.startswith("stateDiagram-v2"))
    assert STATES[flow] - set(re.findall(r"\w+", drawn)) == set()


def test_a_hand_over_is_drawn_with_the_actions_of_the_code() -> None:
    assert {action for action in STATES["Hand-over"] if not hasattr(reconcile, action)} == set()


@pytest.mark.parametrize("flow", FLOWS)
def test_each_flow_has_its_diagram(flow: str) -> None:
    section = section_of(flow)
    assert "```mermaid\nsequenceDiagram\n" in section
    if flow != "Producing":  # which does not touch the registry
        assert "expects" in section, "what each commit expects"
        assert "puts" in section, "which keys it writes"
