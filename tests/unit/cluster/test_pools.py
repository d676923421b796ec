"""What fails on a thread of a broker is seen."""

from __future__ import annotations

import logging

import pytest

from pxrs.cluster.broker.pools import ToldPool


def test_a_failure_that_nobody_asks_for_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("no such record")

    with caplog.at_level(logging.ERROR), ToldPool(1) as pool:
        pool.submit(fail)
        pool.submit(int)
    (told,) = caplog.records
    assert told.exc_info is not None
    assert str(told.exc_info[1]) == "no such record"
