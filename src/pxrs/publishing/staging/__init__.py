"""Where tasks put the rows of a batch until the batch is part of its topics.

`contract.py` and `files.py` say what every staging place offers: `TaskStaging` is the part that a task uses on an
executor, `Staging` adds what the driver uses to publish, list, read and remove. `directory.py` stages in files beside
the log of a hub in a directory, in the format of `frames.py`. `served.py` stages there from other hosts, through the
server of the hub. `routing.py` stages the rows of a task, for one topic or for those that the rows name, `rows.py` cuts
them into pieces for partitions and encodes them for the log, and `appends.py` appends the pieces of a batch to a topic:
these three are the same for every staging place.

What a staging place promises:

- If staging fails, nothing is left of what the task has staged for any topic.
- A staged file survives a power loss once `make_durable` has returned True for it.
- `pieces` returns the pieces of a staged file in the same order each time, in every process.
- `sweep` removes nothing that a manifest names and that is not published yet.
"""
