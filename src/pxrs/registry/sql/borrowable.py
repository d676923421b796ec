"""What a registry must offer so that its statements can run on a connection of the user's (`borrowed`).

`SqlRegistry` offers it. A client of a server has no connection of its own to the database of the server's registry; it
is told where the keys are there (`SqlPlace`), which is enough to make the same statements.
"""

from __future__ import annotations

from typing import Protocol

from pxrs.registry.contract import Commit, Registry, SqlPlace
from pxrs.registry.sql.commit import CommitPlan
from pxrs.registry.sql.schema import DialectName
from pxrs.registry.sql.statements import Call, Statement, Statements, statements_for


class Borrowable(Protocol):
    """What runs on a borrowed connection: the statements of a registry that is in a SQL database."""

    timeout_s: float
    statements: Statements

    @property
    def dialect(self) -> DialectName: ...

    def check_usable(self) -> None: ...

    def call(self, statement: Statement, **values: object) -> Call: ...

    def plan(self, commit: Commit) -> CommitPlan: ...


class BehindServer:
    """The statements of a registry that a server has, for a client that has a connection to the same database."""

    def __init__(self, registry: Registry, place: SqlPlace) -> None:
        self._registry, self._place = registry, place
        self.dialect: DialectName = place.dialect  # type: ignore[assignment]  # one of DATABASES
        self.timeout_s, self.statements = registry.timeout_s, statements_for(self.dialect)

    def check_usable(self) -> None:
        self._registry.check_usable()

    def call(self, statement: Statement, **values: object) -> Call:
        named = {f"the_{name}": value for name, value in values.items()}
        return Call(statement, {"the_namespace": self._place.namespace, **named})

    def plan(self, commit: Commit) -> CommitPlan:
        return CommitPlan(commit, self._place.namespace, self.statements, self._place.channel)
