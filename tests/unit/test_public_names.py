"""What `import pxrs` offers: every public name, loaded when it is first used, and options that cannot drift apart."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from typing import Any, get_type_hints

import pytest

import pxrs
from pxrs.consumer.consumer import Consumer, TopicsConsumer
from pxrs.options import ConsumerOptions, ProducerOptions, TopicsConsumerOptions
from pxrs.producer.producer import Producer

GIVEN_BY_THE_HUB: dict[type, set[str]] = {
    kind: {"topic_names", "home", "recorder", "place"} for kind in (Consumer, TopicsConsumer)
}
"""Keyword arguments of the constructors that a hub fills in itself, so that its own methods do not take them."""
TOUCHED = [
    *("Consumer", "Producer", "ConsumedBatch", "TopicHandle", "GroupHandle", "GroupDescription", "MemberDescription"),
    *("PartitionDescription", "QueueHandle", "QueueListener", "Transaction", "Item", "Depth", "Registry", "Lease"),
    *("Watch", "Entry", "Source", "Batch", "Receipt", "TableReceipt", "Policy", "Backoff", "Message", "Topic", "Hub"),
    *("ConsumerOptions", "ProducerOptions", "TopicsConsumer", "TopicsConsumerOptions", "TopicPartition"),
]
HEAVY = [
    "pxrs.consumer.consumer",
    "pxrs.producer.producer",
    "pxrs.group.admin",
    "pxrs.queue.transaction",
    "pyarrow",
]
"""Modules that a process does without that imports `pxrs`, such as `pxrs --help`."""


def test_every_name_that_a_user_touches_or_annotates_with_is_public() -> None:
    assert [name for name in TOUCHED if name not in pxrs.__all__] == []
    assert len(set(pxrs.__all__)) == len(pxrs.__all__)
    for name in pxrs.__all__:
        assert getattr(pxrs, name) is not None, name


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    """What a new process has after `import pxrs` and nothing else."""
    program = "import json, sys, pxrs; print(json.dumps({'dir': dir(pxrs), 'modules': sorted(sys.modules)}))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    found: dict[str, list[str]] = json.loads(run.stdout)
    return found


def test_dir_is_complete_before_anything_was_used(imported: dict[str, list[str]]) -> None:
    assert set(pxrs.__all__) <= set(imported["dir"])


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'pxrs' has no attribute 'opne'"):
        pxrs.opne  # type: ignore[attr-defined]  # noqa: B018


def test_a_star_import_gives_every_public_name() -> None:
    names: dict[str, object] = {}
    exec("from pxrs import *", names)
    assert set(pxrs.__all__) <= names.keys()


def test_the_import_alone_loads_nothing_heavy(imported: dict[str, list[str]]) -> None:
    assert [name for name in HEAVY if name in imported["modules"]] == []


def test_the_type_checker_sees_the_imports_that_are_made_lazily() -> None:
    """`__getattr__` is hidden from the type checker, which reads imports under TYPE_CHECKING instead: both name the
    same objects, and so does `__all__`."""
    tree = ast.parse(inspect.getsource(pxrs))
    (seen,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imported = {
        alias.name: node.module for node in seen.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == pxrs._LAZY  # type: ignore[attr-defined]
    assert imported.keys() <= set(pxrs.__all__)
    hidden = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "not TYPE_CHECKING"]
    functions = {
        function.name: node in hidden
        for node in tree.body
        for function in ast.walk(node)
        if isinstance(function, ast.FunctionDef)
    }
    assert functions["__getattr__"], "the type checker would take any name for an attribute of pxrs"


# The options of a hub's methods are those of the classes.


@pytest.mark.parametrize(
    ("kind", "options", "partition"),
    [
        (Consumer, ConsumerOptions, int),
        (TopicsConsumer, TopicsConsumerOptions, pxrs.TopicPartition),
        (Producer, ProducerOptions, None),
    ],
)
def test_the_options_of_a_hubs_method_are_those_of_the_class(
    kind: type[Any], options: type[Any], partition: type | None
) -> None:
    """partition: what takes the place of the type variable in the hints of the class."""
    hints = get_type_hints(kind.__init__)
    taken = {
        name: hints[name][partition] if getattr(hints[name], "__parameters__", ()) else hints[name]
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    differs = GIVEN_BY_THE_HUB.get(kind, set()) | (set() if kind is Producer else {"dead_letters"})
    assert get_type_hints(options) == {name: hint for name, hint in taken.items() if name not in differs}
    assert options.__total__ is False, "each of them may be left out"
    assert differs <= taken.keys()


def test_dead_letters_are_a_topics_name_on_a_hub_and_a_function_on_a_consumer() -> None:
    parameter = inspect.signature(pxrs.Hub.consumer).parameters["dead_letters"]
    assert (parameter.annotation, parameter.default, parameter.kind) == ("str | None", None, parameter.KEYWORD_ONLY)
    with pxrs.open("memory:") as hub:
        hub.create_topic("t")
        hub.create_topic("dead")
        with hub.producer("dead") as out, pytest.raises(pxrs.errors.InvalidGroup, match="dead_letters is <function"):
            hub.consumer("t", "g", on_error="dead-letter", dead_letters=lambda: out)  # type: ignore[arg-type]
        assert hub.groups() == []
        with pytest.raises(pxrs.errors.InvalidGroup, match="dead_letters is 'dead'"):
            pxrs.Consumer(hub.topic("t").log, hub.registry, "g", dead_letters="dead")  # type: ignore[arg-type]
