"""Publishing: many staged batches become part of their topics at one moment.

A streaming query reads a topic as a member of a group and writes to another topic. Its work is cut into batches, and
each batch into tasks that run in other processes, fail, and are repeated. This package makes each batch count exactly
once (K1 to K3). It does not import Spark, whose source and sink (`pxrs.spark`) are its first users. Its callers pass
the log, the registry and the staging place.

The reading side:

    selection.py    which topics are read, and where the reading begins and ends, as the user has given it
    planning.py     pure functions: which offsets a batch reads, and whose checkpoint counts after a restart
    starting.py     the offset at which a partition without a checkpoint begins
    offsets.py      pure: the offset of a query as the engine stores it
    membership.py   the query as a member of its group: lease, lanes, checkpoints
    query.py        what a streaming engine calls: how far the next batch reads, and which ranges a batch has

The writing side:

    feed.py         which offsets a batch reads: passed from the source of a query to its sink
    staging/        where tasks put rows until they are published: a contract, and its implementations
    refusals.py     errors of publishing, with advice
    records.py      the manifest in the registry, the states that it goes through, and what to do in each of them
    manifest.py     `Publisher`: commits a manifest together with the group's checkpoints, then appends the staged rows
    forgetting.py   removes what deleted topics leave

What it promises:

- A batch is part of its topics from the commit of its manifest on, and before that it is not, whatever is staged.
- The same commit moves the group's checkpoints, fenced by the owner keys, if group and topic are in one registry.
- Whoever finishes a manifest, and however often, stores each row once. Readers may see a part of a batch for a moment,
  because its pieces are appended one after the other.

Start reading at `records.py` (the states) and `Publisher.publish`; for the reading side, at `Query.latest`.
"""
