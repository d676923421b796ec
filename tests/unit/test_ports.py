"""A port that cannot be had: every server says which address it is and what to do."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pxrs
from pxrs import ports
from pxrs.errors import CannotListen
from pxrs.testing.command import run_here


@pytest.fixture
def taken() -> Iterator[str]:
    """An address at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


IN_USE = "the address is in use: stop the process that listens there, or choose another port"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EADDRINUSE, IN_USE),
        (errno.EADDRNOTAVAIL, "this machine has no such address"),
        (errno.EACCES, "choose one from 1024 on"),
        (errno.ENOBUFS, "No buffer space available"),
    ],
)
def test_the_error_of_the_system_becomes_an_advice(number: int, words: str) -> None:
    error = ports.cannot_listen("h:1", OSError(number, "x"), " for metrics")
    assert isinstance(error, CannotListen)
    assert str(error).startswith("cannot listen for metrics on h:1: ")
    assert words in str(error)


def test_an_address_is_tried_to_find_out_why_it_cannot_be_had(taken: str) -> None:
    fault = ports.fault_of(taken)
    assert fault is not None
    assert fault.errno == errno.EADDRINUSE
    unknown = ports.fault_of("no-such-host.invalid:1")
    assert isinstance(unknown, socket.gaierror)
    assert "the host is not known" in str(ports.cannot_listen("no-such-host.invalid:1", unknown))
    assert ports.fault_of("127.0.0.1:0") is None
    assert ports.fault_of("nonsense") is None


COMMANDS: dict[str, Callable[[str], tuple[str, ...]]] = {
    "serve": lambda at: ("serve", "data", "--listen", at),
    "serve --web": lambda at: ("serve", "data", "--listen", "127.0.0.1:0", "--web", at),
    "serve --metrics-listen": lambda at: ("serve", "data", "--listen", "127.0.0.1:0", "--metrics-listen", at),
    "broker": lambda at: ("broker", "--registry", "cluster", "--listen", at),
    "storage": lambda at: ("storage", "--registry", "cluster", "--dir", "node", "--mark-dir", "marks", "--listen", at),
    "web": lambda at: ("web", "--at", "data", "--listen", at),
    "metrics": lambda at: ("metrics", "--at", "data", "--listen", at),
    "upkeep": lambda at: ("upkeep", "--at", "data", "--metrics-listen", at),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_port_in_use_is_one_line_that_names_the_address(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, taken: str, command: str
) -> None:
    pytest.importorskip("grpc")
    monkeypatch.chdir(tmp_path)
    for name in ("PXRS_AT", "PXRS_REGISTRY", "PXRS_METRICS_LISTEN", "PXRS_AUTH"):
        monkeypatch.delenv(name, raising=False)
    with pxrs.open("data") as hub:
        hub.create_topic("t", partitions=1)
    (tmp_path / "marks").mkdir()
    found = run_here(monkeypatch, capfd, COMMANDS[command](taken)).unwrapped()
    assert found.code == 1, found
    assert f"on {taken}: {IN_USE} (CannotListen)" in found.errors
    assert "GRPC" not in found.errors
    assert "Errno" not in found.errors
