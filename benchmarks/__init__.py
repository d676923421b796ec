"""Benchmarks: each prints a ratio against a reference that is measured in the same run, and says what it measured."""
