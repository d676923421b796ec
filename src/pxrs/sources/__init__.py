"""Sources: queues that people already have, read by consumer groups as if they were topics (X21).

`pxrs.log.contract.Source` says what a source is: partitions, offsets, `bounds`, `read`, `fetch`, `subscribe`. The
topics of a hub are sources; this package has the others.

- `sql_table` reads a table with a rising integer id, which stays as it is. Its package says how it avoids passing over
  rows whose transaction commits late; start with `sql_table/source.py`.
- `catalog` keeps registered sources under names, without credentials, so that every process of a hub finds them.
- `PollingSource` is the base of a source of one's own (docs/writing-a-source.md).

What every source promises: a message that was read once is there, at the same offset, until it is removed for good;
no message appears later at an offset that a reader has passed. A group's checkpoint relies on both. The suite
`pxrs.testing.source_contract` tests what can be tested of it.
"""

from __future__ import annotations

from pxrs.sources.polling import PollingSource

# The function takes the place of its module here; `import pxrs.sources.sql_table` does not bring that back.
from pxrs.sources.sql_table import SqlTable, Stretch, sql_table

__all__ = ["PollingSource", "SqlTable", "Stretch", "sql_table"]
