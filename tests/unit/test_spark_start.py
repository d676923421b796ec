"""What a Python process of Spark's loads before it does anything: each streaming query starts one, and waits for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pxrs
from pxrs.spark.home import link_home, quick_home

pyspark = pytest.importorskip("pyspark")

HEAVY = ("pandas", "typer", "rich", "sqlalchemy", "kazoo", "grpc", "matplotlib", "pyarrow.compute", "pyarrow.dataset")
"""numpy is missing here: pyarrow loads it."""
OURS = ("pxrs.producer", "pxrs.consumer", "pxrs.group.admin", "pxrs.log.memory", "pxrs.cli", "pxrs.testing")
SOURCE = "import pyspark_pxrs; import pxrs.spark.source"
PLANNED = """
source = pyspark_pxrs.DefaultSource({"url": "hub", "topic": "in", "group": "g"})
reader = source.streamReader(source.schema())
start = reader.initialOffset()
reader.prepareForTriggerAvailableNow()
end = reader.latestOffset(start, reader.getDefaultReadLimit())
assert reader.partitions(start, end)
reader.commit(end)
reader.stop()
"""


def loaded(folder: Path, program: str) -> list[str]:
    """Which of these a new interpreter has when it has run this."""
    told = f"\nimport sys; print([name for name in {HEAVY + OURS} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program + told], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [str(name) for name in json.loads(run.stdout.replace("'", '"'))]


def test_the_source_is_found_without_what_it_does_not_need(tmp_path: Path) -> None:
    assert loaded(tmp_path, SOURCE) == []


def test_a_stream_is_planned_without_what_it_does_not_need(tmp_path: Path) -> None:
    with pxrs.open(tmp_path / "hub") as hub:
        hub.create_topic("in", partitions=2)
        with hub.producer("in") as out:
            out.send(b"value")
        assert loaded(tmp_path, SOURCE + PLANNED) == []
        assert hub.group("g").describe().lag == 0


def test_in_the_home_that_a_session_has_python_keeps_its_byte_code(tmp_path: Path) -> None:
    assert link_home(tmp_path)
    assert (tmp_path / "bin" / "spark-submit").exists()
    assert (tmp_path / "jars").is_dir()
    archives = sorted((tmp_path / "python" / "lib").iterdir())
    # As Spark has it: both archives first.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, archives))}
    told = (
        "import json, py4j, pyspark; print(json.dumps([[each.__file__, each.__cached__] for each in (py4j, pyspark)]))"
    )
    run = subprocess.run([sys.executable, "-c", told], env=environment, capture_output=True, text=True)
    for (source, cached), archive in zip(json.loads(run.stdout), archives, strict=True):
        assert Path(source).is_relative_to(archive)
        assert Path(cached).exists()
    assert os.path.samefile(json.loads(run.stdout)[1][0], pyspark.__file__)


def test_that_home_is_for_local_sessions_without_another_and_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    with quick_home("local[2]"):
        assert Path(os.environ["SPARK_HOME"], "python", "lib", "pyspark.zip", "pyspark").is_dir()
    assert "SPARK_HOME" not in os.environ
    with quick_home("spark://host:7077"):
        assert "SPARK_HOME" not in os.environ
    monkeypatch.setenv("SPARK_HOME", "/elsewhere")
    with quick_home("local[2]"):
        assert os.environ["SPARK_HOME"] == "/elsewhere"
    assert os.environ["SPARK_HOME"] == "/elsewhere"
