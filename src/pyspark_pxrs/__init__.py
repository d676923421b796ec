"""Spark looks for packages named like this one, and finds `format("pxrs")` with no registration."""

from pxrs.spark.source import PxrsSource as DefaultSource

__all__ = ["DefaultSource"]
