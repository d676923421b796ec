"""The table of events: complete, true, and the same as in docs/events.md."""

from __future__ import annotations

import ast
import logging
import re
from string import Formatter

import pytest

import pxrs
from pxrs.events.names import KINDS, text_of
from tests.unit.source_code import ROOT, SOURCE, trees

ROW = re.compile(r"^\| `([a-z]+\.[a-z_]+)` \| (.*) \| (.*) \|$", re.MULTILINE)


def test_the_document_has_every_event_with_its_text_and_fields() -> None:
    written = {name: (text, re.findall("`([a-z_]+)`", fields)) for name, text, fields in ROW.findall(document())}
    assert written == {kind.name: (kind.text, list(kind.fields)) for kind in KINDS.values()}


def document() -> str:
    return (ROOT / "docs" / "events.md").read_text()


def test_a_text_names_only_fields_of_its_event() -> None:
    for kind in KINDS.values():
        named = {name for _, name, _, _ in Formatter().parse(kind.text) if name is not None}
        assert named <= {*kind.fields}, kind.name


def test_a_field_that_is_missing_is_shown_as_such() -> None:
    assert text_of("member.joined", [("group", "g")]) == "group g: ? joined"
    assert text_of("of.a_later_version", []) == "of.a_later_version"


def test_every_event_is_one_line_of_the_log_with_its_text_name_and_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pxrs"), pxrs.open("memory:") as hub:
        hub.create_topic("t", partitions=1)
        for kind in KINDS.values():
            caplog.clear()
            fields = {name: f"the {name}" for name in kind.fields}
            hub.parts.events.record(kind.name, **fields)
            (line,) = caplog.records
            assert (line.name, line.levelno) == (f"pxrs.events.{kind.name.split('.')[0]}", kind.level)
            assert line.getMessage() == kind.text.format_map(fields)
            found = {name: vars(line)[name] for name in ("event", *kind.fields)}
            assert found == {"event": kind.name, **fields}
        stored = [each.name for each in (*hub.events(), *hub.audit())]
        assert sorted(stored) == sorted([*KINDS, "audit.create_topic"])


def test_the_code_records_every_event_of_the_table() -> None:
    """By its whole name, or by its second part where the name is put together."""
    texts = {
        node.value
        for path, tree in trees().items()
        if path.is_relative_to(SOURCE) and path.name != "names.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert [name for name in KINDS if name not in texts and name.split(".")[1] not in texts] == []


def recorded() -> set[tuple[str, str]]:
    """The events that the code records by a literal name, and the keyword arguments that it gives to each."""
    found = set()
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            name = node.args[0]
            if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
                continue
            beginning = {"record": "", "audit": "audit.", "_audit": "audit.", "record_audit": "audit."}
            if node.func.attr in beginning and path.is_relative_to(SOURCE):
                given = [each.arg for each in node.keywords if each.arg is not None]
                found |= {(beginning[node.func.attr] + name.value, str(field)) for field in given}
    return found


def test_the_code_records_only_events_and_fields_of_the_table() -> None:
    unknown = {(name, field) for name, field in recorded() if name not in KINDS or field not in KINDS[name].fields}
    assert unknown == set()
    assert len(recorded()) > 4
