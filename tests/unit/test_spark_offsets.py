"""K3, G7: the offset of a streaming query as Spark keeps it."""

from __future__ import annotations

import json

from pxrs.log.numbering import Numbering
from pxrs.publishing.offsets import OffsetForm
from pxrs.publishing.planning import Span

BOTH = OffsetForm({"a1": "orders", "b2": "returns"}, Numbering([("a1", 2), ("b2", 3)]))
ONE = OffsetForm({"b2": "returns"}, Numbering([("b2", 3)]))


def test_an_offset_comes_back_as_it_was_and_as_the_same_text() -> None:
    spans = {3: Span(3, 0, 5), 0: Span(2, 7, 9)}
    text = json.dumps(BOTH.dump(spans))
    assert json.loads(text) == {
        "topics": {
            "a1": {"name": "orders", "partitions": {"0": [2, 7, 9]}},
            "b2": {"name": "returns", "partitions": {"1": [3, 0, 5]}},
        }
    }
    assert BOTH.load(json.loads(text)) == spans
    assert json.dumps(BOTH.dump(dict(sorted(spans.items())))) == text
    assert BOTH.missing(json.loads(text)) == {}


def test_an_offset_means_the_same_partitions_if_other_topics_are_read() -> None:
    offset = BOTH.dump({1: Span(1, 0, 2), 2: Span(3, 0, 5)})
    assert ONE.load(offset) == {0: Span(3, 0, 5)}
    assert ONE.missing(offset) == {"a1": "orders"}
    assert not ONE.is_of_others(offset)
    swapped = OffsetForm({"b2": "returns", "a1": "orders"}, Numbering([("b2", 3), ("a1", 2)]))
    assert swapped.load(offset) == {4: Span(1, 0, 2), 0: Span(3, 0, 5)}


def test_an_offset_of_the_form_before_is_read() -> None:
    offset = {"topic": "b2", "partitions": {"0": [2, 7, 9], "2": [3, 0, 5]}}
    assert ONE.load(offset) == {0: Span(2, 7, 9), 2: Span(3, 0, 5)}
    assert BOTH.load(offset) == {2: Span(2, 7, 9), 4: Span(3, 0, 5)}
    assert ONE.missing(offset) == {}


def test_g7_an_offset_of_a_topic_that_was_made_again_is_of_another_topic() -> None:
    for offset in ({"topic": "b1", "partitions": {}}, OffsetForm({"b1": "returns"}, Numbering([("b1", 3)])).dump({})):
        assert ONE.is_of_others(offset)
        assert ONE.missing(offset).keys() == {"b1"}


def test_the_ends_name_every_topic() -> None:
    assert BOTH.dump_ends([4, 5, 6, 7, 8])["topics"]["b2"] == {
        "name": "returns",
        "partitions": {"0": 6, "1": 7, "2": 8},
    }
