"""Spark as the engine of pipelines over the log: `format("pxrs")`, a session that works, and pipelines."""

from pxrs.spark.session import session

__all__ = ["session"]
