"""The garbage collector of Spark's Python workers.

A worker of pyspark runs many tasks, and makes a full garbage collection after each of them (`pyspark/daemon.py`). A
collection visits every container object of the process, and nearly all of them belong to imported modules, which stay
until the process ends. `gc.freeze` takes the objects that exist out of all later collections.
"""

from __future__ import annotations

import functools
import gc
import os
from typing import Final

_REUSED: Final = "SPARK_REUSE_WORKER"
"""Spark sets this variable for workers that run more than one task."""


@functools.cache
def freeze_imports() -> bool:
    """Exempt what this worker has imported from garbage collections, once in each process. Call it in a task, after the
    imports of the task's code. Returns False in a worker that ends after one task: there it would have no
    effect.

    Only once, because a frozen object that is part of a reference cycle is never freed: each further call could keep
    such objects of the task that is running. For the same reason the garbage of earlier tasks is collected first."""
    if not os.environ.get(_REUSED):
        return False
    # Tasks import this module when they read their first rows. It is imported now, so that it is frozen too.
    import pyarrow.compute  # noqa: F401

    gc.collect()
    gc.freeze()
    return True
