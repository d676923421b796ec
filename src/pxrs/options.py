"""The keyword arguments that `Hub.consumer` and `Hub.producer` pass on to `Consumer`, `TopicsConsumer` and `Producer`.

A program that builds them before it calls the hub annotates them with these types:

    options: pxrs.ConsumerOptions = {"lease_ttl": 5, "commit_interval": 0.5}
    inbox = hub.consumer("orders", "billing", **options)

The constructors say what each of them means and what its default is. A test compares the names and types here with
those of the constructors. `dead_letters` is not among them: `Hub.consumer` takes the name of a topic, `Consumer` a
function that opens a producer. Nor are the arguments that a hub fills in: `topic_names` and `home`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, TypedDict

from pxrs.consumer.consumer import Callback, OnAssigned, Start
from pxrs.model import TopicPartition
from pxrs.queue.policy import Backoff, Policy


class TopicChanges(TypedDict, total=False):
    """The settings that `Hub.alter_topic` changes, as `Hub.create_topic` takes them."""

    retention: float | timedelta | None
    retention_bytes: int | None
    segment_bytes: int
    segment_s: float | timedelta | None
    durability: str
    codec: str
    keep_unread: bool


class QueueChanges(TypedDict, total=False):
    """The settings that `Hub.alter_queue` changes, as `Hub.create_queue` takes them."""

    policy: Policy
    backoff: Backoff | None


class _AnyConsumerOptions(TypedDict, total=False):
    """The options whose types are the same for `Consumer` and `TopicsConsumer`: all but the callbacks."""

    name: str | None
    ack: Literal["auto", "manual"]
    start: Start
    until: Literal["end"] | None
    assignor: str
    lease_ttl: float | timedelta | None
    handover_timeout: float | timedelta | None
    progress_timeout: float | timedelta | None
    commit_interval: float | timedelta | None
    prefetch_bytes: int
    on_trimmed: Literal["error", "skip"]
    on_error: Literal["pause", "retry", "dead-letter", "raise"]
    retries_max: int
    retry_pause: float | timedelta


class ConsumerOptions(_AnyConsumerOptions, total=False):
    """See `Consumer`."""

    on_assigned: OnAssigned[int] | None
    on_revoked: Callback[int] | None
    on_lost: Callback[int] | None


class TopicsConsumerOptions(_AnyConsumerOptions, total=False):
    """See `TopicsConsumer`: callbacks are given `TopicPartition`s."""

    on_assigned: OnAssigned[TopicPartition] | None
    on_revoked: Callback[TopicPartition] | None
    on_lost: Callback[TopicPartition] | None


class EitherConsumerOptions(_AnyConsumerOptions, total=False):
    """The options that the implementation of `Hub.consumer` accepts. Its two overloads are stricter: callbacks for
    `int` with one topic, callbacks for `TopicPartition` with several."""

    on_assigned: OnAssigned[int] | OnAssigned[TopicPartition] | None
    on_revoked: Callback[int] | Callback[TopicPartition] | None
    on_lost: Callback[int] | Callback[TopicPartition] | None


class ProducerOptions(TypedDict, total=False):
    """See `Producer`."""

    linger_s: float | timedelta
    batch_rows: int
    batch_bytes: int
    buffer_bytes: int
    buffer_timeout: float | timedelta
    tries_max: int
    delivery_timeout: float | timedelta
