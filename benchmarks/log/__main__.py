"""Runs all of it, or the parts that are named: `python -m benchmarks.log --gigabytes 10 opening`."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from rich.console import Console

from benchmarks.log import embedded, nats_jetstream, opening, reading, redis_streams, sending, waking
from benchmarks.tables import Part, print_rows, rate


def main() -> None:
    options = _options()
    rates: dict[str, Part] = {
        "sending": sending.measure,
        "reading": reading.measure,
        "sqlite": embedded.measure,
        "redis": redis_streams.measure,
        "nats": nats_jetstream.measure,
    }
    times: dict[str, Part] = {
        "opening": functools.partial(opening.measure, gigabytes=options.gigabytes),
        "waking": waking.measure,
    }
    unknown = set(options.parts) - {*rates, *times}
    if unknown:
        raise SystemExit(f"no part {', '.join(sorted(unknown))}; choose from {', '.join((*rates, *times))}")
    console = Console()
    title = "the log in a directory, messages a second: an embedded log, synced; Redis and NATS are servers, not synced"
    for table_title, parts, show in ((title, rates, rate), ("the log in a directory, time for one", times, _time)):
        print_rows(console, table_title, parts, options.parts or parts, show, options.folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.log", description=__doc__)
    parser.add_argument("parts", nargs="*", help="which to run; all if none is named")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the partition that is opened")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; the system's temporary one by default")
    return parser.parse_args()


def _time(per_s: float | None) -> str:
    return "" if per_s is None else f"{1000 / per_s:,.2f} ms"


if __name__ == "__main__":
    main()
