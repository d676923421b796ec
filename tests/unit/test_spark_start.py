"""What a Python process of Spark's loads before it does anything: each streaming query starts one, and waits for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.spark import session
from pxrs.spark.home import link_home, quick_home

pyspark = pytest.importorskip("pyspark")

HEAVY = ("pandas", "typer", "rich", "sqlalchemy", "kazoo", "grpc", "matplotlib", "pyarrow.compute", "pyarrow.dataset")
"""numpy is missing here: pyarrow loads it."""
OURS = (
    "pxrs.producer.producer",
    "pxrs.consumer.consumer",
    "pxrs.group.admin",
    "pxrs.log.memory",
    "pxrs.cli",
    "pxrs.testing",
)
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

READ = """
from pxrs.spark.tasks import TaskReader
start = reader.initialOffset()
reader = source.streamReader(source.schema())
end = reader.latestOffset(start, reader.getDefaultReadLimit())
rows = sum(batch.num_rows for part in reader.partitions(start, end) for batch in TaskReader().read(part))
assert rows == 1
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


def test_a_task_reads_without_what_it_does_not_need(tmp_path: Path) -> None:
    """pandas is a second of work for each worker, and pyarrow imports it for a number that becomes an array."""
    with pxrs.open(tmp_path / "hub") as hub:
        hub.create_topic("in", partitions=2)
        with hub.producer("in") as out:
            out.send(b"value")
        planned = SOURCE + PLANNED.partition("start =")[0] + READ
        assert loaded(tmp_path, planned) == ["pyarrow.compute"]


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


class Builder:
    """In place of Spark's: keeps what it is told, and starts nothing."""

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}

    def appName(self, name: str) -> Builder:
        return self

    def config(self, key: str, value: str) -> Builder:
        self.settings[key] = value
        return self

    def master(self, master: str) -> Builder:
        return self.config("spark.master", master)

    def getOrCreate(self) -> dict[str, str]:
        return self.settings


def test_a_session_has_the_master_that_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYSPARK_SUBMIT_ARGS", "PYSPARK_GATEWAY_PORT", "MASTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setattr(sys.modules["pxrs.spark.session"], "java_home", lambda: tmp_path)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))  # put back afterwards
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)

    def settings(*arguments: Any) -> Any:
        monkeypatch.setattr("pyspark.sql.SparkSession.builder", Builder())
        return session("test", *arguments)

    assert settings()["spark.master"] == "local[*]"
    monkeypatch.setenv("MASTER", "local[7]")
    assert settings()["spark.master"] == "local[7]"
    lines = ["# spark.master local[9]", "spark.master  spark://host:7077 ", "spark.sql.shuffle.partitions=200", "other"]
    (tmp_path / "spark-defaults.conf").write_text("\n".join(lines))
    found = settings()
    assert found["spark.master"] == "spark://host:7077"
    assert "spark.driver.host" not in found, "that is for one machine"
    assert "spark.sql.shuffle.partitions" not in found, "it is configured"
    assert found["spark.ui.enabled"] == "false"
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--master local[2] --conf spark.ui.enabled=true pyspark-shell")
    assert settings()["spark.master"] == "local[2]"
    assert "spark.ui.enabled" not in settings()
    assert settings(None, {"spark.master": "local[3]"})["spark.master"] == "local[3]"
    assert settings("local[4]", {"spark.master": "local[3]"})["spark.master"] == "local[4]"
