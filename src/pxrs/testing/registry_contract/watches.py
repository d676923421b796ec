"""Watches: no change is missed, and none is invented."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

import pytest

from pxrs.errors import (
    Closed,
)
from pxrs.registry import Registry
from pxrs.testing.registry_contract.store import Fixtures, Store, quieten

HANDLES: Final = 200
"""How many handles are opened on one registry in the test of W6."""
SPARE: Final = 8
"""How many threads and descriptors a store may use for all of its watches together."""


class Watches(Fixtures):
    def test_every_kind_of_change_wakes(self, store: Store, registry: Registry) -> None:
        other = store.open()
        with other.watch("w/") as watch, registry.lease(30) as lease:
            changes: list[Callable[[], object]] = [
                lambda: registry.commit(put={"w/a": b"1"}),
                lambda: registry.commit(put={"w/a": b"2"}),
                lambda: registry.commit(put={"w/deep/er/b": b""}),
                lambda: registry.commit(ephemeral={"w/m": b""}, lease=lease),
                lambda: registry.commit(delete=["w/a"]),
                lambda: registry.commit(put={"elsewhere": b"", "w/deep/er/b": b"2"}),
                lease.close,
            ]
            for i, change in enumerate(changes):
                quieten(watch)
                change()
                assert watch.wait(30), f"change {i} was missed"

    def test_a_change_elsewhere_does_not_wake(self, registry: Registry) -> None:
        with registry.watch("w/a/", "w/key") as watch:
            quieten(watch)
            registry.commit(put={"w/ab": b"", "w/keys": b"", "w/b/a": b"", "x": b""})
            assert not watch.wait(0.3)

    def test_a_single_key_is_watched(self, store: Store, registry: Registry) -> None:
        other = store.open()
        with other.watch("group/leader", "group/members/") as watch:
            for key in ("group/leader", "group/members/1"):
                for write in ({"put": {key: b""}}, {"put": {key: b"2"}}, {"delete": [key]}):
                    quieten(watch)
                    registry.commit(**write)
                    assert watch.wait(30), (key, write)

    def test_r2_no_change_is_missed_between_watch_and_scan(self, store: Store) -> None:
        writer, reader = store.open(), store.open()
        last = 60

        def write() -> None:
            for i in range(1, last + 1):
                writer.commit(put={"w/n": b"%d" % i})

        with reader.watch("w/") as watch:
            thread = threading.Thread(target=write)
            thread.start()
            try:
                while True:
                    entry = reader.get("w/n")
                    if entry is not None and int(entry.value) == last:
                        break
                    assert watch.wait(30), f"no wake after {entry}"
            finally:
                thread.join()

    def test_r2_a_key_that_was_seen_and_went_at_once_is_a_change(self, store: Store) -> None:
        writer, reader = store.open(), store.open()
        with reader.watch("w/") as watch:
            for i in range(3):
                quieten(watch)
                version = writer.commit(put={"w/a": b"%d" % i})["w/a"]
                entry = reader.get("w/a")
                assert entry is not None
                assert entry.version == version
                writer.commit(delete=["w/a"])
                while reader.get("w/a") is not None or not watch.wait(0.0):
                    assert watch.wait(30), "the key was deleted, and the watch was not woken"
                    break

    def test_close_wakes_the_waiter(self, registry: Registry) -> None:
        watch = registry.watch("w/")
        quieten(watch)
        closer = threading.Timer(0.05, watch.close)
        closer.start()
        with pytest.raises(Closed):
            watch.wait(10)
        closer.join()
        watch.close()

    def test_an_idle_watch_uses_no_processor(self, registry: Registry) -> None:
        with registry.watch("w/") as watch, registry.lease(10):
            quieten(watch)
            began = time.process_time()
            assert not watch.wait(1.0)
            assert time.process_time() - began < 0.15

    def test_w6_handles_share_what_the_store_does_for_them(self, store: Store, registry: Registry) -> None:
        """Threads and descriptors do not grow with the number of handles, be their prefixes the same or not."""
        other = store.open()
        with registry.watch("w/0", "w/all/") as first:
            quieten(first)
            threads, descriptors = threading.active_count(), _descriptors()
            with ExitStack() as stack:
                watches = [stack.enter_context(registry.watch(f"w/{i % 50}", "w/all/")) for i in range(HANDLES)]
                assert threading.active_count() <= threads + SPARE
                assert _descriptors() <= descriptors + SPARE
                quieten(first)
                for watch in watches:
                    watch.wait(0)
                other.commit(put={"w/all/a": b"1"})
                for watch in (first, *watches):
                    assert watch.wait(30), "a handle that shares a prefix was not woken"
                quieten(watches[7])
                other.commit(put={"w/7": b"1"})
                assert watches[7].wait(30)
                assert watches[57].wait(30)
            quieten(first)
            other.commit(put={"w/0": b"1"})
            assert first.wait(30), "closing the other handles ended the watch of this one"

    def test_a_prefix_is_watched_again_after_its_last_handle_was_closed(self, store: Store, registry: Registry) -> None:
        other = store.open()
        for i in range(3):
            with registry.watch("w/a/", "w/b") as watch:
                quieten(watch)
                other.commit(put={"w/a/k": b"%d" % i})
                assert watch.wait(30)

    def test_a_callback_is_called_when_a_watch_wakes(self, store: Store, registry: Registry) -> None:
        other = store.open()
        called, later = threading.Event(), threading.Event()
        with registry.watch("w/") as watch:
            with watch.subscribe(called.set):
                quieten(watch)
                called.clear()
                other.commit(put={"w/a": b"1"})
                assert called.wait(30)
                assert watch.wait(30), "the watch must be woken too"
            quieten(watch)
            called.clear()
            watch.subscribe(later.set)
            other.commit(put={"w/a": b"2"})
            assert later.wait(30)
            assert not called.is_set(), "the subscription has ended"
            later.clear()
        assert later.is_set(), "closing must wake the watch"


def _descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:  # pragma: no cover - not Linux: threads alone are counted
        return 0
