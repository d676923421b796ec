"""Many batches become part of topics at one moment.

Tasks write batches into staging files (`staging.py`). One commit to the registry, the manifest (`manifest.py`), makes
all of them part of their topics and moves the checkpoints of the group that they were read with. `query.py` is the
reading side: a streaming query as a member of a group; `planning.py` decides which offsets a batch reads; `outage.py`
repeats registry calls while the lease allows it. Spark's source and sink are one user of this package.
"""
