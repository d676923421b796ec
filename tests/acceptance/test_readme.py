"""README.md: its commands and programs work as printed, in order, in one folder, with the wheel alone."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.wheels import ROOT, Environment, build_wheel

BLOCK = re.compile(r"^```(console|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"This is `(\S+\.py)`:\n\n$")
EXTRAS = re.compile(r"^pip install '?\.(?:\[([a-z,]+)\])?'?$")
STARTS_S_MAX = 60.0
IS_SOAK = bool(os.environ.get("PXRS_SOAK"))


class Reader:
    """Somebody who found the project ten minutes ago, with a terminal in an empty folder."""

    def __init__(self, folder: Path) -> None:
        (folder / "built").mkdir()
        self.environment = Environment(folder / "environment", build_wheel(folder / "built"))
        self.folder = folder / "home"
        self.folder.mkdir()
        self.variables = {"PATH": f"{self.environment.bin}:/usr/bin:/bin", "HOME": str(self.folder)}
        self.ports = dict[str, str]()
        self.running = list[subprocess.Popen[bytes]]()
        self.ran = list[str]()
        self.printed = ""

    def type(self, line: str) -> None:
        """A line of a console block, without its prompt."""
        command, _, comment = line.partition(" # ")
        command = self.with_free_ports(command.strip())
        if command.startswith("pip "):
            found = EXTRAS.match(command)
            assert found is not None, f"this form is not known to work: {command}"
            self.environment.install(set((found[1] or "").split(",")))
        elif command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            self.variables[name] = value
        elif command.startswith("make ") or (command == "pxrs cluster demo" and not IS_SOAK):
            return  # tests of their own run them; test_make_targets_that_the_documents_name_exist
        elif "runs until Ctrl-C" in comment:
            self.start(command)
        else:
            self.call(shlex.split(command))
        self.ran.append(command)

    def with_free_ports(self, text: str) -> str:
        """The text with other ports in place of those that are printed, which may be in use on this machine."""
        for printed in re.findall(r"127\.0\.0\.1:(\d+)", text):
            if printed not in self.ports:
                with socket.create_server(("127.0.0.1", 0)) as free:
                    self.ports[printed] = str(free.getsockname()[1])
            text = text.replace(f"127.0.0.1:{printed}", f"127.0.0.1:{self.ports[printed]}")
        return text

    def call(self, command: list[str]) -> None:
        ran = subprocess.run(command, cwd=self.folder, env=self.variables, capture_output=True, text=True, timeout=240)
        assert ran.returncode == 0, f"{shlex.join(command)}: {ran.stdout}{ran.stderr}"
        self.printed += ran.stdout

    def start(self, command: str) -> None:
        """Return when the command has said that it runs."""
        log = self.folder.parent / f"running-{len(self.running)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                shlex.split(command), cwd=self.folder, env=self.variables, stdout=output, stderr=subprocess.STDOUT
            )
        self.running.append(process)
        until = time.monotonic() + STARTS_S_MAX
        while not log.stat().st_size:
            assert process.poll() is None, f"{command} ended with {process.returncode}"
            assert time.monotonic() < until, f"{command} prints nothing"
            time.sleep(0.05)

    def close(self) -> None:
        for process in self.running:
            process.send_signal(signal.SIGINT)
        for process in self.running:
            process.wait(timeout=60)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    try:
        yield reader
    finally:
        reader.close()


def test_the_readme_works_as_printed_with_the_wheel_alone(reader: Reader) -> None:
    text = (ROOT / "README.md").read_text()
    for number, match in enumerate(BLOCK.finditer(text)):
        kind, block = match.groups()
        if kind == "console":
            for line in block.splitlines():
                if line.startswith("$ "):
                    reader.type(line.removeprefix("$ "))
            continue
        named = FILE.search(text[: match.start()])
        program = reader.folder / (named[1] if named else f"program_{number}.py")
        program.write_text(reader.with_free_ports(block))
        if named is None:
            reader.call(["python", program.name])
    assert {" ".join(command.split()[:2]) for command in reader.ran} >= {
        *("pip install", "export PXRS_AT=data", "pxrs topic", "pxrs send", "pxrs tail", "pxrs worker", "pxrs group"),
        *("pxrs top", "pxrs serve", "pxrs web"),
    }
    assert "account-7 paid" in reader.printed  # of `pxrs tail`
    assert "b'account-7' b'refunded'" in reader.printed  # of the consumer, and of the worker
    assert [process.poll() for process in reader.running] == [None] * 3, "a worker, a server, the page"


def test_the_first_screen_of_the_readme_leads_to_a_message() -> None:
    screen = (ROOT / "README.md").read_text().splitlines()[:35]
    assert {"$ pip install", "$ pxrs send", "$ pxrs tail"} <= {" ".join(line.split()[:3]) for line in screen}


def test_the_readme_lists_every_extra() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (ROOT / "README.md").read_text().partition("| extra | what it is for |")[2].partition("\n\n")[0]
    listed = [name for row in table.splitlines()[1:] for name in re.findall(r"`([a-z]+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(declared)
