"""`pxrs.open`: the hub of an address."""

from __future__ import annotations

import os
from datetime import timedelta

from pxrs import arguments
from pxrs.address import LazyRegistry, open_log
from pxrs.errors import InvalidArgument, InvalidQueue, InvalidUrl
from pxrs.hub import Hub
from pxrs.open_hub import LEASE_TTL_DEFAULT
from pxrs.registry.lease import LEASE_TTL_MIN


def open(
    url: str | os.PathLike[str] | None = None,
    registry: str | os.PathLike[str] | None = None,
    *,
    lease_ttl: float | timedelta = LEASE_TTL_DEFAULT,
    upkeep: bool = True,
) -> Hub:
    """Open a hub: a log and its registry.

    url:       a directory, `memory:` for this process alone, or `pxrs://HOST:PORT` for the hub of a server
               (docs/serve.md). The first `create_topic` makes the directory. Without a url, `registry` must be given:
               such a hub has the queues of that registry and the groups of sources other than topics; calls that need
               topics raise NoDirectory.
    registry:  the address of the store that keeps the coordination, as `pxrs.registry.open` takes it. By default it is
               kept with the messages. Not with `pxrs://`: the server provides the registry of its hub.
    lease_ttl: how long after its last renewal the lease of this process ends; then other processes get the queue items
               that it has taken.
    upkeep:    whether this hub may be elected to do the upkeep of its directory, such as retention: see `pxrs.upkeep`.
    """
    ttl = arguments.seconds(InvalidQueue, "lease_ttl", lease_ttl, LEASE_TTL_MIN, arguments.DAY_S)
    arguments.flag(InvalidArgument, "upkeep", upkeep)
    given = None if registry is None else LazyRegistry(registry)
    if url is None:
        if given is None:
            raise InvalidUrl("the url is missing: give a directory, memory:, or registry=... for queues alone")
        from pxrs.log.absent import AbsentLog

        return Hub(AbsentLog(given.shown), given, lease_ttl=ttl, upkeep=upkeep)
    log = open_log(url)
    if given is None:
        if log.own_registry is None:
            log.close()
            raise InvalidUrl(f"{log.url} has no registry of its own: pass the registry's address as registry=...")
        given = LazyRegistry(log.own_registry)
    elif log.is_kept_by_server:
        log.close()
        raise InvalidUrl(
            f"{log.url}: the server provides the registry of its hub: do not pass one (registry=..., --registry, "
            "PXRS_REGISTRY)"
        )
    return Hub(log, given, lease_ttl=ttl, upkeep=upkeep)
