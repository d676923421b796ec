"""A handle of the file registry that has met an error or an interrupt goes on with the true state, beside others."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pxrs import registry
from pxrs.clock import SYSTEM
from pxrs.errors import Closed, OutcomeUnknown, RegistryError, UsedAfterFork
from pxrs.registry import Registry
from pxrs.registry.file import journal
from pxrs.registry.file import lease as lease_module
from pxrs.registry.file import watch as watch_module
from pxrs.registry.file.lease import expiry_of
from pxrs.testing import faults
from pxrs.testing.waiting import eventually

SOAK = bool(os.environ.get("PXRS_SOAK"))


@pytest.fixture(autouse=True)
def without_inspections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle inspects its folder once a second. That would make the number of its system calls depend on the time."""
    monkeypatch.setattr(journal, "INSPECT_S", 3_600.0)


@pytest.fixture(autouse=True)
def small_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "ENTRIES_MIN", 5)


def view(handle: Registry) -> dict[str, tuple[bytes, int]]:
    return {entry.key: (entry.value, entry.version) for entry in handle.scan("")}


def commit(a: Registry, b: Registry) -> Callable[[], object]:
    return lambda: b.commit(put={"x": b"1"})


def commit_and_seal(a: Registry, b: Registry) -> Callable[[], object]:
    for i in range(3):
        a.commit(put={f"f{i}": b""})
    return lambda: b.commit(put={"x": b"1"})


def follow_a_seal(a: Registry, b: Registry) -> Callable[[], object]:
    for i in range(5):
        a.commit(put={f"f{i}": b""})
    return lambda: b.get("f0")


