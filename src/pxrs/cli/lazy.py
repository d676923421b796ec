"""Commands whose modules are imported when they are run.

Importing the modules of all commands takes several times as long as most commands do, and loads pyarrow, which `--help`
and shell completion do without. So `pxrs` has a table of its commands: a name, where its function or `typer.Typer` is,
and the line that `pxrs --help` prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import typer
import typer.main

from pxrs.cli.command import Command, Group


class Lazy(NamedTuple):
    """A command, or a group of commands, that is not imported yet."""

    module: str
    attribute: str
    """The name of the function, or of the `typer.Typer`, in the module."""
    help: str
    """The line of `pxrs --help`; of a group also its description in its own `--help`."""

    def load(self, name: str) -> Any:
        """Import the module and build the command."""
        found = getattr(import_module(self.module), self.attribute)
        holder = typer.Typer(rich_markup_mode=None, add_completion=False)
        holder.callback()(_nothing)  # so that the holder becomes a group also with one command
        if isinstance(found, typer.Typer):
            _use_own_class(found)
            holder.add_typer(found, name=name, help=self.help)
        else:
            holder.command(name, cls=Command)(found)
        # Not `get_command`, which the tests replace by a function that remembers every `typer.Typer`.
        return typer.main.get_group(holder).commands[name]


def _use_own_class(group: typer.Typer) -> None:
    """Have all commands of the group, and of the groups in it, be of the class `Command`."""
    for command in group.registered_commands:
        command.cls = Command
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            _use_own_class(inner.typer_instance)


def _nothing() -> None:
    pass


class _Commands(MutableMapping[str, Any]):
    """Commands by name. A command is loaded when it is looked up, and not when its name is listed."""

    def __init__(self, table: Mapping[str, Lazy]) -> None:
        self._table, self._loaded = table, dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._table[name].load(name)
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._table or name in self._loaded

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._table, *self._loaded]))

    def __len__(self) -> int:
        return len({*self._table, *self._loaded})


class LazyGroup(Group):
    """A group of the commands in `table`, besides those that its `typer.Typer` has."""

    table: ClassVar[Mapping[str, Lazy]] = {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        eager = self.commands
        self.commands = _Commands(self.table)
        self.commands.update(eager)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Print the list of commands without importing them."""
        rows = []
        for name in self.commands:
            known = self.table.get(name)
            rows.append((name, self.commands[name].get_short_help_str() if known is None else known.help))
        with formatter.section("Commands"):
            formatter.write_dl(rows)
