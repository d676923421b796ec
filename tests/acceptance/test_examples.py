"""The examples run and find the results that they say. `test_pipelines.py` has the walk-through."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import sessions

ROOT = Path(__file__).parents[2]
AS_A_PROCESS = ROOT / "examples" / "work_queue.py"
"""It needs no Spark, and begins and ends in the same way as all of them."""
EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - {AS_A_PROCESS})
PATIENCE_S = 240.0


@pytest.mark.sampled(3, of="spark stories")
@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_an_example_finds_what_it_says(
    path: Path, spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert f"python examples/{path.name} [FOLDER]" in (module.__doc__ or "")
    module.main(tmp_path, spark)
    assert capsys.readouterr().out


def test_python_in_the_documents_that_starts_spark_runs_twice_in_one_folder(
    spark: Any, spark_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`session` gives it the session that is there: another one would take longer to start than it runs."""
    code = [
        block
        for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
        if "pxrs.spark import session" in block and path.name != "spark-recipes.md"  # `test_recipes.py` runs those
    ]
    assert code
    with contextlib.chdir(spark_folder):
        for block in code:
            for _ in range(2):
                exec(block, {"__name__": "__main__"})
                assert capsys.readouterr().out.endswith("\n0\n"), "the lag, in the end"


def test_an_example_runs_as_its_docstring_says(tmp_path: Path) -> None:
    found = re.search(r"^    python (\S+) \[FOLDER\]$", AS_A_PROCESS.read_text(), re.MULTILINE)
    assert found is not None
    assert ROOT / found[1] == AS_A_PROCESS
    command = [sys.executable, found[1], str(tmp_path)]
    run = sessions.run(command, PATIENCE_S, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("298 orders were charged once each, although a worker died; 2 are dead letters:\n")
