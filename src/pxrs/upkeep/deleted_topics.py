"""Removing what the registry and the staging folder hold of a topic that was deleted, also after a failure.

The registry holds, of a topic with `keep_unread`, the keys `topics/<id>/start` and `gate`, and of a topic that queries
have published to, their manifests. They are removed after the topic itself. The registry may not be reachable then, or
the process may die in between, so a file in the hub's directory records what is left to do:

    deleted/<topic id>    empty: the registry may hold `start` and `gate` of this topic

| step                                       | if the process dies after it                               |
|--------------------------------------------|------------------------------------------------------------|
| `note` makes the file                      | the file stays; it has no effect while the topic exists    |
| `Log.delete_topic` deletes the topic       | the janitor removes the keys and the file (`finish`)       |
| `forget` removes the keys, then the file   | nothing is left to do, or the janitor does it once more    |

What queries have left is found by the staging folder instead (`publishing.forgetting.forget_deleted_topics`).

Every step may be repeated by any process: ids of topics are never used again, so what is removed by the id of a deleted
topic belongs to no other topic. A failure of `note` or `forget` is logged, and never fails the deletion: the topic
itself is gone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

from pxrs import disk
from pxrs.errors import PxrsError, RetentionPostponed
from pxrs.hub_parts import HubParts

_logger = logging.getLogger(__name__)

FOLDER: Final = "deleted"


def note(parts: HubParts, topic: str) -> None:
    """Record, before the topic with this id is deleted, that its keys are to be removed from the registry."""
    from pxrs.group.readables import is_topic_id

    folder = _folder(parts)
    if folder is None or not is_topic_id(topic):  # the link of a damaged topic may lead anywhere
        return
    try:
        disk.make_folders(folder)
        (folder / topic).touch()
        disk.sync_folder(folder)
    except OSError as error:  # such as a full disk, for which a topic may be deleted
        what = disk.explain(error, folder)
        _logger.warning("topics/%s/ stays in the registry if the deletion of the topic is interrupted: %s", topic, what)


def forget(parts: HubParts, topic: str) -> None:
    """Remove the keys of a deleted topic. If that fails, the janitor tries again."""
    try:
        _forget(parts, topic)
    except PxrsError as error:
        _logger.warning(
            "topics/%s/ of a deleted topic stays in the registry until the janitor removes it: %s", topic, error
        )


def forget_published(parts: HubParts, topic: str) -> None:
    """Remove the manifests of a deleted topic, and what was staged for it. If that fails, the janitor tries again."""
    if parts.log.folder is not None and not (parts.log.folder / "staging").is_dir():  # no query has written here
        return
    from pxrs.publishing.forgetting import forget_topic
    from pxrs.publishing.staging.places import staging_of

    staging = staging_of(parts.log)
    if staging is None:
        return
    try:
        parts.check_registry()
        forget_topic(parts.registry.get(), staging, topic)
    except PxrsError as error:
        _logger.warning("manifests and staged files of the deleted topic %s could not be removed yet: %s", topic, error)


def forget_copies(parts: HubParts, topic: str) -> None:
    """Remove the records of copies into a deleted topic. If that fails, a few hundred bytes for each of them stay."""
    try:
        if parts.belonging is not None and not parts.belonging.is_recorded():
            return  # nothing was ever copied here: a copy has the registry recorded first
        from pxrs.copying.records import copies_prefix

        parts.check_registry()
        registry = parts.registry.get()
        for entry in registry.scan(copies_prefix(topic)):
            registry.commit(delete=[entry.key])
    except PxrsError as error:
        _logger.warning("the records of copies into the deleted topic %s stay in the registry: %s", topic, error)


def finish(parts: HubParts, topics: Collection[str]) -> None:
    """Remove the keys of topics whose deletion was cut short.

    topics: the ids of the topics that exist now. Raises PxrsError."""
    from pxrs.group.readables import is_topic_id

    folder = _folder(parts)
    if folder is None or not folder.is_dir():
        return
    for name in sorted(os.listdir(folder)):
        if name not in topics and is_topic_id(name):  # another name is that of somebody else's file
            _forget(parts, name)


def _forget(parts: HubParts, topic: str) -> None:
    from pxrs.group.records import gate_key, start_key

    try:
        if parts.belonging is not None:
            parts.belonging.check_retention(topic)
    except RetentionPostponed:
        pass  # no registry is on record, so that nothing was ever written there
    else:
        parts.registry.get().commit(delete=[start_key(topic), gate_key(topic)])
    folder = _folder(parts)
    if folder is None:
        return
    try:
        (folder / topic).unlink(missing_ok=True)
    except OSError as error:
        raise disk.log_error(error, folder) from error


def _folder(parts: HubParts) -> Path | None:
    return None if parts.log.folder is None else parts.log.folder / FOLDER
