"""Transactions and policies of queues over a server: their tests, unchanged. Those that move a clock by hand are left
out: a client has its own."""

from __future__ import annotations

import pytest

from tests.integration.served.suites import suite

pytestmark = pytest.mark.sampled(6, of="module")
globals().update(
    suite(
        "tests.unit.test_queue",
        local=("place", "clock"),
        without=("test_z8_a_transaction_that_grows_too_large_says_so_and_keeps_what_it_has",),  # thousands of calls
    )
)
