"""Where tasks put the rows of a batch until the batch is part of its topic.

`contract.py` says what every staging place offers: `TaskStaging` is the part that a task uses on an executor, `Staging`
adds what the driver uses to list, read and remove. `directory.py` stages in files beside the log of a hub in a
directory; a server or an object store can have an implementation of its own. `rows.py` cuts the rows of a task into
pieces for partitions and encodes them for the log, and is the same for every staging place. `frames.py` is the format
of a staged file.

What a staging place promises:

- A staged file survives a power loss once `make_durable` has returned True for it.
- `pieces` returns the pieces of a staged file in the same order each time, in every process.
- `sweep` removes nothing that a manifest names and that is not published yet.
"""
