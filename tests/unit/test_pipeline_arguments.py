"""What is given to `@pipeline` is checked where it is written, and refused in words."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pxrs.cli.pipeline.file import load
from pxrs.errors import InvalidPipeline
from pxrs.spark import parse_json, pipeline, to
from pxrs.spark.run import check_topics
from pxrs.spark.sinks import Sink

JSON = parse_json("a INT")


def same(rows: Any) -> Any:
    return rows


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"source": []}, r"source is \[\]; give a topic's name, a list of names, or topics_matching"),
        ({"source": ["a", 7]}, r"source is \['a', 7\]"),
        ({"source": ["a", "b", "a"]}, "names a topic twice"),
        ({"source": "a,b"}, "source is 'a,b'"),
        ({"source": {"a": "b"}}, "source is {'a': 'b'}"),
        ({"source": None}, "source is None"),
        ({"source": ""}, "source is ''"),
        ({"source": same}, "source is <function same"),
        ({"sink": ["x", "y"]}, r"sink is \['x', 'y'\]"),
        ({"sink": ""}, "sink is ''"),
        ({"sink": None}, "sink is None"),
        ({"dead_letters": ["bad"], "parse": JSON}, r"dead_letters is \['bad'\]"),
        ({"dead_letters": "", "parse": JSON}, "dead_letters is ''"),
        ({"dead_letters": 7, "parse": JSON}, "dead_letters is 7"),
        ({"name": 7}, "name is 7"),
        ({"group": 7}, "7 is not a valid name of a group"),
        ({"group": 7, "dead_letters": "bad", "parse": JSON}, "7 is not a valid name of a group"),
        ({"group": ["g"]}, "is not a valid name of a group"),
        ({"parse": "a INT"}, r"parse is 'a INT'; give parse_json\(...\)"),
        ({"parse": "a INT", "dead_letters": "bad"}, r"give parse_json\(...\)"),
        ({"output_mode": ["append"]}, "output_mode is"),
        ({"every": 60}, "every is 60; give a string such as '1 minute'"),
        ({"every": timedelta(seconds=1)}, "every is"),
        ({"share_group": "yes"}, "share_group is 'yes'"),
        ({"options": "maxRowsPerTrigger=1"}, "options is 'maxRowsPerTrigger=1'"),
        ({"options": ["a"]}, "options is"),
        ({"options": {1: "x"}}, "options: 1 is not the name of an option"),
    ],
)
def test_an_argument_that_is_none_is_refused_in_words(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidPipeline, match=words):
        pipeline(**{"source": "a", "sink": "b", **given})(same)


async def asynchronous(rows: Any) -> Any:
    pass


def generator(rows: Any) -> Any:
    yield rows


def of_two(rows: Any, others: Any) -> Any:
    pass


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (asynchronous, "neither async nor a generator"),
        (generator, "neither async nor a generator"),
        (of_two, "cannot be called with a DataFrame"),
        (lambda: None, "cannot be called with a DataFrame"),
    ],
)
def test_a_function_that_cannot_be_one_is_refused(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(InvalidPipeline, match=words):
        pipeline("a", "b", name="p")(function)


def test_sinks_and_parse_steps_are_checked_where_they_are_made() -> None:
    with pytest.raises(InvalidPipeline, match="format is 7"):
        to(7)  # type: ignore[arg-type]
    with pytest.raises(InvalidPipeline, match="partition_by is"):
        to("parquet", [1])  # type: ignore[list-item]
    with pytest.raises(InvalidPipeline, match="partition_by is 7"):
        to("parquet", 7)  # type: ignore[arg-type]
    with pytest.raises(InvalidPipeline, match="schema is 7"):
        parse_json(7)  # type: ignore[arg-type]
    assert pipeline("a", Sink("console"))(same).sink.format == "console"


def test_the_line_of_the_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "two.py"
    file.write_text(
        "from pxrs.spark import pipeline\n\n@pipeline(source=['a', 7], sink='c')\ndef both(rows):\n    return rows\n"
    )
    with pytest.raises(InvalidPipeline, match=r"both: source is \['a', 7\].*two\.py, line 3\)"):
        load(file)


@pytest.mark.parametrize("more", [{"sink": "Orders"}, {"sink": "x", "dead_letters": "Orders", "parse": JSON}])
def test_the_source_is_known_by_its_id_under_another_name(more: dict[str, Any]) -> None:
    ids = {"orders": "1", "Orders": "1", "x": "2"}
    hub: Any = SimpleNamespace(
        url="data",
        damaged_topics=list,
        topics=lambda: [SimpleNamespace(name=name, id=ids[name]) for name in ids],
        topic=lambda name: SimpleNamespace(name=name, id=ids[name]),
    )
    with pytest.raises(InvalidPipeline, match="Orders is another name of the source, orders"):
        check_topics(hub, [pipeline("orders", **more)(same)])
    check_topics(hub, [pipeline("orders", "x")(same)])
