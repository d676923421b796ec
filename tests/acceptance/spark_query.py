"""The driver of a query that copies topic `in` to topic `out`. It is killed by the test.

    python spark_query.py MASTER URL FOLDER ROWS_MAX LEASE_TTL

The address of the registry is in the environment variable CHAOS_REGISTRY, if it is not in the hub's directory: an
address may have a password, and other users see the arguments of a process. CHAOS_EVENTS names a folder for Spark's
event log, if there is to be one. CHAOS_CORES_MAX limits the cores of its executors. The driver ends in good order when
its standard input does, so it is not left behind by a test that died.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

from pyspark.sql import functions

from pxrs.spark import session


def run(master: str, url: str, folder: str, rows_max: str, lease_ttl: str) -> None:
    # Everything small, and compiled no further than it is worth: these processes live for seconds.
    java = f"-Djava.io.tmpdir={folder}/local -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    config = {
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": java,
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.executor.extraJavaOptions": java,
        "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    }
    if "CHAOS_EVENTS" in os.environ:
        config |= {"spark.eventLog.enabled": "true", "spark.eventLog.dir": os.environ["CHAOS_EVENTS"]}
    if "CHAOS_CORES_MAX" in os.environ:
        config["spark.cores.max"] = os.environ["CHAOS_CORES_MAX"]
    spark = session("chaos", master, config)
    hub = {"url": url, **({"registry": os.environ["CHAOS_REGISTRY"]} if "CHAOS_REGISTRY" in os.environ else {})}
    options = {**hub, "topic": "in", "group": "g", "maxRowsPerTrigger": rows_max, "leaseTtl": lease_ttl}
    rows = spark.readStream.format("pxrs").options(**options).load()
    # All rows of a key in one task, in their order; but which keys share a task is another thing in each driver, so
    # that a batch that is tried again by the next one has other files, with other rows.
    salt = functions.lit(random.getrandbits(31))
    rows = rows.repartition(3, functions.hash("key", salt)).select("key", "value")
    sink = {**hub, "topic": "out", "checkpointLocation": str(Path(folder, "checkpoint"))}
    query = rows.writeStream.format("pxrs").options(**sink).start()

    def stop() -> None:
        sys.stdin.read()
        query.stop()

    threading.Thread(target=stop, daemon=True).start()
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    run(*sys.argv[1:])
