"""The file of a lease: what it says, who may renew it, and that renewals do not overtake each other."""

from __future__ import annotations

import os
import struct
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from pxrs import registry
from pxrs.clock import SYSTEM, ManualClock, boot_id
from pxrs.errors import LeaseExpired, RegistryUnavailable
from pxrs.registry import ABSENT
from pxrs.registry.file import lease as module
from pxrs.registry.file.lease import LeaseFile, expiry_of, is_over, read
from pxrs.registry.file.registry import FileRegistry
from pxrs.registry.lease import id_of
from pxrs.testing.waiting import aside, eventually

TTL_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("leases", "scratch"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def unheld(folder: Path) -> LeaseFile:
    return LeaseFile.create(folder / "leases", folder / "scratch", "l", TTL_S, SYSTEM, is_held=False)


def test_w2_an_unheld_lease_is_over_at_its_expiry_and_not_with_its_process(folder: Path, unheld: LeaseFile) -> None:
    path = folder / "leases" / "l"
    record = read(path)
    assert record is not None
    assert (record.ttl, record.is_held) == (TTL_S, False)
    assert expiry_of(path) == record.expiry, "nobody has a lock on it"
    assert not is_over(path, SYSTEM)
    assert is_over(path, ManualClock(record.expiry))


def test_a_held_lease_is_over_when_its_lock_is_gone(folder: Path) -> None:
    held = LeaseFile.create(folder / "leases", folder / "scratch", "l", TTL_S, SYSTEM, is_held=True)
    assert expiry_of(folder / "leases" / "l") is not None
    assert held.renew() > SYSTEM.now()
    held.let_go()
    assert expiry_of(folder / "leases" / "l") is None
    with pytest.raises(LeaseExpired):
        held.renew()


def test_a_file_of_version_0_1_is_that_of_a_held_lease(folder: Path) -> None:
    path = folder / "leases" / "l"
    path.write_bytes(struct.pack("<d36s", SYSTEM.now() + TTL_S, boot_id().encode()))
    record = read(path)
    assert record is not None
    assert (record.ttl, record.is_held) == (None, True)
    assert is_over(path, SYSTEM), "nobody has a lock on it"


def test_several_processes_renew_one_lease_and_it_never_ends_earlier_than_one_was_told(
    folder: Path, unheld: LeaseFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one stops between reading the time and writing the expiry; the second one comes in between."""
    first_clock, second_clock = ManualClock(SYSTEM.now()), ManualClock(SYSTEM.now())
    path = folder / "leases" / "l"
    first, second = LeaseFile(path, TTL_S, first_clock), LeaseFile(path, TTL_S, second_clock)
    second_clock.advance(5)
    told: list[Future[float]] = []

    class Stopped(ManualClock):
        def now(self) -> float:
            now = super().now()
            if not told:
                told.append(aside(second.renew))
                wait(told, timeout=0.2)  # if it need not wait for the first one, it is done by then
            return now

    first._clock = Stopped(first_clock.now())
    first.renew()
    later = told[0].result(30)
    record = read(path)
    assert record is not None
    assert record.expiry >= later, "the later expiry was returned, and overwritten by the earlier one"


def test_a_renewal_does_not_wait_for_ever_for_another_one(
    folder: Path, unheld: LeaseFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RENEWAL_LOCK_S_MAX", 0.05)
    with (
        unheld._opened() as descriptor,
        module._renewal_lock(descriptor, "l", 1.0),
        pytest.raises(RegistryUnavailable, match="another renewal"),
    ):
        LeaseFile(folder / "leases" / "l", TTL_S, SYSTEM).renew()
    assert unheld.renew() > SYSTEM.now()


def test_r3_a_renewal_after_the_expiry_writes_nothing(folder: Path, unheld: LeaseFile) -> None:
    path = folder / "leases" / "l"
    before = path.read_bytes()
    record = read(path)
    assert record is not None
    with pytest.raises(LeaseExpired, match="too late"):
        LeaseFile(path, TTL_S, ManualClock(record.expiry)).renew()
    assert path.read_bytes() == before


def test_a_lease_whose_file_was_removed_is_over(folder: Path, unheld: LeaseFile) -> None:
    unheld.remove()
    assert read(folder / "leases" / "l") is None
    with pytest.raises(LeaseExpired, match="ended"):
        unheld.renew()
    unheld.remove()
    assert eventually(lambda: is_over(folder / "leases" / "l", SYSTEM))


@pytest.mark.parametrize("size", [0, 8, 43])
def test_a_file_that_a_power_loss_has_cut_off_is_that_of_a_lease_that_is_over(tmp_path: Path, size: int) -> None:
    """The file is not synced: after a power loss the journal has the lease, and its file may be empty."""
    with registry.open(tmp_path) as before:
        lease = before.lease(TTL_S)
        before.commit(ephemeral={"m/1": b""}, lease=lease)
        path = next(tmp_path.glob(f"**/leases/{lease.id}"))
        os.truncate(path, size)
        assert is_over(path, SYSTEM)
        with registry.open(tmp_path) as after:
            assert after.scan("m/") == []
            after.commit({"m/1": ABSENT}, put={"m/1": b"next"})
        assert not path.exists()


def test_a_sweep_removes_files_of_leases_that_never_began_and_no_others(tmp_path: Path) -> None:
    with registry.open(tmp_path) as handle:
        assert isinstance(handle, FileRegistry)
        never_began, other = handle.shared.lease_folder / id_of("x"), handle.shared.lease_folder / "README"
        never_began.touch()
        other.touch()
        handle.shared._sweep_lease_files(set())
        assert not never_began.exists()
        assert other.exists(), "it is no file of a lease"


@pytest.mark.parametrize("moment", ["before the entry", "after the entry"])
def test_r3_a_process_that_is_killed_while_it_ends_a_lease_leaves_no_holder_that_renews_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    class Killed(BaseException):
        pass

    with registry.open(tmp_path) as holder, registry.open(tmp_path) as ending, registry.open(tmp_path) as reader:
        lease = holder.lease(TTL_S)
        holder.commit(ephemeral={"m/1": b""}, lease=lease)
        attached = ending.attach(lease.secret)
        assert isinstance(ending, FileRegistry)
        publish = ending.shared.publish

        def killed(*given: Any) -> int:
            if moment == "after the entry":
                publish(*given)
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(ending.shared, "publish", killed)
            with pytest.raises(Killed):
                ending.shared.end_leases([attached.id])
        assert reader.get("m/1") is None
        with pytest.raises(LeaseExpired):
            lease.renew()
        assert lease.lost.is_set()


def test_a_lease_whose_file_is_removed_is_ended_at_once_by_a_process_that_watches(tmp_path: Path) -> None:
    with registry.open(tmp_path) as holder, registry.open(tmp_path) as other, other.watch("m/") as watch:
        lease = holder.lease(TTL_S)
        holder.commit(ephemeral={"m/1": b""}, lease=lease)
        assert watch.wait(30)
        next(tmp_path.glob(f"**/leases/{lease.id}")).unlink()
        assert watch.wait(30), "it waits for the expiry"
        assert isinstance(other, FileRegistry)
        eventually(lambda: lease.id not in other.shared.journal.state.leases)
