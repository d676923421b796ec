"""The id of the cluster that a registry belongs to."""

from __future__ import annotations

import json
import uuid

from pxrs.cluster.records import CLUSTER_ID
from pxrs.errors import Conflict, OutcomeUnknown, RegistryCorrupt, RegistryError
from pxrs.registry.contract import ABSENT, Registry


def cluster_id(registry: Registry) -> str:
    """The cluster's id; creates one if the registry has none. May be called again after any error: the commit expects
    that there is no id, so the first one that lands is the cluster's id for ever. Raises RegistryError, OutcomeUnknown
    if an id may have been created and cannot be seen yet."""
    found = known_cluster_id(registry)
    if found is not None:
        return found
    unseen: RegistryError
    try:
        made = json.dumps({"id": uuid.uuid4().hex}).encode()
        registry.commit(expect={CLUSTER_ID: ABSENT}, put={CLUSTER_ID: made})
        unseen = OutcomeUnknown(
            "another process removed the id of the cluster while this one was starting: start it again"
        )
    except (Conflict, OutcomeUnknown) as error:
        unseen = error
    found = known_cluster_id(registry)
    if found is None:
        raise unseen
    return found


def known_cluster_id(registry: Registry) -> str | None:
    """The cluster's id; None if the registry has none, for example because it was emptied."""
    entry = registry.get(CLUSTER_ID)
    if entry is None:
        return None
    try:
        return str(json.loads(entry.value)["id"])
    except (KeyError, TypeError, ValueError) as error:
        raise RegistryCorrupt(CLUSTER_ID, f"the value is not the id of a cluster: {error!r}") from error
