"""The errors with which a publisher refuses a batch. Each says what the user can do."""

from __future__ import annotations

from collections.abc import Mapping

from pxrs.errors import BatchRefused, Conflict, PartitionLost, PxrsError, RegistryCorrupt
from pxrs.group.checkpoints import FencedWrite, Outcome
from pxrs.publishing.planning import RESTART
from pxrs.publishing.records import Manifest
from pxrs.registry.contract import Entry


def load_own(entry: Entry) -> Manifest:
    """The manifest of the publisher's own query. Raises BatchRefused, with advice, if the manifest is damaged."""
    try:
        return Manifest.load(entry)
    except RegistryCorrupt as error:
        raise BatchRefused(
            f"the last batch that the query published is not known: {error}. Restore the key from a copy; or look at "
            "the end of the topic, delete the key, and start with a new checkpoint location"
        ) from error


def refusal(
    query: str, manifest: Manifest, conflict: Conflict, checkpoints: FencedWrite, names: Mapping[str, str]
) -> PxrsError:
    """The error for a commit of a manifest and checkpoints that has conflicted, although the manifest is unchanged:
    PartitionLost if a checkpoint or owner key has changed.

    names: by their ids, the names of the topics that the batch reads"""
    # STALE: somebody has written the checkpoint since this publisher read it.
    lost = [each for each, settled in checkpoints.settle(conflict) if settled.outcome in (Outcome.LOST, Outcome.STALE)]
    if lost:
        group = lost[0].keys.group
        places = [each.partition for each in lost if each.keys.group == group]
        partitions = [(names[topic], number) if len(names) > 1 else number for topic, number in places]
        return PartitionLost(group, partitions, advice=RESTART)
    return BatchRefused(
        f"another driver has changed the manifest of query {query} while this one was committing batch "
        f"{manifest.batch}. Run one driver for each checkpoint location, and start the query again"
    )
