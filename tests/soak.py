"""Runs every test with the numbers of a soak run, a part at a time: `python -m tests.soak`, which is `make soak`.

A part is a file whose tests have larger numbers in a soak run, or the other files of a folder. Each part runs in a
pytest of its own, `AT_A_TIME` beside each other, with its output in a file below `--into`. The result of a part is
recorded when it ends, with the state of `src` that it has tested: a soak run that was interrupted goes on with the
parts that have not passed, and a change of product code starts it again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final

from tests.repeat import ROOT, as_minutes, source

AT_A_TIME: Final = 2
"""On two cores. The fault tests have limits for what must go on between two faults, so more of them would fail."""
FOLDERS: Final = ("acceptance", "integration", "contract", "simulation", "unit")
ALONE: Final = "tests/integration/cluster/test_times.py"
"""Measures times, so it runs last and with nothing beside it."""
POLL_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Result:
    source: str
    """The id that git has for `src`."""
    part: str
    began: str
    wall_s: float
    cpu_s: float
    """Of pytest and all processes below it, in user and system mode."""
    code: int
    summary: str
    """pytest's last line."""


@dataclass(slots=True)
class Running:
    part: str
    process: subprocess.Popen[bytes]
    log: Path
    began: str
    start: float


def parts() -> dict[str, list[str]]:
    """The files of each part, by its name. `ALONE` is the last one."""
    found: dict[str, list[str]] = {}
    others: dict[str, list[str]] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / "tests" / folder).rglob("test_*.py")):
            name = str(path.relative_to(ROOT))
            if name != ALONE and "SOAK" in path.read_text():
                found[name] = [name]
            elif name != ALONE:
                others.setdefault(f"others of tests/{folder}", []).append(name)
    return found | others | {ALONE: [ALONE]}


def begin(part: str, files: list[str], into: Path) -> Running:
    log = into / (part.replace("/", ".").replace(" ", "-") + ".log")
    command = [sys.executable, "-m", "tests.run", "-p", "no:cacheprovider", "--durations", "20", *files]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PXRS_SOAK": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return Running(part, process, log, time.strftime("%Y-%m-%d %H:%M"), time.monotonic())


def ended(running: Running) -> Result | None:
    """The result of a part that has ended; None if it still runs."""
    pid, status, usage = os.wait4(running.process.pid, os.WNOHANG)
    if not pid:
        return None
    running.process.returncode = os.waitstatus_to_exitcode(status)
    lines = running.log.read_text(errors="replace").splitlines()
    summary = next((line.strip("= ") for line in reversed(lines) if line.startswith("=")), "no output")
    return Result(
        source(),
        running.part,
        running.began,
        time.monotonic() - running.start,
        usage.ru_utime + usage.ru_stime,
        running.process.returncode,
        summary,
    )


def run(files: dict[str, list[str]], into: Path, records: IO[str]) -> list[Result]:
    """Run the parts, in their order, and record and print each result."""
    left, running, results = list(files), list[Running](), list[Result]()
    try:
        while left or running:
            while left and len(running) < AT_A_TIME and (left[0] != ALONE or not running):
                running.append(begin(left[0], files[left.pop(0)], into))
            for each in list(running):
                if (result := ended(each)) is None:
                    continue
                running.remove(each)
                results.append(result)
                records.write(json.dumps(asdict(result)) + "\n")
                records.flush()
                told = f"see {each.log}" if result.code else ""
                say(f"{as_minutes(result.wall_s):>7}  {result.part}: {result.summary} {told}")
            time.sleep(POLL_S)
    finally:
        for each in running:
            each.process.terminate()
        for each in running:
            each.process.wait()
    return results


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=ROOT / ".runs" / "soak")
    parser.add_argument("--again", action="store_true", help="run the parts that have passed, too")
    parser.add_argument("parts", nargs="*", help="run these alone (a text that their names contain)")
    given = parser.parse_args()
    given.into.mkdir(parents=True, exist_ok=True)
    path = given.into / "parts.jsonl"
    recorded = [Result(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    passed = {each.part: each for each in recorded if each.source == source() and each.code == 0}
    files = parts()
    chosen = {part: names for part, names in files.items() if not given.parts or any(t in part for t in given.parts)}
    todo = {part: names for part, names in chosen.items() if given.again or part not in passed}
    say(f"{len(todo)} of {len(files)} parts to run; {len(passed)} have passed for src {source()}")
    start = time.monotonic()
    with path.open("a") as records:
        results = run(todo, given.into, records)
    failed = [each.part for each in results if each.code]
    passed |= {each.part: each for each in results if not each.code}
    total_s, cpu_s = (sum(getattr(each, name) for each in passed.values()) for name in ("wall_s", "cpu_s"))
    say(f"\nran for {as_minutes(time.monotonic() - start)}; {len(passed)} of {len(files)} parts have passed, in")
    say(f"{as_minutes(total_s)} if one ran after the other, with {as_minutes(cpu_s)} of CPU time")
    for part in failed:
        say(f"failed: {part}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
