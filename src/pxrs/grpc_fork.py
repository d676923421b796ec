"""Processes that fork while they use gRPC.

The problem: by default gRPC's C core reinitialises itself in a forked child, and gRPC's Python layer does not. Children
of a process that talks to etcd then crash now and then, whether they use gRPC or not (grpcio 1.85, three busy
registries: 2 of 40 children that did nothing, 11 of 40 that opened a registry of their own).

So gRPC's handling of forks is switched off, unless the user has set the switch: a child that does not use gRPC is safe,
and one that opens a registry on etcd or a hub of `pxrs serve`, which would hang, gets UsedAfterFork at once (R11). The
switch is an environment variable that gRPC reads when it is first imported; it is set only during that import. So
every module of pxrs that uses gRPC imports this one first.

If another library has imported gRPC before, its handling of forks stays on: the switch has no effect afterwards. Then
the parent is at risk too. Of 360 forks while it read a range from a server in another process, 19 left its connection
without messages until the pings of gRPC timed out after 5 s, and it was made anew; with the switch off, none of 300.
With the server in the same process, both ends of the connection may hang. docs/serve.md says what a user can do.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os

from pxrs.errors import UsedAfterFork

VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"
_started_in: int | None = None


def import_grpc() -> None:
    """Import gRPC with the switch off. Without effect if the user has set it, or somebody has imported gRPC before."""
    if VARIABLE in os.environ:
        importlib.import_module("grpc")
        return
    os.environ[VARIABLE] = "0"
    try:
        importlib.import_module("grpc")
    finally:
        del os.environ[VARIABLE]


def check(what: str) -> None:
    """Raise UsedAfterFork in a child of the process that began to use gRPC. what: what is to be opened."""
    global _started_in
    if _started_in is None:
        _started_in = os.getpid()
    if _started_in != os.getpid() and os.environ.get(VARIABLE, "").lower() not in ("1", "true", "yes"):
        raise UsedAfterFork(
            f"{what}: this process was forked from one that uses gRPC, which cannot be used in the child: start "
            "processes with 'spawn' or 'forkserver', or fork before the first registry on etcd or hub of `pxrs serve` "
            "is opened"
        )


@functools.cache
def freeze_in_children() -> None:
    """From now on, forked children of this process do not collect the garbage that they inherit. A server of `grpc.aio`
    that the parent has stopped may be part of it. Its finalizer waits for a thread that only the parent has, so the
    child would never go on."""
    os.register_at_fork(after_in_child=gc.freeze)


import_grpc()
