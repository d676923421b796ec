"""A partitioned, Arrow-native message log with fenced consumer groups, on the coordination store you already have."""

from __future__ import annotations

from importlib.metadata import version as _version

from pxrs import errors
from pxrs.hub import Hub, open
from pxrs.model import Message, Topic, TopicPartition
from pxrs.registry import ABSENT

__version__ = _version("pxrs")
__all__ = ["ABSENT", "Hub", "Message", "Topic", "TopicPartition", "__version__", "errors", "open"]
