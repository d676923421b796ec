"""The replicated cluster: brokers that own partitions, and storage nodes that keep copies of their entries.

A partition is a chain of ledgers; each ledger is written by one claim of one broker to several storage nodes. The rules
(C1 to C6 of the protocol) are in pure modules without I/O, clock or thread, which take messages and return actions:

    ledgers       a ledger's record: its copies, its states, and the transitions between them
    records       the other keys and values of the cluster in the registry
    replication   the writer of a ledger: which copies where, when is an entry confirmed
    recovery      where does a ledger end whose writer is gone
    copies        what is under-replicated, and which copy is made next
    placement     which node, which broker
    storage.core  one storage node: adds, fences, reads, garbage; whether a disk is that of the node that it names

`pxrs.testing.simulator.cluster_simulation` runs whole clusters on exactly these modules.
"""
