"""Which package may import which: the table `ROWS`, and the imports of `src/pxrs` as they are.

The tests read every module with `ast`, so that they also see imports inside functions and under `TYPE_CHECKING`. They
fail on:

- an import of a package that stands in the same row or in a higher one (a back arrow);
- a cycle among the modules and packages of one package;
- a name with a leading underscore that a module takes from another one: `from x import _y`, `x._y`, and `value._y` or
  `getattr(value, "_y")` if the module does not define `_y` itself. `self`, `cls` and `super()` are left out: a class
  may use what its base class offers to subclasses.

What was there when the tests were written, and is not mended yet, is listed in `KNOWN_...`. Nothing may be added to
these lists. An entry that is no longer needed fails the test too, so that the lists can only become shorter.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tests.unit.source_code import ROOT, SOURCE, paths, trees

BASE = (
    *("errors", "model", "clock", "arguments", "wording", "attention", "disk", "dropped", "failures"),
    *("grpc_fork", "handler", "hashing", "inotify", "launching", "limited_log", "metrics", "plugins"),
    *("ports", "scheduler", "tracing", "waiting"),
)
HOME = ("hub_record", "belonging", "hub_parts")
HUB = (
    *("hub", "open_hub", "hub_clients", "hub_queues", "hub_sources", "hub_topics"),
    *("opening", "topics", "options", "__init__"),
)
ROWS: tuple[tuple[str, ...], ...] = (
    BASE,
    ("registry", "log"),
    ("remote",),
    ("address",),
    ("events",),
    ("group", "queue", "sources"),
    ("producer",),
    ("consumer", "publishing", "copying"),
    HOME,
    ("upkeep",),
    ("backup",),
    HUB,
    ("server",),
    ("cluster",),
    ("spark", "web"),
    ("cli",),
    ("testing",),
)
"""The packages and modules of `src/pxrs`, the lowest row first. A module imports what is in rows below its own. `BASE`,
`HOME` and `HUB` are rows of single modules, which may import each other as long as there is no cycle."""

PLANNED: set[str] = set()
"""In the table, and not yet in `src/pxrs`. Remove a name from here when it is there."""

KNOWN_BACK_ARROWS: set[str] = set()
"""`<importing module> -> <imported module>`."""

KNOWN_CYCLES: set[str] = set()
"""Packages among whose modules there are cycles."""

KNOWN_UNDERSCORES: set[str] = set()
"""Modules that use underscore names of other modules."""

DOCUMENTED = {
    *("_replace", "_asdict", "_fields", "_make"),  # of named tuples
    *("_exit", "_getframe"),  # of os and sys
}
"""Names with an underscore that the standard library documents."""


class Import(NamedTuple):
    """One import statement of a module, or one of its names."""

    target: str
    line: int


@cache
def modules() -> dict[str, Path]:
    """The path of each module by its dotted name without `pxrs.`: `log` for a package, `__init__` for the root."""
    found = {}
    for path in paths():
        parts = list(path.relative_to(SOURCE).with_suffix("").parts)
        if parts[-1] == "__init__" and len(parts) > 1:
            parts.pop()
        found[".".join(parts)] = path
    return found


@cache
def nodes(module: str) -> tuple[ast.AST, ...]:
    """All of a module's syntax tree."""
    return tuple(ast.walk(trees()[modules()[module]]))


def place(module: str, line: int) -> str:
    return f"{modules()[module].relative_to(ROOT)}:{line}"


def room(module: str) -> str:
    """The package or module directly below `pxrs` that this module belongs to."""
    return module.partition(".")[0]


def find(name: str) -> str | None:
    """The module that a dotted name such as `pxrs.log.batch` means, None if it is none of this package."""
    if name == "pxrs":
        return "__init__"
    name = name.removeprefix("pxrs.") if name.startswith("pxrs.") else ""
    return name if name in modules() else None


def absolute(module: str, statement: ast.ImportFrom) -> str:
    """The module that `from ... import` names, with the dots of a relative import resolved."""
    if not statement.level:
        return statement.module or ""
    is_package = modules()[module].name == "__init__.py"
    parts = ["pxrs", *([] if module == "__init__" else module.split("."))]
    above = statement.level - 1 if is_package else statement.level
    return ".".join([*parts[: len(parts) - above], *filter(None, [statement.module])])


@cache
def imports(module: str) -> tuple[Import, ...]:
    """What a module imports of this package, at any depth of its code."""
    found = []
    for node in nodes(module):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = absolute(module, node)
            names = [f"{above}.{alias.name}" if find(f"{above}.{alias.name}") else above for alias in node.names]
        else:
            continue
        found += [Import(target, node.lineno) for name in names if (target := find(name)) and target != module]
    return tuple(dict.fromkeys(found))


def row_of(name: str) -> int:
    return next(number for number, rooms in enumerate(ROWS) if name in rooms)


def may_import(importing: str, imported: str) -> bool:
    if importing == imported or row_of(imported) < row_of(importing):
        return True
    row = ROWS[row_of(importing)]
    return row in (BASE, HOME, HUB) and imported in row


