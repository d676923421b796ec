"""Errors of the Spark source, sink and pipelines."""

from __future__ import annotations

from pxrs.errors.general import PxrsError
from pxrs.wording import counted


class SparkError(PxrsError):
    """The base of every error of the Spark source, sink and pipelines."""

    code = "spark"


class InvalidOption(SparkError, ValueError):
    """An option of the Spark source or sink is unknown, missing, or has an invalid value. `option` names it."""

    code = "spark.invalid-option"

    def __init__(self, option: str, what: str) -> None:
        self.option, self.what = option, what
        super().__init__(f"option {option}: {what}")


class DataLost(SparkError):
    """Retention removed messages before the query read them: the offsets from `start` up to `end`.

    Accept the loss with the option failOnDataLoss=false: the query then skips them, and logs it. `why` says why the
    query has to read messages again that it had read before a restart."""

    code = "spark.data-lost"

    def __init__(self, place: str, start: int, end: int, why: str = "") -> None:
        self.place, self.start, self.end, self.why = place, start, end, why
        super().__init__(
            f"{place}: the offsets {start} to {end - 1} ({counted(end - start, 'message')}) were removed by retention "
            + (f"and must be read again: {why}" if why else "before they were read")
            + "; set failOnDataLoss=false to skip them"
        )


class CheckpointsDiffer(SparkError):
    """Spark's checkpoint location and the group's checkpoints do not agree on what was processed, and the query cannot
    tell which of the two is right.

    Start the query with a new checkpoint location, and leave the group as it is. Resetting the group to the offsets
    that the message names is safe only for a sink that accepts any batch: neither a topic nor files."""

    code = "spark.checkpoints-differ"


class BatchRefused(SparkError):
    """A micro-batch was not published: one with a higher number was published before, or its number was published with
    other input.

    An old checkpoint location was restored, or two queries use the same one. Start with a new location."""

    code = "spark.batch-refused"


class WrongMachine(SparkError):
    """An executor runs on another machine than the driver, where the hub's directory does not exist. Run executors and
    driver on one machine; or start `pxrs serve` for the hub, and give its address, `pxrs://HOST:PORT`, as `url`."""

    code = "spark.wrong-machine"


class InvalidPipeline(SparkError, ValueError):
    """A pipeline cannot be run as it is written, or not with this hub. Nothing was started; correct the file or the
    address."""

    code = "spark.invalid-pipeline"


class PipelineFailed(SparkError):
    """A running pipeline ended with an error, or Spark did. Correct the cause and run it again: it continues
    where it was."""

    code = "spark.pipeline-failed"


class SharedState(SparkError):
    """A query that keeps state cannot share its group: partitions would move to other members without their state.

    Use a group of its own for the query."""

    code = "spark.shared-state"
