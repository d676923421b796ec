"""The folder of a topic, and whether the topic was deleted: deleting moves the folder away in one step."""

from __future__ import annotations

import os
from pathlib import Path

from pxrs.errors import TopicDeleted
from pxrs.log.directory.description import target_of
from pxrs.log.directory.opened_directory import OpenedDirectory


class TopicFolder:
    def __init__(self, name: str, topic_id: str, path: Path, directory: OpenedDirectory) -> None:
        """directory: that of the whole log."""
        self._name, self._id, self.path, self._directory = name, topic_id, path, directory

    def of_partition(self, partition: int) -> str:
        return f"{self.path}/partitions/partition-{partition}"

    def is_there(self) -> bool:
        """False once the topic is deleted. Raises HubMoved."""
        try:
            os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            self._directory.check()
            return False
        except OSError:
            return True  # not known: then the error that the caller has is raised
        return True

    def check(self) -> None:
        """Raise TopicDeleted or HubMoved if the folder is not there. To be called after an answer that comes from a
        list of files: a deletion meanwhile may have made the list too short."""
        if not self.is_there():
            raise self.deleted()

    def deleted(self) -> TopicDeleted:
        try:
            target = target_of(self.path.parent.parent / "topics" / self._name)
        except OSError:  # whether the name was given to another topic is not known
            target = None
        return TopicDeleted(self._name, self._id, target not in (None, self._id))
