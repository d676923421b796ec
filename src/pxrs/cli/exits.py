"""Exit codes of the commands that a supervisor such as systemd runs: `worker`, `serve`, `storage`, `pipeline run`,
`upkeep` and `metrics`. docs/health.md has them as a table.

Other commands end with 2 if the command line is wrong, and with 1 after every other error: no supervisor starts them
again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import typer

from pxrs.cli.restarts import is_final, is_wrong_argument
from pxrs.cli.terminal import error_text, tell_error
from pxrs.errors import PxrsError

EXIT_FAILED: Final = 1
"""It failed, and may succeed if it is started again: an outage, a worker that had to be killed, a query that failed."""
EXIT_USAGE: Final = 2
"""The command line is wrong: an option or argument is missing, unknown, or has a value that is refused."""
EXIT_FINAL: Final = 3
"""Starting it again cannot help: somebody has to correct a name, a permission or what is stored."""


@contextmanager
def exit_codes() -> Iterator[None]:
    """End the command with the code that fits the error, which is printed as by every other command."""
    try:
        yield
    except PxrsError as error:
        tell_error(error_text(error), type(error).__name__)
        if is_wrong_argument(error):
            raise typer.Exit(EXIT_USAGE) from None
        raise typer.Exit(EXIT_FINAL if is_final(error) else EXIT_FAILED) from None
