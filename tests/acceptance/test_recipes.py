"""The programs of `docs/spark-recipes.md` run as they are printed, and find the results that they say."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import pxrs
from tests import sessions

PATIENCE_S = 240.0
DOCUMENT = Path(__file__).parents[2] / "docs" / "spark-recipes.md"


def blocks(kind: str) -> list[str]:
    """The code after fences of exactly this kind."""
    return re.findall(rf"^```{re.escape(kind)}\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.sampled(3, of="long spark stories")
def test_the_recipes_find_what_they_say(
    spark: Any, spark_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`session` gives them the session that is there."""
    pytest.importorskip("pandas")
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    names: dict[str, Any] = {"__name__": "__main__"}
    programs = blocks("python")
    assert len(programs) > 5
    with contextlib.chdir(spark_folder):
        for program in programs:
            exec(compile(program, str(DOCUMENT), "exec"), names)
    lags = [names["hub"].group(group).describe().lag for group in ("deduplication", "numbers", "database", "copier")]
    names["hub"].close()
    assert lags == [0, 0, 0, 0]
    assert capsys.readouterr().out.splitlines()[0].startswith("0 1 1 "), "number, rows and lag of a batch"


@pytest.fixture
def remote(connect_url: str) -> dict[str, str]:
    """The environment of clients of Spark Connect."""
    pytest.importorskip("yaml")
    return {**os.environ, "SPARK_REMOTE": connect_url}


def run(command: list[str], environment: dict[str, str], folder: Path) -> str:
    ran = sessions.run(command, PATIENCE_S, env=environment, cwd=folder)
    assert ran.returncode == 0, (ran.stdout, ran.stderr)
    return ran.stdout + ran.stderr


def test_a_client_of_spark_connect_reads_and_writes_topics(remote: dict[str, str], tmp_path: Path) -> None:
    (program,) = blocks("python connect")
    (tmp_path / "client.py").write_text(program)
    told = run([sys.executable, "client.py"], remote, tmp_path)
    assert told.splitlines()[-1] == "pyspark.sql.connect.session 0"


def test_a_declarative_pipeline_reads_and_writes_topics(spark: Any, remote: dict[str, str], tmp_path: Path) -> None:
    import pyspark

    for name in ("yaml spark-pipeline.yml", "python transformations/shop.py"):
        (text,) = blocks(name)
        path = tmp_path / name.split()[1]
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("/srv/shop", str(tmp_path)))
    with pxrs.open(tmp_path / "data") as hub:
        for topic in ("orders", "large-orders"):
            hub.create_topic(topic, partitions=2)
        with hub.producer("orders") as out:
            for number in range(100):
                out.send(str(number), key=str(number % 7))
        # What `spark-pipelines` runs; the script would start a Java to find that it needs none.
        command = [sys.executable, str(Path(pyspark.__file__).parent / "pipelines" / "cli.py"), "run"]
        try:
            assert "Run is COMPLETED" in run(command, remote, tmp_path)
            assert hub.group("shop").describe().lag == 0
            totals = {row.key: row.total for row in spark.table("totals").collect()}
            assert totals == {str(key): sum(range(key, 100, 7)) for key in range(7)}
            large = sorted(int(value) for value in hub.topic("large-orders").to_arrow()["value"].to_pylist())
            assert large == list(range(91, 100))
        finally:
            for table in ("orders", "totals"):
                spark.sql(f"DROP TABLE IF EXISTS {table}")
