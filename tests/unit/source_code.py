"""The modules of `src/pxrs` as syntax trees, for the tests that read code."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "pxrs"


@cache
def paths() -> tuple[Path, ...]:
    return tuple(sorted(SOURCE.rglob("*.py")))


@cache
def trees() -> dict[Path, ast.Module]:
    """By path. All are parsed at once with the garbage collector off: it would look at a million nodes again and again,
    which takes twice as long as parsing, and none of them is garbage. For the same reason they are frozen: else each
    `gc.collect` of a later test takes a second."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        found = {path: ast.parse(path.read_text()) for path in paths()}
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
    return found
