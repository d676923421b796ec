"""What one producer adds to the metrics of its process, once for each batch or append."""

from __future__ import annotations

from pxrs.metrics import instruments


class ProducerCounts:
    __slots__ = ("_batches", "_bytes", "_messages", "_topic", "append", "retries")

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._messages = instruments.PRODUCER_MESSAGES.of(topic)
        self._bytes = instruments.PRODUCER_BYTES.of(topic)
        self._batches = instruments.PRODUCER_BATCHES.of(topic)
        self.append = instruments.PRODUCER_APPEND.of(topic)
        self.retries = instruments.PRODUCER_RETRIES.of(topic)

    def stored(self, messages: int, size: int) -> None:
        """A batch was stored. size: its bytes as encoded."""
        self._messages.add(messages)
        self._bytes.add(size)
        self._batches.add()

    def failed(self, batches: int, error: BaseException) -> None:
        """Batches could not be stored."""
        instruments.PRODUCER_ERRORS.of(self._topic, type(error).__name__).add(batches)
