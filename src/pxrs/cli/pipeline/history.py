"""`pxrs pipeline run --history`: runs the pipelines as a batch over what their sources hold. Reads and changes no
group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from pxrs.cli.pipeline.progress import tell_event
from pxrs.cli.terminal import cell, data_text, echo, show, tell_error
from pxrs.errors import InvalidPipeline, PipelineFailed, PxrsError
from pxrs.spark.pipeline import Pipeline
from pxrs.spark.progress import short_reason
from pxrs.spark.run import FILES_LOG, last_written
from pxrs.spark.sinks import HubAddress
from pxrs.wording import counted, printable, rfc3339

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TIMES: Final = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "timeZone": "UTC"}
"""How Spark writes times into JSON: as all other commands do, whatever time zone the user has set for the session."""


def run_history(
    spark: SparkSession,
    pipelines: Sequence[Pipeline],
    address: HubAddress,
    times: dict[str, str],
    rows_max: int,
    is_written: bool,
    as_json: bool,
) -> None:
    for each in pipelines if is_written else ():
        if each.sink.folder is not None and last_written(spark, each.sink.folder) is not None:
            raise InvalidPipeline(
                f"{each.name}: a streaming query writes to {each.sink.folder}, and Spark reads only files that its "
                f"{FILES_LOG} lists: write the history to another folder"
            )
    for each in pipelines:
        try:
            messages = each.messages(spark, address, **times)
            rows = each.over(messages)
            # Counted first: after an error the command is repeated, and what was written would be written again.
            bad = each.left_out(messages)
            if is_written:
                each.sink.write(each.sink.shaped(rows), address)
                _tell_written(each, as_json)
            else:
                show_rows(each, rows, rows_max, as_json)
            if bad:
                those = "that does not parse or is rejected" if bad == 1 else "that do not parse or are rejected"
                tell_error(f"{each.name}: skipped {counted(bad, 'message')} {those}")
        except Exception as error:
            if isinstance(error, PxrsError):
                raise
            raise PipelineFailed(f"{each.name}: {short_reason(str(error))}") from error


def _tell_written(each: Pipeline, as_json: bool) -> None:
    fields = {"pipeline": each.name, "sink": str(each.sink)}
    tell_event(as_json, "written", f"{each.name}: written to {each.sink}", **fields)


def show_rows(each: Pipeline, rows: DataFrame, rows_max: int, as_json: bool) -> None:
    from pyspark.sql import functions as F
    from pyspark.sql.types import TimestampType

    if as_json:
        for (text,) in rows.limit(rows_max).select(F.to_json(F.struct("*"), _TIMES)).collect():
            echo(json.dumps({"pipeline": each.name, "row": json.loads(text)}))
        return
    is_time = [isinstance(field.dataType, TimestampType) for field in rows.schema]
    # Spark converts times to the zone of the machine, without saying so: fetch microseconds since 1970 instead, under
    # new names, because the names of the columns need not be unique.
    names = [f"c{number}" for number in range(len(is_time))]
    columns = [F.unix_micros(name) if is_one else F.col(name) for name, is_one in zip(names, is_time, strict=True)]
    found = rows.limit(rows_max + 1).toDF(*names).select(*columns).collect()
    table = Table(title=each.name, title_justify="left", box=None, header_style="bold")
    for column in rows.columns:
        table.add_column(Text(printable(column)))
    for row in found[:rows_max]:
        table.add_row(*(cell(_text(value, is_one)) for value, is_one in zip(row, is_time, strict=True)))
    show(table)
    if len(found) > rows_max:
        typer.echo(f"showing the first {rows_max:,}; for more, raise --rows", err=True)


def _text(value: Any, is_time: bool) -> str:
    if is_time and value is not None:
        return rfc3339(value) or f"{value}us"
    return data_text(bytes(value)) if isinstance(value, bytearray | bytes) else "" if value is None else str(value)
