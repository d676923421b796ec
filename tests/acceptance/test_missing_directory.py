"""Commands that run until they are stopped, on a directory that does not exist yet: as with `pxrs.open`, it is created
when something is first written to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pxrs
from pxrs.testing.waiting import PATIENCE_S, eventually
from tests.acceptance.running import Running, starting


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Running]]:
    yield from starting(Running, tmp_path, monkeypatch)


def test_a_directory_that_does_not_exist_yet_is_served(tmp_path: Path, start: Callable[..., Running]) -> None:
    pytest.importorskip("grpc")
    server = start("serve", "data", "--listen", "127.0.0.1:0")
    (at,) = eventually(lambda: re.findall(r"at (pxrs://[\d.:]+)", server.told()), what=server.told)
    with pxrs.open(at) as client:
        client.create_topic("orders", partitions=1)
        with client.producer("orders") as out:
            out.send(b"x")
        client.create_queue("mail").put("to ann")
    assert server.end() == 0, server.told()
    with pxrs.open(tmp_path / "data") as hub:
        assert [message.value for message in hub.topic("orders").messages(0)] == [b"x"]
        assert hub.queue("mail").depth().ready == 1


def test_the_directory_of_a_server_may_be_named_by_the_environment(
    tmp_path: Path, start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("grpc")
    monkeypatch.setenv("PXRS_AT", "data")
    server = start("serve", "--listen", "127.0.0.1:0")
    eventually(lambda: f"serving {tmp_path}/data at" in server.told(), what=server.told)
    assert server.end() == 0, server.told()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("web", "--at", "data", "--listen", "127.0.0.1:0"), "showing "),
        (("upkeep", "--at", "data", "--metrics-listen", "0"), "metrics and health at"),
        (("metrics", "--at", "data", "--listen", "0"), "metrics and health at"),
    ],
    ids=["web", "upkeep", "metrics"],
)
def test_a_hub_that_does_not_exist_yet_is_watched_and_kept(
    tmp_path: Path, start: Callable[..., Running], arguments: tuple[str, ...], words: str
) -> None:
    command = start(*arguments)
    eventually(lambda: words in command.told(), what=command.told)
    with pxrs.open(tmp_path / "data") as hub:
        hub.create_topic("orders", partitions=1)
    assert command.end() == 0, command.told()
    assert "Traceback" not in command.told()


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "typo/data", "--listen", "127.0.0.1:0"),
        ("web", "--at", "typo/data", "--listen", "127.0.0.1:0"),
        ("upkeep", "--at", "typo/data"),
        ("metrics", "--at", "typo/data", "--listen", "0"),
        ("worker", "shop:handle", "--at", "typo/data", "--topic", "t", "--group", "g"),
        ("worker", "shop:handle", "--at", "typo/data", "--queue", "q"),
        ("worker", "shop:handle", "--registry", "sqlite:///typo/jobs.db", "--queue", "q"),
    ],
    ids=" ".join,
)
def test_a_directory_in_a_directory_that_does_not_exist_is_a_mistyped_path(
    tmp_path: Path, start: Callable[..., Running], arguments: tuple[str, ...]
) -> None:
    pytest.importorskip("grpc")
    command = start(*arguments)
    assert command.process.wait(PATIENCE_S) == 2, command.told()
    assert f"there is no directory {tmp_path}/typo, in which" in " ".join(command.told().split())
    assert not (tmp_path / "typo").exists()
