"""The programs of `docs/wire.md` run as they are printed, with nothing but `pyarrow.flight`, and print what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pxrs
from pxrs.server.serving import serving

PATIENCE_S = 60.0
DOCUMENT = Path(__file__).parents[2] / "docs" / "wire.md"


def test_the_programs_of_the_wire_print_what_the_document_says(tmp_path: Path) -> None:
    text = DOCUMENT.read_text()
    programs = re.findall(r"^```python [a-z, ]+\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    printed = re.findall(r"`([^`]+)`", " ".join(re.findall(r"^It prints .*", text, re.MULTILINE)))
    assert len(programs) == 3
    with pxrs.open(tmp_path / "hub") as hub, serving(hub) as address:
        program = "\n".join((f"server = {address.replace('pxrs://', 'grpc://')!r}", *programs))
        assert re.findall(r"^(?:import|from) .*pxrs", program, re.MULTILINE) == []
        ran = subprocess.run(
            [sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path
        )
        assert ran.returncode == 0, ran.stderr
        lines = [line for line in ran.stdout.splitlines() if not line.startswith("meanwhile")]
        assert lines[:4] == printed
        assert "version 0 of the protocol" in lines[4]
        assert "upgrade pxrs on the client" in lines[4]
        assert hub.topic("orders").log.ends() == [2, 2]
