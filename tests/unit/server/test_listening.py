"""Where `pxrs serve` listens, and how many connections it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pxrs.cli.listening import check_listen
from pxrs.errors import InvalidArgument
from pxrs.testing.command import run_here

LOOPBACK = ["127.0.0.1:7077", "127.0.0.1:0", "127.9.9.9:1", "localhost:7077", "[::1]:7077"]
OTHERS = ["0.0.0.0:7077", "[::]:7077", "10.0.0.1:7077", "db1.example.com:7077", "0:7077", "localhost.example.com:1"]
NONE = ["", "7077", ":7077", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "::1:7077", "unix:/tmp/x:1", "127.0.0.1:-1"]


@pytest.mark.parametrize("listen", LOOPBACK)
def test_loopback_needs_no_tokens(listen: str) -> None:
    check_listen(listen, is_open=True)


@pytest.mark.parametrize("listen", OTHERS)
def test_another_address_is_refused_if_everybody_may_do_everything(listen: str) -> None:
    check_listen(listen, is_open=False)
    with pytest.raises(InvalidArgument, match="--auth"):
        check_listen(listen, is_open=True)


@pytest.mark.parametrize("listen", NONE)
def test_what_is_no_host_and_port_is_refused(listen: str) -> None:
    """gRPC takes `::1:7077` as the address `::1:7077` and a port of its own choice."""
    with pytest.raises(InvalidArgument, match="--listen is"):
        check_listen(listen, is_open=False)


@pytest.mark.parametrize(("soft", "hard", "found"), [(128, 256, "128 256"), (200, 4_000, "2000 4000")])
def test_w5_connections_leave_descriptors_to_the_files_of_the_hub(soft: int, hard: int, found: str) -> None:
    program = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from pxrs.server.descriptors import connections_within\n"
        "print(connections_within(2_000), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == found
    assert ("ulimit" in done.stderr) == (hard == 256), "the operator is told of a limit that is too low"


def test_a_directory_that_is_not_there_is_named_as_the_command_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_here(monkeypatch, capsys, ("serve", str(tmp_path / "none" / "data"))).unwrapped()
    assert done.code == 2
    assert "correct DIRECTORY" in done.errors
