"""All persistent keys at one moment."""

from __future__ import annotations

import threading

import pytest

from pxrs.errors import Conflict, InvalidUrl
from pxrs.registry import ABSENT, Registry
from pxrs.testing.registry_contract.store import Fixtures, Store

TOKENS, SUM = 6, 600
ACCOUNTS = ("a/account", "n/account", "z/account")
"""Before, among and behind the other keys, so that a store that reads page by page reads them in different pages."""
STATES = 10
"""How many different states the snapshots of a test must have shown."""
_TOKENS = "tokens/"


class Snapshots(Fixtures):
    def test_a_snapshot_has_the_persistent_keys_and_no_ephemeral_one(self, store: Store, registry: Registry) -> None:
        if not store.backend.has_snapshots:
            with pytest.raises(InvalidUrl, match="cannot be read through a server"):
                registry.snapshot()
            return
        registry.commit(put={"a": b"1", "a/b": b"", "z/y/x": bytes(range(256))})
        with registry.lease(store.backend.ttl) as lease:
            registry.commit(ephemeral={"m/1": b"member"}, put={"m/2": b"stays"}, lease=lease)
            snapshot = registry.snapshot()
        assert list(snapshot.entries) == [each for each in registry.scan("") if each.key != "m/1"]
        assert [each.key for each in snapshot.entries] == ["a", "a/b", "m/2", "z/y/x"]
        assert (snapshot.unread, bool(snapshot.moment)) == ((), True)

    def test_a_snapshot_under_load_shows_all_of_each_commit_or_nothing(self, store: Store) -> None:
        """Commits move tokens to keys that never were before, and amounts between accounts. A reader of different
        moments would find a token twice or nowhere, or another sum."""
        if not store.backend.has_snapshots:
            return
        registry, stop = store.open(), threading.Event()
        registry.commit(put={f"{_TOKENS}{n}/here/0": b"t" for n in range(TOKENS)})
        registry.commit(put={f"m/{n:03d}": b"" for n in range(120)})
        registry.commit(put=dict.fromkeys(ACCOUNTS, b"%d" % (SUM // len(ACCOUNTS))))
        writers = [threading.Thread(target=move, args=(store.open(), n, stop)) for n in range(2)]
        try:
            for writer in writers:
                writer.start()
            states: set[tuple[str, ...]] = set()
            while len(states) < STATES:
                assert all(writer.is_alive() for writer in writers)
                snapshot = registry.snapshot(lambda key: key.startswith(_TOKENS))
                keys = [*(each.key for each in snapshot.entries), *snapshot.unread]
                states.add(tuple(keys))
                tokens = sorted(key.split("/")[1] for key in keys if key.startswith(_TOKENS))
                assert tokens == [str(n) for n in range(TOKENS)], snapshot
                assert sum(int(each.value) for each in snapshot.entries if each.key in ACCOUNTS) == SUM
        finally:
            stop.set()
            for writer in writers:
                writer.join(60)


def move(registry: Registry, number: int, stop: threading.Event) -> None:
    """Move the tokens of one writer from key to key, and amounts between two accounts, until told to stop."""
    moves = 0
    while not stop.is_set():
        for token in range(number, TOKENS, 2):
            (old,) = registry.scan(f"{_TOKENS}{token}/")
            moves += 1
            new = f"{_TOKENS}{token}/{('here', 'there')[moves % 2]}/{number}-{moves}"
            source, target = (registry.get(ACCOUNTS[(number + moves + n) % len(ACCOUNTS)]) for n in range(2))
            assert source is not None
            assert target is not None
            try:
                registry.commit(
                    expect={old.key: old.version, new: ABSENT, source.key: source.version, target.key: target.version},
                    put={
                        new: old.value,
                        source.key: b"%d" % (int(source.value) - 1),
                        target.key: b"%d" % (int(target.value) + 1),
                    },
                    delete=[old.key],
                )
            except Conflict:
                continue  # the other writer was faster
