"""Sending messages to a topic.

A message goes through these files:

1. `producer.py`: `Producer.send` checks its fields (`fields.py`) and adds it to the open chunk (`chunks.py`) of the
   outbox (`outbox.py`); `Producer.send_batch` converts, splits and cuts a table (`tables.py`). The caller gets a
   receipt (`receipts.py`).
2. `sending.py`: the background thread takes chunks that are full or have waited long enough, chooses partitions
   (`pxrs.hashing` for messages with a key, `keyless.py` for others), sorts the rows and cuts them into batches. If its
   append blocks, another thread goes on.
3. `appender.py`: encodes each batch once, gives it to the log, resends it by its outcome, and fails it in time.

What it promises: messages of one partition are stored in the order in which one thread has sent them, but for those
whose outcome is unknown; a message is stored once however often its batch is resent (L4); a receipt, `flush` or `close`
raises every error; every message has its result in time; what waits is bounded by `buffer_bytes` (X16); an interrupt at
any moment leaves each message whole or not sent.

Start reading at `producer.py`, then `outbox.py` for how senders and the background thread share state.
"""
