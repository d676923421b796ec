"""The log of a hub that was opened without a directory: it has no topics, and calls that need a directory raise
NoDirectory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from pxrs.errors import NoDirectory
from pxrs.log.contract import DamagedTopic, Log, TopicLog
from pxrs.model import Topic


class AbsentLog(Log):
    """No topics. Groups of other sources look here for the names of topics and find none; every other call raises
    NoDirectory."""

    def __init__(self, registry: str) -> None:
        """registry: its address without a password, to be shown."""
        self.url = registry

    def check_topics(self) -> NoReturn:
        raise NoDirectory(self.url)

    def create_topic(self, topic: Topic) -> TopicLog:
        self.check_topics()

    def topics(self) -> list[Topic]:
        return []

    def damaged_topics(self) -> list[DamagedTopic]:
        return []

    def topic(self, name: str) -> TopicLog:
        self.check_topics()

    def alter_topic(self, name: str, changes: Mapping[str, object]) -> TopicLog:
        self.check_topics()

    def delete_topic(self, name: str) -> str:
        self.check_topics()

    def close(self) -> None:
        """Does nothing."""
