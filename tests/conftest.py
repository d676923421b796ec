"""What all tests share: short-lived JVMs, one Spark session for all files that need one, and Ctrl-C."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tests import java_archive, temporary_files

# A failed `assert` of a module that lies beside the tests shows its values, as one of a test does.
pytest.register_assert_rewrite("tests.acceptance", "tests.integration", "tests.unit")

java_archive.use(os.environ)
temporary_files.use_memory()
# pyarrow imports numpy where it is installed, and numpy starts threads for linear algebra, which nothing here uses.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# `pxrs.cli.app.main` has typer build all commands each time it is called, which takes longer than most commands do.
typer.main.get_command = functools.cache(typer.main.get_command)

# A shell that starts `make test` in the background has SIGINT ignored, and every process would inherit that: the tests
# of Ctrl-C would wait for ever. Python's own handler is what a process at a prompt has.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

READ_THE_SOURCE = {"tests/unit/test_code_limits.py", "tests/unit/test_import_graph.py"}
"""Files whose tests parse all of `src/pxrs` (`tests/unit/source_code.py`)."""
USES_SPARK = {
    "tests/acceptance/test_examples.py",
    "tests/acceptance/test_recipes.py",
    "tests/integration/test_pipeline_rows.py",
    "tests/integration/test_spark_cluster.py",
    "tests/integration/test_spark_scenarios.py",
    "tests/integration/test_spark_source.py",
    "tests/integration/test_spark_writes.py",
}
"""Files whose tests use the fixture `spark`."""
SETTINGS = {
    "spark.sql.shuffle.partitions": "1",
    # Java code that Spark generates and compiles for each query pays for millions of rows, and tests have hundreds.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
}
"""Of the session of the fixture `spark`."""
SHARE_SERVERS = ("tests/integration/sql_faults/", "tests/integration/sql_table/", "tests/integration/transactions/")
"""Folders whose files use one server: the session fixture `server` of the folder's `conftest.py`."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, one process runs all files in `USES_SPARK`, so that a run starts one Spark session for
    them. Starting a session and running a first query in it takes about 25 s of CPU. Likewise one process runs all
    files of a folder in `SHARE_SERVERS`, and one those in `READ_THE_SOURCE`."""
    from xdist.scheduler import LoadFileScheduling

    class SharedFixtures(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            if file in USES_SPARK:
                return "spark"
            if file in READ_THE_SOURCE:
                return "source"
            return next((folder for folder in SHARE_SERVERS if file.startswith(folder)), file)

    return SharedFixtures(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what tests have chosen at random, and the seed that chooses it again, also of those that have passed:
    `record_property("chosen", ...)`."""
    for reports in list(terminalreporter.stats.values()):
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "chosen" and report.when == "call":
                    terminalreporter.write_line(f"{report.nodeid}: {value}")


# Nothing that is imported and collected is garbage before the tests begin: see `pytest_collection_finish`.
gc.disable()


def pytest_collection_finish() -> None:
    """What has been imported and collected stays until the end: the garbage collector need not look at it again. It
    also looks less often than Python's default, because tests make far more objects that live than cycles. A test that
    needs a collection calls `gc.collect`."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session")
def spark_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Spark's processes work: what relative paths in a program that they run mean."""
    return tmp_path_factory.mktemp("spark")


@pytest.fixture(scope="session")
def spark(spark_folder: Path) -> Iterator[Any]:
    """The Spark session of this process. A test shares it with other tests, so it uses folders, queries, views and
    settings of its own, and leaves no query running."""
    pytest.importorskip("pyspark")
    from pxrs.spark import session

    with contextlib.chdir(spark_folder):
        found = session("tests", "local[2]", SETTINGS)
    found.sparkContext.setLogLevel("OFF")
    yield found
    found.stop()


@pytest.fixture(scope="session")
def connect_url(spark: Any) -> Iterator[str]:
    """The address of a Spark Connect server in the Java of the session `spark`: another Java would take longer to start
    than its clients run. It is started once for all tests, because it cannot be started again after it was stopped."""
    for package in ("pandas", "grpc_status", "zstandard"):
        pytest.importorskip(package)
    for name, value in (("address", "127.0.0.1"), ("port", "0")):
        spark._jsc.sc().conf().set(f"spark.connect.grpc.binding.{name}", value)
    server = getattr(getattr(spark._jvm.org.apache.spark.sql.connect.service, "SparkConnectService$"), "MODULE$")
    server.start(spark._jsc.sc())
    yield f"sc://127.0.0.1:{server.localPort()}"
    nothing = spark._jvm.scala.Option.empty()
    server.stop(nothing, nothing)
