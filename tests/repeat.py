"""Runs `make test` several times and tabulates the runs: `python -m tests.repeat --idle 7 --busy 3`.

A run is busy if two processes that only compute and one that syncs a file again and again run beside it. Each run is
added to `--into`, with the state of `src` that it has tested; the table shows the runs of the present state, because a
change of product code starts the count again. `--table` only prints it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SPIN = "while True: pass"
SYNC = """
import os, sys
with open(sys.argv[1], "wb") as file:
    while True:
        file.seek(0)
        file.write(bytes(1 << 16))
        file.flush()
        os.fsync(file.fileno())
"""
LIMITS_S = {"idle": 15 * 60, "busy": 25 * 60}
"""After this time a run is interrupted, and has failed."""


@dataclass(frozen=True, slots=True)
class Run:
    source: str
    """The id that git has for `src`."""
    began: str
    kind: str
    load: float
    """The system's load of the last minute when the run began."""
    wall_s: float
    cpu_s: float
    """Of `make` and all processes below it, in user and system mode."""
    code: int
    summary: str
    """pytest's last line, or what ended the run."""
    failed: tuple[str, ...]


@contextlib.contextmanager
def load(kind: str) -> Iterator[None]:
    """Keep the machine busy, if it is to be."""
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        scripts = [[SPIN], [SPIN], [SYNC, f"{folder}/synced"]] if kind == "busy" else []
        processes = [subprocess.Popen([sys.executable, "-c", *script]) for script in scripts]
        try:
            yield
        finally:
            for process in processes:
                process.kill()
                process.wait()


def run(kind: str, log: Path) -> Run:
    """One run of `make test`, whose output goes to `log`."""
    began, load_before = time.strftime("%Y-%m-%d %H:%M"), os.getloadavg()[0]
    start = time.monotonic()
    with load(kind), log.open("wb") as output:
        process = subprocess.Popen(
            ["make", "test"], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        until = start + LIMITS_S[kind]
        code = None
        while code is None:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                process.returncode = code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                until = float("inf")
                process.terminate()
            else:
                time.sleep(0.5)
    wall_s = time.monotonic() - start
    lines = log.read_text(errors="replace").splitlines()
    results = [line.strip("= ") for line in lines if re.search(r"\d+ (passed|failed|error).* in [\d.]+s", line)]
    failed = tuple(line[:200] for line in lines if line.startswith(("FAILED ", "ERROR ", "a process was left")))
    summary = results[-1] if results else (lines[-1] if lines else "no output")
    return Run(source(), began, kind, load_before, wall_s, usage.ru_utime + usage.ru_stime, code, summary, failed)


def source() -> str:
    """The id that git has for `src`, with `+` if `src` was changed since."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short=10", "HEAD:src") + ("+" if git("status", "--porcelain", "src") else "")


def as_minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def table(runs: list[Run]) -> str:
    lines = [
        "| run | began | machine | load before | wall | CPU | result |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, each in enumerate(runs, 1):
        times = [as_minutes(seconds) for seconds in (each.wall_s, each.cpu_s)]
        result = f"exit {each.code}: {each.summary}" + "".join(f"; {name}" for name in each.failed)
        lines.append(f"| {number} | {each.began} | {each.kind} | {each.load:.1f} | {' | '.join(times)} | {result} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--idle", type=int, default=0)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--into", type=Path, default=ROOT / ".runs")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    given.into.mkdir(exist_ok=True)
    records = given.into / "runs.jsonl"
    kinds = ["idle"] * given.idle + ["busy"] * given.busy
    for kind in [] if given.table else kinds:
        found = run(kind, given.into / f"{time.strftime('%Y%m%d-%H%M%S')}-{kind}.log")
        with records.open("a") as file:
            file.write(json.dumps(asdict(found)) + "\n")
        sys.stdout.write(table([found]) + "\n")
        sys.stdout.flush()
    runs = [Run(**json.loads(line)) for line in records.read_text().splitlines()] if records.exists() else []
    shown = [each for each in runs if each.source == source()]
    sys.stdout.write(f"\nRuns of src {source()}:\n\n{table(shown)}\n")
    return 0 if all(each.code == 0 for each in shown) else 1


if __name__ == "__main__":
    sys.exit(main())
