"""A partitioned, Arrow-native message log with fenced consumer groups, on the coordination store you already have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pxrs import errors
from pxrs.hub import Hub, open
from pxrs.model import Message, Topic, TopicPartition
from pxrs.queue.policy import AtLeastOnce, ConsumeOnce, ConsumeTimes, ExponentialBackoff, FixedBackoff
from pxrs.registry import ABSENT

if TYPE_CHECKING:
    from pxrs.queue.listener import QueueListener

__version__: str
__all__ = [
    "ABSENT",
    "AtLeastOnce",
    "ConsumeOnce",
    "ConsumeTimes",
    "ExponentialBackoff",
    "FixedBackoff",
    "Hub",
    "Message",
    "QueueListener",
    "Topic",
    "TopicPartition",
    "__version__",
    "errors",
    "open",
]


def __getattr__(name: str) -> Any:
    """What is looked up when it is asked for: the version takes longer than all the rest of this file."""
    if name == "__version__":
        from importlib.metadata import version

        return version("pxrs")
    if name == "QueueListener":
        from pxrs.queue.listener import QueueListener

        return QueueListener
    raise AttributeError(f"module 'pxrs' has no attribute {name!r}")
