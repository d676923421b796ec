"""Every error: its code, its text, and that it survives pickling and the wire with all that it carries."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import errors
from pxrs.errors import BY_CODE, LogError, PxrsError, RemoteCause
from pxrs.errors.wire import Shown, field_names, from_dict, to_dict
from pxrs.model import TopicPartition

CLASSES = sorted(BY_CODE.values(), key=lambda each: each.code)
SAMPLES: dict[str, Any] = {
    "str": "some text",
    "str | None": "a module",
    "int": 7,
    "bool": True,
    "Sequence[int]": (3, 1),
    "Sequence[Partition]": (1, TopicPartition("orders", 2)),
    "Sequence[str]": ("one", "two"),
    "Mapping[str, str]": {"w1": "sticky"},
    "Mapping[str, tuple[object, object]]": {"partitions": (4, 6), "retention": (None, 1.5)},
    "tuple[int, int] | None": (2, 5),
    "SentRows": "a receipt",
}
"""An argument of each type that a constructor has."""


def made(kind: type[PxrsError]) -> PxrsError:
    """An error of this class with every attribute filled, a note and a cause."""
    names = field_names(kind)
    parameters = inspect.signature(kind.__init__).parameters
    given = {name: SAMPLES[parameters[name].annotation] for name in names}
    error = kind(**given) if names else kind("something happened")
    if isinstance(error, LogError):
        error.refused = frozenset({1, 2})
    error.add_note("and one thing more")
    error.__cause__ = OSError(28, "No space left on device")
    return error


def facts(error: PxrsError) -> dict[str, Any]:
    return {
        "class": type(error),
        "text": str(error),
        "args": error.args,
        "state": error.state(),
        "notes": getattr(error, "__notes__", None),
    }


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.code)
def test_an_error_survives_pickling_and_the_wire_with_all_that_it_carries(kind: type[PxrsError]) -> None:
    error = made(kind)
    assert {*field_names(kind)} <= {*error.state()}, "the arguments of the constructor are attributes"
    for ways in (pickle.loads(pickle.dumps(error)), from_dict(json.loads(json.dumps(to_dict(error))))):
        assert facts(ways) == facts(error)
        assert isinstance(ways.__cause__, RemoteCause)
        assert str(ways.__cause__) == "OSError: [Errno 28] No space left on device"
        assert ways.original_code is None
    twice = from_dict(to_dict(from_dict(to_dict(error))))
    assert (facts(twice), str(twice.__cause__)) == (facts(error), "OSError: [Errno 28] No space left on device")
    assert facts(copy.copy(error)) == facts(error)


def test_every_class_is_public_has_a_code_of_its_own_and_is_in_the_table() -> None:
    found = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, PxrsError)}
    assert found == {*CLASSES}
    assert all("code" in vars(each) for each in found)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*(\.[a-z]+(-[a-z]+)*)?", each.code) for each in found)
    assert {each.__name__ for each in found} <= {*errors.__all__}
    assert {each.__module__ for each in found} == {"pxrs.errors"}
    table = (Path(__file__).parents[2] / "docs/errors.md").read_text()
    rows = re.findall(r"^\| `([a-z.-]+)` \| `(\w+)` \| (.*?) \|$", table, re.MULTILINE)
    assert [(code, name) for code, name, _ in rows] == [(each.code, each.__name__) for each in CLASSES]
    for (_, _, fields), each in zip(rows, CLASSES, strict=True):
        assert re.findall(r"`(\w+)`", fields) == field_names(each), each.__name__


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.code)
def test_the_text_begins_with_what_happened_and_is_no_python_literal(kind: type[PxrsError]) -> None:
    text = str(made(kind))
    assert not text.startswith((kind.__name__, "'", '"', "(", "pxrs."))
    assert inspect.getdoc(kind)


def test_a_missing_module_is_named_with_what_needs_it_and_commands_that_install_it() -> None:
    """There is no release on an index: `pip install 'pxrs[etcd]'` would fail, or install something else."""
    error = errors.MissingDependency.of_extra("etcd:", "grpc", "etcd")
    assert (error.name, str(error)) == (
        "grpc",
        "etcd: needs grpc: pip install '.[etcd]' in a checkout of pxrs, or pip install "
        f"'pxrs-{pxrs.__version__}-py3-none-any.whl[etcd]' with the wheel",
    )


def test_no_message_advises_to_install_pxrs_from_an_index() -> None:
    root = Path(__file__).parents[2]
    found = [
        path
        for folder in ("src", "deploy", "examples")
        for path in (root / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc" and "pip install 'pxrs[" in path.read_text(errors="ignore")
    ]
    assert [path for path in found if path.name != "general.py"] == []


def test_an_unknown_code_becomes_the_nearest_base_that_is_known() -> None:
    sent = to_dict(made(errors.OffsetTrimmed))
    sent["code"], sent["bases"] = "log.offset-archived", ["log.offset-trimmed", "log", "error"]
    sent["fields"]["bucket"] = "cold"
    error = from_dict(sent)
    assert type(error) is errors.OffsetTrimmed
    assert (error.code, error.original_code) == ("log.offset-trimmed", "log.offset-archived")
    assert (str(error), error.first_offset, error.state()["bucket"]) == (sent["message"], 7, "cold")
    assert to_dict(error)["code"] == "log.offset-archived", "it is passed on under the code that it came with"
    again = from_dict(to_dict(error))
    assert (type(again), again.original_code) == (errors.OffsetTrimmed, "log.offset-archived")

    del sent["fields"]["first_offset"]
    error = from_dict(sent)
    assert type(error) is LogError, "code that reads `first_offset` must not meet an error without it"
    assert (str(error), error.original_code) == (sent["message"], "log.offset-archived")
    assert type(from_dict({"code": "quantum.decohered", "message": "gone"})) is PxrsError
    assert str(from_dict({})) == ""


def test_what_json_cannot_hold_is_tagged_and_objects_become_their_repr() -> None:
    error = LogError("text")
    carried = {
        "data": b"\0\xff",
        "by_number": {1: (2,)},
        "odd": {"$tuple": "x"},
        "nested": [{"a": {3}}],
        "thing": Path("x"),
    }
    vars(error).update(carried)
    found = from_dict(json.loads(json.dumps(to_dict(error))))
    assert found.state() == {**carried, "nested": [{"a": frozenset({3})}], "thing": Shown(repr(Path("x")))}
    assert repr(found.state()["thing"]) == repr(Path("x"))


def test_a_chain_of_causes_is_sent_up_to_a_bound() -> None:
    error = first = LogError("0")
    for number in range(1, 30):
        error.__cause__ = LogError(str(number))
        error = error.__cause__
    texts: list[str] = []
    found: BaseException | None = from_dict(to_dict(first))
    while found is not None:
        texts.append(str(found))
        found = found.__cause__
    assert texts == [str(number) for number in range(11)]


def test_attributes_from_outside_cannot_replace_what_the_class_has() -> None:
    fields = {
        "__class__": "x",
        "_hidden": 1,
        "code": "error",
        "args": [],
        "original_code": "x",
        "not a name": 2,
        "ok": 3,
    }
    error = from_dict({"code": "log", "message": "text", "fields": fields})
    assert (error.state(), error.code, str(error), type(error)) == ({"ok": 3}, "log", "text", LogError)
