"""The classes of all commands of `pxrs`, and of its groups of commands.

Typer takes the last value of an option that is given twice, without a word: `pxrs tail t --key a --key b` would look
for `b` alone. These classes refuse the second value. An option that may be repeated is declared as a list.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class Command(TyperCommand):
    """A command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        refuse_repeated(self, ctx, args)
        return super().parse_args(ctx, args)


class Group(TyperGroup):
    """A group of commands, which may have options of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        refuse_repeated(self, ctx, args)
        return super().parse_args(ctx, args)


def refuse_repeated(command: TyperCommand | TyperGroup, ctx: Any, args: list[str]) -> None:
    """Raise BadParameter if an option that takes one value is given more than once. A flag may be repeated."""
    if ctx.resilient_parsing:  # the shell asks for completions of a line that is not finished
        return
    _, _, order = command.make_parser(ctx).parse_args(args=[*args])
    taken: list[Any] = []
    for each in order:
        option: Any = each
        if option.param_type_name != "option" or option.multiple or option.is_flag or option.count:
            continue
        if option in taken:
            raise typer.BadParameter("given more than once; it takes one value", ctx=ctx, param=option)
        taken.append(option)
