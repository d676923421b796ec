"""Removes the manifests and staged files of deleted topics, and finds the staged files that are still needed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from pxrs.errors import Conflict, RegistryCorrupt
from pxrs.publishing.records import ROUTED, Manifest, manifests_of, parts_of, writer_of
from pxrs.publishing.staging.contract import Staging
from pxrs.registry.contract import Entry, Registry

_DELETED_S: Final = 86_400.0
"""The minimum age of what was staged or committed for a deleted topic before it is removed. The age protects a topic
that was created after the topics were listed."""


def forget_topic(registry: Registry, staging: Staging, topic: str) -> None:
    """Remove the manifests of a deleted topic, and what was staged for it. topic: its id.

    A routed manifest only loses its part for this topic. The manifest itself stays, because it has the number of the
    last batch of its query (K2)."""
    for entry in registry.scan(manifests_of(topic)):
        registry.commit(delete=[entry.key])
    for entry in registry.scan(ROUTED):
        # After a conflict, the driver that has changed the manifest drops the part itself.
        with contextlib.suppress(RegistryCorrupt, Conflict):
            manifest = Manifest.load(entry)
            left = [part for part in manifest.parts if part.topic != topic]
            if len(left) < len(manifest.parts):
                registry.commit({entry.key: entry.version}, {entry.key: replace(manifest, parts=left).dump()})
    staging.forget_topic(topic)


def forget_deleted_topics(registry: Registry, staging: Staging, topics: Collection[str]) -> None:
    """Remove what was staged or committed for deleted topics. A task or a driver that has not noticed the deletion may
    still write for such a topic. Files and manifests that are younger than a day stay.

    topics: the ids of the topics that exist. Deleted topics are found in the staging place only: a manifest of an
    unknown topic may belong to another log that shares the registry."""
    before = time.time() - _DELETED_S
    for topic in staging.topics():
        if topic not in topics and max(staging.changed_at(topic), _written_at(registry, topic)) < before:
            forget_topic(registry, staging, topic)


def needed_batches(registry: Registry, topic: str) -> dict[str, int | None]:
    """The batches of a topic whose staged files are needed, because a manifest names them and they are not published.
    By query, as `writer_of` names it; None if the manifest is damaged: any batch of that query may be needed."""
    needed: dict[str, int | None] = {}
    for entry in manifest_entries(registry, topic):
        query = writer_of(entry.key)
        try:
            manifest = Manifest.load(entry)
        except RegistryCorrupt:  # the query's own publisher reports it
            needed[query] = None
            continue
        if not manifest.is_published and any(part.topic == topic for part in parts_of(entry.key, manifest)):
            needed[query] = manifest.batch
    return needed


def manifest_entries(registry: Registry, topic: str) -> list[Entry]:
    """The manifests of the queries that write to this topic alone, and of all queries whose rows name their topics."""
    return [*registry.scan(manifests_of(topic)), *registry.scan(ROUTED)]


def _written_at(registry: Registry, topic: str) -> float:
    """When the last manifest of the topic was written, in seconds since 1970; 0 if there is none."""
    last = 0.0
    for entry in registry.scan(manifests_of(topic)):
        with contextlib.suppress(RegistryCorrupt):
            last = max(last, Manifest.load(entry).at)
    return last
