"""Closing, and forking."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from pxrs.errors import (
    Closed,
    UsedAfterFork,
)
from pxrs.registry import Registry
from pxrs.testing.registry_contract.store import Fixtures, Store


class Lifecycle(Fixtures):
    def test_a_closed_registry_refuses_every_call(self, store: Store) -> None:
        registry = store.open()
        watch = registry.watch("")
        registry.close()
        registry.close()
        for call in (
            lambda: registry.get("a"),
            lambda: registry.scan(""),
            lambda: registry.commit(put={"a": b""}),
            lambda: registry.lease(1),
            lambda: registry.watch(""),
            lambda: watch.wait(1),
        ):
            with pytest.raises(Closed):
                call()

    def test_what_one_handle_wrote_another_reads_after_the_first_is_closed(self, store: Store) -> None:
        reader = store.open()
        writer = store.open()
        writer.commit(put={"a": b"kept"})
        writer.close()
        entry = reader.get("a")
        assert entry is not None
        assert entry.value == b"kept"

    def test_r11_use_after_fork_raises(self, store: Store, registry: Registry) -> None:
        lease = registry.lease(30)
        registry.commit(ephemeral={"mine": b""}, lease=lease)
        calls: list[Callable[[], object]] = [
            lambda: registry.get("a"),
            lambda: registry.scan(""),
            lambda: registry.commit(put={"a": b""}),
            lambda: registry.lease(1),
            lambda: registry.watch(""),
        ]
        pid = os.fork()
        if pid == 0:  # the child reports by its exit code alone
            refused = 0
            try:
                for call in calls:
                    try:
                        call()
                    except UsedAfterFork:
                        refused += 1
                registry.close()
            finally:
                os._exit(refused)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == len(calls)
        assert registry.get("mine") is not None
        registry.commit(put={"b": b""}, lease=lease)
