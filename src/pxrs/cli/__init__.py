"""The command line: `pxrs`. It prints for people, and JSON for machines with `--json`.

Nothing is loaded here: a worker's process imports its own module, and none of the commands."""
