"""Times as options take them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from pxrs.cli.moments import moment

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("10 minutes ago", timedelta(minutes=10)),
        ("1 minute ago", timedelta(minutes=1)),
        ("90s ago", timedelta(seconds=90)),
        ("2h ago", timedelta(hours=2)),
        (" 3 Days ago ", timedelta(days=3)),
        ("1 week ago", timedelta(weeks=1)),
        ("0 s ago", timedelta(0)),
    ],
)
def test_a_time_before_now(text: str, ago: timedelta) -> None:
    assert moment(text, NOW) == NOW - ago


def test_a_time_of_the_calendar() -> None:
    assert moment("2026-01-31T12:00Z") == NOW
    assert moment("2026-01-31T13:00+01:00") == NOW
    assert moment("2026-01-31T12:00") == datetime(2026, 1, 31, 12).astimezone(), "this machine's zone"


@pytest.mark.parametrize(
    "text", ["", "soon", "10 minutes", "ten minutes ago", "-1 day ago", "10 months ago", "999999999 weeks ago", "12:00"]
)
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a time such as 2026-01-31T12:00 .* or '10 minutes ago'"):
        moment(text, NOW)
