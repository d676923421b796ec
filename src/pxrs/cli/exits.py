"""Exit codes of the commands that a supervisor such as systemd runs: `worker`, `serve`, `storage`, `pipeline run`,
`upkeep` and `metrics`. docs/health.md has them as a table.

Other commands end with 1 after every error, because nobody starts them again by himself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import typer

from pxrs.cli.restarts import is_final
from pxrs.cli.terminal import error_text, tell_error
from pxrs.errors import PxrsError

EXIT_FAILED: Final = 1
"""It failed, and may succeed if it is started again: an outage, a worker that had to be killed, a query that failed."""
EXIT_FINAL: Final = 3
"""Starting it again cannot help: somebody has to correct an option, a name, a permission or what is stored."""


@contextmanager
def exit_codes() -> Iterator[None]:
    """End the command with the code that fits the error, which is printed as by every other command."""
    try:
        yield
    except PxrsError as error:
        tell_error(error_text(error), type(error).__name__)
        raise typer.Exit(EXIT_FINAL if is_final(error) else EXIT_FAILED) from None
