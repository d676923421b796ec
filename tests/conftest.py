"""What all tests share: limits, short-lived JVMs, one Spark session for all files that need one, and Ctrl-C."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tests import java_archive, limits, temporary_files

with contextlib.suppress(ImportError):
    # pxrs must be the first to import gRPC: otherwise children that tests fork crash now and then.
    import pxrs.grpc_fork  # noqa: F401

from pxrs import launching

# A failed `assert` of a module that lies beside the tests shows its values, as one of a test does.
pytest.register_assert_rewrite("tests.acceptance", "tests.integration", "tests.unit")

# One seed for all that tests choose at random, in every process of a run: `SEED=123 make test` chooses the same again.
os.environ.setdefault("SEED", str(random.SystemRandom().randrange(1_000_000)))
SEED = os.environ["SEED"]
IS_SOAK = bool(os.environ.get("PXRS_SOAK"))
SLOW_S = 30.0
java_archive.use(os.environ)
temporary_files.use_memory()
# pyarrow imports numpy where it is installed, and numpy starts threads for linear algebra, which nothing here uses.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Each worker of a run has ports of its own: see `launching.PORTS`.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    launching.PORTS = launching.PORTS[int(worker.removeprefix("gw")) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]

# `pxrs.cli.app.main` has typer build all commands each time it is called, which takes longer than most commands do.
typer.main.get_command = functools.cache(typer.main.get_command)

# A shell that starts `make test` in the background has SIGINT ignored, and every process would inherit that: the tests
# of Ctrl-C would wait for ever. Python's own handler is what a process at a prompt has.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

READ_THE_SOURCE = {
    "tests/unit/events/test_names.py",
    "tests/unit/test_code_limits.py",
    "tests/unit/test_import_graph.py",
}
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


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(limits.Limits(limits.SOAK_FACTOR if IS_SOAK else 1.0), "limits")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """`make soak` takes hours: why a test has failed, and how long each slow one took, is printed at once, and not only
    at the end, which an interrupted run may not reach."""
    if not IS_SOAK or "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.failed:
        sys.stderr.write(f"\n{report.nodeid} failed ({report.when}):\n{report.longreprtext}\n")
    elif report.duration > SLOW_S:
        sys.stderr.write(f"\n{time.strftime('%H:%M:%S')} {report.nodeid} {report.when}: {report.duration:.0f} s\n")


def pytest_report_header() -> str:
    return f"SEED={SEED}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one in N of the cases of a test with the marker `sampled(N)`, chosen by SEED: each of them runs the same
    code, with other values or on another store. With `of="module"`, one in N of the tests of a module; with another
    name, one in N of all tests that have it. `make soak` runs all, and so does a run that names files or single tests.
    """
    if IS_SOAK or config.option.keyword or any(argument.partition("::")[0].endswith(".py") for argument in config.args):
        return
    families: dict[tuple[int, str], list[pytest.Item]] = {}
    for item in items:
        if (marker := item.get_closest_marker("sampled")) is not None:
            of = marker.kwargs.get("of")
            family = item.nodeid.partition("[" if of is None else "::")[0] if of in (None, "module") else of
            families.setdefault((marker.args[0], family), []).append(item)
    left_out: set[pytest.Item] = set()
    for (one_in, family), cases in families.items():
        kept = random.Random(f"{SEED} {family}").sample(cases, -(-len(cases) // one_in))
        left_out |= {*cases}.difference(kept)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Count the tests that were skipped, by reason. Print what a failed test has chosen at random, and the seed that
    chooses it again (`record_property("chosen", ...)`); with -v, of all tests."""
    skipped = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in sorted(skipped.items()):
        terminalreporter.write_line(f"{count:5} {reason.removeprefix('Skipped: ').splitlines()[0][:140]}")
    for reports in list(terminalreporter.stats.values()):
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "chosen" and report.when == "call" and (report.failed or config.get_verbosity() > 0):
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


def pytest_unconfigure() -> None:
    """Have the interpreter free what was frozen, here or by `test_dropped_without_close.py`, when it ends. DuckDB
    prints each of its objects that is left then as leaked."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def spark_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Spark's processes work: what relative paths in a program that they run mean."""
    return tmp_path_factory.mktemp("spark")


@pytest.fixture(autouse=True)
def _shared_servers() -> Iterator[None]:
    """A test that leaves a server of a fixture with a wider scope ended, paused or without an answer fails with the end
    of its log, and the server is started again: the next test does not fail instead. Servers of the test itself are
    closed by then. Runs after all fixtures of the test, because it is set up before them."""
    yield
    servers = sys.modules.get("pxrs.testing.servers")
    if servers is None:
        return
    broken = [(server, fault) for server in servers.started_servers() if (fault := server.fault()) is not None]
    for server, _ in broken:
        server.restore()
    if broken:
        told = "\n".join(fault for _, fault in broken)
        pytest.fail(
            f"the test has left servers that other tests use, or that it has not closed:\n{told}", pytrace=False
        )


@pytest.fixture(scope="session")
def spark_session(spark_folder: Path) -> Iterator[Any]:
    """The Spark session of this process. Tests use it as `spark`."""
    pytest.importorskip("pyspark")
    from pxrs.spark import session

    with contextlib.chdir(spark_folder):
        found = session("tests", "local[2]", java_archive.SETTINGS)
    found.sparkContext.setLogLevel("OFF")
    yield found
    found.stop()


@pytest.fixture
def spark(spark_session: Any) -> Iterator[Any]:
    """The Spark session of this process. A test shares it with other tests, so it uses folders, queries and views of
    its own. Settings that it changes, also by `pxrs.spark.session` in a program that it runs, are restored after it. A
    test that leaves a query running or the session stopped fails; the query is stopped for the next test."""
    assert not spark_session.sparkContext._jsc.sc().isStopped(), "an earlier test has stopped the session"
    before = dict(spark_session.conf.getAll)
    yield spark_session
    assert not spark_session.sparkContext._jsc.sc().isStopped(), "the test has stopped the session of all tests"
    queries, after = spark_session.streams.active, dict(spark_session.conf.getAll)
    for query in queries:
        query.stop()
    for name in before.keys() | after.keys():
        if name not in before:
            spark_session.conf.unset(name)
        elif before[name] != after.get(name):
            spark_session.conf.set(name, before[name])
    assert not queries, f"the test has left queries running: {[query.name or query.id for query in queries]}"


@pytest.fixture(scope="session")
def connect_url(spark_session: Any) -> Iterator[str]:
    """The address of a Spark Connect server in the Java of `spark_session`: another Java would take longer to start
    than its clients run. It is started once for all tests, because it cannot be started again after it was stopped."""
    for package in ("pandas", "grpc_status", "zstandard"):
        pytest.importorskip(package)
    for name, value in (("address", "127.0.0.1"), ("port", "0")):
        spark_session._jsc.sc().conf().set(f"spark.connect.grpc.binding.{name}", value)
    server = getattr(
        getattr(spark_session._jvm.org.apache.spark.sql.connect.service, "SparkConnectService$"), "MODULE$"
    )
    server.start(spark_session._jsc.sc())
    yield f"sc://127.0.0.1:{server.localPort()}"
    nothing = spark_session._jvm.scala.Option.empty()
    server.stop(nothing, nothing)
