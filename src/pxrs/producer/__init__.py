"""Sending messages to a topic.

`producer.py` has `Producer`: it collects messages into batches. `outgoing.py` has the batches that are on their way and
the receipts that users wait for. `appender.py` gives a batch to the log, and tries again without storing it twice.
`hashing.py` computes the partition of a key; `keyless.py` chooses one for messages without a key.
"""