def commit_after_sleeping_through_compactions(a: Registry, b: Registry) -> Callable[[], object]:
    for i in range(12):
        a.commit(put={f"f{i}": b""})
    return lambda: b.commit(put={"x": b"1"})


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE], ids=["EIO", "EMFILE"])
@pytest.mark.parametrize("scene", [commit, commit_and_seal, follow_a_seal, commit_after_sleeping_through_compactions])
def test_any_call_may_fail_and_the_same_handle_goes_on(
    scene: Callable[[Registry, Registry], Callable[[], object]],
    number: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every call fails once, those too that seldom do. Then both handles work on, and all see the same."""
    caplog.set_level(logging.CRITICAL, "pxrs")

    def refuse(name: str) -> None:
        raise OSError(number, os.strerror(number), name)

    at = 0
    while True:
        at += 1
        directory = tmp_path / str(at)
        with registry.open(directory) as a, registry.open(directory) as b:
            a.commit(put={"begun": b""})
            act = scene(a, b)
            steps, error = faults.Steps(at, refuse), None
            try:
                with faults.counted(steps):
                    act()
            except RegistryError as raised:
                error = raised
            if steps.count < at:
                assert at > 5
                return
            with registry.open(directory) as fresh:
                written = fresh.get("x") is not None
            if error is None and scene is not follow_a_seal:
                assert written, f"call {at}: acknowledged and not there"
            if error is not None and not isinstance(error, OutcomeUnknown):
                assert not written, f"call {at}: {error!r}, and yet it is there"
            acknowledged = [a.commit(put={"ya": b""}), b.commit(put={"yb": b""}), a.commit(put={"yc": b""})]
            with registry.open(directory) as fresh:
                assert view(a) == view(b) == view(fresh), f"call {at}"
                for versions in acknowledged:
                    ((key, version),) = versions.items()
                    assert view(fresh)[key] == (b"", version), f"call {at}"
        shutil.rmtree(directory)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the interrupt may hit a finalizer
def test_an_interrupt_at_any_moment_leaves_no_handle_with_a_state_of_its_own(tmp_path: Path) -> None:
    class Interrupt(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    dice = random.Random(5)

    def use(handle: Registry, value: bytes) -> None:
        try:
            signal.setitimer(signal.ITIMER_REAL, dice.uniform(0.00002, 0.0006))
            for _ in range(5):
                handle.get("n")
            handle.commit(put={"m": value})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with registry.open(tmp_path) as a, registry.open(tmp_path) as b:
            for i in range(2000 if SOAK else 150):
                version = b.commit(put={"n": b"%d" % i, f"k{i % 7}": b""})["n"]
                with contextlib.suppress(Interrupt, RegistryError):
                    use(a, b"%d" % i)
                entry = a.get("n")
                assert entry is not None
                assert entry.version == version, f"round {i}"
            with registry.open(tmp_path) as fresh:
                assert view(a) == view(b) == view(fresh)
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_a_slow_observer_does_not_end_a_lease_that_was_renewed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(path: Path) -> float | None:
        expiry = expiry_of(path)
        while expiry is not None and SYSTEM.now() <= expiry:  # as if stopped right after the date was read
            time.sleep(0.05)
        return expiry

    with registry.open(tmp_path) as holder, registry.open(tmp_path) as observer, holder.lease(3.0) as lease:
        holder.commit(ephemeral={"m": b""}, lease=lease)
        for module in (lease_module, watch_module):
            monkeypatch.setattr(module, "expiry_of", slow)
        assert observer.get("m") is not None
        assert lease.alive


def test_many_dead_holders_are_cleared_at_once(tmp_path: Path) -> None:
    def hold() -> None:
        handle = registry.open(tmp_path)
        for i in range(60):
            handle.commit(ephemeral={f"m/{i:03}": b""}, lease=handle.lease(60))

    with faults.child(hold) as pid:
        assert faults.wait_exit(pid) == 0
    with registry.open(f"file:{tmp_path}?timeout=5") as handle:
        assert handle.scan("m/", limit=1) == []
        with handle.watch("m/"):
            assert handle.scan("m/") == []
        assert list((tmp_path / "pxrs" / "leases").iterdir()) == []


def test_r11_a_forked_child_ends_neither_lease_nor_registry_of_its_parent(tmp_path: Path) -> None:
    with registry.open(tmp_path) as handle, handle.lease(30) as lease, handle.watch("m") as watch:
        handle.commit(ephemeral={"m": b""}, lease=lease)

        def child() -> None:
            assert not lease.alive
            with pytest.raises(UsedAfterFork):
                lease.check()
            with pytest.raises(UsedAfterFork):
                watch.wait(0)
            lease.close()
            watch.close()
            handle.close()

        with faults.child(child) as pid:
            assert faults.wait_exit(pid) == 0
        assert handle.get("m") is not None
        handle.commit(put={"still": b""}, lease=lease)


def test_descriptors_and_threads_come_back(tmp_path: Path) -> None:
    def use() -> None:
        with registry.open(tmp_path / "registry") as handle:
            for at in range(1, 14):  # refused at each of its first calls, and then once not at all
                with contextlib.suppress(RegistryError), faults.counted(faults.Steps(at, faults.no_space)):
                    handle.lease(30).close()
            with handle.watch("a/"), handle.lease(30) as lease:
                handle.commit(ephemeral={"a/b": b""}, lease=lease)

    def in_use() -> tuple[int, int]:
        gc.collect()  # a generation's descriptor goes with the last who may still sync it
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def are_back() -> bool:
        return all(now <= before for now, before in zip(in_use(), at_first, strict=True))

    use()
    at_first = in_use()
    for _ in range(5):
        use()
    eventually(are_back)


def test_closing_while_others_open_leases_and_watches(tmp_path: Path) -> None:
    """Whatever the order, nothing outlives the handle: no lease is renewed on, no watch waits for ever."""
    for _ in range(10):
        handle = registry.open(tmp_path)
        handle.lease(30)
        kept: list[object] = []

        def work(handle: Registry = handle, kept: list[object] = kept) -> None:
            try:
                while True:
                    kept.append(handle.lease(30))
                    kept.append(handle.watch("w/"))
            except (Closed, RegistryError):
                return

        threads = [threading.Thread(target=work) for _ in range(2)]
        closers = [threading.Thread(target=handle.close) for _ in range(2)]
        for thread in (*threads, *closers):
            thread.start()
        for thread in (*threads, *closers):
            thread.join(20)
            assert not thread.is_alive()
        for thing in kept:
            if isinstance(thing, registry.Lease):
                assert not thing.alive
            elif isinstance(thing, registry.Watch):
                with pytest.raises(Closed):
                    thing.wait(5)
    with registry.open(tmp_path) as handle:
        assert handle.shared.journal.state.leases == {}  # type: ignore[attr-defined]
