"""Consumers over a server: the tests of consumers, unchanged.

Retention is the server's, so what consumers do after it is in `test_upkeep.py`."""

from __future__ import annotations

import pytest

from tests.integration.served.suites import suite

pytestmark = pytest.mark.sampled(6, of="module")
globals().update(suite("tests.unit.consumer.test_iterating"))
globals().update(suite("tests.unit.consumer.test_moving"))
globals().update(suite("tests.unit.consumer.test_callbacks"))
globals().update(suite("tests.unit.consumer.test_handlers"))
globals().update(suite("tests.unit.consumer.test_failing_handlers"))
globals().update(
    suite(
        "tests.unit.consumer.test_acknowledging",
        without=(
            "test_x11_a_lost_lease_loses_everything_and_the_member_comes_back_as_another",
        ),  # ends it in the store
    )
)
globals().update(
    suite(
        "tests.unit.consumer.test_starts",
        without=(
            "test_a_member_that_cannot_begin_leaves_nothing_behind",  # breaks a log in memory
            "test_what_retention_took_is_an_error_by_default",
            "test_what_retention_took_can_be_skipped_and_is_counted",
            "test_x22_skipping_what_retention_took_acknowledges_nothing_before_it",
            "test_x16_reading_ahead_is_bounded_for_all_partitions_together",  # counts reads of single partitions
        ),
    )
)
