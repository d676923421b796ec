"""The replicated cluster: brokers that own partitions, and storage nodes that keep copies of their entries.

A partition is a chain of ledgers; one broker writes each ledger, under one claim, to several storage nodes. The terms,
and the rules C1 to C6 that comments cite, are in docs/cluster.md. The rules are implemented by modules without I/O,
clock or threads, which take messages and return actions:

    ledgers       the record of a ledger: its nodes, its states, and the transitions between them
    records       the other keys and values of the cluster in the registry
    replication   the writer of a ledger: to which nodes it sends an entry, and when the entry is confirmed
    recovery      finds the last entry of a ledger whose writer has not closed it
    copies        which closed ledgers lack copies, and which entry is copied next
    placement     which storage nodes a ledger uses, and which broker claims a partition
    storage.core  one storage node: adds, fences, reads, garbage; under which id a directory starts

`pxrs.testing.simulator.cluster_simulation` simulates whole clusters with these modules.
"""
