"""JSON values as columns, by a schema, and the reason why a message does not fit the schema.

Every message is either good or bad. The query of the rows and the query of the dead letters decide by the same
expression, so no message is lost between them and none is in both. Values are read as Spark's `from_json` reads them.
What `from_json` accepts and is refused here: bytes that are not UTF-8, an empty value, text after the document, single
quotes, a number that is too large for its type and would become infinite, and a field that is null although the schema
says NOT NULL. The last two are checked in structs, but not in arrays and maps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from pxrs.errors import InvalidPipeline
from pxrs.spark.letters import MESSAGE, REASON, origin

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

MESSAGE_COLUMNS: Final = ("key", "topic", "partition", "offset", "timestamp", "headers", MESSAGE)
"""The columns of a message that a parsed row keeps, if they are there."""
_PARSED: Final = "_pxrs_parsed"
_CORRUPT: Final = "_pxrs_corrupt"
_STRICT: Final = {"allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}

OnBad = Literal["fail", "drop"]


@dataclass(frozen=True)
class ParseJson:
    """The parse step of a pipeline. Made by `parse_json`."""

    schema: str | StructType
    on_bad: OnBad = "fail"

    def good(self, messages: DataFrame, topic: str, are_bad_kept: bool) -> DataFrame:
        """The parsed rows. are_bad_kept: bad messages are left out without an error, because they go to a dead-letter
        topic."""
        from pyspark.sql import functions as F

        schema = self.struct()
        judged = self._judged(messages, schema)
        is_good = F.col(REASON).isNull()
        if not are_bad_kept and self.on_bad == "fail":
            what = F.concat(origin(messages.columns, topic), F.lit(": "), F.col(REASON))
            is_good = F.when(is_good, F.lit(True)).otherwise(F.raise_error(what).cast("boolean"))
        names = schema.fieldNames()
        taken = {name.lower() for name in names}  # Spark ignores the case of column names
        kept = [name for name in MESSAGE_COLUMNS if name in messages.columns and name not in taken]
        parsed = [F.col(_PARSED)[name].alias(name) for name in names]
        return judged.filter(is_good).select(*parsed, *kept)

    def bad(self, messages: DataFrame) -> DataFrame:
        """The bad ones of these messages, which have the column `MESSAGE`: this column, and why each one is bad."""
        from pyspark.sql import functions as F

        judged = self._judged(messages, self.struct())
        return judged.filter(F.col(REASON).isNotNull()).select(MESSAGE, REASON)

    def struct(self) -> StructType:
        from pyspark.errors import PySparkException
        from pyspark.sql.types import StructType

        if not isinstance(self.schema, str):
            return self.schema
        try:
            return StructType.fromDDL(self.schema)
        except PySparkException as error:
            reason = str(error).strip().partition("\n")[0]
            raise InvalidPipeline(f"parse_json: {self.schema!r} is not a schema: {reason}") from error

    def _judged(self, messages: DataFrame, schema: StructType) -> DataFrame:
        from pyspark.sql import functions as F
        from pyspark.sql.types import StringType, StructField, StructType

        text = F.col("value").cast("string")
        # Spark ignores text after a document. A text that closes the wrapping object below early, and so would pass as
        # one document, is found by the array around it, which then has another number of elements or is no JSON.
        wrapped = StructType([StructField("value", schema), StructField(_CORRUPT, StringType())])
        options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT, **_STRICT}
        whole = F.from_json(F.concat(F.lit('{"value":'), text, F.lit("}")), wrapped, options)
        documents = F.json_array_length(F.concat(F.lit("["), text, F.lit("]")))
        parsed = whole["value"]
        reason = (
            F.when(F.col("value").isNull(), F.lit("it has no value"))
            .when(~F.is_valid_utf8(F.col("value")), F.lit("it is not UTF-8"))
            .when(documents.isNull() | (documents != 1), F.lit("it is not one JSON document"))
            .when(~text.rlike(r"^[ \t\r\n]*\{"), F.lit("it is not a JSON object"))
            .when(parsed.isNull(), F.lit("it is not one JSON document"))
            .when(whole[_CORRUPT].isNotNull(), _misfit(schema, parsed, text))
        )
        for is_flawed, flaw in _flaws(schema, parsed):
            reason = reason.when(is_flawed, F.lit(flaw))
        return messages.select("*", parsed.alias(_PARSED), reason.alias(REASON))


def parse_json(schema: str | StructType, on_bad: OnBad = "fail") -> ParseJson:
    """A parse step: values are JSON objects, and the function gets their fields as columns.

    schema: as Spark has it, "account STRING NOT NULL, amount DECIMAL(12, 2)" or a StructType. A field that is NOT NULL
            must be there, also in nested structs. Fields within arrays and maps are not checked.
    on_bad: what becomes of a message that does not fit, in a pipeline without `dead_letters`: "fail" ends the pipeline,
            "drop" leaves it out: use it if another pipeline handles such messages.

    Columns that the schema does not name: key, partition, offset, timestamp, and headers and topic if the source has
    them.
    """
    if not isinstance(schema, str) and not hasattr(schema, "fieldNames"):
        raise InvalidPipeline(f"parse_json: schema is {schema!r}; give DDL such as 'account STRING', or a StructType")
    if on_bad not in ("fail", "drop"):
        raise InvalidPipeline(f"parse_json: on_bad is {on_bad!r}; choose fail or drop")
    return ParseJson(schema, on_bad)


def _misfit(schema: StructType, parsed: Column, text: Column) -> Column:
    """Names the field with a wrong type: a field that is in the text, and that `from_json` has read as null."""
    from pyspark.sql import functions as F

    wrong = [
        F.when(
            parsed[field.name].isNull() & F.get_json_object(text, f"$['{field.name}']").isNotNull(),
            F.lit(f"{field.name} is not of type {field.dataType.simpleString()}"),
        )
        for field in schema.fields
    ]
    return F.coalesce(*wrong, F.lit("it does not fit the schema"))


def _flaws(schema: StructType, parsed: Column, above: str = "") -> Iterator[tuple[Column, str]]:
    """By field, also within structs that are not null: a condition for values that `from_json` accepts and that are
    refused here, and the reason."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import DoubleType, FloatType, StructType

    for field in schema.fields:
        column, path = parsed[field.name], above + field.name
        if not field.nullable:
            yield parsed.isNotNull() & column.isNull(), f"{path} is missing"
        if isinstance(field.dataType, DoubleType | FloatType):
            yield F.abs(column) == float("inf"), f"{path} is not of type {field.dataType.simpleString()}"
        if isinstance(field.dataType, StructType):
            yield from _flaws(field.dataType, column, f"{path}.")
