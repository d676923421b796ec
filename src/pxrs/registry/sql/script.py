"""The DDL that an administrator runs where programs may not create tables: tables, views, and the least privileges."""

from __future__ import annotations

from typing import Final

from pxrs.registry.sql.schema import DIALECTS, LAYOUT, Schema
from pxrs.registry.sql.views import view_statements

APPLICATION_ROLE: Final = "pxrs_app"
"""Stands in the DDL for the user that programs connect as."""


def ddl(dialect: str) -> str:
    """The DDL for a DBA, with the least privileges that programs need; `?create=false` then finds everything there."""
    if dialect not in DIALECTS:
        raise ValueError(f"unknown dialect {dialect!r}; choose from {', '.join(DIALECTS)}")
    schema = Schema(dialect)
    rows = [f"INSERT INTO pxrs_meta (name, value) VALUES ('{n}', '{v}')" for n, v in schema.first_rows().items()]
    lines = [f"-- The tables of a pxrs registry, layout {LAYOUT}, for {dialect}."]
    lines += [f"{statement};" for statement in [*schema.create(if_not_exists=False), *rows]]
    lines += ["", "-- Views that show groups as plain columns, for people; pxrs itself does not use them."]
    lines += [f"{statement};" for statement in view_statements(dialect, replace=False)]
    if dialect == "sqlite":
        lines += [
            "",
            "-- SQLite has no users: whoever may read and write the file and its folder may use the registry.",
        ]
        return "\n".join(lines) + "\n"
    lines += ["", *_grants(dialect)]
    if dialect == "oracle":
        lines += ["", *_ORACLE_NOTES, "COMMIT;"]
    return "\n".join(lines) + "\n"


def _grants(dialect: str) -> list[str]:
    sequence_right = "SELECT" if dialect == "oracle" else "USAGE"
    on_sequence = "pxrs_version" if dialect == "oracle" else "SEQUENCE pxrs_version"
    return [
        f"-- Replace {APPLICATION_ROLE} by the user that programs connect as.",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON pxrs_entry TO {APPLICATION_ROLE};",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON pxrs_lease TO {APPLICATION_ROLE};",
        f"GRANT SELECT ON pxrs_meta TO {APPLICATION_ROLE};",
        f"GRANT {sequence_right} ON {on_sequence} TO {APPLICATION_ROLE};",
    ]


_ORACLE_NOTES: Final = (
    "-- If the programs' user does not own the tables, it also needs, as itself:",
    "--   CREATE SYNONYM pxrs_entry FOR <owner>.pxrs_entry;  and the same for pxrs_lease, pxrs_meta, pxrs_version.",
    "-- A suspended program must not lock a row forever. If the release supports it, let the database end its session:",
    "--   ALTER SYSTEM SET MAX_IDLE_BLOCKER_TIME = 1;",
)
