"""Several writers at once, in threads."""

from __future__ import annotations

import random

from pxrs.errors import (
    Conflict,
)
from pxrs.registry import ABSENT, Registry
from pxrs.testing.registry_contract.store import Fixtures, Store, at_once


class Races(Fixtures):
    def test_exactly_one_of_many_claims_wins(self, store: Store) -> None:
        handles = [store.open() for _ in range(4)]
        for i in range(5):
            key = f"claim/{i}"

            def claim(registry: Registry, key: str = key) -> bool:
                try:
                    registry.commit(expect={key: ABSENT}, put={key: b""})
                except Conflict:
                    return False
                return True

            assert sum(at_once(*[lambda r=r: claim(r) for r in handles * 2])) == 1

    def test_r7_two_commits_that_each_expect_the_others_key_absent(self, store: Store) -> None:
        """Write skew: both may be refused, both may not pass."""
        one, two = store.open(), store.open()
        for i in range(20):
            a, b = f"skew/{i}/a", f"skew/{i}/b"

            def take(registry: Registry, mine: str, other: str) -> bool:
                try:
                    registry.commit(expect={other: ABSENT}, put={mine: b""})
                except Conflict:
                    return False
                return True

            passed = at_once(lambda a=a, b=b: take(one, a, b), lambda a=a, b=b: take(two, b, a))  # type: ignore[misc]
            assert len(one.scan(f"skew/{i}/")) == sum(passed) <= 1

    def test_multi_key_commits_in_any_order_neither_deadlock_nor_tear(self, store: Store) -> None:
        handles = [store.open() for _ in range(4)]
        keys = [f"k/{i}" for i in range(6)]

        def write(registry: Registry, seed: int) -> None:
            dice = random.Random(seed)
            for i in range(25):
                some = dice.sample(keys, 4)
                registry.commit(put=dict.fromkeys([*some, "k/all"], b"%d-%d" % (seed, i)), delete=["k/none"])

        at_once(*[lambda r=r, s=s: write(r, s) for s, r in enumerate(handles)])
        final = handles[0].get("k/all")
        assert final is not None
        assert sum(e.version == final.version or e.value == final.value for e in handles[1].scan("k/")) >= 5

    def test_a_commit_that_also_deletes_what_is_not_there_is_still_one_step(self, store: Store) -> None:
        one, two, noise = store.open(), store.open(), store.open()
        for i in range(15):
            a, b, c = f"d/{i}/a", f"d/{i}/b", f"d/{i}/c"
            at_once(
                lambda a=a, b=b, c=c: one.commit(put={b: b"one", c: b"one"}, delete=[a]),  # type: ignore[misc]
                lambda a=a, c=c: two.commit(put={a: b"two", c: b"two"}),  # type: ignore[misc]
                lambda b=b: [noise.commit(put={b: b"noise"}) for _ in range(3)],  # type: ignore[misc]
            )
            last = one.get(c)
            assert last is not None
            assert (one.get(a) is not None) == (last.value == b"two"), f"round {i}: neither order gives this result"

    def test_no_increment_is_lost(self, store: Store) -> None:
        handles = [store.open() for _ in range(3)]

        def add(registry: Registry) -> None:
            for _ in range(20):
                while True:
                    entry = registry.get("n")
                    version, count = (ABSENT, 0) if entry is None else (entry.version, int(entry.value))
                    try:
                        registry.commit(expect={"n": version}, put={"n": b"%d" % (count + 1)})
                        break
                    except Conflict:
                        continue

        at_once(*[lambda r=r: add(r) for r in handles])
        entry = handles[0].get("n")
        assert entry is not None
        assert entry.value == b"60"

    def test_threads_share_one_handle(self, registry: Registry) -> None:
        def write(thread: int) -> None:
            for i in range(10):
                registry.commit(expect={f"t/{thread}/{i}": ABSENT}, put={f"t/{thread}/{i}": b""})
                assert registry.get(f"t/{thread}/{i}") is not None

        at_once(*[lambda t=t: write(t) for t in range(6)])
        assert len(registry.scan("t/")) == 60