# Cycles.


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The sets of nodes that reach each other, each sorted."""
    reached = {node: reachable(graph, node) for node in graph}
    found = {
        tuple(sorted(other for other in reached[node] if node in reached.get(other, ())))
        for node in graph
        if node in reached[node]
    }
    return [list(each) for each in sorted(found)]


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for node in graph.get(waiting.pop(), ()):
            if node not in found:
                found.add(node)
                waiting.append(node)
    return found


def children_graphs() -> dict[str, dict[str, set[str]]]:
    """By package ("" is the root): which of its modules and packages imports which other one."""
    graphs: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for module in modules():
        for target, _ in imports(module):
            one, other = path_of(module), path_of(target)
            depth = next(at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
            graphs[".".join(one[:depth])][one[depth]].add(other[depth])
    return graphs


def path_of(module: str) -> list[str]:
    """Its packages and its name; of a package itself, `__init__` is the name."""
    is_package = modules()[module].name == "__init__.py" and module != "__init__"
    return [*module.split("."), "__init__"] if is_package else module.split(".")


# Underscore names.


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in DOCUMENTED


@cache
def defined(module: str) -> frozenset[str]:
    """The private names that a module defines: functions, classes, variables, attributes, slots, parameters."""
    found: set[str] = set()
    for node in nodes(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__slots__":
            found |= {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
    return frozenset(name for name in found if isinstance(name, str) and is_private(name))


@cache
def defined_anywhere() -> frozenset[str]:
    """The private names of all modules. What none of them defines, such as `_jvm`, is of another library."""
    return frozenset().union(*map(defined, modules()))


def is_own(value: ast.expr) -> bool:
    """Whether this is `self`, `cls` or `super()`."""
    if isinstance(value, ast.Call):
        value = value.func
        return isinstance(value, ast.Name) and value.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def foreign_underscores(module: str) -> Iterator[tuple[str, int]]:
    """The private names of other modules of this package that a module uses, and the lines."""
    for node in nodes(module):
        if isinstance(node, ast.ImportFrom):
            if absolute(module, node).partition(".")[0] == "pxrs":
                yield from ((alias.name, node.lineno) for alias in node.names if is_private(alias.name))
            continue
        name = used(node)
        if name is not None and is_private(name) and name in defined_anywhere() and name not in defined(module):
            yield name, node.lineno  # type: ignore[attr-defined]


def used(node: ast.AST) -> str | None:
    """The attribute that an expression names of something that is not `self`."""
    if isinstance(node, ast.Attribute) and not is_own(node.value):
        return node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
        name = node.args[1]
        is_by_name = node.func.id in ("getattr", "setattr", "hasattr", "delattr") and not is_own(node.args[0])
        if is_by_name and isinstance(name, ast.Constant) and isinstance(name.value, str):
            return name.value
    return None


# The tests.


def compare(found: Mapping[str, Iterable[str]], known: set[str], rule: str) -> None:
    """found: by the name that the list of known violations has for them, what they are and where."""
    new = [violation for name in sorted(found.keys() - known) for violation in found[name]]
    assert not new, rule + "\n" + "\n".join(new)
    over = sorted(known - found.keys())
    assert not over, "no longer needed, remove it from the list:\n" + "\n".join(over)


def test_every_module_has_its_row() -> None:
    rooms = {room(module) for module in modules()}
    named = [name for row in ROWS for name in row]
    assert len(named) == len(set(named))
    assert rooms - set(named) == set(), "give it a row in ROWS"
    assert set(named) - rooms == PLANNED, "ROWS names what is not there, or PLANNED what is"


def test_no_import_points_back() -> None:
    found = defaultdict(list)
    for module in modules():
        for target, line in imports(module):
            if not may_import(room(module), room(target)):
                arrow = f"{module} -> {target}"
                found[arrow].append(f"{place(module, line)}: {arrow}")
    compare(found, KNOWN_BACK_ARROWS, "a module imports only what is in the rows of ROWS below its own")


def test_no_package_has_a_cycle_among_its_parts() -> None:
    found = {}
    for package, graph in children_graphs().items():
        if among := cycles(graph):
            found[package or "pxrs"] = [f"{package or 'pxrs'}: {', '.join(each)}" for each in among]
    compare(found, KNOWN_CYCLES, "the parts of a package import each other in a cycle")


def test_no_module_uses_the_underscore_names_of_another() -> None:
    found = defaultdict(list)
    for module in modules():
        for name, line in foreign_underscores(module):
            found[module].append(f"{place(module, line)}: {name}")
    compare(found, KNOWN_UNDERSCORES, "a name with a leading underscore belongs to the module that defines it")


def test_the_graph_in_architecture_is_that_of_the_table() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    (diagram,) = re.findall(r"^## What may import what\n.*?^```mermaid\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert diagram == drawn(), f"ARCHITECTURE.md, 'What may import what', must show:\n{drawn()}"


def drawn() -> str:
    """The table as a Mermaid diagram: a box for each row, the highest first, and an arrow to the row below it."""
    lines = ["flowchart TB"]
    boxes = []
    for number, row in reversed(list(enumerate(ROWS))):
        names = ", ".join("pxrs" if name == "__init__" else name for name in row)
        lines.append(f'    row{number}["{names}"]')
        boxes.append(f"row{number}")
    lines += [f"    {above} --> {below}" for above, below in pairwise(boxes)]
    return "\n".join(lines) + "\n"
