"""The settings of a topic, which another process may change while this one has the topic open.

`alter_topic` replaces `topic.json` as a whole, under the lock of the folder `topics`, and gives the new description the
next `revision`. Who appends or removes messages calls `look` under the append lock of a partition: one `stat` tells
whether the file was replaced since it was last read, and only then it is read again. So a change counts from the next
append on, in every process. A process that only reads needs none of these settings.

A description that cannot be read at this moment changes nothing: the settings that are known stay in force, and the
reason is logged once. The next process that opens the topic by its name gets the error.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Final

from pxrs import disk
from pxrs.errors import DamagedFrame
from pxrs.log.directory.description import META, read_topic
from pxrs.model import Topic

_logger: Final = logging.getLogger(__name__)
_Signature = tuple[int, int, int]
"""Inode, time of the last modification and size of `topic.json`: they tell that it was replaced."""


class TopicSettings:
    """What this process knows of the settings of one open topic. Threads and the topic's partitions share it."""

    def __init__(self, topic: Topic, folder: Path) -> None:
        self._path = folder / META
        self._lock = threading.Lock()
        self._signature: _Signature | None = None
        """That of the file when it was last read here; None: not read since the topic was opened."""
        self.topic = topic
        """The newest description that this process has seen."""

    def look(self) -> Topic:
        """The settings in force, read again if the file was replaced."""
        try:
            found = os.stat(self._path)
        except OSError:
            return self.topic  # the topic was deleted, or moved with the hub: the caller finds that out by itself
        signature = (found.st_ino, found.st_mtime_ns, found.st_size)
        if signature != self._signature:
            with self._lock:
                self._read(signature)
        return self.topic

    def _read(self, signature: _Signature) -> None:
        """Under `_lock`. A file that was replaced again since `signature` was taken is read again at the next look."""
        try:
            self._adopt(read_topic(self._path))
        except DamagedFrame as damage:
            _logger.warning(
                "the settings of topic %s could not be read again, so the former ones apply: %s",
                self.topic.name,
                damage,
            )
        except OSError as error:
            _logger.warning(
                "the settings of topic %s could not be read again, so the former ones apply: %s",
                self.topic.name,
                disk.explain(error),
            )
        self._signature = signature

    def adopt(self, topic: Topic) -> None:
        """Take over a description that was read elsewhere in this process, unless it is older than the one known."""
        with self._lock:
            self._adopt(topic)

    def _adopt(self, topic: Topic) -> None:
        # Two threads may have read the file before and after a change, and come here in the other order.
        if topic.id == self.topic.id and topic.revision > self.topic.revision:
            self.topic = topic
