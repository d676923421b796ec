"""The table of docs/waiting.md has every public method that may wait, and tests make each of them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import pxrs
from tests.integration.waits import LIMITS, TABLE, WAITING

PAGE = Path(__file__).parents[2] / "docs/waiting.md"
ROW = re.compile(r"^\| (`(?:[A-Z]\w+\.\w+|open)`.*?) \| .* \| ([^|]+) \|$", re.MULTILINE)
VALUES = {
    *("AtLeastOnce", "Backoff", "ConsumeOnce", "ConsumeTimes", "ExponentialBackoff", "FixedBackoff", "Policy"),
    *("Append", "Batch", "Bounds", "ConsumedBatch", "Copied", "DamagedTopic", "Depth", "Entry", "Event", "Fetched"),
    *("GroupDescription", "Handled", "Home", "Item", "Limits", "MaybeStored", "MemberDescription", "Message"),
    *("NotStored", "Origin", "PartitionDescription", "Paused", "Payload", "RegisteredSource", "RetentionPlan"),
    *("RoundReport", "Stored", "StoredAt", "Timings", "Topic", "TopicLag", "TopicPartition", "UpkeepStatus"),
    *("ConsumerOptions", "ProducerOptions", "QueueChanges", "TopicChanges", "TopicsConsumerOptions"),
}
"""Public classes of plain values."""
CONTRACTS = {"Cancel", "Clock", "Log", "Source", "Subscription", "TopicLog"}
"""Public classes that others implement, or that end the waits of others: users call them through those in `WAITING`."""
OF_EVERY_SOURCE = {"look_again_s", "named", "parts", "place", "subscribe", "is_ended", "ends_problem"}
"""Methods of `SqlTable` that its callers in pxrs use, and that ask nothing of the database."""


def public(kind: type) -> set[str]:
    """The methods and properties of a class that users call."""
    names = {name for name in dir(kind) if not name.startswith("_") or name in ("__iter__", "__len__")}
    return {
        name
        for name in names
        if callable(getattr(kind, name)) or isinstance(inspect.getattr_static(kind, name), property)
    }


def test_every_public_class_is_one_whose_methods_may_wait_or_is_known_not_to() -> None:
    classes = {name: each for name in pxrs.__all__ if inspect.isclass(each := getattr(pxrs, name))}
    known = VALUES | CONTRACTS | {kind.__name__ for kind in WAITING}
    assert set(classes) - known == set()


@pytest.mark.parametrize("kind", WAITING, ids=lambda kind: kind.__name__)
def test_every_public_method_is_called_while_nothing_answers(kind: type) -> None:
    wanted = public(kind)
    if kind.__name__ == "SqlTable":
        wanted -= OF_EVERY_SOURCE | {"is_closed", "url", "share", "close_shared"}
    entries = {name.partition(".")[2] for name in TABLE if name.partition(".")[0] == kind.__name__}
    assert wanted == entries, "add an entry to TABLE of tests/integration/waits.py, and a row to docs/waiting.md"


def test_the_page_has_each_of_these_calls_with_its_limit() -> None:
    documented: dict[str, str] = {}
    for calls, limit in ROW.findall(PAGE.read_text()):
        for name in re.findall(r"`([\w.]+)`", calls):
            assert name not in documented, f"{name} is in two rows"
            documented[name] = limit
    assert documented == {name: call.limit for name, call in TABLE.items()}
    assert {call.limit for call in TABLE.values()} == set(LIMITS)
