"""The file registry under kill -9, SIGSTOP and failing calls at every step of its work (R9, F2, F3)."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pxrs import registry
from pxrs.errors import (
    Conflict,
    OutcomeUnknown,
    RegistryCorrupt,
    RegistryError,
    RegistryNotWritable,
    RegistryUnavailable,
    StorageFull,
)
from pxrs.registry import ABSENT
from pxrs.registry.file import journal
from pxrs.testing import faults
from pxrs.testing.actor import Actor
from pxrs.testing.waiting import eventually

pytestmark = pytest.mark.sampled(2, of="module")

SOAK = bool(os.environ.get("PXRS_SOAK"))
SEED = int(os.environ.get("SEED", random.randrange(1_000_000)))
KEYS = ("twin/a", "twin/b", "twin/c")
Work = Callable[[Path, faults.Steps], None]


@pytest.fixture(autouse=True)
def without_inspections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle inspects its folder once a second. That would make the number of its system calls depend on the time."""
    monkeypatch.setattr(journal, "INSPECT_S", 3_600.0)


@pytest.fixture(autouse=True)
def small_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compact every few commits, so that compaction is among the steps."""
    monkeypatch.setattr(journal, "ENTRIES_MIN", 6)


def commit(directory: Path, steps: faults.Steps) -> None:
    with registry.open(directory) as handle, faults.counted(steps):
        handle.commit(put=dict.fromkeys(KEYS, b"new"), delete=["twin/old"])


def commit_and_compact(directory: Path, steps: faults.Steps) -> None:
    with registry.open(directory) as handle:
        while handle.shared.journal.number - handle.shared.journal._begun_at < journal.ENTRIES_MIN - 1:  # type: ignore[attr-defined]
            handle.commit(put={"filler": b""})
        with faults.counted(steps):
            handle.commit(put=dict.fromkeys(KEYS, b"new"), delete=["twin/old"])


def commit_with_lease(directory: Path, steps: faults.Steps) -> None:
    with registry.open(directory) as handle, faults.counted(steps):
        lease = handle.lease(30)
        lease.abandon()  # no other thread's calls among the counted
        handle.commit(put=dict.fromkeys(KEYS, b"new"), ephemeral={"member": b""}, delete=["twin/old"], lease=lease)
        lease.close()


def open_new(directory: Path, steps: faults.Steps) -> None:
    with faults.counted(steps), registry.open(f"file:{directory}?namespace=new") as handle:
        handle.commit(put={"first": b""})


WORKS = [commit, commit_and_compact, commit_with_lease, open_new]


def prepare(directory: Path) -> None:
    with registry.open(directory) as handle:
        handle.commit(put={**dict.fromkeys(KEYS, b"old"), "twin/old": b""})


def check_whole(directory: Path) -> str:
    """All of the commit or nothing of it, and the registry works; returns which."""
    with registry.open(directory) as handle:
        entries = {e.key: e for e in handle.scan("twin/")}
        values = {entries[key].value for key in KEYS}
        assert len(values) == 1, entries
        (value,) = values
        assert ("twin/old" in entries) == (value == b"old")
        assert len({entries[key].version for key in KEYS}) == 1
        version = handle.commit(put={"after": b"1"})["after"]
        handle.commit(expect={"after": version, **{k: entries[k].version for k in KEYS}}, delete=["after"])
    with registry.open(f"file:{directory}?namespace=new") as handle:
        handle.commit(put={"second": b""})
        assert handle.get("second") is not None
    return value.decode()


def steps_of(work: Work, directory: Path) -> int:
    """How many calls the work makes when nothing goes wrong. In a child, as the faults will be."""
    prepare(directory)
    count = directory / "count"

    def measure() -> None:
        steps = faults.Steps()
        work(directory, steps)
        count.write_text(str(steps.count))

    with faults.child(measure) as pid:
        assert faults.wait_exit(pid) == 0
    return int(count.read_text())


def every_step(work: Work, base: Path) -> Iterator[tuple[int, Path]]:
    """Each system call of the work, by its number; of a long work every third one, beginning as SEED says, unless
    PXRS_SOAK is set."""
    total = steps_of(work, base / "count")
    assert total >= 8
    stride = 1 if SOAK or total < 24 else 3
    print(f"SEED={SEED}: every {stride} of {total} steps")  # noqa: T201
    for at in range(1 + SEED % stride, total + 1, stride):
        directory = base / str(at)
        prepare(directory)
        yield at, directory
        shutil.rmtree(directory)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("work", WORKS)
def test_kill_9_before_every_system_call(work: Work, tmp_path: Path) -> None:
    outcomes = set()
    for at, directory in every_step(work, tmp_path):
        steps = faults.Steps(at, faults.kill)
        with faults.child(lambda d=directory, s=steps: work(d, s)) as pid:  # type: ignore[misc]
            assert faults.wait_exit(pid) == -signal.SIGKILL
        outcomes.add(check_whole(directory))
    assert outcomes == ({"old"} if work is open_new else {"old", "new"}), "the commit point was among the steps"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("work", WORKS)
def test_a_process_stopped_before_any_system_call_blocks_nobody(work: Work, tmp_path: Path) -> None:
    for at, directory in every_step(work, tmp_path):
        steps = faults.Steps(at, faults.stop)

        def late(directory: Path = directory, steps: faults.Steps = steps) -> None:
            # Stopped right behind its link, through a compaction, it cannot tell, and says so; a lease that may not
            # have begun is not given out.
            with contextlib.suppress(OutcomeUnknown, RegistryUnavailable):
                work(directory, steps)

        with faults.child(late) as pid:
            assert faults.wait_stopped(pid)
            with registry.open(f"file:{directory}?timeout=5") as other:
                for i in range(journal.ENTRIES_MIN * 2 + 1):  # past two compactions
                    other.commit(put={"busy": b"%d" % i})
                assert len({e.value for e in other.scan("twin/") if e.key in KEYS}) == 1
            os.kill(pid, signal.SIGCONT)
            assert faults.wait_exit(pid) == 0, f"step {at}"
        with registry.open(directory) as handle:
            entry = handle.get("busy")
            assert entry is not None
            assert entry.value == b"%d" % (journal.ENTRIES_MIN * 2), "the late process undid nothing"
        outcome = check_whole(directory)
        assert outcome == ("old" if work is open_new else "new") or work is commit_with_lease


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["disk full", "i/o error"])
@pytest.mark.parametrize("work", [commit, commit_and_compact])
def test_a_failing_call_gives_a_typed_error_and_nothing_half_written(work: Work, number: int, tmp_path: Path) -> None:
    refused = tried = 0
    refusal = StorageFull if number == errno.ENOSPC else RegistryUnavailable
    for at, directory in every_step(work, tmp_path):
        tried += 1
        steps = faults.Steps(at, faults.fail(number))
        error: RegistryError | None = None
        try:
            work(directory, steps)
        except (refusal, OutcomeUnknown) as raised:
            error = raised
            refused += 1
        outcome = check_whole(directory)
        if error is None:
            assert outcome == "new", f"step {at}: acknowledged"
        elif not isinstance(error, OutcomeUnknown):
            assert outcome == "old", f"step {at}: {error}"
    assert refused >= (4 if tried == at else 1), "at least 4 of all steps, if every one was tried"


def test_a_full_disk_is_refused_and_works_again_when_there_is_room(tmp_path: Path) -> None:
    """On a real file system that is really full, which a user namespace lets anyone mount."""
    script = textwrap.dedent("""
        import os, sys
        from pxrs import registry
        from pxrs.errors import StorageFull
        directory = sys.argv[1]
        handle = registry.open(directory)
        for i in range(10_000):
            try:
                handle.commit(put={f"k/{i}": bytes(8192), "last": b"%d" % i})
            except StorageFull:
                break
        assert i > 5, i
        assert handle.get("last").value == b"%d" % (i - 1)
        assert handle.get(f"k/{i}") is None
        try:
            handle.commit(put={"large": bytes(500_000)})
        except StorageFull:
            handle.get("last")
        else:
            raise SystemExit("it was full")
        os.unlink(f"{directory}/ballast")
        handle.commit(put={"last": b"again"})
        assert registry.open(directory).get("last").value == b"again"
        print("recovered")
    """)
    shell = (
        f'mount -t tmpfs -o size=1m none "{tmp_path}" && head -c 300000 /dev/zero > "{tmp_path}/ballast" && exec "$@"'
    )
    rights = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    if sys.platform != "linux" or subprocess.run([*rights, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    command = [*rights, "sh", "-c", shell, "sh", sys.executable, "-c", script, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "recovered", result.stderr


def test_a_directory_that_cannot_be_written_takes_no_commit_and_stays_empty(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(0o555)

    def work() -> None:
        if os.geteuid() == 0:
            os.setuid(65534)
        for path in (closed, closed / "sub"):
            with registry.open(path) as handle:
                assert handle.scan("") == []
                with pytest.raises(RegistryNotWritable):
                    handle.commit(put={"x": b""})

    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:3]:  # also with a folder for each of several test processes
        parent.chmod(0o755)
    with faults.child(work) as pid:
        assert faults.wait_exit(pid) == 0
    assert list(closed.iterdir()) == []


def test_a_damaged_entry_is_reported_with_its_place(tmp_path: Path) -> None:
    with registry.open(tmp_path) as handle:
        handle.commit(put={"a": b"x" * 50})
        path = Path(handle.shared.journal.generation.entry(handle.shared.journal.number))  # type: ignore[attr-defined]
    data = bytearray(path.read_bytes())
    for position in (0, 5, 20, len(data) - 1):
        damaged = bytearray(data)
        damaged[position] ^= 0x40
        path.write_bytes(damaged)
        with pytest.raises(RegistryCorrupt) as error, registry.open(tmp_path) as handle:
            handle.get("a")
        assert error.value.where == str(path)
    path.write_bytes(data[:7])
    with pytest.raises(RegistryCorrupt), registry.open(tmp_path) as handle:
        handle.get("a")


def test_many_processes_commit_through_compactions_and_kills(tmp_path: Path) -> None:
    """Every acknowledged increment is there, and none that was not asked for."""
    acknowledged = tmp_path / "acknowledged"
    asked = tmp_path / "asked"
    directory = tmp_path / "registry"
    for path in (acknowledged, asked):
        path.touch()
    dice = random.Random(11)

    def work() -> None:
        asked_log, acknowledged_log = (os.open(p, os.O_WRONLY | os.O_APPEND) for p in (asked, acknowledged))
        with registry.open(directory) as handle:
            while True:
                entry = handle.get("n")
                version, count = (ABSENT, 0) if entry is None else (entry.version, int(entry.value))
                os.write(asked_log, b".")
                try:
                    handle.commit(expect={"n": version}, put={"n": b"%d" % (count + 1), "twin": b"%d" % (count + 1)})
                except (Conflict, OutcomeUnknown):
                    continue
                os.write(acknowledged_log, b".")

    for _ in range(200 if SOAK else 12):
        before = acknowledged.stat().st_size
        with faults.child(work) as one, faults.child(work) as two, faults.child(work):
            time.sleep(dice.uniform(0.02, 0.12))  # to be killed at a random moment
            eventually(lambda enough=before + 5: acknowledged.stat().st_size >= enough)  # type: ignore[misc]
            os.kill(one, signal.SIGKILL)
            os.kill(two, signal.SIGSTOP)
            time.sleep(dice.uniform(0.0, 0.03))
            os.kill(two, signal.SIGCONT)
    with registry.open(directory) as handle:
        entries = [handle.get("n"), handle.get("twin")]
    assert entries[0] is not None
    assert entries[1] is not None
    assert entries[0].value == entries[1].value
    count = int(entries[0].value)
    assert acknowledged.stat().st_size <= count <= asked.stat().st_size
    assert count > 50
    generations = list((directory / "pxrs" / "generations").iterdir())
    assert len(generations) < 30, "old generations are removed"


def test_f2_a_killed_holder_is_seen_by_a_watcher_at_once(tmp_path: Path) -> None:
    """By the kernel, not by the lease's age: the lease would last a minute."""
    seconds = []
    with registry.open(tmp_path) as handle:
        for _ in range(5 if SOAK else 2):
            with Actor(str(tmp_path)) as holder, handle.watch("member") as watch:
                holder.call("lease", ttl=60.0)
                holder.call("commit", ephemeral={"member": b""}, lease=True)
                while watch.wait(0.05):
                    continue
                began = time.monotonic()
                os.kill(holder.pid, signal.SIGKILL)
                while handle.get("member") is not None:  # a wake may still be one of the commit
                    assert watch.wait(20), "nobody told the watcher"
                seconds.append(time.monotonic() - began)
    assert min(seconds) < 5, seconds


