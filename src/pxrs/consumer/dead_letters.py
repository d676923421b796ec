"""Messages that a handler failed on, sent to another topic with the reason.

A dead letter is the message as it was, with headers added behind its own:

    pxrs-reason       what was raised: class and message
    pxrs-origin       the place of the message: topic/partition offset N
    pxrs-error-type   the class that was raised
    pxrs-traceback    where it was raised; left out if the message would be too large with it

If a dead letter cannot be stored, `send` raises, and the runner pauses the partition instead.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from pxrs.errors import Closed, InvalidGroup, InvalidRecord
from pxrs.failures import Failure
from pxrs.model import Message
from pxrs.producer.producer import Producer
from pxrs.producer.receipts import Receipt

_logger = logging.getLogger(__name__)

REASON_HEADER: Final = "pxrs-reason"
ORIGIN_HEADER: Final = "pxrs-origin"
TYPE_HEADER: Final = "pxrs-error-type"
TRACEBACK_HEADER: Final = "pxrs-traceback"
TIMEOUT_S: Final = 60.0
"""How long a handler's thread waits until a dead letter is stored."""


class Read(Protocol):
    """The name and id of a topic or source that the consumer reads."""

    @property
    def name(self) -> str: ...

    @property
    def id(self) -> str: ...


def check_other_topic(sources: Iterable[Read], dead_letters_id: str) -> None:
    """Raise InvalidGroup if dead letters would go to a topic that is read. Compared by id: a topic may be known under
    several names, such as `Orders` and `orders` where file names have no case."""
    for source in sources:
        if source.id == dead_letters_id:
            raise InvalidGroup(
                f"dead_letters is the topic {source.name} itself, which this consumer reads: each failed message would "
                "be read again and fail again, endlessly. Use another topic for dead letters"
            )


class DeadLetterTopic:
    """Opens a producer of the dead-letter topic when the first dead letter is sent. After a failure it opens a new one,
    because some failures of a producer last, such as that of a topic that was deleted and created anew. Calling it
    returns the open producer. Threads share it."""

    def __init__(self, open_producer: Callable[[], Producer]) -> None:
        self._open = open_producer
        self._lock = threading.Lock()
        self._producer: Producer | None = None

    def __call__(self) -> Producer:
        with self._lock:
            if self._producer is None:
                self._producer = self._open()
            return self._producer

    def discard(self, failed: Producer) -> None:
        """Close a producer whose failure `send` has raised; the next call opens another one."""
        with self._lock:
            if self._producer is failed:
                self._producer = None
        try:
            failed.close()
        except Exception as error:  # noqa: BLE001 - it is the failure that `send` has raised, or one that followed it
            _logger.debug("closing the producer of dead letters failed: %s", error)

    def close(self) -> None:
        """Close the producer if one is open: its thread would go on otherwise. A later call opens another one.

        An error is only logged. `send` has waited for every dead letter, so the error can only concern a dead letter
        for which `send` has raised TimeoutError, and whose partition is paused."""
        with self._lock:
            producer, self._producer = self._producer, None
        if producer is not None:
            try:
                producer.close()
            except Exception as error:
                _logger.warning("a dead letter was not stored: %s", error, exc_info=error)


def send(open_producer: Callable[[], Producer], sources: Iterable[Read], message: Message, failure: Failure) -> None:
    """Store a dead letter durably. Raises what the producer raises. TimeoutError means that the dead letter may still
    be stored later.

    sources: the topics that are read."""
    added = [
        (REASON_HEADER, failure.text.encode()),
        (ORIGIN_HEADER, place_of_message(message).encode()),
        (TYPE_HEADER, failure.type.encode()),
        (TRACEBACK_HEADER, failure.traceback.encode()),
    ]
    headers: list[tuple[str, bytes | None]] = [*(message.headers or []), *added]
    producer = open_producer()
    check_other_topic(sources, producer.topic_id)
    try:
        try:
            receipt = _begin(producer, message, headers)
        except Closed:  # another thread's dead letter has failed, and `discard` has closed the producer
            producer = open_producer()
            receipt = _begin(producer, message, headers)
        receipt.result(TIMEOUT_S)
    except (InvalidRecord, TimeoutError):
        raise  # after other errors the producer can still be used
    except Exception:
        if isinstance(open_producer, DeadLetterTopic):
            open_producer.discard(producer)
        raise


def _begin(producer: Producer, message: Message, headers: list[tuple[str, bytes | None]]) -> Receipt:
    try:
        return producer.send(message.value, message.key, headers, message.timestamp)
    except InvalidRecord:  # it may be too large only because of the traceback, which is the last header
        return producer.send(message.value, message.key, headers[:-1], message.timestamp)


def place_of_message(message: Message) -> str:
    return f"{message.topic}/{message.partition} offset {message.offset}"
