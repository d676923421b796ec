"""How large a file, a class and a function of `src/pxrs` may be.

A longer one says why that is better, in a comment that begins with `# Over the limit:`. The comment stands

- for a file, before its first class or function,
- for a class or function, directly above it (and its decorators), or before its first statement, below its docstring.

What was too large when the tests were written, and is not mended yet, is listed in `KNOWN_...`. Nothing may be added to
these lists. An entry that is no longer needed fails the test too, so that the lists can only become shorter.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

from tests.unit.source_code import SOURCE, paths, trees

FILE_LINES_MAX = 1000
CLASS_METHODS_MAX = 32
FUNCTION_LINES_MAX = 70
WHY = "# Over the limit: "
Function = ast.FunctionDef | ast.AsyncFunctionDef

KNOWN_FILES: set[str] = set()

KNOWN_CLASSES: set[str] = set()
"""`<file>: <class>`."""

KNOWN_FUNCTIONS: set[str] = set()
"""`<file>: <function>`, with the class or function that it is in."""


class Found(NamedTuple):
    """Something that is too large."""

    name: str
    line: int
    size: int


@cache
def files() -> dict[str, list[str]]:
    """The lines of each file, by its path below `src/pxrs`."""
    return {str(path.relative_to(SOURCE)): path.read_text().splitlines() for path in paths()}


@cache
def definitions(file: str) -> list[tuple[str, ast.ClassDef | Function]]:
    """The classes and functions of a file, each with its name and the names around it."""
    return list(_definitions(trees()[SOURCE / file], ""))


def _definitions(node: ast.AST, above: str) -> Iterator[tuple[str, ast.ClassDef | Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield above + child.name, child
            yield from _definitions(child, f"{above}{child.name}.")
        elif not isinstance(child, ast.expr):
            yield from _definitions(child, above)


def first_line(node: ast.ClassDef | Function) -> int:
    """Counted from 1, with the decorators."""
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def says_why(lines: list[str]) -> bool:
    return any(line.strip().startswith(WHY) and len(line.strip()) > len(WHY) for line in lines)


def is_excused(file: str, node: ast.ClassDef | Function) -> bool:
    """Whether a comment at the head of a class or function says why it is over the limit."""
    lines = files()[file]
    above = first_line(node) - 1
    while above > 0 and lines[above - 1].strip().startswith("#"):
        above -= 1
    has_docstring = ast.get_docstring(node) is not None
    body = node.body[1:] if has_docstring else node.body
    begin = node.body[0].end_lineno if has_docstring else node.lineno
    end = body[0].lineno if body else node.end_lineno
    return says_why(lines[above : first_line(node)]) or says_why(lines[(begin or 1) - 1 : end])


def long_files() -> Iterator[tuple[str, Found]]:
    for file, lines in files().items():
        first = min((first_line(node) for _, node in definitions(file)), default=len(lines))
        if len(lines) > FILE_LINES_MAX and not says_why(lines[:first]):
            yield file, Found("file", 1, len(lines))


def large_classes() -> Iterator[tuple[str, Found]]:
    for file in files():
        for name, node in definitions(file):
            if isinstance(node, ast.ClassDef):
                # By name: a property and its setter, or the overloads of a method, are one.
                methods = {each.name for each in node.body if isinstance(each, Function)}
                if len(methods) > CLASS_METHODS_MAX and not is_excused(file, node):
                    yield f"{file}: {name}", Found(name, node.lineno, len(methods))


def long_functions() -> Iterator[tuple[str, Found]]:
    for file in files():
        for name, node in definitions(file):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if isinstance(node, Function) and size > FUNCTION_LINES_MAX and not is_excused(file, node):
                yield f"{file}: {name}", Found(name, node.lineno, size)


def compare(find: Callable[[], Iterator[tuple[str, Found]]], known: set[str], limit: str) -> None:
    found = dict(find())
    new = [
        f"src/pxrs/{key.partition(':')[0]}:{each.line}: {each.name} has {each.size}"
        for key, each in found.items()
        if key not in known
    ]
    assert not new, f"over the limit of {limit}; split it, or say why not ({WHY}...):\n" + "\n".join(new)
    over = sorted(known - found.keys())
    assert not over, "no longer needed, remove it from the list:\n" + "\n".join(over)


def test_no_file_is_too_long() -> None:
    compare(long_files, KNOWN_FILES, f"{FILE_LINES_MAX} lines a file")


def test_no_class_has_too_many_methods() -> None:
    compare(large_classes, KNOWN_CLASSES, f"{CLASS_METHODS_MAX} methods a class")


def test_no_function_is_too_long() -> None:
    compare(long_functions, KNOWN_FUNCTIONS, f"{FUNCTION_LINES_MAX} lines a function")
