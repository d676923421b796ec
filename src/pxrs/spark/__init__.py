"""Topics in Spark: the data source `format("pxrs")`, pipelines, and a session that finds Java.

This package adapts Spark's interfaces to the packages below it, and holds no rules of its own: which offsets a batch
reads and when a batch counts is decided in `pxrs.publishing`.

    source.py       `format("pxrs")`: what Spark finds under that name
    options.py      the options of readers and writers as values; names.py: what the option `topic` names
    reader.py       planning in the driver; tasks.py: reading a topic in tasks; table.py: reading a registered table
    writer.py       staging in tasks, publishing in the driver (publishers.py); sink_columns.py: the columns of a write
    numbered.py     writes that may be repeated; updates.py: output mode `update` by them; threads.py: writes in threads
    columns.py      the columns of a message in Spark and in Arrow
    pipeline.py     functions on DataFrames as pipelines; parsing.py: JSON values as columns; run.py: running pipelines
    state.py        which queries keep state
    session.py      a Spark session; java.py and home.py: the Java and the Spark home that it uses

What it promises: a streaming query is a fenced member of its group, and what Spark has committed becomes the group's
checkpoint; rows that are written to a topic of the same registry are there exactly once; no address of a registry is
sent to a task. Start reading at `reader.StreamReader` and `writer.StreamWriter`.
"""

from pxrs.spark.parsing import ParseJson, parse_json
from pxrs.spark.pipeline import HubAddress, Pipeline, Sink, SparkOption, as_messages, parquet, pipeline, to
from pxrs.spark.session import session
from pxrs.spark.state import refuse_shared_state, stateful_operators
from pxrs.spark.threads import use_in_thread
from pxrs.spark.updates import stream_updates

__all__ = [
    "HubAddress",
    "ParseJson",
    "Pipeline",
    "Sink",
    "SparkOption",
    "as_messages",
    "parquet",
    "parse_json",
    "pipeline",
    "refuse_shared_state",
    "session",
    "stateful_operators",
    "stream_updates",
    "to",
    "use_in_thread",
]
