"""Imported by every Python process whose path has this folder: notes what the process opens below a directory.

EXECUTOR_AUDIT names a file, and EXECUTOR_AUDIT_FORBIDDEN the directory. Each process writes one line when it starts,
and one for each event that names a path below the directory. The hook cannot be removed, and forked processes inherit
it. pyarrow opens files without an event of Python, so its functions that take a path are replaced.
"""

import os
import sys
from typing import Any


def watch(file: str, forbidden: str) -> None:
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(event: str, what: object) -> None:
        os.write(output, f"{os.getpid()} {event} {what}\n".encode())

    def look(event: str, given: tuple[object, ...]) -> None:
        for each in given:
            if isinstance(each, str | bytes | os.PathLike):
                path = os.path.abspath(os.fsdecode(each))
                if path == forbidden or path.startswith(f"{forbidden}/"):
                    note(event, path)

    def watched(function: Any, name: str) -> Any:
        def call(path: Any, *given: Any, **named: Any) -> Any:
            look(f"pyarrow.{name}", (path,))
            return function(path, *given, **named)

        return call

    sys.addaudithook(look)
    import pyarrow as pa

    for name in ("memory_map", "OSFile"):
        setattr(pa, name, watched(getattr(pa, name), name))
    note("start", sys.argv)


if "EXECUTOR_AUDIT" in os.environ:
    watch(os.environ["EXECUTOR_AUDIT"], os.environ["EXECUTOR_AUDIT_FORBIDDEN"])
