"""The transactional work queue: items taken and put together or not at all, over any registry.

What it promises:
- Nothing lost, nothing doubled: an item is in exactly one state at every moment (ready, in flight, delayed, dead), and
  leaves its queue only with the commit of the transaction that took it. A commit happens as a whole or not at all.
- A delivery is counted, durably, before it happens, and no item is delivered more often than its queue's policy allows.
- A FIFO queue has one transaction at a time, which takes the first items.
- A process that dies, or loses its lease, loses what it has taken: others get the items, and its commit is refused.
- A commit whose reply was lost is resolved for good: committed, or never to be.

Where to start reading: `states` has the states of items and transactions as tables, and `records` the keys in the
registry. `protocol` has what a transaction says to the registry, step by step, `sweeping` what the sweeper says, and
`outcomes` how a lost reply is resolved; they do no I/O, and the simulator runs them. `transaction`, `taking`, `head`,
`taker` and `keeper` run them for the threads of a process, `combine` merges the commits of several threads, and `store`
holds all that a hub's queues share. Users meet `handle` (a queue), `transaction` and `listener` (handlers on threads).
docs/queues.md is for them.
"""