def test_a_forked_child_does_not_keep_its_parents_lease_alive(tmp_path: Path) -> None:
    def holder() -> None:
        handle = registry.open(tmp_path)
        lease = handle.lease(60)
        handle.commit(ephemeral={"member": b""}, lease=lease)
        if os.fork() == 0:
            # pytest removes the folder right after the test, perhaps before this process has seen the file.
            until = time.monotonic() + 30
            while time.monotonic() < until and tmp_path.exists() and not (tmp_path / "over").exists():
                time.sleep(0.05)
            os._exit(0)
        (tmp_path / "forked").touch()
        signal.pause()

    with registry.open(tmp_path) as handle, handle.watch("member") as watch, faults.child(holder) as pid:
        until = time.monotonic() + 20
        while not (tmp_path / "forked").exists():
            watch.wait(0.05)
            assert time.monotonic() < until
        while watch.wait(0.1):
            continue
        assert handle.get("member") is not None
        os.kill(pid, signal.SIGKILL)
        while handle.get("member") is not None:
            assert watch.wait(20)
        (tmp_path / "over").touch()


def test_a_holder_stopped_in_the_middle_of_a_renewal_is_out(tmp_path: Path) -> None:
    """Its late heartbeat reaches the file after others have ended the lease."""

    def holder() -> None:
        handle = registry.open(tmp_path)
        steps = faults.Steps()

        def stop_once_claimed(name: str) -> None:
            if name == "pwrite" and (tmp_path / "claimed").exists():
                os.unlink(tmp_path / "claimed")
                faults.stop(name)

        steps.step = stop_once_claimed  # type: ignore[method-assign]
        with faults.counted(steps):
            lease = handle.lease(3.0)
            handle.commit(ephemeral={"member": b""}, lease=lease)
            (tmp_path / "claimed").touch()
            lease.lost.wait(20)
        assert not lease.alive

    with registry.open(tmp_path) as handle, faults.child(holder) as pid:
        assert faults.wait_stopped(pid)
        with handle.watch("member") as watch:
            while handle.get("member") is not None:
                assert watch.wait(30)
        os.kill(pid, signal.SIGCONT)
        assert faults.wait_exit(pid) == 0
