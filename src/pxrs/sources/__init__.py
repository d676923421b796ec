"""Sources other than topics: tables and queues that a program already has, read by consumer groups like topics (X21).

`pxrs.log.contract.Source` says what a source is: partitions, offsets, `bounds`, `read`, `fetch`, `subscribe`. The
topics of a hub are sources; this package has the others.

- `sql_table` reads a SQL table with a rising integer id, and changes nothing in it. Its package says how it avoids
  passing over rows whose transaction commits late; start with `sql_table/source.py`.
- `catalog` keeps registered sources under names, without credentials, so that every process of a hub finds them.
- `PollingSource` is the base class for a source of your own (docs/writing-a-source.md).

What every source promises: a message that was read once is found at the same offset until it is removed for good, and
no message appears later at an offset that a reader has passed. A group's checkpoint relies on both. The suite
`pxrs.testing.source_contract` tests what can be tested of it.
"""

from __future__ import annotations

from pxrs.sources.polling import PollingSource

# Here `sql_table` is the function, which hides the module of the same name, also after `import pxrs.sources.sql_table`.
from pxrs.sources.sql_table import SqlTable, Stretch, sql_table

__all__ = ["PollingSource", "SqlTable", "Stretch", "sql_table"]
