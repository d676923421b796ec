"""For the tests of the log: a machine that can be started again."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from pxrs.log import published


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Start the machine again, as handles of logs that are opened from then on see it."""

    def start() -> None:
        boot_id = str(uuid.uuid4())
        monkeypatch.setattr(published, "boot_id", lambda: boot_id)

    return start
