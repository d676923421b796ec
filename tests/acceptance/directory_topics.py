"""Topics of a log in a directory, opened as another process opens them: with files and locks of their own."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from pxrs.log.directory.log import DirectoryLog
from pxrs.log.directory.topic import DirectoryTopic
from pxrs.model import Topic

OPENED: list[DirectoryLog] = []
"""What `log_in` has opened in this test; the fixture `close_logs` closes it."""


def log_in(path: Path) -> DirectoryLog:
    """A log that is closed when the test ends."""
    OPENED.append(DirectoryLog(path))
    return OPENED[-1]


def new_topic(path: Path | DirectoryLog, name: str = "t", partitions: int = 1, **options: Any) -> DirectoryTopic:
    """Create a topic through a log that stays open as long as the topic is referenced, or through the one that is
    given."""
    log = path if isinstance(path, DirectoryLog) else DirectoryLog(path)
    topic = log.create_topic(Topic(name, uuid.uuid4().hex, partitions, **options))
    assert isinstance(topic, DirectoryTopic)
    return topic


def opened(path: Path | DirectoryLog, timeout: float = 10.0, name: str = "t") -> DirectoryTopic:
    """Open a topic that is there, through a log that stays open as long as the topic is referenced, or through the one
    that is given. `timeout` bounds how long it waits for locks."""
    topic = (path if isinstance(path, DirectoryLog) else DirectoryLog(path, timeout)).topic(name)
    assert isinstance(topic, DirectoryTopic)
    return topic
