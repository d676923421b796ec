"""A partitioned, Arrow-native message log with fenced consumer groups, on the coordination store you already have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pxrs import errors, registry
    from pxrs.clock import Clock
    from pxrs.consumer.consumer import ConsumedBatch, Consumer, TopicsConsumer
    from pxrs.copying.copier import Copied
    from pxrs.events.model import Event
    from pxrs.group.admin import GroupHandle
    from pxrs.group.description import GroupDescription, MemberDescription, PartitionDescription
    from pxrs.group.lag import TopicLag
    from pxrs.group.records import Home, Paused
    from pxrs.group.timings import Timings
    from pxrs.hub import Hub
    from pxrs.log.batch import Batch, Origin, Payload
    from pxrs.log.contract import Append, Bounds, DamagedTopic, Fetched, Log, RetentionPlan, Source, TopicLog
    from pxrs.log.outcomes import MaybeStored, NotStored, StoredAt
    from pxrs.model import Message, Topic, TopicPartition
    from pxrs.opening import open
    from pxrs.options import ConsumerOptions, ProducerOptions, QueueChanges, TopicChanges, TopicsConsumerOptions
    from pxrs.producer.producer import Producer
    from pxrs.producer.receipts import Receipt, Stored, TableReceipt
    from pxrs.queue.handle import DeadLetters, Depth, QueueHandle
    from pxrs.queue.items import Item
    from pxrs.queue.listener import Handled, QueueListener
    from pxrs.queue.policy import (
        AtLeastOnce,
        Backoff,
        ConsumeOnce,
        ConsumeTimes,
        ExponentialBackoff,
        FixedBackoff,
        Policy,
    )
    from pxrs.queue.transaction import Transaction
    from pxrs.registry import ABSENT, Entry, Lease, Limits, Registry, Watch
    from pxrs.sources.catalog import RegisteredSource
    from pxrs.topics import TopicHandle
    from pxrs.upkeep.janitor import UpkeepStatus
    from pxrs.upkeep.records import RoundReport
    from pxrs.waiting import Cancel, Subscription

__version__: str
__all__ = [
    "ABSENT",
    "Append",
    "AtLeastOnce",
    "Backoff",
    "Batch",
    "Bounds",
    "Cancel",
    "Clock",
    "ConsumeOnce",
    "ConsumeTimes",
    "ConsumedBatch",
    "Consumer",
    "ConsumerOptions",
    "Copied",
    "DamagedTopic",
    "DeadLetters",
    "Depth",
    "Entry",
    "Event",
    "ExponentialBackoff",
    "Fetched",
    "FixedBackoff",
    "GroupDescription",
    "GroupHandle",
    "Handled",
    "Home",
    "Hub",
    "Item",
    "Lease",
    "Limits",
    "Log",
    "MaybeStored",
    "MemberDescription",
    "Message",
    "NotStored",
    "Origin",
    "PartitionDescription",
    "Paused",
    "Payload",
    "Policy",
    "Producer",
    "ProducerOptions",
    "QueueChanges",
    "QueueHandle",
    "QueueListener",
    "Receipt",
    "RegisteredSource",
    "Registry",
    "RetentionPlan",
    "RoundReport",
    "Source",
    "Stored",
    "StoredAt",
    "Subscription",
    "TableReceipt",
    "Timings",
    "Topic",
    "TopicChanges",
    "TopicHandle",
    "TopicLag",
    "TopicLog",
    "TopicPartition",
    "TopicsConsumer",
    "TopicsConsumerOptions",
    "Transaction",
    "UpkeepStatus",
    "Watch",
    "__version__",
    "errors",
    "open",
    "registry",
]

# Imported when they are first used. `pxrs --help` and shell completion run this file and need no pyarrow; a process of
# Spark's that opens a hub and reads needs no more than a third of the modules. The type checker reads the imports above
# instead and does not see `__getattr__`, which would let it take a misspelt name for an attribute of unknown type. A
# test compares this table with those imports.
_LAZY: Final = {
    "ABSENT": "pxrs.registry",
    "Append": "pxrs.log.contract",
    "AtLeastOnce": "pxrs.queue.policy",
    "Backoff": "pxrs.queue.policy",
    "Batch": "pxrs.log.batch",
    "Bounds": "pxrs.log.contract",
    "Cancel": "pxrs.waiting",
    "Clock": "pxrs.clock",
    "ConsumeOnce": "pxrs.queue.policy",
    "ConsumeTimes": "pxrs.queue.policy",
    "ConsumedBatch": "pxrs.consumer.consumer",
    "Consumer": "pxrs.consumer.consumer",
    "ConsumerOptions": "pxrs.options",
    "Copied": "pxrs.copying.copier",
    "DamagedTopic": "pxrs.log.contract",
    "DeadLetters": "pxrs.queue.handle",
    "Depth": "pxrs.queue.handle",
    "Event": "pxrs.events.model",
    "Entry": "pxrs.registry",
    "ExponentialBackoff": "pxrs.queue.policy",
    "Fetched": "pxrs.log.contract",
    "FixedBackoff": "pxrs.queue.policy",
    "GroupDescription": "pxrs.group.description",
    "GroupHandle": "pxrs.group.admin",
    "Handled": "pxrs.queue.listener",
    "Home": "pxrs.group.records",
    "Hub": "pxrs.hub",
    "Item": "pxrs.queue.items",
    "Lease": "pxrs.registry",
    "Limits": "pxrs.registry",
    "Log": "pxrs.log.contract",
    "MaybeStored": "pxrs.log.outcomes",
    "MemberDescription": "pxrs.group.description",
    "Message": "pxrs.model",
    "NotStored": "pxrs.log.outcomes",
    "Origin": "pxrs.log.batch",
    "PartitionDescription": "pxrs.group.description",
    "Paused": "pxrs.group.records",
    "Payload": "pxrs.log.batch",
    "Policy": "pxrs.queue.policy",
    "Producer": "pxrs.producer.producer",
    "ProducerOptions": "pxrs.options",
    "QueueChanges": "pxrs.options",
    "QueueHandle": "pxrs.queue.handle",
    "QueueListener": "pxrs.queue.listener",
    "Receipt": "pxrs.producer.receipts",
    "RegisteredSource": "pxrs.sources.catalog",
    "Registry": "pxrs.registry",
    "RetentionPlan": "pxrs.log.contract",
    "RoundReport": "pxrs.upkeep.records",
    "Source": "pxrs.log.contract",
    "Stored": "pxrs.producer.receipts",
    "StoredAt": "pxrs.log.outcomes",
    "Subscription": "pxrs.waiting",
    "TableReceipt": "pxrs.producer.receipts",
    "Timings": "pxrs.group.timings",
    "Topic": "pxrs.model",
    "TopicHandle": "pxrs.topics",
    "TopicLag": "pxrs.group.lag",
    "TopicLog": "pxrs.log.contract",
    "TopicPartition": "pxrs.model",
    "TopicsConsumer": "pxrs.consumer.consumer",
    "TopicChanges": "pxrs.options",
    "TopicsConsumerOptions": "pxrs.options",
    "Transaction": "pxrs.queue.transaction",
    "UpkeepStatus": "pxrs.upkeep.janitor",
    "Watch": "pxrs.registry",
    "errors": "pxrs",
    "open": "pxrs.opening",
    "registry": "pxrs",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """A public name that is used for the first time; the next use finds it in the module itself."""
        if name == "__version__":
            from importlib.metadata import version  # takes longer than the rest of this file

            found: object = version("pxrs")
        elif name in _LAZY:
            from importlib import import_module

            module = _LAZY[name]
            found = import_module(f"pxrs.{name}") if module == __name__ else getattr(import_module(module), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
