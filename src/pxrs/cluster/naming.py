"""The id of the cluster that a registry belongs to."""

from __future__ import annotations

import contextlib
import json
import uuid

from pxrs.cluster.records import CLUSTER_ID
from pxrs.errors import Conflict, OutcomeUnknown, RegistryCorrupt
from pxrs.registry.contract import ABSENT, Registry


def cluster_id(registry: Registry) -> str:
    """The cluster's id; creates one if the registry has none. Raises RegistryError."""
    found = known_cluster_id(registry)
    while found is None:
        made = json.dumps({"id": uuid.uuid4().hex}).encode()
        with contextlib.suppress(Conflict, OutcomeUnknown):  # the id exists, or the outcome is unknown: read it
            registry.commit(expect={CLUSTER_ID: ABSENT}, put={CLUSTER_ID: made})
        found = known_cluster_id(registry)
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
