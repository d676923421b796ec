"""Queues that people already have, read in virtual partitions by the groups of pxrs (X21)."""

from __future__ import annotations

# The function takes the place of its module here; `import pxrs.sources.sql_table` does not bring that back.
from pxrs.sources.sql_table import SqlTable, Stretch, sql_table

__all__ = ["SqlTable", "Stretch", "sql_table"]
