"""`pxrs storage` as a real process that is killed, stopped, and runs out of disk."""

from __future__ import annotations

import functools
import os
import queue
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pxrs import registry as registries
from pxrs.cluster.links import LinkSettings, NodeLink
from pxrs.cluster.records import AliveNode, alive_key
from pxrs.cluster.storage.running import StorageSettings, storing
from pxrs.cluster.storage.settings import StorageLimits
from pxrs.errors import LedgerFenced, NodeFull, NodeUnreachable
from pxrs.remote.client.settings import Certificates
from pxrs.testing.servers import StorageServer, certificates
from pxrs.testing.servers.process import wait_until
from tests.unit.cluster.stored import ANSWER_S_MAX, LEDGER, add, body_of, entry, opened, stored

SOAK = bool(os.environ.get("PXRS_SOAK"))
DONE = "whole"
ROOT = Path(__file__).parents[2]


@contextmanager
def linked(server: StorageServer, settings: LinkSettings | None = None) -> Iterator[NodeLink]:
    link = NodeLink(server.node, server.address, settings)
    try:
        yield link
    finally:
        link.close()


def acknowledged(link: NodeLink, numbers: range, size: int = 200) -> list[int]:
    """Add these entries, and wait until each is answered; those that were acknowledged."""
    answers: queue.SimpleQueue[tuple[int, Exception | None]] = queue.SimpleQueue()
    for number in numbers:
        each = entry(number, size=size)
        link.add(
            each.ledger,
            each.entry,
            each.head,
            each.body,
            each.lac,
            None,
            lambda error, number=number: answers.put((number, error)),
        )
    found = [answers.get(timeout=ANSWER_S_MAX) for _ in numbers]
    return [number for number, error in found if error is None]


def test_c2_what_was_acknowledged_and_a_fence_are_there_after_kill_9(tmp_path: Path) -> None:
    """Killed in the middle of writes; then right after a fence was answered."""
    with StorageServer(f"file:{tmp_path}/registry", forked=True) as server:
        node, known, first = server.node, set[int](), 0
        for _ in range(8 if SOAK else 1):
            with linked(server) as link, ThreadPoolExecutor(1) as pool:
                known |= {*acknowledged(link, range(first, first + 20))}
                loading = pool.submit(acknowledged, link, range(first + 20, first + 1_000), 2_000)
                assert wait_until(functools.partial(has_entry_behind, link, first + 19), ANSWER_S_MAX)
                server.kill()
                known |= {*loading.result(ANSWER_S_MAX)}
            first += 1_000
            server.start()
            assert server.node == node
            with linked(server) as link:
                check_stored(link, known)
        with linked(server) as link:
            fenced = link.fence(LEDGER, 3)
            server.kill()
        assert fenced.last >= max(known)
        server.start()
        with linked(server) as link:
            check_stored(link, known)
            assert link.index(LEDGER, after=first).fenced == 3
            with pytest.raises(LedgerFenced):
                link.fence(LEDGER, 2)
            assert acknowledged(link, range(first, first + 1)) == []


def has_entry_behind(link: NodeLink, entry: int) -> bool:
    return bool(link.index(LEDGER, after=entry, limit=1).entries)


def check_stored(link: NodeLink, known: set[int]) -> None:
    """All of these entries can be read."""
    there, after = set(), -1
    while after < max(known):
        for found in link.read(LEDGER, after + 1, max(known)):
            after = found.entry
            if found.head is not None:
                assert bytes(found.body) == body_of(found.entry, found.head.size)
                there.add(found.entry)
    assert known <= there


def test_a_stopped_node_costs_the_timeout_and_serves_again(tmp_path: Path) -> None:
    with StorageServer(f"file:{tmp_path}/registry", forked=True) as server:
        with linked(server, LinkSettings(timeout_s=0.5)) as link:
            assert acknowledged(link, range(2)) == [0, 1]
            server.pause()
            assert acknowledged(link, range(2, 4)) == []
            with pytest.raises(NodeUnreachable):
                link.read(LEDGER, 0, 1)
            server.resume()
            assert wait_until(lambda: acknowledged(link, range(2, 4)) == [2, 3], ANSWER_S_MAX)
        with registries.open(f"file:{tmp_path}/registry") as registry:
            found = registry.get(alive_key(server.node))
            assert found is not None
            assert AliveNode.parse(found.key, found.value).address == server.address
            server.stop()
            assert registry.get(alive_key(server.node)) is None


