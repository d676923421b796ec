"""Topics in Spark: the data source `format("pxrs")`, pipelines, and a session that finds Java.

This package adapts Spark's interfaces to the packages below it, and holds no rules of its own: which offsets a batch
reads and when a batch counts is decided in `pxrs.publishing`.

    source.py       `format("pxrs")`: what Spark finds under that name
    options.py      the options of readers and writers as values; option_names.py: their names; given.py: their texts;
                    names.py: which topics or registered source they name
    reader.py       planning in the driver; tasks.py: reading a topic in tasks; table.py: reading a registered table
    writer.py       staging in tasks, publishing in the driver (publishers.py); sink_columns.py: the columns of a write
    numbered.py     writes that may be repeated; updates.py: output mode `update` by them; threads.py: writes in threads
    columns.py      the columns of a message in Spark and in Arrow
    pipeline.py     functions on DataFrames as pipelines; subscription.py and sinks.py: what they read and write
    parsing.py      JSON values as columns; rejecting.py: rows that a function rejects; letters.py: bad rows as messages
    run.py          running pipelines; watch.py: the reports of Spark about its queries; progress.py: these as values
    state.py        which queries keep state
    session.py      a Spark session; java.py and home.py: the Java and the Spark home that it uses

What it promises: a streaming query is a fenced member of its group, and what Spark has committed becomes the group's
checkpoint; rows that are written to a topic of the same registry are there exactly once; no address of a registry is
sent to a task. Start reading at `reader.StreamReader` and `writer.StreamWriter`.
"""

from pxrs.publishing.selection import Topics
from pxrs.spark.parsing import ParseJson, parse_json
from pxrs.spark.pipeline import Pipeline, pipeline
from pxrs.spark.progress import BatchReport, TopicProgress
from pxrs.spark.rejecting import reject
from pxrs.spark.session import session
from pxrs.spark.sinks import HubAddress, Sink, SparkOption, as_messages, parquet, to
from pxrs.spark.state import refuse_shared_state, stateful_operators
from pxrs.spark.subscription import topics_matching
from pxrs.spark.threads import use_in_thread
from pxrs.spark.updates import stream_updates
from pxrs.spark.watch import QueryReport, QueryWatch

__all__ = [
    "BatchReport",
    "HubAddress",
    "ParseJson",
    "Pipeline",
    "QueryReport",
    "QueryWatch",
    "Sink",
    "SparkOption",
    "TopicProgress",
    "Topics",
    "as_messages",
    "parquet",
    "parse_json",
    "pipeline",
    "refuse_shared_state",
    "reject",
    "session",
    "stateful_operators",
    "stream_updates",
    "to",
    "topics_matching",
    "use_in_thread",
]
