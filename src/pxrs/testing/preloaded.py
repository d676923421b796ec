"""What the fork server of `forked.py` imports before it forks. Nothing here may start a thread or open anything.

The client of etcd is left out: grpc must be imported after the fork."""

import functools
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

import typer.main

from pxrs.cli.app import app

OPENED_BY_NAME: Final = ("pxrs.log.directory.log", "pxrs.registry.file.registry")
"""Modules that a hub imports when it is opened."""
OF_EXTRAS: Final = ("pxrs.registry.sql.sqlite", "pxrs.registry.sql.postgresql", "pxrs.registry.zookeeper.registry")
USED_BY_PYARROW: Final = "pandas"
"""`pa.array` imports it where it is installed, in a third of a second: every child that sends a message would."""

for name in OPENED_BY_NAME:
    import_module(name)
for name in (*OF_EXTRAS, USED_BY_PYARROW):
    with suppress(ImportError):  # not installed: a child that needs an extra says so
        import_module(name)

# `app()` builds all commands each time it is called: in a child it takes those that are built here.
typer.main.get_command = functools.cache(typer.main.get_command)
commands: Any = typer.main.get_command(app)
for _ in commands.commands.values():  # imports the module of each command
    pass
commands.commands["tail"].make_context("tail", ["topic"])  # imports what only the parsing of arguments imports
