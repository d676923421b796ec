"""Views that show a database administrator the groups as plain columns, in any tool that can SELECT.

    pxrs_groups_members      namespace, group_name, incarnation, name, topic_id, topic_name, partitions, host, pid,
                             since_seconds, version
    pxrs_groups_owners       namespace, group_name, topic_id, partition_number, incarnation, owner, epoch, version
    pxrs_groups_checkpoints  namespace, group_name, topic_id, partition_number, next_offset, written_seconds,
                             written_by, epoch, version

The registry stores JSON as bytes under keys like `groups/<group>/owners/<topic id>/<partition>` (see `group.records`);
the views split both into columns. They are for people: no code of pxrs reads them, and a registry works without them.

Names avoid the words that some database reserves (group, offset, partition). Moments are seconds since 1970, as stored.
A member whose lease has just expired is shown until a process ends the lease. An incarnation that is NULL means that
the partition has no owner. Of a member that reads several topics, only the first one is shown. The statements for
Oracle are generated, and were never run on an Oracle database.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pxrs.registry.sql.schema import DIALECTS, DialectName, Schema

Kind = Literal["text", "number", "seconds"]


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of the stored JSON and the column that shows it."""

    field: str
    column: str
    kind: Kind = "text"


@dataclass(frozen=True, slots=True)
class _View:
    """The records under one folder of every group. The rest of the key goes into the columns `key_columns`."""

    name: str
    folder: str
    key_columns: tuple[str, ...]
    fields: tuple[_Field, ...]


_PLACE: Final = ("topic_id", "partition_number")
_VIEWS: Final = (
    _View(
        "pxrs_groups_members",
        "members",
        ("incarnation",),
        (
            _Field("name", "name"),
            _Field("topic", "topic_id"),
            _Field("topic_name", "topic_name"),
            _Field("partitions", "partitions", "number"),
            _Field("host", "host"),
            _Field("pid", "pid", "number"),
            _Field("since", "since_seconds", "seconds"),
        ),
    ),
    _View(
        "pxrs_groups_owners",
        "owners",
        _PLACE,
        (_Field("incarnation", "incarnation"), _Field("name", "owner"), _Field("epoch", "epoch", "number")),
    ),
    _View(
        "pxrs_groups_checkpoints",
        "checkpoints",
        _PLACE,
        (
            _Field("offset", "next_offset", "number"),
            _Field("when", "written_seconds", "seconds"),
            _Field("by", "written_by"),
            _Field("epoch", "epoch", "number"),
        ),
    ),
)
VIEW_NAMES: Final = tuple(view.name for view in _VIEWS)


def view_statements(dialect: str, *, replace: bool = True) -> list[str]:
    """The statements that make the views, in order; with `replace` they may be run again.

    SQLite knows no CREATE OR REPLACE: there each view is dropped first."""
    if dialect not in DIALECTS:
        raise ValueError(f"unknown dialect {dialect!r}; choose from {', '.join(DIALECTS)}")
    writer = {"sqlite": _Sqlite, "postgresql": _Postgresql, "oracle": _Oracle}[dialect](dialect)
    return [statement for view in _VIEWS for statement in writer.create(view, replace)]


class _Writer:
    """Writes the statements for one database."""

    create_word = "CREATE OR REPLACE VIEW"

    def __init__(self, dialect: DialectName) -> None:
        schema = Schema(dialect)
        self.entry = schema.entry.name
        self.key = "e.key"

    def create(self, view: _View, replace: bool) -> list[str]:
        parts = [self.part(2), *(self.part(4 + i) for i in range(len(view.key_columns)))]
        columns = ["e.namespace", f"{parts[0]} AS group_name"]
        for name, part in zip(view.key_columns, parts[1:], strict=True):
            columns.append(f"{self.whole(part) if name == 'partition_number' else part} AS {name}")
        columns += [f"{self.member(field)} AS {field.column}" for field in view.fields]
        columns.append("e.version")
        word = self.create_word if replace else "CREATE VIEW"
        lines = ",\n  ".join(columns)
        where = " AND ".join(self.conditions(view.folder))
        return [f"{word} {view.name} AS\nSELECT\n  {lines}\nFROM {self.entry} e\nWHERE {where}"]

    def conditions(self, folder: str) -> list[str]:
        # The range of keys lets the database use the index. A row with version 0 is a placeholder for an absent key.
        return [f"{self.key} > 'groups/'", f"{self.key} < 'groups0'", f"{self.part(3)} = '{folder}'", "e.version > 0"]

    def part(self, number: int) -> str:
        """The key's segment of this number, from 1 on."""
        raise NotImplementedError

    def member(self, field: _Field) -> str:
        """A field of the JSON, in the column's type."""
        raise NotImplementedError

    def whole(self, part: str) -> str:
        return f"CAST({part} AS INTEGER)"


class _Sqlite(_Writer):
    create_word = "CREATE VIEW"

    def __init__(self, dialect: DialectName) -> None:
        super().__init__(dialect)
        self.key = 'e."key"'

    def create(self, view: _View, replace: bool) -> list[str]:
        return [*([f"DROP VIEW IF EXISTS {view.name}"] if replace else []), *super().create(view, replace)]

    def part(self, number: int) -> str:
        # SQLite has no function that splits a string. The segments of these keys contain neither quotes nor
        # backslashes, so the key is turned into a JSON array.
        return f"""json_extract('["' || replace({self.key}, '/', '","') || '"]', '$[{number - 1}]')"""

    def member(self, field: _Field) -> str:
        return f"json_extract(CAST(e.value AS TEXT), '$.\"{field.field}\"')"

    def conditions(self, folder: str) -> list[str]:
        # GLOB is evaluated before any key or value is parsed. Its star matches slashes too, hence the third condition.
        shape = f"{self.key} GLOB 'groups/*/{folder}/*'"
        return [
            f"{self.key} > 'groups/'",
            f"{self.key} < 'groups0'",
            shape,
            f"{self.part(3)} = '{folder}'",
            "e.version > 0",
        ]


class _Postgresql(_Writer):
    def part(self, number: int) -> str:
        return f"split_part({self.key}, '/', {number})"

    def member(self, field: _Field) -> str:
        value = f"(convert_from(e.value, 'UTF8')::jsonb ->> '{field.field}')"
        return value + {"text": "", "number": "::bigint", "seconds": "::double precision"}[field.kind]


class _Oracle(_Writer):
    def part(self, number: int) -> str:
        return f"REGEXP_SUBSTR({self.key}, '[^/]+', 1, {number})"

    def member(self, field: _Field) -> str:
        returning = {"text": "VARCHAR2(4000)", "number": "NUMBER", "seconds": "NUMBER"}[field.kind]
        return f"JSON_VALUE(e.value FORMAT JSON, '$.{field.field}' RETURNING {returning})"

    def whole(self, part: str) -> str:
        return f"TO_NUMBER({part})"
