"""Writing from threads that a program starts itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def use_in_thread(session: SparkSession) -> None:
    """Make this thread find `format("pxrs")` in `write` and `writeStream`. Call it once in each thread that writes,
    other than the main one:

        with ThreadPoolExecutor(4, initializer=use_in_thread, initargs=(spark,)) as pool: ...

    Spark looks for the Python data sources of a write in the active session of the JVM's thread, and a thread of Python
    has a JVM thread of its own, which has none: without this call the write fails with DATA_SOURCE_NOT_FOUND. That
    concerns every Python data source. Spark Connect needs no such call; there this does no harm."""
    # Of the public calls of PySpark 4.3, only this one sets the active session of an existing thread.
    session.createDataFrame([], "value BINARY")
