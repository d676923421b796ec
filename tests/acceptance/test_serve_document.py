"""docs/serve.md: its commands and programs run, in the order of the page, and its tables are those of the code."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer.main

pytest.importorskip("grpc")

from pxrs.cli.app import app
from pxrs.cli.serve import with_limits
from pxrs.errors import InvalidArgument
from pxrs.remote.client.settings import OPTIONS, PATIENCE_S, TIMEOUT_S
from pxrs.server.settings import ServerLimits
from pxrs.testing import forked

PAGE = Path(__file__).parents[2] / "docs/serve.md"
ADDRESS = "127.0.0.1:7077"
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@contextmanager
def server(arguments: list[str], folder: Path) -> Iterator[str]:
    """`pxrs serve` at a free port; its host and port."""
    free = [each.replace(":7077", ":0") for each in arguments]
    mine, theirs = os.pipe()
    with open(mine) as printed:
        running = forked.Forked("pxrs.cli", free, stdout=theirs, cwd=folder, is_mortal=True)
        os.close(theirs)
        try:
            line = printed.readline()
            found = re.search(r"pxrs://([\d.:]+)", line)
            assert found is not None, f"{shlex.join(arguments)} printed {line!r}"
            yield found[1]
        finally:
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == 0


class Reader:
    """Somebody who tries the page in one folder: a `pxrs serve` ends the one before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server: Any = None
        self._address = ADDRESS

    def do(self, kind: str, block: str) -> None:
        if kind == "python":
            program = block.replace(ADDRESS, self._address)
            subprocess.run([sys.executable, "-c", program], cwd=self._folder, check=True, timeout=120)
            return
        for line in block.splitlines():
            if line.startswith("pxrs serve "):
                self.close()
                self._server = server(shlex.split(line, comments=True)[1:], self._folder)
                self._address = self._server.__enter__()
            elif line.startswith("openssl "):
                subprocess.run(shlex.split(line), cwd=self._folder, check=True, capture_output=True, timeout=120)
            elif not line.startswith("pip "):
                self._run(line.replace(ADDRESS, self._address))

    def _run(self, line: str) -> None:
        before, _, command = line.partition("pxrs ")
        typed = "".join(shlex.split(before)[1:2]) + "\n"  # of "echo '...' |"
        ran = forked.run_text(
            "pxrs.cli", shlex.split(command, comments=True), input=typed.encode(), cwd=self._folder, timeout=120
        )
        assert ran.returncode == 0, f"{line}: {ran.stderr}"

    def close(self) -> None:
        if self._server is not None:
            self._server.__exit__(None, None, None)
            self._server = None


def test_the_page_of_the_server_runs(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates of the page")
    reader = Reader(tmp_path)
    (tmp_path / "data").mkdir()
    try:
        blocks = BLOCK.findall(PAGE.read_text())
        assert sum("pxrs serve " in block for _, block in blocks) >= 3
        for kind, block in blocks:
            reader.do(kind, block)
    finally:
        reader.close()


# Its tables.


def sections() -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """The options of the address, those of the server, and the limits without an option of their own."""
    text = PAGE.read_text()
    found = []
    for head in ("option", "option", "limit"):
        start = text.index(f"\n| {head} | default | |\n")
        block, _, rest = text[start:].removeprefix(f"\n| {head} | default | |\n|---|---|---|\n").partition("\n\n")
        text = f"\n{rest}"
        cells = [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in block.splitlines()]
        found.append({name.strip("`"): default for name, default, *_ in cells})
    return found[0], found[1], found[2]


def test_every_option_of_the_address_is_on_the_page() -> None:
    address, _, _ = sections()
    assert address.keys() == set(OPTIONS)
    assert (float(address["timeout"]), float(address["patience"])) == (TIMEOUT_S, PATIENCE_S)


def test_every_option_of_the_server_is_on_the_page_with_its_default() -> None:
    _, server_options, _ = sections()
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {name: each for each in command.params for name in each.opts if name.startswith("--")}
    options.pop("--help", None)
    assert server_options.keys() == options.keys()
    for name, default in server_options.items():
        value = options[name].default
        if value not in (None, False) and not callable(value):
            assert default == (f"{value:g}" if isinstance(value, float) else str(value)), name


def test_every_limit_is_on_the_page_with_its_default() -> None:
    _, server_options, limits = sections()
    fields = {field.name: field.default for field in dataclasses.fields(ServerLimits)}
    with_option = {name.removeprefix("--").replace("-", "_").replace("_mb_", "_bytes_") for name in server_options}
    assert limits.keys() == fields.keys() - with_option
    for name, default in limits.items():
        assert float(default) == fields[name], name


def test_a_limit_is_given_by_its_name() -> None:
    found = with_limits(ServerLimits(), {"threads": 3}, ["leases_max=7"])
    assert (found.threads, found.leases_max) == (3, 7)
    assert found == dataclasses.replace(ServerLimits(), threads=3, leases_max=7)
    for wrong, words in (
        ("nothing=1", "unknown limit"),
        ("leases_max=x", "a number"),
        ("leases_max=0", "above 0"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            with_limits(ServerLimits(), {}, [wrong])
