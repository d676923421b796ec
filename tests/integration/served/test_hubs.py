"""Topics, tables, `exist_ok`, forks, and hubs that are dropped, over a server: their tests, unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import pxrs
from pxrs.hub import Hub
from tests.integration.served.suites import suite

pytestmark = pytest.mark.sampled(6, of="module")
globals().update(suite("tests.unit.test_hub"))
globals().update(
    suite(
        "tests.unit.test_exist_ok",
        served=("hub", "hubs"),
        without=(
            # They damage files of the directory.
            "test_a_name_that_can_neither_be_opened_nor_created_ends_the_attempts",
            "test_a_damaged_topic_is_not_taken_for_the_one_asked_for",
        ),
    )
)
globals().update(
    suite(
        "tests.unit.test_dropped_without_close",
        without=("test_an_error_of_a_dropped_producer_is_logged_and_raised_by_the_receipts",),  # breaks a log in memory
    )
)


@pytest.fixture
def hubs(url: str) -> Iterator[tuple[Hub, Hub]]:
    """Two clients of one server."""
    with pxrs.open(url) as one, pxrs.open(url) as other:
        yield one, other
