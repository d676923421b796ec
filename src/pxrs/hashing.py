"""Which partition a key belongs to: the same in every process and on every machine (X2).

A partitioner is a hash of bytes to a number that is not negative; the partition is the remainder. Its name is part of
the topic (L6), so that all producers of a topic agree; an installed package may bring more of them. Messages without a
key have no partition of their own: `pxrs.producer.keyless` chooses one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pyarrow as pa
import xxhash

from pxrs.errors import InvalidTopic
from pxrs.plugins import function_named

Hash = Callable[[bytes], int]

xxh64: Final[Hash] = xxhash.xxh64_intdigest
"""The default: XXH64 with seed 0."""

_MULTIPLIER: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF


def murmur2_signed(key: bytes) -> int:
    """Murmur2 as `org.apache.kafka.common.utils.Utils.murmur2` computes it: a signed number of 32 bits."""
    length = len(key)
    h = 0x9747B28C ^ length
    whole = length & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(key[i : i + 4], "little") * _MULTIPLIER & _MASK
        k = (k ^ k >> 24) * _MULTIPLIER & _MASK
        h = (h * _MULTIPLIER & _MASK) ^ k
    if whole < length:
        h = (h ^ int.from_bytes(key[whole:], "little")) * _MULTIPLIER & _MASK
    h = (h ^ h >> 13) * _MULTIPLIER & _MASK
    h ^= h >> 15
    return h - (1 << 32) if h >> 31 else h


def murmur2(key: bytes) -> int:
    """The hash of a key as Kafka's Java clients compute it: the sign bit is dropped, not negated."""
    return murmur2_signed(key) & 0x7FFFFFFF


HASHES: Final[dict[str, Hash]] = {"xxh64": xxh64, "murmur2": murmur2}


ENTRY_POINTS: Final = "pxrs.partitioners"
"""The entry point group under which installed packages register hashes of their own."""


def hash_named(name: str) -> Hash:
    """The hash of a topic's partitioner. Raises InvalidTopic if neither pxrs nor an installed package has it."""
    return function_named("partitioner", name, HASHES, ENTRY_POINTS, InvalidTopic)


def partitions_of(keys: pa.Array, hash_of: Hash, partitions: int) -> pa.Array:
    """The partition of each key, as int32; null where there is no key. Each distinct key is hashed once."""
    if keys.null_count == len(keys):
        return pa.nulls(len(keys), pa.int32())
    encoded = keys.dictionary_encode()
    distinct = pa.array([hash_of(key) % partitions for key in encoded.dictionary.to_pylist()], pa.int32())
    return distinct.take(encoded.indices)
