"""A copy of a topic in a process of its own, in small pieces: it prints a line after each of them.

    python copying_process.py SOURCE_URL TARGET_URL PARTITIONS ROWS

Copies `orders` into `copy`. ROWS: how many messages a piece has at most. A line fills a pipe of LINE_BYTES, so whoever
reads the lines from such a pipe decides how far the copy comes.
"""

from __future__ import annotations

import sys

import pxrs
from pxrs.copying import pieces

LINE_BYTES = 4096


def main() -> None:
    at, to, partitions, rows = sys.argv[1:]
    pieces.PIECE_ROWS = int(rows)  # type: ignore[misc]
    with pxrs.open(at, upkeep=False) as hub, pxrs.open(to, upkeep=False) as other:
        done = hub.copy_topic(
            "orders",
            "copy",
            to=other,
            partitions=int(partitions),
            on_progress=lambda done: print(str(done.offsets).ljust(LINE_BYTES - 1), flush=True),  # noqa: T201
        )
    print("done", done.messages, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
