"""Functions that a setting names: those of pxrs, and those that installed packages register as entry points.

Only the name is stored and passed on. Every process that needs the function looks it up itself: on another machine, in
a worker that `pxrs worker` starts, in a task of Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

from pxrs.errors import InvalidArgument

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

T = TypeVar("T", bound=Callable[..., object])


def names(ours: Mapping[str, object], entry_point_group: str) -> list[str]:
    """The names that a setting may have: those of pxrs, then those of installed packages in alphabetical order."""
    return list(dict.fromkeys([*ours, *sorted(entry.name for entry in _installed(entry_point_group))]))


def function_named(
    setting: str, name: object, ours: Mapping[str, T], entry_point_group: str, refusal: type[InvalidArgument]
) -> T:
    """The function that the setting names. One of `ours` comes before one of the same name in a package.

    Raises `refusal` if there is none of this name, if it cannot be loaded or called, or if two packages differ on it.
    """
    if isinstance(name, str) and name in ours:
        return ours[name]
    installed = _installed(entry_point_group)
    # Keyed by the object that the entry point refers to: a package that is found twice is no conflict.
    found = {entry.value: entry for entry in installed if entry.name == name}
    if not found:
        choices = ", ".join(names(ours, entry_point_group))
        raise refusal(
            f"{setting} is {name!r}; choose from {choices}, or install the package that provides it (entry point "
            f"{entry_point_group})"
        )
    if len(found) > 1:
        raise refusal(
            f"{setting} {name!r}: installed packages define it differently: {', '.join(sorted(found))}; "
            "remove all but one"
        )
    ((value, entry),) = found.items()
    try:
        function = entry.load()
    except Exception as error:  # whatever the package's code raises
        raise refusal(f"{setting} {name!r}: loading {value} failed: {error!r}") from error
    if not callable(function):
        raise refusal(f"{setting} {name!r}: {value} is a {type(function).__name__}, not a function")
    return cast(T, function)


def _installed(entry_point_group: str) -> EntryPoints:
    from importlib.metadata import entry_points  # takes longer than opening a hub, and few hubs need it

    return entry_points(group=entry_point_group)
