"""Spark as the engine of pipelines over the log."""
