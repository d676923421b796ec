"""The command line: `pxrs`. It prints text for people, and JSON for machines with `--json`.

This module imports nothing: a worker's process imports its own module, and none of the commands."""
