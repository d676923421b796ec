"""Where tasks leave the rows of a batch until the batch is part of its topic.

`contract.py` says what every staging place offers: `TaskStaging` is the part that a task uses on an executor, `Staging`
adds what the driver uses to list, read and remove. `directory.py` stages in files beside the log of a hub in a
directory; a server or an object store can bring an implementation of its own. `rows.py` cuts the rows of a task into
pieces for partitions, and is the same for every staging place.

What a staging place promises:

- Rows that `stage` has returned for survive a power loss once `make_durable` has said yes.
- `chunks` returns the pieces of a staged file in the same order each time, whichever process asks.
- Nothing that a manifest names, and that is not published yet, is removed by `sweep`.
"""
