"""Consumer groups: which member owns which partition, and where the group goes on reading.

Members share nothing but the registry. Each has a lease; one of them leads, and writes which partitions each should
own; every member claims and releases partitions by itself, with commits that expect what it has read.

What it promises:
- A partition has one owner at a time, and a checkpoint of a former owner is refused, however late it arrives: the fence
  is in the write (`checkpoints.py`).
- A partition that moves between living members is released with its last checkpoint before it is claimed, unless its
  owner takes longer than its own hand-over time.
- Nothing is skipped: the first checkpoint of every partition is written before a join is over (`joining.py`).
- What a rebalance costs a member grows with what it gains and loses, except for the leader (`protocol.py`).
- A lost event, a lost reply or a process that dies between any two steps delays a group, and does not break it: members
  decide by what the registry holds, not by what they were told (`reconcile.py`).

Where to start reading: `records.py` for the keys, `reconcile.py` for the decisions, `protocol.py` for what is said to
the registry, `member.py` and `rounds.py` for the work that does it, `admin.py` for changing a group from outside. The
simulator (`pxrs.testing.simulator`) runs the protocol through seeded schedules of failures."""
