"""A home directory for Spark whose Python parts are folders instead of archives.

Spark puts two archives first in the path of every Python process that it starts. They hold only sources, which each
process compiles again, for half a second: at the start of every streaming query, and for the first worker of each kind.
The installed packages have the same sources, and the byte code that Python has compiled from them.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_PARTS: Final = ("bin", "conf", "jars", "sbin")


@contextmanager
def quick_home(master: str) -> Iterator[None]:
    """Set SPARK_HOME to such a home within the block, if the master is local and SPARK_HOME is not set.

    Only within the block, in which a session starts: the home is removed when this process ends, so processes that are
    started from here later must not use it."""
    home = _linked() if master.startswith("local") and "SPARK_HOME" not in os.environ else None
    if home is None:
        yield
        return
    os.environ["SPARK_HOME"] = str(home)
    try:
        yield
    finally:
        del os.environ["SPARK_HOME"]


@functools.cache
def _linked() -> Path | None:
    folder = Path(tempfile.mkdtemp(prefix="pxrs-spark-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        return folder if link_home(folder) else None
    except OSError:  # a file system without links: Spark works without this home too, only slower
        return None


def link_home(folder: Path) -> bool:
    """Make the folder a home of the installed Spark, by links. False if the installed pyspark has no `jars`."""
    spark = _installed("pyspark")
    if spark is None or not (spark / "jars").is_dir():
        return False
    for part in _PARTS:
        if (spark / part).exists():
            (folder / part).symlink_to(spark / part)
    for archive in (spark / "python" / "lib").glob("*.zip"):
        name = archive.stem.partition("-")[0]
        place = folder / "python" / "lib" / archive.name
        place.parent.mkdir(parents=True, exist_ok=True)
        package = _installed(name)
        if package is None:
            place.symlink_to(archive)
        else:
            place.mkdir()
            (place / name).symlink_to(package)
    return True


def _installed(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent
