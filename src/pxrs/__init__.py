"""A partitioned, Arrow-native message log with fenced consumer groups, on the coordination store you already have."""

from __future__ import annotations

from pxrs import errors
from pxrs.hub import Hub, open
from pxrs.model import Message, Topic, TopicPartition
from pxrs.registry import ABSENT

__version__: str
__all__ = ["ABSENT", "Hub", "Message", "Topic", "TopicPartition", "__version__", "errors", "open"]


def __getattr__(name: str) -> str:
    """The version is looked up when it is asked for: that takes longer than all the rest of this file."""
    if name == "__version__":
        from importlib.metadata import version

        return version("pxrs")
    raise AttributeError(f"module 'pxrs' has no attribute {name!r}")
