"""A `pxrs` command in the process of the test, which may patch what the command calls. `forked.py` starts a process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from pxrs.cli import app


class Result(NamedTuple):
    """How a command ended, and what it printed on standard output and on standard error."""

    code: int
    out: str
    errors: str

    def rows(self) -> list[dict[str, Any]]:
        """What a command with --json printed, an object for each line."""
        assert self.code == 0, self.errors
        return [json.loads(line) for line in self.out.splitlines()]

    def unwrapped(self) -> Result:
        """With the errors on one line, wherever a terminal of this width would have broken them."""
        return self._replace(errors=" ".join(self.errors.split()))


Call = Callable[..., Result]


def run_here(
    monkeypatch: pytest.MonkeyPatch, captured: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> Result:
    """Run the command as `pxrs ARGUMENTS` does. What was printed before it is dropped from `captured`."""
    captured.readouterr()
    monkeypatch.setattr(sys, "argv", ["pxrs", *arguments])
    with pytest.raises(SystemExit) as ended:
        app.run()
    code = ended.value.code
    shown = captured.readouterr()
    return Result(code if isinstance(code, int) else 0, shown.out, shown.err)
