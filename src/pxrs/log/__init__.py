"""The message log: topics, their partitions, and the batches in them.

A partition is a sequence of messages with the offsets 0, 1, 2... They are stored in batches: Arrow record batches, each
in a frame with checksums. A log may be in memory (`memory.py`) or in a local directory (`directory/`); both keep one
contract, and `pxrs.testing.log_contract` tests it.

What a log promises:

- What `append` reports as stored is durable, and readers see only what is durable (L1).
- `append` returns an outcome for each batch (`outcomes.py`): stored at an offset, not stored, or not known.
- A batch that is resent under the same origin is stored once (L4, `producers.py`).
- Offsets are never given twice; what was read once stays as it was until retention removes it.

Where to start reading: `contract.py` (`Source`, `TopicLog`, `Log`), then `batch.py` for the frame (docs/format.md),
then `directory/`.
"""
