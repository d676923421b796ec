"""Spark as the engine of pipelines over the log: `format("pxrs")`, a session that works, and pipelines."""

from pxrs.spark.parsing import ParseJson, parse_json
from pxrs.spark.pipeline import HubAddress, Pipeline, Sink, SparkOption, as_messages, parquet, pipeline, to
from pxrs.spark.session import session
from pxrs.spark.state import refuse_shared_state, stateful_operators

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
    "to",
]