def test_a_node_with_tls_is_reached_by_its_authority(tmp_path: Path) -> None:
    files = certificates(tmp_path)
    with StorageServer(f"file:{tmp_path}/registry", tls=files, forked=True) as server:
        trusted = Certificates(files.ca.read_bytes(), None, None)
        with linked(server, LinkSettings(certificates=trusted)) as link:
            assert acknowledged(link, range(2)) == [0, 1]
        with linked(server) as link, pytest.raises(NodeUnreachable):
            link.hello()


# A file system that is really full, in a process of its own: this file is its script.


def a_node_meets_a_full_disk(path: Path) -> None:
    """Adds are refused, reads and fences are served; with room again the node goes on, and nothing is lost."""
    ballast = path / "ballast"
    with opened(path / "node", segment_bytes=64 << 10, free_bytes_min=256 << 10) as node:
        known, number = [], 0
        while add(node, entry(number, size=5_000)) == [None]:
            known.append(number)
            number += 1
            node.look_at_room()
        assert "is full" in str(node.refuses)
        assert stored(node, last=number) == known
        with ballast.open("wb") as file:  # and now there is no room at all
            while free := os.statvfs(path).f_bavail * 4096:
                file.write(bytes(free))
                file.flush()
        with suppress(NodeFull):  # the last page of the segment may have room for it
            node.fence(LEDGER.replace("/0/0", "/1/0"), 1)
        assert stored(node, last=number) == known
        ballast.unlink()
        node.fence(LEDGER, 1)
    with opened(path / "node", free_bytes_min=1) as node:
        assert stored(node, last=number) == known
        assert node.page(LEDGER, -1, 1).fence == 1
        assert add(node, entry(number, size=5_000, recovery=1)) == [None]


def the_room_ends_at_any_page(path: Path) -> None:
    """Without a reserve, a write fails half-way: its entries are not there, also not after a restart."""
    for leave in range(6):
        folder = path / f"node-{leave}"
        ballast = path / "ballast"
        with opened(folder) as node:
            assert add(node, entry(0, size=3_000)) == [None]
            with ballast.open("wb", buffering=0) as file:
                while (free := os.statvfs(path).f_bavail - leave) > 0:
                    file.write(bytes(4096 * free))
            answers = add(node, *(entry(number, size=6_000) for number in range(1, 5)))
            known = [0, *(number for number, answer in enumerate(answers, 1) if answer is None)]
            ballast.unlink()
            node.look_at_room()
            node.page(LEDGER, -1, 1)
            assert stored(node) == known
            assert add(node, entry(9)) == [None]
        with opened(folder) as node:
            assert stored(node) == [*known, 9]
        shutil.rmtree(folder)


def a_node_starts_on_a_full_disk(path: Path) -> None:
    """It serves what it has, refuses what it would have to write, and accepts entries once there is room."""
    settings = StorageSettings(path / "full", limits=StorageLimits(free_bytes_min=64 << 10, alive_s=0.05))
    ballast = path / "ballast"
    with registries.open("memory:") as registry:
        with storing(registry, settings) as server:
            node = server.node.id
            assert add(server.node, entry(0, size=3_000)) == [None]
        cookie = (path / "full" / "node.json").read_bytes()
        with ballast.open("wb", buffering=0) as file:
            while free := os.statvfs(path).f_bavail:
                file.write(bytes(4096 * free))
        with storing(registry, settings) as server:
            assert (server.node.id, stored(server.node)) == (node, [0])
            alive = registry.get(alive_key(node))
            assert alive is not None
            assert "the disk is full" in str(AliveNode.parse(alive.key, alive.value).refuses)
            (refused,) = add(server.node, entry(1, size=3_000))
            assert isinstance(refused, NodeFull)
            with pytest.raises(NodeFull):
                server.node.fence(LEDGER, 1)
            assert (path / "full" / "node.json").read_bytes() == cookie
            ballast.unlink()
            assert wait_until(lambda: server.node.refuses is None, ANSWER_S_MAX)
            assert server.node.id == node
            assert add(server.node, entry(1, size=3_000)) == [None]
        with storing(registry, settings) as server:
            assert (server.node.id, stored(server.node)) == (node, [0, 1])
    shutil.rmtree(path / "full")


def test_a_node_on_a_full_disk(tmp_path: Path) -> None:
    rights = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    if sys.platform != "linux" or subprocess.run([*rights, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    shell = f'mount -t tmpfs -o size=2m none "{tmp_path}" && exec "$@"'
    command = [*rights, "sh", "-c", shell, "sh", sys.executable, __file__, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.stdout.strip() == DONE, result.stderr


if __name__ == "__main__":
    a_node_starts_on_a_full_disk(Path(sys.argv[1]))
    the_room_ends_at_any_page(Path(sys.argv[1]))
    a_node_meets_a_full_disk(Path(sys.argv[1]))
    sys.stdout.write(DONE)
