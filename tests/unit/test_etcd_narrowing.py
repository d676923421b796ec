"""Guessed ends of ranges: whatever the guess, nothing is left out; and the guesses become good."""

from __future__ import annotations

import bisect
import random

from pxrs.registry.etcd.narrowing import COUNTED_MAX, Narrowing


def scan(
    narrowing: Narrowing, keys: list[bytes], prefix: bytes, after: bytes | None, limit: int
) -> tuple[list[bytes], int]:
    """As the registry does it, on a sorted list; also how many keys the store had to count."""
    end = prefix[:-1] + b"0"
    first = prefix if after is None else max(prefix, after + b"\0")
    found: list[bytes] = []
    counts: list[int] = []
    for widened, near_end in enumerate(narrowing.ends(prefix, first, end)):
        if first < near_end:
            inside = keys[bisect.bisect_left(keys, first) : bisect.bisect_left(keys, near_end)]
            counts.append(len(inside))
            found += inside[: limit - len(found)]
            first = near_end
        if len(found) == limit or near_end == end:
            narrowing.learn(prefix, counts[0] if counts else 0, widened, found[0] if found and after is None else None)
            break
    return found, sum(counts)


def test_no_key_is_left_out_whatever_was_learned() -> None:
    dice = random.Random(2)
    for _ in range(200):
        narrowing = Narrowing()
        alphabet = "ab-/~0" if dice.random() < 0.5 else "0123456789abcdef"
        keys = sorted({b"q/" + "".join(dice.choices(alphabet, k=dice.randint(1, 6))).encode() for _ in range(60)})
        for _ in range(20):
            narrowing.learn(b"q/", dice.choice((0, 5000)), dice.randint(0, 4), dice.choice([None, *keys]))
            after = dice.choice([None, b"", b"q/", b"q/5", b"zz", *keys])
            limit = dice.randint(1, 70)
            expected = [key for key in keys if after is None or key > after][:limit]
            assert scan(narrowing, keys, b"q/", after, limit)[0] == expected


def test_the_cost_of_a_short_scan_becomes_small() -> None:
    dice = random.Random(3)
    keys = sorted(b"q/%032x" % dice.getrandbits(128) for _ in range(50_000))
    narrowing = Narrowing()
    for _ in range(10):
        scan(narrowing, keys, b"q/", None, 8)
    for after in (None, keys[100], keys[25_000], keys[-50]):
        costs = [scan(narrowing, keys, b"q/", after, 8)[1] for _ in range(10)]
        assert sorted(costs)[5] <= 20 * COUNTED_MAX
    assert sum(scan(narrowing, keys, b"q/", None, 8)[1] for _ in range(10)) <= 10 * COUNTED_MAX


def test_the_head_of_a_queue_is_found_while_it_moves() -> None:
    keys = [b"q/%08d" % i for i in range(20_000)]
    narrowing = Narrowing()
    total = 0
    for taken in range(2_000):
        found, counted = scan(narrowing, keys, b"q/", None, 5)
        assert found == keys[:5]
        total += counted if taken > 10 else 0
        del keys[0]
    assert total / 2_000 <= COUNTED_MAX
