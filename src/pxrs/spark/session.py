"""A Spark session that finds a Java, and whose Python workers run this process's interpreter and start quickly."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pxrs.errors import MissingDependency
from pxrs.spark.home import quick_home
from pxrs.spark.java import java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DEFAULTS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "8",
    "spark.sql.session.timeZone": "UTC",
    # Spark shows a stream's options in its plans, as in `explain`, and hides only those whose names match this. The
    # address of a registry may hold a password.
    "spark.sql.redaction.options.regex": "(?i)url|registry",
}
_LINE: Final = re.compile(r"^[ \t]*(spark\.[^\s=:]+)[ \t]*[=: \t][ \t]*(.*?)[ \t]*$", re.MULTILINE)
"""A setting in spark-defaults.conf."""
_SOCKET_FOLDER_BYTES_MAX: Final = 50
_LOCAL: Final = {
    # With a local master, no other machine connects to the driver, and the host name of this machine need not resolve.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def session(name: str, master: str | None = None, config: Mapping[str, str] | None = None) -> SparkSession:
    """A Spark session, or the one that this process has, with Java and Python set as Spark needs them.

        master: as Spark has it, such as "local[4]" or "spark://host:7077". By default the one of the configuration: of
                `config`, of spark-submit, of spark-defaults.conf, or of the variable MASTER; without one, "local[*]".
        config: more settings. The defaults of pxrs apply where the configuration has none: small shuffles, UTC, no web
                page, no address of a registry in plans.

    Sets JAVA_HOME and PYSPARK_PYTHON in the environment of this process, where Spark reads them, if they are not set.
    Raises MissingDependency if there is no pyspark or no Java.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise MissingDependency.of_extra("Spark", "pyspark", "spark") from error
    os.environ["JAVA_HOME"] = str(java_home())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    given = dict(config or {})
    configured = _configured()
    master = master or given.get("spark.master") or configured.get("spark.master") or os.environ.get("MASTER")
    master = master or "local[*]"
    ours = {**_DEFAULTS, **(_LOCAL if master.startswith("local") else {}), **_sockets(master)}
    settings = {**{key: value for key, value in ours.items() if key not in configured}, **given}
    for key, value in settings.items():
        builder = builder.config(key, value)
    with quick_home(master):
        return builder.master(master).getOrCreate()


def _configured() -> dict[str, str]:
    """The settings from outside this program. The defaults of this module are not applied to them, because a setting in
    the program would take precedence."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # started by spark-submit, which has read all configuration
        from pyspark import SparkConf, SparkContext

        SparkContext._ensure_initialized()
        return dict(SparkConf().getAll())
    found = dict(_LINE.findall(_defaults()))
    arguments = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))
    for name, value in itertools.pairwise(arguments):
        if name == "--master":
            found["spark.master"] = value
        elif name == "--conf":
            key, _, setting = value.partition("=")
            found[key] = setting
    return found


def _defaults() -> str:
    """The text of spark-defaults.conf in the folder where Spark looks for it; empty if there is none."""
    import pyspark

    home = os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent
    folder = os.environ.get("SPARK_CONF_DIR") or Path(home, "conf")
    try:
        return Path(folder, "spark-defaults.conf").read_text()
    except OSError:
        return ""


def _sockets(master: str) -> dict[str, str]:
    """Use Unix sockets between Spark and its Python workers: a sixth faster than the loopback interface. Their paths
    must be short."""
    folder = tempfile.gettempdir()
    if not master.startswith("local[") or len(os.fsencode(folder)) > _SOCKET_FOLDER_BYTES_MAX:
        return {}
    return {"spark.python.unix.domain.socket.enabled": "true", "spark.python.unix.domain.socket.dir": folder}
